"""Packs from a fractional cover of all sizes, by diving: optimal or nearly so.

The patterns that the cover uses most become packs, what is left is covered anew, with new patterns
for it, and so on until all samples are packed (Sadykov, Vanderbeck, Pessoa, Tahiri and Uchoa,
INFORMS Journal on Computing 31, 2019, have diving for packing problems of many kinds).
"""

from collections import defaultdict

import numpy as np
from scipy import sparse

from omnibal.packing.all_sizes import SizeMix, Sizes
from omnibal.packing.few_samples import MAX_SAMPLES, pack_exactly
from omnibal.packing.master import Cover
from omnibal.packing.packs import Packs
from omnibal.packing.rest import Rest

_MAX_CELLS = 1 << 16  # of a knapsack table
_MAX_ROUNDS = 60  # of column generation before the first pack is fixed
_ROUNDS_AGAIN = 1
"""Rounds of column generation each time some packs are fixed."""
_SHARE_AT_ONCE = 0.1
"""Share of the remaining packs that is fixed before the rest is covered again."""
_LEAST_USED = 0.5
"""Times that a pattern must be used to become a pack, if it is not the most used one."""
_SIZE_VALUE = 1e-6
"""Value of a pack's full capacity besides the dual values, which may be 0."""
_USED = 1e-7  # less is rounding of the linear program
_SAMPLES_PER_PART = 250  # larger sets are packed in parts of as many
_SEARCHED_SIZES = 200
"""Most distinct sizes whose best packs are searched for, beyond what the knapsack's table finds."""


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
    wanted = len(packs) if len(distinct) <= _SEARCHED_SIZES else None
    cover = mix.cover(distinct.counts, max_rounds=_MAX_ROUNDS, wanted=wanted)
    if cover is None or len(packs) <= np.ceil(cover.packs - _USED) + enough:
        return packs
    made = _dive(mix, cover)
    if made is None or sum(times for _, times in made) >= len(packs):
        return packs
    return _with_samples(made, distinct)


def pack_parts_by_diving(
    sizes: np.ndarray, caps: np.ndarray, packs: Packs, rng: np.random.Generator
) -> Packs:
    """Reduce the number of packs by diving in parts of samples at random, each for itself.

    The time grows with the samples and not faster, for about half a pack more in each part.

    Args:
        sizes: int64 [features, samples].
        caps: of every pack, int64 [features].
        packs: of all samples, which are kept where parts need as many.
        rng: draws the parts.
    """
    order = rng.permutation(sizes.shape[1])
    made = []
    for part in np.array_split(order, -(-len(order) // _SAMPLES_PER_PART)):
        own = sizes.take(part, axis=1)
        fitted = Packs.from_lists(Rest(own, caps).best_fit(rng))
        dived = pack_by_diving(own, caps, fitted, 0)
        made.append(Packs(samples=part[dived.samples], offsets=dived.offsets))
    joined = Packs.join(made)
    return joined if len(joined) < len(packs) else packs


def _dive(mix: SizeMix, cover: Cover) -> list[tuple[np.ndarray, int]] | None:
    """Packs, int64 [sizes], and how often each is made; None where a cover takes too long."""
    left = mix.sizes.counts
    made: list[tuple[np.ndarray, int]] = []
    while left.sum() > MAX_SAMPLES:
        most_used = np.argsort(-cover.times, kind="stable")
        at_once = max(1, int(_SHARE_AT_ONCE * cover.packs))
        trades = _Trades(mix, cover)
        fixed = 0
        for column in most_used[: mix.columns.shape[0]]:
            if fixed and (fixed >= at_once or cover.times[column] < _LEAST_USED):
                break
            wanted = max(1, int(cover.times[column] + _USED))
            while wanted and (pack := trades.pack(column, left, must_fit=fixed > 0)) is not None:
                # As long as samples of all its sizes are left, the same pack comes out again.
                times = min(wanted, int((left[pack > 0] // pack[pack > 0]).min()))
                made.append((pack, times))
                left = left - times * pack
                wanted -= times
                fixed += times
                if not left.any():
                    break
        if left.any():
            anew = mix.cover(left, max_rounds=_ROUNDS_AGAIN)
            if anew is None:
                return None
            cover = anew
    return made + [(pack, 1) for pack in _exactly(mix, left)]


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


def _with_samples(made: list[tuple[np.ndarray, int]], sizes: Sizes) -> Packs:
    """Packs of sizes [sizes], each as often as it is made, with samples in their places."""
    patterns = sparse.csr_array(np.array([pack for pack, _ in made]))
    packs = patterns[np.repeat(np.arange(len(made)), [times for _, times in made])].tocoo()
    slot_pack, slot_size = (np.repeat(at, packs.data) for at in packs.coords)
    by_size = np.argsort(sizes.of_sample, kind="stable")
    samples = np.empty(len(slot_pack), np.int64)
    samples[np.argsort(slot_size, kind="stable")] = by_size
    offsets = np.searchsorted(slot_pack, np.arange(packs.shape[0] + 1))
    return Packs(samples=samples, offsets=offsets)
