"""Tables of a hub's `config.json`. Keys neither inert nor a class's field nor in its section of
tables.toml are errors; tables of some releases are read leniently, without unknown keys.
"""

import re
from collections import ChainMap
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

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
from omnibal.model.limits import words

T = TypeVar("T", bound="HubTable")
FieldKeys = Literal["fields", "experts", "latent", "linear"]  # sections with keys by field
_LENIENT = "lenient"  # pydantic context: unknown keys are dropped


class Keys(Frozen):
    """Section of tables.toml; comments at the top of that file describe the fields."""

    defaults: dict[str, Any] = Field(default={})
    names: dict[str, str] = Field(default={})
    must: dict[str, list[Any]] = Field(default={})
    ignored: frozenset[str] = frozenset()
    parts: dict[str, Any] = Field(default={})
    fields: dict[str, str] = Field(default={})
    experts: dict[str, str] = Field(default={})
    latent: dict[str, str] = Field(default={})
    linear: dict[str, str] = Field(default={})


SECTIONS = read_toml_model(
    dict[str, Keys], Path(__file__).with_name("tables.toml"), "install omnibal again"
)


# Dropout must be 0, as memory of its masks is not counted. A lenient table sets it to 0, as a
# release's dropout belongs to its own training.
_KEEP_IF_STRICT = BeforeValidator(lambda value, info: 0.0 if info.context == _LENIENT else value)
NoDropout = Annotated[float, _KEEP_IF_STRICT, Field(ge=0, le=0)]
_GENERATIVE_SUFFIXES = (
    "ForCausalLM",
    "ForConditionalGeneration",
    "ChatModel",
    "Model",
)  # others write no text
_INERT_KEYS = re.compile(
    # Token ids, and keys that a fine-tuning tool adds.
    r".*_token_(id|ids|index)|suppress_tokens|begin_suppress_tokens|unsloth_.*"
)


class HubTable(Numbered):
    """Table of `config.json`; unknown keys are errors, unless read by a lenient `as_table`."""

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
                raise ValueError(f"{key} and another spelling of it differ; drop either")
            if name in keys.must and value not in keys.must[name]:
                expected = words([_as_json(repr(known)) for known in keys.must[name]], "or")
                raise ValueError(f"{name} {_as_json(f'{value!r:.80}')} must be {expected}")
            if name in cls.model_fields:
                used[name] = value
        return keys.defaults | used

    @classmethod
    @cache
    def section(cls) -> Keys:
        """Return the class's section of tables.toml, joined with its bases'."""
        # Sections of subclasses override, so they come first in a ChainMap.
        sections = [SECTIONS.get(base.__name__, Keys()) for base in reversed(cls.__mro__)]
        names = Keys.model_fields.keys() - {"ignored"}
        joined = {name: dict(ChainMap(*(vars(s)[name] for s in sections[::-1]))) for name in names}
        return Keys(**joined, ignored=frozenset().union(*(s.ignored for s in sections)))

    @property
    def parts(self) -> dict[str, Any]:
        """Fields of a LanguageConfig or encoder: the family's constants, the table's values."""
        return self.section().parts | self.fields_of("fields")

    def fields_of(self, config: FieldKeys) -> dict[str, Any]:
        """Return fields of a configuration from the table's values."""
        values = dict(self)
        return {field: values[key] for field, key in vars(self.section())[config].items()}

    @classmethod
    def entries_of(cls, config: Frozen, name: FieldKeys = "fields") -> dict[str, Any]:
        """Return a configuration's fields as a table's entries: the inverse of `fields_of`."""
        values = dict(config)
        return {key: values[field] for field, key in vars(cls.section())[name].items()}

    @classmethod
    def unknown_keys(cls, given: Mapping[str, Any]) -> list[str]:
        """Return keys that are neither fields, nor in the section, nor without effect."""
        keys = cls.section()
        known = {*cls.model_fields, *keys.must, *keys.ignored}
        return [
            key
            for key in given
            if keys.names.get(key, key) not in known
            and key not in known
            and _INERT_KEYS.fullmatch(key) is None
        ]

    @classmethod
    def _refuse_unknown(cls, given: Mapping[str, Any]) -> None:
        for key in cls.unknown_keys(given):
            known = [*cls.model_fields, *cls.section().must]
            near = get_close_matches(key, known, n=1, cutoff=0.8)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"{key} is not understood{hint}; remove it if Transformers ignores it")


def _refuse_variants(given: Mapping[str, Any]) -> None:
    architectures = given.get("architectures") or []
    if isinstance(architectures, list):
        for name in architectures:
            if not str(name).endswith(_GENERATIVE_SUFFIXES):
                raise ValueError(f"architectures has {name}, which does not generate text")


def as_table(kind: type[T], given: Any, where: str, *, lenient: bool = False) -> T:
    """Return `given` as a table of type `kind`, or raise UserError, which begins with `where`.

    If `lenient`, unknown keys, architectures and the release's dropouts are ignored.
    """
    try:
        context = _LENIENT if lenient else None
        return kind.model_validate({} if given is None else given, context=context)
    except ValidationError as error:
        raise UserError(
            f"{where}{describe_error(error)}; docs/models.md says which models can be planned"
        ) from error


def describe_error(errors: ValidationError) -> str:
    """Return ": KEY" with requirement and value of the first wrong key, for an error message."""
    error = errors.errors()[0]
    place = "".join(f": {part}" for part in error["loc"])
    given, kind = f"{error['input']!r:.80}", error["type"]
    if kind == "literal_error":
        return f"{place} {_as_json(given)} must be {_as_json(error['ctx']['expected'])}"
    shown = "" if kind in ("value_error", "missing") else f" (given: {given})"
    return f"{place}: {complaint(error)}{shown}"


def _as_json(value: str) -> str:
    return value.lower() if value in ("True", "False") else value
