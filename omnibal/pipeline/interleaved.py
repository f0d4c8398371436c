"""Prediction of interleaved 1F1B, where a stage holds several chunks of the model.

Nothing is planned or trained so here: it is what other trainers' launch lines may ask for. All
micro-batches must be alike, as made-up ones are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnibal.cost.model import CostModel
from omnibal.pipeline.level_costs import features_of
from omnibal.pipeline.operation_graph import OperationGraph, held_in_passes, operation_graph
from omnibal.pipeline.schedules import PipelineSchedule, interleaved
from omnibal.pipeline.simulate import predict_steps
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.stage_cost import per_step_costs, workload_times
from omnibal.pipeline.stage_memory import GIB, LINKS, RunningPasses, library_bytes, memory_table
from omnibal.pipeline.unit_runs import counts_of_runs, unit_runs
from omnibal.pipeline.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class InterleavedPrediction:
    """Time and memory of a step."""

    step_ms: float
    wait_fraction: np.ndarray
    """Share of the step in which each stage idles, [stages]."""
    passes_gib: np.ndarray
    """Most that a device of each stage needs besides weights, gradients and optimizer state,
    [stages]."""


def predict_interleaved(
    cost: CostModel, parts: Sequence[Stage], stages: Sequence[Stage], workload: Workload
) -> InterleavedPrediction:
    """Simulate interleaved 1F1B on micro-batches that are all alike.

    Args:
        cost: of one level.
        parts: chunks of all stages in model order: part i is chunk i // p of stage i % p.
        stages: all chunks of a stage as one, by which what is done once a step is counted.
        workload: steps of a multiple of as many micro-batches as there are stages.
    """
    count, chunks = len(stages), len(parts) // len(stages)
    schedule = PipelineSchedule(name="interleaved", chunks=chunks)
    times, once = workload_times(cost, (parts,), workload), per_step_costs(cost, parts, schedule)
    simulated = predict_steps(times, workload, once, schedule)
    graph = operation_graph(interleaved, count, chunks, int(workload.slot.max()) + 1)
    largest = features_of(workload, cost).max(axis=0)
    needs = [needed_bytes(replace(cost, library_buffers=()), part, largest) for part in parts]
    buffers = [library_bytes(cost, stage) for stage in stages]
    return InterleavedPrediction(
        step_ms=float(simulated.step_ms.mean()),
        wait_fraction=simulated.wait_fractions,
        passes_gib=np.array(
            [
                (most_bytes(graph, stage, needs[stage::count]) + buffers[stage]) / GIB
                for stage in range(count)
            ]
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Needed:
    """Bytes of one micro-batch in one chunk."""

    kept: float
    """Kept for its backward."""
    running: float
    """Needed while it runs, what is kept and links included."""


def needed_bytes(cost: CostModel, part: Stage, features: np.ndarray) -> Needed:
    runs = unit_runs(cost.kinds, [part])
    alone = RunningPasses(
        own=features[None],
        others=np.zeros((1, len(features))),
        links=np.ones((1, len(LINKS))),
        largest=features,
    )
    table = memory_table(cost, alone)
    kept = table.activation_bytes(*counts_of_runs(len(cost.kinds), runs))
    return Needed(kept=float(kept.max()), running=float(table.stage_bytes(runs).max()))


def most_bytes(graph: OperationGraph, stage: int, needs: Sequence[Needed]) -> float:
    """Most bytes of any pass of a stage with these chunks, besides its state."""
    passes = held_in_passes(graph, stage)
    first, stop = passes.held[..., 0], passes.held[..., 1]
    chunk = graph.part[graph.of_stage(stage)] // graph.schedule.stages
    kept = np.array([need.kept for need in needs])
    running = np.array([need.running for need in needs])
    return float(((stop - first) @ kept - kept[chunk] + running[chunk]).max())
