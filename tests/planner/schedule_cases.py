"""Schedules run by an event loop that is not the simulator's."""

from collections.abc import Mapping

import numpy as np

from omnibal.pipeline.operation_graph import planned_graph
from omnibal.pipeline.schedules import Operation, Pass, PipelineSchedule, Schedule
from omnibal.pipeline.simulate import Timeline, simulate_schedule

F, B, BI, BW = Pass.FORWARD, Pass.BACKWARD, Pass.BACKWARD_INPUT, Pass.BACKWARD_WEIGHT
SCHEDULES = [
    PipelineSchedule(name="1f1b"),
    PipelineSchedule(name="interleaved", chunks=2),
    PipelineSchedule(name="interleaved", chunks=3),
    PipelineSchedule(name="zb-h1"),
    PipelineSchedule(name="zb-v", chunks=2),
]

Key = tuple[int, Operation]
"""(stage, operation)."""


def simulate_1f1b(forward_ms: np.ndarray, backward_ms: np.ndarray, *others) -> Timeline:
    """Steps of passes [steps, m, p] in 1F1B; `others` are as of `simulate_schedule`."""
    _, micro_batches, stages = forward_ms.shape
    passes = {F: forward_ms, B: backward_ms}
    return simulate_schedule(planned_graph(stages, micro_batches), passes, *others)


def event_loop(
    schedule: Schedule,
    duration_ms: Mapping[Pass, np.ndarray],
    forward_link_ms: np.ndarray,
    backward_link_ms: np.ndarray,
) -> dict[Key, tuple[float, float]]:
    """When every operation starts and ends, by running whatever stage can go on first.

    Knows where tensors go, not what operations wait for: whoever ends a pass delivers its output.
    """
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
