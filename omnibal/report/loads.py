"""Load of every rank and step, before and after balancing, as a self-contained SVG file.

Both sides are simulated: predicted forward and backward time of the whole model, on the samples
given. "Before" is common practice, which fills micro-batches with a fixed count of samples in
random order and pads them to their longest; "after" is the schedule that was made.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import SampleData
from omnibal.model.limits import words
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.report.formatting import milliseconds, number, percent, shorten, write_ascii
from omnibal.report.panels import (
    MARGIN,
    WIDTH,
    Panel,
    heading,
    picture,
    stacked,
    time_axis,
    time_unit,
)
from omnibal.report.svg import Plot, Rows, Scale, polyline, text
from omnibal.steps.metrics import rank_sums, straggler_factor

_STEPS_SHOWN, _RANKS_SHOWN = 24, 16
_DIGIT_WIDTH = 7.5
"""Most width of a digit of a step's number."""
_PLOT_HEIGHT, _PLOT_GAP = 220, 24
_QUANTILES = 200
"""Drawn points of a distribution, however long the epoch."""
_NAME_LIMIT = 28


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankLoads:
    """Steps of an epoch: the compute time of every rank in each, and the samples trained."""

    compute_ms: np.ndarray
    """Compute time, [steps, ranks]; a step ends with its slowest rank."""
    samples: int
    """Samples of all steps together."""
    pad_ratio: float
    """Share of the tokens computed that are padding, mean over micro-batches."""

    @property
    def step_ms(self) -> np.ndarray:
        """Time of every step, that of its slowest rank. [steps]"""
        return self.compute_ms.max(axis=1)

    @property
    def ms_per_sample(self) -> float:
        """Time of all steps per sample trained."""
        return float(self.step_ms.sum() / self.samples)


def common_practice(
    lengths: Lengths,
    samples_per_micro_batch: int,
    dp: int,
    micro_batches: int,
    seed: int,
    load: Callable[[Packs, Lengths], np.ndarray],
) -> RankLoads | None:
    """Load of every rank and step when nothing is balanced; None if samples make no whole step.

    Samples come in random order, the same count in every micro-batch, where each is padded with
    tokens to the longest of them; tiles need no padding. The last, incomplete step is dropped.

    Padding is counted as if it were text: a trainer that leaves it out of attention, or of the
    head, is a little faster. The caps do not hold here: some micro-batches may fit on no device.

    Args:
        lengths: of all samples.
        samples_per_micro_batch: of every one.
        dp: data-parallel ranks.
        micro_batches: of one rank in a step.
        seed: of the order.
        load: gives the load of every micro-batch [packs] from packs of these lengths.
    """
    samples_per_step = samples_per_micro_batch * dp * micro_batches
    complete = len(lengths) // samples_per_step * samples_per_step
    if not complete:
        return None
    order = np.random.default_rng(seed).permutation(len(lengths))
    micro_batch = order[:complete].reshape(-1, samples_per_micro_batch)
    tokens = lengths.tokens.copy()
    tokens[micro_batch] = lengths.tokens[micro_batch].max(axis=1, keepdims=True)
    packs = Packs(
        samples=micro_batch.ravel(), offsets=np.arange(0, complete + 1, samples_per_micro_batch)
    )
    load_ms = load(packs, replace(lengths, tokens=tokens))
    filled = lengths.tokens[micro_batch].sum(axis=1) / tokens[micro_batch].sum(axis=1)
    return RankLoads(
        compute_ms=load_ms.reshape(-1, dp, micro_batches).sum(axis=2),
        samples=complete,
        pad_ratio=float(1 - filled.mean()),
    )


def write_loads(job: JobSpec, data: SampleData, scheduled: ScheduledPacks, output: Path) -> None:
    """Write the SVG file of `draw_loads`, and the directories that it lies in."""
    write_ascii(draw_loads(job, data, scheduled), output)


