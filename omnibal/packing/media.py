"""Packs of a single medium: texts, images and recordings apart."""

from collections.abc import Callable

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.packing.fit import size_keys
from omnibal.packing.packs import Packs


def media_of(lengths: Lengths) -> np.ndarray:
    """Medium id per sample, int64 [samples], equal for samples of the same encoders, 0 for text."""
    has_items = [lengths.items[name] > 0 for name in lengths.item_names]
    keys = size_keys(np.array(has_items, np.int64).reshape(len(has_items), len(lengths)))
    return np.unique(keys, return_inverse=True)[1]


def pack_apart(lengths: Lengths, pack: Callable[[Lengths], Packs]) -> Packs:
    medium = media_of(lengths)
    parts = []
    for each in range(int(medium.max()) + 1):
        rows = np.flatnonzero(medium == each)
        parts.append(pack(lengths.take(rows)).of_rows(rows))
    return Packs.join(parts)
