"""Features of context-parallel shares: pack features, plus exchanged tokens."""

from collections.abc import Sequence

import numpy as np

from omnibal.cost.model import attended, is_attended, loss_tokens, pack_features
from omnibal.data.lengths import Lengths
from omnibal.model.encoders import SQUARED_FEATURES
from omnibal.model.levels import ContextExchange, Level, are_plain
from omnibal.model.units import EXCHANGED
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.steps.cut import Pieces, cut_packs
from omnibal.steps.item_shares import bounds_of_items, squares_of_shares
from omnibal.steps.shares import Shares, shares_of


def share_features(
    packs: ScheduledPacks,
    lengths: Lengths,
    levels: Sequence[Level],
    features: Sequence[str],
    shares: Shares | None = None,
) -> np.ndarray:
    """Features of every share, float64 [shares, features], in the order of `shares_of`."""
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
    """Features of every rank's part of packs of one level, float64 [packs, context, features].

    Loss is assumed on the last tokens of a sample. If heads are exchanged, all ranks compute equal
    parts of the attention of divided samples.
    """
    if level.context == 1:
        whole = pack_features(packs, lengths, [name for name in features if name != EXCHANGED])
        nothing = np.zeros((len(packs), len(features) - whole.shape[1]))
        return np.hstack([whole, nothing])[:, None]
    pieces = cut_packs(lengths.tokens[packs.samples], packs.offsets, level)
    parts = _Parts(packs, pieces, level)
    return np.stack([parts.of(lengths, name) for name in features], axis=-1).astype(np.float64)


class _Parts:
    """Sums over every rank's pieces of packs of one level, [packs, context]."""

    def __init__(self, packs: Packs, pieces: Pieces, level: Level) -> None:
        self._packs = packs
        self._pieces = pieces
        self._level = level
        self._shape = len(packs), level.context
        self._divided = pieces.divided
        self._share = pieces.pack * level.context + pieces.rank
        self._sample = packs.samples[packs.offsets[pieces.pack] + pieces.sample]

    def of(self, lengths: Lengths, feature: str) -> np.ndarray:
        """Sum of one feature."""
        pieces = self._pieces
        if is_attended(feature):
            return self._attended(feature)
        if feature in SQUARED_FEATURES:
            return squares_of_shares(self._packs, lengths, self._level)
        match feature:
            case "fixed":
                return np.ones(self._shape)
            case "tokens":
                return self._sum(pieces.tokens)
            case "loss_tokens":
                first = (lengths.tokens - loss_tokens(lengths))[self._sample]
                return self._sum(np.maximum(pieces.stop - np.maximum(pieces.first, first), 0))
            case "exchanged_tokens":
                most = self._sum(pieces.tokens * self._divided).max(axis=1, keepdims=True)
                return np.broadcast_to(most, self._shape)
            case _:
                return np.diff(bounds_of_items(self._packs, lengths, self._level, feature))

    def _attended(self, feature: str) -> np.ndarray:
        pieces = self._pieces
        each = attended(pieces.stop, feature) - attended(pieces.first, feature)
        if self._level.exchange is ContextExchange.GATHER:
            return self._sum(each)
        together = self._sum(each * self._divided).mean(axis=1, keepdims=True)
        return self._sum(each * ~self._divided) + together

    def _sum(self, of_pieces: np.ndarray) -> np.ndarray:
        size = self._shape[0] * self._shape[1]
        return np.bincount(self._share, of_pieces, minlength=size).reshape(self._shape)
