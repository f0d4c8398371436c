"""Figures of the report: the plan, its replay and its run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise

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
    label_rows,
    make_logarithmic,
    new_figure,
    printable,
    stack_bars,
    style,
    to_svg,
)
from omnibal.report.formatting import milliseconds, number, percent, shorten
from omnibal.report.length_sources import largest_sources
from omnibal.report.summary import StepFigures, memory_parts, recomputed_layers

_LEAST_SHOWN_SHARE = 0.001  # of a step: what is less would be thinner than a pixel
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
"""Colours of the parts of `StageTime`, in its order."""
_MEMORY_COLOURS = {
    "weights": "blue",
    "gradients": "teal",
    "optimizer": "grey",
    "activations": "rose",
    "working": "yellow",
}
_LOST_COLOURS = (
    "green",
    "pale",
    "yellow",
    "orange",
    "purple",
    "grey",
    "blue",
    "teal",
    "rose",
    "red",
)
"""Colours of the ideal time and then of the causes that are shown."""
_PEAKS = {"replayed": ("yellow", "D"), "measured": ("ink", "o")}
"""Colours and markers of peaks."""
_POINTS = 200
"""Intervals of a curve with two points each, however long the run."""
_CELLS = 64
"""Cells of the density of packs along each axis."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PageFigure:
    """A figure with its heading above and its caption below."""

    title: str
    drawn: Figure | None
    """None if there is nothing to draw."""
    label: str = ""
    """What it shows, for readers who cannot see it."""
    caption: str
    wide: bool = False

    @property
    def svg(self) -> str:
        """The figure as an SVG element; empty without one."""
        return "" if self.drawn is None else to_svg(self.drawn, self.label)


@style()
def split_figure(plan: Plan) -> PageFigure:
    """Draw every unit of the model as a block in the row of its stage."""
    encoders = zip(plan.pipeline_model.encoders, cycle(("blue", "teal")))
    colours = {**dict(encoders), LANGUAGE: "orange", _EDGES: "grey"}
    drawn = drawn_units(plan)
    figure = new_figure(WIDE, 80 + 30 * len(drawn))
    axes = figure.subplots()
    labelled = set()
    for stage, units in enumerate(drawn):
        for place, unit in enumerate(units):
            kind, _, again = unit
            label = f"{kind} layer" if kind != _EDGES else kind
            label += ", recomputed" if again else ""
            axes.barh(
                *(stage, 1, 0.8, place),
                facecolor=COLOURS[colours[kind]],
                edgecolor=COLOURS["paper"],
                hatch="//" if again else None,
                label="" if label in labelled else label,
            )
            labelled.add(label)
    label_rows(axes, [f"stage {stage}" for stage in range(len(drawn))])
    axes.set_xlim(0, max(map(len, drawn)))
    axes.set_xlabel("units of the stage")
    figure.legend(loc="outside upper left", ncols=6)
    stages = zip(drawn, recomputed_layers(plan), strict=True)
    return PageFigure(
        title="Layers on each pipeline stage",
        drawn=figure,
        label="; ".join(
            f"stage {stage}: {len(units)} units, {again} recomputed"
            for stage, (units, again) in enumerate(stages)
        ),
        caption="Hatched: recomputed in the backward pass"
        + (", at some level of packs." if plan.levels else "."),
        wide=True,
    )


def drawn_units(plan: Plan) -> list[list[tuple[str, int | None, bool]]]:
    """Return (tower, layer, whether any level recomputes it) of the units of every stage.

    Units that are no layers have no number, and stand under one name.
    """
    return [
        [
            (_EDGES, None, False)
            if unit.layers is None
            else (
                unit.name,
                unit.layers[0],
                any(unit.layers[0] in stage.recomputed(unit.name) for stage in at_levels),
            )
            for span in at_levels[0].units
            for unit in span.units
        ]
        for at_levels in zip(*map(plan.held, plan.stages_at_levels), strict=True)
    ]


@style()
def memory_figure(
    plan: Plan, sources: Mapping[str, StepFigures], replay: ReplaySummary | None
) -> PageFigure | None:
    """Draw the memory of one device of each stage: predicted parts, peaks and the limit.

    Returns:
        None without a prediction.
    """
    if plan.prediction is None:
        return None
    memories = [memory_parts(stage.memory) for stage in plan.prediction.stages]
    rows = range(len(memories))
    cap_gib = memory_cap_gib(plan.cluster)
    figure = new_figure(NARROW, 100 + 34 * len(memories))
    axes = figure.subplots()
    parts = {name: [memory[name] for memory in memories] for name in memories[0]}
    stack_bars(axes, rows, parts, _MEMORY_COLOURS)
    for name, figures in sources.items():
        if name in _PEAKS:
            colour, marker = _PEAKS[name]
            axes.plot(
                *(figures.peak_gib, rows, marker),
                color=COLOURS[colour],
                markeredgecolor=COLOURS["ink"],
                label=f"{name} peak",
            )
    axes.axvline(cap_gib, color=COLOURS["red"], linestyle="--", label="usable")
    label_rows(axes, [f"stage {stage}" for stage in rows])
    axes.set_xlabel("GiB")
    figure.legend(loc="outside upper left", ncols=4)
    usable = f"{100 * USABLE_MEMORY_FRACTION:g} % of a device's {plan.cluster.memory_gib:g} GiB"
    caption = f"Predicted, at the peak of the step. Usable: {usable}."
    if replay and not all(stage.with_working_memory for stage in replay.stages):
        caption += " The replayed peak on a CPU is without working memory."
    if "measured" in sources:
        caption += " The measured peak on a CPU is the whole process, its libraries included."
    return PageFigure(
        title="Memory of one device per stage",
        drawn=figure,
        label="memory by kind and stage against what is usable",
        caption=caption,
    )


