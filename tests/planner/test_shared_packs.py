"""Steps with context-parallel packs, against an event loop, and their breakdown of time."""

from dataclasses import replace

import numpy as np
import pytest
from cost_cases import random_cost, random_features, small_model
from schedule_cases import lost_time, simulate_1f1b
from shared_pack_cases import Step, contexts_of, joint_event_loop, random_step

from omnibal.cost.model import side_by_side
from omnibal.pipeline import simulate
from omnibal.pipeline.schedules import Pass
from omnibal.pipeline.simulate import predict_steps, simulate_levels
from omnibal.pipeline.stage_cost import StageTimes, per_step_costs, stage_times, workload_times
from omnibal.pipeline.unit_runs import stages_from_cuts
from omnibal.pipeline.workload import Workload

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("stages", range(1, 6))
def test_joint_passes_match_an_event_loop(stages: int) -> None:
    """Prevents missing waits within a block, and waits of ranks that share no pack."""
    rng = np.random.default_rng(stages)
    for _ in range(15):
        ranks = int(rng.choice([2, 4, 8]))
        steps = [random_step(rng, ranks) for _ in range(3)]
        slots = max(map(len, steps))
        shape = len(steps) * ranks, slots, stages
        passes = rng.exponential(1, shape), rng.exponential(2, shape)
        links = rng.exponential(0.3, (2, *shape[:2], stages - 1))
        placed = [contexts_of(step, ranks, slots) for step in steps]
        context, counts = (np.concatenate(each) for each in zip(*placed, strict=True))
        found = simulate_1f1b(*passes, *links, counts=counts, context=context)
        for index, step in enumerate(steps):
            rows = slice(index * ranks, (index + 1) * ranks)
            times = [each[rows] for each in (*passes, *links)]
            ends = joint_event_loop(*times, context[rows], counts[rows])
            real = np.arange(slots) < counts[rows, None]
            assert not np.isnan(ends[:, real]).any()
            for direction, expected in zip((Pass.FORWARD, Pass.BACKWARD), ends, strict=True):
                np.testing.assert_allclose(found.end_ms[direction][rows][real], expected[real])
            last = ends[:, real].max()
            np.testing.assert_allclose(found.finish_ms[rows].max(), last, err_msg=str(step))
        real = (np.arange(slots) < counts[:, None])[..., None]
        # Waiting for the block is not busy time.
        np.testing.assert_allclose(found.busy_ms, (sum(passes) * real).sum(axis=1))


def workload_of(rng: np.random.Generator, steps: list[Step], ranks: int, features: int) -> Workload:
    """Return steps of shares with random features; level 1 if a pack is shared."""
    rows = [
        (number, rank, slot, size)
        for number, step in enumerate(steps)
        for rank in range(ranks)
        for slot, (size, present) in enumerate(step)
        if rank < present
    ]
    step, rank, slot, context = np.array(rows).T
    return Workload(
        features=random_features(rng, len(rows), features),
        step=step,
        dp_rank=rank,
        slot=slot,
        data_parallel_size=ranks,
        level=(context > 1).astype(np.int32),
        context=context,
    )


