"""Recomputed layers that a trainer is told as numbers: a stage's, or a tower's for all stages.

Told a number N, a stage recomputes the first N layers that it holds of a tower, in model order and
whichever kind they are of, or all where it holds fewer (`omnibal.model.targets.RecomputeFreedom`).
Layers without a backward have nothing to recompute: where they are told a number too, it costs
nothing.

One layer more never needs more memory, nor less time, so the least number that fits is found by
bisection, and of a stage with a number of its own no other is worth considering.
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
"""Number of a tower that has the number looked for, among those that are fixed."""
NONE_FITS = 2**31
"""Number of layers where none is enough."""
_UNKNOWN = -1  # no number of layers is negative


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TowerLayers:
    """Where the layers of every tower are, in model order."""

    towers: tuple[str, ...]
    has_backward: tuple[bool, ...]
    """Whether each tower has a backward."""
    first: np.ndarray
    """Position of the tower's first layer; this and the next are [towers]."""
    stop: np.ndarray
    """Position after its last layer."""
    before: np.ndarray
    """Layers of every kind before each position, [units + 1, layer kinds]."""

    @classmethod
    def of(cls, cost: CostModel, model: ModelConfig) -> Self:
        """Find the towers of a model with these costs."""
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
        """Numbers of every encoder that a trainer with shared ones can be told, none or all; 0
        alone for an encoder without a backward to recompute for."""
        layers = (self.stop - self.first).tolist()[:-1]
        each = zip(layers, self.has_backward, strict=False)
        return [(0, count) if has_backward else (0,) for count, has_backward in each]

    def held(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Layers that runs of units [n] hold of every tower. [n, towers]"""
        low, high = self._ends(start, end)
        return high - low

    def recomputed(
        self, start: np.ndarray, end: np.ndarray, fixed: np.ndarray, number: np.ndarray
    ) -> np.ndarray:
        """Layers of every kind that runs [n] recompute, told `fixed` numbers [n, towers], or [1,
        towers] for all, and `number` [n] where one is looked for. [n, layer kinds]"""
        low, high = self._ends(start, end)
        stop = np.minimum(low + np.where(fixed == LOOKED_FOR, number[:, None], fixed), high)
        return (self.before[stop] - self.before[low]).sum(axis=1)

    def _ends(self, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        low = np.maximum(start[:, None], self.first)
        return low, np.maximum(np.minimum(end[:, None], self.stop), low)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LeastNumbers:
    """The least numbers of recomputed layers with which runs of units fit as a stage, each found
    once."""

    layers: TowerLayers
    runs: Runs
    tables: Sequence[MemoryTable]
    """Memory table of every stage."""
    memory_cap_bytes: float
    sequence: np.ndarray
    """First run that is the same units in the same order, for every run, [runs]."""
    known: dict[tuple[int, tuple[int, ...]], np.ndarray] = field(default_factory=dict)
    """What was found, of a table and the numbers that are fixed. [runs]"""

    @classmethod
    def of(
        cls,
        cost: CostModel,
        model: ModelConfig,
        runs: Runs,
        tables: Sequence[MemoryTable],
        memory_cap_bytes: float,
    ) -> Self:
        """Prepare to find them for these runs, and stages of these tables."""
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
        """Numbers to be found anew, for tables of more passes."""
        return replace(self, tables=tables, known={})

    def find(self, stage: int, chosen: np.ndarray, fixed: tuple[int, ...]) -> np.ndarray:
        """The least number, of towers whose number is not fixed, with which each of the chosen runs
        fits; `NONE_FITS` where none does. [chosen]

        Args:
            fixed: numbers of the towers; `LOOKED_FOR` for all that have the number looked for.
        """
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
    """Numbers of recomputed layers that a stage may have."""

    least: LeastNumbers
    fixed: tuple[int, ...]
    """Numbers of the towers; `LOOKED_FOR` for those that have the number looked for."""
    shared: int | None = None
    """The number looked for, where all stages have the same; else each has the least that fits."""

    def of_runs(self, stage: int, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Chosen runs that fit as a stage, and the layers of every kind that these recompute.
        [fitting] indices of runs, [fitting, layer kinds]"""
        least = self.least.find(stage, chosen, self.fixed)
        fits = least < NONE_FITS if self.shared is None else least <= self.shared
        chosen = chosen[fits]
        number = least[fits] if self.shared is None else np.full(len(chosen), self.shared)
        return chosen, self.recomputed(chosen, number)

    def recomputed(self, chosen: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Layers of every kind that runs recompute with these numbers. [chosen, layer kinds]"""
        start, end = self.least.runs.start[chosen], self.least.runs.end[chosen]
        return self.least.layers.recomputed(start, end, np.array([self.fixed]), number)
