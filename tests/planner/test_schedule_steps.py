"""Steps of any schedule, with a micro-batch count per rank, against an event loop."""

from dataclasses import replace

import numpy as np
import pytest
from schedule_cases import SCHEDULES, event_loop, nothing_once, workload_of

from omnibal.pipeline import simulate
from omnibal.pipeline.schedules import Pass, PipelineSchedule
from omnibal.pipeline.simulate import predict_steps, simulate_ranks
from omnibal.pipeline.stage_cost import StageTimes
from omnibal.pipeline.workload import Workload

pytestmark = pytest.mark.quick


def random_workload(rng: np.random.Generator, ranks: int) -> Workload:
    """Return two steps with 0 to 8 micro-batches per rank; the first rank has at least one."""
    counts = rng.integers(0, 9, (2, ranks))
    counts[:, 0] += 1
    return workload_of(counts)


def random_times(rng: np.random.Generator, rows: int, parts: int) -> StageTimes:
    backward_ms = rng.exponential(2, (rows, parts))
    return StageTimes(
        forward_ms=rng.exponential(1, (rows, parts)),
        backward_ms=backward_ms,
        weight_ms=rng.uniform(0, 1, (rows, parts)) * backward_ms,
        recompute_ms=0 * backward_ms,
        forward_link_ms=rng.exponential(0.3, (rows, parts - 1)),
        backward_link_ms=rng.exponential(0.3, (rows, parts - 1)),
    )


def run_ranks(
    schedule: PipelineSchedule, stages: int, times: StageTimes, workload: Workload
) -> dict[tuple[int, int], dict]:
    """Return start and end of every operation, by step and rank."""
    ran = {}
    for rank in {*zip(workload.step.tolist(), workload.dp_rank.tolist(), strict=True)}:
        rows = (workload.step == rank[0]) & (workload.dp_rank == rank[1])
        own = times.rows(rows)
        durations = {kind: own.pass_ms(kind) for kind in Pass}
        listed = schedule.rule(stages, schedule.chunks, int(rows.sum()))
        ran[rank] = event_loop(listed, durations, own.forward_link_ms, own.backward_link_ms)
    return ran


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_random_steps_are_as_an_event_loop_runs_them(schedule: PipelineSchedule):
    """Prevents ranks with fewer micro-batches that run another rank's operation list."""
    rng = np.random.default_rng(schedule.chunks)
    for _ in range(100):
        stages, ranks = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        workload = random_workload(rng, ranks)
        times = random_times(rng, len(workload), stages * schedule.chunks)
        ran = run_ranks(schedule, stages, times, workload)
        steps = predict_steps(times, workload, nothing_once(stages), schedule)
        for step in (0, 1):
            ends = [end for (at, _), ops in ran.items() if at == step for _, end in ops.values()]
            assert steps.step_ms[step] == pytest.approx(max(ends))
            busy = (times.forward_ms + times.backward_ms)[workload.step == step].sum()
            assert steps.busy_ms[step].sum() == pytest.approx(busy / ranks)
        first = workload.of_steps([0])
        timeline = simulate_ranks(times.rows(workload.step == 0), first, schedule)
        for rank in (rank for step, rank in ran if step == 0):
            for (stage, one), (start, end) in ran[0, rank].items():
                at = rank, one.micro_batch, timeline.schedule.part(stage, one.chunk)
                assert timeline.start_ms[one.kind][at] == pytest.approx(start)
                assert timeline.end_ms[one.kind][at] == pytest.approx(end)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_what_is_reduced_waits_for_the_last_gradient_of_its_chunk(
    schedule: PipelineSchedule, monkeypatch: pytest.MonkeyPatch
):
    """Prevents a gradient reduction that begins before a chunk's last weight gradients exist."""
    rng, stages = np.random.default_rng(7), 3
    workload = random_workload(rng, 2)
    times = random_times(rng, len(workload), stages * schedule.chunks)
    reduction_ms = rng.exponential(6, stages)
    once = nothing_once(stages, reduction_ms=reduction_ms)
    last = {Pass.BACKWARD, Pass.BACKWARD_WEIGHT}
    expected = np.zeros((2, stages))
    for (step, _), operations in run_ranks(schedule, stages, times, workload).items():
        ended = np.zeros((stages, schedule.chunks))
        for (stage, one), (_, end) in operations.items():
            if one.kind in last:
                ended[stage, one.chunk] = max(ended[stage, one.chunk], end)
        for stage in range(stages):
            reduced = 0.0
            for end in np.sort(ended[stage]):
                reduced = max(reduced, end) + reduction_ms[stage] / schedule.chunks
            expected[step, stage] = max(expected[step, stage], reduced)
    for entries in (simulate._MAX_PASS_TIMES, 1):
        monkeypatch.setattr(simulate, "_MAX_PASS_TIMES", entries)
        steps = predict_steps(times, workload, once, schedule)
        np.testing.assert_allclose(steps.step_ms, expected.max(axis=1))


def test_ranks_that_share_micro_batches_run_by_one_list():
    """Prevents ranks that share a micro-batch from running it at different times."""
    rng, stages, schedule = np.random.default_rng(1), 3, SCHEDULES[-1]
    workload = workload_of([[7, 5]])
    workload = replace(workload, context=np.where(workload.slot < 5, 2, 1))
    times = random_times(rng, len(workload), stages * 2)
    timeline = simulate_ranks(times, workload, schedule)
    for kind, starts in timeline.start_ms.items():
        np.testing.assert_allclose(starts[0, :5], starts[1, :5])
        assert (timeline.end_ms[kind][1, 5:] == starts[1, 5:]).all()
