"""Prediction of a plan's steps: times, memory, and where the time goes."""

from collections.abc import Sequence

from omnibal.config import ModelConfig
from omnibal.data.packs import ScheduledPacks
from omnibal.parallel import Parallel
from omnibal.pipeline.lost_time import lost_time
from omnibal.pipeline.prediction import DataParallelExchange, Prediction, StagePrediction
from omnibal.pipeline.simulate import predict_steps
from omnibal.pipeline.stage_cost import (
    LevelStages,
    OnceAStep,
    StageTimes,
    once_a_step_at,
    workload_times,
)
from omnibal.pipeline.stage_memory import stage_memories
from omnibal.pipeline.units import check_stages
from omnibal.pipeline.workload import Workload

MAX_SIMULATED_STEPS = 2_000
_MS_PER_DAY = 86_400_000


def predict(
    levels: Sequence[LevelStages],
    model: ModelConfig,
    parallel: Parallel,
    packs: ScheduledPacks,
    all_steps: Workload,
) -> Prediction:
    """Simulate the plan on its own packs: at most 2,000 steps, spread evenly over the run.

    Args:
        levels: the plan's stages and costs at every level of its packs.
        all_steps: of the packs.

    Raises:
        UserError: the stages are not the model cut into runs.
    """
    for level in levels:
        check_stages(model, level.stages)
    memories = stage_memories(levels, all_steps)
    workload = all_steps.some_steps(MAX_SIMULATED_STEPS)
    times, once = workload_times(levels, workload), once_a_step_at(levels)
    simulated = predict_steps(times, workload, once)
    total_ms = float(simulated.step_ms.sum())
    step_ms = total_ms / len(simulated.step_ms)
    wait_fraction = simulated.wait_fractions
    run_ms = step_ms * packs.steps
    return Prediction(
        cost_source=levels[0].cost.source,
        step_ms=step_ms,
        lost=lost_time(levels, workload, step_ms),
        bubble_fraction=float(wait_fraction.mean()),
        samples_per_second_per_gpu=len(packs.packs.samples)
        / (run_ms / 1e3)
        / parallel.world_size,
        gpu_days=run_ms * parallel.world_size / _MS_PER_DAY,
        exchange=_exchange(times, once, workload, step_ms),
        stages=tuple(
            StagePrediction(
                forward_ms=float(times.forward_ms[:, index].mean()),
                backward_ms=float(times.backward_ms[:, index].mean()),
                wait_fraction=float(wait_fraction[index]),
                memory=memory,
            )
            for index, memory in enumerate(memories)
        ),
    )


def _exchange(
    times: StageTimes, once: OnceAStep, workload: Workload, step_ms: float
) -> DataParallelExchange:
    without_ms = predict_steps(times, workload, once.without_exchange()).step_ms.mean()
    return DataParallelExchange(
        total_ms=float(once.exchange_ms.max()), exposed_ms=step_ms - float(without_ms)
    )
