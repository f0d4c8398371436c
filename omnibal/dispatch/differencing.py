"""Largest differencing: items joined to sets by making the largest differences small.

A partial assignment is one set a rank, sorted by weight, whose ranks are not settled yet. The two
partial assignments with the widest spread are joined, heaviest set with lightest, until one is left
(Karmarkar and Karp, The differencing method of set partitioning, 1982). Beginning with a partial
assignment for every d items in a row, instead of one an item, gives numbers of items that differ by
at most one (Michiels, Korst, Aarts and van Leeuwen, STACS 2003), and takes a d-th of the joins.
"""

import heapq

import numpy as np

_EMPTY = -1  # no item


def differenced(weight: np.ndarray, ranks: int, *, equal_counts: bool) -> np.ndarray:
    """The rank of every item by largest differencing. int64 [items]

    Args:
        weight: of every item, at least 0, [items].
        ranks: d; time and memory are of order items x d, of order items where counts are equal.
        equal_counts: whether numbers of items may differ by one at most.
    """
    items = len(weight)
    rank = np.zeros(items, np.int64)
    if not items:
        return rank
    together = ranks if equal_counts else 1
    heaviest_first = np.argsort(-weight, kind="stable")
    starts = range(0, items, together)
    partial = np.full((len(starts), ranks), _EMPTY)
    partial[:, :together].flat[:items] = heaviest_first
    sums = np.where(partial == _EMPTY, 0.0, np.append(weight, 0.0)[partial])
    heap = [(-spread, number) for number, spread in enumerate((sums[:, 0] - sums[:, -1]).tolist())]
    heapq.heapify(heap)
    joins = []
    nodes = items
    while len(heap) > 1:
        _, wide = heapq.heappop(heap)
        narrow = heap[0][1]
        total = sums[wide] + sums[narrow][::-1]
        heavy, light = partial[wide], partial[narrow][::-1]
        both = (heavy != _EMPTY) & (light != _EMPTY)
        count = int(both.sum())
        joined = np.maximum(heavy, light)
        joined[both] = np.arange(nodes, nodes + count)
        joins.append((nodes, heavy[both], light[both]))
        nodes += count
        order = np.argsort(-total, kind="stable")
        partial[narrow], sums[narrow] = joined[order], total[order]
        heapq.heapreplace(heap, (float(sums[narrow, -1] - sums[narrow, 0]), narrow))
    settled = np.empty(nodes, np.int64)
    last = partial[heap[0][1]]
    settled[last[last != _EMPTY]] = np.flatnonzero(last != _EMPTY)
    for first, heavy, light in reversed(joins):
        of = settled[first : first + len(heavy)]
        settled[heavy], settled[light] = of, of
    return settled[:items]
