"""Cut of context-parallel packs: the tokens of each sample that every rank of a pack computes.

Used by planner and trainer. A pack of context size c is cut into shares of c ranks, each a list of
pieces (runs of tokens of one sample), as a function of the samples' token counts in pack order.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omnibal.base.arrays import rows_of
from omnibal.model.levels import CutRule, Level

SHORT_SHARE = 0.25  # max cost of a sample that `whole` keeps whole, over a rank's mean cost


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pieces:
    """Pieces of samples, sorted by pack, rank, sample and first token, int64 [pieces].

    Every token of every pack is in exactly one piece.
    """

    pack: np.ndarray  # index of the pack
    rank: np.ndarray  # rank within the pack's block, from 0
    sample: np.ndarray  # position of the sample within its pack
    first: np.ndarray  # first token within the sample
    stop: np.ndarray  # end token (exclusive) within the sample

    def __len__(self) -> int:
        return len(self.pack)

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of each piece, at least 1."""
        return self.stop - self.first

    @property
    def is_divided(self) -> np.ndarray:
        """Whether other ranks have tokens of the same sample, bool [pieces]."""
        key = self.pack * (self.sample.max(initial=0) + 1) + self.sample
        lowest = np.full(key.max(initial=-1) + 1, np.iinfo(np.int64).max)
        highest = np.full(len(lowest), -1)
        np.minimum.at(lowest, key, self.rank)
        np.maximum.at(highest, key, self.rank)
        return (highest > lowest)[key]

    def take(self, chosen: np.ndarray) -> "Pieces":
        return rows_of(self, chosen)

    @classmethod
    def in_order(
        cls,
        pack: np.ndarray,
        rank: np.ndarray,
        sample: np.ndarray,
        first: np.ndarray,
        stop: np.ndarray,
    ) -> "Pieces":
        """Return nonempty pieces, sorted, from int64 [pieces] in any order."""
        order = np.lexsort((first, sample, rank, pack))
        order = order[(stop > first)[order]]
        return cls(pack=pack, rank=rank, sample=sample, first=first, stop=stop).take(order)


def cut_pack(sample_tokens: Sequence[int] | np.ndarray, level: Level) -> Pieces:
    """Return the pieces of one pack, from its samples' token counts in pack order."""
    tokens = np.asarray(sample_tokens, np.int64)
    return cut_packs(tokens, np.array([0, len(tokens)]), level)


def cut_packs(sample_tokens: np.ndarray, offsets: np.ndarray, level: Level) -> Pieces:
    """Return the pieces of packs of one level, from token counts >= 1 and the packs' bounds."""
    samples = _PackedSamples(np.asarray(sample_tokens, np.int64), np.asarray(offsets, np.int64))
    match level.cut:
        case CutRule.CONTIGUOUS:
            return _cut_in_order(samples, level.context, 0.0)
        case CutRule.COST:
            return _cut_in_order(samples, level.context, level.attention_weight)
        case CutRule.ZIGZAG:
            return _cut_zigzag(samples, np.arange(len(samples.tokens)), level.context)
        case CutRule.WHOLE:
            return _cut_long(samples, level.context, level.attention_weight)


def keep_samples_whole(sample_tokens: Sequence[int] | np.ndarray) -> Pieces:
    """Return the pieces of an unshared pack: every sample whole, on rank 0."""
    tokens = np.asarray(sample_tokens, np.int64)
    zeros = np.zeros(len(tokens), np.int64)
    return Pieces(pack=zeros, rank=zeros, sample=np.arange(len(tokens)), first=zeros, stop=tokens)


def item_bounds(items: np.ndarray | int, context: int) -> np.ndarray:
    """Return bounds of items, int64 [..., context + 1]: rank r has bounds[r] to bounds[r + 1]."""
    return first_item(np.asarray(items, np.int64)[..., None], np.arange(context + 1), context)


def first_item(items: np.ndarray, part: np.ndarray, context: np.ndarray | int) -> np.ndarray:
    """Return the first of a pack's `items` that rank `part` of `context` encodes."""
    first: np.ndarray = items * part // context
    return first


@dataclass(frozen=True, slots=True, eq=False)
class _PackedSamples:
    tokens: np.ndarray  # of every sample, pack after pack, [samples]
    offsets: np.ndarray  # bounds of every pack's samples, [packs + 1]

    @property
    def packs(self) -> int:
        return len(self.offsets) - 1

    @property
    def pack(self) -> np.ndarray:
        return np.repeat(np.arange(self.packs), np.diff(self.offsets))

    @property
    def position(self) -> np.ndarray:
        return np.arange(len(self.tokens)) - self.offsets[self.pack]

    def cost(self, attention_weight: float) -> np.ndarray:
        return self.tokens + attention_weight * self.tokens.astype(np.float64) ** 2


