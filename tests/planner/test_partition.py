"""The joint search against brute force, and stages against the model they are cut from."""

import math
import re
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from cost_cases import model_of, random_cost, random_features, small_model, workload_of_a_step
from level_cases import brute_force, walked
from partition_cases import frozen, planners_figures, random_packs
from scipy.optimize import nnls

from omnibal.base.errors import UserError
from omnibal.cost.analytic import analytic_cost
from omnibal.cost.model import CostModel
from omnibal.model.config import ModelConfig, load_cluster, load_model
from omnibal.model.parallel import Parallel
from omnibal.model.units import unit_names
from omnibal.pipeline import partition, split_search
from omnibal.pipeline.bounds import least_step_ms
from omnibal.pipeline.critical_path import SampledSteps
from omnibal.pipeline.least_peak import least_peak_of_splits, peak_vs_budget
from omnibal.pipeline.partition import sampled_steps, search_stages
from omnibal.pipeline.predict import MAX_SIMULATED_STEPS
from omnibal.pipeline.simulate import simulate_run
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.stage_memory import GIB
from omnibal.pipeline.stage_options import StageOptions, on_paths, stage_choices
from omnibal.pipeline.unit_runs import check_stages, recomputed_counts, stages_from_cuts
from omnibal.pipeline.workload import Workload

LAYERS = ("vision_layer", "language_layer")


def random_case(rng: np.random.Generator, most_layers: int) -> tuple[CostModel, ModelConfig, int]:
    """Costs, model, packs and pipeline size."""
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
    # Drawn apart, so that cases which are known by their seed stay what they are.
    apart = rng.spawn(1)[0]
    cost = tied(cost) if apart.random() < 0.3 else cost
    return overlapped(cost, apart), model, packs, p


def overlapped(cost: CostModel, rng: np.random.Generator) -> CostModel:
    """The costs with a gather of weights, and in most cases with buckets that are hidden."""
    whole = sum(unit.trained_parameters for unit in cost.units.values())
    return replace(
        cost,
        rates=replace(cost.rates, weight_gather_ms=10 ** rng.uniform(-7, -4.5)),
        bucket_parameters=math.inf if rng.random() < 0.2 else whole / rng.uniform(0.5, 8),
    )


def random_case_of(
    rng: np.random.Generator, towers: str, most: int
) -> tuple[CostModel, ModelConfig, Workload, int]:
    """As `random_case`, for a model of these towers with at most so many layers in all."""
    number = len(towers.split())
    layers = 1 + rng.multinomial(rng.integers(0, most - number + 1), [1 / number] * number)
    model = model_of(towers, *layers.tolist())
    cost = random_cost(rng, model)
    # Layers of unlike ratios between features, so that which are worth recomputing depends on more.
    units = {
        name: replace(unit, recompute_ms=unit.recompute_ms ** rng.integers(1, 4))
        for name, unit in cost.units.items()
    }
    cost = replace(cost, units=units)
    packs = random_packs(rng, int(rng.integers(1, 5)), len(cost.features))
    cost = tied(cost) if rng.random() < 0.3 else cost
    return cost, model, packs, int(rng.integers(1, min(3, model.layers) + 1))


def tied(cost: CostModel) -> CostModel:
    """With language embed and head that are one matrix, which is most of what there is."""
    sizes = {"parameters": 3_000_000, "trained_parameters": 3_000_000}
    ends = ("language_embed", "head")
    units = {**cost.units, **{end: replace(cost.units[end], **sizes) for end in ends}}
    return replace(cost, units=units, tied_parameters=3_000_000)


def large_case(layers: tuple[int, int], p: int) -> tuple[CostModel, ModelConfig, Workload]:
    """InternVL with so many vision and language layers, on packs that all differ."""
    base = load_model("internvl-chat-1.5-6b-20b")
    model = base.with_layers(vision=layers[0], language=layers[1])
    rng = np.random.default_rng(1)
    shape = steps, ranks, micro_batches = 4, 2, 16
    packs = steps * ranks * micro_batches
    tiles = rng.integers(5, 10, packs)
    tokens = 4096 - rng.integers(0, 400, packs)
    features = np.stack([np.ones(packs), tiles, tokens, tokens**2 / 3, tokens / 4], axis=1)
    step, dp_rank, slot = (axis.ravel() for axis in np.indices(shape))
    cost = analytic_cost(
        model, load_cluster("a100-80g"), Parallel(tensor=4, pipeline=p, data=ranks), "bf16"
    )
    return (
        cost,
        model,
        Workload(
            features=features, step=step, dp_rank=dp_rank, slot=slot, data_parallel_size=ranks
        ),
    )


