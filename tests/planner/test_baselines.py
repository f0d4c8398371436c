"""Partition baselines against enumeration, their definitions and OmniBal's published splits."""

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from cost_cases import model_of, random_cost, random_features, small_model, workload_of_a_step
from partition_cases import all_cuts, equal_steps, planners_figures

from omnibal.base.errors import UserError
from omnibal.cost.analytic import analytic_cost
from omnibal.cost.model import CostModel
from omnibal.cost.setting import CostSetting
from omnibal.model.config import load_cluster, load_model
from omnibal.model.parallel import Parallel
from omnibal.pipeline import baselines
from omnibal.pipeline.baselines import (
    PartitionMethod,
    RecomputeRule,
    SplitRule,
    balanced_cuts,
    baseline_stages,
    bmp_candidates,
    cut_bytes,
)
from omnibal.pipeline.simulate import simulate_levels
from omnibal.pipeline.split_task import SplitTask
from omnibal.pipeline.stage_cost import stage_times
from omnibal.pipeline.stage_memory import GIB, stage_memories
from omnibal.pipeline.stage_units import Span, Stage, merge_spans
from omnibal.pipeline.unit_runs import check_stages, stage_units, stages_from_cuts, unit_counts
from omnibal.pipeline.workload import Workload

MODEL = load_model("internvl-chat-1.5-6b-20b")
PACK = np.array([1.0, 9, 4096, 4096**2, 4096])
LAYERS = ("vision_layer", "language_layer")
FORWARD_MS = {
    "vision_embed": 0.3,
    "vision_layer": 1.1,
    "projector": 0.3,
    "language_embed": 0.1,
    "language_layer": 1.0,
    "head": 1.02,
}
"""The paper's forward times of vision and language layers. Others are guesses."""


def split_rule(method: str, recompute: str = "none") -> SplitRule:
    return SplitRule(method=PartitionMethod(method), recompute=RecomputeRule(recompute))


def random_workload(rng: np.random.Generator, steps: int, m: int, features: int = 5) -> Workload:
    return equal_steps((steps, 2, m), random_features(rng, 2 * steps * m, features))


def cuts_of(stages: tuple[Stage, ...]) -> tuple[int, ...]:
    return tuple(int(c) for c in np.cumsum([sum(map(len, stage.units)) for stage in stages])[:-1])


def paper_cost(language_layer_ms: float) -> CostModel:
    cost = analytic_cost(CostSetting(MODEL, load_cluster("a100-80g"), Parallel(pipeline=4), "bf16"))
    fixed = np.eye(5)[0] * language_layer_ms
    times_ms = {name: fixed * ms for name, ms in FORWARD_MS.items()}
    units = {name: replace(unit, forward_ms=times_ms[name]) for name, unit in cost.units.items()}
    return replace(cost, units=units)


@pytest.mark.parametrize("method", ["parameter", "layer", "profile"])
def test_splits_are_the_most_even_of_all(method: str):
    """Prevents a baseline less balanced than its definition, and ties broken at random."""
    rng = np.random.default_rng(0)
    tied = 0
    for _ in range(24):
        vision, language = (int(n) for n in rng.integers(1, 6, 2))
        p = int(rng.integers(1, min(4, vision + language) + 1))
        model, cost = small_model(vision, language), random_cost(rng)
        if rng.random() < 0.5:  # Equal units, so that many splits tie.
            cost = replace(cost, units=dict.fromkeys(cost.units, cost.units["head"]))
        workload = random_workload(rng, 2, 3)
        mean = workload.features.mean(axis=0)
        sizes = {
            "parameter": {name: unit.parameters for name, unit in cost.units.items()},
            "layer": {name: int(name in LAYERS) for name in cost.units},
            "profile": {name: unit.forward_ms @ mean for name, unit in cost.units.items()},
        }[method]
        ranked = []
        for stages in all_cuts(model, p):
            loads = [sum(map(sizes.get, stage_units(cost.kinds, stage.units))) for stage in stages]
            squares = sum(load**2 for load in loads)
            ranked.append((round(max(loads), 6), round(squares, 6), cuts_of(stages)))
        ranked.sort()
        stages = baseline_stages(split_rule(method), SplitTask(cost, model, workload, p))
        check_stages(model, stages)
        assert cuts_of(stages) == ranked[0][-1]
        tied += len(ranked) > 1 and ranked[0][:2] == ranked[1][:2]
    assert tied >= 3


