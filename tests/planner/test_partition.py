"""The joint search against brute force, and stages against the model they are cut from."""

import re
from functools import reduce
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from cost_cases import random_cost, random_features, small_model

from omnibal.config import ModelConfig, load_cluster, load_model
from omnibal.cost.analytic import analytic_cost
from omnibal.cost.model import CostModel, Unit
from omnibal.errors import UserError
from omnibal.pipeline import partition
from omnibal.pipeline.partition import search_stages
from omnibal.pipeline.stage_cost import GIB, stage_memories, stage_times
from omnibal.pipeline.units import check_stages, stage_units, stages_from_cuts, unit_sequence
from omnibal.plan import Parallel, Stage


def run_options(
    cost: CostModel, held: tuple[Unit, ...], features: np.ndarray
) -> list[tuple[float, np.ndarray, float]]:
    """Of a run of units, for all numbers of recomputed layers: time in ms, bytes kept for each
    micro-batch [packs], and other bytes."""
    mean = features.mean(axis=0)
    numbers = [range(held.count(kind) + 1) for kind in (Unit.VISION_LAYER, Unit.LANGUAGE_LAYER)]
    options = []
    for vision, language in product(*numbers):
        left = {Unit.VISION_LAYER: vision, Unit.LANGUAGE_LAYER: language}
        time_ms = state = 0.0
        kept, working = np.zeros(len(features)), 0.0
        for unit in held:
            unit_cost = cost.units[unit]
            time_ms += mean @ (unit_cost.forward_ms + unit_cost.backward_ms)
            state += unit_cost.parameters * 18
            transient = features @ unit_cost.transient_bytes
            if left.get(unit, 0):
                left[unit] -= 1
                time_ms += mean @ unit_cost.forward_ms
                kept += features @ unit_cost.boundary_bytes
                transient += features @ (unit_cost.activation_bytes - unit_cost.boundary_bytes)
            else:
                kept += features @ unit_cost.activation_bytes
            working = max(working, transient.max())
        options.append((time_ms, kept, state + working))
    return options


def most_together(kept: np.ndarray, m: int, in_flight: int) -> float:
    """Largest sum of so many micro-batches in a row of one step; steps have m of them."""
    steps = kept.reshape(-1, m)
    count = min(in_flight, m)
    return max(steps[:, i : i + count].sum(axis=1).max() for i in range(m - count + 1))


def brute_force(
    cost: CostModel, model: ModelConfig, features: np.ndarray, p: int, m: int
) -> np.ndarray:
    """Objective in ms and largest peak in bytes of all splits and recomputed sets. [all, 2]"""
    sequence, mean = unit_sequence(model), features.mean(axis=0)
    layers = {Unit.VISION_LAYER, Unit.LANGUAGE_LAYER}
    options = {
        (a, b): run_options(cost, sequence[a:b], features)
        for a, b in combinations(range(len(sequence) + 1), 2)
        if layers & set(sequence[a:b])
    }
    peaks_of = {
        (stage, run): [most_together(kept, m, p - stage) + other for _, kept, other in choices]
        for run, choices in options.items()
        for stage in range(p)
    }
    results = []
    for cuts in combinations(range(1, len(sequence)), p - 1):
        runs = list(pairwise((0, *cuts, len(sequence))))
        if not all(run in options for run in runs):
            continue
        sent = sum(mean @ cost.units[sequence[cut - 1]].output_bytes for cut in cuts)
        link_ms = 2 * ((p - 1) * cost.link_latency_ms + cost.link_ms_per_byte * sent)
        times = [np.array([time_ms for time_ms, _, _ in options[run]]) for run in runs]
        peaks = [np.array(peaks_of[stage, run]) for stage, run in enumerate(runs)]
        total_ms = (m - 1) * reduce(np.maximum.outer, times) + reduce(np.add.outer, times) + link_ms
        results.append(
            np.stack([total_ms.ravel(), reduce(np.maximum.outer, peaks).ravel()], axis=1)
        )
    return np.concatenate(results)


def objective(
    cost: CostModel, stages: tuple[Stage, ...], features: np.ndarray, m: int
) -> tuple[float, float]:
    """The same two figures of the search's result, by the planner's own formulas."""
    times = stage_times(cost, stages, features.mean(axis=0, keepdims=True))
    stage_ms = (times.forward_ms + times.backward_ms)[0]
    memories = stage_memories(cost, stages, slots(features, m), features)
    peak = max(memory.peak_gib for memory in memories) * GIB
    return (m - 1) * stage_ms.max() + stage_ms.sum() + 2 * times.forward_link_ms.sum(), peak


def slots(features: np.ndarray, m: int) -> np.ndarray:
    """Of packs in steps of m. [packs]"""
    return np.arange(len(features)) % m


