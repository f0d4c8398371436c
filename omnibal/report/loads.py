"""Figure of the load of every rank and step, before and after balancing.

Loads are predicted compute times of the complete model. "Before": a fixed number of samples per
micro-batch in random order, padded to the longest. "After": the schedule.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from omnibal.job.job import JobSpec
from omnibal.job.plan_data import SampleData
from omnibal.model.limits import words
from omnibal.packing.balance_metrics import rank_sums, straggler_factor
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.report.drawing import COLOURS, WIDE, label_rows, new_figure, style, xml_text
from omnibal.report.formatting import milliseconds, number, percent, shorten

_STEPS_SHOWN, _RANKS_SHOWN = 24, 16  # distinguishable bars
_QUANTILES = 200  # drawn points of a distribution
_NAME_LIMIT = 28  # characters: both names then fit into the title's line
_NOTE_WIDTH = 145  # characters in the figure's width
_SIDE_COLOURS = {"before": "orange", "after": "blue"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankLoads:
    """Predicted compute times of an epoch's steps by rank, and its samples."""

    compute_ms: np.ndarray  # [steps, ranks]; a step ends with its slowest rank
    samples: int
    pad_ratio: float  # padding share of tokens, mean over micro-batches

    @property
    def step_ms(self) -> np.ndarray:
        """Time of each step's slowest rank, [steps]."""
        return self.compute_ms.max(axis=1)

    @property
    def wait_fraction(self) -> float:
        """Share of all ranks' time that is spent waiting for the slowest rank."""
        return float(1 - self.compute_ms.mean(axis=1).sum() / self.step_ms.sum())

    @property
    def ms_per_sample(self) -> float:
        return float(self.step_ms.sum() / self.samples)


def compare_loads(
    job: JobSpec, data: SampleData, scheduled: ScheduledPacks
) -> dict[str, RankLoads]:
    """Return loads `before` (common practice, if it fills a step) and `after` (the schedule).

    Common practice is random order and a fixed number of samples per micro-batch, each padded with
    text tokens to the longest; it ignores caps and drops the incomplete last step.
    """
    dp, lengths = job.parallel.data, data.lengths
    compute_ms = rank_sums(scheduled, job.load_ms(scheduled.packs, lengths), dp)
    # Packed samples share a row without padding.
    after = RankLoads(compute_ms=compute_ms, samples=len(scheduled.packs.samples), pad_ratio=0.0)
    micro_batches, samples_per_micro_batch = data.packs_per_step // dp, _mean_samples(scheduled)
    samples_per_step = samples_per_micro_batch * dp * micro_batches
    complete = len(lengths) // samples_per_step * samples_per_step
    if not complete:
        return {"after": after}
    order = np.random.default_rng(data.settings.seed).permutation(len(lengths))
    micro_batch = order[:complete].reshape(-1, samples_per_micro_batch)  # [micro-batches, samples]
    tokens = lengths.tokens.copy()
    tokens[micro_batch] = lengths.tokens[micro_batch].max(axis=1, keepdims=True)
    packs = Packs(
        samples=micro_batch.ravel(), offsets=np.arange(0, complete + 1, samples_per_micro_batch)
    )
    # Padding costs attention and head like text.
    load_ms = job.load_ms(packs, replace(lengths, tokens=tokens))
    filled = lengths.tokens[micro_batch].sum(axis=1) / tokens[micro_batch].sum(axis=1)
    before = RankLoads(
        compute_ms=load_ms.reshape(-1, dp, micro_batches).sum(axis=2),
        samples=complete,
        pad_ratio=float(1 - filled.mean()),
    )
    return {"before": before, "after": after}


def _mean_samples(scheduled: ScheduledPacks) -> int:
    return max(round(len(scheduled.packs.samples) / len(scheduled)), 1)