def _cut_in_order(samples: _PackedSamples, context: int, attention_weight: float) -> Pieces:
    """Cut packs into `context` contiguous parts of equal cost."""
    ends = np.concatenate([[0], np.cumsum(samples.tokens)])
    cuts = _equal_cuts(samples, context, attention_weight)
    borders = np.union1d(ends, cuts.ravel())
    first, stop = borders[:-1], borders[1:]
    sample = np.searchsorted(ends, first, "right") - 1
    pack = samples.pack[sample]
    # Of equal cuts the last begins the piece's share: the shares before it are empty.
    flat = cuts[:, :-1].ravel()
    rank = np.searchsorted(flat, first, "right") - 1 - pack * context
    return Pieces.in_order(
        pack, rank, samples.position[sample], first - ends[sample], stop - ends[sample]
    )


def _equal_cuts(samples: _PackedSamples, context: int, attention_weight: float) -> np.ndarray:
    """Return cuts of each pack, counted in the tokens of all packs, int64 [packs, context + 1]."""
    ends = np.concatenate([[0], np.cumsum(samples.tokens)])
    bounds = ends[samples.offsets]
    if not attention_weight:
        return bounds[:-1, None] + item_bounds(np.diff(bounds), context)
    costs = np.concatenate([[0.0], np.cumsum(samples.cost(attention_weight))])
    start, total = costs[samples.offsets[:-1], None], np.diff(costs[samples.offsets])[:, None]
    target = start + total * np.arange(context + 1) / context
    last = samples.offsets[1:, None] - 1
    sample = np.searchsorted(costs, target.ravel(), "right").reshape(target.shape) - 1
    sample = np.clip(sample, samples.offsets[:-1, None], last)
    excess = np.maximum(target - costs[sample], 0)
    # Solve x + w x^2 = excess for x tokens, in the form without cancellation for small w.
    within = 2 * excess / (1 + np.sqrt(1 + 4 * attention_weight * excess))
    cuts = ends[sample] + np.minimum(np.rint(within).astype(np.int64), samples.tokens[sample])
    cuts[:, 0], cuts[:, -1] = bounds[:-1], bounds[1:]
    return cuts


def _cut_zigzag(samples: _PackedSamples, chosen: np.ndarray, context: int) -> Pieces:
    """Cut the chosen samples into `2 c` pieces: rank r gets the r-th from both ends."""
    # Causal attention costs more for later tokens; pairs from both ends cost the same.
    parts = 2 * context
    borders = item_bounds(samples.tokens[chosen], parts)  # [samples, parts + 1]
    place = np.arange(parts)
    rank = np.minimum(place, parts - 1 - place)
    # The two middle pieces are one piece of the last rank.
    borders = np.delete(borders, context, axis=1)
    rank = np.delete(rank, context)
    shape = (len(chosen), parts - 1)
    return Pieces.in_order(
        np.broadcast_to(samples.pack[chosen, None], shape).ravel(),
        np.broadcast_to(rank, shape).ravel(),
        np.broadcast_to(samples.position[chosen, None], shape).ravel(),
        borders[:, :-1].ravel(),
        borders[:, 1:].ravel(),
    )


def _cut_long(samples: _PackedSamples, context: int, attention_weight: float) -> Pieces:
    """Cut long samples by zigzag, and deal short samples whole to ranks of balanced cost."""
    cost = samples.cost(attention_weight)
    mean = np.add.reduceat(cost, samples.offsets[:-1]) / context
    is_short = cost <= SHORT_SHARE * mean[samples.pack]
    rank = np.zeros(len(cost), np.int64)
    most_first = np.lexsort((-cost, samples.pack))
    most_first = most_first[is_short[most_first]]
    bounds = np.searchsorted(samples.pack[most_first], np.arange(samples.packs + 1))
    for pack in range(samples.packs):
        loads = [(0.0, part) for part in range(context)]
        for sample in most_first[bounds[pack] : bounds[pack + 1]].tolist():
            load, rank[sample] = loads[0]
            heapq.heapreplace(loads, (load + float(cost[sample]), int(rank[sample])))
    short = np.flatnonzero(is_short)
    long = _cut_zigzag(samples, np.flatnonzero(~is_short), context)
    return Pieces.in_order(
        np.append(samples.pack[short], long.pack),
        np.append(rank[short], long.rank),
        np.append(samples.position[short], long.sample),
        np.append(0 * short, long.first),
        np.append(samples.tokens[short], long.stop),
    )
