"""Batches placed on nodes and ranks, beside all placements that there are."""

import time
from itertools import permutations

import numpy as np
import pytest

from omnibal.dispatch.placement import place_on_nodes, place_on_ranks

pytestmark = pytest.mark.quick


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
