"""Items of context-parallel packs: the items of a pack that each of its ranks encodes.

Tiles and clips are dealt evenly. Attention keeps an image at native resolution, or each time of a
video, on one rank, so ranks get runs of images in pack order with near-minimal max cost: at most
the mean plus the largest image, and 2 to 8 % above max(mean, largest) for images of 64 to 16,384
tokens in packs of 16K to 128K. Runs keep neighbouring features together, so communication is a few
slices.

Used by planner and trainer. Depends only on samples' lengths, in integers, so all machines agree.
"""

from dataclasses import dataclass

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.model.encoders import SQUARED_FEATURES, squares_of
from omnibal.model.levels import Level
from omnibal.packing.cut import item_bounds
from omnibal.packing.packs import Packs

_UNITS_PER_TOKEN = 16  # Units of cost per token. Limits rounding errors to 1/16 token per image.
_MAX_PIECE_UNITS = 1 << 40  # max units of a piece, so that sums over all packs fit 64-bit integers
_HALVINGS = 8  # bisection steps for the max cost: precise to 1/256 of the largest image


def bounds_of_items(packs: Packs, lengths: Lengths, level: Level, feature: str) -> np.ndarray:
    """Return bounds of a feature's items that every rank encodes, for packs of one level.

    Rank r encodes items bounds[r] to bounds[r + 1] of a pack, int64 [packs, context + 1].
    """
    if squares_of(feature) not in SQUARED_FEATURES or level.context == 1:
        return item_bounds(packs.sums(lengths.column(feature)), level.context)
    pieces = ImagePieces.from_packs(packs, lengths)
    return pieces.tokens_before(pieces.bounds(level))


def squares_of_shares(packs: Packs, lengths: Lengths, level: Level) -> np.ndarray:
    """Return the sum of squares of each rank's native-resolution pieces, [packs, context]."""
    pieces = ImagePieces.from_packs(packs, lengths)
    return np.diff(np.append(0, np.cumsum(pieces.squares))[pieces.bounds(level)])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImagePieces:
    """Pieces in pack order: an image, or a time of a video. int64, [pieces] but for `offsets`."""

    tokens: np.ndarray  # encoder tokens
    squares: np.ndarray  # squared tokens, summed over a sample's images if not counted
    sample: np.ndarray  # index of the piece's sample among all packs
    offsets: np.ndarray  # bounds of every pack's pieces, [packs + 1]

    @classmethod
    def from_packs(cls, packs: Packs, lengths: Lengths) -> "ImagePieces":
        """List the pieces of packs; one per sample if lengths do not count images."""
        tokens, squares, counts = lengths.pieces_of_images(packs.samples)
        return cls(
            tokens=tokens,
            squares=squares,
            sample=np.repeat(np.arange(len(counts)), counts),
            offsets=np.append(0, np.cumsum(counts))[packs.offsets],
        )

    def bounds(self, level: Level) -> np.ndarray:
        """Return bounds of ranks' pieces, int64 [packs, context + 1], by bisecting the max cost."""
        cost = np.rint(_UNITS_PER_TOKEN * (self.tokens + level.image_weight * self.squares))
        cost = np.minimum(cost, _MAX_PIECE_UNITS).astype(np.int64)
        before = np.append(0, np.cumsum(cost))
        first, stop = self.offsets[:-1], self.offsets[1:]
        total = before[stop] - before[first]
        largest, has_any = np.zeros(len(total), np.int64), stop > first
        if has_any.any():
            largest[has_any] = np.maximum.reduceat(cost, first[has_any])
        mean = -(-total // level.context)
        # Filling in order up to mean + largest always succeeds. Not below 0, also for packs without
        # items: no limit moves a bound back.
        low, high = np.maximum(np.maximum(mean, largest) - 1, 0), mean + largest
        for _ in range(_HALVINGS):
            middle = (low + high) // 2
            fits = _fill_in_order(before, first, stop, middle, level.context)[:, -1] == stop
            low, high = np.where(fits, low, middle), np.where(fits, middle, high)
        return _fill_in_order(before, first, stop, high, level.context)

    def tokens_before(self, bounds: np.ndarray) -> np.ndarray:
        """Return tokens of a pack before the pieces in `bounds`, [packs, ...]."""
        before = np.append(0, np.cumsum(self.tokens))
        return before[bounds] - before[self.offsets[:-1], None]


def _fill_in_order(
    before: np.ndarray, first: np.ndarray, stop: np.ndarray, limit: np.ndarray, context: int
) -> np.ndarray:
    """Return bounds of runs of cost up to each pack's `limit`, int64 [packs, context + 1].

    Args:
        before: cumulative cost of all pieces, [pieces + 1].
        first: first piece of every pack, with `stop` as its end, [packs].
    """
    bounds = [first]
    for _ in range(context):
        reached = np.searchsorted(before, before[bounds[-1]] + limit, "right") - 1
        bounds.append(np.minimum(reached, stop))
    return np.stack(bounds, axis=1)
