"""The search under a trainer's rules against all splits and numbers, each simulated."""

from collections.abc import Iterator
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from cost_cases import model_of, random_cost
from test_partition import frozen, planners_figures, random_packs

from omnibal.config import ModelConfig
from omnibal.cost.model import CostModel
from omnibal.errors import UserError
from omnibal.pipeline.bounds import least_step_ms
from omnibal.pipeline.least_peak import least_peak_of_splits
from omnibal.pipeline.partition import search_stages
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.units import check_stages, unit_words
from omnibal.targets import RecomputeFreedom, StageRules
from omnibal.units import LANGUAGE, LANGUAGE_EMBED, unit_kinds, unit_names

EVERY_FREEDOM = list(RecomputeFreedom)


def allowed_stages(model: ModelConfig, p: int, rules: StageRules) -> Iterator[tuple[Stage, ...]]:
    """Every split that the rules allow, nothing recomputed."""
    words = unit_words(model)
    is_layer = [span.layers is not None for span in words]
    for cuts in combinations(range(1, len(words)), p - 1):
        runs = list(pairwise((0, *cuts, len(words))))
        if not all(any(is_layer[a:b]) for a, b in runs):
            continue
        stages = [Stage.of(*map(str, words[a:b])) for a, b in runs]
        if rules.encoders_on_first and not stages[0].holds("language embed"):
            continue
        if rules.language_everywhere and not all(len(s.layers(LANGUAGE)) for s in stages):
            continue
        yield tuple(stages)


def numbers_of(
    model: ModelConfig, cost: CostModel, p: int, freedom: RecomputeFreedom
) -> Iterator[list[dict[str, int]]]:
    """Every choice of numbers: of every stage, by tower."""
    with_backward = {k.tower for k in cost.kinds if k.is_layer and cost.units[k.name].has_backward}
    layers = {name: tower.layers for name, tower in model.encoders.items() if name in with_backward}
    language = model.language.layers
    if freedom is RecomputeFreedom.STAGES:
        most = max([*layers.values(), language])
        for numbers in product(range(most + 1), repeat=p):
            yield [dict.fromkeys([*layers, LANGUAGE], number) for number in numbers]
        return
    every = freedom is RecomputeFreedom.TOWERS
    encoders = [range(number + 1) if every else (0, number) for number in layers.values()]
    of_language = (0, language) if freedom is RecomputeFreedom.ALL else range(language + 1)
    for *of_encoders, number in product(*encoders, of_language):
        yield [dict(zip(layers, of_encoders, strict=True)) | {LANGUAGE: number}] * p


def recomputing(stage: Stage, numbers: dict[str, int]) -> Stage:
    """The stage with the first layers of its towers recomputed."""
    words = []
    for tower, number in numbers.items():
        held = stage.layers(tower)
        words += [f"{tower} {layer}" for layer in held[: min(number, len(held))]]
    return Stage.of(*map(str, stage.units), recompute=words)


def brute_force(model, cost, packs, p, rules) -> tuple[np.ndarray, np.ndarray]:
    """Step ms and largest peak in bytes of everything that the rules allow."""
    figures = {}
    for stages in allowed_stages(model, p, rules):
        for numbers in numbers_of(model, cost, p, rules.recompute):
            given = tuple(recomputing(*each) for each in zip(stages, numbers, strict=True))
            if given not in figures:
                figures[given] = planners_figures(cost, given, packs)
    times, peaks = np.array([*figures.values()]).T
    return times, peaks


@pytest.mark.parametrize("freedom", EVERY_FREEDOM[1:])
def test_brute(freedom):
    rng = np.random.default_rng(5)
    rec = inf = 0
    for number in range(60):
        towers, most = [("language", 5), ("runs", 5), ("vision language", 5), ("vision runs", 5), ("vision audio language", 5)][number % 5]
        n = len(towers.split())
        layers = 1 + rng.multinomial(rng.integers(1, most - n + 1), [1 / n] * n)
        model = model_of(towers, *layers.tolist())
        cost = random_cost(rng, model)
        if rng.random() < 0.3 and n > 1:
            name = towers.split()[0]
            units = {k.name: frozen(cost.units[k.name]) for k in cost.kinds if k.tower == name and not k.is_projector}
            from dataclasses import replace
            cost = replace(cost, units=cost.units | units)
        on_first = bool(rng.integers(2)); every = bool(rng.integers(2))
        rules = StageRules(encoders_on_first=on_first, language_everywhere=every, recompute=freedom)
        most_p = int(layers[-1]) if on_first or every else int(layers.sum())
        p = int(rng.integers(1, min(4, most_p) + 1))
        packs = random_packs(rng, int(rng.integers(1, 5)), len(cost.features))
        times, peaks = brute_force(model, cost, packs, p, rules)
        low, high = peaks.min(), peaks.max()
        assert least_peak_of_splits(cost, model, packs, p, rules=rules) == pytest.approx(low, rel=1e-9)
        cap = low * (1 + 1e-9) + rng.uniform(-0.1, 0.8) * (high - low)
        if cap < low:
            inf += 1
            with pytest.raises(UserError, match="pipeline stages with "):
                search_stages(cost, model, packs, p, cap, rules=rules)
            cap = low * (1 + 1e-9)
        best = times[peaks <= cap].min()
        result = search_stages(cost, model, packs, p, cap, rules=rules)
        check_stages(model, result.stages)
        assert result.step_ms == pytest.approx(best, rel=2e-9)
        assert result.lower_bound_ms == result.step_ms
        assert least_step_ms(cost, model, packs, p, rules) <= best * (1 + 1e-9)
        quick = search_stages(cost, model, packs, p, cap, rules=rules, prove=False)
        assert quick.lower_bound_ms <= best * (1 + 1e-9) <= quick.step_ms * (1 + 2e-9)
        rec += any(s.recompute for s in result.stages)
    print(rec, inf)
    assert rec > 10