@pytest.mark.parametrize(
    ("towers", "fewest"), [("vision language", 1), ("runs", 3), ("vision audio language", 1)]
)
def test_recompute_rules_follow_their_definition(towers: str, fewest: int):
    """Prevents recomputing other layers than the rule's, or more or fewer than memory requires."""
    rng = np.random.default_rng(1)
    outcomes = {"too large": 0, "several kinds": 0, "part": 0, "none": 0}
    for _ in range(50):
        model = model_of(towers, *rng.integers(fewest, 5, len(towers.split())).tolist())
        cost = random_cost(rng, model)
        workload = random_workload(rng, 3, int(rng.integers(1, 5)), len(cost.features))
        p = int(rng.integers(1, min(2, model.layers) + 1))
        bare = baseline_stages(split_rule("layer"), SplitTask(cost, model, workload, p))
        peaks = [peaks_from_the_front(cost, bare, index, workload) for index in range(p)]
        low, high = max(map(min, peaks)), max(map(max, peaks))
        cap = rng.uniform(low - 0.1 * (high - low), high + 0.1 * (high - low))
        expected = {
            RecomputeRule.NONE: [[0] for _ in peaks],
            RecomputeRule.FULL: [[len(of_stage) - 1] for of_stage in peaks],
            RecomputeRule.FRONT: [list(range(len(of_stage))) for of_stage in peaks],
        }
        for rule, allowed in expected.items():
            given = split_rule("layer", rule), SplitTask(cost, model, workload, p, cap)
            fitting = [
                [n for n in numbers if of_stage[n] <= cap]
                for numbers, of_stage in zip(allowed, peaks, strict=True)
            ]
            if not all(fitting):
                least = [
                    min(of_stage[n] for n in numbers)
                    for numbers, of_stage in zip(allowed, peaks, strict=True)
                ]
                with pytest.raises(UserError, match="memory cap") as raised:
                    baseline_stages(*given)
                said = re.search(r"puts ([\d.]+) GiB on stage (\d)", str(raised.value))
                assert float(said[1]) == pytest.approx(max(least) / GIB, abs=0.0051)
                assert int(said[2]) == np.argmax(least)
                outcomes["too large"] += rule == RecomputeRule.FRONT
                continue
            stages = baseline_stages(*given)
            assert stages == tuple(
                with_front(bare, index, numbers[0])[index] for index, numbers in enumerate(fitting)
            )
            if rule == RecomputeRule.FRONT:
                last = [np.count_nonzero(unit_counts(cost.kinds, s.recompute)) for s in stages]
                outcomes["several kinds"] += max(last) > 1
                outcomes["part"] += any(
                    0 < numbers[0] < len(of_stage) - 1
                    for numbers, of_stage in zip(fitting, peaks, strict=True)
                )
                outcomes["none"] += not any(last)
    assert min(outcomes.values()) >= 2, outcomes


def with_front(stages: tuple[Stage, ...], index: int, number: int) -> tuple[Stage, ...]:
    """Return the stages with the first `number` layers of stage `index` recomputed."""
    layers = [unit for span in stages[index].units if span.layers for unit in span.units]
    changed = stages[index].model_copy(update={"recompute": merge_spans(layers[:number])})
    return (*stages[:index], changed, *stages[index + 1 :])


def peaks_from_the_front(
    cost: CostModel, stages: tuple[Stage, ...], index: int, workload: Workload
) -> list[float]:
    """Return peak bytes of a stage for each number of layers recomputed from its front."""
    numbers = range(stages[index].number_of_layers() + 1)
    every = [stage_memories(cost, [with_front(stages, index, n)], workload) for n in numbers]
    return [memories[index].peak_gib * GIB for memories in every]


