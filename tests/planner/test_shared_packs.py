"""Steps in which ranks share packs: simulated beside an event loop, and where their time goes."""

import heapq
from dataclasses import replace

import numpy as np
import pytest
from cost_cases import random_cost, random_features, small_model

from omnibal.pipeline import simulate
from omnibal.pipeline.level_costs import side_by_side
from omnibal.pipeline.lost_time import lost_time
from omnibal.pipeline.schedules import Pass
from omnibal.pipeline.simulate import predict_steps, simulate_levels, simulate_run, simulate_steps
from omnibal.pipeline.stage_cost import StageTimes, once_a_step, stage_times, workload_times
from omnibal.pipeline.units import stages_from_cuts
from omnibal.pipeline.workload import Workload

pytestmark = pytest.mark.quick

Step = list[tuple[int, int]]
"""Context size and number of ranks of every slot of a step; ranks from some on have no more."""


def random_step(rng: np.random.Generator, ranks: int) -> Step:
    """Full slots, then slots of fewer and fewer ranks, as plans have them."""
    sizes = [size for size in (1, 2, 4, 8) if size <= ranks]
    step = [(int(rng.choice(sizes)), ranks) for _ in range(rng.integers(1, 6))]
    left = ranks
    for _ in range(rng.integers(0, 3)):
        size = int(rng.choice([size for size in sizes if size <= left]))
        left = size * int(rng.integers(1, left // size + 1))
        step.append((size, left))
    return step


def contexts_of(step: Step, ranks: int, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Context of every rank's slot [ranks, slots], and the slots of every rank [ranks]."""
    context, counts = np.ones((ranks, slots), int), np.zeros(ranks, int)
    for slot, (size, present) in enumerate(step):
        context[:present, slot] = size
        counts[:present] += 1
    return context, counts


def joint_event_loop(
    forward_ms: np.ndarray,
    backward_ms: np.ndarray,
    forward_link_ms: np.ndarray,
    backward_link_ms: np.ndarray,
    context: np.ndarray,
    counts: np.ndarray,
) -> np.ndarray:
    """Ends of all passes, [2, ranks, m, p], of ranks that wait for each other, by an event queue.

    A stage that has come to a pass of a shared micro-batch waits there until the same stage of all
    ranks of the block has, and all run it for as long as the slowest needs.

    Args:
        context: size of the block, [ranks, m], or [ranks, m, p] where it is the stage's.
    """
    context = np.broadcast_to(context.reshape(*context.shape[:2], -1), forward_ms.shape)
    ranks, m, p = forward_ms.shape
    took = {0: forward_ms, 1: backward_ms}
    ends = np.full((2, ranks, m, p), np.nan)
    arrived = np.zeros((2, ranks, m, p), bool)
    arrived[0, :, :, 0] = arrived[1, :, :, -1] = True
    started, finished = np.zeros((2, ranks, p), int), np.zeros((ranks, p), int)
    busy = np.zeros((ranks, p), bool)
    queue = [(0.0, "look", 0, rank, 0, stage) for rank in range(ranks) for stage in range(p)]

    def next_pass(rank: int, stage: int) -> tuple[int, int] | None:
        """Direction and micro-batch of the pass that the stage has come to; None if it cannot."""
        in_flight = started[0, rank, stage] - finished[rank, stage]
        direction = int(started[0, rank, stage] == counts[rank] or in_flight == p - stage)
        i = started[direction, rank, stage]
        can = not busy[rank, stage] and i < counts[rank] and arrived[direction, rank, i, stage]
        return (direction, i) if can else None

    while queue:
        now, event, direction, rank, i, stage = heapq.heappop(queue)
        if event == "end":
            busy[rank, stage] = False
            ends[direction, rank, i, stage] = now
            finished[rank, stage] += direction
            neighbour = stage - 1 if direction else stage + 1
            link = backward_link_ms if direction else forward_link_ms
            if 0 <= neighbour < p:
                arrival = now + link[rank, i, min(stage, neighbour)]
                heapq.heappush(queue, (arrival, "arrive", direction, rank, i, neighbour))
        elif event == "arrive":
            arrived[direction, rank, i, stage] = True
        wanted = next_pass(rank, stage)
        if wanted is None:
            continue
        direction, i = wanted
        size = context[rank, i, stage]
        block = range(rank - rank % size, rank - rank % size + size)
        if any(next_pass(member, stage) != wanted for member in block):
            continue
        end = now + max(took[direction][member, i, stage] for member in block)
        for member in block:
            started[direction, member, stage] += 1
            busy[member, stage] = True
            heapq.heappush(queue, (end, "end", direction, member, i, stage))
    return ends


@pytest.mark.parametrize("stages", range(1, 6))
def test_joint_passes_match_an_event_loop(stages: int) -> None:
    """Prevents waits within a block that are left out, and of ranks that share nothing."""
    rng = np.random.default_rng(stages)
    for _ in range(15):
        ranks = int(rng.choice([2, 4, 8]))
        steps = [random_step(rng, ranks) for _ in range(3)]
        slots = max(map(len, steps))
        shape = len(steps) * ranks, slots
        forward, backward = (
            rng.exponential(1, (*shape, stages)),
            rng.exponential(2, (*shape, stages)),
        )
        links = rng.exponential(0.3, (2, *shape, stages - 1))
        placed = [contexts_of(step, ranks, slots) for step in steps]
        context, counts = (np.concatenate(each) for each in zip(*placed, strict=True))
        found = simulate_steps(forward, backward, *links, counts, None, context)
        for index in range(len(steps)):
            rows = slice(index * ranks, (index + 1) * ranks)
            ends = joint_event_loop(
                forward[rows], backward[rows], *links[:, rows], context[rows], counts[rows]
            )
            real = np.arange(slots) < counts[rows, None]
            assert not np.isnan(ends[:, real]).any()
            np.testing.assert_allclose(found.end_ms[Pass.FORWARD][rows][real], ends[0, real])
            np.testing.assert_allclose(found.end_ms[Pass.BACKWARD][rows][real], ends[1, real])
            np.testing.assert_allclose(
                found.finish_ms[rows].max(), ends[:, real].max(), err_msg=str(steps[index])
            )
        real = (np.arange(slots) < counts[:, None])[..., None]
        # Waiting for the block is no work.
        np.testing.assert_allclose(found.busy_ms, ((forward + backward) * real).sum(axis=1))


def workload_of(rng: np.random.Generator, steps: list[Step], ranks: int, features: int) -> Workload:
    """Steps of shares with random features; the level is 1 where a pack is shared."""
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
    """Prevents blocks of other steps or ranks, also where few steps are simulated at a time."""
    rng, ranks, size = np.random.default_rng(8), 4, 3
    model, cost = small_model(4, 5), random_cost(rng)
    stages = stages_from_cuts(model, (4, 8))
    steps = [random_step(rng, ranks) for _ in range(7)]
    workload = workload_of(rng, steps, ranks, len(cost.features))
    times = stage_times(cost, stages, workload.features)
    once = once_a_step(cost, stages).nothing()
    slots = max(map(len, steps))
    expected = []
    for number, step in enumerate(steps):
        context, counts = contexts_of(step, ranks, slots)
        tables = []
        for values in (
            times.forward_ms, times.backward_ms, times.forward_link_ms, times.backward_link_ms,
        ):  # fmt: skip
            table = np.zeros((ranks, slots, values.shape[1]))
            rows = workload.step == number
            table[workload.dp_rank[rows], workload.slot[rows]] = values[rows]
            tables.append(table)
        expected.append(np.nanmax(joint_event_loop(*tables, context, counts)))
    for entries in (simulate._CHUNK_ENTRIES, ranks * slots * size):
        monkeypatch.setattr(simulate, "_CHUNK_ENTRIES", entries)
        found = predict_steps(times, workload, once)
        np.testing.assert_allclose(found.step_ms, expected)
    alone = predict_steps(times, replace(workload, context=np.ones_like(workload.context)), once)
    assert (alone.step_ms <= found.step_ms + 1e-9).all()
    assert (alone.step_ms < found.step_ms - 1e-3).any()
    np.testing.assert_allclose(alone.busy_ms, found.busy_ms)


def two_levels(rng: np.random.Generator):
    """Costs of two levels, of which the second exchanges; and stages that recompute by level."""
    model, base = small_model(4, 5), random_cost(rng)
    units = {
        name: replace(
            unit,
            forward_ms=unit.forward_ms * 1.5,
            backward_ms=unit.backward_ms * 1.5,
            context_ms=0.5 * np.stack([unit.forward_ms, unit.backward_ms, 0 * unit.forward_ms]),
        )
        for name, unit in base.units.items()
    }
    costs = base, replace(base, units=units)
    stages_at = (
        stages_from_cuts(model, (4, 8)),
        stages_from_cuts(model, (4, 8), [(2, 0), (0, 1), (0, 2)]),
    )
    return costs, stages_at


def test_every_share_takes_the_time_of_its_level() -> None:
    """Prevents the costs or the recomputed layers of another level."""
    rng = np.random.default_rng(4)
    costs, stages_at = two_levels(rng)
    workload = workload_of(rng, [random_step(rng, 4) for _ in range(5)], 4, len(costs[0].features))
    found = workload_times(side_by_side(costs), stages_at, workload)
    assert 0 < workload.level.sum() < len(workload)
    assert found.waits_ms is None, "no encoders stand beside the pipeline"
    for row, level in enumerate(workload.level):
        alone = stage_times(costs[level], stages_at[level], workload.features[[row]])
        for name in set(StageTimes.__dataclass_fields__) - {"waits_ms", "has_experts"}:
            np.testing.assert_allclose(getattr(found, name)[row], getattr(alone, name)[0])


def test_what_sharing_costs_is_told_apart() -> None:
    """Prevents an exchange, or a wait for it, that counts as something else."""
    rng = np.random.default_rng(6)
    costs, stages_at = two_levels(rng)
    cost = side_by_side(costs)
    steps = [random_step(rng, 4) for _ in range(6)]
    workload = workload_of(rng, steps, 4, len(costs[0].features))
    step_ms = float(simulate_levels(cost, stages_at, workload).step_ms.mean())
    lost = lost_time(cost, stages_at, workload, step_ms)
    assert sum(lost.model_dump().values()) == pytest.approx(step_ms)
    assert lost.context_exchange_ms > 0
    # Equal shares on one stage wait for no rank, and take so much more for their exchange alone.
    full: list[Step] = [[(4, 4), (1, 4), (2, 4)]] * 3
    even = workload_of(rng, full, 4, len(costs[0].features))
    even = replace(even, features=np.broadcast_to(even.features[0], even.features.shape))
    stages_at = (stages_from_cuts(small_model(4, 5), ()),) * 2
    step_ms = float(simulate_levels(cost, stages_at, even).step_ms.mean())
    lost = lost_time(cost, stages_at, even, step_ms)
    assert lost.rank_imbalance_ms == pytest.approx(0, abs=1e-9)
    local_ms = float(
        simulate_run(costs[0], stages_at[0], replace(even, level=0 * even.level)).step_ms.mean()
    )
    assert lost.context_exchange_ms == pytest.approx(step_ms - local_ms)
    # One rank's shares take longer than the others': all the rest of the block waits for it.
    longer = even.features * np.where(even.dp_rank == 0, 2.0, 1.0)[:, None]
    uneven = replace(even, features=longer)
    uneven_ms = float(simulate_levels(cost, stages_at, uneven).step_ms.mean())
    assert lost_time(cost, stages_at, uneven, uneven_ms).rank_imbalance_ms > 0.2 * step_ms


def test_plans_without_shared_packs_name_no_exchange() -> None:
    """Prevents plan files that change with a version that could share packs."""
    rng = np.random.default_rng(9)
    cost, stages = random_cost(rng), stages_from_cuts(small_model(4, 5), (4,))
    workload = workload_of(rng, [[(1, 2)] * 4], 2, len(cost.features))
    step_ms = float(simulate_run(cost, stages, workload).step_ms.mean())
    lost = lost_time(cost, [stages], workload, step_ms)
    assert "context_exchange_ms" not in lost.model_dump()
    assert "context exchange" not in lost.named()
