"""Exchanges that lower the busiest rank: moves and swaps of items."""

from itertools import pairwise

import numpy as np

_PARTNERS = 4
"""Ranks with minimal load that the busiest rank exchanges with first."""
_OTHERS_PAIRS = 1 << 17
"""Max pairs of items to compare with further ranks."""
_MAX_WORK = 1 << 24
"""Max pairs of items to compare in total."""
_ROUNDING = 1e-12  # relative, of sums of weights


def evened_out(weight: np.ndarray, rank: np.ndarray, ranks: int, enough: float) -> np.ndarray:
    """Exchange items of the busiest rank until no exchange lowers its load, int64 [items].

    Picks the exchange with the smallest max load of both ranks. Sorted loads decrease strictly, so
    it terminates; it also stops at the lower bound `enough`.
    """
    rank = rank.copy()
    exchanges = _Exchanges(weight, rank, ranks)
    work = 0
    while work < _MAX_WORK:
        busiest = int(exchanges.load.argmax())
        if exchanges.load[busiest] <= enough * (1 + _ROUNDING):
            break
        for others in exchanges.partners(busiest):
            work += exchanges.pairs(busiest, others)
            if exchanges.exchange(busiest, others):
                break
        else:
            break
    return rank


class _Exchanges:
    def __init__(self, weight: np.ndarray, rank: np.ndarray, ranks: int) -> None:
        self.load = np.bincount(rank, weight, ranks)
        # A move is an exchange for the sentinel item of weight 0.
        self._nothing = len(weight)
        self._weight = np.append(weight, 0.0)
        self._rank = rank
        by_rank = np.argsort(rank, kind="stable")
        ends = np.cumsum(np.bincount(rank, minlength=ranks)).tolist()
        held = (by_rank[first:end] for first, end in pairwise([0, *ends]))
        self._offered = [np.append(items, self._nothing) for items in held]
        """Items of every rank, and the sentinel."""

    def partners(self, busiest: int) -> tuple[np.ndarray, np.ndarray]:
        """The at most `_PARTNERS` ranks with minimal load, and next ones within the time limit."""
        # A stable sort, to agree on all machines.
        by_load = np.argsort(self.load, kind="stable")
        some, others = (part[part != busiest] for part in np.split(by_load, [_PARTNERS]))
        each = (len(self._offered[busiest]) - 1) * (len(self._rank) / len(self.load) + 1)
        return some, others[: int(_OTHERS_PAIRS / max(each, 1)) + 1]

    def pairs(self, busiest: int, others: np.ndarray) -> int:
        """Number of pairs of items of the busiest rank and other ranks."""
        offered = sum(len(self._offered[rank]) for rank in others.tolist())
        return (len(self._offered[busiest]) - 1) * offered

    def exchange(self, busiest: int, others: np.ndarray) -> bool:
        """Make the best exchange of the busiest rank, if any lowers its load."""
        given = self._offered[busiest][:-1]
        if not len(given) or not len(others):
            return False
        offers = [self._offered[rank] for rank in others.tolist()]
        taken = np.concatenate(offers)
        partner = others.repeat([len(offer) for offer in offers])
        change = self._weight[given][:, None] - self._weight[taken]
        after = np.maximum(self.load[busiest] - change, self.load[partner] + change)
        best = int(after.argmin())
        if not after.flat[best] < self.load[busiest] * (1 - _ROUNDING):
            return False
        row, column = divmod(best, len(taken))
        self._trade(busiest, int(given[row]), int(partner[column]), int(taken[column]))
        return True

    def _trade(self, busiest: int, given: int, other: int, taken: int) -> None:
        for item, source, target in ((given, busiest, other), (taken, other, busiest)):
            if item == self._nothing:
                continue
            left, more = self._offered[source], self._offered[target]
            self._offered[source] = left[left != item]
            self._offered[target] = np.concatenate([more[:-1], [item, self._nothing]])
            self._rank[item] = target
            self.load[source] -= self._weight[item]
            self.load[target] += self._weight[item]
