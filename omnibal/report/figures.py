"""Figures of the report: the plan, its replay and its run."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.figure import Figure

from omnibal.job.plan import Plan
from omnibal.job.runlog import StepRecord
from omnibal.model.units import LANGUAGE
from omnibal.report import drawing
from omnibal.report.formatting import number

_EDGES = "embedding, projector, head"
_POINTS = 200  # intervals of a curve, with two points each


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PageFigure:
    """A figure with heading and caption. `drawn` is None if there is nothing to draw."""

    title: str
    drawn: Figure | None
    caption: str
    wide: bool = False

    @property
    def svg(self) -> str:
        """The figure as an SVG element. Empty if nothing is drawn."""
        drawn, label = self.drawn, f"{self.title}. {self.caption}"
        return "" if drawn is None else drawing.to_svg(drawn, label)


@drawing.style()
def split_figure(plan: Plan) -> PageFigure:
    """Return a figure with a row of unit blocks per stage."""
    colours = {name: ("blue", "teal")[i % 2] for i, name in enumerate(plan.pipeline_model.encoders)}
    colours |= {LANGUAGE: "orange"}
    at_levels = [plan.merge_chunks(stages) for stages in plan.stages_at_levels]
    figure = drawing.new_figure(drawing.WIDE, 80 + 30 * len(at_levels[0]))
    axes = figure.subplots()
    for index, stage in enumerate(at_levels[0]):
        units = [unit for span in stage.units for unit in span.units]
        for place, unit in enumerate(units):
            layer = unit.layers[0] if unit.layers else None
            recomputed = any(layer in level[index].recomputed_in(unit.name) for level in at_levels)
            label = _EDGES if layer is None else f"{unit.name} layer" + ", recomputed" * recomputed
            axes.barh(
                *(index, 1, 0.8, place),
                facecolor=drawing.COLOURS[colours.get(unit.name, "grey")],
                edgecolor=drawing.COLOURS["paper"],
                hatch="//" if recomputed else None,
                label=label,
            )
    drawing.label_rows(axes, [f"stage {stage}" for stage in range(len(at_levels[0]))])
    axes.set_xlabel("units of the stage")
    drawing.add_legend(figure, columns=6)
    levels = ", at some level of packs" if plan.levels else ""
    return PageFigure(
        title="Layers on each pipeline stage",
        drawn=figure,
        caption=f"Hatched: recomputed in the backward pass{levels}.",
        wide=True,
    )


@drawing.style()
def curve_figure(
    title: str,
    records: Sequence[StepRecord],
    values: Sequence[float],
    y_title: str,
    *,
    predicted: float | None = None,
    held_out: Sequence[tuple[int, float]] = (),
    from_zero: bool = False,
) -> PageFigure:
    """Return a curve of a value per step: faint points, bold moving mean, `predicted` dashed.

    `held_out` has (last step before, value) of validations. `from_zero` cuts off rare high values.
    The caption counts them, and omitted non-finite values.
    """
    # [step and value, records]
    points = np.array([[record.step for record in records], values], np.float64)
    finite = np.isfinite(points[1])
    notes = [] if predicted is None else [f"Dashed: predicted, {number(predicted)} {y_title}."]
    if not finite.all():
        notes.append(f"Steps without a finite value: {int((~finite).sum()):,}.")
    steps, shown = points[:, finite]
    if not len(steps):
        return PageFigure(title=title, drawn=None, caption=" ".join(notes))
    high = None
    if from_zero:  # rare slow steps, such as the first, would flatten the curve
        limit = 1.5 * max(float(np.percentile(shown, 95)), predicted or 0.0)
        above = shown > limit
        if above.any() and limit > 0:
            notes.append(f"Steps above the axis: {int(above.sum()):,}.")
            steps, shown, high = steps[~above], shown[~above], limit
    figure = drawing.new_figure(drawing.NARROW, 270)
    axes = figure.subplots()
    at = interval_extremes(shown, _POINTS)
    axes.plot(steps[at], shown[at], ".", color=drawing.COLOURS["blue"], alpha=0.35)
    # As many points of the mean as fit; all steps enter it.
    at = np.unique(np.linspace(0, len(steps) - 1, _POINTS).astype(int))
    shown = moving_mean(shown, len(steps) // 40)
    axes.plot(steps[at], shown[at], color=drawing.COLOURS["blue"])
    if predicted is not None:
        axes.axhline(predicted, color=drawing.COLOURS["ink"], linestyle="--")
    validated = [(step, value) for step, value in held_out if np.isfinite(value)]
    if validated:
        axes.plot(*zip(*validated, strict=True), "o-", color=drawing.COLOURS["red"])
        notes.append(f"Second line: held-out data, {number(validated[-1][1])} at the end.")
    if from_zero:
        axes.set_ylim(0, high)
    axes.set(xlabel="step", ylabel=y_title)
    return PageFigure(title=title, drawn=figure, caption=" ".join(notes))


def interval_extremes(values: np.ndarray, intervals: int) -> np.ndarray:
    """Return indices of the min and max of every interval: fewer points, same outline."""
    if len(values) <= 2 * intervals:
        return np.arange(len(values))
    bounds = np.linspace(0, len(values), intervals + 1).astype(int)
    parts = [values[start:end] for start, end in pairwise(bounds)]
    ends = [[part.argmin(), part.argmax()] for part in parts]
    return np.unique(bounds[:-1, None] + np.array(ends))


def moving_mean(values: np.ndarray, radius: int) -> np.ndarray:
    """Return the mean over up to `radius` neighbours on each side."""
    total = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    index = np.arange(len(values))
    low, high = np.maximum(index - radius, 0), np.minimum(index + radius + 1, len(values))
    return (total[high] - total[low]) / (high - low)
