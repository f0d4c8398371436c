"""Sets of layers that a stage may recompute so that it fits: every set that can be the best one.

Layers of one kind cost the same, so a set is a count of each kind. Kinds that differ only in what
they carry over cuts count as one here, of which the earliest layers are recomputed. For every
choice of the others the fewest layers of the stage's last kind that fit are found by bisection:
recomputing one more layer never needs more memory (`MemoryTable.pass_bytes`). Of those sets, one
that takes at least as long as another on every micro-batch cannot be better. (OmniBal, section on
adaptive re-computation, recomputes from the front of the stage, as is done here within each kind:
what the earliest layers bring back comes when later ones have let go.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omnibal.model.units import UnitKind
from omnibal.pipeline.stage_memory import MemoryTable, fits_cap
from omnibal.pipeline.unit_runs import layer_kinds

_CHUNK_ENTRIES = 4_000_000
"""Entries of [stages, sets of micro-batches] at a time: bounds memory to some 100 MB."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recomputes:
    """Sets of recomputed layers, sorted by stage, then by their counts."""

    stage: np.ndarray
    """Index of the stage among those given, [sets]."""
    layers: np.ndarray
    """Recomputed layers of each kind at each level, [sets, levels * layer kinds]."""


def useful_recomputes(
    table: MemoryTable, counts: np.ndarray, extreme_ms: np.ndarray, memory_cap_bytes: float
) -> Recomputes:
    """The sets worth considering in each of many possible stages; stages that never fit have none.

    Args:
        counts: [stages, kinds] units of each stage.
        extreme_ms: [extremes, layer kinds]; times to recompute a layer of each kind, such that
            those on any micro-batch are a sum of these, each times a number that is not negative.
    """
    kinds, alike = layer_kinds(table.kinds), Alike.of(table.kinds)
    cap = Cap.of(table, memory_cap_bytes)
    nothing = cap.holds(counts, np.zeros_like(counts))
    without = np.flatnonzero(nothing)
    stage, layers = _with_all_but_last(alike.together(counts[:, kinds]), np.flatnonzero(~nothing))
    layers, fits = _fewest_of_last(cap, alike, counts[stage], layers)
    stage = np.concatenate([without, stage[fits]])
    layers = np.concatenate([np.zeros((len(without), len(kinds)), np.int64), layers[fits]])
    kept = undominated_sets(stage, layers @ extreme_ms.T)
    kept = kept[np.lexsort((*layers[kept].T[::-1], stage[kept]))]
    return Recomputes(stage=stage[kept], layers=layers[kept])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Alike:
    """Groups of kinds of layer that cost the same, of which the earliest layers are recomputed."""

    groups: tuple[tuple[int, ...], ...]
    """Places among the kinds of layer, in model order."""

    @classmethod
    def of(cls, kinds: Sequence[UnitKind]) -> "Alike":
        """Group a model's kinds."""
        layers = [kinds[index] for index in layer_kinds(kinds)]
        groups = [
            tuple(place for place, other in enumerate(layers) if other.is_like(kind))
            for kind in layers
        ]
        return cls(groups=tuple(dict.fromkeys(groups)))

    def together(self, layers: np.ndarray) -> np.ndarray:
        """Layers of every group, given those of every kind. [..., groups]"""
        return np.stack([layers[..., group].sum(axis=-1) for group in self.groups], axis=-1)

    def apart(self, held: np.ndarray, layers: np.ndarray) -> np.ndarray:
        """Layers of every kind, the earliest of a group first. [..., layer kinds]

        Args:
            held: that there are of every kind, [..., layer kinds].
            layers: of every group, [..., groups].
        """
        apart = np.empty_like(held)
        for place, group in enumerate(self.groups):
            of_group = held[..., group]
            before = of_group.cumsum(axis=-1) - of_group
            apart[..., group] = np.clip(layers[..., place, None] - before, 0, of_group)
        return apart


def least_peak_bytes(table: MemoryTable, counts: np.ndarray) -> np.ndarray:
    """Smallest peak that recomputing can reach in each of many possible stages. [stages]"""
    return _peak_bytes(table, counts, every_layer(table.kinds, counts, table.levels))


def least_peaks_of_stages(tables: Sequence[MemoryTable], counts: np.ndarray) -> np.ndarray:
    """Smallest peaks that recomputing can reach, of runs of units at every stage. [stages, runs]"""
    every = every_layer(tables[0].kinds, counts, tables[0].levels)
    running = tables[0].running_bytes(counts, every)
    return np.stack([table.peak_bytes(counts, every, running) for table in tables])


