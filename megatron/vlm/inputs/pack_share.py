"""A rank's share of a pack: its tokens and items, and the route of its image features.

Shapes: F image features that this rank makes, one per image token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.model.levels import ContextExchange, Level
from omnibal.model.parallel import Parallel
from omnibal.packing.cut import Pieces, cut_pack
from omnibal.packing.item_shares import bounds_of_items
from omnibal.packing.packs import ScheduledPacks
from omnibal.packing.shares import shares_of


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackShare:
    """One rank's share of a pack, of a block of `context` ranks."""

    part: int  # rank within the block, from 0
    context: int  # number of ranks that share the pack
    exchange: ContextExchange
    pieces: Pieces  # pieces of all ranks of the block
    item_bounds: Mapping[str, np.ndarray]  # of each rank's items, int64 [context + 1], by name

    @classmethod
    def cut(
        cls,
        sample_tokens: np.ndarray,
        level: Level,
        part: int,
        item_bounds: Mapping[str, np.ndarray] | None = None,
    ) -> "PackShare":
        """Return share `part` of a pack with these tokens per sample."""
        return cls(
            part=part,
            context=level.context,
            exchange=level.exchange,
            pieces=cut_pack(sample_tokens, level),
            item_bounds=item_bounds or {},
        )

    @property
    def own_pieces(self) -> Pieces:
        """Return this rank's pieces, in the order of its tokens."""
        return self.pieces.take(self.pieces.rank == self.part)

    @property
    def tokens(self) -> int:
        """Return this rank's tokens; may be 0."""
        return int(self.own_pieces.tokens.sum())

    def own_items(self, feature: str) -> range:
        """Return this rank's items of the pack; may be empty."""
        bounds = self.item_bounds.get(feature)
        return range(0) if bounds is None else range(*bounds[self.part : self.part + 2].tolist())


class ShareLayout:
    """Token layout of a share, for attention, with `padding` tokens at the end."""

    def __init__(self, share: PackShare, padding: int) -> None:
        is_divided = share.pieces.is_divided
        self.part, self.ranks, self.padding = share.part, share.context, padding
        # Pieces of this rank: the first token among this rank's, int64, and whether other ranks
        # have tokens of the sample, bool.
        self.own = share.own_pieces
        self.own_start = np.cumsum(self.own.tokens) - self.own.tokens
        self.own_divided = is_divided[share.pieces.rank == share.part]
        # Pieces of divided samples on all ranks, in rank order.
        self.divided = share.pieces.take(is_divided)

    @property
    def tokens(self) -> int:
        return int(self.own.tokens.sum()) + self.padding

    @property
    def divided_tokens(self) -> np.ndarray:
        """Return each rank's tokens of divided samples, int64 [context]."""
        sums = np.zeros(self.ranks, np.int64)
        np.add.at(sums, self.divided.rank, self.divided.tokens)
        return sums


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """A plan's context-parallel sizes (levels), and the data-parallel rank that reads shares."""

    dp_rank: int
    levels: Sequence[Level]

    def rows(self, scheduled: ScheduledPacks, first_step: int, last_step: int) -> np.ndarray:
        """Return the rank's rows in steps `first_step` to `last_step - 1`, in slot order."""
        shares = shares_of(scheduled, self.levels)
        inside = (first_step <= shares.step) & (shares.step < last_step)
        return shares.pack[inside & (shares.dp_rank == self.dp_rank)]

    def rows_are_full(self, step: ScheduledPacks, ranks: int) -> bool:
        """Return whether all data-parallel ranks have the same number of micro-batches."""
        slots = np.bincount(shares_of(step, self.levels).dp_rank, minlength=ranks)
        return bool((slots == slots[0]).all())

    def slots(self, step: ScheduledPacks, parallel: Parallel) -> int:
        """Return the rank's number of micro-batches in a step, with empty ones."""
        slots = np.bincount(shares_of(step, self.levels).dp_rank, minlength=parallel.data)
        # Experts' exchanges are collective: ranks with fewer micro-batches join with empty ones.
        blocks = slots.reshape(-1, parallel.lockstep_ranks)
        return int(blocks[self.dp_rank // parallel.lockstep_ranks].max())

    def share(self, scheduled: ScheduledPacks, lengths: Lengths, row: int) -> PackShare | None:
        """Return the rank's share of a pack, or None if it has the full pack."""
        level = self.levels[int(scheduled.level[row])]
        if level.context == 1:
            return None
        part = self.dp_rank - int(scheduled.dp_rank[row])
        pack = scheduled.packs.take(np.array([row]))
        bounds = {
            name: bounds_of_items(pack, lengths, level, name)[0] for name in lengths.item_names
        }
        return PackShare.cut(lengths.tokens[pack.samples], level, part, bounds)


def feature_route(
    share: PackShare,
    feature: str,
    sample_items: np.ndarray,
    image_positions: Mapping[int, np.ndarray],
    features_per_item: int,
) -> tuple[np.ndarray, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the route of this rank's image features to the ranks with their tokens.

    Returns:
        Own features in sending order (by target rank, then position), int64 [F]; and the features
        sent to, and received from, each rank of the block.

    Args:
        sample_items: items of every sample, int64 [samples].
        image_positions: image token positions by sample, if this rank has its tokens or items.
        features_per_item: image tokens per item.
    """
    item_start = np.concatenate([[0], np.cumsum(sample_items)])  # [samples + 1]
    own_items, own = share.own_items(feature), share.own_pieces
    by_place = share.pieces.take(np.lexsort((share.pieces.first, share.pieces.sample)))
    # Features that this rank makes: the target has the piece with the feature's image token.
    targets = [np.zeros(0, np.int64)]
    for sample in samples_of_items(own_items, sample_items):
        first = max(own_items.start - item_start[sample], 0) * features_per_item
        stop = min(own_items.stop - item_start[sample], sample_items[sample]) * features_per_item
        low, high = np.searchsorted(by_place.sample, [sample, sample + 1])
        place = np.searchsorted(
            by_place.stop[low:high], image_positions[sample][first:stop], "right"
        )
        targets.append(by_place.rank[low + place])
    # Features that this rank needs: the source encodes the item of the feature.
    sources = [np.zeros(0, np.int64)]
    for sample, first, stop in zip(own.sample.tolist(), own.first, own.stop, strict=True):
        if not sample_items[sample]:
            continue
        number = np.arange(*np.searchsorted(image_positions[sample], [first, stop]))
        item = item_start[sample] + number // features_per_item
        sources.append(np.searchsorted(share.item_bounds[feature], item, "right") - 1)
    target, source = np.concatenate(targets), np.concatenate(sources)
    sent, received = (
        tuple(np.bincount(rank, minlength=share.context).tolist()) for rank in (target, source)
    )
    return np.argsort(target, kind="stable"), (sent, received)


def samples_of_items(items: range, sample_items: np.ndarray) -> list[int]:
    """Return the samples with any of these items; `sample_items` counts items, [samples]."""
    ends = np.cumsum(sample_items)
    overlaps = (ends > items.start) & (ends - sample_items < items.stop) & (sample_items > 0)
    return np.flatnonzero(overlaps).tolist() if items else []
