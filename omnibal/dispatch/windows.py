"""Windows of a stream: samples that may not be reordered are packed and dealt within each step.

A step is a window, consecutive samples in the order in which they are read; none moves to another
step. Inside a window nothing but rounding depends on which rank trains a sample and with which
others in a pack: the gradient is a sum over the step. So each rank is given an equal share of the
window's predicted time (post-balancing, as in OrchMLLM, arXiv 2503.23830), and packs its share.

Ranks that share out experts run the slots of a step together, each of which takes as long as the
slowest rank's pack. Shares of as many packs therefore go to neighbouring ranks, and their packs to
slots by weight: heaviest with heaviest.

Undispatched windows are what a plain loader makes of them: packs by next fit, dealt round robin.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.dispatch.balance import balance
from omnibal.model.limits import Caps
from omnibal.packing.best_fit import pack_first_fit
from omnibal.packing.fit import check_samples_fit, in_common_units
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.steps.deal import lightest_at_the_ends

_Pack = list[int]
_Ranks = list[list[_Pack]]
"""Packs of every rank, in the order of their slots."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowRequest:
    """Settings by which a stream becomes packs of steps and ranks."""

    caps: Caps
    samples: int
    """Samples of a window; the last one of an epoch has what is left."""
    is_dispatched: bool
    """Whether ranks get equal shares of a window, or packs as they are read."""
    epochs: int
    ranks: int
    stages: int
    """Pipeline stages; their idle time at both ends of a step counts a rank's longest pack."""
    lockstep_ranks: int = 1
    """Neighbouring ranks that run equally many micro-batches at the same time, a divisor of
    `ranks`."""


def schedule_windows(
    lengths: Lengths, request: WindowRequest, load: Callable[[Packs], np.ndarray]
) -> ScheduledPacks:
    """Pack and deal all windows of a stream; every epoch reads it in the same order.

    A rank may have fewer packs than others, and none where a window has fewer samples than there
    are ranks.

    Args:
        lengths: of all samples, in the order of the stream.
        load: predicted time of every pack, linear in its samples.
    """
    check_samples_fit(lengths, request.caps)
    samples = _Samples.of(lengths, request, load)
    dealt = []
    for first in range(0, len(lengths), request.samples):
        window = range(first, min(first + request.samples, len(lengths)))
        ranks = samples.as_read(window, request.ranks)
        if request.is_dispatched:
            balanced = samples.balanced(window, request.ranks)
            ranks = min(balanced, ranks, key=samples.busiest_ms)
        dealt.append(ranks)
    return _scheduled(dealt, lengths, request.epochs)