def of_walk(cost: CostModel, stages: tuple[Stage, ...], packs: Workload) -> tuple[float, float]:
    """Step ms and largest peak in bytes."""
    step_ms, peaks = walked([cost], [stages], packs)
    return step_ms, max(peaks)


def test_the_search_equals_brute_force():
    """Prevents a split or recomputed set that is not the best, and caps wrongly held or passed."""
    rng = np.random.default_rng(0)
    outcomes = {"infeasible": 0, "recomputed": 0, "kept": 0}
    for number in range(55):
        cost, model, packs, p = random_case(rng, 6 if number % 20 == 0 else 4)
        times, peaks_of_all = brute_force([cost], model, packs, p)
        low, high = peaks_of_all.min(), peaks_of_all.max()
        cap = rng.uniform(low - 0.1 * (high - low), low + 0.8 * (high - low))
        assert least_peak_of_splits(cost, model, packs, p) == pytest.approx(low, rel=1e-9)
        if cap < low:
            outcomes["infeasible"] += 1
            with pytest.raises(UserError, match="more than the memory cap") as raised:
                search_stages(cost, model, packs, p, cap)
            stated = float(re.search(r"needs ([\d.]+) GiB", str(raised.value))[1])
            assert stated == pytest.approx(low / GIB, abs=0.005)
            cap = low * (1 + 1e-9)
        result = search_stages(cost, model, packs, p, cap)
        check_stages(model, result.stages)
        best_ms = times[peaks_of_all <= cap].min()
        assert result.step_ms == pytest.approx(best_ms, rel=2e-9)
        assert result.lower_bound_ms == result.step_ms
        step_ms, peak = planners_figures(cost, result.stages, packs)
        assert result.step_ms == pytest.approx(step_ms, rel=1e-12)
        assert peak <= cap * (1 + 1e-9)
        assert (step_ms, peak) == pytest.approx(of_walk(cost, result.stages, packs), rel=1e-9)
        recomputed = any(stage.recomputed_layers for stage in result.stages)
        outcomes["recomputed" if recomputed else "kept"] += 1
    assert min(outcomes.values()) >= 4, outcomes


@pytest.mark.parametrize(
    ("towers", "most"),
    [("language", 6), ("runs", 7), ("vision runs", 7), ("vision audio language", 7)],
)
def test_the_search_equals_brute_force_for_any_towers(towers: str, most: int):
    """Prevents towers or kinds of layer that are counted, recomputed or numbered as another's."""
    rng = np.random.default_rng(0)
    recomputed = several = 0
    for _ in range(20):
        cost, model, packs, p = random_case_of(rng, towers, most)
        times, peaks_of_all = brute_force([cost], model, packs, p)
        low, high = peaks_of_all.min(), peaks_of_all.max()
        cap = low * (1 + 1e-9) + rng.uniform(0, 0.8) * (high - low)
        assert least_peak_of_splits(cost, model, packs, p) == pytest.approx(low, rel=1e-9)
        result = search_stages(cost, model, packs, p, cap)
        check_stages(model, result.stages)
        best_ms = times[peaks_of_all <= cap].min()
        assert result.step_ms == result.lower_bound_ms == pytest.approx(best_ms, rel=2e-9)
        step_ms, peak = planners_figures(cost, result.stages, packs)
        assert result.step_ms == pytest.approx(step_ms, rel=1e-12)
        assert peak <= cap * (1 + 1e-9)
        assert (step_ms, peak) == pytest.approx(of_walk(cost, result.stages, packs), rel=1e-9)
        again = [np.count_nonzero(recomputed_counts(cost.kinds, s)) for s in result.stages]
        recomputed += max(again) > 0
        several += max(again) > 1
    assert recomputed >= 5 and (several >= 1 or towers == "language"), (recomputed, several)


@pytest.mark.parametrize(
    "towers", ["language", "vision language", "vision runs", "vision audio language"]
)
def test_every_micro_batch_is_within_the_extremes(towers: str):
    """Prevents dropping a set that is the best on a micro-batch unlike those looked at."""
    rng = np.random.default_rng(1)
    for _ in range(40):
        cost, model, packs, p = random_case_of(rng, towers, 8)
        problem = partition._problem(cost, model, packs, p, 1e15)
        times_ms = packs.features @ problem.structure.recompute_ms.T
        for time_ms in times_ms:
            _, left_ms = nnls(problem.extreme_ms.T, time_ms)
            assert left_ms < 1e-9 * times_ms.max()


