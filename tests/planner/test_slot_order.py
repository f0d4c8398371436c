"""The order of micro-batches within a step, against all orders, and what must not change."""

from itertools import permutations

import numpy as np
import pytest
from plan_cases import request

from omnibal.job.planner import make_ordered_plan, make_plan
from omnibal.pipeline.schedules import PipelineSchedule
from omnibal.pipeline.simulate import predict_steps, simulate_step
from omnibal.pipeline.slot_order import searched_slots
from omnibal.pipeline.stage_cost import PerStepCosts, StageTimes
from omnibal.pipeline.workload import Workload

pytestmark = pytest.mark.quick

NOTHING_ONCE = PerStepCosts(
    reduction_ms=np.zeros(2),
    gather_ms=np.zeros(2),
    tied_ms=np.zeros(2),
    update_ms=np.zeros(2),
    buckets=np.ones(2),
)


def random_case(seed: int, ranks: int, most: int, parts: int = 3) -> tuple[StageTimes, Workload]:
    """Times of unequal micro-batches on some parts, in two steps of ranks of unlike counts."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, most + 1, (2, ranks))
    step, rank = (np.repeat(each.ravel(), counts.ravel()) for each in np.indices(counts.shape))
    slot = np.concatenate([np.arange(count) for count in counts.ravel()])
    size = rng.lognormal(0, 0.7, (len(slot), 1)) * rng.uniform(0.5, 1.5, (len(slot), parts))
    links = rng.uniform(0, 0.2, (len(slot), parts - 1))
    times = StageTimes(
        forward_ms=size,
        backward_ms=2 * size,
        weight_ms=size,
        recompute_ms=0 * size,
        forward_link_ms=links,
        backward_link_ms=links,
    )
    workload = Workload(
        features=np.ones((len(slot), 1)),
        step=step,
        dp_rank=rank,
        slot=slot,
        data_parallel_size=ranks,
    )
    return times, workload


def finish_ms(times: StageTimes, rows: np.ndarray) -> float:
    """Simulated time of one rank's micro-batches, in this order."""
    some = times.rows(rows)
    each = some.forward_ms, some.backward_ms, some.forward_link_ms, some.backward_link_ms
    return float(simulate_step(*each).step_ms)


def step_ms(times: StageTimes, workload: Workload, slot: np.ndarray, step: int) -> float:
    ranks = range(workload.data_parallel_size)
    rows = [np.flatnonzero((workload.step == step) & (workload.dp_rank == rank)) for rank in ranks]
    return max(finish_ms(times, own[np.argsort(slot[own])]) for own in rows)


@pytest.mark.parametrize("ranks", [1, 3])
def test_steps_are_as_short_as_the_best_of_all_orders(ranks: int) -> None:
    """Prevents: a search that ends far from the best order, or applies an order the wrong way."""
    over = []
    for seed in range(10):
        times, workload = random_case(seed, ranks, most=5)
        slot = searched_slots(times, workload)
        for step in range(2):
            least = max(
                min(finish_ms(times, np.array(order)) for order in permutations(own))
                for own in (
                    np.flatnonzero((workload.step == step) & (workload.dp_rank == rank))
                    for rank in range(ranks)
                )
            )
            found = step_ms(times, workload, slot, step)
            assert found <= step_ms(times, workload, workload.slot, step) * (1 + 1e-9)
            over.append(found / least - 1)
    assert max(over) < 0.02 and np.mean(over) < 1e-3


def test_slots_of_a_rank_are_its_own_without_gaps() -> None:
    """Prevents: micro-batches that are lost, doubled, or moved to another rank or step."""
    times, workload = random_case(7, ranks=4, most=9)
    slot = searched_slots(times, workload)
    order = np.lexsort((slot, workload.dp_rank, workload.step))
    assert np.array_equal(slot[order], workload.slot)
    assert np.array_equal(workload.step[order], workload.step)
    assert np.array_equal(workload.dp_rank[order], workload.dp_rank)


def test_an_ordered_plan_trains_the_same_in_less_time_and_memory_that_fits() -> None:
    """Prevents: other samples in a step, a longer step, or a stage over the cap for its order."""
    asked = request()
    dealt, ordered = make_plan(asked), make_ordered_plan(asked)
    assert dealt.data is not None and ordered.data is not None
    before, after = dealt.plan.prediction, ordered.plan.prediction
    assert before is not None and after is not None
    assert dealt.plan.data is not None and ordered.plan.data is not None
    assert ordered.plan.data.steps_sha256 == dealt.plan.data.steps_sha256
    assert ordered.plan.data.packs_sha256 != dealt.plan.data.packs_sha256
    assert after.step_ms < before.step_ms
    assert max(stage.memory.peak_gib for stage in after.stages) <= asked.job.memory_cap_gib


@pytest.mark.parametrize(
    "schedule",
    [
        PipelineSchedule(name="zb-h1"),
        PipelineSchedule(name="zb-v", chunks=2),
        PipelineSchedule(name="interleaved", chunks=2),
    ],
    ids=lambda schedule: schedule.name,
)
def test_orders_are_found_for_any_schedule(schedule: PipelineSchedule) -> None:
    """Prevents: an order that is simulated in another schedule than the plan's, or for ranks of
    fewer micro-batches by another list than theirs."""
    parts = 2 * schedule.chunks
    gains = []
    for seed in range(4):
        times, workload = random_case(seed, ranks=2, most=6, parts=parts)
        slot = searched_slots(times, workload, schedule)
        order = np.lexsort((slot, workload.dp_rank, workload.step))
        once = NOTHING_ONCE
        dealt = predict_steps(times, workload, once, schedule).step_ms
        found = predict_steps(times.rows(order), workload, once, schedule).step_ms
        assert (found <= dealt * (1 + 1e-9)).all()
        gains.append(1 - found.mean() / dealt.mean())
    assert max(gains) > 0.01
