"""Lengths of samples for the tests of packing."""

from collections.abc import Sequence

import numpy as np

from omnibal.data.lengths import Lengths


def lengths_of(
    *, source_names: tuple[str, ...] = ("docs",), **columns: Sequence[int] | np.ndarray
) -> Lengths:
    """Lengths with these columns; loss tokens and source default to 0."""
    squares = {name: np.array(columns.pop(name)) for name in [*columns] if "squared" in name}
    counts = {name: np.asarray(column, np.int32) for name, column in columns.items()}
    tokens = counts.pop("tokens")
    return Lengths(
        loss_tokens=counts.pop("loss_tokens", 0 * tokens),
        source=counts.pop("source", 0 * tokens),
        items=counts,
        squares=squares,
        tokens=tokens,
        source_names=source_names,
        origin=None,
    )


def make_lengths(sizes: list[tuple[int, int]]) -> Lengths:
    """Lengths of (tiles, tokens) pairs."""
    tiles, tokens = np.array(sizes, np.int32).reshape(-1, 2).T
    return lengths_of(tiles=tiles, tokens=tokens, loss_tokens=tokens // 2)


def texts(tokens: Sequence[int] | np.ndarray) -> Lengths:
    """Text-only samples with these token counts."""
    return lengths_of(tokens=tokens, loss_tokens=np.asarray(tokens) // 2)


def long_tailed(count: int, longest: int, seed: int = 0) -> Lengths:
    """Texts around 400 tokens, with 2 % above `longest / 3` and one of exactly `longest`."""
    rng = np.random.default_rng(seed)
    short = np.clip(rng.lognormal(np.log(400), 1, count), 30, 4_000)
    long = rng.integers(longest // 3, longest, count // 50)
    return texts(rng.permutation(np.concatenate([short, long, [longest]])))
