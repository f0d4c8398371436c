"""Packs that a trainer makes itself by next fit: samples one after another, in their order.

ms-swift's `sequential` packing is this (`calculate_matched_group` of `swift/dataset/packing.py`,
4.6.0). A pack ends before the first sample that would not fit into it, and where it is full. So two
packs of a plan would come together where the second one's first sample still fits the first pack.

Three things keep packs apart. A full pack is as large as the largest pack of the plan, each begins
with its largest sample, and where a pack's room would still do for the next one's, packs of a step
change places. What comes together all the same is what the plan's packs are then. Where these leave
a step short, a lower packing length may fill it.
"""

from dataclasses import replace

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.steps.full_steps import size_of_step

_MOST_MERGING = 0.1
"""Share of packs that come together from which on changing places is of no use."""
_MOST_ROUNDS = 3  # of changing places


def next_fit_packs(tokens: np.ndarray, packing_length: int) -> np.ndarray:
    """Bounds of the packs that next fit makes of samples in this order. int64 [packs + 1]

    A sample that is longer than a pack is alone in one.

    Args:
        tokens: integers [samples], none negative, in the order in which they are packed.
        packing_length: tokens of a full pack, at least 1.

    Example:
        >>> next_fit_packs(np.array([3, 3, 4, 9]), 6).tolist()
        [0, 2, 3, 4]
    """
    held = np.concatenate([[0], np.cumsum(tokens, dtype=np.int64)])
    wanted = held[:-1] + packing_length
    # Where so many tokens are reached, the pack has ended: there, or before the last sample.
    full = np.searchsorted(held, wanted)
    is_over = held[np.minimum(full, len(tokens))] > wanted
    end = np.maximum(full - is_over, np.arange(1, len(tokens) + 1))
    ends = np.minimum(end, len(tokens)).tolist()
    bounds = [0]
    while bounds[-1] < len(tokens):
        bounds.append(ends[bounds[-1]])
    return np.array(bounds, np.int64)