def test_micro_batches_that_cost_nothing_decide_nothing():
    """Prevents that all recomputed sets count as equal since a micro-batch takes no time in either
    tower: sets that are slower for the others would be kept in place of the best, and `proven`."""
    rng = np.random.default_rng(0)
    model, several = small_model(2, 2), 0
    for _ in range(40):
        cost = random_cost(rng)
        units = dict(cost.units)
        for layer, feature in zip(LAYERS, (1, 2), strict=True):
            forward_ms = rng.uniform(0.5, 1) * np.eye(5)[feature]
            units[layer] = replace(
                units[layer],
                forward_ms=forward_ms,
                backward_ms=2 * forward_ms,
                recompute_ms=0.8 * forward_ms,
            )
        cost = replace(cost, units=units)
        features = random_features(rng, 4)
        features[0, 1:3] = 0
        packs = workload_of_a_step(features)
        times, peaks_of_all = brute_force([cost], model, packs, 1)
        cap = peaks_of_all.min() + rng.uniform(0.2, 0.6) * np.ptp(peaks_of_all)
        fitting = times[peaks_of_all <= cap]
        assert search_stages(cost, model, packs, 1, cap).step_ms == pytest.approx(fitting.min())
        several += fitting.max() > 1.01 * fitting.min()
    assert several >= 20


def test_steps_that_take_no_time_are_searched():
    """Prevents a search without end: no limit is below nothing, and none grows from it."""
    rng = np.random.default_rng(0)
    cost, nothing = random_cost(rng), np.zeros(5)
    units = {
        unit: replace(unit_cost, forward_ms=nothing, backward_ms=nothing, recompute_ms=nothing)
        for unit, unit_cost in cost.units.items()
    }
    model, packs = small_model(2, 2), random_packs(rng, 3)
    cost = replace(cost, units=units)
    result = search_stages(cost, model, packs, 2, 1e15)
    times, _ = brute_force([cost], model, packs, 2)
    assert result.step_ms == pytest.approx(times.min())


def test_the_smallest_cap_that_anything_fits_is_searched():
    """Prevents a cap that is refused, searched without end or given slower stages."""
    for seed in (44, 67, 111, 246, 303, 329):
        cost, model, packs, p = random_case(np.random.default_rng(seed), 3)
        least = least_peak_of_splits(cost, model, packs, p)
        for share in (0.3, 0.99, 1, 1.01, 1.5, 4):
            cap, found = share * least, peak_vs_budget(cost, model, packs, p, share * least)
            assert least * (1 - 1e-12) <= found <= cap if share >= 1 else cap < found <= least
        exact, roomy = (
            search_stages(cost, model, packs, p, cap) for cap in (least, least * (1 + 1e-9))
        )
        assert exact.step_ms == pytest.approx(roomy.step_ms, rel=2e-9)


def test_rows_with_another_number_of_micro_batches_are_told_apart():
    """Prevents that a micro-batch of zeros, which still costs links, is dropped or added."""
    features = np.zeros((5, 5))
    features[[0, 3]] = 1
    packs = Workload(
        features=features,
        step=np.array([0, 0, 0, 1, 1]),
        dp_rank=np.zeros(5, np.int64),
        slot=np.array([0, 1, 2, 0, 1]),
        data_parallel_size=1,
    )
    steps = SampledSteps.of(packs, random_cost(np.random.default_rng(0)))
    assert sorted(steps.counts[steps.rows].ravel()) == [2, 3]


def test_every_path_is_a_lower_bound():
    """Prevents a bound above what is possible, which would rule out the best split unnoticed."""
    rng = np.random.default_rng(4)
    compared = tight = 0
    for _ in range(60):
        cost, model, packs, p = random_case(rng, 6)
        cap = rng.uniform(1, 1.5) * least_peak_of_splits(cost, model, packs, p)
        problem = partition._problem(cost, model, packs, p, cap)
        options = [
            stage_choices(problem, stage, np.arange(len(problem.structure.runs.start)))[0]
            for stage in range(p)
        ]
        kept = on_paths([(o.start, o.end) for o in options], problem.units)
        options = [option.take(k) for option, k in zip(options, kept, strict=True)]
        splits = every_split(options, problem.units)[:300]
        terms = np.stack([o.terms[splits[:, s]] for s, o in enumerate(options)], axis=1)
        step_ms = problem.simulator.step_ms(terms)
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
    """All ways through the stages' options. [n, p]"""
    partial = [((), 0)]
    for option in options:
        partial = [
            ((*chosen, i), int(option.end[i]))
            for chosen, position in partial
            for i in np.flatnonzero(option.start == position)
        ]
    return np.array([chosen for chosen, position in partial if position == units])


