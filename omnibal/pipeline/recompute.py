"""Candidate sets of recomputed layers per stage.

A set is a recompute count per kind of layer and level; kinds that differ only in P2P tensors form
one group, recomputed from the front (OmniBal, section on adaptive re-computation, recomputes from
the front). Memory never rises with a count (`MemoryTable.pass_bytes`), so bisection finds the
minimum of one group for every choice of all other groups. Dominated sets are dropped.

With several levels all *minimal* sets (no count can be lowered) are listed if few, else a grid.
Each grid cell also gets an *optimistic* set, which recomputes no more than any fitting set of the
cell and may not fit itself. With expert parallelism counts are equal at all levels, since packs of
all levels run in lockstep.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from omnibal.base.arrays import expand_ranges
from omnibal.model.units import UnitKind
from omnibal.pipeline.stage_memory import MemoryTable, fits_cap
from omnibal.pipeline.unit_runs import layer_kinds

_MAX_PEAK_ENTRIES = 4_000_000  # entries of [stages, passes] counted at once: about 100 MB
_ADDED_LAYERS = (1, 2, 4, 8)  # layer increments tried in one column around a set


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecomputeSets:
    """Sets of recomputed layers, sorted by stage, then by counts."""

    stage: np.ndarray  # index of the stage, [sets]
    layers: np.ndarray  # recomputed layers, [sets, levels * layer kinds]


LayerGroups = Sequence[tuple[int, ...]]  # indices of layer kinds with equal cost, in model order


def group_layers(kinds: Sequence[UnitKind]) -> LayerGroups:
    """Return the groups of layer kinds that differ only in P2P tensors."""
    layers = [kinds[index] for index in layer_kinds(kinds)]
    groups = (np.flatnonzero([other.is_like(kind) for other in layers]) for kind in layers)
    return list(dict.fromkeys(tuple(group.tolist()) for group in groups))


def sum_groups(groups: LayerGroups, layers: np.ndarray) -> np.ndarray:
    """Sum layers of kinds to groups. [..., groups]"""
    return np.stack([layers[..., group].sum(axis=-1) for group in groups], axis=-1)


def split_groups(groups: LayerGroups, held: np.ndarray, layers: np.ndarray) -> np.ndarray:
    """Split `layers` [..., groups] over the `held` [..., layer kinds], earliest first."""
    of_kinds = np.empty_like(held)
    for place, group in enumerate(groups):
        of_group = held[..., group]
        before = of_group.cumsum(axis=-1) - of_group  # layers of earlier kinds of the group
        of_kinds[..., group] = np.clip(layers[..., place, None] - before, 0, of_group)
    return of_kinds


def all_layers(kinds: Sequence[UnitKind], counts: np.ndarray, levels: int = 1) -> np.ndarray:
    """Return the layers of `counts` [..., kinds], repeated by level. [..., levels * kinds]"""
    return np.tile(counts * np.array([kind.is_layer for kind in kinds]), levels)


def count_peaks(table: MemoryTable, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
    """Return `MemoryTable.peak_bytes` of every stage, computed in chunks. [stages]"""
    at_once = max(_MAX_PEAK_ENTRIES // len(table.working_bytes), 1)
    peaks = np.empty(len(counts))
    for first in range(0, len(counts), at_once):
        chunk = slice(first, first + at_once)
        peaks[chunk] = table.peak_bytes(counts[chunk], recomputed[chunk])
    return peaks


def bisect_min_fitting(
    fit: Callable[[np.ndarray, np.ndarray], np.ndarray], low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """Return the min numbers [n] in [low, high] that fit, or `high` if none, by bisection. `fit`
    maps indices and their numbers to whether they fit."""
    low, high = low.copy(), high.copy()
    while len(rows := np.flatnonzero(low < high)):
        middle = (low[rows] + high[rows]) // 2
        enough = fit(rows, middle)
        high[rows] = np.where(enough, middle, high[rows])
        low[rows] = np.where(enough, low[rows], middle + 1)
    return high


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LevelFit:
    """Possible stages, and the test of whether they fit with given recompute counts."""

    table: MemoryTable
    cap_bytes: float
    groups: LayerGroups
    counts: np.ndarray  # units, [stages, kinds]
    held: np.ndarray  # recomputable layers, by own set and group: [stages, columns]
    own_sets: int  # number of levels with their own sets, or 1 if all levels share one

    @classmethod
    def build(
        cls,
        table: MemoryTable,
        counts: np.ndarray,
        memory_cap_bytes: float,
        *,
        same_at_levels: bool = False,
    ) -> "LevelFit":
        """Return the test for stages `counts`; `same_at_levels` has one set for all levels."""
        groups = group_layers(table.kinds)
        own_sets = 1 if same_at_levels else table.levels
        return cls(
            table=table,
            cap_bytes=memory_cap_bytes,
            groups=groups,
            counts=counts,
            held=np.tile(sum_groups(groups, counts[:, layer_kinds(table.kinds)]), own_sets),
            own_sets=own_sets,
        )

    def holds(self, stage: np.ndarray, layers: np.ndarray) -> np.ndarray:
        """Return whether stages [n] fit with recomputed `layers` [n, columns]. [n]"""
        counts, levels = self.counts[stage], self.table.levels
        recomputed = np.zeros((len(stage), levels, counts.shape[1]), np.int64)
        kinds = layer_kinds(self.table.kinds)
        # Sizes instead of -1, as there may be no stages.
        of_kinds = self.of_kinds(stage, layers).reshape(len(stage), levels, len(kinds))
        recomputed[..., kinds] = of_kinds
        recomputed = recomputed.reshape(len(stage), levels * counts.shape[1])
        return fits_cap(count_peaks(self.table, counts, recomputed), self.cap_bytes)

    def of_kinds(self, stage: np.ndarray, layers: np.ndarray) -> np.ndarray:
        """Return `layers` [n, columns] of stages [n] by kind. [n, levels * layer kinds]"""
        held = self.counts[stage][:, None, layer_kinds(self.table.kinds)]
        of_groups = layers.reshape(len(stage), self.own_sets, len(self.groups))
        of_sets = split_groups(self.groups, np.repeat(held, self.own_sets, axis=1), of_groups)
        of_sets = of_sets.reshape(len(stage), self.own_sets * held.shape[-1])
        return np.tile(of_sets, self.table.levels // self.own_sets)

    def of_groups(self, layers: np.ndarray) -> np.ndarray:
        """Return layers of kinds [sets, levels * layer kinds] by column. [sets, columns]"""
        of_levels = layers.reshape(len(layers), self.table.levels, -1)
        return sum_groups(self.groups, of_levels[:, : self.own_sets]).reshape(len(layers), -1)

    def fewest(
        self,
        stage: np.ndarray,
        layers: np.ndarray,
        column: np.ndarray,
        low: np.ndarray,
        high: np.ndarray,
    ) -> np.ndarray:
        """Return the min layers of a column in [low, high] that fit, or `high` if none do. All are
        [n]; `layers` is [n, columns]."""
        layers = layers.copy()

        def fit(rows: np.ndarray, number: np.ndarray) -> np.ndarray:
            layers[rows, column[rows]] = number
            return self.holds(stage[rows], layers[rows])

        return bisect_min_fitting(fit, low, high)


def useful_sets(
    table: MemoryTable,
    counts: np.ndarray,
    extreme_ms: np.ndarray,
    memory_cap_bytes: float,
    max_sets: float = np.inf,
    *,
    same_at_levels: bool = False,
) -> tuple[RecomputeSets, RecomputeSets]:
    """Return sets of possible stages that fit, Pareto-minimal by time (none if a stage never fits),
    and optimistic sets that bound them: the same object if all minimal sets are included.

    Args:
        counts: [stages, kinds].
        extreme_ms: recompute times per layer, [extremes, levels * layer kinds]. Every micro-batch's
            times are a non-negative combination of these rows.
        max_sets: max grid cells per stage. If every cell is a point, all sets are included.
        same_at_levels: whether recomputed layers are equal at all levels.
    """
    if table.levels > 1 and not (table.others_kept_bytes.any() or same_at_levels):
        # Without other micro-batches in flight, levels do not share memory.
        combined = _combine_levels(table, counts, extreme_ms, memory_cap_bytes)
        if np.bincount(combined.stage, minlength=1).max() <= max_sets:
            return combined, combined
    fit = LevelFit.build(table, counts, memory_cap_bytes, same_at_levels=same_at_levels)
    stage = np.flatnonzero(fit.holds(np.arange(len(counts)), fit.held))
    held, low = fit.held[stage], np.zeros_like(fit.held[stage])
    held = high = np.where(fit.holds(stage, low)[:, None], 0, held)
    if max_sets < np.inf:
        # Min and max layers per column over all minimal sets: the min goes with all others
        # recomputed, the max with the fewest others.
        low = _minimize_columns(fit, stage, held, low, held)
        high = _minimize_columns(fit, stage, low, low, held)
    row, last, near, far = _split_boxes(low, high, max_sets)
    at_near, near_fits = _minimize_column(fit, stage[row], near, last, high[row])
    if (near == far).all():
        sets = _sort_sets(fit, stage[row][near_fits], at_near[near_fits], extreme_ms)
        return sets, sets
    at_far, far_fits = _minimize_column(fit, stage[row], far, last, high[row])
    rows = np.concatenate([row[near_fits], row[far_fits]])
    fitting = np.concatenate([at_near[near_fits], at_far[far_fits]])
    fitting = minimize_sets(fit, stage[rows], fitting, np.zeros(len(rows), np.int64))
    # Sets of a cell have at least the near corner's counts, and in the last column at least the min
    # found at the far corner.
    bounds = np.where(np.arange(far.shape[1]) == last[:, None], at_far, near)
    optimistic = _sort_sets(fit, stage[row][far_fits], bounds[far_fits], extreme_ms)
    return _sort_sets(fit, stage[rows], fitting, extreme_ms), optimistic


def _combine_levels(
    table: MemoryTable, counts: np.ndarray, extreme_ms: np.ndarray, memory_cap_bytes: float
) -> RecomputeSets:
    """Return all combinations of the levels' sets, if levels are never in flight together."""
    combined = RecomputeSets(
        stage=np.arange(len(counts)), layers=np.zeros((len(counts), 0), np.int64)
    )
    for level, of_level in enumerate(np.split(extreme_ms, table.levels, axis=1)):
        extremes = of_level[of_level.any(axis=1)]
        sets, _ = useful_sets(table.of_level(level), counts, extremes, memory_cap_bytes)
        # Sets are sorted by stage: repeat each combination for its stage's range of them.
        first = np.searchsorted(sets.stage, np.arange(len(counts) + 1))
        row, place = expand_ranges(first[combined.stage], np.diff(first)[combined.stage])
        layers = np.concatenate([combined.layers[row], sets.layers[place]], axis=1)
        combined = RecomputeSets(stage=combined.stage[row], layers=layers)
    return combined


