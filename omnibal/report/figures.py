"""The report's figures of plan and run, as SVG; colours mean the same thing in all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from omnibal.job.plan import Plan
from omnibal.job.replay import ReplaySummary
from omnibal.job.runlog import StepRecord
from omnibal.model.limits import USABLE_MEMORY_FRACTION, Caps, memory_cap_gib, words
from omnibal.model.units import LANGUAGE
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.prediction import StageMemory
from omnibal.pipeline.stage import Span, Stage
from omnibal.report.formatting import milliseconds, number, percent
from omnibal.report.summary import StepFigures, recomputed_layers
from omnibal.report.svg import (
    TOP,
    Plot,
    Rows,
    Scale,
    dots,
    drawing,
    extremes,
    line,
    moving_mean,
    padded,
    polyline,
    rect,
    text,
)

WIDE = 1080  # pixels: the page's own width
_LEAST_SHOWN_SHARE = 0.001  # of a step: what is less would be thinner than a pixel
TIME_PARTS = ("forward", "backward", "wait", "data", "update", "encoder", "exchange")
"""Classes of the parts of `StageTime`, in its order."""
_BUCKETS = 400
"""Drawn points per curve are at most twice this, however long the run."""
_PITCH_OF_NUMBERS = 20
"""Least width of a unit's block, in pixels, that has room for its number."""
_CELLS = 64
"""Cells per axis of the pack density."""
_METER = 150.0  # pixels: a table's column that still leaves room for its neighbours
_HATCH = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="6" class="hatch"/>'
    "</pattern></defs>"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure with its heading above and its caption below."""

    title: str
    svg: str = ""
    """What is drawn, whose text is escaped."""
    caption: str
    legend: Sequence[tuple[str, str]] = ()
    """Keys of (class, meaning)."""
    wide: bool = False


def split_figure(plan: Plan) -> Figure:
    """Every unit of the model as a block in the row of its stage."""
    drawn = drawn_units(plan)
    longest = max(map(len, drawn))
    pitch = min(34.0, (WIDE - 80) / longest)
    rows = Rows(x=Scale(0, 1, 72, 72 + pitch), top=4, pitch=36, count=len(drawn), gap=8)
    parts = [_HATCH, rows.labels([f"stage {stage}" for stage in range(len(drawn))])]
    for stage, units in enumerate(drawn):
        for place, (css, name, short, recomputed) in enumerate(units):
            tip = f"{name}, recomputed" if recomputed else name
            for fill in (css, "hatched")[: 1 + recomputed]:
                parts.append(rows.bar(stage, place, place + 1, fill, tip, 2))
            if pitch >= _PITCH_OF_NUMBERS:
                at = rows.x(place + 0.5) - 1
                parts.append(text(at, rows.middle(stage), short, "block middle"))
    label = "; ".join(
        f"stage {stage}: {len(units)} units, {again} recomputed{' by level' if plan.levels else ''}"
        for stage, (units, again) in enumerate(zip(drawn, recomputed_layers(plan), strict=True))
    )
    shorts = {short for units in drawn for _, _, short, _ in units}
    letters = {"E": "embedding", "P": "projector", "H": "output head"}
    named = {letter: name for letter, name in letters.items() if letter in shorts}
    caption = "Rest the pointer on a block for its name."
    if pitch >= _PITCH_OF_NUMBERS:
        explained = ", ".join(f"{letter}: {name}" for letter, name in named.items())
        caption = f"Numbers count over the whole model. {explained}."
    at_a_level = " at a level of packs" if plan.levels else ""
    return Figure(
        title="Layers on each pipeline stage",
        svg=drawing(rows.x(longest), rows.bottom + 2, label, parts),
        caption=caption,
        legend=(
            *((css, f"{tower} layer") for tower, css in _colours(plan).items()),
            ("edge", ", ".join(named.values())),
            ("hatched", f"recomputed in the backward pass{at_a_level}"),
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

    def drawn(unit: Span, at_levels: Sequence[Stage]) -> tuple[str, str, str, bool]:
        if unit.layers is None:
            short = unit.name.split()[-1][0].upper()
            return "edge", unit.name.replace(" embed", " embedding"), short, False
        layer = unit.layers[0]
        again = any(layer in stage.recomputed(unit.name) for stage in at_levels)
        return colours[unit.name], f"{unit.name} layer {layer}", str(layer), again

    return [
        [drawn(unit, at_levels) for span in at_levels[0].units for unit in span.units]
        for at_levels in zip(*map(plan.held, plan.stages_at_levels), strict=True)
    ]


def memory_parts(memory: StageMemory) -> dict[str, float]:
    """GiB by kind; the kinds are classes of report.css."""
    return {
        "weights": memory.weights_gib,
        "gradients": memory.gradients_gib,
        "optimizer": memory.optimizer_gib,
        "activations": memory.activations_gib,
        "working": memory.transient_gib,
    }


def memory_figure(
    plan: Plan, sources: Mapping[str, StepFigures], replay: ReplaySummary | None
) -> Figure | None:
    """Predicted memory of one device of each stage against what it may fill; replayed and
    measured peaks. None without a prediction."""
    if plan.prediction is None:
        return None
    memories = [memory_parts(stage.memory) for stage in plan.prediction.stages]
    cap = memory_cap_gib(plan.cluster)
    peaks = {name: figures.peak_gib for name, figures in sources.items() if name != "predicted"}
    most = max(cap, *(max(figures.peak_gib) for figures in sources.values()))
    x = Scale(0, 1.04 * most, 72, 506)
    rows = Rows(x=x, top=TOP, pitch=34, count=len(memories), gap=12)
    parts = [rows.axis("GiB"), rows.labels([f"stage {stage}" for stage in range(len(memories))])]
    for stage, memory in enumerate(memories):
        stack = [(size, css, f"{css}: {number(size)} GiB") for css, size in memory.items()]
        parts.append(rows.stack(stage, stack))
        for name, gib in peaks.items():
            at, tip = x(gib[stage]) - 1.5, f"{name}: {number(gib[stage])} GiB"
            parts.append(rect(at, TOP + 34 * stage + 2, 3, 30, name, tip))
    parts += [rows.mark(cap, "cap"), text(x(cap) + 4, TOP - 8, "usable", "label end")]
    usable = f"{100 * USABLE_MEMORY_FRACTION:g} % of a device's {plan.cluster.memory_gib:g} GiB"
    caption = f"Predicted, at the peak of the step. Usable: {usable}."
    if replay and not all(stage.with_working_memory for stage in replay.stages):
        caption += " The replayed peak on a CPU is without working memory."
    if "measured" in sources:
        caption += " The measured peak on a CPU is the whole process, its libraries included."
    label = "memory by kind and stage against what is usable"
    return Figure(
        title="Memory of one device per stage",
        svg=drawing(520, rows.bottom + 24, label, parts),
        caption=caption,
        legend=[(css, css) for css in memories[0]] + [(name, f"{name} peak") for name in peaks],
    )


def time_figure(plan: Plan, sources: Mapping[str, StepFigures]) -> Figure | None:
    """Forward, backward, wait, data and update of every stage by source; None without any."""
    series = {name: figures.stages for name, figures in sources.items() if figures.stages}
    if not series:
        return None
    longest = max(sum(time) for times in series.values() for time in times)
    # Half a row stays free below each stage.
    of_stage = len(series) + 0.5
    x = Scale(0, 1.02 * longest or 1.0, 126, 506)
    rows = Rows(x=x, top=6, pitch=18, count=of_stage * plan.parallel.pipeline, gap=2)
    parts = [rows.axis("ms")]
    for stage in range(plan.parallel.pipeline):
        for place, (name, times) in enumerate(series.items()):
            row = of_stage * stage + place
            parts.append(rows.label(row, name if place else f"stage {stage} {name}"))
            tips = zip(times[stage], TIME_PARTS, strict=True)
            parts.append(
                rows.stack(row, [(ms, css, f"{css}: {milliseconds(ms)}") for ms, css in tips])
            )
    has_encoders = any(time.encoder_ms for times in series.values() for time in times)
    means = ["Replayed: mean over the replayed steps."] * ("replayed" in series)
    means += ["Measured: median over the run's steps."] * ("measured" in series)
    label = f"time per stage and activity, {' and '.join(series)}"
    return Figure(
        title="A step's time by stage",
        svg=drawing(520, rows.bottom + 24, label, parts),
        caption="Backward includes recomputation. Update: gradient reduction, clipping, weight "
        "update. "
        + "Encoder, exchange: of data-parallel encoders, on all ranks. " * has_encoders
        + (" ".join(means) or "Predicted."),
        legend=[(css, css) for css in TIME_PARTS[: 7 if has_encoders else 5]],
    )


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
    points = np.array([[record.step for record in records], values], np.float64)
    finite = np.isfinite(points[1])
    notes = [] if predicted is None else [f"Dashed: predicted, {number(predicted)} {y_title}."]
    if not finite.all():
        notes.append(f"Steps without a finite value: {int((~finite).sum()):,}.")
    points = points[:, finite]
    if not points.size:
        return Figure(title=title, caption=" ".join(notes))
    validated = np.array([one for one in held_out if np.isfinite(one[1])]).reshape(-1, 2)
    marks = [] if predicted is None else [predicted]
    low, high = padded(np.concatenate([points[1], marks, validated[:, 1]]))
    low = 0.0 if from_zero or low < 0 <= points[1].min() else low
    if from_zero:
        limit = 1.5 * max(float(np.percentile(points[1], 95)), *marks, 0.0)
        high = min(high, limit) if limit > 0 else high
        shown = points[1] <= high
        notes += [] if shown.all() else [f"Steps above the axis: {int((~shown).sum()):,}."]
        points = points[:, shown]
    plot = Plot.over((records[0].step, max(records[-1].step, records[0].step + 1)), (low, high))
    parts = [plot.axes("step", y_title), *_curves(plot, points, smooth)]
    for value in marks:
        at = plot.y(value)
        parts.append(line(plot.x.start, at, plot.x.end, at, "predicted"))
    if len(validated):
        xs, ys = plot.x(validated[:, 0]), plot.y(validated[:, 1])
        parts += [polyline(xs, ys, "held-out"), dots(xs, ys, "dots held-out")]
        notes.append(f"Second line: held-out data, {number(validated[-1, 1])} at the end.")
    first, last = points[1, 0], points[1, -1]
    label = f"{title}: {number(first)} at the first step, {number(last)} at the last"
    drawn = drawing(plot.width, plot.height, label, parts)
    return Figure(title=title, svg=drawn, caption=" ".join(notes))


def _curves(plot: Plot, points: np.ndarray, smooth: bool) -> list[str]:
    at, parts = extremes(points[1], _BUCKETS), []
    xs, ys = plot.x(points[0]), plot.y(points[1])
    if not smooth:
        return [polyline(xs[at], ys[at], "curve")] if len(at) > 1 else [dots(xs, ys, "dots")]
    parts.append(dots(xs[at], ys[at], "dots faint"))
    count = points.shape[1]
    if count > 1:
        mean = plot.y(moving_mean(points[1], count // 40))
        along = np.unique(np.linspace(0, count - 1, _BUCKETS).astype(int))
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


def waste_figure(plan: Plan, replay: ReplaySummary | None) -> Figure | None:
    """The step as ideal computation and what is lost to each cause, predicted and replayed."""
    steps: dict[str, tuple[dict[str, float], float]] = {}
    if plan.prediction is not None:
        steps["predicted"] = plan.prediction.lost.named(), plan.prediction.step_ms
    if replay is not None:
        steps["replayed"] = replay.lost.named(), replay.step_ms
    shown = {
        cause: f"lost-{cause.replace(' ', '-')}"
        for lost, step_ms in steps.values()
        for cause, ms in lost.items()
        if ms >= _LEAST_SHOWN_SHARE * step_ms > 0
    }
    if not shown:
        return None

    def words(cause: str) -> str:
        parts = [(lost.get(cause, 0.0), step_ms) for lost, step_ms in steps.values()]
        return " / ".join(f"{milliseconds(ms)} ({percent(ms / step_ms)})" for ms, step_ms in parts)

    longest_ms = max(step_ms for _, step_ms in steps.values())
    x = Scale(0, longest_ms, 72, WIDE - 16)
    rows = Rows(x=x, top=4, pitch=28, count=len(steps), gap=6)
    parts = [rows.axis("ms", 8), rows.labels([*steps])]
    for row, (lost, _) in enumerate(steps.values()):
        tips = [(lost.get(cause, 0.0), css, cause) for cause, css in shown.items()]
        parts.append(
            rows.stack(row, [(ms, css, f"{c}: {milliseconds(ms)}") for ms, css, c in tips])
        )
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
    return Figure(
        title="Where the step's time goes",
        svg=drawing(WIDE, rows.bottom + 26, "time of a step by cause", parts),
        caption=caption,
        legend=[(css, f"{cause} {words(cause)}") for cause, css in shown.items()],
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
