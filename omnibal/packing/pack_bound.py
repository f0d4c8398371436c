"""Proven lower bound on the number of packs under the caps, for any packing.

If no pack is worth more than 1, the total value of samples bounds the number of packs. Values are
duals of column generation, piecewise linear in tokens so that the master has a row per knot and not
per size, fitted to the knots, then to all sizes in a coarse and a fine grid.

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
    Grid,
    Items,
    SizeTypes,
    first_guesses,
    generate_mix,
    group_sizes,
    most_copies,
)

_TYPES, _MORE_TYPES, _MOST_TYPES = 112, 250, 500
"""Sample types, with two knots each: at first, if a gap remains, and if it remains for a million
samples (a minute). Without correlation of tiles and tokens the gaps are 4 %, 1.5 % and 0.6 %."""
_GAP = 0.005
"""Gap in share of packs, beyond 1 pack, above which a finer bound is tried."""
_KNOT_ROUNDS = 40  # with values at the knots alone
_COARSE_ROUNDS = 30  # on a coarse grid
_FINE_ROUNDS = 3  # on the fine grid
_COARSE_WORK = 1.5e8  # see _FINE_WORK, on the coarse grid
_FINE_WORK = 1.5e9
"""Table cells times sizes per pricing round, which sets the grid."""
_MAX_CELLS = 1 << 19  # of a table
_TOLERANCE = 2e-4  # relative gap to end column generation
_CLOSE = 1e-3
"""Relative distance to the fit on the knots to stop refinement."""
_NEW_COLUMNS = 128  # per round
_ROUNDING = 1e-9
"""Relative error bound of float sums."""
_MAX_GROUPED = 1_000_000
"""Max samples used to find knots; more find the same."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SizeCounts:
    """Distinct sizes in lexicographic order, with counts."""

    amounts: np.ndarray
    """int64 [features, sizes]."""
    counts: np.ndarray
    """int64 [sizes]."""

    def __len__(self) -> int:
        return len(self.counts)

    @classmethod
    def of(cls, sizes: np.ndarray) -> "SizeCounts":
        """Count samples of sizes int64 [features, samples]."""
        _, first, counts = np.unique(size_keys(sizes), return_index=True, return_counts=True)
        return cls(amounts=sizes[:, first], counts=counts)

    @classmethod
    def join(cls, parts: Iterable["SizeCounts"]) -> "SizeCounts":
        """Join the counts of at least 1 part."""
        every = list(parts)
        amounts = np.concatenate([part.amounts for part in every], axis=1)
        counts = np.concatenate([part.counts for part in every])
        _, first, place = np.unique(size_keys(amounts), return_index=True, return_inverse=True)
        totals = np.bincount(place, weights=counts).astype(np.int64)  # exact below 2**53
        return cls(amounts=amounts[:, first], counts=totals)

    @property
    def sums(self) -> np.ndarray:
        """Feature sums over all samples, int64 [features]."""
        return self.amounts @ self.counts

    def of_features(self, rows: list[int]) -> "SizeCounts":
        """Counts by some of the features."""
        return SizeCounts.join([SizeCounts(amounts=self.amounts[rows], counts=self.counts)])

    def in_common_units(self, caps: np.ndarray) -> tuple["SizeCounts", np.ndarray]:
        """Sizes and caps [features], divided by each feature's GCD."""
        units = np.maximum(np.gcd.reduce(self.amounts, axis=1), 1)
        alike = SizeCounts(amounts=self.amounts // units[:, None], counts=self.counts)
        return alike, np.maximum(caps // units, 1)

    def thinned(self, most: int) -> np.ndarray:
        """Sizes [features, samples] of about `most` samples in proportion, at least 1 per size."""
        copies = -(-self.counts * most // max(int(self.counts.sum()), most))
        return np.repeat(self.amounts, copies, axis=1)


def packs_lower_bound(lengths: Lengths, caps: Caps, *, found: int | None = None) -> int:
    """Max of the naive lower bound and column generation's.

    `found` packs of a known packing end the search if optimal, and refine it if the gap is large.
    """
    check_samples_fit(lengths, caps)
    return bound_of_counts(SizeCounts.of(lengths.sizes(caps.names)), caps, found=found)


def bound_of_counts(sizes: SizeCounts, caps: Caps, *, found: int | None = None) -> int:
    """Lower bound on the packs of samples counted by size, in the caps' features and order.

    If it is far below `found` packs of a known packing, a finer bound is tried.
    """
    sizes, units = sizes.in_common_units(caps.values)
    naive = int((-(-sizes.sums // units)).max())
    return naive if found == naive else max(naive, _by_pairs(sizes, units, found))


def _by_pairs(sizes: SizeCounts, caps: np.ndarray, found: int | None) -> int:
    """Lower bound with tokens and a single kind of items at a time."""
    pairs = [[kind, -1] for kind in range(len(caps) - 1)] or [[-1]]
    bound = 0
    most = [_MOST_TYPES] if sizes.counts.sum() >= _MAX_GROUPED else []
    for types in (_TYPES, _MORE_TYPES, *most):
        for pair in pairs:
            distinct = sizes.of_features(pair)
            some = distinct.thinned(_MAX_GROUPED)
            proven = _bound_by_values(distinct, some, caps[pair], types)
            bound = max(bound, int(np.ceil(proven * (1 - _ROUNDING))))
        if found is None or found <= bound + max(1, _GAP * bound):
            break
    return bound


def naive_lower_bound(lengths: Lengths, caps: Caps) -> int:
    """Lower bound from the total of every limited feature."""
    return packs_of_sums(*in_common_units(lengths, caps))


def packs_of_sums(sizes: np.ndarray, caps: np.ndarray) -> int:
    """Lower bound from the sums of sizes [features, samples]."""
    return int((-(-sizes.sum(axis=1) // caps)).max())


def _bound_by_values(distinct: SizeCounts, some: np.ndarray, caps: np.ndarray, types: int) -> float:
    """Lower bound by fitted values, of sizes with tokens and at most 1 more feature.

    `some` are sizes to find knots on, with all distinct sizes, int64 [features, samples].
    """
    knots = _Knots.of(group_sizes(some, types), some)
    cover = knots.weights(distinct.amounts)
    used = np.minimum(caps, distinct.sums)
    # A pack per knot suffices, so the master always has a solution.
    alone = np.eye(len(knots))
    # Knots in place of all sizes: good enough to fit values, but no proof.
    few = Items.with_own_rows(Grid.of(used), knots.points[:-1], knots.points[-1])
    fitted = generate_mix(
        few,
        distinct.counts @ cover,
        np.diag(most_copies(few.sizes, few.grid)).astype(np.float64),
        first_guesses(knots.points, caps),
        _keep_all,
        max_rounds=_KNOT_ROUNDS,
        max_new_columns=len(knots),
        tolerance=_TOLERANCE,
    )
    bound, values = 0.0, fitted.values
    for work, rounds in ((_COARSE_WORK, _COARSE_ROUNDS), (_FINE_WORK, _FINE_ROUNDS)):
        proven = generate_mix(
            *_all_items(distinct, cover, used, work),
            np.concatenate([alone, fitted.columns]),
            values[None],
            _keep_all,
            max_rounds=rounds,
            max_new_columns=_NEW_COLUMNS,
            tolerance=_TOLERANCE,
        )
        bound, values = max(bound, proven.bound), proven.values
        if bound >= fitted.packs * (1 - _CLOSE):
            break
    return bound


def _keep_all(patterns: np.ndarray) -> np.ndarray:
    return patterns


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Knots:
    """Interpolation points of values, sorted lexicographically."""

    points: np.ndarray
    """Size of each knot, int64 [features, knots]."""

    def __len__(self) -> int:
        return self.points.shape[1]

    @classmethod
    def of(cls, types: SizeTypes, sizes: np.ndarray) -> "_Knots":
        """Knots at min and max tokens of each type, from sizes [features, samples]."""
        ends = types.members[np.concatenate([types.bounds[:-1], types.bounds[1:] - 1])]
        return cls(points=np.unique(sizes[:, ends], axis=1))

    def weights(self, sizes: np.ndarray) -> sparse.csr_array:
        """Weights float64 [sizes, knots] to interpolate sizes [features, sizes]. Rows sum to 1."""
        # The largest size with equal items is a knot.
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


def _all_items(
    distinct: SizeCounts, cover: sparse.csr_array, caps: np.ndarray, work: float
) -> tuple[Items, np.ndarray]:
    """All sizes rounded down to a grid (at their mean value, without zeros), and demand [rows]."""
    cells = min(max(work / len(distinct), work**0.5), _MAX_CELLS)
    grid = Grid.of(caps, int(cells))
    rounded = distinct.amounts // grid.units[:, None]
    _, first, item = np.unique(size_keys(rounded), return_index=True, return_inverse=True)
    sizes = rounded[:, first]
    of_item = sparse.csr_array((distinct.counts, (item, np.arange(len(distinct)))))
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