def every_layer(kinds: Sequence[UnitKind], counts: np.ndarray, levels: int = 1) -> np.ndarray:
    """All layers of stages of these units [..., kinds] at each level. [..., levels * kinds]"""
    return np.tile(counts * np.array([kind.is_layer for kind in kinds]), levels)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cap:
    """A memory cap, with tables by which most stages are found to be over or under it."""

    cap_bytes: float
    under: MemoryTable
    """One pass that needs at least as much as any."""
    over: MemoryTable
    """A few passes that need much."""
    table: MemoryTable

    @classmethod
    def of(cls, table: MemoryTable, cap_bytes: float) -> "Cap":
        """Choose the passes that hold most, keep most of their own, and work most."""
        others, own = table.others_kept_bytes.sum(axis=1), table.own_kept_bytes.sum(axis=1)
        much = np.array([others + own, own + table.working_bytes.max(axis=1)]).argmax(axis=1)
        return cls(
            cap_bytes=cap_bytes,
            under=table.at_most(),
            over=table.of_passes(np.unique(much)),
            table=table,
        )

    def holds(self, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """Whether every stage fits. [stages]"""
        fits = fits_cap(_peak_bytes(self.under, counts, recomputed), self.cap_bytes)
        unsure = np.flatnonzero(~fits)
        for table in (self.over, self.table):
            peaks = _peak_bytes(table, counts[unsure], recomputed[unsure])
            fits[unsure] = fits_cap(peaks, self.cap_bytes)
            unsure = unsure[fits[unsure]]
        return fits


def _peak_bytes(table: MemoryTable, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
    """Peak memory of every stage by `MemoryTable.peak_bytes`, in chunks of stages. [stages]"""
    at_once = max(_CHUNK_ENTRIES // len(table.working_bytes), 1)
    peaks = np.empty(len(counts))
    for first in range(0, len(counts), at_once):
        chunk = slice(first, first + at_once)
        peaks[chunk] = table.peak_bytes(counts[chunk], recomputed[chunk])
    return peaks


def _last_held(layers: np.ndarray) -> np.ndarray:
    """Index of the last group of layers that each stage [stages, groups] holds. [stages]"""
    return layers.shape[1] - 1 - (layers[:, ::-1] > 0).argmax(axis=1)


def _with_all_but_last(layers: np.ndarray, stages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Stages with each choice of recomputed layers of all groups but the last that it holds.

    Args:
        layers: [all stages, groups of alike kinds] that each holds.
        stages: [stages] to choose for.

    Returns:
        Stage [choices] and recomputed layers [choices, groups], of the last group none.
    """
    held, kinds = layers[stages], layers.shape[1]
    numbers = np.where(np.arange(kinds) < _last_held(held)[:, None], held + 1, 1)
    choices = numbers.prod(axis=1)
    row = np.repeat(np.arange(len(stages)), choices)
    place = np.arange(len(row)) - np.repeat(np.cumsum(choices) - choices, choices)
    recomputed = np.empty((len(row), kinds), np.int64)
    for kind in reversed(range(kinds)):
        place, recomputed[:, kind] = np.divmod(place, numbers[row, kind])
    return stages[row], recomputed


def _fewest_of_last(
    cap: Cap, alike: Alike, counts: np.ndarray, layers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Add the fewest recomputed layers of each stage's last group that fit, and whether any do.

    Args:
        counts: [stages, kinds].
        layers: [stages, groups of alike kinds] that are recomputed besides.

    Returns:
        [stages, layer kinds] and [stages].
    """
    kinds = np.array(layer_kinds(cap.table.kinds))
    held = counts[:, kinds]
    of_groups, recomputed = alike.together(held), np.zeros_like(counts)
    last, layers = _last_held(of_groups), layers.copy()

    def fits(rows: np.ndarray, number: np.ndarray) -> np.ndarray:
        layers[rows, last[rows]] = number
        recomputed[rows[:, None], kinds] = alike.apart(held[rows], layers[rows])
        return cap.holds(counts[rows], recomputed[rows])

    everyone = np.arange(len(counts))
    most = of_groups[everyone, last]
    fitting = fits(everyone, most)
    rows = everyone[fitting]
    low, high = np.zeros_like(most)[rows], most[rows]
    while (low < high).any():
        middle = (low + high) // 2
        enough = fits(rows, middle)
        low, high = (
            np.where(enough, low, np.minimum(middle + 1, high)),
            np.where(enough, middle, high),
        )
    layers[rows, last[rows]] = high
    return alike.apart(held, layers), fitting


def undominated_sets(group: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Entries of which no other entry of their group is as small in every cost [entries, costs].

    Of equal entries the first stays.
    """
    order = np.lexsort((*costs.T[::-1], group))
    found = []
    while len(order):
        # A group's first entry is dominated by none that is left.
        first = np.flatnonzero(np.diff(group[order], prepend=-1))
        leader = np.repeat(order[first], np.diff(np.append(first, len(order))))
        found.append(order[first])
        order = order[(costs[order] < costs[leader]).any(axis=1)]
    return np.concatenate(found) if found else order
