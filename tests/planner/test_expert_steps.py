"""Expert-parallel steps: simulation against an event loop, search against brute force."""

from dataclasses import replace

import numpy as np
import pytest
from expert_cases import expert_model
from level_cases import brute_force, random_costs, random_level_packs, walk_all
from schedule_cases import lost_time, simulate_1f1b
from shared_pack_cases import contexts_of, joint_event_loop, random_step

from omnibal.cost.model import CostModel, ParameterRates, side_by_side
from omnibal.model.config import ModelConfig
from omnibal.model.units import unit_names
from omnibal.pipeline.bounds import Structure, min_step_ms
from omnibal.pipeline.critical_path import PipelineSimulator, SampledSteps
from omnibal.pipeline.partition import min_peak_of_splits, search_stages
from omnibal.pipeline.schedules import Pass
from omnibal.pipeline.simulate import simulate_levels
from omnibal.pipeline.split_task import SplitTask
from omnibal.pipeline.unit_runs import stage_units, stages_from_cuts
from omnibal.pipeline.workload import Workload

LAYER = "language_layer_experts8"


@pytest.mark.parametrize("stages", range(1, 6))
def test_ranks_in_lockstep_match_an_event_loop(stages: int) -> None:
    """Prevents lockstep waits in stages without experts, missing waits in stages with experts, and
    shared packs that wait for too few ranks."""
    rng = np.random.default_rng(stages)
    for case in range(12):
        ranks, lockstep_ranks = [(4, 2), (8, 4), (8, 2), (6, 3), (5, 5), (4, 4)][case % 6]
        shares = lockstep_ranks in (2, 4) and case >= 6
        steps = [random_step(rng, ranks) if shares else [(1, ranks)] * 4 for _ in range(3)]
        steps = [[(size, ranks) for size, _ in step] for step in steps]
        slots = max(map(len, steps))
        shape = len(steps) * ranks, slots
        forward, backward = rng.exponential(1, (2, *shape, stages))
        links = rng.exponential(0.3, (2, *shape, stages - 1))
        placed = [contexts_of(step, ranks, slots) for step in steps]
        context, counts = (np.concatenate(each) for each in zip(*placed, strict=True))
        # Groups have equal numbers of micro-batches; other groups may have fewer.
        counts -= np.repeat(rng.integers(0, 2, len(steps)), ranks)
        context = np.where(np.arange(slots) < counts[:, None], context, 1)
        parts = rng.random(stages) < 0.6
        lockstep = {"lockstep_ranks": lockstep_ranks, "has_experts": parts}
        found = simulate_1f1b(forward, backward, *links, counts=counts, context=context, **lockstep)
        blocks = np.where(parts, np.maximum(context, lockstep_ranks)[..., None], context[..., None])
        for index in range(len(steps)):
            rows = slice(index * ranks, (index + 1) * ranks)
            ends = joint_event_loop(
                forward[rows], backward[rows], *links[:, rows], blocks[rows], counts[rows]
            )
            real = np.arange(slots) < counts[rows, None]
            for kind, own_ends in zip((Pass.FORWARD, Pass.BACKWARD), ends, strict=True):
                np.testing.assert_allclose(found.end_ms[kind][rows][real], own_ends[real])


def expert_case(
    rng: np.random.Generator, contexts: tuple[int, ...], ranks: int, lockstep_ranks: int
) -> tuple[list[CostModel], ModelConfig, Workload, int]:
    """Return costs per level, a small model, packs for lockstep ranks, and pipeline size."""
    model = expert_model(int(rng.integers(1, 3)), int(rng.integers(0, 2)), int(rng.integers(1, 3)))
    random = {"optimizer_bytes": 40, "optimizer_ms": 1e-5, "gradient_reduction_ms": 1e-5}
    drawn = {name: rng.uniform(0, most) for name, most in random.items()}
    rates = ParameterRates(weight_bytes=0.5, gradient_bytes=3.0, weight_gather_ms=0.0, **drawn)
    peer_bytes, share = rng.uniform(0, 1e7), rng.random()
    costs = []
    for cost in random_costs(rng, model, len(contexts)):
        layer = cost.units[LAYER]
        layer = replace(layer, expert_parameters=int(share * layer.parameters))
        units = cost.units | {LAYER: layer}
        costs.append(replace(cost, units=units, expert_rates=rates, expert_peer_bytes=peer_bytes))
    packs = random_level_packs(rng, contexts, ranks, len(costs[0].features))
    stages = int(rng.integers(2, min(3, model.layers) + 1))
    return costs, model, packs.in_groups_of(lockstep_ranks), stages


