"""The joint search over packs of several levels, against walks of all candidates."""

from collections.abc import Sequence

import numpy as np
import pytest
from level_cases import brute_force, level_case, walked

from omnibal.base.errors import UserError
from omnibal.cost.analytic import analytic_cost
from omnibal.model.config import load_cluster, load_model
from omnibal.model.parallel import Parallel
from omnibal.model.units import unit_names
from omnibal.pipeline import stage_options
from omnibal.pipeline.bounds import least_step_ms
from omnibal.pipeline.least_peak import least_peak_of_splits
from omnibal.pipeline.level_costs import side_by_side
from omnibal.pipeline.partition import search_stages
from omnibal.pipeline.stage_memory import GIB, stage_memories
from omnibal.pipeline.unit_runs import check_stages, stages_from_cuts
from omnibal.pipeline.workload import Workload


@pytest.mark.parametrize(
    ("towers", "most", "contexts", "ranks", "cases", "lockstep_ranks"),
    [
        ("language", 4, (1, 2), 2, 24, 1),
        ("language", 3, (1, 2, 4), 4, 12, 1),
        ("language", 4, (1, 1), 2, 12, 1),
        ("vision language", 3, (1, 4), 4, 12, 1),
        ("language", 4, (1, 2), 2, 8, 2),
        ("vision language", 3, (1, 1), 2, 8, 2),
    ],
)
def test_the_search_over_levels_equals_brute_force(
    monkeypatch: pytest.MonkeyPatch,
    towers: str,
    most: int,
    contexts: Sequence[int],
    ranks: int,
    cases: int,
    lockstep_ranks: int,
):
    """Prevents a split or recomputed set that is not the best, a level's layers taken for
    another's, ranks that share a pack simulated as if they did not wait for each other, bounds
    above what is possible where the search is cut short, and levels that recompute different layers
    where ranks that share out experts would wait for each other for ever."""
    rng = np.random.default_rng(0)
    unlike = infeasible = cut_short = 0
    for _ in range(cases):
        costs, model, packs, p = level_case(rng, towers, most, contexts, ranks)
        cost, packs = side_by_side(costs), packs.in_groups_of(lockstep_ranks)
        times, peaks = brute_force(costs, model, packs, p, alike=lockstep_ranks > 1)
        low, high = peaks.min(), peaks.max()
        assert least_peak_of_splits(cost, model, packs, p) == pytest.approx(low, rel=1e-9)
        cap = rng.uniform(low - 0.2 * (high - low), low + 0.8 * (high - low))
        if cap < low:
            infeasible += 1
            with pytest.raises(UserError, match="more than the memory cap"):
                search_stages(cost, model, packs, p, cap)
            cap = low * (1 + 1e-9)
        best_ms = times[peaks <= cap].min()
        result = search_stages(cost, model, packs, p, cap)
        assert result.step_ms == result.lower_bound_ms == pytest.approx(best_ms, rel=2e-9)
        unlike += len(set(map(str, result.stages_at))) > 1
        quick = search_stages(cost, model, packs, p, cap, prove=False)
        with monkeypatch.context() as coarsely:
            coarsely.setattr(stage_options, "_MOST_OPTIONS", 1)
            coarse = search_stages(cost, model, packs, p, cap)
        for found in (result, quick, coarse):
            for stages in found.stages_at:
                check_stages(model, stages)
            step_ms, of_stages = walked(costs, found.stages_at, packs)
            assert found.step_ms == pytest.approx(step_ms, rel=1e-9)
            assert found.lower_bound_ms <= best_ms * (1 + 1e-9)
            assert max(of_stages) <= cap * (1 + 1e-9)
        cut_short += coarse.gap > 0
        assert 0 < least_step_ms(cost, model, packs, p) <= best_ms * (1 + 1e-9)
    assert unlike == 0 if lockstep_ranks > 1 else unlike >= cases / 4
    assert infeasible
    assert cut_short or "vision" not in towers or lockstep_ranks > 1


def test_memory_of_levels_is_that_of_a_walk():
    """Prevents a peak that leaves out what micro-batches of another level keep meanwhile."""
    rng = np.random.default_rng(1)
    for _ in range(6):
        costs, model, packs, p = level_case(rng, "vision language", 4, (1, 2, 2), 4)
        cost = side_by_side(costs)
        for _ in range(10):
            middle = np.arange(2, len(unit_names(model)) - 1)
            cuts = sorted(rng.choice(middle, p - 1, replace=False).tolist())
            plain = stages_from_cuts(model, cuts)
            held = [[len(stage.layers(tower)) for tower in model.towers] for stage in plain]
            stages_at = [stages_from_cuts(model, cuts, rng.integers(0, np.add(held, 1)).tolist())
                         for _ in range(3)]  # fmt: skip
            memories = stage_memories(cost, stages_at, packs)
            found = [memory.peak_gib * GIB for memory in memories]
            assert found == pytest.approx(walked(costs, stages_at, packs)[1])


@pytest.mark.parametrize("stages", [1, 4])
def test_a_large_model_of_levels_is_searched_with_few_options(
    monkeypatch: pytest.MonkeyPatch, stages: int
):
    """Prevents a search without end, or a split that does not fit."""
    monkeypatch.setattr(stage_options, "_MOST_OPTIONS", 400)
    model = load_model("llama3.1-70b")
    parallel = Parallel(tensor=8, pipeline=stages, data=8, sequence_parallel=True)
    cluster = load_cluster("h100-80g").model_copy(update={"memory_gib": 1000.0})
    cost = analytic_cost(model, cluster, parallel, "bf16")
    rng = np.random.default_rng(0)
    contexts, tokens = np.array([1, 2, 8]), np.array([4096, 16384, 32768])
    step, dp_rank, slot = (axis.ravel() for axis in np.indices((2, 8, 12)))
    level = rng.choice(3, (2, 12), p=[0.6, 0.2, 0.2])[step, slot]
    share = tokens[level] / contexts[level] * rng.uniform(0.9, 1, len(step))
    squares = share * tokens[level] * rng.uniform(0.2, 1, len(step))
    packs = Workload(
        features=np.stack([np.ones(len(step)), share, squares, share / 2], axis=1),
        step=step,
        dp_rank=dp_rank,
        slot=slot,
        data_parallel_size=8,
        level=level,
        context=contexts[level],
    )
    of_all = side_by_side([cost] * 3)
    cap = 1.25 * least_peak_of_splits(of_all, model, packs, stages)
    results = [search_stages(of_all, model, packs, stages, cap) for _ in range(2)]
    assert results[0].stages_at == results[1].stages_at
    assert results[0].gap < 0.1
    recomputed = [sum(s.recomputed_layers for s in at) for at in results[0].stages_at]
    assert len(set(recomputed)) > 1
    memories = stage_memories(of_all, results[0].stages_at, packs)
    assert max(memory.peak_gib for memory in memories) * GIB <= cap * (1 + 1e-9)
