"""Assignment of items to ranks that makes the busiest rank's sum of weights small.

Items are dealt longest first (LPT: Graham, SIAM Journal on Applied Mathematics 17, 1969) and by
largest differencing, which is better where a rank has few items; exchanges lower both, and the
better one is taken. A lower bound beside it says how far from the best that can be at most.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from omnibal.dispatch.differencing import differenced
from omnibal.dispatch.even_out import evened_out
from omnibal.dispatch.load_bounds import load_bound

_FEW = 1 << 21
"""Items times ranks up to which slower ways are tried too."""
_ROUNDING = 1e-12  # relative, of sums of weights


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Assignment:
    """The rank of every item, and how good that is."""

    rank: np.ndarray
    """int64 [items]"""
    busiest: float
    """Load of the busiest rank."""
    bound: float
    """No assignment's busiest rank has less."""


def balance(weight: np.ndarray, ranks: int) -> Assignment:
    """Assign items so that the largest sum of weights is small: at most 4/3 - 1/(3 ranks) of least.

    Args:
        weight: of every item, at least 0, [items].
        ranks: at least 1.
    """
    weight = np.asarray(weight, np.float64)
    bound = load_bound(weight, ranks)
    is_few = len(weight) * ranks <= _FEW
    found = [longest_first(weight, ranks), differenced(weight, ranks, equal_counts=not is_few)]
    return _best(weight, found, ranks, bound)


def _best(weight: np.ndarray, found: list[np.ndarray], ranks: int, bound: float) -> Assignment:
    """The best of some assignments after exchanges, up to one that is at the bound."""
    best: Assignment | None = None
    for before in found:
        rank = evened_out(weight, before, ranks, bound)
        busiest = float(np.bincount(rank, weight, ranks).max())
        if best is None or busiest < best.busiest:
            best = Assignment(rank=rank, busiest=busiest, bound=bound)
        if best.busiest <= bound * (1 + _ROUNDING):
            break
    assert best is not None
    return best


def longest_first(weight: np.ndarray, ranks: int) -> np.ndarray:
    """Every item to the rank with the least load, heaviest item first. int64 [items]"""
    order = np.argsort(-weight, kind="stable")
    heap = [(0.0, rank) for rank in range(ranks)]
    given = np.empty(len(weight), np.int64)
    for item, each in zip(order.tolist(), weight[order].tolist(), strict=True):
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + each, rank))
        given[item] = rank
    return given
