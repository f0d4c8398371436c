"""Figure of steps of the same samples on one time axis."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from omnibal.pipeline.simulate import Timeline
from omnibal.report.drawing import WIDE, add_legend, new_figure, style, xml_text
from omnibal.report.formatting import milliseconds, number, percent
from omnibal.report.timeline import draw_step


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShownStep:
    """A step of a pipeline, with its texts."""

    title: str
    note: str
    timeline: Timeline  # of m micro-batches on p stages
    recompute_ms: np.ndarray  # part of each backward, [m, p]
    samples: int

    @property
    def step_ms(self) -> float:
        return float(self.timeline.step_ms)


@style()
def before_and_after(title: str, steps: Sequence[ShownStep]) -> Figure:
    """Draw steps on one time axis, with their speed relative to the first step's."""
    stages = [step.recompute_ms.shape[1] for step in steps]
    figure = new_figure(WIDE, 60 + sum(110 + min(30 * count, 300) for count in stages))
    figure.suptitle(title, x=0.99, ha="right", weight="bold")
    all_axes = figure.subplots(len(steps), 1, sharex=True, squeeze=False)[:, 0]
    end_ms = max(step.step_ms for step in steps)
    for axes, step in zip(all_axes, steps, strict=True):
        recompute_ms = step.recompute_ms
        draw_step(axes, step.timeline, len(recompute_ms), (), recompute_ms, end_ms)
        axes.set_title(f"{step.title}: {xml_text(step.note)}\n{key_figures(step, steps[0])}")
    add_legend(figure, columns=3)
    return figure


def key_figures(step: ShownStep, first: ShownStep) -> str:
    """Return the step's figures in words, with its speed relative to the first step's."""
    rate, first_rate = (shown.samples / shown.step_ms for shown in (step, first))
    waited = 1 - float(step.timeline.busy_ms.mean()) / step.step_ms
    recomputed = float(step.recompute_ms.sum() / step.timeline.busy_ms.sum())
    text = f"{milliseconds(step.step_ms)} for {step.samples:,} samples; {number(1000 * rate)} per s"
    if step is not first:
        text += f", {number(rate / first_rate)} times the first"
    return (
        f"{text}; {percent(waited)} of device time is waiting; {percent(recomputed)} of computing "
        "is recomputation"
    )
