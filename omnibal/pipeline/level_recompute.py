"""Sets of layers that a stage may recompute at each of several levels, so that it fits.

Micro-batches of all levels are in flight together, so that layers recomputed at one level leave
room for another's. A set is a count of every kind of layer at every level, and the *least* sets are
those of which no count can be lower. How many these are grows with a power of the levels. Where
they are few, all of them are found; where they are many, a grid of them. Where data-parallel ranks
share out experts, packs of several levels run in lockstep, and a layer's exchange of tokens must be
repeated in all of them or in none: counts are then the same at all levels.

What a grid leaves out is bounded: of each of its cells one *optimistic* set is made, which
recomputes no more, of any kind at any level, than any set of the cell that fits. It may not fit.
"""

from dataclasses import dataclass

import numpy as np

from omnibal.pipeline.recompute import Alike, Cap, Recomputes, undominated_sets, useful_recomputes
from omnibal.pipeline.stage_memory import MemoryTable
from omnibal.pipeline.unit_runs import layer_kinds

_MORE = (1, 2, 4, 8)
"""Layers by which sets that are near to another differ from it in one column."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LevelRecomputes:
    """Sets that fit, and optimistic ones which bound all that fit."""

    fitting: Recomputes
    optimistic: Recomputes
    """Sets that bound all that fit; those that fit where `complete`."""
    complete: bool
    """Whether every least set is among those that fit."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LevelFit:
    """Stages, what they hold, and whether they fit with what they recompute."""

    cap: Cap
    alike: Alike
    counts: np.ndarray
    """Units, [stages, kinds]."""
    held: np.ndarray
    """Layers that can be recomputed of every group of alike kinds at every level, or at all levels
    together, [stages, columns]."""
    own_sets: int
    """Levels that have sets of their own: all, or 1 where they recompute the same layers."""

    @classmethod
    def of(
        cls,
        table: MemoryTable,
        counts: np.ndarray,
        memory_cap_bytes: float,
        *,
        same_at_levels: bool = False,
    ) -> "LevelFit":
        """Stages of these counts of units; `same_at_levels` for the same layers at all levels."""
        alike = Alike.of(table.kinds)
        own_sets = 1 if same_at_levels else table.levels
        return cls(
            cap=Cap.of(table, memory_cap_bytes),
            alike=alike,
            counts=counts,
            held=np.tile(alike.together(counts[:, layer_kinds(table.kinds)]), own_sets),
            own_sets=own_sets,
        )

    def holds(self, stage: np.ndarray, layers: np.ndarray) -> np.ndarray:
        """Whether stages [n] fit that recompute so many layers [n, columns]. [n]"""
        counts, levels = self.counts[stage], self.cap.table.levels
        recomputed = np.zeros((len(stage), levels, counts.shape[1]), np.int64)
        apart = self.of_kinds(stage, layers)
        kinds = layer_kinds(self.cap.table.kinds)
        recomputed[..., kinds] = apart.reshape(len(stage), levels, len(kinds))
        recomputed = recomputed.reshape(len(stage), levels * counts.shape[1])
        return self.cap.holds(counts, recomputed)

    def of_kinds(self, stage: np.ndarray, layers: np.ndarray) -> np.ndarray:
        """Layers of every kind at every level, of stages [n] that recompute so many of every group
        [n, columns]. [n, levels * layer kinds]"""
        held = self.counts[stage][:, None, layer_kinds(self.cap.table.kinds)]
        of_groups = layers.reshape(len(stage), self.own_sets, len(self.alike.groups))
        apart = self.alike.apart(np.repeat(held, self.own_sets, axis=1), of_groups)
        of_sets = apart.reshape(len(stage), self.own_sets * held.shape[-1])
        return np.tile(of_sets, self.cap.table.levels // self.own_sets)

    def of_groups(self, layers: np.ndarray) -> np.ndarray:
        """Layers of every column, given those of every kind [sets, levels * layer kinds]. [sets,
        columns]"""
        of_levels = layers.reshape(len(layers), self.cap.table.levels, -1)
        return self.alike.together(of_levels[:, : self.own_sets]).reshape(len(layers), -1)

    def fewest(
        self,
        stage: np.ndarray,
        layers: np.ndarray,
        column: np.ndarray,
        low: np.ndarray,
        high: np.ndarray,
    ) -> np.ndarray:
        """The fewest layers of a column, from `low` to `high`, that fit beside those of the others;
        `high` where none do. All are [n], `layers` [n, columns]."""
        each = np.arange(len(stage))
        layers, low, high = layers.copy(), low.copy(), high.copy()
        while len(each := np.flatnonzero(low < high)):
            middle = (low[each] + high[each]) // 2
            layers[each, column[each]] = middle
            enough = self.holds(stage[each], layers[each])
            high[each] = np.where(enough, middle, high[each])
            low[each] = np.where(enough, low[each], middle + 1)
        return high


def recomputes_of_levels(
    table: MemoryTable,
    counts: np.ndarray,
    extreme_ms: np.ndarray,
    memory_cap_bytes: float,
    most: int,
    *,
    same_at_levels: bool = False,
) -> LevelRecomputes:
    """The sets worth considering in each of many possible stages; stages that never fit have none.

    Args:
        counts: [stages, kinds] units of each stage.
        extreme_ms: [extremes, levels * layer kinds]; see `omnibal.pipeline.recompute`.
        most: points of a stage's grid.
        same_at_levels: whether a set must have the same layers at all levels.
    """
    if not (table.others_kept_bytes.any() or same_at_levels):
        alone = _each_level_alone(table, counts, extreme_ms, memory_cap_bytes)
        if np.bincount(alone.stage, minlength=1).max() <= most:
            return LevelRecomputes(fitting=alone, optimistic=alone, complete=True)
    fit = LevelFit.of(table, counts, memory_cap_bytes, same_at_levels=same_at_levels)
    every = fit.holds(np.arange(len(counts)), fit.held)
    stage = np.flatnonzero(every)
    low, high = _box(fit, stage)
    grids = [_Grid.of(*corners, most) for corners in zip(low, high, strict=True)]
    sizes = np.array([len(grid.near) for grid in grids], np.int64)
    row = np.repeat(np.arange(len(stage)), sizes)
    last = np.array([grid.last for grid in grids], np.int64)[row]
    none = np.zeros((0, fit.held.shape[1]), np.int64)
    near = np.concatenate([none, *(grid.near for grid in grids)])
    far = np.concatenate([none, *(grid.far for grid in grids)])
    at_near, near_fits = _with_fewest(fit, stage[row], near, last, high[row])
    if all(grid.complete for grid in grids):
        found = _sorted(fit, stage[row][near_fits], at_near[near_fits], extreme_ms)
        return LevelRecomputes(fitting=found, optimistic=found, complete=True)
    at_far, far_fits = _with_fewest(fit, stage[row], far, last, high[row])
    rows = np.concatenate([row[near_fits], row[far_fits]])
    fitting = np.concatenate([at_near[near_fits], at_far[far_fits]])
    fitting = least_below(fit, stage[rows], fitting, np.zeros(len(rows), np.int64))
    # A set of a cell has no fewer of any column than the near corner, and of the last one no fewer
    # than go with the far corner.
    bounds = np.where(np.arange(far.shape[1]) == last[:, None], at_far, near)
    return LevelRecomputes(
        fitting=_sorted(fit, stage[rows], fitting, extreme_ms),
        optimistic=_sorted(fit, stage[row][far_fits], bounds[far_fits], extreme_ms),
        complete=False,
    )


def _each_level_alone(
    table: MemoryTable, counts: np.ndarray, extreme_ms: np.ndarray, memory_cap_bytes: float
) -> Recomputes:
    """The sets where micro-batches are never in flight together: any of one level's with any of the
    next."""
    found = Recomputes(stage=np.arange(len(counts)), layers=np.zeros((len(counts), 0), np.int64))
    for level, of_level in enumerate(np.split(extreme_ms, table.levels, axis=1)):
        sets = useful_recomputes(
            table.of_level(level), counts, of_level[of_level.any(axis=1)], memory_cap_bytes
        )
        first = np.searchsorted(sets.stage, np.arange(len(counts) + 1))
        number = np.diff(first)[found.stage]
        row = np.repeat(np.arange(len(number)), number)
        place = np.arange(len(row)) - np.repeat(np.cumsum(number) - number, number)
        which = first[found.stage[row]] + place
        layers = np.concatenate([found.layers[row], sets.layers[which]], axis=1)
        found = Recomputes(stage=found.stage[row], layers=layers)
    return found


def sets_near(fit: LevelFit, layers: np.ndarray) -> np.ndarray:
    """Least sets that differ little from one of a single stage, which fits. [sets, levels * layer
    kinds], as is the given one [levels * layer kinds].

    Some more layers of one column are recomputed, and then as few of the others as fit: one column
    after another, each of them first.
    """
    layers = fit.of_groups(layers[None])[0]
    columns = len(layers)
    more = np.array([0, *_MORE])
    column, number, first = (axis.ravel() for axis in np.indices((columns, len(more), columns)))
    sets = np.repeat(layers[None], len(column), axis=0)
    each = np.arange(len(sets))
    sets[each, column] = np.minimum(sets[each, column] + more[number], fit.held[0, column])
    least = np.unique(least_below(fit, np.zeros_like(each), sets, first), axis=0)
    return fit.of_kinds(np.zeros(len(least), np.int64), least)


def _box(fit: LevelFit, stage: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The fewest and the most layers of every column in any least set. [stages, columns] each

    A least set has as many of a column as the others call for: fewest where they recompute all they
    can, and most where they recompute the fewest.
    """
    held = fit.held[stage]
    low = _column_by_column(fit, stage, held, np.zeros_like(held), held)
    return low, _column_by_column(fit, stage, low, low, held)


def _column_by_column(
    fit: LevelFit, stage: np.ndarray, others: np.ndarray, low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """The fewest of each column that fit beside `others`. [stages, columns]"""
    columns = others.shape[1]
    found = [
        fit.fewest(stage, others, np.full(len(stage), c), low[:, c], high[:, c])
        for c in range(columns)
    ]
    return np.stack(found, axis=1) if columns else others


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Grid:
    """Points of a stage's box in all columns but the last, of which it has the fewest."""

    last: int
    """Column of which the fewest are found at every point: that of the longest side."""
    near: np.ndarray
    """Corner of every cell with the fewest layers, [cells, columns]."""
    far: np.ndarray
    """Corner of every cell with the most layers, [cells, columns]."""
    complete: bool
    """Whether every cell is a point."""

    @classmethod
    def of(cls, low: np.ndarray, high: np.ndarray, most: int) -> "_Grid":
        """Cells of a box as fine as there may be `most` of them."""
        sides = high - low
        last = int(sides.argmax())
        width = np.ones_like(sides)
        sides[last] = 0
        number = sides + 1
        while number.prod(dtype=np.float64) > most:
            width[number.argmax()] *= 2
            number = sides // width + 1
        place = np.stack(np.unravel_index(np.arange(number.prod()), number), axis=1)
        near = low + place * width
        far = np.minimum(near + width - 1, high)
        near[:, last] = far[:, last] = low[last]
        return cls(last=last, near=near, far=far, complete=bool((width == 1).all()))


def _with_fewest(
    fit: LevelFit, stage: np.ndarray, layers: np.ndarray, column: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sets with the fewest layers of a column that fit beside the others', and whether any do.

    Args:
        layers: [sets, columns]; of the column, the fewest to try.
        column: [sets].
        high: [sets, columns]; of the column, the most to try.
    """
    each, found = np.arange(len(stage)), layers.copy()
    found[each, column] = high[each, column]
    fits = fit.holds(stage, found)
    found[each, column] = fit.fewest(
        stage, found, column, layers[each, column], found[each, column]
    )
    return found, fits


def least_below(
    fit: LevelFit, stage: np.ndarray, layers: np.ndarray, first: np.ndarray
) -> np.ndarray:
    """Least sets [sets, columns] of no more layers than those given, which fit.

    Args:
        stage: [sets].
        layers: [sets, columns].
        first: column of which each is to have as few as it can, before the others, [sets].
    """
    layers, each = layers.copy(), np.arange(len(stage))
    none = np.zeros(len(stage), np.int64)
    columns = layers.shape[1]
    for turn in range(columns):
        column = (first + turn) % columns
        layers[each, column] = fit.fewest(stage, layers, column, none, layers[each, column])
    return layers


def _sorted(
    fit: LevelFit, stage: np.ndarray, layers: np.ndarray, extreme_ms: np.ndarray
) -> Recomputes:
    """Sets [sets, columns] without those that take as long as another of their stage on every
    micro-batch."""
    layers = fit.of_kinds(stage, layers)
    kept = undominated_sets(stage, layers @ extreme_ms.T)
    kept = kept[np.lexsort((*layers[kept].T[::-1], stage[kept]))]
    return Recomputes(stage=stage[kept], layers=layers[kept])