def test_the_search_equals_brute_force():
    """Prevents a split or recomputed set that is not the best, and caps wrongly held or passed."""
    rng = np.random.default_rng(0)
    outcomes = {"infeasible": 0, "recomputed": 0, "kept": 0}
    for _ in range(240):
        vision, language = rng.integers(1, 5, 2)
        p, m = int(rng.integers(1, min(4, vision + language) + 1)), int(rng.integers(1, 7))
        model, cost = small_model(int(vision), int(language)), random_cost(rng)
        features = random_features(rng, m * int(rng.integers(1, 4)))
        results = brute_force(cost, model, features, p, m)
        low, high = results[:, 1].min(), results[:, 1].max()
        cap = rng.uniform(low - 0.1 * (high - low), low + 0.8 * (high - low))
        if cap < low:
            outcomes["infeasible"] += 1
            with pytest.raises(UserError, match="more than the memory cap") as raised:
                search_stages(cost, model, features, slots(features, m), p, m, cap)
            stated = float(re.search(r"needs ([\d.]+) GiB", str(raised.value))[1])
            assert stated == pytest.approx(low / GIB, abs=0.005)
            search_stages(cost, model, features, slots(features, m), p, m, low * (1 + 1e-9))
            continue
        stages = search_stages(cost, model, features, slots(features, m), p, m, cap)
        check_stages(model, stages)
        total_ms, peak = objective(cost, stages, features, m)
        assert total_ms == pytest.approx(results[results[:, 1] <= cap, 0].min(), rel=1e-9)
        assert peak <= cap * (1 + 1e-9)
        recomputed = any(stage.recompute_vision or stage.recompute_language for stage in stages)
        outcomes["recomputed" if recomputed else "kept"] += 1
    assert min(outcomes.values()) >= 10, outcomes


def test_a_large_model_is_searched_with_few_paths(monkeypatch: pytest.MonkeyPatch):
    """Prevents a search that tries every possible slowest stage: there are 67,040 here."""
    base = load_model("internvl-chat-1.5-6b-20b")
    language = base.language.model_copy(update={"layers": 80})
    model = base.model_copy(update={"language": language})
    rng = np.random.default_rng(1)
    tiles = rng.integers(0, 10, 50_000)
    tokens = 4096 - 100 * tiles - rng.integers(0, 100, len(tiles))  # many undominated packs
    features = np.stack([np.ones_like(tiles), tiles, tokens, tokens**2 / 3], axis=1)
    cost = analytic_cost(model, load_cluster("a100-80g"), Parallel(tensor=4, pipeline=8), "bf16")
    find, found = partition._shortest_path, []
    monkeypatch.setattr(
        partition, "_shortest_path", lambda *given: found.append(find(*given)) or found[-1]
    )
    for m in (2, 32):
        found.clear()
        stages = search_stages(cost, model, features, slots(features, m), 8, m, 28 * GIB)
        check_stages(model, stages)
        assert any(stage.recomputed_layers for stage in stages)
        assert 1 <= len(found) < 50


def test_recomputed_layers_are_the_earliest_of_their_stage():
    """Prevents layer numbers of another stage when counts become layers."""
    stages = stages_from_cuts(small_model(4, 5), (3, 8), [(1, 0), (2, 0), (0, 2)])
    assert [stage.recompute_vision for stage in stages] == [(0,), (2, 3), ()]
    assert [stage.recompute_language for stage in stages] == [(), (), (1, 2)]


def test_cuts_and_stages_are_each_others_inverse():
    """Prevents an off-by-one between the unit list and stages, for every possible split."""
    model = small_model(2, 3)
    for cuts in combinations(range(1, len(unit_sequence(model))), 3):
        stages = stages_from_cuts(model, cuts)
        check_stages(model, stages)
        sizes = [len(stage_units(stage)) for stage in stages]
        assert tuple(np.cumsum(sizes)[:-1]) == cuts


@pytest.mark.parametrize(
    ("index", "changed", "message"),
    [
        (0, {"vision_layers": 1}, "stage 1 holds 1 vision_layer, .* has 2 vision_layer"),
        (0, {"projector": True}, "stage 0 holds .* 1 projector, but"),
        (1, {"language_layers": 2}, "end before .*head|stage 2 holds"),
        (2, {"language_layers": 1}, "stage 2 holds"),
        (2, {"head": False}, "end before 1 head"),
        (1, {"recompute_vision": (1,)}, r"stage 1 recomputes vision layers \[1\] but holds"),
        (1, {"recompute_language": (0, 0)}, "each once"),
        (0, {"recompute_language": (0,)}, "holds no language layer"),
    ],
)
def test_stages_that_are_not_the_model_are_refused(
    index: int, changed: dict[str, object], message: str
):
    """Prevents training from a hand-edited plan that loses, repeats or misplaces layers."""
    model = small_model(3, 3)
    stages = list(stages_from_cuts(model, (3, 7)))
    stages[index] = stages[index].model_copy(update=changed)
    with pytest.raises(UserError, match=message):
        check_stages(model, stages)


def test_an_empty_stage_is_refused():
    """Prevents a stage that only passes tensors on."""
    empty = Stage(
        vision_embed=False,
        vision_layers=0,
        projector=False,
        language_embed=False,
        language_layers=0,
        head=False,
    )
    with pytest.raises(UserError, match="stage 1 of 2 is empty"):
        check_stages(small_model(3, 3), [*stages_from_cuts(small_model(3, 3), ()), empty])
