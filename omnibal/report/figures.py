"""The report's figures of plan and run, as SVG; colours mean the same thing in all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from omnibal.data.packs import ScheduledPacks
from omnibal.limits import USABLE_MEMORY_FRACTION, Caps, memory_cap_gib, words
from omnibal.pipeline.prediction import LostTime, StageMemory
from omnibal.pipeline.stage import Span
from omnibal.plan import Plan
from omnibal.replay import ReplaySummary
from omnibal.report.summary import RunSummary, StageTime, stage_times_by_source
from omnibal.report.svg import (
    TOP,
    Plot,
    Scale,
    dots,
    drawing,
    extremes,
    line,
    moving_mean,
    padded,
    polyline,
    rect,
    stacked_row,
    text,
)
from omnibal.report.text import milliseconds, number, percent, tick
from omnibal.runlog import StepRecord
from omnibal.units import LANGUAGE

WIDE = 1080
_LEAST_SHOWN_SHARE = 0.001
TIME_PARTS = ("forward", "backward", "wait", "data", "update", "encoder", "exchange")
"""Classes of the parts of `StageTime`, in its order."""
MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "working")
"""Classes of the parts of `StageMemory`, in its order."""
_BUCKETS = 400
"""Drawn points per curve are at most twice this, however long the run."""
_PITCH_OF_NUMBERS = 20
"""Least width of a unit's block, in pixels, that has room for its number."""
_CELLS = 64
"""Cells per axis of the pack density."""
_METER = 150.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure with its heading above and its caption below."""

    title: str
    svg: str = ""
    """What is drawn, whose text is escaped."""
    shares: Sequence[tuple[str, float]] = ()
    """Parts of one bar, each (class, share), that stand in place of a drawing."""
    caption: str
    legend: Sequence[tuple[str, str]] = ()
    """Keys of (class, meaning)."""
    wide: bool = False


def split_figure(plan: Plan) -> Figure:
    """Every unit of the model as a block in the row of its stage."""
    rows = drawn_units(plan)
    pitch = min(34.0, (WIDE - 80) / max(len(row) for row in rows))
    hatch = (
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="6" class="hatch"/>'
        "</pattern></defs>"
    )
    parts = [hatch]
    for stage, units in enumerate(rows):
        y = 6 + 36 * stage
        parts.append(text(0, y + 19, f"stage {stage}"))
        for place, (css, name, short, recomputed) in enumerate(units):
            x, tip = 72 + pitch * place, f"{name}, recomputed" if recomputed else name
            parts.append(rect(x, y, pitch - 2, 28, css, tip))
            if recomputed:
                parts.append(rect(x, y, pitch - 2, 28, "hatched", tip))
            if pitch >= _PITCH_OF_NUMBERS:
                parts.append(text(x + pitch / 2 - 1, y + 18, short, "block middle"))
    label = "; ".join(
        f"stage {index}: "
        + " and ".join(
            f"{len(stage.layers(tower))} {tower}" for tower in plan.pipeline_model.towers
        )
        + " layers, "
        + " / ".join(str(stages[index].recomputed_layers) for stages in plan.stages_at_levels)
        + f" recomputed{' by level' if plan.levels else ''}"
        for index, stage in enumerate(plan.stages)
    )
    of_levels = " at a level of packs" if plan.levels else ""
    letters = {"E": "embedding", "P": "projector", "H": "output head"}
    drawn = {short for row in rows for _, _, short, _ in row}
    named = {letter: name for letter, name in letters.items() if letter in drawn}
    caption = "Rest the pointer on a block for its name."
    if pitch >= _PITCH_OF_NUMBERS:
        explained = ", ".join(f"{letter}: {name}" for letter, name in named.items())
        caption = f"Numbers count over the whole model. {explained}."
    return Figure(
        title="Layers on each pipeline stage",
        svg=drawing(72 + pitch * max(map(len, rows)), 36 * len(rows) + 6, label, parts),
        caption=caption,
        legend=(
            *((css, f"{tower} layer") for tower, css in _colours(plan).items()),
            ("edge", ", ".join(named.values())),
            ("hatched", f"recomputed in the backward pass{of_levels}"),
        ),
        wide=True,
    )


def _colours(plan: Plan) -> dict[str, str]:
    """Class of the layers of every tower; encoders take turns in theirs."""
    encoders = zip(plan.pipeline_model.encoders, cycle(("vision", "encoder")))
    return {**dict(encoders), LANGUAGE: LANGUAGE}


def drawn_units(plan: Plan) -> list[list[tuple[str, str, str, bool]]]:
    """(class, name, short name, recomputed at any level) of the units of every stage, in model
    order."""
    colours = _colours(plan)
    return [
        [
            _drawn(
                unit,
                colours.get(unit.name, "edge"),
                unit.layers is not None
                and any(unit.layers[0] in stage.recomputed(unit.name) for stage in at_levels),
            )
            for span in at_levels[0].units
            for unit in span.units
        ]
        for at_levels in zip(*plan.stages_at_levels, strict=True)
    ]


def _drawn(unit: Span, css: str, recomputed: bool) -> tuple[str, str, str, bool]:
    if unit.layers is not None:
        layer = unit.layers[0]
        return css, f"{unit.name} layer {layer}", str(layer), recomputed
    *_, last = unit.name.split()
    return css, unit.name.replace(" embed", " embedding"), last[0].upper(), recomputed


def memory_parts(memory: StageMemory) -> tuple[float, ...]:
    """GiB in the order of `MEMORY_PARTS`."""
    return (
        memory.weights_gib,
        memory.gradients_gib,
        memory.optimizer_gib,
        memory.activations_gib,
        memory.transient_gib,
    )


def memory_figure(
    plan: Plan, run: RunSummary | None, replay: ReplaySummary | None
) -> Figure | None:
    """Predicted memory of one device of each stage against what it may fill; replayed and
    measured peaks. None without a prediction."""
    if plan.prediction is None:
        return None
    memories = [stage.memory for stage in plan.prediction.stages]
    cap = memory_cap_gib(plan.cluster)
    marks = {
        "replayed": [stage.peak_gib for stage in replay.stages] if replay else (),
        "measured": run.peak_gib if run else (),
    }
    marks = {name: peaks for name, peaks in marks.items() if peaks}
    most = max(cap, *(m.peak_gib for m in memories), *(max(peaks) for peaks in marks.values()))
    x = Scale(0, 1.04 * most, 72, 506)
    bottom = TOP + 34 * len(memories)
    parts = [_vertical_grid(x, bottom, "GiB")]
    for stage, memory in enumerate(memories):
        y = TOP + 34 * stage
        parts.append(text(0, y + 17, f"stage {stage}"))
        sizes = zip(memory_parts(memory), MEMORY_PARTS, strict=True)
        stack = [(size, css, f"{css}: {number(size)} GiB") for size, css in sizes]
        parts.append(stacked_row(x, y + 2, 22, stack))
        for name, peaks in marks.items():
            tip = f"{name}: {number(peaks[stage])} GiB"
            parts.append(rect(x(peaks[stage]) - 1.5, y - 2, 3, 30, name, tip))
    parts.append(line(x(cap), TOP - 8, x(cap), bottom, "cap"))
    parts.append(text(x(cap) + 4, TOP - 13, "usable", "label end"))
    keys = [(css, css) for css in MEMORY_PARTS] + [(name, f"{name} peak") for name in marks]
    caption = f"Predicted, at the peak of the step. Usable: {_usable(plan)}."
    if replay and not all(stage.with_working_memory for stage in replay.stages):
        caption += " The replayed peak on a CPU is without working memory."
    if run:
        caption += " The measured peak on a CPU is the whole process, its libraries included."
    return Figure(
        title="Memory of one device per stage",
        svg=drawing(520, bottom + 44, "memory by kind and stage against what is usable", parts),
        caption=caption,
        legend=keys,
    )


def _usable(plan: Plan) -> str:
    return f"{100 * USABLE_MEMORY_FRACTION:g} % of a device's {plan.cluster.memory_gib:g} GiB"


def time_figure(plan: Plan, run: RunSummary | None, replay: ReplaySummary | None) -> Figure | None:
    """Forward, backward, wait, data and update of every stage: predicted, below it replayed and
    measured. None without any of them."""
    series = stage_times_by_source(plan, run, replay)
    if not series:
        return None
    longest = max(sum(time) for times in series.values() for time in times)
    x = Scale(0, 1.02 * longest or 1.0, 150 if len(series) > 1 else 72, 506)
    pitch = 18 * len(series) + 12
    bottom = TOP + pitch * len(plan.stages)
    parts = [_vertical_grid(x, bottom, "ms per step")]
    for stage in range(len(plan.stages)):
        parts.append(text(0, TOP + pitch * stage + 14, f"stage {stage}"))
        for row, (name, times) in enumerate(series.items()):
            y = TOP + pitch * stage + 18 * row
            if len(series) > 1:
                parts.append(text(144, y + 13, name, "label end"))
            parts.append(stacked_row(x, y, 16, _time_stack(times[stage])))
    label = f"time per stage and activity, {' and '.join(series)}"
    has_encoders = any(time.encoder_ms for times in series.values() for time in times)
    means = ["Replayed: mean over the replayed steps."] * bool(replay)
    means += ["Measured: median over the run's steps."] * bool(run)
    return Figure(
        title="Where a step's time goes",
        svg=drawing(520, bottom + 44, label, parts),
        caption="Backward includes recomputation. Update: gradient reduction, clipping, weight "
        "update. "
        + "Encoder, exchange: of encoders beside the pipeline, on all ranks. " * has_encoders
        + (" ".join(means) or "Predicted."),
        legend=[(css, css) for css in TIME_PARTS[: 7 if has_encoders else 5]],
    )


def _time_stack(time: StageTime) -> list[tuple[float, str, str]]:
    return [
        (value, css, f"{css}: {milliseconds(value)}")
        for value, css in zip(time, TIME_PARTS, strict=True)
        if value or css in TIME_PARTS[:5]
    ]


def _vertical_grid(x: Scale, bottom: float, title: str) -> str:
    parts = []
    for value in x.ticks():
        at = x(value)
        parts.append(line(at, TOP - 4, at, bottom, "grid"))
        parts.append(text(at, bottom + 17, tick(value), "label middle"))
    return "".join(parts) + text((x.start + x.end) / 2, bottom + 38, title, "label middle")


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
) -> Figure:
    """One value over the steps: raw points faint, moving mean bold, `predicted` dashed, and the
    same on held-out data, (last step before, value), as a line of its own.

    Values that are not finite cannot be drawn, and an axis from zero ends at 1.5 times the 95th
    percentile, so that one slow step flattens nothing; the caption counts what is left out.
    """
    steps = np.array([record.step for record in records], np.float64)
    series = np.asarray(values, np.float64)
    finite = np.isfinite(series)
    notes = [] if predicted is None else [f"Dashed: predicted, {number(predicted)} {y_title}."]
    if not finite.all():
        notes.append(f"Steps without a finite value: {int((~finite).sum()):,}.")
    steps, series = steps[finite], series[finite]
    if not len(series):
        return Figure(title=title, caption=" ".join(notes))
    validated = np.array([one for one in held_out if np.isfinite(one[1])]).reshape(-1, 2)
    others = [] if predicted is None else [predicted]
    low, high = padded(np.concatenate([series, others, validated[:, 1]]))
    low = 0.0 if from_zero or low < 0 <= series.min() else low
    if from_zero:
        limit = 1.5 * max(float(np.percentile(series, 95)), predicted or 0.0)
        high = min(high, limit) if limit > 0 else high
        shown = series <= high
        notes += [] if shown.all() else [f"Steps above the axis: {int((~shown).sum()):,}."]
        steps, series = steps[shown], series[shown]
    plot = Plot.over((records[0].step, max(records[-1].step, records[0].step + 1)), (low, high))
    parts = [plot.axes("step", y_title), *_curves(plot, steps, series, smooth)]
    if predicted is not None:
        at = plot.y(predicted)
        parts.append(line(plot.x.start, at, plot.x.end, at, "predicted"))
    if len(validated):
        xs, ys = plot.x(validated[:, 0]), plot.y(validated[:, 1])
        parts += [polyline(xs, ys, "held-out"), dots(xs, ys, "dots held-out")]
        notes.append(f"Second line: held-out data, {number(validated[-1, 1])} at the end.")
    label = f"{title}: {number(series[0])} at the first step, {number(series[-1])} at the last"
    drawn = drawing(plot.width, plot.height, label, parts)
    return Figure(title=title, svg=drawn, caption=" ".join(notes))


def _curves(plot: Plot, steps: np.ndarray, series: np.ndarray, smooth: bool) -> list[str]:
    at, parts = extremes(series, _BUCKETS), []
    xs, ys = plot.x(steps), plot.y(series)
    if not smooth:
        return [polyline(xs[at], ys[at], "curve")] if len(at) > 1 else [dots(xs, ys, "dots")]
    parts.append(dots(xs[at], ys[at], "dots faint"))
    if len(series) > 1:
        mean = plot.y(moving_mean(series, len(series) // 40))
        along = np.unique(np.linspace(0, len(series) - 1, _BUCKETS).astype(int))
        parts.append(polyline(xs[along], mean[along], "curve"))
    return parts


def packs_figure(packs: ScheduledPacks, caps: Caps) -> Figure:
    """Density of packs over tokens and limited items, or samples where no items are limited; good
    packs crowd near a cap."""
    name, counted = "samples", np.diff(packs.packs.offsets)
    limited = [item for item in caps.names if item in packs.items]
    if limited:
        # Of several kinds of items, those that fill packs most.
        name = max(limited, key=lambda item: packs.items[item].mean() / caps[item])
        counted = packs.items[name]
    most = caps.get(name) or int(counted.max())
    plot = Plot.over((-0.05 * most, 1.06 * most), (0, 1.08 * caps["tokens"]))
    cell_x = max(1, -(-most // _CELLS))
    cell_y = max(1, -(-caps["tokens"] // (_CELLS // 2)))
    cells, counts = np.unique(
        np.stack([counted // cell_x, packs.tokens // cell_y]), axis=1, return_counts=True
    )
    width = plot.x(cell_x) - plot.x(0)
    height = plot.y.start - plot.y(cell_y)
    parts = [plot.axes(f"{name} in the pack", "tokens in the pack")]
    for (column, row), count in zip(cells.T, counts, strict=True):
        # Five shades on a logarithmic scale: one pack stays visible beside a thousand.
        shade = 1 + round(4 * np.log1p(count) / np.log1p(counts.max()))
        side = min(max(width, 3.0), 14.0)
        x, y = plot.x(column * cell_x) - side / 2, plot.y(row * cell_y) - height
        parts.append(rect(x, y, side, max(height, 3.0), f"pack shade{shade}"))
    x, y = plot.x(most), plot.y(caps["tokens"])
    if name in caps.names:
        parts.append(line(x, plot.y.start, x, plot.y.end, "cap"))
    parts.append(line(plot.x.start, y, plot.x.end, y, "cap"))
    return Figure(
        title="Packs against their caps",
        svg=drawing(plot.width, plot.height, f"{name} and tokens of {len(packs):,} packs", parts),
        caption=f"{len(packs):,} packs; darker: more of them. Dashed: the caps, "
        f"{words([f'{caps[name]:,} {name}' for name in caps.names])}.",
    )


def waste_figures(plan: Plan, replay: ReplaySummary | None) -> list[Figure]:
    """The predicted step as ideal computation and what is lost to each cause; below it the
    replayed step."""
    figures = []
    if plan.prediction is not None:
        caption = (
            "Ideal: the needed work spread evenly over all devices, without waiting. The step is "
            "simulated again without one cause after another; the differences add up to it."
        )
        exchange = plan.prediction.exchange
        if exchange.total_ms:
            caption += (
                f" Data-parallel ranks exchange gradients and weights for "
                f"{milliseconds(exchange.total_ms)}, of which {milliseconds(exchange.exposed_ms)} "
                "are exposed and count as communication."
            )
        figures.append(
            _lost_figure("predicted", plan.prediction.lost, plan.prediction.step_ms, caption)
        )
    if replay is not None:
        caption = "The same of the replayed steps, with the times that their stages took."
        figures.append(_lost_figure("replayed", replay.lost, replay.step_ms, caption))
    return [figure for figure in figures if figure.shares]


def _lost_figure(source: str, lost: LostTime, step_ms: float, caption: str) -> Figure:
    shown = [
        (f"lost-{name.replace(' ', '-')}", name, ms)
        for name, ms in lost.named().items()
        if ms >= _LEAST_SHOWN_SHARE * step_ms > 0
    ]
    return Figure(
        title=f"Where the {source} step's time goes",
        shares=[(css, ms / step_ms) for css, _, ms in shown],
        caption=caption,
        legend=[
            (css, f"{name} {milliseconds(ms)} ({percent(ms / step_ms)})") for css, name, ms in shown
        ],
        wide=True,
    )


def meter(share: float, mark: float) -> str:
    """A bar filled to `share` of its width, with a mark on it, for a table cell."""
    parts = [
        rect(0, 4, _METER, 10, "wait"),
        rect(0, 4, _METER * share, 10, "right"),
        rect(_METER * mark - 1, 0, 2, 18, "measured"),
    ]
    label = f"{percent(share)}; the mark is at {percent(mark)}"
    return drawing(_METER, 18, label, parts, "spark")
