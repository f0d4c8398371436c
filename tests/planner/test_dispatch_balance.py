"""Items assigned to ranks, beside all assignments that there are."""

import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product

import numpy as np
import pytest

from omnibal.dispatch.balance import (
    Assignment,
    balance,
    balance_equal_counts,
    balance_padded,
    balance_sums,
    balance_under_cap,
)
from omnibal.dispatch.bounds import equal_count_bound, load_bound
from omnibal.dispatch.differencing import differenced
from omnibal.errors import UserError

pytestmark = pytest.mark.quick
CASES = 1_000


@cache
def assignments(items: int, ranks: int) -> np.ndarray:
    """Whether a rank has an item, in every assignment. bool [assignments, ranks, items]"""
    every = np.array(list(product(range(ranks), repeat=items)), np.int64).reshape(
        ranks**items, items
    )
    return every[:, None, :] == np.arange(ranks)[:, None]


def random_cases(seed: int) -> Iterator[tuple[np.ndarray, int, np.random.Generator]]:
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
        yield weight, ranks, rng


def check_assignment(found: Assignment, best: float, busiest: float) -> None:
    """The load is as said and not below the best, and the best not below the bound."""
    assert found.busiest == pytest.approx(busiest)
    assert found.bound <= best * (1 + 1e-9)
    assert best <= found.busiest * (1 + 1e-9)


def joined_sets(weight: np.ndarray, ranks: int) -> list[float]:
    """Sums of sets by largest differencing, with the sets written out; ascending.

    Every partial assignment is a list of sets; the two with the widest spread of sums are joined,
    the heaviest set of one with the lightest of the other.
    """

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
    """Prevents: joins in another order than by spread, which end with busier ranks unnoticed."""
    rng = np.random.default_rng(5)
    for _ in range(200):
        weight, ranks = rng.lognormal(0, 1, int(rng.integers(1, 12))), int(rng.integers(2, 5))
        rank = differenced(weight, ranks, equal_counts=False)
        found = np.bincount(rank, weight, ranks)
        np.testing.assert_allclose(np.sort(found), joined_sets(weight, ranks), rtol=1e-9)


def test_sums_against_all_assignments() -> None:
    """Prevents: a result further from the best than promised, and a bound that is none."""
    ratios = []
    for weight, ranks, _ in random_cases(0):
        loads = assignments(len(weight), ranks) @ weight
        best = loads.max(axis=1).min()
        found = balance(weight, ranks)
        check_assignment(found, best, np.bincount(found.rank, weight, ranks).max())
        assert found.busiest <= best * (4 / 3 - 1 / (3 * ranks)) * (1 + 1e-9)
        ratios.append(found.busiest / best if best else 1.0)
    # Longest first alone is at 1.013.
    assert np.mean(ratios) < 1.0005


def test_sums_under_a_cap_against_all_assignments() -> None:
    """Prevents: a cap that is broken, and a refusal although there is a way."""
    outcomes = {True: 0, False: 0}
    ratios = []
    for weight, ranks, rng in random_cases(1):
        second = rng.integers(1, 20, len(weight))
        cap = int(second.sum() / ranks * rng.uniform(0.9, 1.5))
        every = assignments(len(weight), ranks)
        keeps = ((every @ second) <= cap).all(axis=1)
        outcomes[bool(keeps.any())] += 1
        if not keeps.any():
            with pytest.raises(UserError, match=r"tokens.*raise the cap"):
                balance_under_cap(weight, ranks, second, cap, "tokens")
            continue
        best = (every[keeps] @ weight).max(axis=1).min()
        found = balance_under_cap(weight, ranks, second, cap, "tokens")
        assert np.bincount(found.rank, second, ranks).max() <= cap
        check_assignment(found, best, np.bincount(found.rank, weight, ranks).max())
        ratios.append(found.busiest / best if best else 1.0)
    assert min(outcomes.values()) > 100
    assert np.mean(ratios) < 1.015


def rounded_cases(seed: int) -> Iterator[tuple[np.ndarray, int]]:
    """Weights of two decimals, whose multiples meet but for rounding, or nothing at all."""
    rng = np.random.default_rng(seed)
    yield np.array([0.12, 0.04, 0.2, 0.49, 0.6]), 3
    yield np.zeros(4), 3
    for number in range(CASES):
        items, ranks = int(rng.integers(1, 8)), int(rng.integers(1, 4))
        weight = np.round(rng.random(items), 2)
        yield weight * (rng.random(items) < (0.6 if number % 2 else 1.0)), ranks


