"""Packing of samples under two caps, image tiles and language tokens."""

from collections.abc import Callable
from enum import StrEnum

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.model.limits import Caps
from omnibal.packing.fit import Seed, size_keys
from omnibal.packing.isf import pack_isf
from omnibal.packing.packs import Packs


class PackingMethod(StrEnum):
    BALANCED = "balanced"
    ISF = "isf"


def pack_samples(
    lengths: Lengths,
    caps: Caps,
    method: PackingMethod,
    seed: Seed,
    *,
    most_types: int | None = None,
) -> Packs:
    """Pack every sample by `method`. Fewer `most_types` make `balanced` faster, with more packs."""
    # Imported here: scipy is slow to import for commands that only name a method.
    from omnibal.packing.balanced import pack_balanced

    match method:
        case PackingMethod.BALANCED:
            return pack_balanced(lengths, caps, seed, most_types=most_types)
        case PackingMethod.ISF:
            return pack_isf(lengths, caps, seed)


def media_of(lengths: Lengths) -> np.ndarray:
    """Medium id per sample, int64 [samples], equal for samples of the same encoders, 0 for text."""
    has_items = [lengths.items[name] > 0 for name in lengths.item_names]
    keys = size_keys(np.array(has_items, np.int64).reshape(len(has_items), len(lengths)))
    return np.unique(keys, return_inverse=True)[1]


def pack_apart(lengths: Lengths, pack: Callable[[Lengths], Packs]) -> Packs:
    medium = media_of(lengths)
    parts = []
    for number in range(int(medium.max()) + 1):
        rows = np.flatnonzero(medium == number)
        parts.append(pack(lengths.take(rows)).of_rows(rows))
    return Packs.join(parts)
