"""Tables of a hub's `config.json`: every key is used, known to have no effect, or refused by name.

Fields are used keys. All else that is known of a class's table is in its section of tables.toml.
Tables of some releases are read leniently: unknown keys are ignored.
"""

import re
from collections import ChainMap
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from omnibal.base.errors import UserError
from omnibal.base.files import complaint, read_toml_model
from omnibal.base.frozen import Frozen, Numbered

T = TypeVar("T", bound="HubTable")
_LENIENT = "lenient"


class Keys(Frozen):
    """Section of tables.toml."""

    defaults: dict[str, Any] = Field(default={})
    names: dict[str, str] = Field(default={})
    must: dict[str, list[Any]] = Field(default={})
    ignored: frozenset[str] = frozenset()
    parts: dict[str, Any] = Field(default={})
    fields: dict[str, str] = Field(default={})


SECTIONS = read_toml_model(
    dict[str, Keys], Path(__file__).with_name("tables.toml"), "install omnibal again"
)


def _none_of_a_release(given: Any, info: ValidationInfo) -> Any:
    """Validate a dropout; lenient tables drop it, as it belongs to the release's training."""
    return 0.0 if info.context == _LENIENT else given


NoDropout = Annotated[float, BeforeValidator(_none_of_a_release), Field(ge=0, le=0)]
"""Dropout, which must be 0, as its memory is not counted."""
_TEXT_MAKERS = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "Model")
_NAMED_WITHOUT_EFFECT = re.compile(
    # Token ids, and notes of a tuning tool.
    r".*_token_(id|ids|index)|suppress_tokens|begin_suppress_tokens|unsloth_.*"
)


class HubTable(Numbered):
    """A table of `config.json`; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, given: Any, info: ValidationInfo) -> Any:
        if not isinstance(given, dict):
            raise ValueError("must be a table of keys and values")
        if info.context != _LENIENT:
            _refuse_variants(given)
            cls._refuse_unknown(given)
        keys, used = cls.section(), dict[str, Any]()
        for key, value in given.items():
            name = keys.names.get(key, key)
            if name in used and used[name] != value:
                raise ValueError(f"{key} and another spelling of it differ; give one of them")
            if name in cls.model_fields:
                used[name] = value
            elif name in keys.must and value not in keys.must[name]:
                values = [_as_json(repr(known)) for known in keys.must[name]]
                expected = " or ".join(filter(None, (", ".join(values[:-1]), values[-1])))
                raise ValueError(f"{name} {_as_json(f'{value!r:.80}')} must be {expected}")
        return keys.defaults | used

    @classmethod
    @cache
    def section(cls) -> Keys:
        """Return what tables.toml says of the class; subclasses override bases."""
        sections = [SECTIONS.get(base.__name__, Keys()) for base in reversed(cls.__mro__)]
        names = ("defaults", "names", "must", "parts", "fields")
        joined = {name: dict(ChainMap(*(vars(s)[name] for s in sections[::-1]))) for name in names}
        return Keys(**joined, ignored=frozenset().union(*(s.ignored for s in sections)))

    @property
    def parts(self) -> dict[str, Any]:
        """Fields of a configuration that the family always has, or has as a key of the table."""
        keys, values = self.section(), dict(self)
        return keys.parts | {field: values[key] for field, key in keys.fields.items()}

    @classmethod
    def unknown_keys(cls, given: Mapping[str, Any]) -> list[str]:
        """Keys that are neither used nor known to have no effect."""
        keys = cls.section()
        known = {*cls.model_fields, *keys.must, *keys.ignored}
        return [
            key
            for key in given
            if keys.names.get(key, key) not in known
            and key not in known
            and _NAMED_WITHOUT_EFFECT.fullmatch(key) is None
        ]

    @classmethod
    def _refuse_unknown(cls, given: Mapping[str, Any]) -> None:
        for key in cls.unknown_keys(given):
            known = [*cls.model_fields, *cls.section().must]
            near = get_close_matches(key, known, n=1, cutoff=0.8)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(
                f"{key} is not understood{hint}; the model must be one that its class in "
                "Transformers describes without this key"
            )


def _refuse_variants(given: Mapping[str, Any]) -> None:
    architectures = given.get("architectures") or []
    if isinstance(architectures, list):
        for name in architectures:
            if not str(name).endswith(_TEXT_MAKERS):
                raise ValueError(
                    f"architectures has {name}, which does not generate text; it must be a "
                    "...ForCausalLM or ...ForConditionalGeneration"
                )


def as_table(kind: type[T], given: Any, where: str, *, lenient: bool = False) -> T:
    """Validate a table of a file, which `where` names in messages.

    If `lenient`, unknown keys and the release's dropouts are ignored.
    """
    try:
        context = _LENIENT if lenient else None
        return kind.model_validate({} if given is None else given, context=context)
    except ValidationError as error:
        said = what_is_wrong(error)
        raise UserError(
            f"{where}{said}; docs/models.md says which models can be planned"
        ) from error


def what_is_wrong(of: ValidationError) -> str:
    """Message with the first wrong key, its value and the requirement."""
    error = of.errors()[0]
    place = "".join(f": {part}" for part in error["loc"])
    given, kind = f"{error['input']!r:.80}", error["type"]
    if kind == "literal_error":
        return f"{place} {_as_json(given)} must be {_as_json(error['ctx']['expected'])}"
    shown = "" if kind in ("value_error", "missing") else f" (given: {given})"
    return f"{place}: {complaint(error)}{shown}"


def _as_json(value: str) -> str:
    return value.lower() if value in ("True", "False") else value
