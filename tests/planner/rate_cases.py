"""A device that computes matrix products tile by tile, as reference for interpolated times."""

import math
from itertools import product

from omnibal.model.rate_tables import CollectiveKind, CollectiveTime, CopyTime, ProductTime, Rates

PROCESSORS, TILE, LAUNCH_MS = 132, 128, 4e-3
FLOPS_PER_MS_OF_PROCESSOR = 5e9
"""132 processors of 5 TFLOP/s each: about an H100's achieved bf16 matrix rate."""


def tiled_ms(rows: float, inner: float, outer: float) -> float:
    """Return ms of a product with 128 x 128 output tiles, one wave per `PROCESSORS` tiles. Short
    sums, which do not fill a tile's pipeline, are slower."""
    tiles = math.ceil(rows / TILE) * math.ceil(outer / TILE)
    waves = math.ceil(tiles / PROCESSORS)
    tile_ms = 2 * TILE * TILE * (inner + 256) / FLOPS_PER_MS_OF_PROCESSOR
    return LAUNCH_MS + waves * tile_ms


def ring_ms(kind: CollectiveKind, ranks: int, size: int) -> float:
    """Return ms of a ring collective: 20 us per pass, and more bytes per ms in smaller groups."""
    passes = 2 if kind == "all_reduce" else 1
    sent = size if kind == "send" else size * (ranks - 1) / ranks
    return passes * (0.02 + sent / (3e8 / ranks))


def tiled_rates(rows=(256, 1024, 4096, 16384), widths=(384, 1536, 6144, 24576)) -> Rates:
    """Return that device's measured rates."""
    kinds: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
    sends = [("send", 2, size) for size in (2**12, 2**24)]
    rings = [*product(kinds, (2, 4, 8), (2**18, 2**26)), *sends]
    return Rates(
        device="tiled device",
        products=tuple(
            ProductTime(rows=m, inner=k, outer=n, ms=tiled_ms(m, k, n))
            for m, k, n in product(rows, widths, widths)
        ),
        collectives=tuple(
            CollectiveTime(kind=kind, ranks=ranks, bytes=size, ms=ring_ms(kind, ranks, size))
            for kind, ranks, size in rings
        ),
        copies=(CopyTime(bytes=2**28, ms=0.1),),
    )
