"""Features of context-parallel shares: features of packs, and exchanged tokens."""

from collections.abc import Sequence

import numpy as np

from omnibal.cost.model import attended_pairs, is_attended, loss_tokens, pack_features
from omnibal.data.lengths import Lengths
from omnibal.model.encoders import SQUARED_FEATURES
from omnibal.model.levels import ContextExchange, Level, are_plain
from omnibal.model.units import EXCHANGED
from omnibal.packing.cut import cut_packs
from omnibal.packing.item_shares import bounds_of_items, squares_of_shares
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.packing.shares import Shares, shares_of


def share_features(
    packs: ScheduledPacks,
    lengths: Lengths,
    levels: Sequence[Level],
    features: Sequence[str],
    shares: Shares | None = None,
) -> np.ndarray:
    """Return features of every share, float64 [shares, features], in the order of `shares_of`."""
    if are_plain(levels):
        return pack_features(packs.packs, lengths, features)
    shares = shares_of(packs, levels) if shares is None else shares
    context = np.array([level.context for level in levels])[packs.level]
    first = np.cumsum(context) - context
    values = np.empty((int(context.sum()), len(features)))
    for index, level in enumerate(levels):
        rows = np.flatnonzero(packs.level == index)
        of_packs = part_features(packs.packs.take(rows), lengths, level, features)
        values[first[rows, None] + np.arange(level.context)] = of_packs
    return values[first[shares.pack] + shares.part]


def part_features(
    packs: Packs, lengths: Lengths, level: Level, features: Sequence[str]
) -> np.ndarray:
    """Return features of ranks' parts of a level's packs, float64 [packs, context, features]."""
    if level.context == 1:
        whole = pack_features(packs, lengths, [name for name in features if name != EXCHANGED])
        nothing = np.zeros((len(packs), len(features) - whole.shape[1]))
        return np.hstack([whole, nothing])[:, None]
    pieces = cut_packs(lengths.tokens[packs.samples], packs.offsets, level)
    shape, divided = (len(packs), level.context), pieces.is_divided
    share = pieces.pack * level.context + pieces.rank
    sample = packs.samples[packs.offsets[pieces.pack] + pieces.sample]

    def sums(of_pieces: np.ndarray) -> np.ndarray:
        return np.bincount(share, of_pieces, minlength=len(packs) * level.context).reshape(shape)

    def part_sums(feature: str) -> np.ndarray:
        """Return sums of a feature over every rank's pieces, [packs, context]."""
        if is_attended(feature):
            pairs = attended_pairs(pieces.stop, feature) - attended_pairs(pieces.first, feature)
            # With heads exchanged, ranks compute equal parts of divided samples' attention.
            equal = sums(pairs * divided).mean(axis=1, keepdims=True)
            is_gather = level.exchange is ContextExchange.GATHER
            return sums(pairs) if is_gather else sums(pairs * ~divided) + equal
        if feature in SQUARED_FEATURES:
            return squares_of_shares(packs, lengths, level)
        match feature:
            case "fixed":
                return np.ones(shape)
            case "tokens":
                return sums(pieces.tokens)
            case "loss_tokens":
                # Assumed to be a sample's last tokens.
                first = (lengths.tokens - loss_tokens(lengths))[sample]
                return sums(np.maximum(pieces.stop - np.maximum(pieces.first, first), 0))
            case "exchanged_tokens":
                # Exchanges are padded to the largest share.
                largest = sums(pieces.tokens * divided).max(axis=1, keepdims=True)
                return np.broadcast_to(largest, shape)
            case _:
                return np.diff(bounds_of_items(packs, lengths, level, feature))

    return np.stack([part_sums(name) for name in features], axis=-1).astype(np.float64)
