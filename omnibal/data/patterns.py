"""Patterns: which sizes of samples go together in a pack, found by column generation.

Shared by the `balanced` packing and by the proven lower bound. A pattern says how many samples of
each size a pack holds; the master problem chooses how often each pattern is used so that all
samples are covered by the fewest packs, and the knapsack finds patterns that would help it (Gilmore
and Gomory, Operations Research 9, 1961, and 11, 1963; here with two capacities). Any values of the
rows prove a bound (Farley, Operations Research 38, 1990). The cost depends on the number of sizes
and not of samples.

Items are the sizes that patterns are made of, rows are what the master covers; an item may count
for several rows in parts. A knapsack's table is [tile units + 1, token units + 1].
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from omnibal.limits import Caps

_MAX_CELLS = 1 << 17
"""Most cells of a knapsack table: in float64 it fits into a core's second-level cache."""
_MAX_TILE_UNITS = 512
_MIN_IMPROVEMENT = 1e-7
_EMPTY = 1e-12
_MORE_PACKS = 2e-4
"""Share of packs that being mixed may cost."""
_MAX_RANDOM = 1200
_BLENDS = (0.1, 0.5, 0.9)
"""Shares of the tiles in the first guesses of what samples are worth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Capacities of the knapsack in whole units, so that its table stays small."""

    tile_unit: int
    token_unit: int
    tiles: int
    """Tile capacity in units."""
    tokens: int
    """Token capacity in units."""

    @classmethod
    def of(cls, max_tiles: int, max_tokens: int, max_cells: int = _MAX_CELLS) -> "Grid":
        """The finest grid of at most about `max_cells` cells."""
        tile_unit = -(-max_tiles // _MAX_TILE_UNITS) if max_tiles else 1
        tiles = max_tiles // tile_unit
        token_unit = max(1, -(-max_tokens * (tiles + 1) // max_cells))
        return cls(
            tile_unit=tile_unit,
            token_unit=token_unit,
            tiles=tiles,
            tokens=max_tokens // token_unit,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SizeTypes:
    """Samples grouped by size: equal tiles and similar tokens, sorted by (tiles, tokens)."""

    members: np.ndarray
    """Sample indices, type by type, int64 [samples]."""
    bounds: np.ndarray
    """Bounds of the types, int64 [types + 1]; type k has members[bounds[k]:bounds[k + 1]]."""
    tiles: np.ndarray
    """Tiles of every type, int64 [types]."""
    mean_tokens: np.ndarray
    """Mean tokens of every type, float64 [types]."""

    def __len__(self) -> int:
        return len(self.tiles)

    @property
    def counts(self) -> np.ndarray:
        """Samples of every type, int64 [types]."""
        return np.diff(self.bounds)


def group_sizes(tiles: np.ndarray, tokens: np.ndarray, max_types: int) -> SizeTypes:
    """Group samples into at most `max_types` types (or as many as there are tile counts).

    Starting from one type per tile count, the type whose tokens spread most is split at their mean,
    again and again. The spread is the count times the standard deviation to the power 1.5, which is
    between what matters for many samples (1) and for a few long ones (2).
    """
    order = np.argsort(tiles.astype(np.int64) << 32 | tokens, kind="stable")
    sorted_tiles, sorted_tokens = tiles[order], tokens[order].astype(np.int64)
    sums = np.concatenate([[0], np.cumsum(sorted_tokens)])
    # Floats, as squares of a million tokens overflow int64 with some millions of samples.
    squares = np.concatenate([[0], np.cumsum(sorted_tokens.astype(np.float64) ** 2)])

    def candidate(first: int, last: int) -> tuple[float, int, int, int]:
        count = last - first
        mean = (sums[last] - sums[first]) / count
        middle = first + int(np.searchsorted(sorted_tokens[first:last], mean, side="right"))
        variance = max((squares[last] - squares[first]) / count - mean**2, 0.0)
        return -count * variance**0.75, first, last, middle

    edges = np.flatnonzero(np.diff(sorted_tiles, prepend=-1, append=-1)).tolist()
    heap = [candidate(first, last) for first, last in pairwise(edges)]
    heapq.heapify(heap)
    while len(heap) < max_types and sorted_tokens[heap[0][1]] < sorted_tokens[heap[0][2] - 1]:
        _, first, last, middle = heapq.heappop(heap)
        heapq.heappush(heap, candidate(first, middle))
        heapq.heappush(heap, candidate(middle, last))
    bounds = np.array([*sorted(first for _, first, _, _ in heap), len(order)])
    return SizeTypes(
        members=order,
        bounds=bounds,
        tiles=sorted_tiles[bounds[:-1]].astype(np.int64),
        mean_tokens=np.diff(sums[bounds]) / np.diff(bounds),
    )


def knapsack_table(
    values: np.ndarray,
    tiles: np.ndarray,
    tokens: np.ndarray,
    grid: Grid,
    counts: np.ndarray | None = None,
) -> np.ndarray:
    """Highest value that fits within every pair of capacities.

    Args:
        values: float64 [items]; items of no value are never taken.
        tiles, tokens: int64 [items], sizes in units of the grid; no item may be of size (0, 0).
        counts: int64 [items], copies that there are of each item; without it, any number.

    Returns:
        float64 [grid.tiles + 1, grid.tokens + 1].
    """
    table = np.zeros((grid.tiles + 1, grid.tokens + 1))
    most = np.full(len(values), np.iinfo(np.int64).max) if counts is None else counts
    for value, item_tiles, item_tokens, left in zip(
        values.tolist(), tiles.tolist(), tokens.tolist(), most.tolist(), strict=True
    ):
        copies = 1
        # Doubling: after trying 1, 2, 4, ... copies and the last few, any number was tried.
        while (
            value > 0
            and left > 0
            and copies * item_tiles <= grid.tiles
            and copies * item_tokens <= grid.tokens
        ):
            below = table[copies * item_tiles :, copies * item_tokens :]
            kept = table[: len(below), : below.shape[1]] + copies * value
            np.maximum(below, kept, out=below)
            left -= copies
            copies = min(2 * copies, left)
    return table


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Items:
    """Sizes that patterns are made of, in units of a grid, and what they count for."""

    grid: Grid
    tiles: np.ndarray
    """Tiles of every item in grid units, int64 [items]."""
    tokens: np.ndarray
    """Tokens of every item in grid units, int64 [items]; none is of size (0, 0), each fits
    alone."""
    cover: sparse.csr_array
    """Amount that one sample of each item covers of every row, float64 [items, rows]."""
    row: np.ndarray
    """Row that each item mainly covers, int64 [items]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mix:
    """Columns that together cover a demand, fractionally."""

    columns: np.ndarray
    """Amount that one pack of each column covers, float64 [columns, rows]."""
    times: np.ndarray
    """Number of times that each column is used, float64 [columns]."""
    values: np.ndarray
    """Value of each row in packs, float64 [rows]: no pack of items is worth more than 1."""
    packs: float
    """Sum of the times."""
    bound: float
    """No fractional covering by such items has fewer packs (Farley 1990)."""


def generate_mix(
    items: Items,
    demand: np.ndarray,
    columns: np.ndarray,
    guesses: np.ndarray,
    trim: Callable[[np.ndarray], np.ndarray],
    *,
    max_rounds: int,
    max_new_columns: int,
    tolerance: float,
) -> Mix:
    """Cover a demand by the least number of packs, by column generation.

    Args:
        items: of which new columns are made.
        demand: float64 [rows].
        columns: float64 [columns, rows], which can already cover the demand.
        guesses: float64 [guesses, rows], values to start from.
        trim: makes new patterns [patterns, items] what packs can hold.
        max_rounds: of pricing, after the guesses.
        max_new_columns: in each round.
        tolerance: relative distance between packs and bound at which to stop.
    """
    bound, best_values = 0.0, np.zeros(len(demand))

    def price(values: np.ndarray) -> np.ndarray:
        nonlocal bound, best_values
        most, patterns = _price(items, values, max_new_columns)
        if values @ demand > bound * most:
            bound, best_values = float(values @ demand / most), values / most
        return trim(patterns) @ items.cover

    for guess in guesses:
        columns = _with_new(columns, price(guess))
    master = solve_master(columns, demand)
    for _ in range(max_rounds):
        # Packs come in whole numbers, so the bound rounded up may be all there is to prove.
        if bound >= master.packs * (1 - tolerance) or np.ceil(bound) >= master.packs:
            break
        found = price(master.values)
        improved = _with_new(columns, found[found @ master.values > 1 + _MIN_IMPROVEMENT])
        if len(improved) == len(columns):
            break
        columns = improved
        master = solve_master(columns, demand)
    used = master.times > _EMPTY
    return Mix(
        columns=columns[used],
        times=master.times[used],
        values=best_values,
        packs=master.packs,
        bound=bound,
    )


def mixed_alike(mix: Mix, demand: np.ndarray, random: np.ndarray, kind: np.ndarray) -> Mix:
    """Replace patterns by ones that are as mixed as possible, for hardly more packs.

    The patterns of a master's solution are extreme: some packs hold samples of one kind alone. Of
    the patterns that are worth a whole pack, those are used that deviate least from the mean of all
    packs, by the sum over the kinds of squared deviation over mean (chi-squared).

    Args:
        mix: of the fewest packs.
        demand: float64 [rows].
        random: float64 [columns, rows], more columns, as random packs have them.
        kind: int64 [rows], from 0 without gaps.
    """
    worth_a_pack = random[random @ mix.values >= 1 - _MORE_PACKS]
    columns = _with_new(mix.columns, worth_a_pack[:_MAX_RANDOM])
    of_kind = sparse.csr_array((np.ones(len(kind)), (np.arange(len(kind)), kind)))
    mean = demand @ of_kind / mix.packs
    solution = linprog(
        ((columns @ of_kind - mean) ** 2 / mean).sum(axis=1),
        A_ub=sparse.csr_array(np.vstack([-columns.T, np.ones(len(columns))])),
        b_ub=np.append(-demand, mix.packs * (1 + _MORE_PACKS)),
        method="highs-ds",
    )
    if not solution.success:  # the mix itself is a solution, but tolerances may hide it
        return mix
    used = solution.x > _EMPTY
    return replace(mix, columns=columns[used], times=solution.x[used])


def _with_new(columns: np.ndarray, found: np.ndarray) -> np.ndarray:
    """The columns, and those found that are not among them."""
    new = {row.tobytes(): row for row in found}
    for row in columns:
        new.pop(row.tobytes(), None)
    return np.concatenate([columns, np.array(list(new.values())).reshape(-1, columns.shape[1])])


def _price(items: Items, values: np.ndarray, max_patterns: int) -> tuple[float, np.ndarray]:
    """The most that a pack can be worth, and for the rows where it is most the best patterns.

    Args:
        values: of the rows.

    Returns:
        The worth, and int64 [patterns, items].
    """
    item_values = items.cover @ values
    table = knapsack_table(item_values, items.tiles, items.tokens, items.grid)
    tiles_left, tokens_left = items.grid.tiles - items.tiles, items.grid.tokens - items.tokens
    worth = item_values + table[tiles_left, tokens_left]
    by_row = np.lexsort((-worth, items.row))
    best_of_row = by_row[np.diff(items.row[by_row], prepend=-1) > 0]
    most_first = np.argsort(-worth[best_of_row], kind="stable")[:max_patterns]
    forced = best_of_row[most_first]
    return float(table[-1, -1]), best_patterns(table, item_values, items, forced)


def best_patterns(
    table: np.ndarray, values: np.ndarray, items: Items, forced: np.ndarray
) -> np.ndarray:
    """The most valuable pattern that holds item forced[i], for every i: int64 [forced, items].

    Args:
        table: of `knapsack_table` for the same values and items.
        values: float64 [items].
        forced: int64, items.
    """
    counts = np.zeros((len(forced), len(values)), np.int64)
    counts[np.arange(len(forced)), forced] = 1
    tiles_left = items.grid.tiles - items.tiles[forced]
    tokens_left = items.grid.tokens - items.tokens[forced]
    useful = np.flatnonzero(values > 0)
    rows = np.flatnonzero(table[tiles_left, tokens_left] > _EMPTY)
    while len(rows):
        tiles_after = tiles_left[rows][:, None] - items.tiles[useful]
        tokens_after = tokens_left[rows][:, None] - items.tokens[useful]
        fits = (tiles_after >= 0) & (tokens_after >= 0)
        rest = table[np.maximum(tiles_after, 0), np.maximum(tokens_after, 0)]
        item = useful[np.where(fits, rest + values[useful], -1.0).argmax(axis=1)]
        copies = _copies(table, values, items, item, tiles_left[rows], tokens_left[rows])
        counts[rows, item] += copies
        tiles_left[rows] -= copies * items.tiles[item]
        tokens_left[rows] -= copies * items.tokens[item]
        rows = rows[table[tiles_left[rows], tokens_left[rows]] > _EMPTY]
    return counts


def _copies(
    table: np.ndarray,
    values: np.ndarray,
    items: Items,
    item: np.ndarray,
    tiles_left: np.ndarray,
    tokens_left: np.ndarray,
) -> np.ndarray:
    """Number of copies of item[i] to take at once, a power of two: int64 [rows].

    One is known to be in a best pattern. As many are taken as lose no value, since a pack of
    thousands of small samples would take as many rounds of one.
    """
    best = table[tiles_left, tokens_left]
    copies = np.ones(len(item), np.int64)
    grows = np.ones(len(item), bool)
    while grows.any():
        tried = 2 * copies
        tiles_after = tiles_left - tried * items.tiles[item]
        tokens_after = tokens_left - tried * items.tokens[item]
        grows &= (tiles_after >= 0) & (tokens_after >= 0)
        rest = table[np.maximum(tiles_after, 0), np.maximum(tokens_after, 0)]
        grows &= tried * values[item] + rest >= best - _EMPTY
        copies[grows] = tried[grows]
    return copies


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Master:
    """Solution of the covering problem: least sum of x with columns.T @ x >= demand, x >= 0."""

    times: np.ndarray
    """Solution x: number of times that each column is used, float64 [columns]."""
    values: np.ndarray
    """Dual value of every row, float64 [rows]."""
    packs: float


def solve_master(columns: np.ndarray, demand: np.ndarray) -> Master:
    """Solve the master problem for columns [columns, rows] and demand [rows]."""
    solution = linprog(
        np.ones(len(columns)),
        A_ub=sparse.csr_array(-columns.T),
        b_ub=-demand,
        method="highs-ds",
    )
    if not solution.success:
        raise RuntimeError(f"the master problem was not solved: {solution.message}")
    return Master(
        times=solution.x, values=np.maximum(-solution.ineqlin.marginals, 0), packs=solution.fun
    )


def first_guesses(tiles: np.ndarray, tokens: np.ndarray, caps: Caps) -> np.ndarray:
    """Values [guesses, sizes] that blend what part of each cap a size [sizes] takes."""
    tile_share, token_share = tiles / caps["tiles"], tokens / caps["tokens"]
    return np.array([blend * tile_share + (1 - blend) * token_share for blend in _BLENDS])


def most_copies(items: Items) -> np.ndarray:
    """Number of copies of every item that fit into one pack [items]."""
    by_tiles = items.grid.tiles // np.maximum(items.tiles, 1)
    by_tokens = items.grid.tokens // np.maximum(items.tokens, 1)
    most = np.where(items.tiles > 0, by_tiles, by_tokens)
    return np.where(items.tokens > 0, np.minimum(most, by_tokens), most)