def draw_loads(job: JobSpec, data: SampleData, scheduled: ScheduledPacks) -> str:
    """The SVG of a schedule of one epoch, and of common practice on the same samples.

    Equal inputs give equal text.

    Args:
        job: whose data-parallel ranks are shown, and whose costs predict their times.
        data: that was packed under one limit.
        scheduled: its packs.
    """
    dp, packs = job.parallel.data, len(scheduled)
    lengths, seed, caps = data.lengths, data.settings.seed, data.caps
    micro_batches = data.packs_per_step // dp
    count = max(round(len(scheduled.packs.samples) / packs), 1)
    before = common_practice(lengths, count, dp, micro_batches, seed, job.load_ms)
    # Nothing is padded: samples of a pack follow one another in one row.
    compute_ms = rank_sums(scheduled, job.load_ms(scheduled.packs, lengths), dp)
    after = RankLoads(compute_ms=compute_ms, samples=len(scheduled.packs.samples), pad_ratio=0.0)
    sides = {"after": after} if before is None else {"before": before, "after": after}
    # Equally many on both sides, so that their ends can be compared.
    steps = min(_STEPS_SHOWN, *(len(loads.compute_ms) for loads in sides.values()))
    shown = {side: _evenly(len(loads.compute_ms), steps) for side, loads in sides.items()}
    x = time_axis(max(float(sides[side].step_ms[of].sum()) for side, of in shown.items()))
    each = f"{_counted(count, 'sample')} per micro-batch"
    headings = {
        "before": f"Before: random order, {each}, padded to the longest",
        "after": f"After: packed, matched and dealt out ({data.settings.packing})",
    }
    first = next(iter(sides.values()))
    panels = (_panel(side, headings[side], sides[side], shown[side], x, first) for side in sides)
    parts, top = stacked(panels)
    source = (
        f"Simulated from predicted time ({shorten(job.cost.source, 40)}): both passes of the whole "
        "model on every rank. A step ends with its slowest rank."
    )
    note = (
        f"Before: seed {seed}; {each}, the rounded mean of after; padding costs what text "
        "does; the caps do not hold; the last incomplete step is dropped."
        if before
        else f"No picture of before: {each} do not make one complete step of "
        f"{data.packs_per_step:,} micro-batches."
    )
    below = top + _PLOT_HEIGHT + 48
    model, cluster = (shorten(one.name, _NAME_LIMIT) for one in (job.model, job.cluster))
    title = f"Predicted load of ranks: {model} on {cluster}"
    most = words([f"{caps[name]:,} {name}" for name in caps.names])
    subtitle = (
        f"{_counted(len(lengths), 'sample')} in {_counted(packs, 'pack')} of at most {most}; "
        f"{_counted(dp, 'data-parallel rank')}, up to {_counted(micro_batches, 'pack')} each per "
        "step"
    )
    keys = [(side, f"computing, {side}") for side in sides]
    keys.append(("wait", "waiting for the slowest rank of the step"))
    parts = [
        heading(title, subtitle, keys, "simulated from predicted time"),
        *parts,
        _distributions(sides, top),
        text(MARGIN, below, source),
        text(MARGIN, below + 18, note),
    ]
    return picture(title, below + 34, parts)


def _counted(count: int, what: str, shown: int | None = None) -> str:
    """A count in words, and how many of them are shown if these are fewer."""
    of = "" if shown is None or shown == count else f"{shown} of "
    return f"{of}{count:,} {what}{'s' if count != 1 else ''}"


def _evenly(count: int, at_most: int) -> np.ndarray:
    """Up to `at_most` of the numbers below `count`, evenly spread from the first to the last."""
    return np.linspace(0, count - 1, min(count, at_most)).round().astype(np.int64)


def _panel(
    css: str, title: str, loads: RankLoads, steps: np.ndarray, x: Scale, first: RankLoads
) -> Panel:
    """Steps in a row on the time axis, in each a bar per rank, and key figures of the whole epoch;
    time per sample also as a share of the first side's."""
    all_steps, all_ranks = loads.compute_ms.shape
    ranks = _evenly(all_ranks, _RANKS_SHOWN)
    rows = Rows(x=x, top=62, pitch=min(120 / len(ranks), 32), count=len(ranks), gap=1)
    ends = np.concatenate([[0], np.cumsum(loads.step_ms[steps])])
    waited = float(1 - loads.compute_ms.mean(axis=1).sum() / loads.step_ms.sum())
    share = number(loads.ms_per_sample / first.ms_per_sample)
    counts = (
        _counted(all_steps, "step", len(steps)),
        _counted(all_ranks, "rank", len(ranks)),
        "steps end to end",
    )
    return Panel(
        css=css,
        heading=title,
        note=", ".join(counts),
        rows=rows,
        names=[f"rank {rank:,}" for rank in ranks],
        bars=[
            *_bars(rows, css, loads, steps, ranks),
            *(rows.mark(end, "cut") for end in ends[1:-1]),
            *_step_numbers(rows, steps, x(ends)),
        ],
        end_ms=float(ends[-1]),
        figures=(
            (f"{straggler_factor(loads.compute_ms):.4f}", "straggler factor, mean"),
            (percent(waited), "of rank time waited"),
            (percent(loads.pad_ratio), "of tokens are padding"),
            (number(loads.samples / all_steps, 4), "samples per step, mean"),
            (milliseconds(float(loads.step_ms.mean())), "per step, mean"),
            (
                milliseconds(loads.ms_per_sample),
                "per sample" if loads is first else f"per sample, {share} of before",
            ),
        ),
    )


