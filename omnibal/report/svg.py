"""SVG elements for the report and its pictures: scales, axes, lines, dots, bars.

Colours are classes of report.css, so one drawing serves light, dark and print. Coordinates are
rounded to 0.1, which keeps pages small and equal inputs equal bytes.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np

from omnibal.report.formatting import escape, tick

Value = TypeVar("Value", float, np.ndarray)
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 28, 44
"""Margins around the plotting area, wide enough for labels at a phone's larger font."""
_LABELLED_ROW = 13.0
"""Least height of a row, in pixels, at which every row has a label."""
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values in [low, high] linearly to coordinates in [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: Value) -> Value:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Multiples of 1, 2 or 5 times a power of ten inside the range, about `count` of them."""
        span = self.high - self.low
        if span <= 0 or not math.isfinite(span):
            return [self.low]
        rough = span / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def text(x: float, y: float, content: object, css: str = "label") -> str:
    """Text at a point, as an SVG element."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css}">{escape(content)}</text>'


def rect(x: float, y: float, width: float, height: float, css: str, tip: str = "") -> str:
    """A box; `tip` is what a pointer resting on it shows."""
    box = f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}"'
    if tip:
        return f'{box} class="{css}"><title>{escape(tip)}</title></rect>'
    return f'{box} class="{css}"/>'


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    """Line between two points, as an SVG element."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def polyline(xs: np.ndarray, ys: np.ndarray, css: str) -> str:
    """Line through points [n], as an SVG element."""
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    return f'<polyline points="{points}" class="{css}"/>'


def dots(xs: np.ndarray, ys: np.ndarray, css: str) -> str:
    """One path of zero-length strokes: the round cap is the dot."""
    path = "".join(f"M{x:.1f},{y:.1f}h0" for x, y in zip(xs, ys, strict=True))
    return f'<path d="{path}" class="{css}"/>'


def drawing(width: float, height: float, label: str, body: Iterable[str], css: str = "") -> str:
    """An `svg` element that the page may scale; `label` says in words what it shows."""
    return (
        f'<svg class="{css}" role="img" aria-label="{escape(label)}" width="{width:g}" '
        f'viewBox="0 0 {width:g} {height:g}">{"".join(body)}</svg>'
    )


def document(
    title: str, width: float, height: float, style: str, body: Iterable[str], defs: str = ""
) -> str:
    """A self-contained SVG file; `style` has a class `paper` for the background."""
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}" '
        f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}">'
        f"<title>{escape(title)}</title>\n<style>{style}</style>{defs}"
        f"{rect(0, 0, width, height, 'paper')}\n{''.join(body)}</svg>\n"
    )
    # A name may hold characters that XML has no way to write.
    return _NOT_XML.sub("?", svg)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """A plotting area with its two scales; y grows upwards."""

    x: Scale
    y: Scale
    width: float
    height: float

    @staticmethod
    def over(
        x_range: tuple[float, float],
        y_range: tuple[float, float],
        width: float = 520,
        height: float = 270,
    ) -> "Plot":
        """Make a plot of these ranges of data, of a width and height in pixels."""
        return Plot(
            x=Scale(*x_range, LEFT, width - RIGHT),
            y=Scale(*y_range, height - BOTTOM, TOP),
            width=width,
            height=height,
        )

    def axes(self, x_title: str, y_title: str) -> str:
        """Grid lines, tick labels and titles."""
        parts = []
        for value in self.y.ticks():
            at = self.y(value)
            parts.append(line(self.x.start, at, self.x.end, at, "grid"))
            parts.append(text(self.x.start - 6, at + 4, tick(value), "label end"))
        for value in self.x.ticks():
            at = self.x(value)
            parts.append(text(at, self.y.start + 17, tick(value), "label middle"))
        parts.append(line(self.x.start, self.y.start, self.x.end, self.y.start, "axis"))
        middle = (self.x.start + self.x.end) / 2
        parts.append(text(middle, self.height - 6, x_title, "label middle"))
        parts.append(text(4, TOP - 14, y_title))
        return "".join(parts)


def padded(values: np.ndarray, share: float = 0.04) -> tuple[float, float]:
    """Range of the values with a little air; a single value gets a range around it."""
    low, high = float(values.min()), float(values.max())
    air = (high - low) * share or abs(high) * 0.1 or 1.0
    return low - air, high + air


def extremes(values: np.ndarray, buckets: int) -> np.ndarray:
    """Indices of the smallest and largest value of every bucket: fewer points, same outline."""
    if len(values) <= 2 * buckets:
        return np.arange(len(values))
    bounds = np.linspace(0, len(values), buckets + 1).astype(int)
    picked: list[int] = []
    for start, end in pairwise(bounds):
        part = values[start:end]
        picked += [start + int(part.argmin()), start + int(part.argmax())]
    return np.unique(picked)


def moving_mean(values: np.ndarray, radius: int) -> np.ndarray:
    """Mean over up to `radius` neighbours on each side, fewer at the ends."""
    total = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    index = np.arange(len(values))
    low, high = np.maximum(index - radius, 0), np.minimum(index + radius + 1, len(values))
    return (total[high] - total[low]) / (high - low)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Labelled rows of bars under each other, over one horizontal axis."""

    x: Scale
    top: float
    pitch: float
    """From the top of a row to that of the next, in pixels."""
    count: float
    gap: float = 4.0
    """Part of the pitch that no bar fills."""

    @property
    def bottom(self) -> float:
        """Bottom of the last row."""
        return self.top + self.pitch * self.count

    def middle(self, row: float) -> float:
        """Baseline of text in the middle of a row."""
        return self.top + self.pitch * (row + 0.5) + 4

    def axis(self, title: str, ticks: int = 5, unit: float = 1.0) -> str:
        """Grid lines through all rows; below them values in the unit, and left of these a title."""
        parts = [text(self.x.start - 14, self.bottom + 17, title, "label end")]
        for value in self.x.ticks(ticks):
            parts.append(self.mark(value, "grid"))
            at = self.x(value)
            parts.append(text(at, self.bottom + 17, tick(value / unit), "label middle"))
        return "".join(parts)

    def label(self, row: float, name: str) -> str:
        """The name of a row, left of the axis."""
        return text(self.x.start - 8, self.middle(row), name, "label end")

    def labels(self, names: Sequence[str]) -> str:
        """Names of all rows; of rows too low for text, those of the first and the last."""
        rows = range(len(names)) if self.pitch >= _LABELLED_ROW else {0, len(names) - 1}
        return "".join(self.label(row, names[row]) for row in sorted(rows))

    def bar(
        self, row: float, start: float, end: float, css: str, tip: str = "", apart: float = 0.0
    ) -> str:
        """A bar between two values; `apart` pixels at its end keep equal neighbours apart."""
        left, y = self.x(start), self.top + self.pitch * row + self.gap / 2
        return rect(left, y, self.x(end) - left - apart, self.pitch - self.gap, css, tip)

    def stack(self, row: float, parts: Sequence[tuple[float, str, str]]) -> str:
        """Bars one after another from the axis' low end; each part is (value, class, tip)."""
        drawn, at = [], self.x.low
        for value, css, tip in parts:
            if value > 0:
                drawn.append(self.bar(row, at, at + value, css, tip))
            at += value
        return "".join(drawn)

    def mark(self, value: float, css: str) -> str:
        """Vertical line through all rows at a value."""
        return line(self.x(value), self.top - 4, self.x(value), self.bottom + 4, css)


def legend(x: float, y: float, keys: Iterable[tuple[str, str]]) -> str:
    """Keys of (class, meaning) in a line."""
    parts = []
    for css, meaning in keys:
        parts += [rect(x, y - 11, 13, 13, css), text(x + 20, y, meaning)]
        x += 48 + 6.2 * len(meaning)
    return "".join(parts)
