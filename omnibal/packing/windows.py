"""Windows of a stream, for samples that must stay in order: packed and dealt within each step.

A window of consecutive samples is one step. The gradient is a sum over the step, so ranks and packs
within it are free: each rank gets and packs an equal share of the window's predicted time
(post-balancing, as in OrchMLLM, arXiv 2503.23830). For ranks in lockstep (expert parallelism),
similar packs are aligned in slots. Windows that are not dispatched are packed by next fit and dealt
round robin.
"""

import heapq
from collections.abc import Callable
from itertools import pairwise, zip_longest

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.balance import balance
from omnibal.packing.best_fit import pack_first_fit
from omnibal.packing.deal import lightest_at_the_ends
from omnibal.packing.fit import check_samples_fit, in_common_units
from omnibal.packing.isf import cut_groups
from omnibal.packing.packs import Packs, ScheduledPacks

_Pack = list[int]
_Ranks = list[list[_Pack]]  # packs of every rank, in slot order


def schedule_windows(
    lengths: Lengths,
    caps: Caps,
    parallel: Parallel,
    load: Callable[[Packs], np.ndarray],
    *,
    window: int,
    is_dispatched: bool = True,
    epochs: int = 1,
) -> ScheduledPacks:
    """Return packs of all windows of a stream, dealt to ranks, in the same order every epoch.

    Ranks may have unequal pack counts, or no pack. Raises UserError if a sample exceeds the caps.

    Args:
        lengths: of all samples, in stream order.
        load: returns the predicted time of every pack, linear in its samples.
        window: samples per step. The last window of an epoch may have fewer.
        is_dispatched: whether ranks get equal shares of a window, if faster than stream order.
    """
    check_samples_fit(lengths, caps)
    samples, ranks = _StreamSamples(lengths, caps, parallel, load), parallel.data
    dealt = []
    for first in range(0, len(lengths), window):
        rows = range(first, min(first + window, len(lengths)))
        packs = samples.pack_in_order(rows, ranks)
        if is_dispatched:
            packs = min(samples.share_equally(rows, ranks), packs, key=samples.busiest_ms)
        dealt.append(packs)
    places = [
        (step, rank, slot, pack)
        for step, ranks_packs in enumerate(dealt)
        for rank, packs in enumerate(ranks_packs)
        for slot, pack in enumerate(packs)
    ]
    step, rank, slot = (np.array([place[i] for place in places] * epochs) for i in range(3))
    joined = Packs.from_lists([place[3] for place in places] * epochs)
    epoch = np.repeat(np.arange(epochs), len(places))
    return ScheduledPacks.from_packs(joined, lengths, step + epoch * len(dealt), rank, slot, epoch)


