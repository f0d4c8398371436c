"""Largest differencing: items joined to sets by making the largest differences small.

A partial assignment is one set a rank, sorted by weight, whose ranks are not settled yet. The two
partial assignments with the widest spread are joined, heaviest set with lightest, until one is left
(Karmarkar and Karp, The differencing method of set partitioning, 1982). Beginning with a partial
assignment for every d items in a row, instead of one an item, gives numbers of items that differ by
at most one (Michiels, Korst, Aarts and van Leeuwen, STACS 2003), and takes a d-th of the joins.
"""

import heapq

import numpy as np


def differenced(weight: np.ndarray, ranks: int, *, equal_counts: bool) -> np.ndarray:
    """The rank of every item by largest differencing, with numbers of items that differ by one at
    most (`equal_counts`), or any. int64 [items]

    Time and memory are of order items x ranks, and of order items if counts are equal.
    """
    items = len(weight)
    rank = np.zeros(items, np.int64)
    if not items:
        return rank
    heaviest_first = np.argsort(-weight, kind="stable")
    # Sets of every partial assignment, heaviest first: weights are negative, empty sets have none.
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
    # The rank of each set of a partial assignment, from the last to the first ones.
    ranks_of = np.empty((number, ranks), np.int64)
    ranks_of[heap[0][1]] = np.arange(ranks)
    for wide, narrow, order in reversed(joins):
        ranks_of[wide, order] = ranks_of[narrow]
        ranks_of[narrow] = ranks_of[wide, ::-1]
    rank[heaviest_first] = ranks_of[:, :together].reshape(-1)[:items]
    return rank
