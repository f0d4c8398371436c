"""Figures of the report: the plan, its replay and its run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.figure import Figure

from omnibal.data.lengths import Lengths
from omnibal.job.plan import Plan
from omnibal.job.replay import ReplaySummary
from omnibal.job.runlog import StepRecord
from omnibal.model.limits import USABLE_MEMORY_FRACTION, Caps, memory_cap_gib, words
from omnibal.model.units import LANGUAGE
from omnibal.packing.packs import ScheduledPacks
from omnibal.report.drawing import (
    COLOURS,
    NARROW,
    WIDE,
    add_legend,
    label_rows,
    make_logarithmic,
    new_axes,
    new_figure,
    printable,
    stack_bars,
    style,
    to_svg,
)
from omnibal.report.formatting import milliseconds, number, shorten
from omnibal.report.length_sources import largest_sources
from omnibal.report.summary import StepFigures, lost_by_source, memory_parts

_EDGES = "embedding, projector, head"
_TIME_COLOURS = {
    "forward": "green",
    "backward": "purple",
    "wait": "pale",
    "data": "yellow",
    "update": "grey",
    "encoder": "teal",
    "exchange": "blue",
}
_MEMORY_COLOURS = ("blue", "teal", "grey", "rose", "yellow")
_LOST_COLOURS = "green pale yellow orange purple grey blue teal rose red ink".split()
_POINTS = 200
"""Intervals of a curve, with two points each."""
_CELLS = 64
"""Cells per axis of the density of packs."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PageFigure:
    """A figure with heading and caption."""

    title: str
    drawn: Figure | None
    caption: str
    wide: bool = False

    @property
    def svg(self) -> str:
        """The figure as an SVG element, or empty."""
        return "" if self.drawn is None else to_svg(self.drawn, f"{self.title}. {self.caption}")


@style()
def split_figure(plan: Plan) -> PageFigure:
    """Draw units as blocks in rows of stages."""
    colours = {name: ("blue", "teal")[i % 2] for i, name in enumerate(plan.pipeline_model.encoders)}
    colours |= {LANGUAGE: "orange"}
    at_levels = [plan.held(stages) for stages in plan.stages_at_levels]
    figure, axes = new_axes(WIDE, 80 + 30 * len(at_levels[0]))
    for index, stage in enumerate(at_levels[0]):
        units = [unit for span in stage.units for unit in span.units]
        for place, unit in enumerate(units):
            layer = unit.layers[0] if unit.layers else None
            again = any(layer in stages[index].recomputed(unit.name) for stages in at_levels)
            label = _EDGES if layer is None else f"{unit.name} layer" + ", recomputed" * again
            axes.barh(
                *(index, 1, 0.8, place),
                facecolor=COLOURS[colours.get(unit.name, "grey")],
                edgecolor=COLOURS["paper"],
                hatch="//" if again else None,
                label=label,
            )
    label_rows(axes, [f"stage {stage}" for stage in range(len(at_levels[0]))])
    axes.set_xlabel("units of the stage")
    add_legend(figure, columns=6)
    levels = ", at some level of packs" if plan.levels else ""
    return PageFigure(
        title="Layers on each pipeline stage",
        drawn=figure,
        caption=f"Hatched: recomputed in the backward pass{levels}.",
        wide=True,
    )


@style()
def memory_figure(plan: Plan, sources: Mapping[str, StepFigures]) -> PageFigure | None:
    """Draw predicted memory per stage, if any: parts, peaks and limit."""
    if plan.prediction is None:
        return None
    memories = [memory_parts(stage.memory) for stage in plan.prediction.stages]
    figure, axes = new_axes(NARROW, 100 + 34 * len(memories))
    parts = {name: [memory[name] for memory in memories] for name in memories[0]}
    names = [f"stage {stage}" for stage in range(len(memories))]
    stack_bars(axes, names, parts, _MEMORY_COLOURS)
    for source, marker in (("replayed", "D"), ("measured", "o")):
        if source in sources:
            peaks = sources[source].peak_gib
            ink = COLOURS["ink"]
            axes.plot(peaks, range(len(names)), marker, color=ink, label=f"{source} peak")
    cap_gib = memory_cap_gib(plan.cluster)
    axes.axvline(cap_gib, color=COLOURS["red"], linestyle="--", label="usable")
    axes.set_xlabel("GiB")
    add_legend(figure, columns=4)
    usable = f"{100 * USABLE_MEMORY_FRACTION:g} % of a device's {plan.cluster.memory_gib:g} GiB"
    caption = f"Predicted, at the peak of the step. Usable: {usable}."
    if "measured" in sources:
        caption += " The measured peak on a CPU is the whole process, its libraries included."
    return PageFigure(title="Memory of one device per stage", drawn=figure, caption=caption)


