"""Searches for stages and schedule parts against brute force, and checks of stages."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from cost_cases import analytic_cost, random_cost, random_features, small_model, workload_of_a_step
from level_cases import brute_force, level_case, random_model, search_all, walk_all
from partition_cases import (
    all_cuts,
    equal_steps,
    frozen,
    numbers_of,
    planners_figures,
    random_packs,
    recomputing,
)

from omnibal.base.errors import UserError
from omnibal.cost.model import CostModel, side_by_side
from omnibal.model.config import load_cluster, load_model
from omnibal.model.parallel import Parallel
from omnibal.model.targets import RecomputeFreedom, StageRules
from omnibal.model.units import LANGUAGE_EMBED, unit_names
from omnibal.pipeline import partition, split_search, stage_options
from omnibal.pipeline.bounds import min_step_ms
from omnibal.pipeline.chunk_search import search_parts
from omnibal.pipeline.critical_path import PipelineSimulator, SampledSteps
from omnibal.pipeline.least_peak import min_peak_of_splits
from omnibal.pipeline.partition import sampled_steps, search_stages
from omnibal.pipeline.predict import MAX_SIMULATED_STEPS
from omnibal.pipeline.schedules import PipelineSchedule
from omnibal.pipeline.simulate import simulate_levels
from omnibal.pipeline.split_task import SplitTask
from omnibal.pipeline.stage_memory import GIB, stage_memories
from omnibal.pipeline.stage_options import StageOptions, on_paths, stage_choices
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.unit_runs import check_stages, layer_kinds, stages_from_cuts, unit_counts
from omnibal.pipeline.workload import Workload

LAYERS = ("vision_layer", "language_layer")


def random_case(rng: np.random.Generator, most_layers: int) -> SplitTask:
    vision, language = rng.integers(1, most_layers, 2)
    model = small_model(int(vision), int(language))
    p = int(rng.integers(1, min(4, vision + language) + 1))
    cost = random_cost(rng)
    rates = replace(cost.rates, gradient_reduction_ms=10 ** rng.uniform(-7, -4.5))
    cost = replace(cost, rates=rates)
    if rng.random() < 0.15:
        frozen_units = ("vision_embed", "vision_layer")
        units = {**cost.units, **{unit: frozen(cost.units[unit]) for unit in frozen_units}}
        cost = replace(cost, units=units)
    packs = random_packs(rng, int(rng.integers(1, 7)))
    # A separate generator keeps cases that are known by seed unchanged.
    apart = rng.spawn(1)[0]
    cost = tie_head(cost) if apart.random() < 0.3 else cost
    # A weight gather, and in most cases hidden buckets.
    whole = sum(unit.trained_parameters for unit in cost.units.values())
    cost = replace(
        cost,
        rates=replace(cost.rates, weight_gather_ms=10 ** apart.uniform(-7, -4.5)),
        bucket_parameters=math.inf if apart.random() < 0.2 else whole / apart.uniform(0.5, 8),
    )
    return SplitTask(cost, model, packs, p)


def random_case_of(rng: np.random.Generator, towers: str, most: int) -> SplitTask:
    """Return a `random_case` for these towers with at most `most` layers in all."""
    model = random_model(rng, towers, most)
    cost = random_cost(rng, model)
    # Unlike feature ratios per layer, so that no layer is always the best to recompute.
    units = {
        name: replace(unit, recompute_ms=unit.recompute_ms ** rng.integers(1, 4))
        for name, unit in cost.units.items()
    }
    cost = replace(cost, units=units)
    packs = random_packs(rng, int(rng.integers(1, 5)), len(cost.features))
    cost = tie_head(cost) if rng.random() < 0.3 else cost
    return SplitTask(cost, model, packs, int(rng.integers(1, min(3, model.layers) + 1)))


def tie_head(cost: CostModel) -> CostModel:
    """Return costs with tied language embed and head, the largest matrix."""
    sizes = {"parameters": 3_000_000, "trained_parameters": 3_000_000}
    ends = ("language_embed", "head")
    units = {**cost.units, **{end: replace(cost.units[end], **sizes) for end in ends}}
    return replace(cost, units=units, tied_parameters=3_000_000)


def large_case(layers: tuple[int, int], p: int, share_of_least: float) -> SplitTask:
    """Return InternVL with these layers, on packs that all differ, and a memory cap."""
    base = load_model("internvl-chat-1.5-6b-20b")
    model = base.with_layers(vision=layers[0], language=layers[1])
    rng = np.random.default_rng(1)
    tiles = rng.integers(5, 10, 128)
    tokens = 4096 - rng.integers(0, 400, 128)
    features = np.stack([np.ones(128), tiles, tokens, tokens**2 / 3, tokens / 4], axis=1)
    sizes = Parallel(tensor=4, pipeline=p, data=2)
    cost = analytic_cost(model, load_cluster("a100-80g"), sizes, "bf16")
    packs = equal_steps((4, 2, 16), features)
    task = SplitTask(cost, model, packs, p)
    return replace(task, memory_cap_bytes=share_of_least * min_peak_of_splits(task))


@pytest.mark.parametrize(
    ("towers", "most", "least"),
    [
        ("", 4, {"infeasible": 4, "recomputed": 4, "kept": 4}),
        ("language", 6, {"recomputed": 5}),
        ("runs", 7, {"recomputed": 5, "several": 1}),
        ("vision runs", 7, {"recomputed": 5, "several": 1}),
        ("vision audio language", 7, {"recomputed": 5, "several": 1}),
    ],
)
def test_the_search_equals_brute_force(towers: str, most: int, least: dict[str, int]):
    """Prevents splits that are not optimal or do not fit, and layers of another kind."""
    rng = np.random.default_rng(0)
    outcomes = {"infeasible": 0, "recomputed": 0, "kept": 0, "several": 0}
    for number in range(20 if towers else 55):
        size = 6 if number % 20 == 0 else most
        task = random_case_of(rng, towers, most) if towers else random_case(rng, size)
        cost, packs = task.cost, task.workload
        every = brute_force([cost], task.model, packs, task.stages)
        task, result, is_refused = search_all(task, *every, rng.uniform(0 if towers else -0.1, 0.8))
        outcomes["infeasible"] += is_refused
        step_ms, peak = planners_figures(cost, result.stages, packs)
        assert result.step_ms == pytest.approx(step_ms, rel=1e-12)
        assert peak <= task.memory_cap_bytes * (1 + 1e-9)
        walked_ms, peaks = walk_all([cost], [result.stages], packs)
        assert (step_ms, peak) == pytest.approx((walked_ms, max(peaks)), rel=1e-9)
        again = [np.count_nonzero(unit_counts(cost.kinds, s.recompute)) for s in result.stages]
        outcomes["recomputed" if max(again) else "kept"] += 1
        outcomes["several"] += max(again) > 1
    assert all(outcomes[name] >= count for name, count in least.items()), outcomes


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
    """Prevents suboptimal splits, layers of another level, packs shared without waiting, invalid
    bounds, and levels that deadlock ranks with experts."""
    rng = np.random.default_rng(0)
    unlike = infeasible = cut_short = 0
    for _ in range(cases):
        costs, model, packs, p = level_case(rng, towers, most, contexts, ranks)
        cost, packs = side_by_side(costs), packs.in_groups_of(lockstep_ranks)
        task = SplitTask(cost, model, packs, p)
        every = brute_force(costs, model, packs, p, alike=lockstep_ranks > 1)
        task, result, is_refused = search_all(task, *every, rng.uniform(-0.2, 0.8))
        infeasible += is_refused
        unlike += len(set(map(str, result.stages_at))) > 1
        quick = search_stages(task, prove=False)
        with monkeypatch.context() as coarsely:
            coarsely.setattr(stage_options, "_MAX_OPTIONS", 1)
            coarse = search_stages(task)
        for found in (result, quick, coarse):
            for stages in found.stages_at:
                check_stages(model, stages)
            step_ms, of_stages = walk_all(costs, found.stages_at, packs)
            assert found.step_ms == pytest.approx(step_ms, rel=1e-9)
            assert found.lower_bound_ms <= result.step_ms * (1 + 3e-9)
            assert max(of_stages) <= task.memory_cap_bytes * (1 + 1e-9)
        cut_short += coarse.gap > 0
    assert unlike == 0 if lockstep_ranks > 1 else unlike >= cases / 4
    assert infeasible
    assert cut_short or "vision" not in towers or lockstep_ranks > 1


def test_memory_of_levels_is_that_of_a_walk():
    """Prevents a peak without activations kept by micro-batches of other levels."""
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
            assert found == pytest.approx(walk_all(costs, stages_at, packs)[1])


@pytest.mark.parametrize("stages", [1, 4])
def test_a_large_model_of_levels_is_searched_with_few_options(monkeypatch, stages):
    """Prevents an endless search, or a split that does not fit."""
    monkeypatch.setattr(stage_options, "_MAX_OPTIONS", 400)
    model = load_model("llama3.1-70b")
    parallel = Parallel(tensor=8, pipeline=stages, data=8, sequence_parallel=True)
    cluster = load_cluster("h100-80g").model_copy(update={"memory_gib": 1000.0})
    of_all = side_by_side([analytic_cost(model, cluster, parallel, "bf16")] * 3)
    rng = np.random.default_rng(0)
    contexts, tokens = np.array([1, 2, 8]), np.array([4096, 16384, 32768])
    # One level per slot of a step, on all ranks.
    level = rng.choice(3, (2, 1, 12), p=[0.6, 0.2, 0.2]).repeat(8, axis=1).ravel()
    share = tokens[level] / contexts[level] * rng.uniform(0.9, 1, len(level))
    squares = share * tokens[level] * rng.uniform(0.2, 1, len(level))
    features = np.stack([np.ones(len(level)), share, squares, share / 2], axis=1)
    packs = equal_steps((2, 8, 12), features, level=level, context=contexts[level])
    cap = 1.25 * min_peak_of_splits(SplitTask(of_all, model, packs, stages))
    results = [search_stages(SplitTask(of_all, model, packs, stages, cap)) for _ in range(2)]
    assert results[0].stages_at == results[1].stages_at
    assert results[0].gap < 0.1
    recomputed = [sum(s.recomputed_layers for s in at) for at in results[0].stages_at]
    assert len(set(recomputed)) > 1
    memories = stage_memories(of_all, results[0].stages_at, packs)
    assert max(memory.peak_gib for memory in memories) * GIB <= cap * (1 + 1e-9)


def test_micro_batches_that_cost_nothing_decide_nothing():
    """Prevents slower recomputed sets, reported as proven, because a micro-batch takes no time in
    either tower."""
    rng = np.random.default_rng(0)
    model, several = small_model(2, 2), 0
    for _ in range(40):
        cost = random_cost(rng)
        units = dict(cost.units)
        for layer, feature in zip(LAYERS, (1, 2), strict=True):
            ms = rng.uniform(0.5, 1) * np.eye(5)[feature]
            times_ms = {"forward_ms": ms, "backward_ms": 2 * ms, "recompute_ms": 0.8 * ms}
            units[layer] = replace(units[layer], **times_ms)
        cost = replace(cost, units=units)
        features = random_features(rng, 4)
        features[0, 1:3] = 0
        packs = workload_of_a_step(features)
        times, peaks_of_all = brute_force([cost], model, packs, 1)
        cap = peaks_of_all.min() + rng.uniform(0.2, 0.6) * np.ptp(peaks_of_all)
        fitting = times[peaks_of_all <= cap]
        result = search_stages(SplitTask(cost, model, packs, 1, cap))
        assert result.step_ms == pytest.approx(fitting.min())
        several += fitting.max() > 1.01 * fitting.min()
    assert several >= 20


def test_steps_that_take_no_time_are_searched():
    """Prevents an endless search if steps take no time."""
    rng = np.random.default_rng(0)
    cost = random_cost(rng)
    nothing = dict.fromkeys(("forward_ms", "backward_ms", "recompute_ms"), np.zeros(5))
    units = {name: replace(unit, **nothing) for name, unit in cost.units.items()}
    model, packs = small_model(2, 2), random_packs(rng, 3)
    cost = replace(cost, units=units)
    result = search_stages(SplitTask(cost, model, packs, 2, 1e15))
    times, _ = brute_force([cost], model, packs, 2)
    assert result.step_ms == pytest.approx(times.min())


def test_the_smallest_cap_that_anything_fits_is_searched():
    """Prevents a feasible cap refused, searched endlessly or given slower stages."""
    for seed in (44, 67, 111, 246, 303, 329):
        task = random_case(np.random.default_rng(seed), 3)
        least = min_peak_of_splits(task)
        for share in (0.3, 0.99, 1, 1.01, 1.5, 4):
            capped = replace(task, memory_cap_bytes=(cap := share * least))
            found = min_peak_of_splits(capped, is_exact=False)
            assert least * (1 - 1e-12) <= found <= cap if share >= 1 else cap < found <= least
        exact, roomy = (
            search_stages(replace(task, memory_cap_bytes=least * more)) for more in (1, 1 + 1e-9)
        )
        assert exact.step_ms == pytest.approx(roomy.step_ms, rel=2e-9)


def test_rows_with_another_number_of_micro_batches_are_told_apart():
    """Prevents dropping or adding a micro-batch of zeros, which still costs link time."""
    features = np.zeros((6, 5))
    features[[0, 3]] = 1
    packs = equal_steps((2, 1, 3), features).rows(np.arange(5))
    steps = SampledSteps.build(packs, random_cost(np.random.default_rng(0)))
    assert sorted(steps.counts[steps.rows].ravel()) == [2, 3]


def test_every_path_is_a_lower_bound():
    """Prevents an invalid bound, which would exclude the best split unnoticed."""
    rng = np.random.default_rng(4)
    compared = tight = 0
    for _ in range(60):
        task = random_case(rng, 6)
        cap = rng.uniform(1, 1.5) * min_peak_of_splits(task)
        problem = partition._make_problem(replace(task, memory_cap_bytes=cap))
        options = [
            stage_choices(problem, stage, np.arange(len(problem.structure.runs.start)))[0]
            for stage in range(task.stages)
        ]
        kept = on_paths([o.edges for o in options], problem.units)
        options = [option.take(k) for option, k in zip(options, kept, strict=True)]
        splits = every_split(options, problem.units)[:300]
        terms = np.stack([o.terms[splits[:, s]] for s, o in enumerate(options)], axis=1)
        step_ms = problem.simulator.step_ms(*problem.structure.layout.split_terms(terms))
        allowed_ms = step_ms * (1 + 1e-12)
        for stage, option in enumerate(options):
            assert (option.bound_ms[splits[:, stage]] <= allowed_ms).all()
            lengths = np.tensordot(terms, problem.structure.weights[stage], axes=((1, 2), (1, 2)))
            assert (lengths <= allowed_ms[:, None]).all()
            tight += np.isclose(lengths.max(axis=1), step_ms).sum()
        paths = problem.simulator.critical_paths(terms)
        lengths = np.tensordot(terms, paths, axes=((1, 2), (1, 2)))
        assert (lengths <= allowed_ms[:, None]).all()
        np.testing.assert_allclose(np.diag(lengths), step_ms, rtol=1e-12)
        compared += len(splits)
    assert compared > 250
    assert tight > 0.1 * compared


def every_split(options: list[StageOptions], units: int) -> np.ndarray:
    """Return all ways through the stages' options. [n, p]"""
    partial = [((), 0)]
    for option in options:
        partial = [
            ((*chosen, i), int(option.end[i]))
            for chosen, position in partial
            for i in np.flatnonzero(option.start == position)
        ]
    return np.array([chosen for chosen, position in partial if position == units])


