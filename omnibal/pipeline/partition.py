"""Exact joint search of the pipeline split and of the layers that every stage recomputes.

Objective: 1F1B's steady-state time of a step of m mean micro-batches on p stages,

    (m - 1) * max_s t_s  +  sum_s t_s  +  sum over cuts of 2 * (latency + bytes * rate)

with t_s forward plus backward plus recomputation of stage s. Stage s must fit the memory cap with
every min(p - s, m) consecutive packs of a rank's step in flight, which is the memory that the plan
is then predicted to need. The result is the optimum over all contiguous splits, at least one layer
per stage, and all recomputed sets.

For given stage position and units, the cheapest recomputation that fits gives both the smallest sum
and the smallest maximum, so each possible stage has one time. What is left is a shortest path (the
sum) under a limit on its longest edge (the maximum). Paths are taken in order of falling limit; the
sum can only grow on the way, so each one also bounds which limits can still win.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from omnibal.config import ModelConfig
from omnibal.cost.model import CostModel
from omnibal.errors import UserError
from omnibal.pipeline.recompute import cheapest_recompute, least_peak_bytes
from omnibal.pipeline.stage_cost import GIB, MemoryTable, in_flight_features, memory_table
from omnibal.pipeline.units import (
    LANGUAGE_LAYER,
    UNITS,
    VISION_LAYER,
    stages_from_cuts,
    unit_sequence,
)
from omnibal.plan import Stage


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Runs:
    """Every run of units that may be a stage."""

    start: np.ndarray
    """[runs] position of the first unit."""
    end: np.ndarray
    """[runs] position after the last unit."""
    counts: np.ndarray
    """[runs, kinds]."""


def search_stages(
    cost: CostModel,
    model: ModelConfig,
    features: np.ndarray,
    slot: np.ndarray,
    pipeline_size: int,
    micro_batches: int,
    memory_cap_bytes: float,
) -> tuple[Stage, ...]:
    """The best stages for the given packs.

    Args:
        features: [packs, 5] of packs sorted by step, rank and slot.
        slot: [packs].
        pipeline_size: stages; at most as many as the model has layers.
        micro_batches: of one data-parallel rank in a full step.
        memory_cap_bytes: of one device.

    Raises:
        UserError: no split fits the cap.
    """
    runs = _runs(model)
    tables = [
        memory_table(cost, in_flight_features(features, slot, pipeline_size - stage), features)
        for stage in range(pipeline_size)
    ]
    mean = features.mean(axis=0)
    forward_ms = np.array([cost.units[unit].forward_ms @ mean for unit in UNITS])
    backward_ms = np.array([cost.units[unit].backward_ms @ mean for unit in UNITS])
    recomputed = np.empty((pipeline_size, *runs.counts.shape), np.int64)
    run_ms = np.empty((pipeline_size, len(runs.counts)))
    for stage, table in enumerate(tables):
        recomputed[stage], added_ms = cheapest_recompute(
            table, runs.counts, forward_ms, memory_cap_bytes
        )
        run_ms[stage] = runs.counts @ (forward_ms + backward_ms) + added_ms
    edges = _best_edges(_by_edges(run_ms, runs), _cut_ms(cost, model, mean), micro_batches)
    if edges is None:
        raise UserError(_infeasible(model, tables, runs, memory_cap_bytes))
    index = {(int(a), int(b)): i for i, (a, b) in enumerate(zip(runs.start, runs.end, strict=True))}
    chosen = [recomputed[stage, index[run]] for stage, run in enumerate(pairwise(edges))]
    return stages_from_cuts(
        model,
        edges[1:-1],
        [(int(counts[VISION_LAYER]), int(counts[LANGUAGE_LAYER])) for counts in chosen],
    )


def _runs(model: ModelConfig) -> _Runs:
    sequence = unit_sequence(model)
    kinds = np.array([[unit == kind for kind in UNITS] for unit in sequence], np.int64)
    before = np.concatenate([np.zeros((1, len(UNITS)), np.int64), np.cumsum(kinds, axis=0)])
    start, end = np.triu_indices(len(sequence) + 1, k=1)
    counts = before[end] - before[start]
    has_layer = counts[:, VISION_LAYER] + counts[:, LANGUAGE_LAYER] > 0
    return _Runs(start=start[has_layer], end=end[has_layer], counts=counts[has_layer])


def _by_edges(values: np.ndarray, runs: _Runs) -> np.ndarray:
    """[stages, runs] to [stages, start, end]; infinite where there is no run."""
    edges = int(runs.end.max()) + 1
    table = np.full((len(values), edges, edges), np.inf)
    table[:, runs.start, runs.end] = values
    return table


def _cut_ms(cost: CostModel, model: ModelConfig, mean_features: np.ndarray) -> np.ndarray:
    """Activation and gradient sent over a cut at each position; 0 at both ends. [units + 1]"""
    sequence = unit_sequence(model)
    sent = np.array([cost.units[unit].output_bytes @ mean_features for unit in sequence[:-1]])
    cut_ms = np.zeros(len(sequence) + 1)
    cut_ms[1:-1] = 2 * (cost.link_latency_ms + cost.link_ms_per_byte * sent)
    return cut_ms


def _best_edges(run_ms: np.ndarray, cut_ms: np.ndarray, micro_batches: int) -> list[int] | None:
    """Edges (0, cuts, units) of the best split, None when no split fits."""
    best, best_ms, limit = None, np.inf, np.inf
    while (edges := _shortest_path(run_ms, cut_ms, limit)) is not None:
        times = run_ms[np.arange(len(run_ms)), edges[:-1], edges[1:]]
        sum_ms, max_ms = times.sum() + cut_ms[edges].sum(), times.max()
        total_ms = (micro_batches - 1) * max_ms + sum_ms
        if total_ms < best_ms:
            best, best_ms = edges, total_ms
        if micro_batches == 1:
            break
        # Below this limit sums are at least `sum_ms`; above it no maximum can beat the best.
        limit = min(max_ms, (best_ms - sum_ms) / (micro_batches - 1))
    return best


def _shortest_path(run_ms: np.ndarray, cut_ms: np.ndarray, limit: float) -> list[int] | None:
    """Edges of least total time whose every stage takes less than `limit`.

    Args:
        run_ms: [stages, start, end].
        cut_ms: [end].
    """
    allowed = np.where(run_ms < limit, run_ms, np.inf)
    reached = np.full(len(cut_ms), np.inf)
    reached[0] = 0.0
    previous = []
    for stage_ms in allowed:
        total = reached[:, None] + stage_ms
        previous.append(total.argmin(axis=0))
        reached = total.min(axis=0) + cut_ms
    if not np.isfinite(reached[-1]):
        return None
    edges = [len(cut_ms) - 1]
    for start in reversed(previous):
        edges.append(int(start[edges[-1]]))
    return edges[::-1]


def _infeasible(
    model: ModelConfig, tables: Sequence[MemoryTable], runs: _Runs, memory_cap_bytes: float
) -> str:
    """The smallest cap that some split would fit, and what else would help."""
    peaks = np.stack([least_peak_bytes(table, runs.counts) for table in tables])
    reached = np.full(int(runs.end.max()) + 1, np.inf)
    reached[0] = 0.0
    for stage_peaks in _by_edges(peaks, runs):
        reached = np.maximum(reached[:, None], stage_peaks).min(axis=0)
    need, cap = reached[-1] / GIB, memory_cap_bytes / GIB
    return (
        f"{model.name} on {len(tables)} pipeline stages needs {need:.2f} GiB per device at best, "
        f"with recomputation where it helps: {need - cap:.2f} GiB more than the memory cap of "
        f"{cap:.2f} GiB, which must hold every stage; raise the memory cap, use more pipeline "
        "stages or tensor parallelism, or pack to smaller caps (max_tiles, max_tokens)"
    )