@style()
def time_figure(plan: Plan, sources: Mapping[str, StepFigures]) -> PageFigure | None:
    """Draw forward, backward, wait, data and update of every stage by source.

    Returns:
        None without any times.
    """
    series = {name: figures.stages for name, figures in sources.items() if figures.stages}
    if not series:
        return None
    stages = plan.parallel.pipeline
    names = [f"stage {stage} {name}" for stage in range(stages) for name in series]
    times = [series[name][stage] for stage in range(stages) for name in series]
    has_encoders = any(time.encoder_ms for time in times)
    shown = list(_TIME_COLOURS)[: None if has_encoders else 5]
    figure = new_figure(NARROW, 100 + 24 * len(names))
    axes = figure.subplots()
    columns = dict(zip(shown, zip(*times, strict=True), strict=False))
    stack_bars(axes, range(len(names)), columns, _TIME_COLOURS, height=0.8)
    label_rows(axes, names)
    axes.set_xlabel("ms")
    figure.legend(loc="outside upper left", ncols=4)
    means = ["Replayed: mean over the replayed steps."] * ("replayed" in series)
    means += ["Measured: median over the run's steps."] * ("measured" in series)
    return PageFigure(
        title="A step's time by stage",
        drawn=figure,
        label=f"time per stage and activity, {' and '.join(series)}",
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

    Values that are not finite cannot be drawn, and an axis from zero ends at 1.5 times the 95th
    percentile, so that one slow step flattens nothing; the caption counts what is left out.

    Args:
        held_out: (last step before, value) of validations, a line of their own.
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
    figure = new_figure(NARROW, 270)
    axes = figure.subplots()
    at = extremes(shown, _POINTS)
    if smooth:
        axes.plot(steps[at], shown[at], ".", color=COLOURS["blue"], alpha=0.35)
        along = np.unique(np.linspace(0, len(steps) - 1, _POINTS).astype(int))
        mean = moving_mean(shown, len(steps) // 40)
        axes.plot(steps[along], mean[along], color=COLOURS["blue"])
    else:
        axes.plot(steps[at], shown[at], color=COLOURS["blue"])
    if predicted is not None:
        axes.axhline(predicted, color=COLOURS["ink"], linestyle="--")
    validated = [one for one in held_out if np.isfinite(one[1])]
    if validated:
        axes.plot(*zip(*validated, strict=True), "o-", color=COLOURS["red"])
        notes.append(f"Second line: held-out data, {number(validated[-1][1])} at the end.")
    if from_zero:
        axes.set_ylim(0, high)
    axes.set_xlabel("step")
    axes.set_ylabel(y_title)
    return PageFigure(
        title=title,
        drawn=figure,
        label=f"{title}: {number(shown[0])} at the first step, {number(shown[-1])} at the last",
        caption=" ".join(notes),
    )


def extremes(values: np.ndarray, intervals: int) -> np.ndarray:
    """Indices of the smallest and largest value of every interval: fewer points, same outline."""
    if len(values) <= 2 * intervals:
        return np.arange(len(values))
    bounds = np.linspace(0, len(values), intervals + 1).astype(int)
    parts = [values[start:end] for start, end in pairwise(bounds)]
    ends = [[part.argmin(), part.argmax()] for part in parts]
    return np.unique(bounds[:-1, None] + np.array(ends))


def moving_mean(values: np.ndarray, radius: int) -> np.ndarray:
    """Mean over up to `radius` neighbours on each side, fewer at the ends."""
    total = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    index = np.arange(len(values))
    low, high = np.maximum(index - radius, 0), np.minimum(index + radius + 1, len(values))
    return (total[high] - total[low]) / (high - low)


@style()
def packs_figure(packs: ScheduledPacks, caps: Caps) -> PageFigure:
    """Draw the density of packs over tokens and limited items, or samples if none are limited."""
    name, counted = "samples", np.diff(packs.packs.offsets)
    limited = [item for item in caps.names if item in packs.items]
    if limited:
        # Of several kinds of items, those that fill packs most.
        name = max(limited, key=lambda item: packs.items[item].mean() / caps[item])
        counted = packs.items[name]
    most = caps.get(name) or int(counted.max())
    ends = (most, caps["tokens"])
    edges = [
        np.arange(0, end + step + 1, step) for end in ends for step in [max(1, -(-end // _CELLS))]
    ]
    counts = np.histogram2d(counted, packs.tokens, edges)[0]
    figure = new_figure(NARROW, 270)
    axes = figure.subplots()
    # Shades on a logarithmic scale: one pack stays visible next to a thousand.
    shades = np.ceil(5 * np.log1p(counts) / np.log1p(counts.max()))
    for shade in range(1, 6):
        column, row = np.nonzero(shades == shade)
        axes.scatter(
            *(edges[0][column], edges[1][row], 14),
            marker="s",
            color=COLOURS["blue"],
            alpha=shade / 5,
            linewidths=0,
        )
    if name in caps.names:
        axes.axvline(most, color=COLOURS["red"], linestyle="--")
    axes.axhline(caps["tokens"], color=COLOURS["red"], linestyle="--")
    axes.set_xlabel(f"{name} in the pack")
    axes.set_ylabel("tokens in the pack")
    axes.set_ylim(bottom=0)
    return PageFigure(
        title="Packs against their caps",
        drawn=figure,
        label=f"{name} and tokens of {len(packs):,} packs",
        caption=f"{len(packs):,} packs; darker: more of them. Dashed: the caps, "
        f"{words([f'{caps[name]:,} {name}' for name in caps.names])}.",
    )


@style()
def waste_figure(plan: Plan, replay: ReplaySummary | None) -> PageFigure | None:
    """Draw the step as ideal computation and time lost to each cause, predicted and replayed."""
    steps: dict[str, tuple[dict[str, float], float]] = {}
    if plan.prediction is not None:
        steps["predicted"] = plan.prediction.lost.named(), plan.prediction.step_ms
    if replay is not None:
        steps["replayed"] = replay.lost.named(), replay.step_ms
    shown = {
        cause: [lost.get(cause, 0.0) for lost, _ in steps.values()]
        for lost, step_ms in steps.values()
        for cause, ms in lost.items()
        if ms >= _LEAST_SHOWN_SHARE * step_ms > 0
    }
    if not shown:
        return None
    totals_ms = [step_ms for _, step_ms in steps.values()]
    labelled = {
        f"{cause} "
        + " / ".join(
            f"{milliseconds(ms)} ({percent(ms / step_ms)})"
            for ms, step_ms in zip(of_steps, totals_ms, strict=True)
        ): of_steps
        for cause, of_steps in shown.items()
    }
    columns = 4 if len(steps) == 1 else 3
    figure = new_figure(WIDE, 80 + 30 * len(steps) + 20 * -(-len(shown) // columns))
    axes = figure.subplots()
    stack_bars(axes, range(len(steps)), labelled, dict(zip(labelled, cycle(_LOST_COLOURS))))
    label_rows(axes, [*steps])
    axes.set_xlim(0, max(totals_ms))
    axes.set_xlabel("ms")
    figure.legend(loc="outside upper left", ncols=columns)
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
    if replay is not None:
        caption += " After the slash: the replayed steps, with the times that their stages took."
    return PageFigure(
        title="Where the step's time goes",
        drawn=figure,
        label="time of a step by cause",
        caption=caption,
        wide=True,
    )


@style()
def lengths_figure(lengths: Lengths, most: int) -> PageFigure:
    """Draw the spread of items and tokens in the samples of each source: quartiles and tails."""
    groups = largest_sources(lengths, most)
    features = (*lengths.item_names, "tokens")
    figure = new_figure(WIDE, 80 + 26 * len(groups))
    for place, axes in enumerate(figure.subplots(1, len(features), sharey=True, squeeze=False)[0]):
        feature = features[place]
        values = [lengths.column(feature)[np.isin(lengths.source, codes)] for _, codes in groups]
        axes.boxplot(
            values,
            positions=range(len(groups)),
            orientation="horizontal",
            whis=(5, 95),
            showfliers=False,
            widths=0.6,
            patch_artist=True,
            manage_ticks=False,
            boxprops={"facecolor": COLOURS["pale"], "edgecolor": COLOURS["soft"]},
            medianprops={"color": COLOURS["blue"], "linewidth": 2.5},
            whiskerprops={"color": COLOURS["soft"]},
            capprops={"color": COLOURS["soft"]},
        )
        if feature == "tokens":
            make_logarithmic(axes)
        axes.set_xlabel(f"{feature} in the sample")
        label_rows(axes, [shorten(printable(name), 40) for name, _ in groups])
    return PageFigure(
        title="Sample lengths by source",
        drawn=figure,
        label=f"spread of {' and '.join(features)} by source",
        caption="Line: median. Box: middle half of the samples. Whiskers: 5th to 95th percentile.",
        wide=True,
    )
