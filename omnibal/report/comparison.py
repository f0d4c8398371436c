"""Comparison of steps of the same samples on one time axis, as a self-contained SVG file."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omnibal.pipeline.simulate import Timeline
from omnibal.report.panels import Panel, heading, picture, stacked, time_axis
from omnibal.report.svg import Rows, Scale
from omnibal.report.text import milliseconds, number, percent
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
    faster = number(step.samples_per_second / first.samples_per_second)
    figures = [
        (milliseconds(step.step_ms), f"for a step of {step.samples:,} samples"),
        (
            number(step.samples_per_second),
            "samples per second" + (f", {faster} times the first" if step is not first else ""),
        ),
        (percent(step.wait_fraction), "of device time is waiting"),
    ]
    if recomputes:
        figures.append((percent(step.recompute_fraction), "of computing is recomputation"))
    tips = [f"micro-batch {index}" for index in range(micro_batches)]
    return Panel(
        heading=step.title,
        note=step.note,
        rows=rows,
        names=[f"stage {stage}" for stage in range(stages)],
        bars=[
            *(rows.bar(stage, 0, step.step_ms, "wait") for stage in range(stages)),
            *pass_bars(rows, step.timeline, tips, step.recompute_ms),
        ],
        end_ms=step.step_ms,
        figures=figures,
    )
