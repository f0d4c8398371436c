"""Items of shared packs: which of a pack's every one of its ranks encodes.

Tiles and clips are dealt one by one, equally many to each rank. Positions of an image at its native
resolution attend to each other, so that it is one rank's, as is each time of a video: a rank has a
run of them in the order of the pack, such that the largest cost of a rank is near the least that
runs can have. Rank r of c has no more than the mean and the largest image together, and no dealing
has less than the larger of the two; of images of 64 to 16,384 tokens in packs of 16K to 128K runs
cost 2 to 8 % more than that. Runs keep features of neighbours together: all that is sent, read and
embedded is a few slices.

Planner and trainer both deal here, by the samples' lengths alone and in whole numbers, so that all
machines agree.
"""

from dataclasses import dataclass

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.model.encoders import SQUARED_FEATURES, squares_of
from omnibal.model.levels import Level
from omnibal.packing.packs import Packs
from omnibal.steps.cut import item_bounds

_UNITS = 16
"""Units of cost of a token, so that rounding moves no image by more than a sixteenth of one."""
_MOST_UNITS = 1 << 40
"""Most units of a piece, so that sums over all packs of a run are whole numbers of 64 bits."""
_HALVINGS = 8
"""Times that the range of the largest cost is halved: it ends within 1/256 of the largest image."""


def bounds_of_items(packs: Packs, lengths: Lengths, level: Level, feature: str) -> np.ndarray:
    """Bounds of the items that every rank encodes of packs of one level.

    Returns:
        int64 [packs, context + 1]: rank r has a pack's items from entry r to entry r + 1.
    """
    if squares_of(feature) not in SQUARED_FEATURES or level.context == 1:
        return item_bounds(packs.sums(lengths.column(feature)), level.context)
    pieces = ImagePieces.of(packs, lengths)
    return pieces.tokens_before(pieces.bounds(level))


def squares_of_shares(packs: Packs, lengths: Lengths, level: Level) -> np.ndarray:
    """Sum of squares of what every rank encodes of images at their native resolution, int64
    [packs, context]."""
    pieces = ImagePieces.of(packs, lengths)
    return np.diff(np.append(0, np.cumsum(pieces.squares))[pieces.bounds(level)])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImagePieces:
    """Images of packs, and times of their videos, in the order of the packs; arrays are int64
    [pieces] unless they say otherwise."""

    tokens: np.ndarray
    squares: np.ndarray
    sample: np.ndarray
    """Place of the piece's sample among those of all packs."""
    offsets: np.ndarray
    """First piece of every pack, and the end, [packs + 1]."""

    @classmethod
    def of(cls, packs: Packs, lengths: Lengths) -> "ImagePieces":
        """List the images of packs, or samples' all where lengths do not count them one by one."""
        tokens, squares, counts = lengths.pieces_of_images(packs.samples)
        return cls(
            tokens=tokens,
            squares=squares,
            sample=np.repeat(np.arange(len(counts)), counts),
            offsets=np.append(0, np.cumsum(counts))[packs.offsets],
        )

    def bounds(self, level: Level) -> np.ndarray:
        """First piece of every rank of packs of a level, and the end, int64 [packs, context + 1].

        Runs are filled up to the least of a few limits at which all of them hold all pieces.
        """
        before = np.append(0, np.cumsum(self._cost(level.image_weight)))
        first, stop = self.offsets[:-1], self.offsets[1:]
        total = before[stop] - before[first]
        largest = _largest(np.diff(before), self.offsets)
        mean = -(-total // level.context)
        low, high = np.maximum(mean, largest) - 1, mean + largest
        for _ in range(_HALVINGS):
            middle = (low + high) // 2
            holds = _filled(before, first, stop, middle, level.context)[:, -1] == stop
            low, high = np.where(holds, low, middle), np.where(holds, middle, high)
        return _filled(before, first, stop, high, level.context)

    def tokens_before(self, bounds: np.ndarray) -> np.ndarray:
        """Tokens of a pack before pieces of it, int64; `bounds` has a row a pack."""
        before = np.append(0, np.cumsum(self.tokens))
        return before[bounds] - before[self.offsets[:-1], None]

    def _cost(self, weight: float) -> np.ndarray:
        cost = _UNITS * (self.tokens + weight * self.squares)
        return np.minimum(np.rint(cost), _MOST_UNITS).astype(np.int64)


def _largest(cost: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Largest cost of a piece of every pack, 0 where it has none, int64 [packs]."""
    found, has_any = np.zeros(len(offsets) - 1, np.int64), np.diff(offsets) > 0
    if has_any.any():
        found[has_any] = np.maximum.reduceat(cost, offsets[:-1][has_any])
    return found


def _filled(
    before: np.ndarray, first: np.ndarray, stop: np.ndarray, limit: np.ndarray, context: int
) -> np.ndarray:
    """Bounds of runs that take pieces in order up to a limit of every pack, int64
    [packs, context + 1]; the last is a pack's end if its runs hold all.

    Args:
        before: cost before every piece of all packs, and of all. [pieces + 1]
        first, stop: pieces of every pack.
    """
    bounds = [first]
    for _ in range(context):
        reached = np.searchsorted(before, before[bounds[-1]] + limit, "right") - 1
        bounds.append(np.minimum(reached, stop))
    return np.stack(bounds, axis=1)
