"""Proven lower bound on the number of packs under the caps, for any packing.

If no pack is worth more than 1, the samples' total value is a lower bound. Values are duals of
column generation, piecewise linear in tokens, so that the master has a row per knot, not per size.
They are fitted to the knots, then to all sizes on a coarse and a fine grid.

The bound is valid because values are divided by the max worth of a pack over all distinct sizes,
rounded down to the grid, which can only overstate it (Farley 1990). Several kinds of items are
bounded separately, each with tokens: dropping caps can only need fewer packs.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from omnibal.data.lengths import Lengths
from omnibal.model.limits import Caps
from omnibal.packing.fit import check_samples_fit, in_common_units, size_keys
from omnibal.packing.patterns import (
    CapGrid,
    Items,
    SizeTypes,
    count_copies,
    first_guesses,
    generate_mix,
    group_similar_sizes,
)

# Sample types, with two knots each: at first, if a gap remains, and if it remains for a million
# samples (a minute). Without correlation of tiles and tokens the gaps are 4 %, 1.5 % and 0.6 %.
_TYPES, _MORE_TYPES, _MAX_TYPES = 112, 250, 500
_GAP = 0.005  # share of the bound; a gap above it and above 1 pack has a finer bound tried
_KNOT_ROUNDS = 40  # with values at the knots alone
_COARSE_ROUNDS = 30  # on a coarse grid
_FINE_ROUNDS = 3  # on the fine grid
_COARSE_WORK = 1.5e8  # see _FINE_WORK, on the coarse grid
_FINE_WORK = 1.5e9  # table cells times sizes per pricing round, which sets the grid
_MAX_BOUND_CELLS = 1 << 19  # of a table
_CLOSE = 1e-3  # relative distance to the fit on the knots to stop refinement
_NEW_COLUMNS = 128  # per round
_SUM_ROUNDING = 1e-9  # relative error bound of float sums
_MAX_GROUPED = 1_000_000  # max samples used to find knots; more find the same


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SizeCounts:
    """Distinct sizes in lexicographic order, with counts."""

    amounts: np.ndarray  # int64 [features, sizes]
    counts: np.ndarray  # int64 [sizes]

    def __len__(self) -> int:
        return len(self.counts)

    @classmethod
    def from_sizes(cls, sizes: np.ndarray) -> "SizeCounts":
        """Count samples of sizes int64 [features, samples]."""
        _, first, counts = np.unique(size_keys(sizes), return_index=True, return_counts=True)
        return cls(amounts=sizes[:, first], counts=counts)

    @classmethod
    def join(cls, parts: Iterable["SizeCounts"]) -> "SizeCounts":
        """Add up the counts of at least 1 part."""
        parts = list(parts)
        amounts = np.concatenate([part.amounts for part in parts], axis=1)
        counts = np.concatenate([part.counts for part in parts])
        _, first, place = np.unique(size_keys(amounts), return_index=True, return_inverse=True)
        totals = np.bincount(place, weights=counts).astype(np.int64)  # exact below 2**53
        return cls(amounts=amounts[:, first], counts=totals)

    @property
    def sums(self) -> np.ndarray:
        """Feature sums over all samples, int64 [features]."""
        return self.amounts @ self.counts

    def of_features(self, rows: list[int]) -> "SizeCounts":
        """Return the counts of sizes in the features `rows` only."""
        return SizeCounts.join([SizeCounts(amounts=self.amounts[rows], counts=self.counts)])

    def in_common_units(self, caps: np.ndarray) -> tuple["SizeCounts", np.ndarray]:
        """Return sizes and caps [features], divided by each feature's GCD, caps rounded down."""
        units = np.maximum(np.gcd.reduce(self.amounts, axis=1), 1)
        alike = SizeCounts(amounts=self.amounts // units[:, None], counts=self.counts)
        return alike, np.maximum(caps // units, 1)

    def thin(self, samples: int) -> np.ndarray:
        """Return sizes [features, samples] of about `samples` samples, at least 1 per size."""
        copies = -(-self.counts * samples // max(int(self.counts.sum()), samples))
        return np.repeat(self.amounts, copies, axis=1)


def packs_lower_bound(lengths: Lengths, caps: Caps, *, found: int | None = None) -> int:
    """Return the larger lower bound of `naive_lower_bound` and column generation.

    Args:
        found: packs of a known packing. Ends the search if optimal, refines it if the gap is large.
    """
    check_samples_fit(lengths, caps)
    return bound_of_counts(SizeCounts.from_sizes(lengths.sizes(caps.names)), caps, found=found)


def bound_of_counts(sizes: SizeCounts, caps: Caps, *, found: int | None = None) -> int:
    """Return `packs_lower_bound` of sizes in the caps' features and order."""
    sizes, units = sizes.in_common_units(caps.values)
    naive = int((-(-sizes.sums // units)).max())
    if found == naive:
        return naive
    # Tokens and a single kind of items at a time: a table of two axes is fine enough.
    pairs = [[kind, -1] for kind in range(len(units) - 1)] or [[-1]]
    bound = 0
    most = [_MAX_TYPES] if sizes.counts.sum() >= _MAX_GROUPED else []
    for types in (_TYPES, _MORE_TYPES, *most):
        for pair in pairs:
            distinct = sizes.of_features(pair)
            proven = _bound_by_values(distinct, distinct.thin(_MAX_GROUPED), units[pair], types)
            bound = max(bound, int(np.ceil(proven * (1 - _SUM_ROUNDING))))
        if found is None or found <= bound + max(1, _GAP * bound):
            break
    return max(naive, bound)


def naive_lower_bound(lengths: Lengths, caps: Caps) -> int:
    """Return the max over limited features of ceil(total / cap), in common units."""
    return packs_of_sums(*in_common_units(lengths, caps))


def packs_of_sums(sizes: np.ndarray, caps: np.ndarray) -> int:
    """Return the max over features of ceil(sum / cap), for sizes [features, samples]."""
    return int((-(-sizes.sum(axis=1) // caps)).max())


def _bound_by_values(distinct: SizeCounts, some: np.ndarray, caps: np.ndarray, types: int) -> float:
    """Return the lower bound by fitted values, for tokens and at most 1 more feature.

    Args:
        some: sizes to find knots on, with all distinct sizes, int64 [features, samples].
        types: size types, with two knots each.
    """
    knots = _Knots.from_types(group_similar_sizes(some, types), some)
    cover = knots.weights(distinct.amounts)
    used = np.minimum(caps, distinct.sums)
    # A pack per knot suffices, so the master always has a solution.
    alone = np.eye(len(knots))
    # Knots in place of all sizes: good enough to fit values, but no proof.
    few = Items.with_own_rows(CapGrid.from_caps(used), knots.points[:-1], knots.points[-1])
    fitted = generate_mix(
        few,
        distinct.counts @ cover,
        np.diag(count_copies(few.sizes, few.grid)).astype(np.float64),
        first_guesses(knots.points, caps),
        lambda patterns: patterns,
        max_rounds=_KNOT_ROUNDS,
        max_new_columns=len(knots),
    )
    bound, values = 0.0, fitted.values
    for work, rounds in ((_COARSE_WORK, _COARSE_ROUNDS), (_FINE_WORK, _FINE_ROUNDS)):
        proven = generate_mix(
            *_round_to_grid(distinct, cover, used, work),
            np.concatenate([alone, fitted.columns]),
            values[None],
            lambda patterns: patterns,
            max_rounds=rounds,
            max_new_columns=_NEW_COLUMNS,
        )
        bound, values = max(bound, proven.bound), proven.values
        if bound >= fitted.packs * (1 - _CLOSE):
            break
    return bound


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Knots:
    """Interpolation points of values in tokens, sorted lexicographically."""

    points: np.ndarray  # size of each knot, int64 [features, knots]

    def __len__(self) -> int:
        return self.points.shape[1]

    @classmethod
    def from_types(cls, types: SizeTypes, sizes: np.ndarray) -> "_Knots":
        """Place knots at min and max tokens of each type, for sizes [features, samples]."""
        ends = types.members[np.concatenate([types.bounds[:-1], types.bounds[1:] - 1])]
        return cls(points=np.unique(sizes[:, ends], axis=1))

    def weights(self, sizes: np.ndarray) -> sparse.csr_array:
        """Return weights [sizes, knots] that interpolate sizes [features, sizes]; rows sum to 1."""
        # The largest size with equal items is a knot, so `upper` has the items of its size.
        keys = size_keys(np.concatenate([self.points, sizes], axis=1))
        upper = np.searchsorted(keys[: len(self)], keys[len(self) :])
        lower = np.maximum(upper - 1, 0)
        is_alike = (self.points[:-1, lower] == sizes[:-1]).all(axis=0)
        lower = np.where(is_alike, lower, upper)
        first, tokens = self.points[-1, lower], sizes[-1]
        width = self.points[-1, upper] - first
        share = np.divide(tokens - first, width, out=np.ones(len(tokens)), where=width > 0)
        index = np.arange(len(tokens))
        return sparse.csr_array(
            (
                np.concatenate([share, 1 - share]),
                (np.concatenate([index, index]), np.concatenate([upper, lower])),
            ),
            shape=(len(tokens), len(self)),
        )


def _round_to_grid(
    distinct: SizeCounts, cover: sparse.csr_array, caps: np.ndarray, work: float
) -> tuple[Items, np.ndarray]:
    """Return all sizes rounded down to a grid, as items of their mean value, and demand [rows]."""
    cells = min(max(work / len(distinct), work**0.5), _MAX_BOUND_CELLS)
    grid = CapGrid.from_caps(caps, int(cells))
    rounded = distinct.amounts // grid.units[:, None]
    _, first, item = np.unique(size_keys(rounded), return_index=True, return_inverse=True)
    sizes = rounded[:, first]
    of_item = sparse.csr_array((distinct.counts, (item, np.arange(len(distinct)))))
    # Sizes that round to zero fit any pack. Dropping them from the demand only lowers the bound.
    something = sizes.any(axis=0)
    of_item = of_item[something]
    total_cover = of_item @ cover
    items = Items(
        grid=grid,
        sizes=sizes[:, something],
        cover=sparse.csr_array(sparse.diags_array(1 / of_item.sum(axis=1)) @ total_cover),
        row=total_cover.argmax(axis=1),
    )
    return items, total_cover.sum(axis=0)
