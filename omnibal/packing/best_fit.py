"""Best fit, first fit and nearest fit on exact sizes.

Used if size types are too coarse: packs of two or three samples, or samples left by patterns.
Best fit takes microseconds per placement. Shelves hold samples of equal items, sorted by tokens;
bisection finds the largest that fits, and union-find skips packed samples. Item counts are compared
at once, as bit fields of an integer (`_Fields`).
"""

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from omnibal.packing.fit import size_keys

_MAX_SHELVES = 32  # of open packs by free items
_TRIES = 12  # max samples tried on a shelf of several item counts


def pack_best_fit(
    sizes: np.ndarray, values: np.ndarray, first: np.ndarray, caps: np.ndarray
) -> list[list[int]]:
    """Return packs as lists of sample indices, by best fit decreasing. Every sample fits alone.

    The sample highest in `first` opens the next pack. The most valuable of the shelves' largest
    fitting samples follows, while its value is positive. Both are float64 [samples].
    """
    samples = sizes.shape[1]
    if not samples:
        return []
    fields = _Fields(caps[:-1])
    items, tokens = fields.numbers(sizes[:-1]), sizes[-1].tolist()
    shelves = _build_shelves(sizes, values, fields)
    place = np.empty((2, samples), np.int64)  # shelf, and rank on it from 1
    for number, shelf in enumerate(shelves):
        place[0, shelf.samples] = number
        place[1, shelf.samples] = np.arange(1, len(shelf.below))
    shelf_of, rank_of = place.tolist()  # lists: faster to index than arrays
    full = fields.numbers(caps[:-1, None])[0] + fields.spare
    packs: list[list[int]] = []
    for sample in np.argsort(-first, kind="stable").tolist():
        shelf = shelves[shelf_of[sample]]
        if shelf.below[rank_of[sample]] != rank_of[sample]:
            continue  # already packed
        pack: list[int] = []
        items_left, tokens_left = full, int(caps[-1])
        chosen: int | None = sample
        while chosen is not None:
            shelves[shelf_of[chosen]].below[rank_of[chosen]] = rank_of[chosen] - 1  # removed
            pack.append(chosen)
            items_left -= items[chosen]
            tokens_left -= tokens[chosen]
            best_value, chosen = 0.0, None
            for shelf in shelves:
                if shelf.first > items_left:
                    break  # later shelves have more items of a feature than are left
                rank = shelf.largest_fit(items_left, tokens_left, fields.spare)
                if rank and shelf.values[rank - 1] > best_value:
                    best_value, chosen = shelf.values[rank - 1], shelf.samples[rank - 1]
        packs.append(pack)
    return packs


class _Fields:
    """Item counts as one integer: a bit field per feature up to its cap, with a spare bit above.

    A sample fits if subtracting its number from the free capacity borrows from no spare bit.
    """

    def __init__(self, caps: np.ndarray):
        self._widths = [int(cap).bit_length() + 1 for cap in caps]
        self.spare = sum(1 << sum(self._widths[i:]) - 1 for i in range(len(self._widths)))

    def numbers(self, counts: np.ndarray) -> list[int]:
        """Encode counts, int64 [features, samples], each at most its cap."""
        is_wide = sum(self._widths) >= 63  # Python integers if int64 overflows
        numbers = np.zeros(counts.shape[1], object if is_wide else np.int64)
        for row, width in zip(counts, self._widths, strict=True):
            numbers = numbers << width | row.astype(numbers.dtype)
        return numbers.tolist()


def pack_first_fit(sizes: np.ndarray, first: np.ndarray, caps: np.ndarray) -> list[list[int]]:
    """Return packs by first fit: each sample joins the first pack that fits, or opens one.

    Sizes are int64 [features, samples], each fits alone. Samples come by descending `first`,
    float64 [samples].
    """
    packs: list[list[int]] = []
    room = np.zeros_like(sizes)  # free capacity, [features, packs]
    for sample in np.argsort(-first, kind="stable").tolist():
        size = sizes[:, sample]
        fits = (room[:, : len(packs)] >= size[:, None]).all(axis=0)
        pack = int(fits.argmax()) if fits.any() else len(packs)
        if pack == len(packs):
            packs.append([])
            room[:, pack] = caps
        packs[pack].append(sample)
        room[:, pack] -= size
    return packs


def pack_nearest(sizes: np.ndarray, caps: np.ndarray) -> list[list[int]]:
    """Return packs, each filled with samples of `sizes` [features, samples] nearest its free space.

    Norm-based greedy with squared distances in shares of the caps, weighted by total demand
    (Panigrahy, Talwar, Uyeda and Wieder, Heuristics for vector bin packing, 2011).
    """
    shares = sizes / caps[:, None]
    weights = shares.sum(axis=1, keepdims=True)
    left = np.arange(sizes.shape[1])
    packs: list[list[int]] = []
    while len(left):
        pack: list[int] = []
        room = caps.copy()
        fits = left
        while len(fits):
            missing = (room / caps)[:, None] - shares.take(fits, axis=1)
            chosen = int(fits[(weights * missing**2).sum(axis=0).argmin()])
            pack.append(chosen)
            room -= sizes[:, chosen]
            fits = fits[(fits != chosen) & (sizes.take(fits, axis=1) <= room[:, None]).all(axis=0)]
        packs.append(pack)
        left = np.setdiff1d(left, pack, assume_unique=True)
    return packs


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Shelf:
    """Samples of equal or similar item counts, sorted by tokens."""

    first: int  # min of its samples' numbers, with the spare bits
    most: int  # max items per feature, encoded
    samples: list[int]
    items: list[int]
    tokens: list[int]
    values: list[float]
    below: list[int]  # Union-find: below[k] leads to the last free sample up to k, or 0

    def last_free(self, rank: int) -> int:
        """Return the last free rank up to `rank`, 0 if none."""
        below = self.below
        root = rank
        while below[root] != root:
            root = below[root]
        while below[rank] != root:  # path compression
            below[rank], rank = root, below[rank]
        return root

    def largest_fit(self, items_left: int, tokens_left: int, spare: int) -> int:
        """Return the rank of the largest sample that fits, 0 if none was found."""
        rank = self.last_free(bisect_right(self.tokens, tokens_left))
        if (items_left - self.most) & spare == spare:
            return rank
        for _ in range(_TRIES):
            if rank == 0 or (items_left - self.items[rank - 1]) & spare == spare:
                return rank
            rank = self.last_free(rank - 1)
        return 0


def _build_shelves(sizes: np.ndarray, values: np.ndarray, fields: _Fields) -> list[_Shelf]:
    """Return shelves in item order, one per item count or, if there are many, per range of them."""
    keys, tokens = size_keys(sizes[:-1]), sizes[-1]
    distinct = np.unique(keys)
    groups = np.array_split(distinct, min(len(distinct), _MAX_SHELVES))
    shelf_of = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    by_sample = shelf_of[np.searchsorted(distinct, keys)]
    order = np.lexsort((values, tokens, by_sample))
    shelves = []
    for members in np.split(order, np.flatnonzero(np.diff(by_sample[order])) + 1):
        items = sizes[:-1].take(members, axis=1)
        numbers = fields.numbers(items)
        shelves.append(
            _Shelf(
                first=min(numbers) + fields.spare,
                most=fields.numbers(items.max(axis=1, keepdims=True))[0],
                samples=members.tolist(),
                items=numbers,
                tokens=tokens[members].tolist(),
                values=values[members].tolist(),
                below=list(range(len(members) + 1)),
            )
        )
    return shelves
