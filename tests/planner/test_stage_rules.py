"""The search under a trainer's rules against all splits and numbers, each simulated."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from cost_cases import model_of, random_cost
from plan_cases import job_spec
from test_partition import frozen, planners_figures, random_packs

from omnibal.config import ModelConfig, load_model
from omnibal.cost.model import CostModel
from omnibal.errors import DoesNotFit, UserError
from omnibal.parallel import Parallel
from omnibal.pipeline.bounds import least_step_ms
from omnibal.pipeline.least_peak import least_peak_of_splits
from omnibal.pipeline.partition import search_stages
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.units import check_stages, unit_words
from omnibal.pipeline.workload import Workload
from omnibal.targets import RecomputeFreedom, StageRules, TargetName
from omnibal.units import LANGUAGE

TOWERS = ["language", "runs", "vision language", "vision runs", "vision audio language"]


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
        most = max([*(tower.layers for tower in model.encoders.values()), language])
        for numbers in product(range(most + 1), repeat=p):
            yield [dict.fromkeys([*model.encoders, LANGUAGE], number) for number in numbers]
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


def brute_force(
    cost: CostModel, model: ModelConfig, packs: Workload, p: int, rules: StageRules
) -> tuple[np.ndarray, np.ndarray]:
    """Step ms and largest peak in bytes of everything that the rules allow."""
    figures = {}
    for stages in allowed_stages(model, p, rules):
        for numbers in numbers_of(model, cost, p, rules.recompute):
            given = tuple(recomputing(*each) for each in zip(stages, numbers, strict=True))
            if given not in figures:
                figures[given] = planners_figures(cost, given, packs)
    times, peaks = np.array([*figures.values()]).T
    return times, peaks


def random_case(
    rng: np.random.Generator, towers: str, freedom: RecomputeFreedom
) -> tuple[CostModel, ModelConfig, int, StageRules]:
    """Costs, model, pipeline size and rules; in some the first tower is frozen."""
    number = len(towers.split())
    layers = 1 + rng.multinomial(rng.integers(1, 6 - number), [1 / number] * number)
    model = model_of(towers, *layers.tolist())
    cost = random_cost(rng, model)
    first = model.towers[0]
    if rng.random() < 0.3 and first != LANGUAGE:
        kinds = [each.name for each in cost.kinds if each.tower == first and not each.is_projector]
        nothing = np.zeros(len(cost.features))
        without = {k: replace(frozen(cost.units[k]), recompute_ms=nothing) for k in kinds}
        cost = replace(cost, units=cost.units | without)
    rules = StageRules(
        encoders_on_first=bool(rng.integers(2)),
        language_everywhere=bool(rng.integers(2)),
        recompute=freedom,
    )
    is_limited = rules.encoders_on_first or rules.language_everywhere
    most = int(layers[-1]) if is_limited else int(layers.sum())
    return cost, model, int(rng.integers(1, min(4, most) + 1)), rules


@pytest.mark.parametrize("freedom", list(RecomputeFreedom)[1:])
def test_the_search_under_rules_equals_brute_force(freedom: RecomputeFreedom):
    """Prevents stages or recomputed layers that a trainer cannot be told, better ones that are
    missed, and bounds that are none under rules."""
    rng = np.random.default_rng(5)
    recomputed = refused = 0
    for towers in TOWERS * 4:
        cost, model, p, rules = random_case(rng, towers, freedom)
        packs = random_packs(rng, int(rng.integers(1, 5)), len(cost.features))
        times, peaks = brute_force(cost, model, packs, p, rules)
        low, high = peaks.min(), peaks.max()
        least = least_peak_of_splits(cost, model, packs, p, rules=rules)
        assert least == pytest.approx(low, rel=1e-9)
        cap = low * (1 + 1e-9) + rng.uniform(-0.1, 0.6) * (high - low)
        if cap < low:
            refused += 1
            with pytest.raises(DoesNotFit, match=r"stages with .*needs .* more than the memory"):
                search_stages(cost, model, packs, p, cap, rules=rules)
            cap = low * (1 + 1e-9)
        best_ms = times[peaks <= cap].min()
        result = search_stages(cost, model, packs, p, cap, rules=rules)
        check_stages(model, result.stages)
        assert result.step_ms == result.lower_bound_ms == pytest.approx(best_ms, rel=2e-9)
        assert least_step_ms(cost, model, packs, p, rules) <= best_ms * (1 + 1e-9)
        quick = search_stages(cost, model, packs, p, cap, rules=rules, prove=False)
        assert quick.lower_bound_ms <= best_ms * (1 + 1e-9) <= quick.step_ms * (1 + 2e-9)
        recomputed += any(stage.recompute for stage in result.stages)
    assert recomputed >= 10 and refused >= 1, (recomputed, refused)


def test_more_stages_than_rules_allow_are_refused():
    """Prevents a search over splits of which there is none, which would end in a traceback."""
    model = load_model("internvl-digits")
    layers = model.language.layers
    for rules, most in (
        (StageRules(language_everywhere=True), layers),
        (StageRules(encoders_on_first=True), layers + 1),
        (StageRules(), model.layers),
    ):
        job_spec(rules=rules, parallel=Parallel(pipeline=most))
        with pytest.raises(UserError, match=f"at most {most}$"):
            job_spec(rules=rules, parallel=Parallel(pipeline=most + 1))


def test_sizes_are_those_of_the_trainer():
    """Prevents parallel sizes that the trainer does not have, in a plan, a search or advice."""
    job = job_spec(made_for=TargetName.XTUNER, parallel=Parallel(pipeline=1))
    for sizes in ({"pipeline": 2}, {"pipeline": 1, "tensor": 2}):
        with pytest.raises(UserError, match=r"for XTuner v1, whose .* size is at most 1"):
            job.sized(Parallel(**sizes))