def imbalance(packs: ScheduledPacks, load_ms: np.ndarray, ranks: int) -> float:
    """Busiest rank's predicted time over the mean of all, summed over steps; 1 where all have
    equally much. Ranks without packs in a step count."""
    by_rank = np.bincount(packs.step * ranks + packs.dp_rank, load_ms, packs.steps * ranks)
    by_rank = by_rank.reshape(-1, ranks)
    return float(by_rank.max(axis=1).sum() / by_rank.mean(axis=1).sum())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Samples:
    """Sizes and times of all samples, and the ways to pack some of them."""

    sizes: np.ndarray
    """In the units of the caps, int64 [features, samples]."""
    caps: np.ndarray
    ms: list[float]
    """Time that each sample adds to a pack."""
    pack_ms: float
    """Time of a pack besides its samples."""
    stages: int
    lockstep_ranks: int
    columns: list[tuple[int, ...]]
    """Sizes, sample by sample."""

    @classmethod
    def of(
        cls, lengths: Lengths, request: WindowRequest, load: Callable[[Packs], np.ndarray]
    ) -> "_Samples":
        sizes, caps = in_common_units(lengths, request.caps)
        count = len(lengths)
        alone_ms = load(Packs(samples=np.arange(count), offsets=np.arange(count + 1)))
        # What two packs of a sample take more than one pack of both is a pack's own time.
        twice = load(Packs.from_lists([[0], [0], [0, 0]]))
        pack_ms = max(float(twice[0] + twice[1] - twice[2]), 0.0)
        return cls(
            sizes=sizes,
            caps=caps,
            ms=np.maximum(alone_ms - pack_ms, 0).tolist(),
            pack_ms=pack_ms,
            stages=request.stages,
            lockstep_ranks=request.lockstep_ranks,
            columns=list(zip(*sizes.tolist(), strict=True)),
        )

    def busiest_ms(self, ranks: _Ranks) -> float:
        """Time of the rank that has most to do, or of the slowest ranks in lockstep."""
        return max(map(self._lockstep_ms, self._groups(ranks)))

    def _groups(self, ranks: _Ranks) -> list[_Ranks]:
        """Ranks that run in lockstep, by group."""
        return [
            ranks[first : first + self.lockstep_ranks]
            for first in range(0, len(ranks), self.lockstep_ranks)
        ]

    def _lockstep_ms(self, group: _Ranks) -> float:
        """Time of ranks that run their slots together; one without a pack has an empty one."""
        slots = zip_longest(*group, fillvalue=[])
        return self._pipeline_ms([max(map(self._time_ms, slot)) for slot in slots])

    def rank_ms(self, packs: Sequence[_Pack]) -> float:
        """Time of a rank's pipeline alone."""
        return self._pipeline_ms([self._time_ms(pack) for pack in packs])

    def _pipeline_ms(self, times: Sequence[float]) -> float:
        """Time of a pipeline of equal stages, times their number.

        All stages but one wait while the pipeline fills and drains on a pack.
        """
        return sum(times) + (self.stages - 1) * max(times, default=0.0)

    def _time_ms(self, pack: _Pack) -> float:
        return self.pack_ms + sum(self.ms[sample] for sample in pack)

    def as_read(self, window: range, ranks: int) -> _Ranks:
        """Packs by next fit in the order of the stream, dealt round robin."""
        packs: list[_Pack] = []
        room: tuple[int, ...] = ()
        for sample in window:
            left = tuple(map(int.__sub__, room, self.columns[sample]))
            if not left or min(left) < 0:
                packs.append([])
                left = tuple(map(int.__sub__, self.caps.tolist(), self.columns[sample]))
            packs[-1].append(sample)
            room = left
        return [packs[rank::ranks] for rank in range(ranks)]

    def balanced(self, window: range, ranks: int) -> _Ranks:
        """Equal shares of the window's time, each packed for itself."""
        share = (self.sizes[:, window.start : window.stop] / self.caps[:, None]).max(axis=0)
        weight_ms = np.array(self.ms[window.start : window.stop]) + self.pack_ms * share
        dealt = balance(weight_ms, ranks)
        longest_first = np.argsort(-weight_ms, kind="stable")
        shares = [longest_first[dealt[longest_first] == rank] for rank in range(ranks)]
        given = [(window.start + share).tolist() for share in shares]
        packed = [self._packed(share) for share in given]
        return packed if self.lockstep_ranks == 1 else self._in_lockstep(given, packed)

    def _in_lockstep(self, shares: list[list[int]], packed: _Ranks) -> _Ranks:
        """The faster of these packs, each share's as is best for itself, and of as many for every
        rank, alike in every slot. Samples of a share are longest first."""
        best = self._alike_in_lockstep(packed)
        for count in sorted({len(packs) for packs in packed}):
            level = [self._level(share, count) for share in shares]
            ranks = [packs for packs in level if packs is not None]
            if len(ranks) == len(shares):
                best = min(best, self._alike_in_lockstep(ranks), key=self.busiest_ms)
        return best

    def _alike_in_lockstep(self, ranks: _Ranks) -> _Ranks:
        """Deal shares to ranks, and packs to slots, so that those that run together are alike."""
        heavy_first = [sorted(packs, key=self._time_ms, reverse=True) for packs in ranks]
        heavy_first.sort(key=lambda packs: [len(packs), *map(self._time_ms, packs)], reverse=True)
        ordered = []
        for group in self._groups(heavy_first):
            most, fewest = len(group[0]), len(group[-1])
            # Only the last slots can be empty: what not all have goes there, from heavy to light.
            slots = [*lightest_at_the_ends(fewest), *range(fewest, most)]
            ordered += [[packs[place] for place in slots[: len(packs)]] for packs in group]
        return ordered

    def _packed(self, share: list[int]) -> list[_Pack]:
        """Pack one rank's samples, given longest first: of equal time, and the best number."""
        if not share:
            return []
        sizes = self.sizes[:, share]
        fitted = pack_first_fit(sizes, (sizes / self.caps[:, None]).max(axis=0), self.caps)
        best = [[share[place] for place in pack] for pack in fitted]
        best_ms = self.rank_ms(best)
        fewest = int((-(-sizes.sum(axis=1) // self.caps)).max())
        for count in range(fewest, len(share) + 1):
            packs = self._level(share, count)
            if packs is None:
                continue
            packs_ms = self.rank_ms(packs)
            if packs_ms > best_ms:
                break
            best, best_ms = packs, packs_ms
        heaviest_first = sorted(best, key=self._time_ms, reverse=True)
        return [heaviest_first[place] for place in lightest_at_the_ends(len(best))]

    def _level(self, share: list[int], count: int) -> list[_Pack] | None:
        """So many packs, each sample to the shortest with room; None where one has room nowhere."""
        heap = [(0.0, pack) for pack in range(count)]
        room = [tuple(self.caps.tolist())] * count
        packs: list[_Pack] = [[] for _ in range(count)]
        for sample in share:
            full = []
            while heap:
                held_ms, pack = heapq.heappop(heap)
                left = tuple(map(int.__sub__, room[pack], self.columns[sample]))
                if min(left) >= 0:
                    break
                full.append((held_ms, pack))
            else:
                return None
            packs[pack].append(sample)
            room[pack] = left
            for entry in (*full, (held_ms + self.ms[sample], pack)):
                heapq.heappush(heap, entry)
        return packs if all(packs) else None


def _scheduled(dealt: list[_Ranks], lengths: Lengths, epochs: int) -> ScheduledPacks:
    """Packs of windows as the rows of a schedule, once for every epoch."""
    rows = [
        (step, rank, slot, pack)
        for step, ranks in enumerate(dealt)
        for rank, packs in enumerate(ranks)
        for slot, pack in enumerate(packs)
    ]
    step, rank, slot = (np.array([row[column] for row in rows] * epochs) for column in range(3))
    packs = Packs.from_lists([row[3] for row in rows] * epochs)
    epoch = np.repeat(np.arange(epochs), len(rows))
    return ScheduledPacks.of(packs, lengths, step + epoch * len(dealt), rank, slot, epoch)
