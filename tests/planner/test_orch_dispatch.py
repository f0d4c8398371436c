"""Batches of OrchMLLM's job padded and placed on ranks, beside all ways that there are."""

import sys
import time
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from tests.planner.assignment_cases import (
    CASES,
    assignments,
    check_assignment,
    random_cases,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "reproduce"))
from orch_dispatch import balance_padded, place_on_nodes, place_on_ranks

pytestmark = pytest.mark.quick


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
    cases = [(weight, ranks) for weight, ranks in random_cases(2)]
    for weight, ranks in (*cases, *rounded_cases(5)):
        every = assignments(len(weight), ranks)
        loads = every.sum(axis=2) * (every * weight).max(axis=2, initial=0.0)
        best = loads.max(axis=1).min()
        found = balance_padded(weight, ranks)
        members = [weight[found.rank == rank] for rank in range(ranks)]
        busiest = max((len(some) * some.max() for some in members if len(some)), default=0.0)
        check_assignment(found, best, busiest)
        assert found.busiest == pytest.approx(best)


def test_padded_batches_of_the_largest_job_take_a_second() -> None:
    """Prevents: a step that takes less time than its assignment; 100,000 items, 2,560 ranks."""
    weight = np.random.default_rng(0).lognormal(0, 0.8, 100_000)
    start = time.process_time()
    found = balance_padded(weight, 2_560)
    assert time.process_time() - start < 1
    assert found.above_bound < 0.002


def bytes_that_stay(held_bytes: np.ndarray, place: np.ndarray) -> int:
    return int(held_bytes[np.arange(len(place)), place].sum())


@pytest.mark.parametrize("seed", range(50))
def test_placement_against_all_placements(seed: int) -> None:
    """Prevents: bytes sent between nodes that could stay, and a node with too many batches."""
    rng = np.random.default_rng(seed)
    nodes, places = [(2, 3), (3, 2), (6, 1), (2, 2)][seed % 4]
    ranks = nodes * places
    batches = int(rng.integers(1, ranks + 1))
    held = rng.integers(0, 50, (batches, ranks)) * rng.integers(0, 2, (batches, ranks))
    on_node = held.reshape(batches, nodes, places).sum(axis=2)
    every = np.array(list(permutations(range(ranks), batches)))
    most = on_node[np.arange(batches), every // places].sum(axis=1).max()
    node = place_on_nodes(on_node, places)
    assert bytes_that_stay(on_node, node) == most
    assert np.bincount(node).max() <= places
    rank = place_on_ranks(held, places)
    assert len(set(rank.tolist())) == batches
    assert bytes_that_stay(on_node, rank // places) == most
    # Of the placements with these nodes, the ranks are the best too.
    same_nodes = every[(every // places == rank // places).all(axis=1)]
    best = held[np.arange(batches), same_nodes].sum(axis=1).max()
    assert bytes_that_stay(held, rank) == best


def test_a_thousand_ranks_are_placed_in_a_second() -> None:
    """Prevents: a placement that takes longer than the exchange that it shortens."""
    rng = np.random.default_rng(0)
    held = rng.integers(0, 9, (1_024, 1_024)) * (rng.random((1_024, 1_024)) < 0.02)
    start = time.process_time()
    rank = place_on_ranks(held, 8)
    assert time.process_time() - start < 1
    assert len(set(rank.tolist())) == 1_024
