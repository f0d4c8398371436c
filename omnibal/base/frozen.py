"""Base classes of configurations, and bounded numbers."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, model_validator

MAX_LAYERS = 1_000  # of a tower; with more, the stage search takes minutes and too much memory
MAX_COUNT = 2**31 - 1  # as lengths and caps are int32 arrays
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Layers = Annotated[int, Field(ge=1, le=MAX_LAYERS)]
Width = Annotated[int, Field(ge=1, le=2**24)]  # width^2 x layers fits an int64
Rate = Annotated[float, Field(ge=1e-9, le=1e18)]  # times and their sums stay finite
Fraction = Annotated[float, Field(ge=1e-9, le=1)]


class Numbered(BaseModel):
    """Model that rejects booleans given for numbers, which pydantic would convert."""

    @model_validator(mode="wrap")
    @classmethod
    def _no_booleans_as_numbers(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        model = handler(given)
        if isinstance(given, dict):
            for name, value in given.items():
                if _has_boolean_for_number(value, model.__dict__.get(name)):
                    raise ValueError(f"{name} must be a number (given: {value!r})")
        return model


class Frozen(Numbered):
    """Base of configurations: immutable; rejects unknown keys, NaN and infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def written_unless(default: Any) -> Any:
    """Return a pydantic field that is dumped only if it differs from its default."""
    # Plans are keyed by hashes of dumps, so a new field must not change dumps of older plans.
    return Field(default=default, exclude_if=lambda value: value == default)


def _has_boolean_for_number(given: Any, parsed: Any) -> bool:
    if isinstance(given, bool):
        return isinstance(parsed, int | float) and not isinstance(parsed, bool)
    if isinstance(given, list | tuple) and isinstance(parsed, list | tuple):
        return any(map(_has_boolean_for_number, given, parsed))
    if isinstance(given, dict) and isinstance(parsed, dict):
        return any(_has_boolean_for_number(value, parsed.get(key)) for key, value in given.items())
    return False
