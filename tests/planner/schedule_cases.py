"""Schedules run by an event loop independent of the simulator."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from omnibal.cost.model import CostModel
from omnibal.pipeline.lost_time import causes_of, lost_time_of
from omnibal.pipeline.prediction import LostTime
from omnibal.pipeline.schedules import ChunkPass, Pass, PipelineSchedule, StepSchedule
from omnibal.pipeline.simulate import SimulatedRows, Timeline, block_sizes
from omnibal.pipeline.stage_cost import PerStepCosts, per_step_costs, stage_times
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.unit_runs import stage_units
from omnibal.pipeline.workload import Workload

F, B, BI, BW = Pass.FORWARD, Pass.BACKWARD, Pass.BACKWARD_INPUT, Pass.BACKWARD_WEIGHT
SCHEDULES = [
    PipelineSchedule(name="1f1b"),
    PipelineSchedule(name="interleaved", chunks=2),
    PipelineSchedule(name="interleaved", chunks=3),
    PipelineSchedule(name="zb-h1"),
    PipelineSchedule(name="zb-v", chunks=2),
]

Key = tuple[int, ChunkPass]
"""(stage, operation)."""


def workload_of(
    counts: Sequence[Sequence[int]] | np.ndarray, features: np.ndarray | None = None, **columns
) -> Workload:
    """Return steps with `counts` micro-batches, [steps, ranks]."""
    number = np.asarray(counts)
    step, rank = (np.repeat(axis.ravel(), number.ravel()) for axis in np.indices(number.shape))
    slot = np.concatenate([np.arange(count) for count in number.ravel()])
    features = np.zeros((len(slot), 1)) if features is None else features
    at = {"step": step, "dp_rank": rank, "slot": slot, "data_parallel_size": number.shape[1]}
    return Workload(features=features, **at, **columns)


def nothing_once(stages: int, **changes: np.ndarray) -> PerStepCosts:
    """Return per-step costs: only `changes` are exchanged or updated."""
    usual = dict.fromkeys(("reduction_ms", "gather_ms", "tied_ms", "update_ms"), np.zeros(stages))
    return PerStepCosts(**(usual | {"buckets": np.ones(stages)} | changes))


def simulate_1f1b(
    forward_ms: np.ndarray,
    backward_ms: np.ndarray,
    *links_ms: np.ndarray,
    counts: np.ndarray | None = None,
    **blocks: Any,
) -> Timeline:
    """Return simulated 1F1B steps [steps, m, p], or one step [m, p]. `blocks` go to `block_sizes`,
    with the context [steps, m]."""
    if forward_ms.ndim == 2:
        given = (each[None] for each in (forward_ms, backward_ms, *links_ms))
        return simulate_1f1b(*given).of_step(0)
    steps, micro_batches, _ = forward_ms.shape
    counts = np.full(steps, micro_batches) if counts is None else counts
    real = np.arange(micro_batches)[:, None, None] < counts

    def rows_last(values: tuple[np.ndarray, ...], missing: float) -> np.ndarray:
        return np.stack([np.where(real, np.moveaxis(each, 0, -1), missing) for each in values])

    together = None
    if blocks:
        context = blocks.pop("context").T[:, None]
        together = block_sizes(context, **({"lockstep_ranks": 1, "has_experts": None} | blocks))
    rows = SimulatedRows(
        pass_ms=rows_last((forward_ms, backward_ms), 0),
        link_ms=rows_last(links_ms, -np.inf),
        counts=counts,
        together=together,
    )
    return rows.simulate()


def needed_ms(cost: CostModel, stages: Sequence[Stage], features: np.ndarray) -> float:
    """Return ms of all micro-batches' passes without recomputation and collectives."""
    times = stage_times(cost, stages, features)
    units = [cost.units[unit] for stage in stages for unit in stage_units(cost.kinds, stage.units)]
    collective_ms = sum(unit.collective_ms.sum(axis=0) for unit in units)
    passes_ms = times.forward_ms + times.backward_ms
    return float(passes_ms.sum() - features.sum(axis=0) @ collective_ms)


def lost_time(
    cost: CostModel, stages_at: Sequence[Sequence[Stage]], workload: Workload, step_ms: float
) -> LostTime:
    causes, once = causes_of(cost, stages_at, workload), per_step_costs(cost, stages_at[0])
    return lost_time_of(causes, workload, once, step_ms)


Held = set[tuple[int, int]]
"""(chunk, micro-batch)."""


def held_in_list(operations: Sequence[ChunkPass]) -> list[tuple[ChunkPass, Held, Held]]:
    """Return every operation, and passes then kept for backward and for weight gradients."""
    kept: Held = set()
    late: Held = set()
    found = []
    for one in operations:
        place = one.chunk, one.micro_batch
        if one.kind is F:
            kept.add(place)
        found.append((one, set(kept), set(late)))
        if one.kind in (B, BI):
            kept.remove(place)
        if one.kind is BI:
            late.add(place)
        if one.kind is BW:
            late.remove(place)
    assert not kept and not late
    return found


def event_loop(
    schedule: StepSchedule,
    duration_ms: Mapping[Pass, np.ndarray],
    forward_link_ms: np.ndarray,
    backward_link_ms: np.ndarray,
) -> dict[Key, tuple[float, float]]:
    """Return start and end of every operation. The stage that can start first runs, and delivers
    its output: the loop knows where tensors go, not the operations' dependencies."""
    stages, parts = schedule.stages, schedule.stages * schedule.chunks
    queues = [list(operations) for operations in schedule.operations]
    free = [0.0] * stages
    delivered: dict[tuple[str, int, int], float] = {}
    for micro_batch in range(schedule.micro_batches):
        delivered["activation", micro_batch, 0] = 0.0
    ran: dict[Key, tuple[float, float]] = {}
    while any(queues):
        ready = []
        for stage, queue in enumerate(queues):
            if not queue:
                continue
            one = queue[0]
            inbox = {F: "activation", B: "gradient", BI: "gradient", BW: "kept"}[one.kind]
            part = schedule.part(stage, one.chunk)
            arrival = delivered.get((inbox, one.micro_batch, part))
            if arrival is not None:
                ready.append((max(free[stage], arrival), stage, part))
        start, stage, part = min(ready)
        one = queues[stage].pop(0)
        end = start + duration_ms[one.kind][one.micro_batch, part]
        ran[stage, one], free[stage], i = (start, end), end, one.micro_batch
        if one.kind is F and part == parts - 1:
            delivered["gradient", i, part] = end
        elif one.kind is F:
            delivered["activation", i, part + 1] = end + forward_link_ms[i, part]
        elif one.kind is not BW and part > 0:
            delivered["gradient", i, part - 1] = end + backward_link_ms[i, part - 1]
        if one.kind is BI:
            delivered["kept", i, part] = end
    return ran
