"""Recompute counts for trainers that take numbers: per stage, or per tower for all stages.

A stage with number N recomputes the first min(N, held) layers of a tower in model order
(`omnibal.model.targets.RecomputeFreedom`); layers without a backward cost nothing. Memory falls and
time rises with N, so bisection finds the smallest fitting number, and a stage's own number needs no
other candidate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from omnibal.cost.model import CostModel
from omnibal.model.config import ModelConfig
from omnibal.model.units import unit_names
from omnibal.pipeline.bounds import Runs
from omnibal.pipeline.recompute import Cap, fewest_that_fit
from omnibal.pipeline.stage_memory import MemoryTable
from omnibal.pipeline.unit_runs import layer_kinds

LOOKED_FOR = -1
"""Placeholder for the searched number of a tower among fixed numbers."""
NONE_FITS = 2**31
_UNKNOWN = -1  # no number of layers is negative


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TowerLayers:
    """Positions of every tower's layers, in model order."""

    towers: tuple[str, ...]
    has_backward: tuple[bool, ...]
    """Whether each tower has a backward."""
    first: np.ndarray
    """Position of the tower's first layer; this and the next are [towers]."""
    stop: np.ndarray
    before: np.ndarray
    """Layers of every kind before each position, [units + 1, layer kinds]."""

    @classmethod
    def of(cls, cost: CostModel, model: ModelConfig) -> Self:
        """Return the towers of a model."""
        layers = [cost.kinds[index] for index in layer_kinds(cost.kinds)]
        names = np.array(unit_names(model))
        has_backward = {kind.tower: cost.units[kind.name].has_backward for kind in layers}
        towers = tuple(has_backward)
        places = [
            np.flatnonzero(np.isin(names, [kind.name for kind in layers if kind.tower == tower]))
            for tower in towers
        ]
        before = np.zeros((len(names) + 1, len(layers)), np.int64)
        np.cumsum(names[:, None] == [kind.name for kind in layers], axis=0, out=before[1:])
        return cls(
            towers=towers,
            has_backward=tuple(has_backward.values()),
            first=np.array([each[0] for each in places]),
            stop=np.array([each[-1] + 1 for each in places]),
            before=before,
        )

    @property
    def encoder_numbers(self) -> list[tuple[int, ...]]:
        """Return the shared numbers allowed per encoder: 0 or all, only 0 without a backward."""
        layers = (self.stop - self.first).tolist()[:-1]
        each = zip(layers, self.has_backward, strict=False)
        return [(0, count) if has_backward else (0,) for count, has_backward in each]

    def held(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Return the layers of every tower in runs of units [n]. [n, towers]"""
        low, high = self._ends(start, end)
        return high - low

    def recomputed(
        self, start: np.ndarray, end: np.ndarray, fixed: np.ndarray, number: np.ndarray
    ) -> np.ndarray:
        """Return recomputed layers of runs [n] given `fixed` numbers [n or 1, towers] and the
        searched `number` [n]. [n, layer kinds]"""
        low, high = self._ends(start, end)
        stop = np.minimum(low + np.where(fixed == LOOKED_FOR, number[:, None], fixed), high)
        return (self.before[stop] - self.before[low]).sum(axis=1)

    def _ends(self, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        low = np.maximum(start[:, None], self.first)
        return low, np.maximum(np.minimum(end[:, None], self.stop), low)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LeastNumbers:
    """Cached min recompute numbers for runs of units to fit as a stage."""

    layers: TowerLayers
    runs: Runs
    tables: Sequence[MemoryTable]
    """Memory table of every stage."""
    memory_cap_bytes: float
    sequence: np.ndarray
    """First run with the same sequence of units, [runs]."""
    known: dict[tuple[int, tuple[int, ...]], np.ndarray] = field(default_factory=dict)
    """Results by table and fixed numbers. [runs]"""

    @classmethod
    def of(
        cls,
        cost: CostModel,
        model: ModelConfig,
        runs: Runs,
        tables: Sequence[MemoryTable],
        memory_cap_bytes: float,
    ) -> Self:
        """Prepare for these runs, and stages with these tables."""
        kinds = {kind.name: index for index, kind in enumerate(cost.kinds)}
        units = np.array([kinds[name] for name in unit_names(model)], np.uint8)
        firsts: dict[bytes, int] = {}
        ends = zip(runs.start.tolist(), runs.end.tolist(), strict=True)
        same = [
            firsts.setdefault(units[start:end].tobytes(), run)
            for run, (start, end) in enumerate(ends)
        ]
        return cls(
            layers=TowerLayers.of(cost, model),
            runs=runs,
            tables=tables,
            memory_cap_bytes=memory_cap_bytes,
            sequence=np.array(same, np.int64),
        )

    def on(self, tables: Sequence[MemoryTable]) -> Self:
        """Return an empty cache for tables with more passes."""
        return replace(self, tables=tables, known={})

    def find(self, stage: int, chosen: np.ndarray, fixed: tuple[int, ...]) -> np.ndarray:
        """Return the min number for each chosen run to fit, or `NONE_FITS`; `fixed` has the towers'
        numbers, `LOOKED_FOR` if searched. [chosen]"""
        table = self.tables[stage]
        known = self.known.setdefault((id(table), fixed), np.full(len(self.sequence), _UNKNOWN))
        first = self.sequence[chosen]
        missing = np.unique(first[known[first] == _UNKNOWN])
        if len(missing):
            known[missing] = self._bisected(table, missing, np.array([fixed]))
        return known[first]

    def _bisected(self, table: MemoryTable, runs: np.ndarray, fixed: np.ndarray) -> np.ndarray:
        cap, kinds = Cap.of(table, self.memory_cap_bytes), np.array(layer_kinds(table.kinds))
        start, end, counts = self.runs.start[runs], self.runs.end[runs], self.runs.counts[runs]

        def fit(rows: np.ndarray, number: np.ndarray) -> np.ndarray:
            recomputed = np.zeros_like(counts[rows])
            recomputed[:, kinds] = self.layers.recomputed(start[rows], end[rows], fixed, number)
            return cap.holds(counts[rows], recomputed)

        held = self.layers.held(start, end)
        most = np.where(fixed == LOOKED_FOR, held, 0).max(axis=1, initial=0)
        fits = fit(np.arange(len(runs)), most)
        return np.where(fits, fewest_that_fit(fit, np.where(fits, 0, most), most), NONE_FITS)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageNumbers:
    """Recompute numbers of a stage."""

    least: LeastNumbers
    fixed: tuple[int, ...]
    """Numbers of the towers; `LOOKED_FOR` for searched numbers."""
    shared: int | None = None
    """The searched number shared by all stages, or None if each takes its smallest that fits."""

    def of_runs(self, stage: int, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return chosen runs that fit [fitting] and their layers [fitting, layer kinds]."""
        least = self.least.find(stage, chosen, self.fixed)
        fits = least < NONE_FITS if self.shared is None else least <= self.shared
        chosen = chosen[fits]
        number = least[fits] if self.shared is None else np.full(len(chosen), self.shared)
        return chosen, self.recomputed(chosen, number)

    def recomputed(self, chosen: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Return recomputed layers of runs with these numbers. [chosen, layer kinds]"""
        start, end = self.least.runs.start[chosen], self.least.runs.end[chosen]
        return self.least.layers.recomputed(start, end, np.array([self.fixed]), number)