def test_a_spent_budget_is_admitted(monkeypatch: pytest.MonkeyPatch):
    """Prevents an inexact result that claims to be proven, and a bound above what is possible."""
    cost, model, packs = large_case((30, 50), 8)
    cap = 1.3 * least_peak_of_splits(cost, model, packs, 8)
    best = search_stages(cost, model, packs, 8, cap)
    assert best.lower_bound_ms == best.step_ms
    monkeypatch.setattr(split_search, "_FIRST_WIDTH", 1)
    monkeypatch.setattr(split_search, "_MAX_WIDTH", 1)
    monkeypatch.setattr(split_search, "_MAX_ROUNDS", 1)
    cut_short = search_stages(cost, model, packs, 8, cap)
    assert cut_short.lower_bound_ms < cut_short.step_ms
    assert cut_short.lower_bound_ms <= best.step_ms * (1 + 1e-9)
    assert cut_short.step_ms >= best.step_ms * (1 - 1e-9)
    assert cut_short.simulated < best.simulated


def test_little_effort_ends_with_what_it_has():
    """Prevents an effort that is not limited, or a bound that was never proven."""
    cost, model, packs = large_case((30, 50), 8)
    cap = 1.3 * least_peak_of_splits(cost, model, packs, 8)
    full, little = (search_stages(cost, model, packs, 8, cap, effort=e) for e in (1.0, 1e-6))
    assert little.simulated < full.simulated
    assert little.lower_bound_ms <= full.step_ms <= little.step_ms


def test_a_gap_that_stays_open_is_given_up(monkeypatch: pytest.MonkeyPatch):
    """Prevents a search of minutes where the bounds do not meet."""
    cost, model, packs = large_case((30, 50), 20)
    cap = 1.2 * least_peak_of_splits(cost, model, packs, 20)
    monkeypatch.setattr(partition, "MAX_WORK", 1e6)
    first, again = (search_stages(cost, model, packs, 20, cap) for _ in range(2))
    assert first.lower_bound_ms < first.step_ms
    assert (first.stages, first.lower_bound_ms) == (again.stages, again.lower_bound_ms)
    monkeypatch.setattr(partition, "MAX_WORK", 1e8)
    longer = search_stages(cost, model, packs, 20, cap)
    assert longer.lower_bound_ms > first.lower_bound_ms
    assert first.lower_bound_ms <= longer.step_ms <= first.step_ms


@pytest.mark.parametrize("share_of_least", [10.0, 1.3, 1.2])
def test_a_narrow_search_is_proven_by_what_it_learns(
    monkeypatch: pytest.MonkeyPatch, share_of_least: float
):
    """Prevents a search that stops, or goes on in vain, once all splits that had room are known."""
    cost, model, packs = large_case((45, 80), 8)
    monkeypatch.setattr(split_search, "_FIRST_WIDTH", 40)
    monkeypatch.setattr(split_search, "_MAX_WIDTH", 40)
    cap = share_of_least * least_peak_of_splits(cost, model, packs, 8)
    result = search_stages(cost, model, packs, 8, cap)
    assert result.step_ms < result.lower_bound_ms * 1.004


def test_what_has_no_room_is_learned_from():
    """Prevents a bound that stays where it is, as no path is known of the splits that decide it."""
    cost, model, packs = large_case((60, 100), 12)
    cap = 1.2 * least_peak_of_splits(cost, model, packs, 12)
    problem = partition._problem(cost, model, packs, 12, cap)
    search = partition._descend(problem, 1.0, lambda enough: enough)
    bounds_ms = []
    for _ in range(4):
        search._rule_out()
        _, _, dropped, dropped_ms = search._grow(1)
        positions = [o.end[dropped[:, s]] for s, o in enumerate(search.options)]
        starts = [o.start[dropped[:, s]] for s, o in enumerate(search.options)]
        np.testing.assert_array_equal(positions[:-1], starts[1:])
        assert (search.problem.simulator.step_ms(search._terms(dropped)) >= dropped_ms).all()
        search._learn(dropped)
        bounds_ms.append(dropped_ms)
    assert bounds_ms == sorted(bounds_ms)
    assert bounds_ms[-1] > bounds_ms[0]