def _step_numbers(rows: Rows, steps: np.ndarray, ends: np.ndarray) -> Iterator[str]:
    """The number of every step that has room for it above its bars, which end at `ends`."""
    y, free_from = rows.top - 8, 0.0
    yield text(rows.x.start - 8, y, "step", "label end")
    for step, middle in zip(steps, (ends[:-1] + ends[1:]) / 2, strict=True):
        half = _DIGIT_WIDTH * len(f"{step:,}") / 2
        if middle - half >= free_from:
            yield text(middle, y, f"{step:,}", "label middle")
            free_from = middle + half


def _bars(
    rows: Rows, css: str, loads: RankLoads, steps: np.ndarray, ranks: np.ndarray
) -> Iterator[str]:
    """In each step the compute time of each rank, and after it the time it waits."""
    start_ms = 0.0
    for step in steps:
        end_ms = start_ms + loads.step_ms[step]
        for row, rank in enumerate(ranks):
            done_ms = start_ms + loads.compute_ms[step, rank]
            tip = (
                f"step {step:,}, rank {rank:,}: computes {milliseconds(done_ms - start_ms)}, "
                f"waits {milliseconds(end_ms - done_ms)}"
            )
            yield rows.bar(row, start_ms, done_ms, css, tip)
            # Thinner ones would be written as 0.
            if rows.x(end_ms) - rows.x(done_ms) >= 0.05:
                yield rows.bar(row, done_ms, end_ms, "wait", tip)
        start_ms = end_ms


def _distributions(sides: Mapping[str, RankLoads], top: float) -> str:
    """Distributions over the whole epoch: imbalance of steps, and load of ranks."""
    parts = [text(MARGIN, top + 14, "All steps of the epoch", "heading")]
    for place, side in enumerate(sides):
        left = MARGIN + 220 + 100 * place
        parts.append(polyline(np.array([left, left + 34]), np.array([top + 9] * 2), side))
        parts.append(text(left + 41, top + 14, side))
    unit, unit_ms = time_unit(max(loads.compute_ms.max() for loads in sides.values()))
    values = {side: loads.compute_ms.ravel() / unit_ms for side, loads in sides.items()}
    plots = [("load", f"load of a rank in a step, {unit}", "% of loads at or below", values, 0.0)]
    if all(loads.compute_ms.shape[1] > 1 for loads in sides.values()):
        title = "straggler factor of a step: slowest rank / mean"
        uneven = {side: one.step_ms / one.compute_ms.mean(axis=1) for side, one in sides.items()}
        plots.insert(0, ("straggler", title, "% of steps at or below", uneven, 1.0))
    width = (WIDTH - 2 * MARGIN - _PLOT_GAP * (len(plots) - 1)) / len(plots)
    shares = np.linspace(0, 1, _QUANTILES + 1)
    for place, (css, x_title, y_title, of_sides, low) in enumerate(plots):
        high = max(1.02 * float(max(of.max() for of in of_sides.values())), low + 0.02)
        plot = Plot.over((low, high), (0, 100), width, _PLOT_HEIGHT)
        drawn = [plot.axes(x_title, y_title)]
        for side, of in of_sides.items():
            reached = np.quantile(of, shares, method="inverted_cdf")
            drawn.append(polyline(plot.x(reached), plot.y(100 * shares), side))
        at = f"{MARGIN + place * (width + _PLOT_GAP):g} {top + 26:g}"
        parts.append(f'<g class="{css}" transform="translate({at})">{"".join(drawn)}</g>')
    return "".join(parts)