def test_bmp_ranks_all_moves_of_the_anchor():
    """Prevents losing a candidate of the paper's enumeration, or ranking by another score."""
    rng = np.random.default_rng(2)
    for _ in range(20):
        model, cost = small_model(*(int(n) for n in rng.integers(2, 7, 2))), random_cost(rng)
        mean = random_features(rng, 1)[0]
        p, radius = int(rng.integers(2, 5)), int(rng.integers(1, 4))
        possible = [*map(cuts_of, all_cuts(model, p))]
        anchor = possible[int(rng.integers(len(possible)))]
        scored = []
        for moves in product(range(-radius, radius + 1), repeat=p - 1):
            cuts = tuple(cut + move for cut, move in zip(anchor, moves, strict=True))
            if cuts not in possible:
                continue
            times = stage_times(cost, stages_from_cuts(model, cuts), mean[None])
            forward_ms = times.forward_ms[0]
            variance = ((forward_ms - forward_ms.mean()) ** 2).sum()
            sending = (times.forward_link_ms - cost.link_latency_ms).sum()
            scored.append((variance / forward_ms.mean() + sending, cuts))
        score_of = {cuts: score for score, cuts in scored}
        found = bmp_candidates(cost, model, mean, anchor, radius, 15)
        assert len(set(found)) == len(found) == min(15, len(scored))
        # Compare scores, as rounding orders equal splits.
        best = sorted(score_of.values())[: len(found)]
        np.testing.assert_allclose([score_of[cuts] for cuts in found], best, rtol=1e-9)


def test_bmp_keeps_the_fastest_of_its_runs():
    """Prevents a result that was not simulated, does not fit, or is slower than the anchor."""
    rng = np.random.default_rng(3)
    outcomes = {"faster": 0, "anchor": 0, "passed over": 0, "too large": 0}
    for _ in range(20):
        model, cost = small_model(*(int(n) for n in rng.integers(3, 6, 2))), random_cost(rng)
        p, workload = int(rng.integers(2, 5)), random_workload(rng, 3, 4)
        profile = baseline_stages(split_rule("profile"), SplitTask(cost, model, workload, p))
        mean = workload.features.mean(axis=0)
        candidates = bmp_candidates(cost, model, mean, cuts_of(profile))
        runs = list(dict.fromkeys([cuts_of(profile), *candidates]))
        every = [planners_figures(cost, stages_from_cuts(model, cuts), workload) for cuts in runs]
        times, peaks = zip(*every, strict=True)
        cap = rng.choice([rng.uniform(0.8 * min(peaks), max(peaks)), np.inf])
        fitting = [ms for peak, ms in zip(peaks, times, strict=True) if peak <= cap]
        given = split_rule("bmp"), SplitTask(cost, model, workload, p, cap)
        if not fitting:
            outcomes["too large"] += 1
            with pytest.raises(UserError, match="at best, and the memory cap"):
                baseline_stages(*given)
            continue
        stages = baseline_stages(*given)
        assert times[runs.index(cuts_of(stages))] == pytest.approx(min(fitting))
        if len(fitting) == len(runs):
            outcomes["anchor" if stages == profile else "faster"] += 1
        outcomes["passed over"] += len(fitting) < len(runs)
    assert min(outcomes.values()) >= 1, outcomes


def test_bmp_runs_its_anchor_where_the_ranking_does_not():
    """Prevents a result worse than the profile split, or none, with slow links."""
    rng = np.random.default_rng(0)
    kept = 0
    for _ in range(20):
        model, cost = small_model(*(int(n) for n in rng.integers(4, 8, 2))), random_cost(rng)
        cost = replace(cost, link_ms_per_byte=100 * cost.link_ms_per_byte)
        workload = random_workload(rng, 1, 4)
        task = SplitTask(cost, model, workload, 4)
        anchor = baseline_stages(split_rule("profile"), task)
        cap = planners_figures(cost, anchor, workload)[1] * (1 + 1e-9)
        stages = baseline_stages(split_rule("bmp"), replace(task, memory_cap_bytes=cap))
        mean = workload.features.mean(axis=0)
        if cuts_of(anchor) not in bmp_candidates(cost, model, mean, cuts_of(anchor)):
            kept += stages == anchor
    assert kept >= 1


