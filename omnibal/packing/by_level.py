"""HBP's packing by level (arXiv 2503.07680, section 4).

Each sample belongs to the smallest level that holds it. Levels are packed from longest to shortest,
and free capacity of long packs is filled with shorter samples, as far as `may_fill` allows: in a
pack shared by context-parallel ranks, a short sample may cost an exchange.
"""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.model.levels import Level, largest_caps
from omnibal.packing.fit import check_samples_fit
from omnibal.packing.packing import PackingMethod, pack_samples
from omnibal.packing.packs import Packs

_LOOKAHEAD = 1024  # max samples of a level considered per pack, which keeps the work linear


def levels_of_samples(lengths: Lengths, levels: Sequence[Level]) -> np.ndarray:
    """Return the smallest level that holds each sample, int32 [samples]. UserError if none does."""
    check_samples_fit(lengths, largest_caps(levels))
    return _smallest_that_hold(levels, len(lengths), lengths.column)


def levels_of_packs(packs: Packs, lengths: Lengths, levels: Sequence[Level]) -> np.ndarray:
    """Return the smallest level that holds each pack, int32 [packs]: the level it was packed at."""
    sums = cache(lambda name: packs.sums(lengths.column(name)))
    return _smallest_that_hold(levels, len(packs), sums)


def _smallest_that_hold(
    levels: Sequence[Level], count: int, sizes: Callable[[str], np.ndarray]
) -> np.ndarray:
    level = np.zeros(count, np.int32)
    for lower in levels[:-1]:
        caps = lower.caps
        level += np.any([sizes(name) > caps[name] for name in caps.names], axis=0)
    return level


def pack_by_level(
    lengths: Lengths,
    levels: Sequence[Level],
    method: PackingMethod,
    seed: np.random.SeedSequence,
    *,
    may_fill: np.ndarray | None = None,
) -> Packs:
    """Return packs, longest level first: samples are in their level's, or fill a longer level's.

    Args:
        levels: by ascending caps.
        may_fill: samples that may join each longer level, bool [levels, samples], default all.
    """
    own_level = levels_of_samples(lengths, levels)
    order_seed, *pack_seeds = seed.spawn(len(levels) + 1)
    order = np.random.default_rng(order_seed).permutation(len(lengths))
    left = [order[own_level[order] == level] for level in range(len(levels))]
    sizes = lengths.sizes(levels[-1].caps.names)
    packed: list[Packs] = []
    for level in reversed(range(len(levels))):
        rows = np.sort(left[level])
        if not len(rows):
            continue
        caps = levels[level].caps
        packs = pack_samples(lengths.take(rows), caps, method, pack_seeds[level]).of_rows(rows)
        allowed = None if may_fill is None else may_fill[level]
        filled, left[:level] = fill_packs(packs, caps.values, left[:level], sizes, allowed)
        packed.append(filled)
    return Packs.join(packed)


def fill_packs(
    packs: Packs,
    caps: np.ndarray,
    queues: Sequence[np.ndarray],
    sizes: np.ndarray,
    allowed: np.ndarray | None,
) -> tuple[Packs, list[np.ndarray]]:
    """Return packs filled with the first samples that fit, longest level first, and queues left.

    Args:
        caps: of these packs, [features].
        queues: samples of every shorter level by ascending caps, in the order tried.
        sizes: of all samples, [features, samples].
        allowed: samples that may be taken, bool [samples], default all.
    """
    waiting = [_Queue(queue, sizes, allowed) for queue in queues]
    room = caps[:, None] - np.stack([packs.sums(row) for row in sizes])  # [features, packs]
    members = []
    for pack in range(len(packs)):
        taken = [packs[pack]]
        for queue in reversed(waiting):
            fitting = queue.take_first_fits(room[:, pack])
            room[:, pack] -= sizes[:, fitting].sum(axis=1)
            taken.append(fitting)
        members.append(np.concatenate(taken))
    return Packs.from_lists(members), [queue.list_left() for queue in waiting]


class _Queue:
    """Queue of one level's samples. Only a window of the first is tried per pack."""

    def __init__(self, samples: np.ndarray, sizes: np.ndarray, allowed: np.ndarray | None):
        self._sizes = sizes
        mask = np.ones(len(samples), bool) if allowed is None else allowed[samples]
        self._refused, self._allowed = samples[~mask], samples[mask]
        self._next = 0  # place in `_allowed` after the window
        self._window = self._allowed[:0]

    def take_first_fits(self, room: np.ndarray) -> np.ndarray:
        """Remove and return samples of the window that fit in turn. `room`: capacity [features]."""
        wanted = _LOOKAHEAD - len(self._window)
        more = self._allowed[self._next : self._next + wanted]
        self._window, self._next = np.concatenate([self._window, more]), self._next + len(more)
        place = np.arange(len(self._window))
        sizes = self._sizes[:, self._window]
        taken: list[np.ndarray] = []
        room = room.copy()
        # Each round takes the longest prefix of fitting samples that fits as a whole.
        while len(place := place[(sizes[:, place] <= room[:, None]).all(axis=0)]):
            sums = np.cumsum(sizes[:, place], axis=1)
            fit = (sums <= room[:, None]).all(axis=0)
            count = len(place) if fit.all() else int(fit.argmin())
            taken.append(place[:count])
            room -= sums[:, count - 1]
            place = place[count:]
        chosen = np.concatenate([*taken, place[:0]])
        samples, self._window = self._window[chosen], np.delete(self._window, chosen)
        return samples

    def list_left(self) -> np.ndarray:
        return np.concatenate([self._window, self._allowed[self._next :], self._refused])
