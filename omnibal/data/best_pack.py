"""The most valuable pack, for samples of any values: a knapsack of two capacities.

A table over a grid, with sizes rounded down, says at most what the rest of a pack can be worth.
Along it packs are filled with exact sizes, so all of them fit; and a search that leaves out only
what the table rules out proves how much a pack can be worth.

A table is [tile units + 1, token units + 1].
"""

from dataclasses import dataclass

import numpy as np

from omnibal.data.patterns import Grid, knapsack_table
from omnibal.limits import Caps

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
    """Upper bound on the value of every pair of capacities, float64."""
    filler_price: float
    """Highest value per token of the sizes that the grid rounds down to nothing."""

    @property
    def most(self) -> float:
        """Upper bound on the value of a pack."""
        return float(self.table[-1, -1])


class BestPack:
    """Packs of the most value out of given sizes."""

    def __init__(self, tiles: np.ndarray, tokens: np.ndarray, caps: Caps, max_cells: int):
        """Lay a grid over the caps.

        Args:
            tiles, tokens: int64 [sizes], each within the caps.
            caps: of a pack.
            max_cells: of the table, about; more make it tighter.
        """
        self._tiles, self._tokens, self._caps = tiles, tokens, caps
        grid = Grid.of(caps["tiles"], caps["tokens"], max_cells)
        self._grid = grid
        self._tile_units, self._token_units = tiles // grid.tile_unit, tokens // grid.token_unit
        self._fills = (self._tile_units == 0) & (self._token_units == 0)
        self._is_exact = grid.tile_unit == grid.token_unit == 1

    def price(self, values: np.ndarray, counts: np.ndarray) -> Priced:
        """Make the table for values [sizes] and available samples [sizes]."""
        useful = ~self._fills & (values > 0) & (counts > 0)
        table = knapsack_table(
            values[useful], self._tile_units[useful], self._token_units[useful], self._grid,
            counts[useful],
        )  # fmt: skip
        fills = self._fills & (counts > 0)
        price = float((values[fills] / self._tokens[fills]).max(initial=0))
        if price > 0:
            # What of the tokens others leave is at most filled, and a unit for what was rounded.
            filled = price * self._grid.token_unit * np.arange(table.shape[1])
            table = np.maximum.accumulate(table - filled, axis=1) + filled
            table += price * self._grid.token_unit
        return Priced(values=values, counts=counts, table=table, filler_price=price)

    def patterns(self, priced: Priced, most: int) -> np.ndarray:
        """Packs of about the most value that hold each of some sizes, int64 [patterns, sizes].

        Args:
            priced: values and counts; no pattern holds more of a size than there are.
            most: patterns, at most.
        """
        values, counts = priced.values, priced.counts
        tiles_left = self._caps["tiles"] - self._tiles
        tokens_left = self._caps["tokens"] - self._tokens
        worth = values + self._rest(priced, tiles_left, tokens_left)
        first = np.argsort(np.where(counts > 0, -worth, np.inf), kind="stable")
        first = first[: min(most, int((counts > 0).sum()))]
        useful = np.flatnonzero((values > 0) & (counts > 0))
        patterns = np.zeros((len(first), len(values)), np.int64)
        patterns[np.arange(len(first)), first] = 1
        tiles_left, tokens_left = tiles_left[first], tokens_left[first]
        rows = np.arange(len(first))
        while len(rows) and len(useful):
            tiles_after = tiles_left[rows][:, None] - self._tiles[useful]
            tokens_after = tokens_left[rows][:, None] - self._tokens[useful]
            fits = (tiles_after >= 0) & (tokens_after >= 0)
            fits &= patterns[np.ix_(rows, useful)] < counts[useful]
            rest = self._rest(priced, np.maximum(tiles_after, 0), np.maximum(tokens_after, 0))
            worth = np.where(fits, rest + values[useful], 0.0)
            best = worth.argmax(axis=1)
            goes_on = worth[np.arange(len(rows)), best] > 0
            rows, added = rows[goes_on], useful[best[goes_on]]
            patterns[rows, added] += 1
            tiles_left[rows] -= self._tiles[added]
            tokens_left[rows] -= self._tokens[added]
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
            return priced.most, np.zeros((0, len(self._tiles)), np.int64)
        share = self._tokens / self._caps["tokens"] + self._tiles / max(self._caps["tiles"], 1)
        useful = ~self._fills & (priced.values > 0) & (priced.counts > 0)
        order = np.argsort(np.where(useful, -share, np.inf), kind="stable")[: useful.sum()]
        search = _Search(self, priced, order, enough)
        most = search.run()
        found = np.zeros((len(search.found), len(self._tiles)), np.int64)
        for row, members in zip(found, search.found, strict=True):
            np.add.at(row, order[members], 1)
        return most, found

    def _rest(self, priced: Priced, tiles_left: np.ndarray, tokens_left: np.ndarray) -> np.ndarray:
        """Upper bound on the value of what fits into the room left."""
        tile_units = tiles_left // self._grid.tile_unit
        return priced.table[tile_units, tokens_left // self._grid.token_unit]


class _Search:
    """All packs that may be worth more than enough, level by level of their number of samples."""

    def __init__(self, best: BestPack, priced: Priced, order: np.ndarray, enough: float):
        self._best, self._priced, self._enough = best, priced, enough
        self._tiles, self._tokens = best._tiles[order], best._tokens[order]
        self._values, self._counts = priced.values[order], priced.counts[order]
        self.found: list[np.ndarray] = []
        """Places in the order, of packs worth more than enough."""
        # A pack may hold nothing but what the grid rounds to nothing.
        self._most = max(enough, priced.filler_price * best._caps["tokens"])

    def run(self) -> float:
        """The most that a pack can be worth, and no less than enough."""
        caps = self._best._caps
        members = np.zeros((1, 0), np.int32)
        value, run = np.zeros(1), np.zeros(1, np.int64)
        tiles, tokens = np.array([caps["tiles"]]), np.array([caps["tokens"]])
        searched = 0
        while len(members) and len(self._values):
            searched += len(members) * len(self._values)
            if searched > _MAX_SEARCHED or members.size > _MAX_HELD:
                rest = self._best._rest(self._priced, tiles, tokens)
                return max(self._most, float((value + rest).max()))
            rows = max(1, _CHUNK // len(self._values))
            parts = [
                self._extended(members[i : i + rows], value[i : i + rows], run[i : i + rows],
                               tiles[i : i + rows], tokens[i : i + rows])
                for i in range(0, len(members), rows)
            ]  # fmt: skip
            members, value, run, tiles, tokens = (
                np.concatenate(part) for part in zip(*parts, strict=True)
            )
        return self._most

    def _extended(
        self,
        members: np.ndarray,
        value: np.ndarray,
        run: np.ndarray,
        tiles: np.ndarray,
        tokens: np.ndarray,
    ) -> tuple[np.ndarray, ...]:
        """Partial packs [packs, samples] with one more sample that comes no earlier in order."""
        place = np.arange(len(self._values))
        last = members[:, -1] if members.shape[1] else np.full(len(members), -1)
        may = place > last[:, None]
        again = np.flatnonzero((last >= 0) & (run < self._counts[last]))
        may[again, last[again]] = True
        tiles_after, tokens_after = tiles[:, None] - self._tiles, tokens[:, None] - self._tokens
        may &= (tiles_after >= 0) & (tokens_after >= 0)
        row, added = np.nonzero(may)
        tiles, tokens = tiles_after[row, added], tokens_after[row, added]
        worth = value[row] + self._values[added]
        kept = worth + self._best._rest(self._priced, tiles, tokens) > self._enough
        row, added, tiles, tokens = row[kept], added[kept], tiles[kept], tokens[kept]
        worth = worth[kept]
        longer = np.concatenate([members[row], added[:, None].astype(np.int32)], axis=1)
        runs = np.where(added == last[row], run[row] + 1, 1)
        as_it_is = worth + self._priced.filler_price * tokens
        if len(worth):
            self._most = max(self._most, float(as_it_is.max()))
        self.found += list(longer[worth > self._enough])
        return longer, worth, runs, tiles, tokens
