"""Lengths for the tests of packing."""

import numpy as np

from omnibal.data.lengths import Lengths


def make_lengths(sizes: list[tuple[int, int]]) -> Lengths:
    tiles, tokens = np.array(sizes, np.int32).reshape(-1, 2).T
    return Lengths(
        items={"tiles": tiles},
        tokens=tokens,
        loss_tokens=tokens // 2,
        source=np.zeros(len(sizes), np.int32),
        source_names=("docs",),
        origin=None,
    )
