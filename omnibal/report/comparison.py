"""Comparison of steps of the same samples on one time axis, as a self-contained SVG file."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omnibal.pipeline.schedules import Pass
from omnibal.pipeline.simulate import Timeline
from omnibal.report.svg import Scale, document, line, rect, text
from omnibal.report.text import milliseconds, number, percent, tick

_WIDTH, _MARGIN = 1100, 28
_LEFT, _RIGHT = 92, 1004
"""Ends of the time axis; the end of the step is printed right of it."""
_FIRST_PANEL, _PANEL_GAP = 96.0, 30.0
_FIRST_ROW = 46.0
"""Top of the first row, below the heading and the note of a panel."""
_ROW, _ROWS_HEIGHT = 30.0, 300.0
"""Height of a stage's row, and most height of all rows together."""
_LABELLED_ROW = 14.0
"""Least row height at which every row has a label."""
_FIGURES_AT = (92, 282, 572, 782)
_STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fdfdfc; --ink: #1d2125; --soft: #565d64; --rule: #dcddda;
  --forward: #2f8a68; --backward: #7a68b0; --recompute: #cf7d22; --wait: #e6e8e9;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15181b; --ink: #e4e6e8; --soft: #a3abb2; --rule: #363c41;
    --forward: #58ad8b; --backward: #9283cc; --recompute: #e39a4a; --wait: #2a2f34;
  }
}
svg { background: var(--paper); }
.paper { fill: var(--paper); }
text { font: 12px system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif;
  font-variant-numeric: tabular-nums; fill: var(--soft); }
text.title { font-size: 20px; font-weight: 600; fill: var(--ink); }
text.heading { font-size: 15px; font-weight: 600; fill: var(--ink); }
text.value { font-size: 17px; font-weight: 600; fill: var(--ink); }
.end { text-anchor: end; }
.middle { text-anchor: middle; }
rect.forward { fill: var(--forward); }
rect.backward { fill: var(--backward); }
rect.recompute { fill: var(--recompute); }
rect.wait { fill: var(--wait); }
line.grid { stroke: var(--rule); stroke-width: 1; }
line.last { stroke: var(--ink); stroke-width: 1.6; }
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShownStep:
    """One step of one pipeline, with its texts."""

    title: str
    note: str
    timeline: Timeline
    """Timeline of m micro-batches on p stages."""
    recompute_ms: np.ndarray
    """Part of each backward that recomputes, [m, p]."""
    samples: int
    """Samples trained by the step."""

    @property
    def step_ms(self) -> float:
        """Time of the step."""
        return float(self.timeline.step_ms)

    @property
    def samples_per_second(self) -> float:
        """Samples trained per second."""
        return 1000 * self.samples / self.step_ms

    @property
    def wait_fraction(self) -> float:
        """Idle share of the step, for any cause, mean over the stages."""
        return float(self.timeline.wait_ms.mean()) / self.step_ms

    @property
    def recompute_fraction(self) -> float:
        """Share of all computing that is recomputation."""
        return float(self.recompute_ms.sum() / self.timeline.busy_ms.sum())

    @property
    def row_height(self) -> float:
        """Height of a stage's row, in pixels."""
        return min(_ROW, _ROWS_HEIGHT / len(self.timeline.finish_ms))

    @property
    def bottom(self) -> float:
        """Bottom of the last row, from the top of the panel."""
        return _FIRST_ROW + self.row_height * len(self.timeline.finish_ms)


def before_and_after(title: str, steps: Sequence[ShownStep]) -> str:
    """The text of the SVG file; the first step is what the others are compared with."""
    x = Scale(0, max(step.step_ms for step in steps), _LEFT, _RIGHT)
    recomputes = any(step.recompute_ms.any() for step in steps)
    parts, top = [text(_MARGIN, 38, title, "title"), _legend(recomputes)], _FIRST_PANEL
    for step in steps:
        drawn = _panel(step, x) + _figures(step, steps[0], recomputes)
        parts.append(f'<g transform="translate(0 {top:g})">{drawn}</g>')
        top += step.bottom + 70 + _PANEL_GAP
    return document(title, _WIDTH, top - _PANEL_GAP + 10, _STYLE, parts)


