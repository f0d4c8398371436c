"""Quality metrics of packs and steps.

Pad and dist ratio are Eq. 1 and 2 of OmniBal (arXiv 2407.20761, section 3), attention balance ratio
and communication ratio are HBP's (arXiv 2503.07680, section 3). Balance ratios are 0 if perfectly
balanced and approach 1 if one rank has all load.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.model.levels import ContextExchange, Level
from omnibal.packing.cut import Pieces
from omnibal.packing.item_shares import bounds_of_items
from omnibal.packing.packs import ScheduledPacks
from omnibal.packing.shares import Shares, pieces_of, shares_of

_MODEL_PARTS = {"tiles": "vision", "tokens": "language"}  # JSON names of dist ratios by feature


@dataclass(frozen=True, kw_only=True, slots=True)
class PackMetrics:
    """Metrics of a schedule."""

    samples: int  # samples of the data, once per epoch
    packed: int  # samples in packs of all epochs
    packs: int  # of all epochs
    packs_lower_bound: int  # for all epochs
    gap: float  # packs / packs_lower_bound - 1
    samples_per_pack: float
    fill: dict[str, float]  # sum / caps of all packs, by limited feature
    pad_ratio: float  # 0, as a mini-batch is one pack
    dist_ratio: dict[str, float]  # of a rank's sums per step, by limited feature
    attention_balance_ratio: float  # dist ratio of squared sample tokens, attention's cost
    # Lower bound for any assignment to steps, 0 (unproven) with several packs per rank.
    least_attention_balance_ratio: float
    communication_ratio: float  # share of tokens in context-parallel packs, mean over steps (CR)
    exchanged_ratio: float  # share of tokens of samples divided over ranks, which are exchanged
    tokens_per_rank: float  # mean over ranks and steps (Ave-T)
    straggler_factor: float  # max over mean load of a step's ranks, mean over steps
    steps: int

    def as_dict(self) -> dict[str, float]:
        """Return metrics by the keys of `omnibal pack --json`."""
        figures: dict[str, float] = {}
        for name, value in asdict(self).items():
            if isinstance(value, dict):
                parts = _MODEL_PARTS if name == "dist_ratio" else {}
                figures |= {f"{name}_{parts.get(key, key)}": part for key, part in value.items()}
            else:
                figures[name] = value
        return figures


def measure_packs(
    scheduled: ScheduledPacks,
    lengths: Lengths,
    levels: Sequence[Level],
    dp: int,
    load: np.ndarray,
    lower_bound: int,
) -> PackMetrics:
    """Compute all metrics of a schedule over `dp` data-parallel ranks.

    Args:
        load: of every pack on each of its ranks, such as predicted milliseconds, [packs].
        lower_bound: on the packs of an epoch.
    """
    packs, samples = len(scheduled), len(scheduled.packs.samples)
    epochs = int(scheduled.epoch[-1]) + 1
    names = levels[0].caps.names
    shares = shares_of(scheduled, levels)
    sums, squared_tokens, exchanged = _cut_sums(scheduled, lengths, names, levels, shares)
    attention = rank_sums(shares, squared_tokens, dp)
    shared = np.array([level.context > 1 for level in levels])[scheduled.level]
    room = {
        name: np.array([level.caps[name] for level in levels])[scheduled.level] for name in names
    }
    return PackMetrics(
        samples=len(lengths) * epochs,
        packed=samples,
        packs=packs,
        packs_lower_bound=lower_bound * epochs,
        gap=packs / (lower_bound * epochs) - 1,
        samples_per_pack=samples / packs,
        fill={name: float(sums[name].sum() / room[name].sum()) for name in names},
        # Each pack is one row of concatenated samples, so every mini-batch has one row.
        pad_ratio=pad_ratio(scheduled.tokens, np.arange(packs + 1)),
        dist_ratio={name: dist_ratio(rank_sums(shares, sums[name], dp)) for name in names},
        attention_balance_ratio=dist_ratio(attention),
        least_attention_balance_ratio=(
            0.0 if shares.slot.any() else least_dist_ratio(squared_tokens, dp)
        ),
        communication_ratio=communication_ratio(scheduled, shared),
        exchanged_ratio=float(exchanged / scheduled.tokens.sum(dtype=np.int64)),
        tokens_per_rank=float(scheduled.tokens.sum(dtype=np.int64) / (scheduled.steps * dp)),
        straggler_factor=straggler_factor(rank_sums(shares, load[shares.pack], dp)),
        steps=scheduled.steps,
    )


def _cut_sums(
    scheduled: ScheduledPacks,
    lengths: Lengths,
    names: Sequence[str],
    levels: Sequence[Level],
    shares: Shares,
) -> tuple[dict[str, np.ndarray], np.ndarray, int]:
    """Return sums of limited features and squared tokens per share, and tokens of divided samples.

    Sums are [shares].
    """
    sums = {name: scheduled.packs.sums(lengths.column(name))[shares.pack] for name in names}
    squared_tokens = scheduled.packs.sums(lengths.tokens.astype(np.int64) ** 2)
    squared = squared_tokens.astype(np.float64)[shares.pack]
    exchanged = 0
    # Sums of whole packs so far, which are those of unshared packs.
    for index, level in enumerate(levels):
        rows = np.flatnonzero(scheduled.level == index)
        if level.context == 1 or not len(rows):
            continue
        pieces, here = pieces_of(scheduled, lengths, rows, level), shares.level == index
        place = np.searchsorted(rows, shares.pack[here]), shares.part[here]  # into [rows, context]
        squared[here] = _attention(pieces, len(rows), level)[place]
        exchanged += int(pieces.tokens[pieces.is_divided].sum())
        for name in names:
            if name == "tokens":
                parts = _sum_parts(pieces, pieces.tokens, len(rows), level.context)
            else:
                # The loss is recorded per sample, so it is divided like items.
                packs = scheduled.packs.take(rows)
                parts = np.diff(bounds_of_items(packs, lengths, level, name))
            sums[name][here] = parts[place]
    return sums, squared, exchanged


def _attention(pieces: Pieces, packs: int, level: Level) -> np.ndarray:
    """Return the squared tokens of attention on each rank of packs, [packs, context]."""
    squares = pieces.stop**2 - pieces.first**2
    if level.exchange is ContextExchange.GATHER:
        return _sum_parts(pieces, squares, packs, level.context)
    # An exchange of heads gives every rank an equal part of divided samples' attention.
    whole = _sum_parts(pieces, squares * ~pieces.is_divided, packs, level.context)
    divided = _sum_parts(pieces, squares * pieces.is_divided, packs, level.context)
    return whole + divided.mean(axis=1, keepdims=True)


def _sum_parts(pieces: Pieces, values: np.ndarray, packs: int, context: int) -> np.ndarray:
    part = pieces.pack * context + pieces.rank
    return np.bincount(part, weights=values, minlength=packs * context).reshape(packs, context)


def communication_ratio(scheduled: ScheduledPacks, shared: np.ndarray) -> float:
    """Return the share of tokens in `shared` packs, mean over steps: HBP's CR (section 3)."""
    tokens = np.bincount(scheduled.step, weights=scheduled.tokens)
    in_shared = np.bincount(scheduled.step, weights=scheduled.tokens * shared)
    return float(np.mean(in_shared / tokens))


