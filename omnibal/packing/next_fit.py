"""Packs of a trainer that packs by next fit in sample order: ms-swift's `sequential` packing
(`calculate_matched_group` of `swift/dataset/packing.py`, 4.6.0).

A pack ends if it is full or the next sample does not fit, so planned packs merge if the next pack's
first sample fits. To prevent this, the cap is the plan's largest pack, packs start with their
largest sample, and packs of a step swap places. Remaining merges become part of the plan, and a
lower packing length may then fill the last step.
"""

from dataclasses import replace

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths
from omnibal.packing.full_steps import size_of_step
from omnibal.packing.packs import Packs, ScheduledPacks

_MAX_SWAPPED_SHARE = 0.1  # share of merging packs above which swaps are useless
_MAX_SWAP_ROUNDS = 3  # rounds of swaps


def next_fit_packs(tokens: np.ndarray, packing_length: int) -> np.ndarray:
    """Return bounds of next-fit packs of samples in this order, int64 [packs + 1].

    A sample longer than a pack of `packing_length` tokens is packed alone.

        >>> next_fit_packs(np.array([3, 3, 4, 9]), 6).tolist()
        [0, 2, 3, 4]
    """
    before = np.concatenate([[0], np.cumsum(tokens, dtype=np.int64)])
    limit = before[:-1] + packing_length
    # The end of a pack from every start: at `packing_length` tokens, or before the sample above it.
    full = np.searchsorted(before, limit)
    is_over = before[np.minimum(full, len(tokens))] > limit
    end = np.maximum(full - is_over, np.arange(1, len(tokens) + 1))
    ends = np.minimum(end, len(tokens)).tolist()
    bounds = [0]
    while bounds[-1] < len(tokens):
        bounds.append(ends[bounds[-1]])
    return np.array(bounds, np.int64)


