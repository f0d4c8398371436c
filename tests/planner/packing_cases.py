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
