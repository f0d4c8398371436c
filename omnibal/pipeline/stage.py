"""A pipeline stage in words: the units of the model that it holds, and the layers it recomputes.

A unit is written as "vision embed", "projector" or "head", and layers by their numbers within their
tower, from 0: "vision 7", or "vision 0..22" for all from 0 to 22.
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
    """One unit of the model, or consecutive layers of one of its towers."""

    name: str
    """Name of the unit, such as "vision embed" or "head"; of layers, the name of their tower."""
    layers: range | None = None
    """Numbers of the layers within their tower; None for a unit that is not a layer."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a unit or layers from words."""
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
        """Each unit by itself."""
        if self.layers is None:
            return (self,)
        return tuple(Span(self.name, range(layer, layer + 1)) for layer in self.layers)

    @property
    def part(self) -> str:
        """Part of the model that these units are of, and are trained or frozen with."""
        if self.layers is not None:
            return self.name
        if self.name == HEAD:
            return LANGUAGE
        if self.name.endswith(_PROJECTOR):
            return self.name.replace(_PROJECTOR, "_projector")
        return self.name.removesuffix(_EMBED)


def joined(units: Iterable[Span]) -> tuple[Span, ...]:
    """Spans in the same order, with each layer joined to the one before it in its tower."""
    spans: list[Span] = []
    for span in units:
        before = spans[-1] if spans else None
        if (
            before is not None
            and span.layers is not None
            and before.layers is not None
            and (before.name, before.layers.stop) == (span.name, span.layers.start)
        ):
            spans[-1] = Span(span.name, range(before.layers.start, span.layers.stop))
        else:
            spans.append(span)
    return tuple(spans)


def _read(given: Any) -> Span:
    if isinstance(given, Span):
        return given
    if not isinstance(given, str) or not given.strip():
        raise ValueError('must be words such as "vision embed", "vision 0..22" or "head"')
    return Span.parse(given)


Words = Annotated[Span, PlainValidator(_read), PlainSerializer(str, return_type=str)]
"""A span that is written as words."""


class Stage(Frozen):
    """A contiguous run of the model's units, in model order."""

    units: tuple[Words, ...]
    recompute: tuple[Words, ...] = ()
    """Layers of the stage whose activations are recomputed in the backward pass."""

    @classmethod
    def of(cls, *units: str, recompute: Sequence[str] = ()) -> Self:
        """Make a stage from words, such as "vision embed", "vision 0..22" or "head"."""
        return cls(units=tuple(map(Span.parse, units)), recompute=tuple(map(Span.parse, recompute)))

    def layers(self, tower: str) -> range:
        """Numbers of the tower's layers that the stage holds; empty if there are none."""
        held = [span.layers for span in self.units if span.name == tower and span.layers]
        return range(held[0].start, held[-1].stop) if held else range(0)

    def number_of_layers(self, tower: str) -> int:
        """Number of the tower's layers that the stage holds, in one run or in several."""
        return sum(len(span.layers) for span in self.units if span.name == tower and span.layers)

    def recomputed(self, tower: str) -> tuple[int, ...]:
        """Numbers of the tower's layers that the stage recomputes."""
        spans = (span.layers for span in self.recompute if span.name == tower and span.layers)
        return tuple(layer for layers in spans for layer in layers)

    def holds(self, unit: str) -> bool:
        """Whether the stage holds a unit that is not a layer, such as "vision embed"."""
        return Span(unit) in self.units

    @property
    def parts(self) -> frozenset[str]:
        """Parts of the model that have a unit in this stage."""
        return frozenset(span.part for span in self.units)

    @property
    def size(self) -> int:
        """Number of units."""
        return sum(map(len, self.units))

    @property
    def layer_count(self) -> int:
        """Number of layers of all towers."""
        return sum(len(span.layers) for span in self.units if span.layers)

    @property
    def recomputed_layers(self) -> int:
        """Number of layers of all towers whose activations are recomputed."""
        return sum(map(len, self.recompute))
