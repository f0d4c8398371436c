"""Least memory of the fullest stage over all splits of a model, every layer recomputed.

A split's need is the largest over its stages of the largest over all passes of the run, which are
too many to be counted for every run of units that may be a stage. Counted in a few passes, a need
is at most what it is, so the split that is best by these gives a lower bound, and itself, counted
in all passes, an upper one. The passes in which it needs most join the few, until both are equal.
"""

from collections.abc import Sequence

import numpy as np

from omnibal.config import ModelConfig
from omnibal.cost.model import CostModel
from omnibal.pipeline.bounds import Runs, least_largest, least_largest_path, possible_runs
from omnibal.pipeline.recompute import every_layer, least_peak_bytes
from omnibal.pipeline.stage_memory import (
    MemoryTable,
    RunningPasses,
    heaviest_pass,
    memory_table,
    memory_tables,
    passes_of_stages,
    room_of,
)
from omnibal.pipeline.workload import Workload
from omnibal.targets import FREE, StageRules

_TOLERANCE = 1e-12
"""Relative difference to which both bounds are equal."""


def least_peak_of_splits(
    cost: CostModel,
    model: ModelConfig,
    workload: Workload,
    pipeline_size: int,
    enough_bytes: float = 0.0,
    rules: StageRules = FREE,
) -> float:
    """Bytes of the smallest memory cap that some split and recomputed sets fit; or of another one
    that is no larger than `enough_bytes`, where there is such a cap.

    Whatever rules say of recomputed layers, all of them may be. Of several levels it is by the
    passes that are heaviest for many stages, which another pass of the run may exceed a little.
    """
    runs = possible_runs(cost, model, rules)
    if cost.levels > 1:
        return least_peak_of_tables(runs, memory_tables(cost, workload, pipeline_size))
    search = _Narrowing(cost, workload, runs, pipeline_size)
    while search.lower_bytes < search.upper_bytes * (1 - _TOLERANCE):
        if search.upper_bytes <= enough_bytes:
            break
        search.narrow()
    return search.upper_bytes


def least_peak_of_tables(runs: Runs, tables: Sequence[MemoryTable]) -> float:
    """Least peak of the fullest stage, over all splits, by the tables of stages, in bytes."""
    counts, kind = np.unique(runs.counts, axis=0, return_inverse=True)
    peaks = [least_peak_bytes(table, counts)[kind] for table in tables]
    return least_largest([(runs.start, runs.end)] * len(tables), peaks, runs.units)


class _Narrowing:
    """Bounds on the least peak of all splits, of one level, and the passes that they are by."""

    def __init__(self, cost: CostModel, workload: Workload, runs: Runs, pipeline_size: int) -> None:
        self.cost, self.runs, self.room = cost, runs, room_of(workload)
        self.passes = passes_of_stages(cost, workload, pipeline_size)
        self.counts, self.row = np.unique(runs.counts, axis=0, return_inverse=True)
        self.peaks = np.full((pipeline_size, len(self.counts)), -np.inf)
        """Peaks in the passes looked at, [stages, distinct runs]."""
        self.seen = np.zeros(0, np.int64)
        self.lower_bytes, self.upper_bytes = 0.0, np.inf
        self._look_at(_with_most(self.passes[0]))

    def narrow(self) -> None:
        """Count the split that is best by the passes looked at in all passes."""
        runs = self.runs
        edges = [(runs.start, runs.end)] * len(self.passes)
        sizes = [peaks[self.row] for peaks in self.peaks]
        self.lower_bytes, path = least_largest_path(edges, sizes, runs.units)
        rows = self.row[path]
        heaviest = [
            heaviest_pass(self.cost, passes, counts, every_layer(self.cost.kinds, counts))
            for passes, counts in zip(self.passes, self.counts[rows], strict=True)
        ]
        self._look_at(np.array(heaviest))
        upper_bytes = float(self.peaks[np.arange(len(rows)), rows].max())
        self.upper_bytes = min(self.upper_bytes, upper_bytes)

    def _look_at(self, passes: np.ndarray) -> None:
        """Count every run in more passes, by their indices."""
        new = np.setdiff1d(passes, self.seen)
        self.seen = np.append(self.seen, new)
        if not len(new):
            return
        may_be_best = np.flatnonzero(self.peaks.min(axis=0) <= self.upper_bytes)
        tables: dict[int, np.ndarray] = {}
        for stage, of_stage in enumerate(self.passes):
            if id(of_stage) not in tables:
                table = memory_table(self.cost, of_stage.take(new), self.room)
                tables[id(of_stage)] = least_peak_bytes(table, self.counts[may_be_best])
            known = self.peaks[stage, may_be_best]
            self.peaks[stage, may_be_best] = np.maximum(known, tables[id(of_stage)])


def _with_most(passes: RunningPasses) -> np.ndarray:
    """Indices of the passes with most of all features, of their own micro-batch and of all held."""
    share = 1 / np.maximum(passes.largest, 1)
    return np.array([(each @ share).argmax() for each in (passes.own, passes.own + passes.others)])
