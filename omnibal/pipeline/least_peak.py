"""Min memory of the fullest stage over all splits, with every layer recomputed.

Counting all passes for all runs of units is too slow. A few passes give a lower bound and its best
split. Its peak over all passes is an upper bound. Its peak passes are added until both agree, or
the cap is decided.
"""

from collections.abc import Sequence

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
    bytes_in_passes,
    encoder_memory_of,
    fits_cap,
    memory_table,
    most_of_stages,
    often_heaviest_tables,
    passes_of_stages,
    running_passes,
)
from omnibal.pipeline.workload import Workload

_TOLERANCE = 1e-12
"""Relative tolerance of equal bounds."""


def least_peak_of_splits(
    cost: CostModel,
    model: ModelConfig,
    workload: Workload,
    pipeline_size: int,
    rules: StageRules = FREE,
    cap_bytes: float | None = None,
) -> float:
    """Return the smallest memory cap in bytes that some split and recompute sets fit.

    All layers may be recomputed, regardless of the rules. With several levels only commonly heavy
    passes are counted, and others may exceed them slightly.

    Args:
        cap_bytes: a cap to decide, which is faster than the exact min. Returns an upper bound on
            the peak of a split that fits it, or else a lower bound on all peaks.
    """
    runs = possible_runs(cost, model, rules)
    if cost.levels > 1:
        return least_peak_of_tables(runs, often_heaviest_tables(cost, workload, pipeline_size))
    if cap_bytes is not None:
        # A pass with the max of every feature.
        most = most_of_stages(cost, workload, pipeline_size)
        enough_bytes = least_peak_of_tables(runs, _tables(cost, workload, most))
        if fits_cap(enough_bytes, cap_bytes):
            return enough_bytes
    edges = [(runs.start, runs.end)] * pipeline_size
    counts, row = np.unique(runs.counts, axis=0, return_inverse=True)
    peaks, seen = np.full((pipeline_size, len(counts)), -np.inf), np.zeros(0, np.int64)
    lower_bytes, upper_bytes = 0.0, np.inf

    def look_at(passes: np.ndarray) -> np.ndarray:
        """Add passes by index, and count every run that may be best in them."""
        new = np.setdiff1d(passes, seen)
        if len(new):
            best = np.flatnonzero(peaks.min(axis=0) <= upper_bytes)
            chosen = passes_of_stages(cost, workload, pipeline_size, new)
            found = least_peaks_of_stages(_tables(cost, workload, chosen), counts[best])
            peaks[:, best] = np.maximum(peaks[:, best], found)
        return np.append(seen, new)

    every_pass: list[RunningPasses] = []
    features = features_of(workload, cost)
    seen = look_at(_with_most(running_passes(features, workload.slot, pipeline_size, 0)))
    while not _is_decided(lower_bytes, upper_bytes, cap_bytes):
        lower_bytes, path = least_largest_path(edges, list(peaks[:, row]), runs.units)
        if _is_decided(lower_bytes, upper_bytes, cap_bytes):
            break
        every_pass = every_pass or passes_of_stages(cost, workload, pipeline_size)
        needed = [
            bytes_in_passes(cost, passes, held, every_layer(cost.kinds, held))[0]
            for passes, held in zip(every_pass, counts[row[path]], strict=True)
        ]
        seen = look_at(np.array([each.argmax() for each in needed]))
        upper_bytes = min(upper_bytes, float(peaks[np.arange(pipeline_size), row[path]].max()))
    fits = cap_bytes is None or fits_cap(upper_bytes, cap_bytes)
    return upper_bytes if fits else lower_bytes


def _is_decided(lower_bytes: float, upper_bytes: float, cap_bytes: float | None) -> bool:
    """Return whether the bounds agree, or are on one side of the cap."""
    if cap_bytes is not None:
        fits_lower, fits_upper = fits_cap(np.array([lower_bytes, upper_bytes]), cap_bytes)
        if fits_upper or not fits_lower:
            return True
    return lower_bytes >= upper_bytes * (1 - _TOLERANCE)


def _tables(
    cost: CostModel, workload: Workload, passes: Sequence[RunningPasses]
) -> list[MemoryTable]:
    """Return each stage's memory table for the given passes."""
    return [memory_table(cost, each, encoder_memory_of(workload)) for each in passes]


def least_peak_of_tables(runs: Runs, tables: Sequence[MemoryTable]) -> float:
    """Return the min peak of the fullest stage over all splits by these tables, in bytes."""
    counts, kind = np.unique(runs.counts, axis=0, return_inverse=True)
    peaks = [least_peak_bytes(table, counts)[kind] for table in tables]
    return least_largest([(runs.start, runs.end)] * len(tables), peaks, runs.units)


def _with_most(passes: RunningPasses) -> np.ndarray:
    """Return the passes with max summed features: of the running micro-batch, and of all."""
    share = 1 / np.maximum(passes.largest, 1)
    return np.array([(each @ share).argmax() for each in (passes.own, passes.own + passes.others)])