@style()
def time_figure(plan: Plan, sources: Mapping[str, StepFigures]) -> PageFigure | None:
    """Draw forward, backward, wait, data and update by stage and source, if known."""
    series = {name: figures.stages for name, figures in sources.items() if figures.stages}
    if not series:
        return None
    rows = {
        f"stage {stage} {name}": times[stage]
        for stage in range(plan.parallel.pipeline)
        for name, times in series.items()
    }
    has_encoders = any(time.encoder_ms for time in rows.values())
    shown = list(_TIME_COLOURS)[: None if has_encoders else 5]
    figure, axes = new_axes(NARROW, 100 + 24 * len(rows))
    parts = dict(zip(shown, zip(*rows.values(), strict=True), strict=False))
    stack_bars(axes, [*rows], parts, _TIME_COLOURS.values())
    axes.set_xlabel("ms")
    add_legend(figure, columns=4)
    means = ["Replayed: mean over the replayed steps."] * ("replayed" in series)
    means += ["Measured: median over the run's steps."] * ("measured" in series)
    return PageFigure(
        title="A step's time by stage",
        drawn=figure,
        caption="Backward includes recomputation. Update: gradient reduction, clipping, weight "
        "update. "
        + "Encoder, exchange: of data-parallel encoders, on all ranks. " * has_encoders
        + (" ".join(means) or "Predicted."),
    )