def test_the_bound_of_a_long_run_is_below_its_prediction():
    """Prevents comparing a bound on all steps with a prediction on 2,000 of them: here the heavy
    steps are those that are not simulated."""
    rng = np.random.default_rng(2)
    cost, model = random_cost(rng), small_model(2, 2)
    features = np.ones((6_001, 5))
    packs = Workload(
        features=features,
        step=np.arange(6_001),
        dp_rank=np.zeros(6_001, np.int64),
        slot=np.zeros(6_001, np.int64),
        data_parallel_size=1,
    )
    simulated = packs.some_steps(MAX_SIMULATED_STEPS)
    features[np.setdiff1d(packs.step, simulated.step), 1:] = 100
    predicted_ms = [
        simulate_run(cost, stages_from_cuts(model, (cut,)), simulated).step_ms.mean()
        for cut in (3, 4, 5)
    ]
    assert 0 < least_step_ms(cost, model, packs, 2) <= min(predicted_ms) * (1 + 1e-9)


@pytest.mark.parametrize("share_of_least", [10.0, 1.3])
def test_a_large_model_is_searched_with_few_simulations(share_of_least: float):
    """Prevents bounds so weak that the search is not over in seconds, and a changing result."""
    cost, model, packs = large_case((45, 80), 8)
    cap = share_of_least * least_peak_of_splits(cost, model, packs, 8)
    result = search_stages(cost, model, packs, 8, cap)
    check_stages(model, result.stages)
    assert result.lower_bound_ms == result.step_ms
    assert result.simulated < 2_000
    assert search_stages(cost, model, packs, 8, cap).stages == result.stages


def test_only_sampled_steps_are_simulated_but_all_packs_fit():
    """Prevents a search as long as the run, and a plan that runs out of memory in a step that was
    not sampled."""
    rng = np.random.default_rng(3)
    cost, model = random_cost(rng), small_model(3, 3)
    step, slot = (axis.ravel() for axis in np.indices((200, 2)))
    features = random_features(rng, len(step))
    packs = Workload(
        features=features, step=step, dp_rank=0 * step, slot=slot, data_parallel_size=1
    )
    sampled = sampled_steps(packs)
    assert len(np.unique(sampled.step)) == partition.MAX_SAMPLED_STEPS
    heaviest = 37
    assert not (sampled.features == features[step == heaviest][0]).all(axis=1).any()
    light = least_peak_of_splits(cost, model, packs, 2)
    features[step == heaviest] = 8
    assert least_peak_of_splits(cost, model, packs, 2) > light
    with pytest.raises(UserError, match="more than the memory cap"):
        search_stages(cost, model, packs, 2, light)


def test_recomputed_layers_are_the_earliest_of_their_stage():
    """Prevents layer numbers of another stage when counts become layers."""
    stages = stages_from_cuts(small_model(4, 5), (3, 8), [(1, 0), (2, 0), (0, 2)])
    assert [stage.recomputed("vision") for stage in stages] == [(0,), (2, 3), ()]
    assert [stage.recomputed("language") for stage in stages] == [(), (), (1, 2)]


def test_cuts_and_stages_are_each_others_inverse():
    """Prevents an off-by-one between the unit list and stages, for every possible split."""
    model = small_model(2, 3)
    for cuts in combinations(range(1, len(unit_names(model))), 3):
        stages = stages_from_cuts(model, cuts)
        check_stages(model, stages)
        sizes = [stage.size for stage in stages]
        assert tuple(np.cumsum(sizes)[:-1]) == cuts


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
def test_stages_that_are_not_the_model_are_refused(
    index: int, units: list[str] | None, recompute: list[str], message: str
):
    """Prevents training from a hand-edited plan that loses, repeats or misplaces layers."""
    model = small_model(3, 3)
    stages = list(stages_from_cuts(model, (3, 7)))
    units = units or list(map(str, stages[index].units))
    stages[index] = Stage.of(*units, recompute=recompute)
    with pytest.raises(UserError, match=message):
        check_stages(model, stages)


def test_an_empty_stage_is_refused():
    """Prevents a stage that only passes tensors on."""
    empty = Stage.of()
    with pytest.raises(UserError, match="stage 1 of 2 is empty"):
        check_stages(small_model(3, 3), [*stages_from_cuts(small_model(3, 3), ()), empty])
