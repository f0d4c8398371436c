"""Packs of one medium each: texts apart from images, and images apart from recordings."""

from collections.abc import Callable

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.packing.fit import size_keys
from omnibal.packing.packs import Packs


def media_of(lengths: Lengths) -> np.ndarray:
    """Number of every sample's medium, int64 [samples]: equal where samples have items of the same
    encoders, and 0 for text alone where any sample is."""
    has_items = [lengths.items[name] > 0 for name in lengths.item_names]
    keys = size_keys(np.array(has_items, np.int64).reshape(len(has_items), len(lengths)))
    return np.unique(keys, return_inverse=True)[1]


def pack_apart(lengths: Lengths, pack: Callable[[Lengths], Packs]) -> Packs:
    """Pack the samples of every medium for themselves."""
    medium = media_of(lengths)
    parts = []
    for each in range(int(medium.max()) + 1):
        rows = np.flatnonzero(medium == each)
        parts.append(pack(lengths.take(rows)).of_rows(rows))
    return Packs.join(parts)
