"""Items assigned to ranks, beside all assignments that there are."""

import time

import numpy as np
import pytest

from omnibal.dispatch.balance import balance
from omnibal.dispatch.bounds import load_bound
from tests.planner.assignment_cases import assignments, check_assignment, random_cases

pytestmark = pytest.mark.quick


def test_sums_against_all_assignments() -> None:
    """Prevents: a result further from the best than promised, and a bound that is none."""
    ratios = []
    for weight, ranks in random_cases(0):
        loads = assignments(len(weight), ranks) @ weight
        best = loads.max(axis=1).min()
        found = balance(weight, ranks)
        check_assignment(found, best, np.bincount(found.rank, weight, ranks).max())
        assert found.busiest <= best * (4 / 3 - 1 / (3 * ranks)) * (1 + 1e-9)
        ratios.append(found.busiest / best if best else 1.0)
    # Longest first alone is at 1.013.
    assert np.mean(ratios) < 1.0005


def test_bounds_of_known_cases() -> None:
    """Prevents: a bound that is true and says nothing."""
    assert load_bound(np.array([5, 5, 5]), 2) == 10
    assert load_bound(np.array([4.0, 3, 3, 3]), 3) == 6
    assert load_bound(np.array([7, 1, 1]), 3) == 7
    assert load_bound(np.array([2, 2, 1]), 2) == 3  # whole weights: 2.5 cannot be
    assert load_bound(np.array([]), 2) == 0


@pytest.mark.parametrize(("items", "ranks"), [(200, 8), (640, 64), (3_000, 500)])
def test_a_few_hundred_ranks_are_near_the_bound(items: int, ranks: int) -> None:
    """Prevents: exchanges or differencing that find nothing where brute force cannot go."""
    weight = np.random.default_rng(items).uniform(0.1, 1, items)
    found = balance(weight, ranks)
    assert found.busiest == pytest.approx(np.bincount(found.rank, weight, ranks).max())
    assert found.above_bound < (0.002 if items / ranks >= 10 else 0.04)


def test_the_largest_job_is_balanced_in_a_second() -> None:
    """Prevents: a step that takes less time than its assignment; 100,000 items, 2,560 ranks."""
    weight = np.random.default_rng(0).lognormal(0, 0.8, 100_000)
    start = time.process_time()
    found = balance(weight, 2_560)
    assert time.process_time() - start < 1
    assert found.above_bound < 0.002
