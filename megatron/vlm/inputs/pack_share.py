"""A rank's share of a pack: the tokens and items it computes, and where its image features go.

Shapes: F image features that this rank makes, one an image token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.model.levels import ContextExchange, Level
from omnibal.model.parallel import Parallel
from omnibal.packing.packs import ScheduledPacks
from omnibal.steps.cut import Pieces, cut_pack
from omnibal.steps.empty_slots import empty_slots
from omnibal.steps.item_shares import bounds_of_items
from omnibal.steps.shares import shares_of


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Share:
    """One rank's share of a pack that several ranks share."""

    part: int
    """Rank within the block that shares the pack, from 0."""
    context: int
    """Ranks that share the pack."""
    exchange: ContextExchange
    pieces: Pieces
    """Pieces of all ranks of the block."""
    item_bounds: Mapping[str, np.ndarray]
    """Bounds of the pack's items that each rank encodes, int64 [context + 1], by their name."""

    @classmethod
    def of(
        cls,
        sample_tokens: np.ndarray,
        level: Level,
        part: int,
        item_bounds: Mapping[str, np.ndarray] | None = None,
    ) -> "Share":
        """Cut a pack of samples of these token counts."""
        return cls(
            part=part,
            context=level.context,
            exchange=level.exchange,
            pieces=cut_pack(sample_tokens, level),
            item_bounds=item_bounds or {},
        )

    @property
    def own_pieces(self) -> Pieces:
        """This rank's pieces, in the order in which its tokens are computed."""
        return self.pieces.take(self.pieces.rank == self.part)

    @property
    def tokens(self) -> int:
        """Tokens of this rank; may be 0."""
        return int(self.own_pieces.tokens.sum())

    def own_items(self, feature: str) -> range:
        """Items of the pack that this rank encodes; may be none."""
        bounds = self.item_bounds.get(feature)
        return range(0) if bounds is None else range(*bounds[self.part : self.part + 2].tolist())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShareLayout:
    """Where a share's tokens are, and which of them other ranks attend to. Arrays have one entry an
    own piece."""

    part: int
    ranks: int
    own: Pieces
    own_start: np.ndarray
    """First token of every own piece among this rank's, int64."""
    own_divided: np.ndarray
    """Whether other ranks have tokens of the same sample, bool."""
    divided: Pieces
    """Divided pieces of all ranks, in rank order."""
    padding: int

    @classmethod
    def of(cls, share: Share, padding: int) -> "ShareLayout":
        """Lay out a share with so many tokens of padding after it."""
        divided = share.pieces.divided
        is_own = share.pieces.rank == share.part
        own = share.pieces.take(is_own)
        return cls(
            part=share.part,
            ranks=share.context,
            own=own,
            own_start=np.cumsum(own.tokens) - own.tokens,
            own_divided=divided[is_own],
            divided=share.pieces.take(divided),
            padding=padding,
        )

    @property
    def tokens(self) -> int:
        """Tokens of this rank, with padding."""
        return int(self.own.tokens.sum()) + self.padding

    @property
    def divided_tokens(self) -> np.ndarray:
        """Tokens of every rank's divided pieces, int64 [context]."""
        sums = np.zeros(self.ranks, np.int64)
        np.add.at(sums, self.divided.rank, self.divided.tokens)
        return sums


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """Levels of a plan's packs, and the data-parallel rank whose shares are wanted."""

    dp_rank: int
    levels: Sequence[Level]

    def rows(self, scheduled: ScheduledPacks, first_step: int, last_step: int) -> np.ndarray:
        """Rows of the packs that the rank trains from `first_step` to before `last_step`, in the
        order of its slots."""
        shares = shares_of(scheduled, self.levels)
        inside = (first_step <= shares.step) & (shares.step < last_step)
        return shares.pack[inside & (shares.dp_rank == self.dp_rank)]

    def rows_are_full(self, step: ScheduledPacks, ranks: int) -> bool:
        """Whether a step has equally many micro-batches on all data-parallel ranks."""
        slots = np.bincount(shares_of(step, self.levels).dp_rank, minlength=ranks)
        return bool((slots == slots[0]).all())

    def slots(self, step: ScheduledPacks, parallel: Parallel) -> int:
        """Micro-batches that the rank runs in a step, with empty ones to join those with which it
        shares out experts."""
        shares = shares_of(step, self.levels)
        own = int((shares.dp_rank == self.dp_rank).sum())
        if parallel.lockstep_ranks == 1:
            return own
        empty = empty_slots(shares.step, shares.dp_rank, parallel.data, parallel.lockstep_ranks)
        return own + int((empty.dp_rank == self.dp_rank).sum())

    def share(self, scheduled: ScheduledPacks, lengths: Lengths, row: int) -> Share | None:
        """The rank's share of a pack; None where it has all of it."""
        level = self.levels[int(scheduled.level[row])]
        if level.context == 1:
            return None
        part = self.dp_rank - int(scheduled.dp_rank[row])
        pack = scheduled.packs.take(np.array([row]))
        bounds = {
            name: bounds_of_items(pack, lengths, level, name)[0] for name in lengths.item_names
        }
        return Share.of(lengths.tokens[pack.samples], level, part, bounds)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FeatureRoute:
    """Where a rank's image features go, and whence those of its image tokens come."""

    order_F: np.ndarray
    """Own features in the order in which they are sent, by rank and then by place; int64."""
    sent: tuple[int, ...]
    """Features sent to each rank of the block."""
    received: tuple[int, ...]
    """Features received from each rank of the block; together they are in the order of this rank's
    image tokens."""


