"""Packs held against the caps and against the fewest there can be."""

from pathlib import Path

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.model.limits import Caps

REAL_LENGTHS = Path(__file__).parents[3] / "shared" / "data" / "lengths"


def assert_valid(packs, lengths: Lengths, caps: Caps) -> None:
    assert sorted(packs.samples.tolist()) == list(range(len(lengths)))
    assert (np.diff(packs.offsets) > 0).all()
    assert packs.sums(lengths.column("tiles")).max() <= caps["tiles"]
    assert packs.sums(lengths.tokens).max() <= caps["tokens"]


def fewest_packs(sizes: list[tuple[int, int]], caps: Caps) -> int:
    """The optimum, by dynamic programming over all subsets of the samples."""
    count = len(sizes)
    fits = []
    for subset in range(1 << count):
        held = [size for i, size in enumerate(sizes) if subset >> i & 1]
        tiles, tokens = sum(v for v, _ in held), sum(t for _, t in held)
        fits.append(tiles <= caps["tiles"] and tokens <= caps["tokens"])
    fewest = [0] + [count] * ((1 << count) - 1)
    for subset in range(1, 1 << count):
        part = subset
        while part:
            if fits[part]:
                fewest[subset] = min(fewest[subset], fewest[subset ^ part] + 1)
            part = (part - 1) & subset
    return fewest[-1]