@pytest.mark.parametrize(
    ("contexts", "ranks", "lockstep_ranks", "cases"),
    [((1,), 2, 2, 14), ((1,), 4, 2, 8), ((1,), 3, 3, 8), ((1, 2), 4, 4, 2)],
)
def test_the_search_with_experts_equals_brute_force(contexts, ranks, lockstep_ranks, cases):
    """Prevents a bound that charges expert waits to stages without experts, a suboptimal split, and
    uncounted expert state or buffers."""
    rng = np.random.default_rng(3)
    waits = without_experts = 0
    for _ in range(cases):
        costs, model, packs, p = expert_case(rng, contexts, ranks, lockstep_ranks)
        cost = side_by_side(costs)
        times, peaks = brute_force(costs, model, packs, p)
        cap = np.inf
        if len(model.language.runs) == 1:  # consecutive kinds make the count an upper bound
            low, high = peaks.min(), peaks.max()
            least = min_peak_of_splits(SplitTask(cost, model, packs, p))
            assert least == pytest.approx(low, rel=1e-9)
            cap = rng.uniform(low, low + 0.8 * (high - low)) * (1 + 1e-9)
        best_ms = times[peaks <= cap].min()
        result = search_stages(SplitTask(cost, model, packs, p, cap))
        assert result.step_ms == result.lower_bound_ms == pytest.approx(best_ms, rel=2e-9)
        step_ms, _ = walk_all(costs, result.stages_at, packs)
        assert result.step_ms == pytest.approx(step_ms, rel=1e-9)
        alone_ms, _ = walk_all(costs, result.stages_at, replace(packs, lockstep_ranks=1))
        waits += alone_ms < best_ms * (1 - 1e-6)
        held = [stage_units(cost.kinds, stage.units) for stage in result.stages_at[0]]
        without_experts += not all(LAYER in units for units in held)
        assert 0 < min_step_ms(SplitTask(cost, model, packs, p)) <= best_ms * (1 + 1e-9)
    assert waits >= cases / 3
    assert without_experts


def test_a_path_bounds_every_split():
    """Prevents a critical path through another rank's expert stage from excluding better splits
    without experts in that stage."""
    rng = np.random.default_rng(5)
    would_be_wrong = 0
    for _ in range(6):
        (cost,), model, packs, _ = expert_case(rng, (1,), 4, 4)
        layer = cost.units["vision_layer"]
        slow = replace(layer, forward_ms=9 * layer.forward_ms, backward_ms=9 * layer.backward_ms)
        cost = replace(cost, units=cost.units | {"vision_layer": slow})
        simulator = PipelineSimulator.build(SampledSteps.build(packs, cost), 2)
        structure = Structure.build(SplitTask(cost, model, packs, 2), simulator.steps)
        runs = structure.runs
        first, ends = np.flatnonzero(runs.start == 0), runs.end == runs.units
        second = [np.flatnonzero((runs.start == end) & ends) for end in runs.end[first]]
        splits = np.array([(a, b[0]) for a, b in zip(first, second, strict=True) if len(b)])
        ways = (structure.with_buckets(runs.terms[run], s) for s, run in enumerate(splits.T))
        terms = np.stack([*ways], axis=1)
        step_ms = simulator.step_ms(*structure.layout.split_terms(terms))
        paths = simulator.critical_paths(terms)
        length = np.tensordot(terms, paths, axes=((1, 2), (1, 2)))
        np.testing.assert_allclose(np.diag(length), step_ms)
        assert (length <= step_ms[:, None] * (1 + 1e-9)).all()
        assert (length > 0).any(axis=1).all()
        paths[:, :, simulator.steps.layout.without_experts] = 0
        length = np.tensordot(terms, paths, axes=((1, 2), (1, 2)))
        would_be_wrong += (length > step_ms[:, None] * (1 + 1e-6)).any()
    assert would_be_wrong


def test_waits_for_experts_have_a_name():
    """Prevents counting these waits as slow ranks or bubble, and empty micro-batches as needed
    work."""
    rng, named = np.random.default_rng(6), 0
    for _ in range(6):
        (cost,), model, packs, _ = expert_case(rng, (1,), 4, 2)
        stages = stages_from_cuts(model, (len(unit_names(model)) - 2,))
        steps = simulate_levels(cost, [stages], packs)
        step_ms = float(steps.step_ms.mean())
        lost = lost_time(cost, [stages], packs, step_ms)
        assert sum(lost.causes().values()) == pytest.approx(step_ms)
        plain = replace(packs.rows(~packs.is_empty), lockstep_ranks=1)
        loose_ms = float(simulate_levels(cost, [stages], plain).step_ms.mean())
        alone = lost_time(cost, [stages], plain, loose_ms)
        assert lost.expert_wait_ms == pytest.approx(step_ms - loose_ms)
        named += "wait in lockstep" in lost.causes()
        assert alone == lost.model_copy(update={"expert_wait_ms": 0.0})
        assert "expert_wait_ms" not in alone.model_dump()
    assert named