def count_simulated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of splits of every later simulation."""
    counts, step_ms = list[int](), PipelineSimulator.step_ms

    def count(simulator, terms, once):
        counts.append(len(terms))
        return step_ms(simulator, terms, once)

    monkeypatch.setattr(PipelineSimulator, "step_ms", count)
    return counts


def test_a_spent_budget_is_admitted(monkeypatch: pytest.MonkeyPatch):
    """Prevents an inexact result reported as proven, and an unlimited effort."""
    case = large_case((30, 50), 8, 1.3)
    simulated = count_simulated(monkeypatch)
    best, of_best = search_stages(case), sum(simulated)
    little = search_stages(case, effort=1e-6)
    assert best.lower_bound_ms == best.step_ms
    assert sum(simulated) < 2 * of_best
    assert little.lower_bound_ms <= best.step_ms <= little.step_ms
    for limit in ("_FIRST_WIDTH", "_MAX_WIDTH", "_MAX_GROWTH_ROUNDS"):
        monkeypatch.setattr(split_search, limit, 1)
    cut_short = search_stages(case)
    assert cut_short.lower_bound_ms < cut_short.step_ms
    assert cut_short.lower_bound_ms <= best.step_ms * (1 + 1e-9)
    assert cut_short.step_ms >= best.step_ms * (1 - 1e-9)


def test_a_gap_that_stays_open_is_given_up(monkeypatch: pytest.MonkeyPatch):
    """Prevents a search of minutes if the bounds do not meet."""
    case = large_case((30, 50), 20, 1.2)
    monkeypatch.setattr(partition, "MAX_WORK", 1e6)
    first, again = (search_stages(case) for _ in range(2))
    assert first.lower_bound_ms < first.step_ms
    assert (first.stages, first.lower_bound_ms) == (again.stages, again.lower_bound_ms)
    monkeypatch.setattr(partition, "MAX_WORK", 1e8)
    longer = search_stages(case)
    assert longer.lower_bound_ms > first.lower_bound_ms
    assert first.lower_bound_ms <= longer.step_ms <= first.step_ms


@pytest.mark.parametrize("share_of_least", [10.0, 1.3, 1.2])
def test_a_narrow_search_is_proven_by_what_it_learns(monkeypatch, share_of_least):
    """Prevents a narrow search that stops early, or continues in vain once all feasible splits are
    known."""
    for limit in ("_FIRST_WIDTH", "_MAX_WIDTH"):
        monkeypatch.setattr(split_search, limit, 40)
    result = search_stages(large_case((45, 80), 8, share_of_least))
    assert result.step_ms < result.lower_bound_ms * 1.004


def test_the_bound_of_a_long_run_is_below_its_prediction():
    """Prevents a bound over all steps above a prediction of 2,000 light steps."""
    rng = np.random.default_rng(2)
    cost, model = random_cost(rng), small_model(2, 2)
    features = np.ones((6_001, 5))
    packs = equal_steps((6_001, 1, 1), features)
    simulated = packs.some_steps(MAX_SIMULATED_STEPS)
    features[np.setdiff1d(packs.step, simulated.step), 1:] = 100
    predicted_ms = [
        simulate_levels(cost, [stages_from_cuts(model, (cut,))], simulated).step_ms.mean()
        for cut in (3, 4, 5)
    ]
    assert 0 < min_step_ms(SplitTask(cost, model, packs, 2)) <= min(predicted_ms) * (1 + 1e-9)


@pytest.mark.parametrize("share_of_least", [10.0, 1.3])
def test_a_large_model_is_searched_with_few_simulations(monkeypatch, share_of_least: float):
    """Prevents bounds too weak for a search of seconds, and results that change."""
    case, simulated = large_case((45, 80), 8, share_of_least), count_simulated(monkeypatch)
    result, again = search_stages(case), search_stages(case)
    check_stages(case.model, result.stages)
    assert result.lower_bound_ms == result.step_ms
    assert sum(simulated) < 4_000
    assert again.stages == result.stages


def test_only_sampled_steps_are_simulated_but_all_packs_fit():
    """Prevents simulating every step of a run, and a plan that does not fit unsampled steps."""
    rng = np.random.default_rng(3)
    cost, model = random_cost(rng), small_model(3, 3)
    features = random_features(rng, 400)
    packs = equal_steps((200, 1, 2), features)
    step, sampled = packs.step, sampled_steps(packs)
    assert len(np.unique(sampled.step)) == partition.MAX_SAMPLED_STEPS
    heaviest = 37
    assert not (sampled.features == features[step == heaviest][0]).all(axis=1).any()
    light = min_peak_of_splits(SplitTask(cost, model, packs, 2))
    features[step == heaviest] = 8
    assert min_peak_of_splits(SplitTask(cost, model, packs, 2)) > light
    with pytest.raises(UserError, match="more than the memory cap"):
        search_stages(SplitTask(cost, model, packs, 2, light))


@pytest.mark.parametrize(
    ("index", "units", "recompute", "message"),
    [
        (0, ["vision embed", "vision 0"], [], r"stage 1 holds vision 2.* has vision 1\.\.2"),
        (0, ["vision embed", "vision 0..1", "projector"], [], "stage 0 holds .*, projector, but"),
        (1, ["vision 2", "projector", "language embed", "language 0..1"], [], "stage 2 holds"),
        (2, ["language 1", "head"], [], "end before head|stage 2 holds"),
        (2, ["language 1..2"], [], "end before head"),
        (1, None, ["vision 1"], r"stage 1 recomputes vision 1 but holds vision 2"),
        (1, None, ["language 0", "language 0"], "each once"),
        (1, None, ["projector"], "recomputes projector but"),
        (0, None, ["language 0"], r"recomputes language 0 but holds vision 0\.\.1;"),
    ],
)
def test_stages_that_are_not_the_model_are_refused(index, units, recompute, message):
    """Prevents training from an edited plan that loses, repeats or misplaces layers."""
    model = small_model(3, 3)
    stages = list(stages_from_cuts(model, (3, 7)))
    units = units or list(map(str, stages[index].units))
    stages[index] = Stage.parse(*units, recompute=recompute)
    with pytest.raises(UserError, match=message):
        check_stages(model, stages)


def test_an_empty_stage_is_refused():
    """Prevents a stage that only passes tensors on."""
    model = small_model(3, 3)
    with pytest.raises(UserError, match="stage 1 holds nothing"):
        check_stages(model, [*stages_from_cuts(model, ()), Stage.parse()])


TWO_CHUNKS = PipelineSchedule(name="interleaved", chunks=2)


def ragged_steps(rng: np.random.Generator, micro_batches: int, ranks: int) -> Workload:
    """Return two steps. The last rank may lack micro-batches."""
    packs = steps_of(rng, micro_batches, ranks)
    lacks = (packs.dp_rank == ranks - 1) & (packs.slot >= rng.integers(1, micro_batches + 1))
    return packs if ranks == 1 else packs.rows(np.flatnonzero(~lacks))


def steps_of(rng: np.random.Generator, micro_batches: int, ranks: int = 1) -> Workload:
    """Return two steps with equal numbers of micro-batches on every rank."""
    shape = 2, ranks, micro_batches
    return equal_steps(shape, random_features(rng, 2 * ranks * micro_batches))


@pytest.mark.parametrize(
    ("seed", "layers", "stages", "schedule"),
    [
        *product(range(2), [5], [2], [TWO_CHUNKS, PipelineSchedule(name="zb-v", chunks=2)]),
        *product(range(3), [6], [3], [PipelineSchedule(name="zb-h1")]),
    ],
)
def test_without_a_cap_the_best_of_all_cuts_is_found(seed, layers, stages, schedule):
    """Prevents a search that misses the best cut, or simulates another step than a plan's."""
    rng = np.random.default_rng(seed)
    model, cost = small_model(3, layers), random_cost(rng)
    packs = ragged_steps(rng, int(rng.integers(2, 7)), int(rng.integers(1, 3)))
    found = search_parts(SplitTask(cost, model, packs, stages, schedule=schedule))
    predicted_ms, _ = planners_figures(cost, found.stages, packs, schedule)
    assert found.step_ms == pytest.approx(predicted_ms)
    cuts = all_cuts(model, stages * schedule.chunks)
    best_ms, _ = min(planners_figures(cost, parts, packs, schedule) for parts in cuts)
    assert found.step_ms == pytest.approx(best_ms)
    assert found.lower_bound_ms <= best_ms


