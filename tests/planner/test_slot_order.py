"""The order of micro-batches within a step, against all orders, and its invariants."""

from itertools import permutations

import numpy as np
import pytest
from plan_cases import request
from schedule_cases import SCHEDULES, nothing_once, simulate_1f1b, workload_of

from omnibal.job.planner import make_ordered_plan, make_plan
from omnibal.pipeline.schedules import PipelineSchedule
from omnibal.pipeline.simulate import predict_steps
from omnibal.pipeline.slot_order import search_slots
from omnibal.pipeline.stage_cost import StageTimes
from omnibal.pipeline.workload import Workload

pytestmark = pytest.mark.quick


def random_case(seed: int, ranks: int, most: int, parts: int = 3) -> tuple[StageTimes, Workload]:
    """Return times of unequal micro-batches, in two steps with unequal counts per rank."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, most + 1, (2, ranks))
    size = rng.lognormal(0, 0.7, (counts.sum(), 1)) * rng.uniform(0.5, 1.5, (counts.sum(), parts))
    links = rng.uniform(0, 0.2, (counts.sum(), parts - 1))
    passes = {"forward_ms": size, "backward_ms": 2 * size, "weight_ms": size}
    times = StageTimes(
        **passes, recompute_ms=0 * size, forward_link_ms=links, backward_link_ms=links
    )
    return times, workload_of(counts)


def finish_ms(times: StageTimes, rows: np.ndarray) -> float:
    """Return the simulated time of one rank's micro-batches in this order."""
    some = times.rows(rows)
    each = some.forward_ms, some.backward_ms, some.forward_link_ms, some.backward_link_ms
    return float(simulate_1f1b(*each).step_ms)


@pytest.mark.parametrize("ranks", [1, 3])
def test_steps_are_as_short_as_the_best_of_all_orders(ranks: int) -> None:
    """Prevents an order far from the best, applied in reverse, or with doubled slots."""
    over = []
    for seed in range(10):
        times, workload = random_case(seed, ranks, most=5)
        slot = search_slots(times, workload)
        for step in range(2):
            places = workload.step == step
            every = [np.flatnonzero(places & (workload.dp_rank == rank)) for rank in range(ranks)]
            for own in every:
                assert np.array_equal(np.sort(slot[own]), workload.slot[own])
            orders = [map(np.array, permutations(own)) for own in every]
            least = max(min(finish_ms(times, order) for order in own) for own in orders)
            dealt = max(finish_ms(times, own) for own in every)
            found = max(finish_ms(times, own[np.argsort(slot[own])]) for own in every)
            assert found <= dealt * (1 + 1e-9)
            over.append(found / least - 1)
    assert max(over) < 0.02 and np.mean(over) < 1e-3


def test_an_ordered_plan_trains_the_same_in_less_time_and_memory_that_fits() -> None:
    """Prevents changed samples per step, longer steps, or memory above the cap after reordering."""
    asked = request()
    dealt, ordered = make_plan(asked), make_ordered_plan(asked)
    before, after = dealt.plan.prediction, ordered.plan.prediction
    assert ordered.plan.data.steps_sha256 == dealt.plan.data.steps_sha256
    assert ordered.plan.data.packs_sha256 != dealt.plan.data.packs_sha256
    assert after.step_ms < before.step_ms
    assert max(stage.memory.peak_gib for stage in after.stages) <= asked.job.memory_cap_gib


@pytest.mark.parametrize("schedule", [each for each in SCHEDULES if each.name != "1f1b"], ids=str)
def test_orders_are_found_for_any_schedule(schedule: PipelineSchedule) -> None:
    """Prevents an order simulated with another schedule, or another rank's list."""
    parts = 2 * schedule.chunks
    gains = []
    for seed in range(4):
        times, workload = random_case(seed, ranks=2, most=6, parts=parts)
        slot = search_slots(times, workload, schedule)
        order = np.lexsort((slot, workload.dp_rank, workload.step))
        once = nothing_once(2)
        dealt = predict_steps(times, workload, once, schedule).step_ms
        found = predict_steps(times.rows(order), workload, once, schedule).step_ms
        assert (found <= dealt * (1 + 1e-9)).all()
        gains.append(1 - found.mean() / dealt.mean())
    assert max(gains) > 0.01
