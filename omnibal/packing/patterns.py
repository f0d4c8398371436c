"""Patterns of sample sizes in a pack, by column generation.

A pattern is a number of samples per size. The master problem covers all samples with the fewest
packs; a multi-dimensional knapsack prices new patterns (Gilmore and Gomory, Operations Research 9,
1961, and 11, 1963). Any row values prove a lower bound (Farley, Operations Research 38, 1990).
Cost depends on the number of sizes, not samples.

Patterns consist of items, and every item covers one or more rows of the master, each by a share.
Features are coarse items such as tiles, then tokens. A knapsack table has an axis per feature.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from omnibal.packing.fit import size_keys

_MAX_TABLE_CELLS = 1 << 17  # max cells of a knapsack table: fits in the L2 cache as float64
_MAX_ITEM_CELLS = 512  # max cells of all features but tokens together
_MAX_ITEM_LEVELS = 40  # max distinct counts of a feature after rounding
_MAX_GAP = 2e-4  # max relative gap of packs to their bound that ends column generation
_MIN_IMPROVEMENT = 1e-7  # relative; less is rounding
_EMPTY = 1e-12  # smaller shares and values are rounding errors
_UNLIMITED = np.iinfo(np.int64).max
_MORE_PACKS = 2e-4  # max relative increase of packs by mixing
_MAX_RANDOM = 1200  # random packs added as columns
_FOLLOWING = 0.1  # total weight of all features but one in most first guesses


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CapGrid:
    """Caps of a pack in coarse units, so that a knapsack table is small."""

    units: np.ndarray  # amount per unit, int64 [features]
    cells: np.ndarray  # capacity in units, int64 [features]

    @classmethod
    def from_caps(cls, caps: np.ndarray, max_cells: int = _MAX_TABLE_CELLS) -> "CapGrid":
        """Return a grid of about `max_cells` cells or fewer, for caps [features], tokens last."""
        units = np.ones_like(caps)
        coarse_cells = 1
        smallest_first = np.argsort(caps[:-1], kind="stable").tolist()
        for rank, feature in enumerate(smallest_first):
            # An equal share of the cells left; small caps need fewer and leave more to larger caps.
            share = (_MAX_ITEM_CELLS / coarse_cells) ** (1 / (len(smallest_first) - rank))
            units[feature] = max(-(-int(caps[feature]) // max(int(share), 1)), 1)
            coarse_cells *= int(caps[feature] // units[feature]) + 1
        units[-1] = max(1, -(-int(caps[-1]) * coarse_cells // max_cells))
        return cls(units=units, cells=caps // units)

    def places(self, amounts: np.ndarray) -> np.ndarray:
        """Return indices [...] in the flat table, of amounts in units, int64 [features, ...]."""
        index = amounts[0]
        for cells, amount in zip(self.cells[1:].tolist(), amounts[1:], strict=True):
            index = index * (cells + 1) + amount
        return index


def limit_item_caps(caps: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Return caps [features], all but tokens at most the totals [features]: a smaller grid."""
    return np.append(np.minimum(caps, totals)[:-1], caps[-1])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SizeTypes:
    """Samples grouped by equal items and similar tokens, sorted by size."""

    members: np.ndarray  # sample indices by type, int64 [samples]
    bounds: np.ndarray  # int64 [types + 1]; type k has members[bounds[k]:bounds[k + 1]]
    items: np.ndarray  # size without tokens, int64 [features - 1, types]
    mean_tokens: np.ndarray  # float64 [types]

    def __len__(self) -> int:
        return len(self.mean_tokens)

    @property
    def counts(self) -> np.ndarray:
        return np.diff(self.bounds)


