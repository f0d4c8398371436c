"""Features of packs (`omnibal.model.units.feature_names`), and of their context-parallel shares."""

from collections.abc import Sequence

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.model.encoders import SQUARED_FEATURES
from omnibal.model.levels import ContextExchange, Level, are_plain
from omnibal.model.units import EXCHANGED, is_time, window_of_feature
from omnibal.packing.cut import cut_packs
from omnibal.packing.item_shares import bounds_of_items, squares_of_shares
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.packing.shares import Shares, shares_of


def pack_features(packs: Packs, lengths: Lengths, features: Sequence[str]) -> np.ndarray:
    """Return features of every pack, float64 [packs, features], in the order of `features`."""
    columns = [packs.sums(_sample_values(lengths, name)) for name in features if name != "fixed"]
    return np.stack([np.ones(len(packs)), *columns], axis=1).astype(np.float64)


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


def trained_features(
    features: np.ndarray, names: Sequence[str], *, padded: bool, whole_loss: bool
) -> np.ndarray:
    """Return features [packs, features] of the tokens that a trainer computes.

    Args:
        features: of the packs' samples.
        padded: whether every pack is padded to the longest, by a sample of padding.
        whole_loss: whether the head also runs on tokens without loss.
    """
    if not (padded or whole_loss):
        return features
    features, tokens = features.copy(), list(names).index("tokens")
    if padded:
        padding = features[:, tokens].max(initial=0) - features[:, tokens]
        features[:, tokens] += padding
        for column, name in enumerate(names):
            if is_attended(name):
                features[:, column] += attended_pairs(padding, name)
    if whole_loss:
        features[:, list(names).index("loss_tokens")] = features[:, tokens]
    return features


def _sample_values(lengths: Lengths, feature: str) -> np.ndarray:
    """Return the contribution of every sample to a feature of its pack, [samples]."""
    if is_attended(feature):
        return attended_pairs(lengths.tokens.astype(np.int64), feature)
    if is_time(feature):  # a feature of a step or a pack, not of its samples
        return np.zeros(len(lengths), np.int64)
    return loss_tokens(lengths) if feature == "loss_tokens" else lengths.column(feature)


def is_attended(feature: str) -> bool:
    """Whether a feature measures attention of a layer kind."""
    return feature == "squared_tokens" or window_of_feature(feature) is not None


def attended_pairs(tokens: np.ndarray, feature: str) -> np.ndarray:
    """Return twice the attended pairs of the first `tokens` of a sample, [...]."""
    window = window_of_feature(feature)
    return tokens**2 - (np.maximum(tokens - window, 0) ** 2 if window is not None else 0)


def loss_tokens(lengths: Lengths) -> np.ndarray:
    """Return every sample's tokens with loss, or all tokens if its source counts no loss."""
    counted = np.bincount(
        lengths.source, weights=lengths.loss_tokens, minlength=len(lengths.source_names)
    )
    return np.where(counted[lengths.source] > 0, lengths.loss_tokens, lengths.tokens)
