"""The most valuable pack, for samples of any values: a knapsack of several capacities.

A table over a grid, with sizes rounded down, says at most what the rest of a pack can be worth.
Along it packs are filled with exact sizes, so all of them fit; and a search that leaves out only
what the table rules out proves how much a pack can be worth.

A table has an axis a feature, the last of them tokens, of the grid's cells + 1.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from omnibal.packing.patterns import Grid, knapsack_table

_MAX_SEARCHED = 1e8
"""Most extensions of partial packs that the search tries."""
_MAX_HELD = 3e7
"""Most samples in all partial packs held at once."""
_CHUNK = 1 << 22
"""Extensions of partial packs that are evaluated at a time."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Priced:
    """Values of sizes, and the value that each amount of room in a pack can reach."""

    values: np.ndarray
    """Value of every size, float64 [sizes]."""
    counts: np.ndarray
    """Available samples of each size, int64 [sizes]."""
    table: np.ndarray
    """Upper bound on the value of every combination of capacities, float64."""
    filler_price: float
    """Highest value per token of the sizes that the grid rounds down to nothing."""

    @property
    def most(self) -> float:
        """Upper bound on the value of a pack."""
        return float(self.table.flat[-1])


class BestPack:
    """Packs of the most value out of given sizes."""

    def __init__(self, sizes: np.ndarray, caps: np.ndarray, max_cells: int):
        """Lay a grid over the caps.

        Args:
            sizes: int64 [features, sizes], each within the caps.
            caps: of a pack, int64 [features].
            max_cells: of the table, about; more make it tighter.
        """
        self._sizes, self._caps = sizes, caps
        self._grid = Grid.of(caps, max_cells)
        self._units = sizes // self._grid.units[:, None]
        self._fills = ~self._units.any(axis=0)
        self._is_exact = bool((self._grid.units == 1).all())

    def price(self, values: np.ndarray, counts: np.ndarray) -> Priced:
        """Make the table for values [sizes] and available samples [sizes]."""
        useful = ~self._fills & (values > 0) & (counts > 0)
        table = knapsack_table(values[useful], self._units[:, useful], self._grid, counts[useful])
        fills = self._fills & (counts > 0)
        price = float((values[fills] / self._sizes[-1, fills]).max(initial=0))
        if price > 0:
            # What of the tokens others leave is at most filled, and a unit for what was rounded.
            unit = int(self._grid.units[-1])
            filled = price * unit * np.arange(table.shape[-1])
            table = np.maximum.accumulate(table - filled, axis=-1) + filled
            table += price * unit
        return Priced(values=values, counts=counts, table=table, filler_price=price)

    def patterns(self, priced: Priced, most: int) -> np.ndarray:
        """Packs of about the most value that hold each of some sizes, int64 [patterns, sizes].

        Args:
            priced: values and counts; no pattern holds more of a size than there are.
            most: patterns, at most.
        """
        values, counts = priced.values, priced.counts
        worth = values + self._rest(priced, self._caps[:, None] - self._sizes)
        first = np.argsort(np.where(counts > 0, -worth, np.inf), kind="stable")
        first = first[: min(most, int((counts > 0).sum()))]
        useful = np.flatnonzero((values > 0) & (counts > 0))
        patterns = np.zeros((len(first), len(values)), np.int64)
        patterns[np.arange(len(first)), first] = 1
        left = self._caps[:, None] - self._sizes[:, first]
        rows = np.arange(len(first))
        while len(rows) and len(useful):
            after = left.take(rows, axis=1)[:, :, None] - self._sizes[:, None, useful]
            fits = (after >= 0).all(axis=0)
            fits &= patterns[np.ix_(rows, useful)] < counts[useful]
            rest = self._rest(priced, np.maximum(after, 0))
            worth = np.where(fits, rest + values[useful], 0.0)
            best = worth.argmax(axis=1)
            goes_on = worth[np.arange(len(rows)), best] > 0
            rows, added = rows[goes_on], useful[best[goes_on]]
            patterns[rows, added] += 1
            left[:, rows] -= self._sizes[:, added]
        return np.unique(patterns, axis=0)

    def most(self, priced: Priced, enough: float) -> tuple[float, np.ndarray]:
        """Upper bound on the value of a pack, by search, and packs worth more than `enough`.

        All packs are built up, size by size in one order, but for those that cannot come to be
        worth more than `enough` by the table. Where that takes too long, what is left of them is
        judged by the table.

        Args:
            priced: values and counts.
            enough: worth of a pack below which nothing is asked.

        Returns:
            The worth, and int64 [packs, sizes].
        """
        if priced.most <= enough or self._is_exact:
            return priced.most, np.zeros((0, self._sizes.shape[1]), np.int64)
        share = (self._sizes / self._caps[:, None]).sum(axis=0)
        useful = ~self._fills & (priced.values > 0) & (priced.counts > 0)
        order = np.argsort(np.where(useful, -share, np.inf), kind="stable")[: useful.sum()]
        search = _Search(
            sizes=self._sizes[:, order],
            values=priced.values[order],
            counts=priced.counts[order],
            filler_price=priced.filler_price,
            rest=lambda left: self._rest(priced, left),
            enough=enough,
        )
        most = search.run(self._caps)
        found = np.zeros((len(search.found), self._sizes.shape[1]), np.int64)
        for row, members in zip(found, search.found, strict=True):
            np.add.at(row, order[members], 1)
        return most, found

    def _rest(self, priced: Priced, left: np.ndarray) -> np.ndarray:
        """Upper bound on the value of what fits into the room left, int64 [features, ...]."""
        units = self._grid.units.reshape(-1, *[1] * (left.ndim - 1))
        return priced.table.ravel()[self._grid.places(left // units)]


@dataclass(kw_only=True, slots=True, eq=False)
class _Search:
    """All packs that may be worth more than enough, level by level of their number of samples."""

    sizes: np.ndarray
    """Sizes in the order in which packs are built up, int64 [features, sizes]."""
    values: np.ndarray
    """Value of every size, float64 [sizes]."""
    counts: np.ndarray
    """Available samples of each size, int64 [sizes]."""
    filler_price: float
    """Value per token of what is not among the sizes."""
    rest: Callable[[np.ndarray], np.ndarray]
    """Upper bound on the value of what fits into room, int64 [features, ...], each."""
    enough: float
    """Worth of a pack below which nothing is asked."""
    found: list[np.ndarray] = field(default_factory=list)
    """Indices of sizes, of packs worth more than enough."""
    _most: float = 0.0

    def run(self, caps: np.ndarray) -> float:
        """The most that a pack can be worth, and no less than enough.

        Args:
            caps: int64 [features].
        """
        # A pack may hold nothing but what the grid rounds to nothing.
        self._most = max(self.enough, self.filler_price * int(caps[-1]))
        members = np.zeros((1, 0), np.int32)
        value, run, left = np.zeros(1), np.zeros(1, np.int64), caps[:, None]
        searched = 0
        while len(members) and len(self.values):
            searched += len(members) * len(self.values)
            if searched > _MAX_SEARCHED or members.size > _MAX_HELD:
                return max(self._most, float((value + self.rest(left)).max()))
            rows = max(1, _CHUNK // len(self.values))
            parts = [
                self._extended(members[i : i + rows], value[i : i + rows], run[i : i + rows],
                               left[:, i : i + rows])
                for i in range(0, len(members), rows)
            ]  # fmt: skip
            *others, rooms = zip(*parts, strict=True)
            members, value, run = (np.concatenate(part) for part in others)
            left = np.concatenate(rooms, axis=1)
        return self._most

    def _extended(
        self, members: np.ndarray, value: np.ndarray, run: np.ndarray, left: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Partial packs [packs, samples] with one more sample that comes no earlier in order.

        Args:
            members: int32 [packs, samples], indices of sizes.
            value: float64 [packs].
            run: int64 [packs], how often the last size is held.
            left: int64 [features, packs], room.
        """
        place = np.arange(len(self.values))
        last = members[:, -1] if members.shape[1] else np.full(len(members), -1)
        may = place > last[:, None]
        again = np.flatnonzero((last >= 0) & (run < self.counts[last]))
        may[again, last[again]] = True
        after = left[:, :, None] - self.sizes[:, None]
        may &= (after >= 0).all(axis=0)
        row, added = np.nonzero(may)
        left = after[:, row, added]
        worth = value[row] + self.values[added]
        kept = worth + self.rest(left) > self.enough
        row, added, left, worth = row[kept], added[kept], left[:, kept], worth[kept]
        longer = np.concatenate([members[row], added[:, None].astype(np.int32)], axis=1)
        runs = np.where(added == last[row], run[row] + 1, 1)
        as_it_is = worth + self.filler_price * left[-1]
        if len(worth):
            self._most = max(self._most, float(as_it_is.max()))
        self.found += list(longer[worth > self.enough])
        return longer, worth, runs, left
