"""Assignment of items to ranks with a small max load (multiway number partitioning).

The better of longest processing time first (Graham, SIAM Journal on Applied Mathematics 17, 1969)
and the largest differencing method (Karmarkar and Karp, The differencing method of set
partitioning, 1982), both improved by exchanges. Weights are float64 [items], ranks int64 [items].
"""

import heapq

import numpy as np

_MAX_SLOW_CELLS = 1 << 21  # max items x ranks for differencing without equal counts
_PARTNERS = 4  # number of least loaded ranks that the busiest rank exchanges with first
_MAX_FURTHER_PAIRS = 1 << 17  # max pairs of items tried with further ranks per exchange
_MAX_PAIRS = 1 << 24  # max pairs of items tried in total
_LOAD_ROUNDING = 1e-12  # relative error of sums of weights


def load_bound(weight: np.ndarray, ranks: int) -> float:
    """Return the max of three lower bounds on the max load, rounded up if all weights are integers.

    They are the mean load, the heaviest item, and for each k >= 1 the sum of the `k + 1` lightest
    of the `k d + 1` heaviest items: one of d ranks has `k + 1` of these (Graham's argument, with
    sums instead of multiples of the lightest).
    """
    if not len(weight):
        return 0.0
    sums = np.concatenate([[0.0], np.cumsum(np.sort(weight.astype(np.float64))[::-1])])
    per_rank = np.arange(1, (len(weight) - 1) // ranks + 1)  # k
    last = per_rank * ranks + 1
    crowded = sums[last] - sums[last - per_rank - 1]
    # Rounding errors of sums must not raise the bound.
    bound = max(sums[-1] / ranks, sums[1], crowded.max(initial=0.0)) * (1 - _LOAD_ROUNDING)
    return float(np.ceil(bound) if (weight == np.floor(weight)).all() else bound)


def balance(weight: np.ndarray, ranks: int) -> np.ndarray:
    """Return the rank of every item, with max load at most 4/3 - 1/(3 ranks) of the optimum."""
    weight = np.asarray(weight, np.float64)
    bound, best_load, best = load_bound(weight, ranks), np.inf, np.zeros(len(weight), np.int64)
    equal_counts = len(weight) * ranks > _MAX_SLOW_CELLS
    starts = longest_first(weight, ranks), assign_by_differencing(weight, ranks, equal_counts)
    for start in starts:
        rank = lower_max_load(weight, start, ranks, bound)
        load = float(np.bincount(rank, weight, ranks).max())
        if load < best_load:
            best_load, best = load, rank
        if best_load <= bound * (1 + _LOAD_ROUNDING):
            break
    return best


def longest_first(weight: np.ndarray, ranks: int) -> np.ndarray:
    """Return the rank of every item: heaviest item first, to the rank with minimal load."""
    order = np.argsort(-weight, kind="stable")
    heap = [(0.0, rank) for rank in range(ranks)]
    rank_of = np.empty(len(weight), np.int64)
    for item, item_weight in zip(order.tolist(), weight[order].tolist(), strict=True):
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + item_weight, rank))
        rank_of[item] = rank
    return rank_of


def assign_by_differencing(weight: np.ndarray, ranks: int, equal_counts: bool) -> np.ndarray:
    """Return the rank of every item, by the largest differencing method.

    A partial assignment has a set of items per rank, sorted by weight. The two with the widest
    spread (heaviest minus lightest set) are joined: heaviest set with lightest, and so on.

    Partial assignments start with one item, and memory is O(items x ranks). With `equal_counts`
    they start with an item per rank: memory is O(items), and ranks' counts differ by at most 1
    (Michiels, Korst, Aarts and van Leeuwen, STACS 2003).
    """
    items = len(weight)
    rank = np.zeros(items, np.int64)
    if not items:
        return rank
    heaviest_first = np.argsort(-weight, kind="stable")
    # Sets of every partial assignment, heaviest first: weights are negated, empty sets are 0.
    together = ranks if equal_counts else 1  # items of a partial assignment at the start
    number = -(-items // together)
    padded, sets = np.zeros(number * together), np.zeros((number, ranks))
    padded[:items] = -weight[heaviest_first]
    sets[:, :together] = padded.reshape(number, together)
    rows = list(sets)
    heap = [(spread, row) for row, spread in enumerate((sets[:, 0] - sets[:, -1]).tolist())]
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


def lower_max_load(weight: np.ndarray, rank: np.ndarray, ranks: int, enough: float) -> np.ndarray:
    """Return the rank of every item after exchanges that lower the busiest rank's load.

    Local search: an exchange, of two items or of one item for none, minimizes the max load of both
    ranks. It ends if none lowers the busiest load, at load `enough`, or after `_MAX_PAIRS` pairs.
    """
    rank, load = rank.copy(), np.bincount(rank, weight, ranks)
    # The sentinel, an item of weight 0 at the end of every rank's items, stands for no item.
    sentinel, weight = len(weight), np.append(weight, 0.0)
    ends = np.cumsum(np.bincount(rank, minlength=ranks))
    by_rank = np.split(np.argsort(rank, kind="stable"), ends[:-1])
    items_of = [np.append(items, sentinel) for items in by_rank]
    pairs = 0
    while pairs < _MAX_PAIRS:
        busiest = int(load.argmax())
        if load[busiest] <= enough * (1 + _LOAD_ROUNDING):
            break
        given = items_of[busiest][:-1]
        # A stable sort, to agree on all machines.
        by_load = np.argsort(load, kind="stable")
        first, further = (part[part != busiest] for part in np.split(by_load, [_PARTNERS]))
        pairs_of_rank = len(given) * (len(rank) / ranks + 1)
        for partners in (first, further[: int(_MAX_FURTHER_PAIRS / max(pairs_of_rank, 1)) + 1]):
            if not len(partners) or not len(given):
                continue
            offers = [items_of[partner] for partner in partners.tolist()]
            taken = np.concatenate(offers)
            partner = partners.repeat([len(offer) for offer in offers])
            pairs += len(given) * len(taken)
            change = weight[given][:, None] - weight[taken]  # [given, taken]
            after = np.maximum(load[busiest] - change, load[partner] + change)
            best = int(after.argmin())
            if after.flat[best] < load[busiest] * (1 - _LOAD_ROUNDING):
                break
        else:
            break
        row, column = divmod(best, len(taken))
        other = int(partner[column])
        moves = ((int(given[row]), busiest, other), (int(taken[column]), other, busiest))
        for item, source, target in moves:
            if item != sentinel:
                items_of[source] = items_of[source][items_of[source] != item]
                items_of[target] = np.concatenate([items_of[target][:-1], [item, sentinel]])
                rank[item] = target
                load[source] -= weight[item]
                load[target] += weight[item]
    return rank
