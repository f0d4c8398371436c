"""Items and ranks, and all assignments of one to the other."""

from collections.abc import Iterator
from functools import cache
from itertools import product

import numpy as np
import pytest

from omnibal.dispatch.balance import Assignment

CASES = 1_000


@cache
def assignments(items: int, ranks: int) -> np.ndarray:
    """Whether a rank has an item, in every assignment. bool [assignments, ranks, items]"""
    every = np.array(list(product(range(ranks), repeat=items)), np.int64).reshape(
        ranks**items, items
    )
    return every[:, None, :] == np.arange(ranks)[:, None]


def random_cases(seed: int) -> Iterator[tuple[np.ndarray, int]]:
    """Weights of up to seven items, whole or not, with equals and giants, and one to three ranks"""
    rng = np.random.default_rng(seed)
    for number in range(CASES):
        items, ranks = int(rng.integers(0, 8)), int(rng.integers(1, 4))
        weight = (
            rng.integers(1, 10, items).astype(float),
            rng.lognormal(0, 1, items),
            rng.random(items),
            rng.integers(1, 4, items) ** 3.0,
        )[number % 4]
        yield weight, ranks


def check_assignment(found: Assignment, best: float, busiest: float) -> None:
    """The load is as said and not below the best, and the best not below the bound."""
    assert found.busiest == pytest.approx(busiest)
    assert found.bound <= best * (1 + 1e-9)
    assert best <= found.busiest * (1 + 1e-9)