def group_similar_sizes(sizes: np.ndarray, max_types: int) -> SizeTypes:
    """Group samples into at most `max_types` types, or a type per distinct item counts if more.

    Repeatedly splits the type with the largest `count * std ** 1.5` of tokens at its mean. The
    exponent balances many samples (1) and a few long samples (2).
    """
    order = np.argsort(size_keys(sizes), kind="stable")
    *items, sorted_tokens = sizes.take(order, axis=1)
    sums = np.concatenate([[0], np.cumsum(sorted_tokens)])
    # Prefix sums. float64: squares of a million tokens overflow int64 with millions of samples.
    squares = np.concatenate([[0], np.cumsum(sorted_tokens.astype(np.float64) ** 2)])

    def candidate(first: int, last: int) -> tuple[float, int, int, int]:
        count = last - first
        mean = (sums[last] - sums[first]) / count
        middle = first + int(np.searchsorted(sorted_tokens[first:last], mean, side="right"))
        variance = max((squares[last] - squares[first]) / count - mean**2, 0.0)
        return -count * variance**0.75, first, last, middle  # variance**0.75 = std**1.5

    changes = [np.flatnonzero(np.diff(row)) + 1 for row in items]
    edges = np.unique(np.concatenate([[0], *changes, [len(order)]])).astype(int).tolist()
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
        items=sizes[:-1].take(order[bounds[:-1]], axis=1),
        mean_tokens=np.diff(sums[bounds]) / np.diff(bounds),
    )


def round_up_items(items: np.ndarray) -> np.ndarray:
    """Return item counts rounded up to few distinct counts, int64 [features - 1, samples]."""
    levels = _MAX_ITEM_LEVELS
    while True:
        rounded = items.copy()
        for row in rounded:
            if len(np.unique(row)) > levels:
                ends = np.unique(np.quantile(row, np.linspace(0, 1, levels), method="higher"))
                row[:] = ends[np.searchsorted(ends, row)]
        # Distinct combinations multiply with features, so every feature gets fewer counts.
        if len(items) <= 1 or len(np.unique(size_keys(rounded))) <= 2 * _MAX_ITEM_LEVELS:
            return rounded
        levels -= levels // 4


def knapsack_table(values: np.ndarray, sizes: np.ndarray, grid: CapGrid) -> np.ndarray:
    """Return the max value within every capacity, float64, with `cells + 1` per axis.

    Unbounded multi-dimensional knapsack by dynamic programming. Values are float64 [items], and
    items of value 0 are not taken. Sizes are int64 [features, items] in grid units, none all zero.
    """
    table = np.zeros(grid.cells + 1)
    columns = (values, sizes.T, count_copies(sizes, grid))
    for value, size, fitting in zip(*(column.tolist() for column in columns), strict=True):
        copies = 1
        # Adding 1, 2, 4, ... copies in turn reaches any number in log steps.
        while value > 0 and copies <= fitting:
            below = table[tuple(slice(copies * amount, None) for amount in size)]
            kept = table[tuple(map(slice, below.shape))] + copies * value
            np.maximum(below, kept, out=below)
            copies *= 2
    return table