def sets_near(fit: LevelFit, layers: np.ndarray) -> np.ndarray:
    """Return minimal sets near a fitting set of a single stage. [sets, levels * layer kinds]

    A few more layers of one column are recomputed, then all columns minimized, each first in turn.
    """
    layers = fit.of_groups(layers[None])[0]
    columns = len(layers)
    added = np.array([0, *_ADDED_LAYERS])
    column, number, first = (axis.ravel() for axis in np.indices((columns, len(added), columns)))
    sets = np.repeat(layers[None], len(column), axis=0)
    row = np.arange(len(sets))
    sets[row, column] = np.minimum(sets[row, column] + added[number], fit.held[0, column])
    minimal = np.unique(minimize_sets(fit, np.zeros_like(row), sets, first), axis=0)
    return fit.of_kinds(np.zeros(len(minimal), np.int64), minimal)


def _minimize_columns(
    fit: LevelFit, stage: np.ndarray, others: np.ndarray, low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """Return the min of each column that fits given `others`. [stages, columns]"""
    columns = [
        fit.fewest(stage, others, np.full(len(stage), c), low[:, c], high[:, c])
        for c in range(others.shape[1])
    ]
    return np.stack(columns, axis=1) if columns else others


def _split_boxes(
    low: np.ndarray, high: np.ndarray, max_sets: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Split boxes of sets, from `low` to `high` [boxes, columns], into at most `max_sets` cells
    each in all columns but the longest, which is minimized.

    Returns:
        Each cell's box and minimized column, [cells], and its min and max corners, [cells,
        columns]. They are equal if every cell is a point.
    """
    sides, boxes = high - low, np.arange(len(low))
    last = sides.argmax(axis=1)
    sides[boxes, last] = 0
    width, number = np.ones_like(sides), sides + 1
    # In float, as products of many columns exceed int64.
    while len(many := np.flatnonzero(number.prod(axis=1, dtype=np.float64) > max_sets)):
        width[many, number[many].argmax(axis=1)] *= 2
        number = sides // width + 1
    cells = number.prod(axis=1)
    box, place = expand_ranges(0 * boxes, cells)
    near = low[box]  # the cell's place in mixed radix, of `number` per column
    for column in reversed(range(low.shape[1])):
        place, step = np.divmod(place, number[box, column])
        near[:, column] += step * width[box, column]
    far = np.minimum(near + width[box] - 1, high[box])
    rows = np.arange(len(box))
    far[rows, last[box]] = near[rows, last[box]]
    return box, last[box], near, far


def _minimize_column(
    fit: LevelFit, stage: np.ndarray, layers: np.ndarray, column: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Minimize `column` [sets] between its `layers` and `high`, both [sets, columns], given the
    other columns of `layers`. Return the sets, and whether any number fits."""
    sets, row = layers.copy(), np.arange(len(stage))
    sets[row, column] = high[row, column]
    fits = fit.holds(stage, sets)
    some = stage[fits], sets[fits], column[fits]
    sets[row[fits], column[fits]] = fit.fewest(
        *some, layers[row, column][fits], sets[row, column][fits]
    )
    return sets, fits


def minimize_sets(
    fit: LevelFit, stage: np.ndarray, layers: np.ndarray, first: np.ndarray
) -> np.ndarray:
    """Return minimal sets [sets, columns] below fitting sets `layers` [sets, columns] of stages
    [sets], minimizing column `first` [sets] first."""
    layers, row = layers.copy(), np.arange(len(stage))
    none = np.zeros(len(stage), np.int64)
    columns = layers.shape[1]
    for turn in range(columns):
        column = (first + turn) % columns
        layers[row, column] = fit.fewest(stage, layers, column, none, layers[row, column])
    return layers


def _sort_sets(
    fit: LevelFit, stage: np.ndarray, layers: np.ndarray, extreme_ms: np.ndarray
) -> RecomputeSets:
    """Return sorted sets of `layers` [sets, columns], without dominated sets of each stage."""
    layers = fit.of_kinds(stage, layers)
    kept = pareto_minimal_sets(stage, layers @ extreme_ms.T)
    kept = kept[np.lexsort((*layers[kept].T[::-1], stage[kept]))]
    return RecomputeSets(stage=stage[kept], layers=layers[kept])


def pareto_minimal_sets(group: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Return indices of each group's Pareto-minimal `costs` [entries, costs], first of equals."""
    order = np.lexsort((*costs.T[::-1], group))
    minimal = []
    while len(order):
        # A group's first entry is dominated by no remaining entry.
        first = np.flatnonzero(np.diff(group[order], prepend=-1))
        leader = np.repeat(order[first], np.diff(np.append(first, len(order))))
        minimal.append(order[first])
        order = order[(costs[order] < costs[leader]).any(axis=1)]
    return np.concatenate(minimal) if minimal else order
