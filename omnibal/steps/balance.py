"""Assignment of items to ranks with a small max load.

The better of longest processing time first (LPT: Graham, SIAM Journal on Applied Mathematics 17,
1969) and largest differencing, both improved by exchanges.
"""

import heapq

import numpy as np

from omnibal.steps.differencing import differenced
from omnibal.steps.even_out import evened_out
from omnibal.steps.load_bounds import load_bound

_FEW = 1 << 21
"""Max items x ranks for slower methods."""
_ROUNDING = 1e-12  # relative, of sums of weights


def balance(weight: np.ndarray, ranks: int) -> np.ndarray:
    """Assign items with max load at most 4/3 - 1/(3 ranks) of the optimum, int64 [items]."""
    weight = np.asarray(weight, np.float64)
    bound, best_load, best = load_bound(weight, ranks), np.inf, np.zeros(len(weight), np.int64)
    is_few = len(weight) * ranks <= _FEW
    found = longest_first(weight, ranks), differenced(weight, ranks, equal_counts=not is_few)
    for before in found:
        rank = evened_out(weight, before, ranks, bound)
        load = float(np.bincount(rank, weight, ranks).max())
        if load < best_load:
            best_load, best = load, rank
        if best_load <= bound * (1 + _ROUNDING):
            break
    return best


def longest_first(weight: np.ndarray, ranks: int) -> np.ndarray:
    """Every item to the rank with minimal load, heaviest item first, int64 [items]."""
    order = np.argsort(-weight, kind="stable")
    heap = [(0.0, rank) for rank in range(ranks)]
    given = np.empty(len(weight), np.int64)
    for item, each in zip(order.tolist(), weight[order].tolist(), strict=True):
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + each, rank))
        given[item] = rank
    return given
