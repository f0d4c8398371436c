"""Assignment of items to ranks that makes the busiest rank's load small, for five kinds of load.

OrchMLLM (arXiv 2503.23830) balances the batches of every modality after they are drawn, by rules
whose listings are not public. Here each kind of load has its own method and a lower bound of its
own, so that a result says how far from the best it can be at most.

| load of a rank | function | result |
|---|---|---|
| sum of the items' weights | `balance` | at most 4/3 of the best |
| the same, and a cap on a second sum | `balance_under_cap` | keeps the cap or is refused |
| number of items times the largest weight (padded) | `balance_padded` | the best |
| an increasing function of a sum | `balance_sums` | as `balance` |
| sum of weights, with equal numbers of items | `balance_equal_counts` | |

Sums are dealt longest first (LPT: Graham, SIAM Journal on Applied Mathematics 17, 1969) and by
largest differencing, which is better where a rank has few items; exchanges lower both, and the
better one is taken.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from omnibal.data.best_fit import pack_first_fit
from omnibal.data.few_samples import MAX_SAMPLES, pack_exactly
from omnibal.dispatch.bounds import equal_count_bound, load_bound
from omnibal.dispatch.differencing import differenced
from omnibal.dispatch.even_out import Limits, evened_out
from omnibal.errors import UserError

_FEW = 1 << 21
"""Items times ranks up to which slower ways are tried too."""
_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Assignment:
    """The rank of every item, and how good that is."""

    rank: np.ndarray
    """int64 [items]"""
    busiest: float
    """Load of the busiest rank."""
    bound: float
    """No assignment's busiest rank has less."""

    @property
    def above_bound(self) -> float:
        """How far the busiest rank is above the bound, as a share of it; 0 without any load."""
        return self.busiest / self.bound - 1 if self.bound else 0.0


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
    return _best(weight, found, ranks, bound, Limits())


def balance_under_cap(
    weight: np.ndarray, ranks: int, second: np.ndarray, cap: int, what: str = "second load"
) -> Assignment:
    """Assign items as `balance` does, where no rank may have more than so much of a second load.

    Args:
        weight: of every item, at least 0, [items].
        ranks: at least 1.
        second: of every item, such as tokens or bytes, int64 [items].
        cap: most of it on a rank.
        what: name of the second load, for messages.

    Raises:
        UserError: no assignment keeps the cap, or none was found that does.
    """
    weight, second = np.asarray(weight, np.float64), np.asarray(second, np.int64)
    least = load_bound(second, ranks)
    if least > cap:
        raise UserError(
            f"some rank of {ranks:,} must have at least {least:,.0f} of {what}, and {cap:,} was "
            "given as the most: raise the cap or use more ranks"
        )
    bound = load_bound(weight, ranks)
    found = [_longest_first_with_room(weight, ranks, second, cap, by=weight)]
    if found[0] is None or len(weight) * ranks <= _FEW:
        found.append(_longest_first_with_room(weight, ranks, second, cap, by=second))
        found.append(_fitted(second, ranks, cap))
    within = [rank for rank in found if rank is not None]
    if not within:
        raise UserError(
            f"no assignment of {len(weight):,} items to {ranks:,} ranks was found with at most "
            f"{cap:,} of {what} on each; the busiest must have {least:,.0f}: raise the cap"
        )
    return _best(weight, within, ranks, bound, Limits(second=second, cap=cap))


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


def balance_sums(
    length: np.ndarray, ranks: int, load: Callable[[np.ndarray], np.ndarray]
) -> Assignment:
    """Assign items so that the largest load is small, a load being of the sum of a rank's lengths.

    Such is attention over a whole pack. As the load increases with the sum, it is largest where the
    sum is.

    Args:
        length: of every item, at least 0, [items].
        ranks: at least 1.
        load: an increasing function of sums, [any] to [any].
    """
    by_sum = balance(length, ranks)
    busiest, bound = load(np.array([by_sum.busiest, by_sum.bound])).tolist()
    return replace(by_sum, busiest=busiest, bound=bound)


