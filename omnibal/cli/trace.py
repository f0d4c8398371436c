"""A simulated step in Chrome's Trace Event Format (complete events, microseconds).

Process: data-parallel rank; thread: stage; event: a micro-batch's pass in a chunk, or encoders.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from omnibal.cost.model import CostModel
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.pipeline.simulate import encoder_blocks, simulate_ranks
from omnibal.pipeline.stage_cost import workload_times
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.workload import Workload

_US_PER_MS = 1e3


def chrome_trace(
    cost: CostModel,
    stages_at: Sequence[Sequence[Stage]],
    workload: Workload,
    step: int,
    schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD,
) -> dict[str, Any]:
    """Return a step's trace, without weight update; `cost` of all levels, `stages_at` by level."""
    events: list[dict[str, Any]] = []
    of_step = workload.of_steps([step])
    times = workload_times(cost, stages_at, of_step)
    timeline = simulate_ranks(times, of_step, schedule)
    stages = len(stages_at[0]) // schedule.chunks  # `stages_at` is [levels][chunks]
    sizes = cost.features[1 : cost.features.index("tokens") + 1]  # encoder items, tokens
    for rank in range(workload.data_parallel_size):
        own = of_step.rows(of_step.dp_rank == rank)
        events.append(_name_event("process_name", f"data-parallel rank {rank}", rank, 0))
        events += [_name_event("thread_name", f"stage {s}", rank, s) for s in range(stages)]
        passes, counts = timeline.of_step(rank), own.features[:, 1 : 1 + len(sizes)].astype(int)
        for kind, start_ms in passes.start_ms.items():
            took_ms = passes.end_ms[kind] - start_ms
            for micro_batch, part in np.ndindex(len(counts), start_ms.shape[1]):
                args = {"chunk": part // stages} if schedule.chunks > 1 else {}
                args |= dict(zip(sizes, counts[micro_batch].tolist(), strict=True))
                times_ms = (float(ms[micro_batch, part]) for ms in (start_ms, took_ms))
                place, name = (rank, passes.schedule.stage_of(part)), f"{kind.label} {micro_batch}"
                events.append(_pass_event(name, kind.label, place, *times_ms, **args))
    for rank, label, begin_ms, end_ms in encoder_blocks(timeline, times, of_step):
        for stage in range(stages):
            place = rank, stage
            events.append(_pass_event(label, "encoders", place, begin_ms, end_ms - begin_ms))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name_event(kind: str, name: str, rank: int, stage: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": stage, "args": {"name": name}}


def _pass_event(
    name: str, kind: str, place: tuple[int, int], start_ms: float, took_ms: float, **args: int
) -> dict[str, Any]:
    rank, stage = place
    times = {"ts": _US_PER_MS * start_ms, "dur": _US_PER_MS * took_ms}
    named = {"ph": "X", "name": name, "cat": kind, "pid": rank, "tid": stage}
    return named | times | {"args": args}