class _StreamSamples:
    """Sizes and predicted times of a stream's samples, to pack its windows."""

    def __init__(
        self,
        lengths: Lengths,
        caps: Caps,
        parallel: Parallel,
        load: Callable[[Packs], np.ndarray],
    ) -> None:
        self.stages, self.lockstep_ranks = parallel.pipeline, parallel.lockstep_ranks
        # int64 [features, samples], [features]
        self.sizes, self.caps = in_common_units(lengths, caps)
        self.columns = list(zip(*self.sizes.tolist(), strict=True))
        count = len(lengths)
        alone_ms = load(Packs(samples=np.arange(count), offsets=np.arange(count + 1)))
        # The fixed time of a pack: two packs take it once more than one pack with both samples.
        twice = load(Packs.from_lists([[0], [0], [0, 0]]))
        self.pack_ms = max(float(twice[0] + twice[1] - twice[2]), 0.0)
        # Milliseconds that each sample adds to a pack.
        self.ms: list[float] = np.maximum(alone_ms - self.pack_ms, 0).tolist()

    def busiest_ms(self, ranks: _Ranks) -> float:
        """Return the time of the busiest rank or lockstep group."""
        return max(map(self._lockstep_ms, self._groups(ranks)))

    def _groups(self, ranks: _Ranks) -> list[_Ranks]:
        return [
            ranks[first : first + self.lockstep_ranks]
            for first in range(0, len(ranks), self.lockstep_ranks)
        ]

    def _lockstep_ms(self, group: _Ranks) -> float:
        """Return the time of a lockstep group in p equal stages: `sum + (p - 1) * max` of slots."""
        slots = zip_longest(*group, fillvalue=[])  # missing packs are empty slots
        times = [max(map(self._time_ms, slot)) for slot in slots]
        return sum(times) + (self.stages - 1) * max(times, default=0.0)

    def _time_ms(self, pack: _Pack) -> float:
        return self.pack_ms + sum(self.ms[sample] for sample in pack)

    def pack_in_order(self, window: range, ranks: int) -> _Ranks:
        """Return packs by next fit in stream order, dealt to ranks round robin."""
        bounds = cut_groups(self.sizes[:, window.start : window.stop], self.caps) + window.start
        packs = [list(range(*ends)) for ends in pairwise(bounds.tolist())]
        return [packs[rank::ranks] for rank in range(ranks)]

    def share_equally(self, window: range, ranks: int) -> _Ranks:
        """Return packs of every rank, from an equal share of the window's time."""
        share = (self.sizes[:, window.start : window.stop] / self.caps[:, None]).max(axis=0)
        # A sample causes a part of a pack's fixed time, by its share of the caps.
        weight_ms = np.array(self.ms[window.start : window.stop]) + self.pack_ms * share
        dealt = balance(weight_ms, ranks)
        longest_first = np.argsort(-weight_ms, kind="stable")
        places = [longest_first[dealt[longest_first] == rank] for rank in range(ranks)]
        shares = [(window.start + place).tolist() for place in places]
        packed = [self._pack_share(share) for share in shares]
        if self.lockstep_ranks == 1:
            return packed
        # Equal counts leave no slots empty, but may need larger packs.
        best = self._align_slots(packed)
        for count in sorted({len(packs) for packs in packed}):
            equal = [self._pack_evenly(share, count) for share in shares]
            feasible = [packs for packs in equal if packs is not None]
            if len(feasible) == len(shares):
                best = min(best, self._align_slots(feasible), key=self.busiest_ms)
        return best

    def _align_slots(self, ranks: _Ranks) -> _Ranks:
        """Reorder shares over ranks, and packs over slots, so that packs of a slot are similar."""
        heavy_first = [sorted(packs, key=self._time_ms, reverse=True) for packs in ranks]
        heavy_first.sort(key=lambda packs: [len(packs), *map(self._time_ms, packs)], reverse=True)
        ordered = []
        for group in self._groups(heavy_first):
            most, fewest = len(group[0]), len(group[-1])
            # Empty slots must be last: slots that only some ranks fill follow, heaviest first.
            slots = [*lightest_at_the_ends(fewest), *range(fewest, most)]
            ordered += [[packs[place] for place in slots[: len(packs)]] for packs in group]
        return ordered

    def _pack_share(self, share: list[int]) -> list[_Pack]:
        """Pack one rank's samples, sorted longest first, into the best number of similar packs."""
        if not share:
            return []
        sizes = self.sizes[:, share]
        fitted = pack_first_fit(sizes, (sizes / self.caps[:, None]).max(axis=0), self.caps)
        best = [[share[place] for place in pack] for pack in fitted]
        best_ms = self._lockstep_ms([best])
        fewest = int((-(-sizes.sum(axis=1) // self.caps)).max())
        for count in range(fewest, len(share) + 1):
            packs = self._pack_evenly(share, count)
            if packs is None:
                continue
            packs_ms = self._lockstep_ms([packs])
            if packs_ms > best_ms:
                break
            best, best_ms = packs, packs_ms
        heaviest_first = sorted(best, key=self._time_ms, reverse=True)
        return [heaviest_first[place] for place in lightest_at_the_ends(len(best))]

    def _pack_evenly(self, share: list[int], count: int) -> list[_Pack] | None:
        """Pack into `count` packs, each sample into the shortest that fits, or return None."""
        heap = [(0.0, pack) for pack in range(count)]
        room = [tuple(self.caps.tolist())] * count
        packs: list[_Pack] = [[] for _ in range(count)]
        for sample in share:
            too_full = []
            while heap:
                pack_ms, pack = heapq.heappop(heap)
                left = tuple(map(int.__sub__, room[pack], self.columns[sample]))
                if min(left) >= 0:
                    break
                too_full.append((pack_ms, pack))
            else:
                return None
            packs[pack].append(sample)
            room[pack] = left
            for entry in (*too_full, (pack_ms + self.ms[sample], pack)):
                heapq.heappush(heap, entry)
        return packs if all(packs) else None
