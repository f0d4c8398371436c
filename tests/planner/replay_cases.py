"""Made-up replays: every stage takes what the cost model says of one device alone, or a factor."""

from pathlib import Path

import numpy as np

from omnibal.cost.model import CostModel
from omnibal.job.plan import Plan, plan_sha256
from omnibal.job.replay import (
    REPLAY_FILES,
    ReplayInfo,
    StageReplay,
)
from omnibal.pipeline.lost_time import causes_of
from omnibal.pipeline.stage_cost import per_step_costs
from omnibal.pipeline.workload import Workload


def replay_info(plan: Plan, steps: tuple[int, ...], **changes) -> ReplayInfo:
    defaults = {
        "plan_sha256": plan_sha256(plan),
        "steps": steps,
        "repetitions": 3,
        "content": "random",
        "device": "one device",
        "processes": 1,
    }
    return ReplayInfo(**(defaults | changes))


def stage_replays(
    plan: Plan,
    cost: CostModel,
    workload: Workload,
    steps: tuple[int, ...],
    factors: tuple[float, ...],
    *,
    with_working_memory: bool = True,
) -> list[StageReplay]:
    """Stage s takes `factors[s]` times what it is predicted to take without other devices, and
    keeps `s + 1` GiB of activations."""
    rows, schedule = np.flatnonzero(np.isin(workload.step, steps)), plan.schedule
    silent = causes_of(cost, plan.stages_at_levels, workload.rows(rows)).silent
    update_ms = per_step_costs(cost, plan.stages, schedule).update_ms
    parts_of, has_late = schedule.parts_of(len(plan.stages)), len(schedule.passes) > 2
    return [
        StageReplay(
            stage=stage,
            rows=tuple(rows.tolist()),
            forward_ms=tuple((factor * silent.forward_ms[:, parts]).ravel()),
            backward_ms=tuple((factor * silent.backward_ms[:, parts]).ravel()),
            weight_ms=tuple((factor * silent.weight_ms[:, parts]).ravel()) if has_late else (),
            recompute_ms=tuple((factor * silent.recompute_ms[:, parts]).ravel()),
            update_ms=float(update_ms[stage]),
            state_gib=0.5,
            activations_gib=stage + 1.0,
            with_working_memory=with_working_memory,
        )
        for stage, (factor, parts) in enumerate(zip(factors, parts_of, strict=True))
    ]


def write_replay(
    directory: Path,
    plan: Plan,
    cost: CostModel,
    workload: Workload,
    steps: tuple[int, ...] | None = None,
    *,
    factors: tuple[float, ...] | None = None,
    with_working_memory: bool = True,
    **info,
) -> list[StageReplay]:
    """A replay directory; of all steps if none are named, and as predicted if no factors are."""
    chosen = tuple(np.unique(workload.step).tolist()) if steps is None else steps
    REPLAY_FILES.open(directory, replay_info(plan, chosen, **info))
    factors = factors or (1.0,) * plan.parallel.pipeline
    replays = stage_replays(
        plan, cost, workload, chosen, factors, with_working_memory=with_working_memory
    )
    for replay in replays:
        REPLAY_FILES.write(replay, directory)
    return replays