def test_padded_batches_against_all_assignments() -> None:
    """Prevents: a padded batch that is longer than it need be, as this way is exact; a search that
    never ends."""
    cases = [(weight, ranks) for weight, ranks, _ in random_cases(2)]
    for weight, ranks in (*cases, *rounded_cases(5)):
        every = assignments(len(weight), ranks)
        loads = every.sum(axis=2) * (every * weight).max(axis=2, initial=0.0)
        best = loads.max(axis=1).min()
        found = balance_padded(weight, ranks)
        members = [weight[found.rank == rank] for rank in range(ranks)]
        busiest = max((len(some) * some.max() for some in members if len(some)), default=0.0)
        check_assignment(found, best, busiest)
        assert found.busiest == pytest.approx(best)


def test_functions_of_sums_against_all_assignments() -> None:
    """Prevents: a bound in one unit and a load in another."""

    def attention(tokens: np.ndarray) -> np.ndarray:
        return 3 * tokens + 0.5 * tokens**2

    for length, ranks, _ in random_cases(3):
        best = attention(assignments(len(length), ranks) @ length).max(axis=1).min()
        found = balance_sums(length, ranks, attention)
        check_assignment(found, best, attention(np.bincount(found.rank, length, ranks)).max())


def test_equal_counts_against_all_assignments() -> None:
    """Prevents: a rank with two items more than another, and a bound that is none."""
    ratios = []
    for weight, ranks, _ in random_cases(4):
        every = assignments(len(weight), ranks)
        counts = every.sum(axis=2)
        even = counts.max(axis=1) - counts.min(axis=1) <= 1
        best = (every[even] @ weight).max(axis=1).min()
        found = balance_equal_counts(weight, ranks)
        assert np.ptp(np.bincount(found.rank, minlength=ranks)) <= 1
        check_assignment(found, best, np.bincount(found.rank, weight, ranks).max())
        ratios.append(found.busiest / best if best else 1.0)
    assert np.mean(ratios) < 1.002


def test_bounds_of_known_cases() -> None:
    """Prevents: a bound that is true and says nothing."""
    assert load_bound(np.array([5, 5, 5]), 2) == 10
    assert load_bound(np.array([4.0, 3, 3, 3]), 3) == 6
    assert load_bound(np.array([7, 1, 1]), 3) == 7
    assert load_bound(np.array([2, 2, 1]), 2) == 3  # whole weights: 2.5 cannot be
    assert load_bound(np.array([]), 2) == 0
    assert equal_count_bound(np.array([9, 1, 2, 3]), 2) == 10


def test_a_load_that_cannot_keep_the_cap_is_refused_with_the_least() -> None:
    """Prevents: a user who is not told which cap would do."""
    with pytest.raises(UserError, match=r"rank of 2 must have at least 6 of tokens, and 5 was"):
        balance_under_cap(np.ones(4), 2, np.full(4, 3), 5, "tokens")


@pytest.mark.parametrize(("items", "ranks"), [(200, 8), (640, 64), (3_000, 500)])
def test_a_few_hundred_ranks_are_near_the_bound(items: int, ranks: int) -> None:
    """Prevents: exchanges or differencing that find nothing where brute force cannot go."""
    weight = np.random.default_rng(items).uniform(0.1, 1, items)
    found = balance(weight, ranks)
    assert found.busiest == pytest.approx(np.bincount(found.rank, weight, ranks).max())
    assert found.above_bound < (0.002 if items / ranks >= 10 else 0.04)


@pytest.mark.parametrize("rule", ["sums", "cap", "padded", "of sums", "equal counts"])
def test_the_largest_job_is_balanced_in_a_second(rule: str) -> None:
    """Prevents: a step that takes less time than its assignment; 100,000 items, 2,560 ranks."""
    rng = np.random.default_rng(0)
    weight, ranks = rng.lognormal(0, 0.8, 100_000), 2_560
    second = rng.integers(1, 4_000, len(weight))
    cap = int(second.sum() / ranks * 1.05)
    rules: dict[str, Callable[[], Assignment]] = {
        "sums": lambda: balance(weight, ranks),
        "cap": lambda: balance_under_cap(weight, ranks, second, cap),
        "padded": lambda: balance_padded(weight, ranks),
        "of sums": lambda: balance_sums(weight, ranks, np.square),
        "equal counts": lambda: balance_equal_counts(weight, ranks),
    }
    start = time.process_time()
    found = rules[rule]()
    assert time.process_time() - start < 1
    assert found.above_bound < 0.002
    if rule == "cap":
        assert np.bincount(found.rank, second, ranks).max() <= cap
