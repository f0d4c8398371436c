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


def texts(tokens: np.ndarray) -> Lengths:
    """Texts of so many tokens, without images."""
    count = np.asarray(tokens, np.int32)
    return Lengths(
        items={},
        tokens=count,
        loss_tokens=count // 2,
        source=np.zeros(len(count), np.int32),
        source_names=("texts",),
        origin=None,
    )


def long_tailed(count: int, longest: int, seed: int = 0) -> Lengths:
    """Texts of some hundred tokens, one in fifty far longer, and one of the longest."""
    rng = np.random.default_rng(seed)
    short = np.clip(rng.lognormal(np.log(400), 1, count), 30, 4_000)
    long = rng.integers(longest // 3, longest, count // 50)
    return texts(rng.permutation(np.concatenate([short, long, [longest]])))