def balance_equal_counts(weight: np.ndarray, ranks: int) -> Assignment:
    """Assign items so that the largest sum is small and numbers of items differ by at most one.

    Args:
        weight: of every item, at least 0, [items].
        ranks: at least 1.
    """
    weight = np.asarray(weight, np.float64)
    bound = equal_count_bound(weight, ranks)
    given = np.empty(len(weight), np.int64)
    rest, reserved = _giants_reserved(weight, ranks, given)
    found = []
    for rule in (_dealt_in_rounds, partial(differenced, equal_counts=True)):
        given[rest] = reserved + rule(weight[rest], ranks - reserved)
        found.append(given.copy())
    return _best(weight, found, ranks, bound, Limits(equal_counts=True))


def _giants_reserved(weight: np.ndarray, ranks: int, given: np.ndarray) -> tuple[np.ndarray, int]:
    """Give the first ranks an item each that makes them the busiest, and the lightest beside it.

    Such an item, with the lightest that its rank must have to have as many as others, weighs more
    than the mean of what is left.

    Returns:
        The items that are left, and the number of these ranks; at least one rank is left.
    """
    order = np.argsort(-weight, kind="stable")
    left = float(weight.sum())
    for rank in range(ranks - 1):
        beside = len(order) // (ranks - rank) - 1
        if beside < 0:
            return order, rank
        batch = np.concatenate([order[:1], order[len(order) - beside :]])
        load = float(weight[batch].sum())
        if load <= left / (ranks - rank):
            return order, rank
        given[batch] = rank
        left -= load
        order = order[1 : len(order) - beside]
    return order, ranks - 1


def _best(
    weight: np.ndarray, found: list[np.ndarray], ranks: int, bound: float, limits: Limits
) -> Assignment:
    """The best of some assignments after exchanges, up to one that is at the bound."""
    best: Assignment | None = None
    for before in found:
        rank = evened_out(weight, before, ranks, bound, limits)
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


def _longest_first_with_room(
    weight: np.ndarray, ranks: int, second: np.ndarray, cap: int, by: np.ndarray
) -> np.ndarray | None:
    """Every item to the least loaded rank that has room for it, largest `by` first; None where an
    item finds no room. int64 [items]"""
    order = np.lexsort((-second, -by))
    heap = [(0.0, rank) for rank in range(ranks)]
    load, room = np.zeros(ranks), np.full(ranks, cap)
    given = np.empty(len(weight), np.int64)
    for item, each, size in zip(
        order.tolist(), weight[order].tolist(), second[order].tolist(), strict=True
    ):
        # A rank that was not taken from the heap when it got an item has an old load there.
        while heap[0][0] != load[heap[0][1]]:
            heapq.heappop(heap)
        rank = heap[0][1]
        if room[rank] < size:
            rank = int(np.where(room >= size, load, np.inf).argmin())
            if room[rank] < size:
                return None
        load[rank] += each
        room[rank] -= size
        heapq.heappush(heap, (load[rank], rank))
        given[item] = rank
    return given


def _fitted(second: np.ndarray, ranks: int, cap: int) -> np.ndarray | None:
    """Some assignment that keeps the cap; None where it needs more ranks. int64 [items]

    Of a handful of items it is found if there is any.
    """
    sizes, caps = second[None], np.array([cap])
    if len(second) <= MAX_SAMPLES:
        packs = pack_exactly(sizes, caps)
    else:
        packs = pack_first_fit(sizes, second.astype(np.float64), caps)
    if len(packs) > ranks:
        return None
    given = np.empty(len(second), np.int64)
    for rank, items in enumerate(packs):
        given[items] = rank
    return given


def _dealt_in_rounds(weight: np.ndarray, ranks: int) -> np.ndarray:
    """Items in rounds of one a rank, each round's heaviest to the least loaded. int64 [items]"""
    order = np.argsort(-weight, kind="stable")
    load = np.zeros(ranks)
    given = np.empty(len(weight), np.int64)
    for start in range(0, len(weight), ranks):
        items = order[start : start + ranks]
        lightest_first = np.argsort(load, kind="stable")[: len(items)]
        given[items] = lightest_first
        load[lightest_first] += weight[items]
    return given


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
