"""SVG files of panels under each other, on one time axis, each with its key figures below."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omnibal.report.formatting import number
from omnibal.report.svg import Rows, Scale, document, legend, text

WIDTH, MARGIN = 1100, 28  # pixels: a picture that pages show without shrinking it
FIRST_PANEL = 106.0
"""Top of the first panel, below the heading."""
_LEFT, _RIGHT = 92, 1000
"""Ends of the time axis; the end of a panel's last step is printed right of it."""
_BELOW = 86.0
"""Height of a panel's key figures, and the space up to the next panel."""
_WAITING = (
    '<defs><pattern id="waiting" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="5" height="5" class="blank"/>'
    '<line x1="0" y1="0" x2="0" y2="5" class="stripe"/></pattern></defs>'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """Rows of bars with a heading, and the time at which the last of them ends."""

    heading: str
    note: str
    rows: Rows
    names: Sequence[str]
    """Names of the rows."""
    bars: Iterable[str]
    """SVG elements on the rows."""
    end_ms: float
    figures: Sequence[tuple[str, str]]
    """Key figures as (value, what it is)."""
    css: str = ""

    def drawn(self, top: float) -> str:
        """The panel, from `top` on downwards."""
        rows, (unit, unit_ms) = self.rows, time_unit(self.rows.x.high)
        end, middle = rows.x(self.end_ms), (rows.top + rows.bottom) / 2
        parts = [
            text(MARGIN, 14, self.heading, "heading"),
            text(MARGIN, 32, self.note),
            rows.axis(f"time, {unit}", 10, unit_ms),
            rows.labels(self.names),
            *self.bars,
            rows.mark(self.end_ms, "last"),
            text(end + 7, middle + 5, f"{number(self.end_ms / unit_ms)} {unit}", "value"),
        ]
        for place, (value, what) in enumerate(self.figures):
            at = _LEFT + 960 / len(self.figures) * place
            parts += [text(at, rows.bottom + 42, value, "value"), text(at, rows.bottom + 58, what)]
        return f'<g class="panel {self.css}" transform="translate(0 {top:g})">{"".join(parts)}</g>'


def time_axis(longest_ms: float) -> Scale:
    """The axis of all panels, whose longest ends then."""
    return Scale(0, longest_ms, _LEFT, _RIGHT)


def time_unit(longest_ms: float) -> tuple[str, float]:
    """The unit of an axis, and its ms."""
    return ("s", 1000.0) if longest_ms >= 5000 else ("ms", 1.0)


def heading(title: str, subtitle: str, keys: Iterable[tuple[str, str]], note: str) -> str:
    """Title, subtitle and keys of (class, meaning), with a note at their right."""
    lines = text(MARGIN, 36, title, "title") + text(MARGIN, 58, subtitle)
    mark = text(WIDTH - MARGIN, 84, note, "mark end") if note else ""
    return lines + legend(MARGIN, 84, keys) + mark


def stacked(panels: Iterable[Panel]) -> tuple[list[str], float]:
    """The panels under each other, and where the picture goes on below them."""
    parts, top = [], FIRST_PANEL
    for panel in panels:
        parts.append(panel.drawn(top))
        top += panel.rows.bottom + _BELOW
    return parts, top


def picture(title: str, height: float, parts: Iterable[str]) -> str:
    """The text of the file."""
    folder = Path(__file__).parent
    style = "".join((folder / name).read_text() for name in ("drawing.css", "panels.css"))
    return document(title, WIDTH, height, style, parts, _WAITING)
