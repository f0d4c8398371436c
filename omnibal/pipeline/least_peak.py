"""Least memory of the fullest stage over all splits of a model, every layer recomputed.

A split's need is the largest over its stages of the largest over all passes of the run, which are
too many to be counted for every run of units that may be a stage. Counted in a few passes, a need
is at most what it is, so the split that is best by these gives a lower bound, and itself, counted
in all passes, an upper one. The passes in which it needs most join the few, until both are equal.
Whether a cap is fitted is often known before.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from omnibal.cost.model import CostModel
from omnibal.model.config import ModelConfig
from omnibal.model.targets import FREE, StageRules
from omnibal.pipeline.bounds import Runs, least_largest, least_largest_path, possible_runs
from omnibal.pipeline.level_costs import features_of
from omnibal.pipeline.recompute import every_layer, least_peak_bytes, least_peaks_of_stages
from omnibal.pipeline.stage_memory import (
    MemoryTable,
    RunningPasses,
    encoder_memory_of,
    fits_cap,
    heaviest_pass,
    memory_table,
    memory_tables,
    most_of_stages,
    passes_of_stages,
    running_passes,
)
from omnibal.pipeline.workload import Workload

_TOLERANCE = 1e-12
"""Relative difference to which both bounds are equal."""


def least_peak_of_splits(
    cost: CostModel,
    model: ModelConfig,
    workload: Workload,
    pipeline_size: int,
    rules: StageRules = FREE,
) -> float:
    """Bytes of the smallest memory cap that some split and recomputed sets fit.

    Whatever rules say of recomputed layers, all of them may be. Of several levels it is by the
    passes that are heaviest for many stages, which another pass of the run may exceed a little.
    """
    return _least_peak(cost, possible_runs(cost, model, rules), workload, pipeline_size, None)


def peak_vs_budget(
    cost: CostModel,
    model: ModelConfig,
    workload: Workload,
    pipeline_size: int,
    cap_bytes: float,
    rules: StageRules = FREE,
) -> float:
    """Bytes that say whether any split and recomputed sets fit a cap, in less time than the least:
    where some do, what one of them needs at most; where none do, what all of them need at least."""
    return _least_peak(cost, possible_runs(cost, model, rules), workload, pipeline_size, cap_bytes)


def _least_peak(
    cost: CostModel,
    runs: Runs,
    workload: Workload,
    pipeline_size: int,
    cap_bytes: float | None,
) -> float:
    if cost.levels > 1:
        return least_peak_of_tables(runs, memory_tables(cost, workload, pipeline_size))
    search = _Narrowing(cost, workload, runs, pipeline_size)
    if cap_bytes is not None:
        enough_bytes = search.surely_enough_bytes()
        if fits_cap(enough_bytes, cap_bytes):
            return enough_bytes
    while not search.is_done(cap_bytes):
        path = search.best_by_passes()
        if not search.is_done(cap_bytes):
            search.narrow(path)
    fits = cap_bytes is None or fits_cap(search.upper_bytes, cap_bytes)
    return search.upper_bytes if fits else search.lower_bytes


def least_peak_of_tables(runs: Runs, tables: Sequence[MemoryTable]) -> float:
    """Least peak of the fullest stage, over all splits, by the tables of stages, in bytes."""
    counts, kind = np.unique(runs.counts, axis=0, return_inverse=True)
    peaks = [least_peak_bytes(table, counts)[kind] for table in tables]
    return least_largest([(runs.start, runs.end)] * len(tables), peaks, runs.units)


class _Narrowing:
    """Bounds on the least peak of all splits, of one level, and the passes that they are by."""

    def __init__(self, cost: CostModel, workload: Workload, runs: Runs, pipeline_size: int) -> None:
        self.cost, self.workload, self.runs = cost, workload, runs
        self.counts, self.row = np.unique(runs.counts, axis=0, return_inverse=True)
        self.peaks = np.full((pipeline_size, len(self.counts)), -np.inf)
        """Peaks in the passes looked at, [stages, distinct runs]."""
        self.seen = np.zeros(0, np.int64)
        self.lower_bytes, self.upper_bytes = 0.0, np.inf

    def is_done(self, cap_bytes: float | None) -> bool:
        """Whether the bounds are equal, or it is known whether some split fits a cap."""
        if cap_bytes is not None:
            bounds = np.array([self.lower_bytes, self.upper_bytes])
            fits_lower, fits_upper = fits_cap(bounds, cap_bytes)
            if fits_upper or not fits_lower:
                return True
        return self.lower_bytes >= self.upper_bytes * (1 - _TOLERANCE)

    def surely_enough_bytes(self) -> float:
        """Least peak of all splits in a pass that has as much of everything as any has."""
        peaks = self._peaks(most_of_stages(self.cost, self.workload, self.stages), self.counts)
        return least_largest(self._edges, list(peaks[:, self.row]), self.runs.units)

    def best_by_passes(self) -> list[int]:
        """Runs [stages] of the split that is best by the passes looked at, which raises the lower
        bound; the first are the passes with most of all features."""
        if not len(self.seen):
            features = features_of(self.workload, self.cost)
            self._look_at(_with_most(running_passes(features, self.workload.slot, self.stages, 0)))
        sizes = list(self.peaks[:, self.row])
        self.lower_bytes, path = least_largest_path(self._edges, sizes, self.runs.units)
        return path

    def narrow(self, path: Sequence[int]) -> None:
        """Count a split in all passes, and every run in those in which it needs most."""
        rows = self.row[path]
        heaviest = [
            heaviest_pass(self.cost, passes, counts, every_layer(self.cost.kinds, counts))
            for passes, counts in zip(self._every_pass, self.counts[rows], strict=True)
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
        chosen = passes_of_stages(self.cost, self.workload, self.stages, new)
        peaks = self._peaks(chosen, self.counts[may_be_best])
        self.peaks[:, may_be_best] = np.maximum(self.peaks[:, may_be_best], peaks)

    def _peaks(self, passes: Sequence[RunningPasses], counts: np.ndarray) -> np.ndarray:
        """Least peak of every run in some passes of each stage. [stages, runs]"""
        encoder_memory = encoder_memory_of(self.workload)
        tables = [memory_table(self.cost, of_stage, encoder_memory) for of_stage in passes]
        return least_peaks_of_stages(tables, counts)

    @cached_property
    def _every_pass(self) -> list[RunningPasses]:
        return passes_of_stages(self.cost, self.workload, self.stages)

    @property
    def stages(self) -> int:
        """Pipeline size."""
        return len(self.peaks)

    @property
    def _edges(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(self.runs.start, self.runs.end)] * self.stages


def _with_most(passes: RunningPasses) -> np.ndarray:
    """Indices of the passes with most of all features, of their own micro-batch and of all held."""
    share = 1 / np.maximum(passes.largest, 1)
    return np.array([(each @ share).argmax() for each in (passes.own, passes.own + passes.others)])
