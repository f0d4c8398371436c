"""Best fit decreasing on exact sizes: the largest sample opens a pack, best-fitting ones follow.

Used for what patterns leave over, and for data whose packs hold two or three samples, where a
sample's partner must have the one size that is missing and types of similar sizes are too coarse.

Samples are kept in shelves by tiles, each sorted by tokens. The most tokens that still fit are
found by bisection, and samples that are gone are jumped over by a union-find structure
(predecessors under deletions), so a placement costs a few microseconds however many samples there
are.
"""

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from omnibal.limits import Caps

_MAX_SHELVES = 32
_TRIES = 12
"""Most samples tried for one that fits by tiles, on a shelf of several tile counts."""


def pack_best_fit(
    tiles: np.ndarray, tokens: np.ndarray, values: np.ndarray, first: np.ndarray, caps: Caps
) -> list[list[int]]:
    """Packs as lists of indices into the arguments; every sample fits alone.

    Args:
        tiles, tokens: int64 [samples].
        values: float64 [samples], positive; of what fits, the most valuable is taken. Within a
            shelf more tokens come before more value.
        first: float64 [samples]; the sample with the highest opens the next pack.
        caps: of every pack.
    """
    if not len(tiles):
        return []
    shelves = _shelves(tiles, tokens, values)
    place = np.empty((2, len(tiles)), np.int64)
    for number, shelf in enumerate(shelves):
        place[0, shelf.samples], place[1, shelf.samples] = number, np.arange(1, len(shelf) + 1)
    shelf_of, rank_of = place.tolist()
    sample_tiles, sample_tokens = tiles.tolist(), tokens.tolist()
    packs: list[list[int]] = []
    for sample in np.argsort(-first, kind="stable").tolist():
        shelf = shelves[shelf_of[sample]]
        if shelf.below[rank_of[sample]] != rank_of[sample]:
            continue  # it is in a pack already
        pack: list[int] = []
        tiles_left, tokens_left = caps["tiles"], caps["tokens"]
        chosen: int | None = sample
        while chosen is not None:
            shelves[shelf_of[chosen]].remove(rank_of[chosen])
            pack.append(chosen)
            tiles_left -= sample_tiles[chosen]
            tokens_left -= sample_tokens[chosen]
            chosen = _most_valuable(shelves, tiles_left, tokens_left)
        packs.append(pack)
    return packs


def pack_first_fit(
    tiles: np.ndarray, tokens: np.ndarray, first: np.ndarray, caps: Caps
) -> list[list[int]]:
    """First fit decreasing: each sample goes into the first pack that has room, or opens one.

    Args:
        tiles, tokens: int64 [samples]; every sample fits alone.
        first: float64 [samples]; samples are placed from the highest to the lowest.
        caps: of every pack.
    """
    packs: list[list[int]] = []
    room = np.zeros((2, len(tiles)), np.int64)
    for sample in np.argsort(-first, kind="stable").tolist():
        fits = (room[0, : len(packs)] >= tiles[sample]) & (room[1, : len(packs)] >= tokens[sample])
        pack = int(fits.argmax()) if fits.any() else len(packs)
        if pack == len(packs):
            packs.append([])
            room[:, pack] = caps["tiles"], caps["tokens"]
        packs[pack].append(sample)
        room[:, pack] -= tiles[sample], tokens[sample]
    return packs


def pack_nearest(tiles: np.ndarray, tokens: np.ndarray, caps: Caps) -> list[list[int]]:
    """Packs filled one by one, each time with the sample whose size is nearest to the room left.

    Distances are squares of shares of the caps, weighed by what the samples take of each cap in
    all (norm-based greedy: Panigrahy, Talwar, Uyeda and Wieder, Heuristics for vector bin packing,
    2011). Samples of many tiles so meet samples of many tokens.

    Args:
        tiles, tokens: int64 [samples]; every sample fits alone.
        caps: of every pack.
    """
    shares = np.stack([tiles / caps["tiles"], tokens / caps["tokens"]])
    weights = shares.sum(axis=1, keepdims=True)
    left = np.arange(len(tiles))
    packs: list[list[int]] = []
    while len(left):
        pack: list[int] = []
        tiles_left, tokens_left = caps["tiles"], caps["tokens"]
        fits = left
        while len(fits):
            room = np.array([[tiles_left / caps["tiles"]], [tokens_left / caps["tokens"]]])
            distance = (weights * (room - shares[:, fits]) ** 2).sum(axis=0)
            chosen = int(fits[distance.argmin()])
            pack.append(chosen)
            tiles_left -= int(tiles[chosen])
            tokens_left -= int(tokens[chosen])
            fits = fits[
                (fits != chosen) & (tiles[fits] <= tiles_left) & (tokens[fits] <= tokens_left)
            ]
        packs.append(pack)
        left = np.setdiff1d(left, pack, assume_unique=True)
    return packs


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Shelf:
    """Samples of one tile count, or of a few neighbouring ones, sorted by tokens."""

    fewest_tiles: int
    most_tiles: int
    samples: list[int]
    tiles: list[int]
    tokens: list[int]
    values: list[float]
    below: list[int]
    """Union-find links: below[k] leads to the last remaining sample at or before the k-th; 0 is
    none."""

    def __len__(self) -> int:
        return len(self.samples)

    def remove(self, rank: int) -> None:
        """Remove the sample of this rank, counted from 1."""
        self.below[rank] = rank - 1

    def last_of(self, rank: int) -> int:
        """Rank of the last remaining sample at or before `rank`."""
        below = self.below
        root = rank
        while below[root] != root:
            root = below[root]
        while below[rank] != root:
            below[rank], rank = root, below[rank]
        return root

    def best(self, tiles_left: int, tokens_left: int) -> int:
        """Rank of the sample with the most tokens that fits; 0 where none was found."""
        rank = self.last_of(bisect_right(self.tokens, tokens_left))
        if tiles_left >= self.most_tiles:
            return rank
        for _ in range(_TRIES):
            if rank == 0 or self.tiles[rank - 1] <= tiles_left:
                return rank
            rank = self.last_of(rank - 1)
        return 0


def _most_valuable(shelves: list[_Shelf], tiles_left: int, tokens_left: int) -> int | None:
    """Most valuable of the samples that the shelves offer; None where nothing fits."""
    most, chosen = 0.0, None
    for shelf in shelves:
        if shelf.fewest_tiles > tiles_left:
            break
        rank = shelf.best(tiles_left, tokens_left)
        if rank and shelf.values[rank - 1] > most:
            most, chosen = shelf.values[rank - 1], shelf.samples[rank - 1]
    return chosen


def _shelves(tiles: np.ndarray, tokens: np.ndarray, values: np.ndarray) -> list[_Shelf]:
    """Make shelves by tiles, ascending: one per tile count, up to a limit."""
    counts = np.unique(tiles)
    groups = np.array_split(counts, min(len(counts), _MAX_SHELVES))
    shelf_of = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    by_sample = shelf_of[np.searchsorted(counts, tiles)]
    order = np.lexsort((values, tokens, by_sample))
    shelves = []
    for members in np.split(order, np.flatnonzero(np.diff(by_sample[order])) + 1):
        shelves.append(
            _Shelf(
                fewest_tiles=int(tiles[members].min()),
                most_tiles=int(tiles[members].max()),
                samples=members.tolist(),
                tiles=tiles[members].tolist(),
                tokens=tokens[members].tolist(),
                values=values[members].tolist(),
                below=list(range(len(members) + 1)),
            )
        )
    return shelves
