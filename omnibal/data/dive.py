"""Packs from a fractional cover of all sizes, by diving: optimal or nearly so.

The patterns that the cover uses most become packs, what is left is covered anew, with new patterns
for it, and so on until all samples are packed (Sadykov, Vanderbeck, Pessoa, Tahiri and Uchoa,
INFORMS Journal on Computing 31, 2019, have diving for packing problems of many kinds).
"""

from collections import defaultdict

import numpy as np

from omnibal.data.all_sizes import SizeMix, Sizes
from omnibal.data.few_samples import MAX_SAMPLES, pack_exactly
from omnibal.data.master import Cover
from omnibal.data.packs import Packs

_MAX_CELLS = 1 << 16
_MAX_ROUNDS = 60
_ROUNDS_AGAIN = 1
"""Rounds of column generation each time some packs are fixed."""
_SHARE_AT_ONCE = 0.1
"""Share of the remaining packs that is fixed before the rest is covered again."""
_LEAST_USED = 0.5
"""Times that a pattern must be used to become a pack, if it is not the most used one."""
_SIZE_VALUE = 1e-6
"""Value of a pack's full capacity besides the dual values, which may be 0."""
_USED = 1e-7


def pack_by_diving(sizes: np.ndarray, caps: np.ndarray, packs: Packs, enough: int) -> Packs:
    """Reduce the number of packs, if the fractional cover shows that it is worth the time.

    Args:
        sizes: int64 [features, samples].
        caps: of every pack, int64 [features].
        packs: of all samples, to start from.
        enough: packs above the fractional cover, rounded up, at which `packs` are good enough.
    """
    distinct = Sizes.of(sizes)
    mix = SizeMix(distinct, caps, packs, _MAX_CELLS)
    cover = mix.cover(distinct.counts, max_rounds=_MAX_ROUNDS)
    if cover is None or len(packs) <= np.ceil(cover.packs - _USED) + enough:
        return packs
    made = _dive(mix, cover)
    return packs if made is None or len(made) >= len(packs) else _with_samples(made, distinct)


def _dive(mix: SizeMix, cover: Cover) -> np.ndarray | None:
    """Packs of sizes, int64 [packs, sizes]; None where a cover takes too long."""
    left = mix.sizes.counts
    made: list[np.ndarray] = []
    while left.sum() > MAX_SAMPLES:
        most_used = np.argsort(-cover.times, kind="stable")
        at_once = max(1, int(_SHARE_AT_ONCE * cover.packs))
        trades = _Trades(mix, cover)
        before = len(made)
        for column in most_used[: mix.columns.shape[0]]:
            if len(made) > before and (
                len(made) - before >= at_once or cover.times[column] < _LEAST_USED
            ):
                break
            for _ in range(max(1, int(cover.times[column] + _USED))):
                pack = trades.pack(column, left, must_fit=len(made) > before)
                if pack is None:
                    break
                made.append(pack)
                left = left - pack
        if left.any():
            anew = mix.cover(left, max_rounds=_ROUNDS_AGAIN)
            if anew is None:
                return None
            cover = anew
    return np.array(made + _exactly(mix, left))


def _exactly(mix: SizeMix, left: np.ndarray) -> list[np.ndarray]:
    size = np.repeat(np.arange(len(left)), left)
    if not len(size):
        return []
    packs = pack_exactly(mix.sizes.amounts[:, size], mix.caps)
    return [np.bincount(size[pack], minlength=len(left)) for pack in packs]


class _Trades:
    """Replacement sizes for a place in a pattern once the samples of its own size are packed."""

    def __init__(self, mix: SizeMix, cover: Cover):
        self._sizes, self._caps, self._columns = mix.sizes, mix.caps, mix.columns
        shares = (mix.sizes.amounts / mix.caps[:, None]).sum(axis=0)
        self._worth = cover.values + _SIZE_VALUE * shares
        self._traded: defaultdict[int, list[int]] = defaultdict(list)
        for smaller, larger in mix.exchanges[cover.traded > _USED].tolist():
            self._traded[larger].append(smaller)

    def pack(self, column: int, left: np.ndarray, *, must_fit: bool) -> np.ndarray | None:
        """A pack of samples that are left, int64 [sizes], by a column and filled up after it.

        Args:
            column: of the mix.
            left: int64 [sizes], samples that are not packed yet.
            must_fit: give None where a place can be filled neither by its size nor as traded.
        """
        taken = np.zeros(len(left), np.int64)
        row = self._columns[[column]]
        places = np.repeat(row.indices, row.data.astype(np.int64))
        for place in places[np.argsort(-self._worth[places], kind="stable")].tolist():
            size = self._size_for(place, left - taken)
            if size is None and must_fit:
                return None
            if size is not None:
                taken[size] += 1
        return self._filled_up(taken, left)

    def _size_for(self, place: int, left: np.ndarray) -> int | None:
        """The place's own size, or else the first with samples left that it was traded for."""
        seen, front = {place}, [place]
        while front:
            for size in front:
                if left[size] > 0:
                    return size
            front = [to for size in front for to in self._traded[size] if to not in seen]
            seen.update(front)
        return None

    def _filled_up(self, taken: np.ndarray, left: np.ndarray) -> np.ndarray:
        amounts = self._sizes.amounts
        while True:
            room = self._caps - amounts @ taken
            fits = (amounts <= room[:, None]).all(axis=0) & (left > taken)
            if not fits.any():
                return taken
            taken[np.where(fits, self._worth, -1.0).argmax()] += 1


def _with_samples(packs: np.ndarray, sizes: Sizes) -> Packs:
    """Packs of sizes [packs, sizes] with samples in their places."""
    by_size = np.argsort(sizes.of_sample, kind="stable")
    pack, size = np.nonzero(packs)
    times = packs[pack, size]
    slot_pack, slot_size = np.repeat(pack, times), np.repeat(size, times)
    samples = np.empty(len(slot_pack), np.int64)
    samples[np.argsort(slot_size, kind="stable")] = by_size
    return Packs(samples=samples, offsets=np.searchsorted(slot_pack, np.arange(len(packs) + 1)))