def test_bmp_simulates_whole_steps_of_the_entire_run(monkeypatch: pytest.MonkeyPatch):
    """Prevents judging long runs by their first steps, or by steps that lack packs."""
    rng = np.random.default_rng(4)
    workload = random_workload(rng, 450, 3)
    simulated = []

    def record_step(cost, levels, sample):
        simulated.append(sample.step)
        return simulate_levels(cost, levels, sample)

    monkeypatch.setattr(baselines, "simulate_levels", record_step)
    model, cost = small_model(4, 4), random_cost(rng)
    baseline_stages(split_rule("bmp"), SplitTask(cost, model, workload, 3))
    assert len(simulated) in (15, 16)
    for step in simulated:
        steps, packs = np.unique(step, return_counts=True)
        assert (len(steps), steps[0], steps[-1], set(packs)) == (200, 0, 449, {6})
        assert np.diff(steps).max() <= 3


def test_the_public_code_s_anchor_for_the_published_times():
    """Prevents an anchor other than the public code's for its list of 101 modules."""
    modules = [0, 0.3, *[1.1] * 45, 0.3, 0.1, *[1.0] * 48, 0, 0.02, 1, 0]
    is_layer = np.array([ms >= 1 for ms in modules[:-4]] + [False] * 4)
    assert balanced_cuts(np.array(modules), is_layer, 4) == (24, 47, 73)


@pytest.mark.parametrize(
    ("method", "layers", "mib"),
    [
        ("parameter", [(45, 1), (0, 16), (0, 16), (0, 15)], 144.0),
        ("layer", [(23, 0), (22, 1), (0, 23), (0, 24)], 144.0 + 8.3),
        ("profile", [(22, 0), (23, 0), (0, 24), (0, 24)], 144.0 + 16.6),
    ],
)
def test_splits_of_the_paper_s_model(method: str, layers: list[tuple[int, int]], mib: float):
    """Prevents baselines that differ from OmniBal's splits and Table 4's communication volumes."""
    cost, steps = paper_cost(1.0), workload_of_a_step(np.tile(PACK, (4, 1)))
    stages = baseline_stages(split_rule(method), SplitTask(cost, MODEL, steps, 4))
    held = [(len(stage.layers("vision")), len(stage.layers("language"))) for stage in stages]
    assert held == layers
    volume = cut_bytes(cost, MODEL, cuts_of(stages), PACK).sum()
    assert volume / 2**20 == pytest.approx(mib, abs=0.1)


def test_the_published_bmp_split_is_run():
    """Prevents losing the paper's split, 22V | 23V | 24L | 24L, cut after the projector."""
    cost, anchor, published = paper_cost(17.5), (23, 46, 72), (23, 47, 72)
    assert published in bmp_candidates(cost, MODEL, PACK, anchor)
    volume = cut_bytes(cost, MODEL, published, PACK).sum()
    assert volume / 2**20 == pytest.approx(144.0 - 12.7, abs=0.1)


@pytest.mark.parametrize("rule", ["front", "full"])
def test_frozen_layers_are_not_recomputed(rule: str):
    """Prevents recomputation time for frozen layers, which have no backward."""
    model, cluster = load_model("internvl-digits"), load_cluster("laptop-cpu")
    cost = analytic_cost(CostSetting(model, cluster, Parallel(pipeline=2), "fp32", ("vision",)))
    workload = random_workload(np.random.default_rng(0), 3, 2)
    task = SplitTask(cost, model, workload, 2, 1e12)
    stages = baseline_stages(split_rule("layer", rule), task)
    assert all(not stage.recomputed_in("vision") for stage in stages)
    recomputed = sum(len(stage.recomputed_in("language")) for stage in stages)
    assert recomputed == (model.language.layers if rule == "full" else 0)
    spans = [(Span("vision", stage.layers("vision")), *stage.recompute) for stage in stages]
    again = [s.model_copy(update={"recompute": r}) for s, r in zip(stages, spans, strict=True)]
    times = [stage_times(cost, each, workload.features).recompute_ms for each in (stages, again)]
    np.testing.assert_array_equal(*times)