def test_steps_of_all_ranks_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents blocks mixed up between steps or ranks, also if simulated in small batches."""
    rng, ranks, size = np.random.default_rng(8), 4, 3
    cost, stages = random_cost(rng), stages_from_cuts(small_model(4, 5), (4, 8))
    steps = [random_step(rng, ranks) for _ in range(7)]
    workload = workload_of(rng, steps, ranks, len(cost.features))
    times = stage_times(cost, stages, workload.features)
    once = per_step_costs(cost, stages).nothing()
    slots, expected = max(map(len, steps)), []
    for number, step in enumerate(steps):
        rows, tables = workload.step == number, []
        for name in ("forward_ms", "backward_ms", "forward_link_ms", "backward_link_ms"):
            values = getattr(times, name)
            tables.append(np.zeros((ranks, slots, values.shape[1])))
            tables[-1][workload.dp_rank[rows], workload.slot[rows]] = values[rows]
        expected.append(np.nanmax(joint_event_loop(*tables, *contexts_of(step, ranks, slots))))
    for entries in (simulate._MAX_PASS_TIMES, ranks * slots * size):
        monkeypatch.setattr(simulate, "_MAX_PASS_TIMES", entries)
        found = predict_steps(times, workload, once)
        np.testing.assert_allclose(found.step_ms, expected)
    alone = predict_steps(times, replace(workload, context=np.ones_like(workload.context)), once)
    assert (alone.step_ms <= found.step_ms + 1e-9).all()
    assert (alone.step_ms < found.step_ms - 1e-3).any()
    np.testing.assert_allclose(alone.busy_ms, found.busy_ms)


def two_levels(rng: np.random.Generator):
    """Return costs of two levels (the second exchanges) and stages with per-level recomputation."""
    model, base, units = small_model(4, 5), random_cost(rng), {}
    for name, unit in base.units.items():
        context_ms = 0.5 * np.stack([unit.forward_ms, unit.backward_ms, 0 * unit.forward_ms])
        slower = {part: 1.5 * getattr(unit, part) for part in ("forward_ms", "backward_ms")}
        units[name] = replace(unit, **slower, context_ms=context_ms)
    recompute = [None, [(2, 0), (0, 1), (0, 2)]]
    stages_at = tuple(stages_from_cuts(model, (4, 8), numbers) for numbers in recompute)
    return (base, replace(base, units=units)), stages_at


def test_every_share_takes_the_time_of_its_level() -> None:
    """Prevents costs or recomputed layers of a wrong level."""
    rng = np.random.default_rng(4)
    costs, stages_at = two_levels(rng)
    workload = workload_of(rng, [random_step(rng, 4) for _ in range(5)], 4, len(costs[0].features))
    found = workload_times(side_by_side(costs), stages_at, workload)
    assert 0 < workload.level.sum() < len(workload)
    assert found.waits_ms is None, "no encoders are data-parallel"
    for row, level in enumerate(workload.level):
        alone = stage_times(costs[level], stages_at[level], workload.features[[row]])
        for name in set(StageTimes.__dataclass_fields__) - {"waits_ms", "has_experts"}:
            np.testing.assert_allclose(getattr(found, name)[row], getattr(alone, name)[0])


def test_what_sharing_costs_is_told_apart() -> None:
    """Prevents an exchange, or waiting for it, reported under another cause."""
    rng = np.random.default_rng(6)
    costs, stages_at = two_levels(rng)
    cost = side_by_side(costs)

    def lost_of(workload: Workload):
        step_ms = float(simulate_levels(cost, stages_at, workload).step_ms.mean())
        return lost_time(cost, stages_at, workload, step_ms), step_ms

    steps = [random_step(rng, 4) for _ in range(6)]
    lost, step_ms = lost_of(workload_of(rng, steps, 4, len(costs[0].features)))
    assert sum(lost.model_dump().values()) == pytest.approx(step_ms)
    assert lost.context_exchange_ms > 0
    # Equal shares on one stage never wait; the extra time is the exchange.
    full: list[Step] = [[(4, 4), (1, 4), (2, 4)]] * 3
    even = workload_of(rng, full, 4, len(costs[0].features))
    even = replace(even, features=np.broadcast_to(even.features[0], even.features.shape))
    stages_at = (stages_from_cuts(small_model(4, 5), ()),) * 2
    lost, step_ms = lost_of(even)
    assert lost.rank_imbalance_ms == pytest.approx(0, abs=1e-9)
    local = simulate_levels(costs[0], [stages_at[0]], replace(even, level=0 * even.level))
    assert lost.context_exchange_ms == pytest.approx(step_ms - float(local.step_ms.mean()))
    # One rank's shares take longer, and the other ranks of the block wait.
    longer = even.features * np.where(even.dp_rank == 0, 2.0, 1.0)[:, None]
    assert lost_of(replace(even, features=longer))[0].rank_imbalance_ms > 0.2 * step_ms


def test_plans_without_shared_packs_name_no_exchange() -> None:
    """Prevents changed plan files for plans without shared packs."""
    rng = np.random.default_rng(9)
    cost, stages = random_cost(rng), stages_from_cuts(small_model(4, 5), (4,))
    workload = workload_of(rng, [[(1, 2)] * 4], 2, len(cost.features))
    step_ms = float(simulate_levels(cost, [stages], workload).step_ms.mean())
    lost = lost_time(cost, [stages], workload, step_ms)
    assert "context_exchange_ms" not in lost.model_dump()
    assert "context exchange" not in lost.causes()