def least_dist_ratio(loads: np.ndarray, members: int) -> float:
    """Return a lower bound on the dist ratio of loads [n] in any order, in steps of `members`.

    Steps have different loads as their max. Given its max, a step is best balanced by the next
    smaller loads, so `n / members` steps balance no better than the best runs of sorted loads.
    """
    steps = -(-len(loads) // members)
    largest_first = np.sort(loads)[::-1].astype(np.float64)
    ends = np.concatenate([[0.0], np.cumsum(np.append(largest_first, np.zeros(members)))])
    runs = ends[members : members + len(loads)] - ends[: len(loads)]  # sums of `members` loads
    busiest = members * largest_first
    share = np.divide(runs, busiest, out=np.ones(len(loads)), where=busiest > 0)
    return max(float(1 - np.sort(share)[::-1][:steps].mean()), 0.0)


def pad_ratio(row_tokens: np.ndarray, offsets: np.ndarray) -> float:
    """Return Eq. 1: `sum_i (t_max - t_i) / (t_max * B)`, mean over mini-batches of B rows each.

    `row_tokens` are [rows] of all mini-batches, `offsets` their bounds. No mini-batch is empty.
    """
    longest = np.maximum.reduceat(row_tokens, offsets[:-1])
    padded = longest * np.diff(offsets)
    return float(np.mean(1 - np.add.reduceat(row_tokens, offsets[:-1]) / padded))


def dist_ratio(loads: np.ndarray) -> float:
    """Return Eq. 2: `sum_i (T_max - T_i) / (T_max * N)`, mean over steps, of loads [steps, N].

    Steps without load count as balanced.
    """
    # As printed in the paper. Its Figure 2 divides by N - 1: 1 - min / max for two devices.
    busiest = loads.max(axis=1)
    share = np.divide(loads.mean(axis=1), busiest, out=np.ones(len(loads)), where=busiest > 0)
    return float(np.mean(1 - share))


def straggler_factor(loads: np.ndarray) -> float:
    """Return `max_i(T_i) / mean_i(T_i)`, mean over steps, for loads > 0, [steps, ranks]."""
    return float(np.mean(loads.max(axis=1) / loads.mean(axis=1)))


def imbalance(loads: np.ndarray) -> float:
    """Return max over mean load of ranks, both summed over steps, for loads [steps, ranks]."""
    return over_mean(float(loads.max(axis=1).sum()), loads)


def over_mean(busiest: float, loads: np.ndarray) -> float:
    """Return `busiest`, summed over steps, over the summed mean of loads [steps, ranks]; min 1."""
    mean = float(loads.mean(axis=1).sum())
    # Rounding may give less than 1.
    return max(busiest / mean, 1.0) if mean else 1.0


def rank_sums(packs: ScheduledPacks | Shares, per_pack: np.ndarray, dp: int) -> np.ndarray:
    """Sum a per-pack or per-share quantity over each rank's micro-batches, float64 [steps, dp]."""
    # Ranks synchronize once per step, so these sums, not slots, need balancing.
    steps = int(packs.step[-1]) + 1
    rank = packs.step * dp + packs.dp_rank
    return np.bincount(rank, weights=per_pack, minlength=steps * dp).reshape(steps, dp)


_MILESTONES = 10  # parts of a run to report, one line each


def milestones(steps: int) -> tuple[int, ...]:
    """Return numbers of steps after which to report samples seen, ending with `steps`."""
    return tuple(sorted({-(-steps * part // _MILESTONES) for part in range(1, _MILESTONES + 1)}))


def seen_by_step(packs: ScheduledPacks, lengths: Lengths, by_step: Sequence[int]) -> np.ndarray:
    """Count samples of every source in the first `by_step[i]` steps, int64 [len(by_step), sources].

    `by_step` ascends. Repeats count.
    """
    sources = len(lengths.source_names)
    step = np.repeat(packs.step, np.diff(packs.packs.offsets))
    place = np.searchsorted(by_step, step, side="right")
    cells = place * sources + lengths.source[packs.packs.samples]
    counts = np.bincount(cells, minlength=(len(by_step) + 1) * sources)
    return counts.reshape(-1, sources)[: len(by_step)].cumsum(axis=0)
