"""How long simulating many steps takes, and against a plain event loop.

    OMP_NUM_THREADS=1 python benchmarks/simulator.py [--steps 1000] [--loop-steps 1]

Random durations for steps of 32 micro-batches on 8 stages and 16 data-parallel ranks, on one core.
The loop does the same work one operation at a time, on few steps; its time is scaled up.
"""

import argparse
import time

import numpy as np

from omnibal.pipeline.operation_graph import planned_graph
from omnibal.pipeline.schedules import Pass
from omnibal.pipeline.simulate import predict_steps
from omnibal.pipeline.stage_cost import PerStepCosts, StageTimes
from omnibal.pipeline.workload import Workload

MICRO_BATCHES, STAGES, RANKS = 32, 8, 16


def random_times(packs: int, rng: np.random.Generator) -> StageTimes:
    forward_ms = rng.uniform(1, 2, (packs, STAGES))
    link_ms = rng.uniform(0, 0.1, (packs, STAGES - 1))
    return StageTimes(
        forward_ms=forward_ms,
        backward_ms=2 * forward_ms,
        weight_ms=forward_ms,
        recompute_ms=0 * forward_ms,
        forward_link_ms=link_ms,
        backward_link_ms=link_ms,
    )


def loop_step_ms(times: StageTimes, first: int) -> float:
    """One step: all ranks, one operation after the other."""
    slowest, graph = 0.0, planned_graph(STAGES, MICRO_BATCHES)
    columns = graph.stage, graph.kind == Pass.BACKWARD, graph.micro_batch
    operations = list(zip(*(column.tolist() for column in columns), strict=True))
    for rank in range(RANKS):
        rows = slice(first + rank * MICRO_BATCHES, first + (rank + 1) * MICRO_BATCHES)
        duration = (times.forward_ms[rows].tolist(), times.backward_ms[rows].tolist())
        link = (times.forward_link_ms[rows].tolist(), times.backward_link_ms[rows].tolist())
        free = [0.0] * STAGES
        end: dict[tuple[int, int, int], float] = {}
        for stage, backward, micro_batch in operations:
            sender = stage + 1 if backward else stage - 1
            start = free[stage]
            if 0 <= sender < STAGES:
                arrival = end[backward, micro_batch, sender]
                start = max(start, arrival + link[backward][micro_batch][min(stage, sender)])
            free[stage] = start + duration[backward][micro_batch][stage]
            end[backward, micro_batch, stage] = free[stage]
        slowest = max(slowest, *free)
    return slowest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--loop-steps", type=int, default=1)
    arguments = parser.parse_args()
    per_step = RANKS * MICRO_BATCHES
    index = np.arange(arguments.steps * per_step)
    times = random_times(len(index), np.random.default_rng(0))
    workload = Workload(
        features=np.zeros((len(index), 1)),
        step=index // per_step,
        dp_rank=index % per_step // MICRO_BATCHES,
        slot=index % MICRO_BATCHES,
        data_parallel_size=RANKS,
    )
    nothing = np.zeros(STAGES)
    once = PerStepCosts(
        reduction_ms=nothing,
        gather_ms=nothing,
        buckets=np.ones(STAGES),
        tied_ms=nothing,
        update_ms=nothing,
    )
    start = time.perf_counter()
    simulated = predict_steps(times, workload, once)
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    looped = [loop_step_ms(times, step * per_step) for step in range(arguments.loop_steps)]
    loop_seconds = (time.perf_counter() - start) * arguments.steps / arguments.loop_steps
    np.testing.assert_allclose(simulated.step_ms[: arguments.loop_steps], looped)
    sizes = f"{MICRO_BATCHES} micro-batches x {STAGES} stages x {RANKS} ranks"
    print(f"{arguments.steps:,} steps x {sizes}: {seconds:.2f} s; as a loop {loop_seconds:.0f} s")


if __name__ == "__main__":
    main()
