"""Assignment of items to ranks, against all assignments."""

from functools import cache
from itertools import product

import numpy as np
import pytest

from omnibal.packing.balance import assign_by_differencing, balance, load_bound

pytestmark = pytest.mark.quick


@cache
def assignments(items: int, ranks: int) -> np.ndarray:
    """Return whether a rank has an item, for all assignments. bool [assignments, ranks, items]"""
    every = np.array(list(product(range(ranks), repeat=items)), np.int64)
    return every[:, None, :] == np.arange(ranks)[:, None]


def joined_sets(weight: np.ndarray, ranks: int) -> list[float]:
    """Return sums of sets by largest differencing, ascending: join the two lists of widest spread,
    heaviest sets with lightest sets."""

    def spread(sets: list[list[float]]) -> float:
        sums = [sum(each) for each in sets]
        return max(sums) - min(sums)

    partial = [[[float(each)], *([] for _ in range(ranks - 1))] for each in weight]
    while len(partial) > 1:
        partial.sort(key=spread)
        first, second = partial.pop(), partial.pop()
        first.sort(key=sum, reverse=True)
        second.sort(key=sum)
        partial.append([heavy + light for heavy, light in zip(first, second, strict=True)])
    return sorted(map(sum, partial[0]))


def test_differencing_against_sets_written_out() -> None:
    """Prevents joins in another order than by spread, which load the busiest rank more."""
    rng = np.random.default_rng(5)
    for _ in range(200):
        weight, ranks = rng.lognormal(0, 1, int(rng.integers(1, 12))), int(rng.integers(2, 5))
        rank = assign_by_differencing(weight, ranks, equal_counts=False)
        found = np.bincount(rank, weight, ranks)
        np.testing.assert_allclose(np.sort(found), joined_sets(weight, ranks), rtol=1e-9)


def test_sums_against_all_assignments() -> None:
    """Prevents a load above the guaranteed ratio to the optimum, and an invalid lower bound."""
    rng, ratios = np.random.default_rng(0), []
    for number in range(1_000):
        items, ranks = int(rng.integers(0, 8)), int(rng.integers(1, 4))
        # Integer and real weights, with equal and very large values.
        weight = (
            rng.integers(1, 10, items).astype(float),
            rng.lognormal(0, 1, items),
            rng.random(items),
            rng.integers(1, 4, items) ** 3.0,
        )[number % 4]
        loads = assignments(len(weight), ranks) @ weight
        best = loads.max(axis=1).min()
        busiest = np.bincount(balance(weight, ranks), weight, ranks).max()
        assert load_bound(weight, ranks) <= best * (1 + 1e-9)
        assert best * (1 - 1e-9) <= busiest <= best * (4 / 3 - 1 / (3 * ranks)) * (1 + 1e-9)
        ratios.append(busiest / best if best else 1.0)
    # Longest-first alone is at 1.013.
    assert np.mean(ratios) < 1.0005


@pytest.mark.parametrize(
    ("items", "ranks", "above"),
    [(200, 8, 0.002), (640, 64, 0.002), (3_000, 500, 0.04), (100_000, 2_560, 0.002)],
)
def test_large_jobs_are_near_the_bound(items: int, ranks: int, above: float) -> None:
    """Prevents ineffective exchanges beyond brute force, and differencing that ends early."""
    rng = np.random.default_rng(items)
    weight = rng.lognormal(0, 0.8, items) if items == 100_000 else rng.uniform(0.1, 1, items)
    busiest = np.bincount(balance(weight, ranks), weight, ranks).max()
    assert busiest <= load_bound(weight, ranks) * (1 + above)
