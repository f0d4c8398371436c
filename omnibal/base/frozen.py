"""Base classes of configurations, and bounded number types."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, model_validator

MAX_LAYERS = 1_000  # max layers of a tower; above, the search takes minutes and too much memory
MAX_COUNT = 2**31 - 1  # largest count, as arrays are int32
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Layers = Annotated[int, Field(ge=1, le=MAX_LAYERS)]
Width = Annotated[int, Field(ge=1, le=2**24)]
"""Matrix width; products of two widths and all layers stay exact."""
Rate = Annotated[float, Field(ge=1e-9, le=1e18)]
"""Rate of a device, link or kernel; times and their sums stay finite."""
Share = Annotated[float, Field(ge=1e-9, le=1)]


class Numbered(BaseModel):
    """Model that rejects booleans for numbers."""

    @model_validator(mode="wrap")
    @classmethod
    def _no_truth_values_as_numbers(
        cls, given: Any, handler: ModelWrapValidatorHandler[Self]
    ) -> Self:
        made = handler(given)
        if isinstance(given, dict):
            for name, value in given.items():
                if _is_taken_for_number(value, made.__dict__.get(name)):
                    raise ValueError(f"{name} must be a number (given: {value!r})")
        return made


class Frozen(Numbered):
    """Base of configurations: immutable; rejects unknown keys and NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def written_unless(default: Any, description: str | None = None) -> Any:
    """Make a field that is written only if it differs from its default."""
    return Field(
        default=default, exclude_if=lambda value: value == default, description=description
    )


def _is_taken_for_number(given: Any, made: Any) -> bool:
    """Whether a boolean, perhaps nested, was parsed as a number."""
    if isinstance(given, bool):
        return isinstance(made, int | float) and not isinstance(made, bool)
    if isinstance(given, list | tuple) and isinstance(made, list | tuple):
        return any(map(_is_taken_for_number, given, made))
    if isinstance(given, dict) and isinstance(made, dict):
        return any(_is_taken_for_number(value, made.get(key)) for key, value in given.items())
    return False
