"""Placement: which node and rank gets which batch, so that few bytes pass between nodes.

Batches that have been balanced are not of any rank yet. With the bytes of each that already lie on
each node, most stay where they are if the sum of those that do is largest: an assignment problem
with a column for every place on a node, whose solution is exact. OrchMLLM (arXiv 2503.23830) states
it as an integer program, which it need not be as long as the sum counts and not the busiest node.
"""

import numpy as np
from scipy.optimize import linear_sum_assignment


def place_on_nodes(held_bytes: np.ndarray, places_of_node: int) -> np.ndarray:
    """The node of every batch, such that the most bytes lie there already. int64 [batches]

    Args:
        held_bytes: of every batch on every node, or needed there, at least 0, [batches, nodes].
        places_of_node: most batches of a node; all nodes together have room for all.
    """
    places = np.repeat(held_bytes, places_of_node, axis=1)
    batch, place = linear_sum_assignment(places, maximize=True)
    node = np.empty(len(held_bytes), np.int64)
    node[batch] = place // places_of_node
    return node


def place_on_ranks(held_bytes: np.ndarray, ranks_of_node: int) -> np.ndarray:
    """The rank of every batch: first the best nodes, then the best ranks on each. int64 [batches]

    Args:
        held_bytes: of every batch on every rank, or needed there, at least 0, [batches, ranks].
        ranks_of_node: ranks 0 to this - 1 are the first node's, and so on; ranks are a multiple of
            it and at least as many as batches.
    """
    batches, ranks = held_bytes.shape
    on_node = held_bytes.reshape(batches, ranks // ranks_of_node, ranks_of_node)
    node = place_on_nodes(on_node.sum(axis=2), ranks_of_node)
    rank = np.empty(batches, np.int64)
    for each in np.unique(node).tolist():
        members = np.flatnonzero(node == each)
        rank[members] = each * ranks_of_node + place_on_nodes(on_node[members, each], 1)
    return rank
