"""Synthetic replays: every stage takes the cost model's single-device time, or a multiple."""

from pathlib import Path

import numpy as np

from omnibal.cost.model import CostModel
from omnibal.job.plan import Plan, plan_sha256
from omnibal.job.replay import REPLAY_FILES, ReplayInfo, StageReplay
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
    """Write a replay directory, by default of all steps and as predicted.

    Stage s takes `factors[s]` times its predicted single-device time, and keeps `s + 1` GiB of
    activations.
    """
    chosen = tuple(np.unique(workload.step).tolist()) if steps is None else steps
    REPLAY_FILES.open(directory, replay_info(plan, chosen, **info))
    rows, schedule = np.flatnonzero(np.isin(workload.step, chosen)), plan.schedule
    silent = causes_of(cost, plan.stages_at_levels, workload.rows(rows)).silent
    update_ms = per_step_costs(cost, plan.stages, schedule).update_ms
    has_late, replays = len(schedule.passes) > 2, []
    for stage, parts in enumerate(schedule.parts_of(len(plan.stages))):
        forward, backward, weight, recompute = (
            tuple((factors[stage] if factors else 1.0) * each[:, parts].ravel())
            for each in (
                silent.forward_ms, silent.backward_ms, silent.weight_ms, silent.recompute_ms,
            )
        )  # fmt: skip
        replays.append(
            StageReplay(
                stage=stage,
                rows=tuple(rows.tolist()),
                forward_ms=forward,
                backward_ms=backward,
                weight_ms=weight if has_late else (),
                recompute_ms=recompute,
                update_ms=float(update_ms[stage]),
                state_gib=0.5,
                activations_gib=stage + 1.0,
                with_working_memory=with_working_memory,
            )
        )
        REPLAY_FILES.write(replays[-1], directory)
    return replays