def feature_route(
    share: Share,
    feature: str,
    sample_items: np.ndarray,
    image_positions: Mapping[int, np.ndarray],
    features_per_item: int,
) -> FeatureRoute:
    """Route of the features of a pack's images to the ranks that have their image tokens.

    Args:
        sample_items: of every sample of the pack. int64 [samples]
        image_positions: places of image tokens within a sample, for each sample with images of
            which the rank has tokens or items.
        features_per_item: also the image tokens of an item.
    """
    item_start = np.concatenate([[0], np.cumsum(sample_items)])
    own_items, own = share.own_items(feature), share.own_pieces
    by_place = share.pieces.take(np.lexsort((share.pieces.first, share.pieces.sample)))
    targets = [np.zeros(0, np.int64)]
    for sample in samples_of_items(own_items, sample_items):
        first = max(own_items.start - item_start[sample], 0) * features_per_item
        stop = min(own_items.stop - item_start[sample], sample_items[sample]) * features_per_item
        low, high = np.searchsorted(by_place.sample, [sample, sample + 1])
        place = np.searchsorted(
            by_place.stop[low:high], image_positions[sample][first:stop], "right"
        )
        targets.append(by_place.rank[low + place])
    sources = [np.zeros(0, np.int64)]
    for sample, first, stop in zip(own.sample.tolist(), own.first, own.stop, strict=True):
        if not sample_items[sample]:
            continue
        wanted = np.arange(*np.searchsorted(image_positions[sample], [first, stop]))
        item = item_start[sample] + wanted // features_per_item
        sources.append(np.searchsorted(share.item_bounds[feature], item, "right") - 1)
    target, source = np.concatenate(targets), np.concatenate(sources)
    return FeatureRoute(
        order_F=np.argsort(target, kind="stable"),
        sent=tuple(np.bincount(target, minlength=share.context).tolist()),
        received=tuple(np.bincount(source, minlength=share.context).tolist()),
    )


def samples_of_items(items: range, sample_items: np.ndarray) -> list[int]:
    """Samples of a pack, by their positions in it, that have any of these items."""
    ends = np.cumsum(sample_items)
    has_some = (ends > items.start) & (ends - sample_items < items.stop) & (sample_items > 0)
    return np.flatnonzero(has_some).tolist() if items else []
