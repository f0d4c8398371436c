"""Padded batches of OrchMLLM's recordings, and the ranks on which they stay near their readers.

OrchMLLM (arXiv 2503.23830) balances the batches of every modality after they are drawn, by rules
whose listings are not public; these two are exact. Batches that have been balanced are not of any
rank yet: with the bytes of each that already lie on each node, most stay where they are if the sum
of those that do is largest, which is an assignment problem with a column for every place on a node.
"""

import numpy as np
from scipy.optimize import linear_sum_assignment

from omnibal.dispatch.balance import Assignment
from omnibal.dispatch.load_bounds import load_bound

_ROUNDING = 1e-12


def balance_padded(weight: np.ndarray, ranks: int) -> Assignment:
    """Assign items so that the largest of (items of a rank) x (its largest weight) is least.

    That is the time of a batch whose items are all padded to the longest, with the weight an
    increasing function of the length. Exact: if no rank may exceed B, then taking the heaviest
    floor(B / weight of the heaviest) of what is left for one rank after another leaves least; B is
    found by bisection over the values that a load can have, which are multiples of weights.

    Args:
        weight: of every item, at least 0, [items]; items of none are padded too.
        ranks: at least 1.
    """
    weight = np.asarray(weight, np.float64)
    heaviest_first = np.argsort(-weight, kind="stable")
    ordered = weight[heaviest_first]
    if not len(weight):
        return Assignment(rank=np.zeros(0, np.int64), busiest=0.0, bound=0.0)
    distinct = np.unique(weight[weight > 0])
    low = load_bound(weight, ranks)
    high = float(ordered[0] * -(-len(weight) // ranks))
    ends = _padded_batches(ordered, high, ranks)
    assert ends is not None
    while low < high * (1 - _ROUNDING):
        middle = (low + high) / 2
        tried = _padded_batches(ordered, middle, ranks)
        if tried is None:
            low = float((distinct * (_multiples(middle, distinct) + 1)).min())
        else:
            starts = np.concatenate([[0], tried[:-1]])
            reached = float((ordered[starts] * np.diff(tried, prepend=0)).max())
            if reached >= high:
                break  # `middle` counts as `high`: nothing is between the two but rounding
            ends, high = tried, reached
    rank = np.empty(len(weight), np.int64)
    rank[heaviest_first] = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
    return Assignment(rank=rank, busiest=high, bound=high)


def _padded_batches(ordered: np.ndarray, limit: float, ranks: int) -> np.ndarray | None:
    """Ends of batches of descending weights that stay within a limit; None if ranks do not do."""
    ends: list[int] = []
    end = 0
    while end < len(ordered):
        left = len(ordered) - end
        count = int(np.minimum(_multiples(limit, ordered[end]), left)) if ordered[end] else left
        if not count or len(ends) == ranks:
            return None
        end += count
        ends.append(end)
    return np.array(ends, np.int64)


def _multiples(limit: float, weight: np.ndarray) -> np.ndarray:
    """How many times each weight goes into the limit, which may itself be a multiple."""
    return np.floor(limit / weight * (1 + _ROUNDING))


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