@style()
def draw_loads(job: JobSpec, data: SampleData, scheduled: ScheduledPacks) -> Figure:
    """Return a figure of steps with a bar per rank, and of distributions over the epoch."""
    sides = compare_loads(job, data, scheduled)
    figure = new_figure(WIDE, 330 + 220 * len(sides))
    names = (job.model.name, job.cluster.name)
    model, cluster = (shorten(xml_text(name), _NAME_LIMIT) for name in names)
    title = f"Predicted load of ranks: {model} on {cluster}"
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    *spans, below = figure.subfigures(len(sides) + 1, 1, squeeze=False)[:, 0]
    size = f"{_pluralize(_mean_samples(scheduled), 'sample')} per micro-batch"
    titles = {
        "before": f"Before: random order, {size}, padded to the longest",
        "after": f"After: packed, matched and dealt out ({data.settings.packing})",
    }
    # As many steps on both sides, so that their ends can be compared.
    count = min(_STEPS_SHOWN, *(len(loads.compute_ms) for loads in sides.values()))
    first = next(iter(sides.values()))
    all_axes = [span.subplots() for span in spans]
    for axes, (side, loads) in zip(all_axes, sides.items(), strict=True):
        _draw_steps(axes, loads, spread_evenly(len(loads.compute_ms), count), _SIDE_COLOURS[side])
        axes.set_title(f"{titles[side]}\n{key_figures(loads, first)}")
        axes.sharex(all_axes[0])
    _draw_distributions(below.subplots(1, 2), sides)
    dp, caps = job.parallel.data, data.caps
    limits = words([f"{caps[name]:,} {name}" for name in caps.names])
    note = (
        f"{_pluralize(len(data.lengths), 'sample')} in {_pluralize(len(scheduled), 'pack')} of at "
        f"most {limits}; {_pluralize(dp, 'data-parallel rank')}, up to "
        f"{_pluralize(data.packs_per_step // dp, 'pack')} each per step. Simulated from predicted "
        f"time ({shorten(xml_text(job.cost.source), 40)}): both passes of the model on "
        "every rank. A step ends with its slowest rank. "
    )
    if "before" in sides:
        note += (
            f"Before: seed {data.settings.seed}; {size}, the rounded mean of after; padding costs "
            "what text does; the caps do not hold; the last incomplete step is dropped."
        )
    else:
        note += f"No picture of before: {size} do not make one complete step."
    below.supxlabel(fill(note, _NOTE_WIDTH), x=0.01, ha="left", color=COLOURS["soft"])
    return figure


def key_figures(loads: RankLoads, first: RankLoads) -> str:
    """Return a text on the epoch's figures, with time per sample also relative to `first`."""
    step_ms = milliseconds(float(loads.step_ms.mean()))
    text = (
        f"straggler factor {straggler_factor(loads.compute_ms):.4f}; "
        f"{percent(loads.wait_fraction)} of rank time waited; {percent(loads.pad_ratio)} padding; "
        f"{number(loads.samples / len(loads.step_ms), 4)} samples and {step_ms} per step; "
        f"{milliseconds(loads.ms_per_sample)} per sample"
    )
    if loads is first:
        return text
    return f"{text}, {number(loads.ms_per_sample / first.ms_per_sample)} of before"


def _pluralize(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def spread_evenly(count: int, at_most: int) -> np.ndarray:
    """Return up to `at_most` evenly spaced integers from 0 to `count` - 1."""
    return np.linspace(0, count - 1, min(count, at_most)).round().astype(np.int64)


def _draw_steps(axes: Axes, loads: RankLoads, steps: np.ndarray, colour: str) -> None:
    """Draw compute and idle time by rank and step."""
    all_steps, all_ranks = loads.compute_ms.shape
    ranks = spread_evenly(all_ranks, _RANKS_SHOWN)
    ends_ms = np.cumsum(loads.step_ms[steps])
    starts_ms = ends_ms - loads.step_ms[steps]  # drawn end to end
    for row, rank in enumerate(ranks):
        took_ms = loads.compute_ms[steps, rank]
        axes.barh(row, took_ms, 0.85, starts_ms, color=COLOURS[colour], label="computing")
        axes.barh(
            *(row, ends_ms - starts_ms - took_ms, 0.85, starts_ms + took_ms),
            facecolor=COLOURS["pale"],
            edgecolor=COLOURS["grey"],
            linewidth=0,
            hatch="///",
            label="waiting for the slowest rank",
        )
    axes.vlines(ends_ms, -0.5, len(ranks) - 0.5, color=COLOURS["ink"], linewidth=0.8)
    label_rows(axes, [f"rank {rank:,}" for rank in ranks])
    axes.set_xlabel(
        f"ms, {len(steps)} of {_pluralize(all_steps, 'step')} end to end, "
        f"{len(ranks)} of {_pluralize(all_ranks, 'rank')}"
    )
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[:2], labels[:2], loc="upper right", bbox_to_anchor=(1, -0.09), ncols=2)


def _draw_distributions(all_axes: np.ndarray, sides: Mapping[str, RankLoads]) -> None:
    """Draw the epoch's distributions of step imbalance and rank load."""
    shares = np.linspace(0, 1, _QUANTILES + 1)
    for side, loads in sides.items():
        straggler = loads.step_ms / loads.compute_ms.mean(axis=1)
        for axes, values in zip(all_axes, (straggler, loads.compute_ms.ravel()), strict=True):
            reached = np.quantile(values, shares, method="inverted_cdf")
            axes.plot(reached, 100 * shares, color=COLOURS[_SIDE_COLOURS[side]], label=side)
    straggler_axes, load_axes = all_axes
    straggler_axes.set(
        xlabel="straggler factor of a step: slowest rank / mean",
        ylabel="% of steps at or below",
        xlim=(1, None),
    )
    load_axes.set(
        xlabel="load of a rank in a step, ms", ylabel="% of loads at or below", xlim=(0, None)
    )
    load_axes.legend(loc="upper left")