def cap_options(cost: CostModel, packs: Workload, options: Collection, share: float) -> tuple:
    """Return a cap that this share of options fits, these options and their fastest mean step."""
    step_ms, peaks = np.array([planners_figures(cost, e, packs, TWO_CHUNKS) for e in options]).T
    cap_bytes = float(np.quantile(peaks, share))
    fitting = [each for each, peak in zip(options, peaks, strict=True) if peak <= cap_bytes]
    return cap_bytes, fitting, step_ms[peaks <= cap_bytes].min()


def recompute_options(cost: CostModel, parts: tuple[Stage, ...]) -> Iterator[tuple[Stage, ...]]:
    """Return parts with every recompute count of the earliest layers of each kind."""
    layers = layer_kinds(cost.kinds)
    every = []
    for part in parts:
        counts = unit_counts(cost.kinds, part.units)[layers].tolist()
        every.append([*product(*(range(count + 1) for count in counts))])
    cuts = np.cumsum([sum(map(len, part.units)) for part in parts])[:-1].tolist()
    model = small_model(2, 3)
    return (stages_from_cuts(model, cuts, numbers) for numbers in product(*every))


@pytest.mark.parametrize("seed", range(3))
def test_a_cap_is_kept_by_nearly_the_best_of_all_recomputed_layers(seed: int) -> None:
    """Prevents parts over the cap, and needlessly expensive recomputation."""
    rng = np.random.default_rng(seed)
    model, cost = small_model(2, 3), random_cost(rng)
    packs = steps_of(rng, 4)
    options = [each for cut in all_cuts(model, 4) for each in recompute_options(cost, cut)]
    cap_bytes, _, best_ms = cap_options(cost, packs, options, 0.2)
    found = search_parts(SplitTask(cost, model, packs, 2, cap_bytes, schedule=TWO_CHUNKS))
    _, peak = planners_figures(cost, found.stages, packs, TWO_CHUNKS)
    assert peak <= cap_bytes * (1 + 1e-9)
    assert best_ms * (1 - 1e-9) <= found.step_ms <= best_ms * 1.03