@style()
def curve_figure(
    title: str,
    records: Sequence[StepRecord],
    values: Sequence[float],
    y_title: str,
    *,
    predicted: float | None = None,
    held_out: Sequence[tuple[int, float]] = (),
    smooth: bool = True,
    from_zero: bool = False,
) -> PageFigure:
    """Draw a value over the steps: points faint, their moving mean bold, `predicted` dashed.

    Non-finite values and outliers (above 1.5 times the 95th percentile, if the axis is from zero)
    are omitted and counted in the caption. `held_out` is (last step before, value) of validations.
    """
    points = np.array([[record.step for record in records], values], np.float64)
    finite = np.isfinite(points[1])
    notes = [] if predicted is None else [f"Dashed: predicted, {number(predicted)} {y_title}."]
    if not finite.all():
        notes.append(f"Steps without a finite value: {int((~finite).sum()):,}.")
    steps, shown = points[:, finite]
    if not len(steps):
        return PageFigure(title=title, drawn=None, caption=" ".join(notes))
    high = None
    if from_zero:
        limit = 1.5 * max(float(np.percentile(shown, 95)), predicted or 0.0)
        above = shown > limit
        if above.any() and limit > 0:
            notes.append(f"Steps above the axis: {int(above.sum()):,}.")
            steps, shown, high = steps[~above], shown[~above], limit
    figure, axes = new_axes(NARROW, 270)
    at = extremes(shown, _POINTS)
    if smooth:
        axes.plot(steps[at], shown[at], ".", color=COLOURS["blue"], alpha=0.35)
        at = np.unique(np.linspace(0, len(steps) - 1, _POINTS).astype(int))
        shown = moving_mean(shown, len(steps) // 40)
    axes.plot(steps[at], shown[at], color=COLOURS["blue"])
    if predicted is not None:
        axes.axhline(predicted, color=COLOURS["ink"], linestyle="--")
    validated = [one for one in held_out if np.isfinite(one[1])]
    if validated:
        axes.plot(*zip(*validated, strict=True), "o-", color=COLOURS["red"])
        notes.append(f"Second line: held-out data, {number(validated[-1][1])} at the end.")
    if from_zero:
        axes.set_ylim(0, high)
    axes.set(xlabel="step", ylabel=y_title)
    return PageFigure(title=title, drawn=figure, caption=" ".join(notes))


def extremes(values: np.ndarray, intervals: int) -> np.ndarray:
    """Return indices of min and max of every interval: fewer points, same outline."""
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


@style()
def packs_figure(packs: ScheduledPacks, caps: Caps) -> PageFigure:
    """Draw the density of packs over tokens and limited items, or samples without limits."""
    name, counted = "samples", np.diff(packs.packs.offsets)
    limited = [item for item in caps.names if item in packs.items]
    if limited:
        # Use the kind of items that fills packs most.
        name = max(limited, key=lambda item: packs.items[item].mean() / caps[item])
        counted = packs.items[name]
    ends = (caps.get(name) or int(counted.max()), caps["tokens"])
    sides = np.array([[max(1, -(-end // _CELLS))] for end in ends])
    cells, counts = np.unique(
        np.stack([counted, packs.tokens]) // sides * sides, axis=1, return_counts=True
    )
    figure, axes = new_axes(NARROW, 270)
    # Shades on a logarithmic scale: one pack stays visible next to a thousand.
    shades = np.ceil(5 * np.log1p(counts) / np.log1p(counts.max())) / 5
    axes.scatter(cells[0], cells[1], 14, COLOURS["blue"], marker="s", alpha=shades, linewidths=0)
    if name in caps.names:
        axes.axvline(caps[name], color=COLOURS["red"], linestyle="--")
    axes.axhline(caps["tokens"], color=COLOURS["red"], linestyle="--")
    axes.set(xlabel=f"{name} in the pack", ylabel="tokens in the pack", ylim=(0, None))
    return PageFigure(
        title="Packs against their caps",
        drawn=figure,
        caption=f"{len(packs):,} packs; darker: more of them. Dashed: the caps, "
        f"{words([f'{caps[name]:,} {name}' for name in caps.names])}.",
    )


@style()
def waste_figure(plan: Plan, replay: ReplaySummary | None) -> PageFigure | None:
    """Draw ideal computation and time lost by cause, if known."""
    steps = lost_by_source(plan, replay)
    if not steps:
        return None
    causes = dict.fromkeys(cause for lost, _ in steps.values() for cause in lost)
    parts = {cause: [lost.get(cause, 0.0) for lost, _ in steps.values()] for cause in causes}
    figure, axes = new_axes(WIDE, 120 + 30 * len(steps))
    stack_bars(axes, [*steps], parts, _LOST_COLOURS)
    axes.set_xlabel("ms")
    add_legend(figure, columns=6)
    caption = (
        "Ideal: the needed work spread evenly over all devices, without waiting. The step is "
        "simulated again without one cause after another; the differences add up to it."
    )
    exchange = plan.prediction.exchange if plan.prediction else None
    if exchange and exchange.total_ms:
        caption += (
            f" Data-parallel ranks exchange gradients and weights for "
            f"{milliseconds(exchange.total_ms)}, of which {milliseconds(exchange.exposed_ms)} "
            "are exposed and count as communication."
        )
    return PageFigure(title="Where the step's time goes", drawn=figure, caption=caption, wide=True)


@style()
def lengths_figure(lengths: Lengths, most: int) -> PageFigure:
    """Draw the distribution of items and tokens by source."""
    groups = largest_sources(lengths, most)
    features = (*lengths.item_names, "tokens")
    figure = new_figure(WIDE, 80 + 26 * len(groups))
    all_axes = figure.subplots(1, len(features), sharey=True, squeeze=False)[0]
    for axes, feature in zip(all_axes, features, strict=True):
        values = [lengths.column(feature)[np.isin(lengths.source, codes)] for _, codes in groups]
        axes.boxplot(
            values,
            orientation="horizontal",
            positions=range(len(groups)),
            widths=0.6,
            whis=(5, 95),
            manage_ticks=False,
        )
        axes.set_xlabel(f"{feature} in the sample")
    make_logarithmic(all_axes[-1])
    label_rows(all_axes[0], [shorten(printable(name), 40) for name, _ in groups])
    return PageFigure(
        title="Sample lengths by source",
        drawn=figure,
        caption="Line: median. Box: middle half of the samples. Whiskers: 5th to 95th percentile.",
        wide=True,
    )
