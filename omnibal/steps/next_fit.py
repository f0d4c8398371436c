"""Packs of a trainer that packs by next fit in sample order, as ms-swift's `sequential` packing
does (`calculate_matched_group` of `swift/dataset/packing.py`, 4.6.0).

A pack ends if it is full or the next sample does not fit, so planned packs merge if the next pack's
first sample fits. To prevent this, the cap is the plan's largest pack, packs start with their
largest sample, and packs of a step swap places. Remaining merges become part of the plan, and a
lower packing length may then fill the last step.
"""

from dataclasses import replace

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.steps.full_steps import size_of_step

_MOST_MERGING = 0.1
"""Share of merging packs above which swaps are useless."""
_MOST_ROUNDS = 3  # rounds of swaps


def next_fit_packs(tokens: np.ndarray, packing_length: int) -> np.ndarray:
    """Bounds of next-fit packs of samples in this order, int64 [packs + 1].

    A sample longer than a pack of `packing_length` tokens is packed alone.

        >>> next_fit_packs(np.array([3, 3, 4, 9]), 6).tolist()
        [0, 2, 3, 4]
    """
    held = np.concatenate([[0], np.cumsum(tokens, dtype=np.int64)])
    wanted = held[:-1] + packing_length
    # At `packing_length` tokens the pack ends, there or before the last sample.
    full = np.searchsorted(held, wanted)
    is_over = held[np.minimum(full, len(tokens))] > wanted
    end = np.maximum(full - is_over, np.arange(1, len(tokens) + 1))
    ends = np.minimum(end, len(tokens)).tolist()
    bounds = [0]
    while bounds[-1] < len(tokens):
        bounds.append(ends[bounds[-1]])
    return np.array(bounds, np.int64)


def cut_full_steps(
    tokens: np.ndarray, packing_length: int, packs_per_step: int, ranks: int
) -> np.ndarray:
    """Bounds of an epoch's next-fit packs that lose least in an incomplete last step.

    Packing lengths up to `packing_length` are bisected towards the longest that fills one more
    step of `packs_per_step` packs, a multiple of `ranks`. Ties prefer fewer packs.
    """
    bounds = next_fit_packs(tokens, packing_length)
    packs = len(bounds) - 1
    # A run shorter than a step gets one smaller step.
    of_step = packs_per_step if packs >= packs_per_step else ranks
    most = (packs // of_step + 1) * of_step
    if not packs % of_step or most > len(tokens):
        return bounds
    candidates = [bounds]
    low, high = max(int(tokens.max()), 1) - 1, packing_length
    while high - low > 1:
        middle = (low + high) // 2
        tried = next_fit_packs(tokens, middle)
        if len(tried) - 1 < most:
            high = middle
        else:
            low = middle
        if len(tried) - 1 < most + of_step:
            candidates.append(tried)

    def trained(bounds: np.ndarray) -> int:
        packs = len(bounds) - 1
        size = size_of_step(packs, packs_per_step, ranks)
        return int(bounds[packs // size * size]) if size else 0

    return min(candidates, key=lambda bounds: (-trained(bounds), len(bounds)))


def largest_first(packs: Packs, tokens: np.ndarray) -> Packs:
    """Sort the samples of every pack by descending tokens."""
    pack = packs.pack_of_sample
    order = np.lexsort((-tokens[packs.samples].astype(np.int64), pack))
    return replace(packs, samples=packs.samples[order])


def find_merges(held: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Whether packs merge with the next pack under a cap equal to the largest pack, bool [packs].

    `held` are tokens of every pack in reading order, `first` of its first sample.
    """
    full = held.max()
    return np.append((held[:-1] < full) & (held[:-1] + first[1:] <= full), False)


def order_without_merges(
    step: np.ndarray, held: np.ndarray, first: np.ndarray, load: np.ndarray
) -> np.ndarray:
    """Order of packs with few or no merges, int64 [packs].

    A merging pack swaps with a pack of its step: among the most helpful, the nearest in load, which
    stays balanced over ranks. Arguments are [packs] in reading order, as of `find_merges`.
    """
    places = _Places(step, held, first, load)
    for _ in range(_MOST_ROUNDS):
        wrong = np.flatnonzero(find_merges(held[places.order], first[places.order]))
        if not 0 < len(wrong) <= _MOST_MERGING * len(held):
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
        self.order = np.arange(len(step))
        self._first_of_step = np.searchsorted(step, step)
        self._end_of_step = np.searchsorted(step, step, side="right")
        self._load = load
        self._full = int(held.max())
        # A sentinel pack at both ends never merges.
        self._held = np.append(held.astype(np.int64), self._full)
        self._first = np.append(first.astype(np.int64), self._full + 1)

    def improve(self, at: int) -> bool:
        """Swap the pack at a place, or the next pack, within its step if that reduces merges."""
        change, _, here, there = min(self._best_trade(at), self._best_trade(at + 1))
        if change >= 0:
            return False
        self.order[[here, there]] = self.order[[there, here]]
        return True

    def _best_trade(self, at: int) -> tuple[int, float, int, int]:
        """Change in merges, difference in load, and both places."""
        others = np.arange(self._first_of_step[at], self._end_of_step[at])
        others = others[np.abs(others - at) > 1]
        if not len(others):
            return 0, 0.0, at, at
        here, there = self._pack(at), self._pack(others)
        change = self._joins(at, there) - self._joins(at, here)
        change += self._joins(others, here) - self._joins(others, there)
        unlike = np.abs(self._load[there] - self._load[here])
        best = int(np.lexsort((unlike, change))[0])
        return int(change[best]), float(unlike[best]), at, int(others[best])

    def _pack(self, place: int | np.ndarray) -> np.ndarray:
        """Packs at these places. The sentinel outside of the range."""
        place = np.asarray(place)
        is_inside = (place >= 0) & (place < len(self.order))
        return np.where(is_inside, self.order[np.where(is_inside, place, 0)], len(self.order))

    def _joins(self, place: int | np.ndarray, pack: np.ndarray) -> np.ndarray:
        """Number of merges with both neighbours for a pack at a place."""
        before, after = self._pack(np.asarray(place) - 1), self._pack(np.asarray(place) + 1)
        return self._join(before, pack).astype(int) + self._join(pack, after)

    def _join(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        is_open = self._held[left] < self._full
        return is_open & (self._held[left] + self._first[right] <= self._full)


def form_next_fit_packs(
    packs: ScheduledPacks, lengths: Lengths, load: np.ndarray, ranks: int, packs_per_step: int
) -> ScheduledPacks:
    """Next-fit packs of a plan's samples, read by step, slot and rank.

    A step is `packs_per_step` consecutive packs of an epoch, a multiple of `ranks`. The last may
    have fewer. `load` of every pack, [packs].
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
            f"an epoch has {sizes[0]:,} packs, which are not whole steps of {packs_per_step:,}, so "
            "that the trainer would fill a step with packs of the next epoch: give --epochs 1, or "
            "other --micro-batches or --max-tokens"
        )
    step, in_step = np.divmod(np.arange(len(formed)), packs_per_step)
    slot, rank = np.divmod(in_step, ranks)
    return ScheduledPacks.of(formed, lengths, step, rank, slot, epoch)
