"""Predict a plan's step times, memory and lost time."""

from collections.abc import Sequence
from dataclasses import replace

from omnibal.cost.model import CostModel
from omnibal.model.parallel import Parallel
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.loader_time import StageReading
from omnibal.pipeline.lost_time import causes_of, lost_time_of
from omnibal.pipeline.prediction import DataParallelExchange, Prediction, StagePrediction
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.pipeline.simulate import predict_steps
from omnibal.pipeline.stage_cost import per_step_costs
from omnibal.pipeline.stage_memory import stage_memories
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.workload import Workload

MAX_SIMULATED_STEPS = 2_000  # max steps of a run, spread evenly
_MS_PER_DAY = 86_400_000  # budgets are in GPU days


def predict(
    cost: CostModel,
    parallel: Parallel,
    stages_at: Sequence[Sequence[Stage]],
    packs: ScheduledPacks | None,
    all_steps: Workload,
    reading: StageReading | None = None,
    schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD,
) -> Prediction:
    """Return memory over `all_steps`, times over at most 2,000. `stages_at` is by level; `packs` of
    mock samples, which give no throughput of a dataset, are None."""
    memories = stage_memories(cost, stages_at, all_steps, schedule)
    workload = all_steps.some_steps(MAX_SIMULATED_STEPS)
    causes = causes_of(cost, stages_at, workload)
    times = causes.all
    once = per_step_costs(cost, stages_at[0], schedule)
    simulated = predict_steps(times, workload, once, schedule)
    simulated_ms = float(simulated.step_ms.mean())
    lost = lost_time_of(causes, workload, once, simulated_ms, schedule)
    # Exposed exchange is the step's time over that of a step without exchanges.
    encoding = workload.encoding
    unreduced = replace(times, waits_ms=None if encoding is None else encoding.waits.unreduced)
    bare = predict_steps(unreduced, workload, once.without_exchange(), schedule)
    of_encoders_ms = 0.0 if encoding is None else encoding.exchange_ms
    exchange = DataParallelExchange(
        total_ms=float(once.exchange_ms.max()) + of_encoders_ms,
        exposed_ms=simulated_ms - float(bare.step_ms.mean()),
    )
    read = None
    if reading is not None:
        read, prolonged = reading.add_to(workload, cost, simulated)
        waits_ms = float((prolonged.step_ms - simulated.step_ms).mean())
        lost, simulated = lost.model_copy(update={"reading_ms": waits_ms}), prolonged
    step_ms = float(simulated.step_ms.mean())
    wait_fraction = simulated.wait_fractions
    samples_per_second_per_gpu = gpu_days = None
    if packs is not None:
        run_ms, ranks = step_ms * packs.steps, parallel.world_size
        samples_per_second_per_gpu = len(packs.packs.samples) / (run_ms / 1e3) / ranks
        gpu_days = run_ms * ranks / _MS_PER_DAY
    parts_of = schedule.parts_of(len(stages_at[0]))
    return Prediction(
        cost_source=cost.source,
        step_ms=step_ms,
        lost=lost,
        bubble_fraction=float(wait_fraction.mean()),
        samples_per_second_per_gpu=samples_per_second_per_gpu,
        gpu_days=gpu_days,
        exchange=exchange,
        stages=tuple(
            StagePrediction(
                forward_ms=sum(float(times.forward_ms[:, part].mean()) for part in parts),
                backward_ms=sum(float(times.backward_ms[:, part].mean()) for part in parts),
                wait_fraction=float(waited),
                memory=memory,
            )
            for parts, waited, memory in zip(parts_of, wait_fraction, memories, strict=True)
        ),
        data_parallel_encoders=None if encoding is None else encoding.predicted,
        reading=read,
    )
