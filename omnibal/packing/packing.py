"""Packing of samples under two caps, image tiles and language tokens."""

from enum import StrEnum

from omnibal.data.lengths import Lengths
from omnibal.model.limits import Caps
from omnibal.packing.fit import Seed
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
