"""Pack samples under caps by either method, all together or by medium."""

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
    max_types: int | None = None,
) -> Packs:
    """Pack every sample by `method`. Raise UserError if a sample exceeds a cap.

    Args:
        max_types: size types of `balanced`. Fewer are faster and need more packs.
    """
    # Imported here: scipy is slow to import for commands that only name a method.
    from omnibal.packing.balanced import pack_balanced

    match method:
        case PackingMethod.BALANCED:
            return pack_balanced(lengths, caps, seed, max_types=max_types)
        case PackingMethod.ISF:
            return pack_isf(lengths, caps, seed)


def number_media(lengths: Lengths) -> np.ndarray:
    """Return a medium id per sample, int64 [samples], from 0: equal for the same encoders used."""
    has_items = [lengths.items[name] > 0 for name in lengths.item_names]  # [encoders, samples]
    keys = size_keys(np.array(has_items, np.int64).reshape(len(has_items), len(lengths)))
    return np.unique(keys, return_inverse=True)[1]


def pack_media_apart(lengths: Lengths, pack: Callable[[Lengths], Packs]) -> Packs:
    """Pack samples of every medium separately, for trainers that cannot mix media in a pack."""
    medium = number_media(lengths)
    media = [np.flatnonzero(medium == number) for number in range(int(medium.max()) + 1)]
    return Packs.join([pack(lengths.take(rows)).of_rows(rows) for rows in media])
