"""Packing: samples into packs under two caps at once, image tiles and language tokens."""

from enum import StrEnum

from omnibal.data.lengths import Lengths
from omnibal.model.limits import Caps
from omnibal.packing.fit import Seed
from omnibal.packing.isf import pack_isf
from omnibal.packing.packs import Packs


class PackingMethod(StrEnum):
    """Rules by which samples are put into packs."""

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
    """Put every sample into one pack by `method`, with that method's default settings.

    Args:
        most_types: sizes that `balanced` tells apart, if not as many as it does by itself; with
            fewer it is faster, and packs are slightly more.
    """
    # Here, as it imports scipy, for which a command that only names a method should not wait.
    from omnibal.packing.balanced import pack_balanced

    match method:
        case PackingMethod.BALANCED:
            return pack_balanced(lengths, caps, seed, most_types=most_types)
        case PackingMethod.ISF:
            return pack_isf(lengths, caps, seed)
