"""Min memory of the fullest stage over all splits, with every layer recomputed.

Counting all passes for all runs of units is too slow. A few passes give a lower bound and its best
split. Its peak over all passes is an upper bound. Its peak passes are added until both agree, or
the cap is decided.
"""

from collections.abc import Sequence

import numpy as np

from omnibal.pipeline.bounds import Runs, min_largest, min_largest_path, possible_runs
from omnibal.pipeline.passes import all_passes, largest_pass
from omnibal.pipeline.recompute import all_layers, count_peaks
from omnibal.pipeline.split_task import SplitTask
from omnibal.pipeline.stage_memory import (
    MemoryTable,
    build_tables,
    fits_cap,
    heaviest_passes,
    often_heaviest_tables,
)

_EQUAL_BOUNDS_TOLERANCE = 1e-12  # relative tolerance of equal bounds


def min_peak_of_splits(task: SplitTask, *, is_exact: bool = True) -> float:
    """Return the smallest memory cap in bytes that some split and recompute sets fit.

    All layers may be recomputed, regardless of the rules. With several levels only often heavy
    passes are counted, which others may exceed slightly.

    Args:
        is_exact: False only decides the task's cap, with one level, which is faster than the exact
            min. Returns an upper bound on the peak of a split that fits it, or else a lower bound
            on all peaks.
    """
    cost, workload, pipeline_size = task.cost, task.workload, task.stages
    runs, cap_bytes = possible_runs(task), None if is_exact else task.memory_cap_bytes
    if cost.levels > 1:
        return min_peak_of_tables(runs, often_heaviest_tables(cost, workload, pipeline_size))
    features, stages = workload.features_of(cost), range(pipeline_size)
    if cap_bytes is not None:
        # One pass that bounds all passes often shows that a split fits.
        bounding = [largest_pass(features, workload, pipeline_size, stage) for stage in stages]
        upper_bytes = min_peak_of_tables(runs, build_tables(cost, workload, bounding))
        if fits_cap(upper_bytes, cap_bytes):
            return upper_bytes
    edges = [(runs.start, runs.end)] * pipeline_size
    counts, row = np.unique(runs.counts, axis=0, return_inverse=True)
    peaks, seen = np.full((pipeline_size, len(counts)), -np.inf), np.zeros(0, np.int64)
    upper_bytes, path = np.inf, list[int]()
    # First the passes with max summed features: of the running micro-batch, and of all.
    passes = all_passes(features, workload, pipeline_size, 0)
    share = 1 / np.maximum(passes.largest, 1)
    own, others = passes.own @ share, passes.others[:, 0] @ share
    heaviest = [int(own.argmax()), int((own + others).argmax())]
    while True:
        new = np.setdiff1d(heaviest, seen)
        if len(new):
            # Count every run that may be best in the new passes.
            best = np.flatnonzero(peaks.min(axis=0) <= upper_bytes)
            chosen = [all_passes(features, workload, pipeline_size, stage, new) for stage in stages]
            tables, some = build_tables(cost, workload, chosen), counts[best]
            layers = all_layers(cost.kinds, some)
            running = tables[0].running_bytes(some, layers)  # equal in all stages
            new_peaks = [table.peak_bytes(some, layers, running) for table in tables]
            peaks[:, best] = np.maximum(peaks[:, best], new_peaks)
            seen = np.append(seen, new)
        if len(path):
            upper_bytes = min(upper_bytes, float(peaks[stages, row[path]].max()))
        lower_bytes, path = min_largest_path(edges, list(peaks[:, row]), runs.units)
        if lower_bytes >= upper_bytes * (1 - _EQUAL_BOUNDS_TOLERANCE):
            break
        # The cap is decided if both bounds are on one side of it.
        if cap_bytes is not None:
            if fits_cap(upper_bytes, cap_bytes) or not fits_cap(lower_bytes, cap_bytes):
                break
        held = counts[row[path]]
        heaviest = heaviest_passes(cost, workload, held, all_layers(cost.kinds, held))
    fits = cap_bytes is None or fits_cap(upper_bytes, cap_bytes)
    return upper_bytes if fits else lower_bytes


def min_peak_of_tables(runs: Runs, tables: Sequence[MemoryTable]) -> float:
    """Return the min peak of the fullest stage over all splits by these tables, in bytes."""
    counts, kind = np.unique(runs.counts, axis=0, return_inverse=True)
    layers = all_layers(tables[0].kinds, counts, tables[0].levels)
    peaks = [count_peaks(table, counts, layers)[kind] for table in tables]
    return min_largest([(runs.start, runs.end)] * len(tables), peaks, runs.units)