def cut_full_steps(
    tokens: np.ndarray, packing_length: int, packs_per_step: int, ranks: int
) -> np.ndarray:
    """Return bounds, int64 [packs + 1], of next-fit packs of an epoch that drop fewest samples.

    Packs of an incomplete last step are dropped. Bisects packing lengths up to `packing_length` for
    the longest that fills it with `packs_per_step` packs, a multiple of `ranks`. Ties: fewer packs.
    """
    bounds = next_fit_packs(tokens, packing_length)
    packs = len(bounds) - 1
    # A run shorter than a step gets one smaller step.
    of_step = packs_per_step if packs >= packs_per_step else ranks
    wanted = (packs // of_step + 1) * of_step
    if not packs % of_step or wanted > len(tokens):
        return bounds
    candidates = [bounds]
    low, high = max(int(tokens.max()), 1) - 1, packing_length
    while high - low > 1:
        middle = (low + high) // 2
        tried = next_fit_packs(tokens, middle)
        if len(tried) - 1 < wanted:
            high = middle
        else:
            low = middle
        if len(tried) - 1 < wanted + of_step:
            candidates.append(tried)

    def count_trained(bounds: np.ndarray) -> int:
        packs = len(bounds) - 1
        size = size_of_step(packs, packs_per_step, ranks)
        return int(bounds[packs // size * size]) if size else 0

    return min(candidates, key=lambda bounds: (-count_trained(bounds), len(bounds)))


def largest_first(packs: Packs, tokens: np.ndarray) -> Packs:
    pack = packs.pack_of_sample
    order = np.lexsort((-tokens[packs.samples].astype(np.int64), pack))
    return replace(packs, samples=packs.samples[order])


def find_merges(held: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return whether each pack merges with the next under a cap of the largest pack, bool [packs].

    `held` are tokens of every pack in reading order, `first` of its first sample.
    """
    full = held.max()
    return np.append((held[:-1] < full) & (held[:-1] + first[1:] <= full), False)


def order_without_merges(
    step: np.ndarray, held: np.ndarray, first: np.ndarray, load: np.ndarray
) -> np.ndarray:
    """Return an order of packs with few or no merges, int64 [packs].

    A merging pack, or the next, swaps with the pack of its step that avoids most merges, nearest in
    load to keep ranks balanced. Arguments are [packs] in reading order, as in `find_merges`.
    """
    places = _Places(step, held, first, load)
    for _ in range(_MAX_SWAP_ROUNDS):
        wrong = np.flatnonzero(find_merges(held[places.order], first[places.order]))
        if not 0 < len(wrong) <= _MAX_SWAPPED_SHARE * len(held):
            break
        # A list, because all swaps must be tried.
        if not any([places.improve(at) for at in wrong.tolist()]):  # noqa: C419
            break
    return places.order


class _Places:
    """Order of packs that may change within steps."""

    def __init__(
        self, step: np.ndarray, held: np.ndarray, first: np.ndarray, load: np.ndarray
    ) -> None:
        # A sentinel pack before the first and after the last place, which never merges.
        self._order = np.concatenate([[len(step)], np.arange(len(step)), [len(step)]])
        self._first_of_step = np.searchsorted(step, step)
        self._end_of_step = np.searchsorted(step, step, side="right")
        self._load = load
        self._full = int(held.max())
        self._held = np.append(held.astype(np.int64), self._full)
        self._first = np.append(first.astype(np.int64), self._full + 1)

    @property
    def order(self) -> np.ndarray:
        return self._order[1:-1]

    def improve(self, at: int) -> bool:
        """Swap the pack at a place or the next within its step; return whether it saves merges."""
        change, _, here, there = min(self._best_trade(at), self._best_trade(at + 1))
        if change >= 0:
            return False
        self.order[[here, there]] = self.order[[there, here]]
        return True

    def _best_trade(self, at: int) -> tuple[int, float, int, int]:
        """Return change in merges, difference in load, and both places, of the best swap."""
        others = np.arange(self._first_of_step[at], self._end_of_step[at])
        others = others[np.abs(others - at) > 1]  # neighbours share a border: counts would be wrong
        if not len(others):
            return 0, 0.0, at, at
        here, there = self.order[at], self.order[others]
        change = self._count_merges(at, there) - self._count_merges(at, here)
        change += self._count_merges(others, here) - self._count_merges(others, there)
        unlike = np.abs(self._load[there] - self._load[here])
        best = int(np.lexsort((unlike, change))[0])
        return int(change[best]), float(unlike[best]), at, int(others[best])

    def _count_merges(self, place: int | np.ndarray, pack: np.ndarray) -> np.ndarray:
        """Count the merges with both neighbours for a pack at a place."""
        before, after = self._order[place], self._order[place + 2]
        return self._merges(before, pack).astype(int) + self._merges(pack, after)

    def _merges(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        is_open = self._held[left] < self._full
        return is_open & (self._held[left] + self._first[right] <= self._full)


def form_next_fit_packs(
    packs: ScheduledPacks, lengths: Lengths, load: np.ndarray, ranks: int, packs_per_step: int
) -> ScheduledPacks:
    """Return the packs that next fit makes of a plan's samples, read by step, slot and rank.

    A step is `packs_per_step` consecutive packs, a multiple of `ranks`; the last may have fewer.
    `load` is of every planned pack, [packs]. Raises UserError if a pack or step would mix epochs.
    """
    read = np.lexsort((packs.dp_rank, packs.slot, packs.step))
    tokens, dealt = lengths.tokens, largest_first(packs.packs.take(read), lengths.tokens)
    held, first = dealt.sums(tokens), tokens[dealt.samples[dealt.offsets[:-1]]]
    order = order_without_merges(packs.step[read], held, first, load[read])
    planned, epoch = dealt.take(order), packs.epoch[read][order]
    in_order, length = tokens[planned.samples], int(held.max())
    # A lower length would shift packs of a second epoch into steps of the first.
    bounds = (
        next_fit_packs(in_order, length)
        if epoch.any()
        else cut_full_steps(in_order, length, packs_per_step, ranks)
    )
    formed = replace(planned, offsets=bounds)
    of_sample = np.repeat(epoch, np.diff(planned.offsets))
    epoch = of_sample[bounds[:-1]]
    if (of_sample[bounds[1:] - 1] != epoch).any():
        raise UserError(
            "the trainer would put samples of two epochs into one pack, as the first pack of one "
            "fits the last of another: give --epochs 1, or another --max-tokens"
        )
    sizes = np.bincount(epoch)
    if (sizes[:-1] % packs_per_step).any():
        raise UserError(
            f"an epoch has {sizes[0]:,} packs, not a multiple of {packs_per_step:,} per step, so "
            "the trainer would fill a step with packs of the next epoch: give --epochs 1, or other "
            "--micro-batches or --max-tokens"
        )
    step, in_step = np.divmod(np.arange(len(formed)), packs_per_step)
    slot, rank = np.divmod(in_step, ranks)
    return ScheduledPacks.from_packs(formed, lengths, step, rank, slot, epoch)