def _legend(recomputes: bool) -> str:
    keys = [("forward", "forward"), ("backward", "backward")]
    keys += [("recompute", "recomputed in the backward")] * recomputes
    keys.append(("wait", "waiting"))
    parts, left = [], float(_MARGIN)
    for css, meaning in keys:
        parts += [rect(left, 56, 13, 13, css), text(left + 20, 67, meaning)]
        left += 48 + 6.2 * len(meaning)
    note = "a block is a micro-batch; one time axis for all"
    return "".join([*parts, text(_WIDTH - _MARGIN, 67, note, "label end")])


def _panel(step: ShownStep, x: Scale) -> str:
    """A row per stage, a block per pass; what stays free is waiting."""
    unit, unit_ms = ("s", 1000.0) if x.high >= 1000 else ("ms", 1.0)
    parts = [text(_MARGIN, 16, step.title, "heading"), text(_MARGIN, 34, step.note)]
    for value in x.ticks(10):
        parts.append(line(x(value), _FIRST_ROW, x(value), step.bottom + 5, "grid"))
        parts.append(text(x(value), step.bottom + 18, tick(value / unit_ms), "label middle"))
    parts.append(text(_LEFT - 18, step.bottom + 18, f"time, {unit}", "label end"))
    for stage in range(len(step.timeline.finish_ms)):
        parts += _row(step, stage, x)
    last, middle = x(step.step_ms), (_FIRST_ROW + step.bottom) / 2
    parts.append(line(last, _FIRST_ROW - 4, last, step.bottom + 5, "last"))
    parts.append(text(last + 8, middle + 5, milliseconds(step.step_ms), "value"))
    return "".join(parts)


def _row(step: ShownStep, stage: int, x: Scale) -> list[str]:
    height, timeline = step.row_height - 3, step.timeline
    y = _FIRST_ROW + step.row_height * stage + 1.5
    parts = [rect(_LEFT, y, x(step.step_ms) - _LEFT, height, "wait")]
    if step.row_height >= _LABELLED_ROW:
        parts.append(text(_LEFT - 10, y + height / 2 + 4, f"stage {stage}", "label end"))
    for kind, starts in timeline.start_ms.items():
        ends = timeline.end_ms[kind]
        for index, (start, end) in enumerate(zip(starts[:, stage], ends[:, stage], strict=True)):
            tip = f"{kind.label} of micro-batch {index}: {milliseconds(end - start)}"
            left, right = x(start), x(end)
            # The thin gap keeps equal neighbours apart.
            parts.append(rect(left, y, right - left - 0.6, height, kind.label, tip))
            again_ms = step.recompute_ms[index, stage]
            if kind is Pass.BACKWARD and again_ms > 0:
                tip += f", of which {milliseconds(again_ms)} recompute"
                parts.append(rect(left, y, x(start + again_ms) - left, height, "recompute", tip))
    return parts


def _figures(step: ShownStep, first: ShownStep, recomputes: bool) -> str:
    """Key figures of the step, with its speed relative to the first step's."""
    faster = number(step.samples_per_second / first.samples_per_second)
    entries = [
        (milliseconds(step.step_ms), f"for a step of {step.samples:,} samples"),
        (
            number(step.samples_per_second),
            "samples per second" + (f", {faster} times the first" if step is not first else ""),
        ),
        (percent(step.wait_fraction), "of device time is waiting"),
    ]
    if recomputes:
        entries.append((percent(step.recompute_fraction), "of computing is recomputation"))
    return "".join(
        text(at, step.bottom + 46, value, "value") + text(at, step.bottom + 63, label)
        for at, (value, label) in zip(_FIGURES_AT, entries, strict=False)
    )
