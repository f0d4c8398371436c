"""Largest differencing method (Karmarkar and Karp, The differencing method of set partitioning,
1982).

Partial assignments (a weight-sorted set per rank) with the widest spread are joined, heaviest set
with lightest. Starting with d items per assignment gives item counts that differ by at most one
(Michiels, Korst, Aarts and van Leeuwen, STACS 2003).
"""

import heapq

import numpy as np


def differenced(weight: np.ndarray, ranks: int, *, equal_counts: bool) -> np.ndarray:
    """Return the rank of every item by largest differencing, int64 [items].

    With `equal_counts`, item counts differ by at most one. Time and memory are O(items x ranks), or
    O(items) with `equal_counts`.
    """
    items = len(weight)
    rank = np.zeros(items, np.int64)
    if not items:
        return rank
    heaviest_first = np.argsort(-weight, kind="stable")
    # Sets of every partial assignment, heaviest first. Weights are negative, empty sets 0.
    together = ranks if equal_counts else 1
    number = -(-items // together)
    given, sets = np.zeros(number * together), np.zeros((number, ranks))
    given[:items] = -weight[heaviest_first]
    sets[:, :together] = given.reshape(number, together)
    rows = list(sets)
    heap = [(spread, each) for each, spread in enumerate((sets[:, 0] - sets[:, -1]).tolist())]
    heapq.heapify(heap)
    joins = []
    while len(heap) > 1:
        _, wide = heapq.heappop(heap)
        narrow = heap[0][1]
        total = rows[wide] + rows[narrow][::-1]
        order = total.argsort(kind="stable")
        rows[narrow] = joined = total[order]
        joins.append((wide, narrow, order))
        heapq.heapreplace(heap, (joined.item(0) - joined.item(-1), narrow))
    # Assign ranks to sets by undoing joins, last first.
    ranks_of = np.empty((number, ranks), np.int64)
    ranks_of[heap[0][1]] = np.arange(ranks)
    for wide, narrow, order in reversed(joins):
        ranks_of[wide, order] = ranks_of[narrow]
        ranks_of[narrow] = ranks_of[wide, ::-1]
    rank[heaviest_first] = ranks_of[:, :together].reshape(-1)[:items]
    return rank