def count_copies(sizes: np.ndarray, grid: CapGrid) -> np.ndarray:
    """Return how many copies of each size [features, sizes], in grid units, fit a pack, [sizes]."""
    by_feature = grid.cells[:, None] // np.maximum(sizes, 1)
    return np.where(sizes > 0, by_feature, _UNLIMITED).min(axis=0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Items:
    """Sizes that make up patterns, in grid units, and the rows they cover."""

    grid: CapGrid
    sizes: np.ndarray  # int64 [features, items]; not 0 in all features, and each fits alone
    cover: sparse.csr_array  # share of each row that a copy covers, float64 [items, rows]
    row: np.ndarray  # main row of each item, int64 [items]

    @classmethod
    def with_own_rows(cls, grid: CapGrid, items: np.ndarray, tokens: np.ndarray) -> "Items":
        """Return an item per row, from counts `items` [features - 1, items] and tokens [items]."""
        # Few item units per pack: rounding up keeps patterns feasible. Many token units per pack:
        # rounding to nearest averages out, and callers trim patterns above the cap.
        coarse = -(-items // grid.units[:-1, None])
        fine = np.rint(tokens / grid.units[-1]).astype(np.int64)
        sizes = np.minimum(np.vstack([coarse, np.maximum(fine, 1)]), grid.cells[:, None])
        row = np.arange(len(tokens))
        return cls(grid=grid, sizes=sizes, cover=sparse.eye_array(len(row), format="csr"), row=row)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mix:
    """Columns that fractionally cover a demand."""

    columns: np.ndarray  # coverage per pack, float64 [columns, rows]
    times: np.ndarray  # uses of each column, float64 [columns]
    values: np.ndarray  # dual value per row, float64 [rows]: no pack is worth more than 1
    packs: float  # sum of `times`, before `mix_alike`
    bound: float  # lower bound on fractional packs (Farley 1990)


def generate_mix(
    items: Items,
    demand: np.ndarray,
    columns: np.ndarray,
    guesses: np.ndarray,
    trim: Callable[[np.ndarray], np.ndarray],
    *,
    max_rounds: int,
    max_new_columns: int,
) -> Mix:
    """Cover a demand [rows] with the fewest fractional packs, by column generation.

    Args:
        columns: float64 [columns, rows] that can cover the demand.
        guesses: float64 [guesses, rows], row values to price before the first master.
        trim: reduces new patterns [patterns, items] above the token cap, or is the identity.
        max_rounds: rounds of pricing after the guesses.
        max_new_columns: columns added per guess or round.
    """
    bound, best_values = 0.0, np.zeros(len(demand))

    def price(values: np.ndarray) -> np.ndarray:
        nonlocal bound, best_values
        worth, patterns = _price_patterns(items, values, max_new_columns)
        # Farley's bound: values divided by the max worth of a pack are dual feasible.
        if values @ demand > bound * worth:
            bound, best_values = float(values @ demand / worth), values / worth
        return trim(patterns) @ items.cover

    for guess in guesses:
        columns = _append_new(columns, price(guess))
    master = solve_master(columns, demand)
    for _ in range(max_rounds):
        # Packs are whole, so stop when the rounded-up bound is reached.
        if bound >= master.packs * (1 - _MAX_GAP) or np.ceil(bound) >= master.packs:
            break
        priced = price(master.values)
        # A column improves the master if its reduced cost, 1 - worth, is negative.
        improved = _append_new(columns, priced[priced @ master.values > 1 + _MIN_IMPROVEMENT])
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


def mix_alike(mix: Mix, demand: np.ndarray, random: np.ndarray, kind: np.ndarray) -> Mix:
    """Return a mix of packs as alike in item counts as possible, with at most 0.02 % more packs.

    The master's solutions are extreme points: some packs hold a single kind. A linear program over
    the mix and random packs worth 1 minimizes their kinds' chi-squared distance from the mean.

    Args:
        random: columns of random packs, [columns, rows].
        kind: kind of every row, [rows]: 0 to `kinds - 1`, equal for equal item counts.
    """
    worth_a_pack = random[random @ mix.values >= 1 - _MORE_PACKS]
    columns = _append_new(mix.columns, worth_a_pack[:_MAX_RANDOM])
    of_kind = sparse.csr_array((np.ones(len(kind)), (np.arange(len(kind)), kind)))  # [rows, kinds]
    mean = demand @ of_kind / mix.packs
    solution = linprog(
        ((columns @ of_kind - mean) ** 2 / mean).sum(axis=1),
        A_ub=sparse.csr_array(np.vstack([-columns.T, np.ones(len(columns))])),
        b_ub=np.append(-demand, mix.packs * (1 + _MORE_PACKS)),
        method="highs-ds",
    )
    if not solution.success:  # not expected: the mix itself is feasible up to tolerances
        return mix
    used = solution.x > _EMPTY
    return replace(mix, columns=columns[used], times=solution.x[used])


def _append_new(columns: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    new = {row.tobytes(): row for row in candidates}
    for row in columns:
        new.pop(row.tobytes(), None)
    return np.concatenate([columns, np.array(list(new.values())).reshape(-1, columns.shape[1])])


def _price_patterns(
    items: Items, values: np.ndarray, max_patterns: int
) -> tuple[float, np.ndarray]:
    """Return the max worth of a pack, and the best pattern with each row, [patterns, items]."""
    item_values = items.cover @ values
    table = knapsack_table(item_values, items.sizes, items.grid)
    left = items.grid.cells[:, None] - items.sizes  # [features, items]
    best = table.ravel()
    worth = item_values + best[items.grid.places(left)]
    by_row = np.lexsort((-worth, items.row))
    best_of_row = by_row[np.diff(items.row[by_row], prepend=-1) > 0]
    most_first = np.argsort(-worth[best_of_row], kind="stable")[:max_patterns]
    forced = best_of_row[most_first]
    # A pattern with each row's best item: the overall best patterns are nearly identical.
    counts = np.zeros((len(forced), len(item_values)), np.int64)
    counts[np.arange(len(forced)), forced] = 1
    left = left[:, forced]
    useful = np.flatnonzero(item_values > 0)
    sizes, places = items.sizes[:, useful], items.grid.places(items.sizes[:, useful])
    rows = np.flatnonzero(best[items.grid.places(left)] > _EMPTY)
    # Trace the table back: take an item that loses no value, until free capacity has none.
    while len(rows):
        room = left.take(rows, axis=1)
        fits = np.ones((len(rows), len(useful)), bool)
        for free, needed in zip(room, sizes, strict=True):  # one feature at a time saves memory
            fits &= free[:, None] >= needed
        after = np.where(fits, items.grid.places(room)[:, None] - places, 0)
        worth = np.where(fits, best[after] + item_values[useful], -1.0)
        item = useful[worth.argmax(axis=1)]
        copies = _double_copies(best, item_values, items, item, room)
        counts[rows, item] += copies
        left[:, rows] -= copies * items.sizes[:, item]
        rows = rows[best[items.grid.places(left.take(rows, axis=1))] > _EMPTY]
    return float(table.flat[-1]), counts


def _double_copies(
    best: np.ndarray, values: np.ndarray, items: Items, item: np.ndarray, room: np.ndarray
) -> np.ndarray:
    """Return copies of item[i] to take at once, [rows]: the max power of 2 that loses no value."""
    # Single copies are slow for packs of thousands of samples.
    full_worth = best[items.grid.places(room)]
    size = items.sizes[:, item]
    copies = np.ones(len(item), np.int64)
    grows = np.ones(len(item), bool)
    while grows.any():
        tried = 2 * copies
        after = room - tried * size
        grows &= (after >= 0).all(axis=0)
        left_worth = best[items.grid.places(np.maximum(after, 0))]
        grows &= tried * values[item] + left_worth >= full_worth - _EMPTY
        copies[grows] = tried[grows]
    return copies


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Master:
    """Solution of the covering problem: min sum of x with columns.T @ x >= demand, x >= 0."""

    times: np.ndarray  # solution x, float64 [columns]
    values: np.ndarray  # dual values, float64 [rows]
    packs: float


def solve_master(columns: np.ndarray, demand: np.ndarray) -> Master:
    """Solve the master for columns [columns, rows], demand [rows]; raises RuntimeError."""
    solution = linprog(
        np.ones(len(columns)),
        A_ub=sparse.csr_array(-columns.T),
        b_ub=-demand,
        method="highs-ds",
    )
    if not solution.success:
        raise RuntimeError(f"the master problem was not solved: {solution.message}")
    return Master(
        # scipy's marginals of A_ub x <= b_ub are <= 0, up to rounding.
        times=solution.x,
        values=np.maximum(-solution.ineqlin.marginals, 0),
        packs=solution.fun,
    )


def first_guesses(sizes: np.ndarray, caps: np.ndarray) -> np.ndarray:
    """Return row values [guesses, sizes]: weighted shares of the caps, for [features, sizes].

    Tokens have most weight in the first guess, weights are equal in the second, and every other
    feature has most weight in a further guess.
    """
    features = len(caps)
    weights = np.full((features + 1, features), _FOLLOWING / max(features - 1, 1))
    weights[1] = 1 / features
    np.fill_diagonal(weights[2:], 1 - _FOLLOWING)
    weights[:, -1] = 1 - weights[:, :-1].sum(axis=1)
    return (weights[:, :, None] * (sizes / caps[:, None])).sum(axis=1)
