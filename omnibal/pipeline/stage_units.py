"""A pipeline stage: its units of the model and its recomputed layers.

Units are written as "vision embed", "projector" or "head", layers by their index in a tower:
"vision 7" or "vision 0..22" (inclusive).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import PlainSerializer, PlainValidator

from omnibal.base.frozen import MAX_LAYERS, Frozen
from omnibal.model.units import HEAD, LANGUAGE

_EMBED, _PROJECTOR = " embed", " projector"
_LAYERS = re.compile(r"(.+) (\d+)(?:\.\.(\d+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Span:
    """One unit of the model that is no layer, or consecutive layers of a tower."""

    name: str  # unit name, such as "vision embed" or "head"; for layers, the tower's name
    layers: range | None = None  # layer indices in the tower, or None if not a layer

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a unit or layers, such as "head" or "vision 0..22"."""
        text = " ".join(text.split())
        match = _LAYERS.fullmatch(text)
        if match is None:
            return cls(text)
        tower, first, last = match.groups()
        layers = range(int(first), int(last or first) + 1)
        if not layers or layers.stop > MAX_LAYERS:
            raise ValueError(
                f"{text!r} must name layers from a first to a last one, both below {MAX_LAYERS:,}"
            )
        return cls(tower, layers)

    def __str__(self) -> str:
        if self.layers is None:
            return self.name
        first, last = self.layers[0], self.layers[-1]
        return f"{self.name} {first}..{last}" if last > first else f"{self.name} {first}"

    def __len__(self) -> int:
        return 1 if self.layers is None else len(self.layers)

    @property
    def units(self) -> tuple["Span", ...]:
        """One span per unit."""
        if self.layers is None:
            return (self,)
        return tuple(Span(self.name, range(layer, layer + 1)) for layer in self.layers)

    @property
    def part(self) -> str:
        """Part of the model that the units belong to, trained or frozen as a whole."""
        if self.layers is not None:
            return self.name
        if self.name == HEAD:
            return LANGUAGE
        if self.name.endswith(_PROJECTOR):
            return self.name.replace(_PROJECTOR, "_projector")
        return self.name.removesuffix(_EMBED)


def merge_spans(units: Iterable[Span]) -> tuple[Span, ...]:
    """Return units in their order, with consecutive layers of a tower merged."""
    spans: list[Span] = []
    for span in units:
        last = spans[-1] if spans else Span("")
        if (
            span.layers is not None
            and last.layers is not None
            and (last.name, last.layers.stop) == (span.name, span.layers.start)
        ):
            spans[-1] = Span(span.name, range(last.layers.start, span.layers.stop))
        else:
            spans.append(span)
    return tuple(spans)


def _parse_span(value: Any) -> Span:
    if isinstance(value, Span):
        return value
    if not isinstance(value, str) or not value.strip():
        raise ValueError('must be words such as "vision embed", "vision 0..22" or "head"')
    return Span.parse(value)


SpanText = Annotated[Span, PlainValidator(_parse_span), PlainSerializer(str, return_type=str)]
"""A span that JSON has as text."""


class Stage(Frozen):
    """A contiguous run of the model's units, in model order."""

    units: tuple[SpanText, ...]
    recompute: tuple[SpanText, ...] = ()  # layers with activation recomputation

    @classmethod
    def parse(cls, *units: str, recompute: Sequence[str] = ()) -> Self:
        """Make a stage from texts, such as "vision embed", "vision 0..22" or "head"."""
        return cls(units=tuple(map(Span.parse, units)), recompute=tuple(map(Span.parse, recompute)))

    def layers(self, tower: str) -> range:
        """Return the layer indices of a tower, if in one run. Empty if the stage has none."""
        held = [span.layers for span in self.units if span.name == tower and span.layers]
        return range(held[0].start, held[-1].stop) if held else range(0)

    def number_of_layers(self, tower: str | None = None) -> int:
        """Return the stage's number of layers of a tower, or of all, in one run or several."""
        own = (span.layers for span in self.units if span.layers and tower in (None, span.name))
        return sum(map(len, own))

    def recomputed_in(self, tower: str) -> tuple[int, ...]:
        """Return the recomputed layer indices of a tower."""
        spans = (span.layers for span in self.recompute if span.name == tower and span.layers)
        return tuple(layer for layers in spans for layer in layers)

    def holds(self, unit: str) -> bool:
        """Return whether the stage holds a non-layer unit, such as "vision embed"."""
        return Span(unit) in self.units

    @property
    def parts(self) -> frozenset[str]:
        """Parts of the model with units in this stage."""
        return frozenset(span.part for span in self.units)

    @property
    def recomputed_layers(self) -> int:
        """Number of recomputed layers of all towers."""
        return sum(map(len, self.recompute))
