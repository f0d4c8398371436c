"""Comparison of steps of the same samples on one time axis, as a self-contained SVG file."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omnibal.pipeline.simulate import Timeline
from omnibal.report.formatting import milliseconds, number, percent
from omnibal.report.panels import Panel, heading, picture, stacked, time_axis
from omnibal.report.svg import Rows, Scale
from omnibal.report.timeline import pass_bars


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


def before_and_after(title: str, steps: Sequence[ShownStep]) -> str:
    """The text of the SVG file; the first step is what the others are compared with."""
    x = time_axis(max(step.step_ms for step in steps))
    recomputes = any(step.recompute_ms.any() for step in steps)
    keys = [("forward", "forward"), ("backward", "backward")]
    keys += [("recompute", "recomputed in the backward")] * recomputes + [("wait", "waiting")]
    parts, bottom = stacked(_panel(step, steps[0], x, recomputes) for step in steps)
    head = heading(title, "A block is a micro-batch; all steps have one time axis.", keys, "")
    return picture(title, bottom - 14, [head, *parts])


def _panel(step: ShownStep, first: ShownStep, x: Scale, recomputes: bool) -> Panel:
    """A row per stage, a bar per pass, and its speed relative to the first step's."""
    micro_batches, stages = step.recompute_ms.shape
    rows = Rows(x=x, top=46, pitch=min(30.0, 300 / stages), count=stages, gap=3)
    timeline, step_ms = step.timeline, step.step_ms
    rates = [one.samples / one.step_ms for one in (step, first)]
    faster = "" if step is first else f", {number(rates[0] / rates[1])} times the first"
    again = float(step.recompute_ms.sum() / timeline.busy_ms.sum())
    figures = [
        (milliseconds(step_ms), f"for a step of {step.samples:,} samples"),
        (number(1000 * rates[0]), f"samples per second{faster}"),
        (percent(float(timeline.wait_ms.mean()) / step_ms), "of device time is waiting"),
    ] + [(percent(again), "of computing is recomputation")] * recomputes
    tips = [f"micro-batch {index}" for index in range(micro_batches)]
    return Panel(
        heading=step.title,
        note=step.note,
        rows=rows,
        names=[f"stage {stage}" for stage in range(stages)],
        bars=[
            *(rows.bar(stage, 0, step_ms, "wait") for stage in range(stages)),
            *pass_bars(rows, timeline, tips, step.recompute_ms),
        ],
        end_ms=step_ms,
        figures=figures,
    )