def filling_steps(
    tokens: np.ndarray, packing_length: int, packs_per_step: int, ranks: int
) -> np.ndarray:
    """Bounds of the packs of an epoch by next fit, with the packing length that loses fewest
    samples in a last step that is not full. int64 [packs + 1]

    Lengths are tried by halving, towards the longest whose packs fill one more step. That step is
    the most that a plan gets longer by. Of lengths that lose as many, the fewest packs are taken.

    Args:
        tokens: of all samples, [samples], in the order in which they are packed.
        packing_length: the most tokens of a pack, no fewer than of any sample.
        packs_per_step: of all ranks together, a multiple of `ranks`.
        ranks: of which each has equally many packs of a step.
    """
    bounds = next_fit_packs(tokens, packing_length)
    packs = len(bounds) - 1
    # A run of less than a step has a step of what there is.
    of_step = packs_per_step if packs >= packs_per_step else ranks
    most = (packs // of_step + 1) * of_step
    if not packs % of_step or most > len(tokens):
        return bounds
    found = [bounds]
    low, high = max(int(tokens.max()), 1) - 1, packing_length
    while high - low > 1:
        middle = (low + high) // 2
        tried = next_fit_packs(tokens, middle)
        if len(tried) - 1 < most:
            high = middle
        else:
            low = middle
        if len(tried) - 1 < most + of_step:
            found.append(tried)

    def trained(bounds: np.ndarray) -> int:
        packs = len(bounds) - 1
        size = size_of_step(packs, packs_per_step, ranks)
        return int(bounds[packs // size * size]) if size else 0

    return min(found, key=lambda bounds: (-trained(bounds), len(bounds)))


def largest_first(packs: Packs, tokens: np.ndarray) -> Packs:
    """Sort the samples of every pack from the most tokens to the least."""
    pack = packs.pack_of_sample
    order = np.lexsort((-tokens[packs.samples].astype(np.int64), pack))
    return replace(packs, samples=packs.samples[order])


def merging(held: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Packs that come together with the next one, where the largest is full. bool [packs]

    Args:
        held: tokens of every pack, [packs], in the order in which they are read.
        first: tokens of its first sample, [packs].
    """
    full = held.max()
    found = np.zeros(len(held), bool)
    found[:-1] = (held[:-1] < full) & (held[:-1] + first[1:] <= full)
    return found


def kept_apart(
    step: np.ndarray, held: np.ndarray, first: np.ndarray, load: np.ndarray
) -> np.ndarray:
    """Order in which few packs, if any, come together with the next one. int64 [packs]

    A pack that would trades places with one of its step, of those that help the most the one whose
    load is most like its own, so that ranks have about as much to do as before.

    Args:
        step: of every pack, [packs], ascending: packs are in the order in which they are read.
        held: tokens of every pack.
        first: tokens of its first sample.
        load: what ranks should have equally much of.
    """
    places = _Places(step, held, first, load)
    for _ in range(_MOST_ROUNDS):
        wrong = np.flatnonzero(merging(held[places.order], first[places.order]))
        if not 0 < len(wrong) <= _MOST_MERGING * len(held):
            break
        # A comprehension, as all of them are to be tried.
        if not any([places.improve(at) for at in wrong.tolist()]):  # noqa: C419
            break
    return places.order


class _Places:
    """Packs in an order that may change inside steps."""

    def __init__(
        self, step: np.ndarray, held: np.ndarray, first: np.ndarray, load: np.ndarray
    ) -> None:
        self.order = np.arange(len(step))
        self._first_of_step = np.searchsorted(step, step)
        self._end_of_step = np.searchsorted(step, step, side="right")
        self._load = load
        self._full = int(held.max())
        # Before and after all others stands a pack that comes together with none.
        self._held = np.append(held.astype(np.int64), self._full)
        self._first = np.append(first.astype(np.int64), self._full + 1)

    def improve(self, at: int) -> bool:
        """Let the pack at a place, or the one after it, trade with one of its step, if fewer come
        together then."""
        change, _, here, there = min(self._best_trade(at), self._best_trade(at + 1))
        if change >= 0:
            return False
        self.order[[here, there]] = self.order[[there, here]]
        return True

    def _best_trade(self, at: int) -> tuple[int, float, int, int]:
        """How many more come together, how unlike the loads are, and the two places."""
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
        """Packs at these places; the one that comes together with none outside of them."""
        place = np.asarray(place)
        is_inside = (place >= 0) & (place < len(self.order))
        return np.where(is_inside, self.order[np.where(is_inside, place, 0)], len(self.order))

    def _joins(self, place: int | np.ndarray, pack: np.ndarray) -> np.ndarray:
        """With how many of its two neighbours a pack at a place would come together."""
        before, after = self._pack(np.asarray(place) - 1), self._pack(np.asarray(place) + 1)
        return self._join(before, pack).astype(int) + self._join(pack, after)

    def _join(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        is_open = self._held[left] < self._full
        return is_open & (self._held[left] + self._first[right] <= self._full)


def as_formed(
    packs: ScheduledPacks, lengths: Lengths, load: np.ndarray, ranks: int, packs_per_step: int
) -> ScheduledPacks:
    """Packs as next fit makes them of a plan's samples, read step by step, slot by slot, rank by
    rank; a step is so many packs of an epoch in their order, and its last may have fewer.

    Args:
        load: of every pack, [packs].
        packs_per_step: of all ranks together, a multiple of `ranks`.
    """
    read = np.lexsort((packs.dp_rank, packs.slot, packs.step))
    tokens, dealt = lengths.tokens, largest_first(packs.packs.take(read), lengths.tokens)
    held, first = dealt.sums(tokens), tokens[dealt.samples[dealt.offsets[:-1]]]
    order = kept_apart(packs.step[read], held, first, load[read])
    planned, epoch = dealt.take(order), packs.epoch[read][order]
    in_order, length = tokens[planned.samples], int(held.max())
    # A lower length would move the packs of a second epoch into steps of the first.
    bounds = (
        next_fit_packs(in_order, length)
        if epoch.any()
        else filling_steps(in_order, length, packs_per_step, ranks)
    )
    formed = replace(planned, offsets=bounds)
    of_sample = np.repeat(epoch, np.diff(planned.offsets))
    epoch = of_sample[bounds[:-1]]
    if (of_sample[bounds[1:] - 1] != epoch).any():
        raise UserError(
            "the trainer would put samples of two epochs into one pack, as the first pack of one "
            "fits the last of another: give --epochs 1, or another --max-tokens"
        )
    return _placed(formed, epoch, lengths, ranks, packs_per_step)


def _placed(
    packs: Packs, epoch: np.ndarray, lengths: Lengths, ranks: int, packs_per_step: int
) -> ScheduledPacks:
    """Packs in the order in which they are read, at the places where they are read."""
    sizes = np.bincount(epoch)
    if (sizes[:-1] % packs_per_step).any():
        raise UserError(
            f"an epoch has {sizes[0]:,} packs, which are not whole steps of {packs_per_step:,}, so "
            "that the trainer would fill a step with packs of the next epoch: give --epochs 1, or "
            "other --micro-batches or --max-tokens"
        )
    place = np.arange(len(packs))
    step, in_step = np.divmod(place, packs_per_step)
    slot, rank = np.divmod(in_step, ranks)
    return ScheduledPacks.of(packs, lengths, step, rank, slot, epoch)