@pytest.mark.parametrize("freedom", ["language", "stages"])
@pytest.mark.parametrize("on_first", [True, False])
def test_numbers_that_a_trainer_is_told_are_nearly_the_best(freedom: str, on_first: bool) -> None:
    """Prevents chunks that a trainer cannot express, and needlessly large recompute counts."""
    rules = StageRules(encoders_on_first=on_first, recompute=RecomputeFreedom(freedom))
    model, embed = small_model(2, 5), unit_names(small_model(2, 5)).index(LANGUAGE_EMBED)
    for seed in range(2):
        rng = np.random.default_rng(seed)
        cost, packs = random_cost(rng), steps_of(rng, 4)
        least = embed if on_first else 0  # units that the first part holds besides others
        cuts = [cut for cut in all_cuts(model, 4) if sum(map(len, cut[0].units)) > least]
        every = [*numbers_of(model, cost, 2, rules.recompute)]
        # Both parts of a device recompute equal numbers of layers.
        options = {tuple(map(recomputing, cut, 2 * each)) for cut in cuts for each in every}
        cap_bytes, fitting, best_ms = cap_options(cost, packs, options, 0.3)
        found = search_parts(SplitTask(cost, model, packs, 2, cap_bytes, rules, TWO_CHUNKS))
        assert found.stages in fitting
        assert found.step_ms <= best_ms * 1.03
