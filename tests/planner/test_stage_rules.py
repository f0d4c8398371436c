"""The search under a trainer's rules, against all splits and recompute counts, simulated."""

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from cost_cases import model_of, random_cost
from level_cases import search_all
from partition_cases import frozen, numbers_of, planners_figures, random_packs, recomputing
from plan_cases import job_spec, request

from omnibal.base.errors import UserError
from omnibal.cost.model import CostModel, UnitCost
from omnibal.job.check import check_plan
from omnibal.job.job import JobSpec
from omnibal.job.plan import write_plan
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import make_plan
from omnibal.model.config import ModelConfig, load_cluster, load_model
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.targets import TARGETS, RecomputeFreedom, StageRules, TrainerConstraints
from omnibal.model.units import LANGUAGE
from omnibal.pipeline.baselines import PartitionMethod, SplitRule
from omnibal.pipeline.partition import search_stages
from omnibal.pipeline.split_task import SplitTask
from omnibal.pipeline.stage_cost import held_units, trained_parameters
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.unit_runs import encoders_stage, unit_spans
from omnibal.pipeline.workload import Workload

TOWERS = ["language", "runs", "vision language", "vision runs", "vision audio language"]


def allowed_stages(model: ModelConfig, p: int, rules: StageRules) -> Iterator[tuple[Stage, ...]]:
    """Yield every split allowed by the rules, without recomputation."""
    words = unit_spans(model)
    is_layer = [span.layers is not None for span in words]
    for cuts in combinations(range(1, len(words)), p - 1):
        runs = list(pairwise((0, *cuts, len(words))))
        stages = tuple(Stage.parse(*map(str, words[a:b])) for a, b in runs)
        on_first = stages[0].holds("language embed") or not rules.encoders_on_first
        everywhere = all(len(s.layers(LANGUAGE)) for s in stages) or not rules.language_everywhere
        if on_first and everywhere and all(any(is_layer[a:b]) for a, b in runs):
            yield stages


def brute_force(
    cost: CostModel, model: ModelConfig, packs: Workload, p: int, rules: StageRules
) -> tuple[np.ndarray, np.ndarray]:
    """Return step ms and peak bytes of every allowed plan."""
    every = {
        tuple(map(recomputing, stages, numbers))
        for stages in allowed_stages(model, p, rules)
        for numbers in numbers_of(model, cost, p, rules.recompute)
    }
    times, peaks = np.array([planners_figures(cost, stages, packs) for stages in every]).T
    return times, peaks


def random_case(
    rng: np.random.Generator, towers: str, freedom: RecomputeFreedom
) -> tuple[CostModel, ModelConfig, int, StageRules]:
    """Return costs, model, pipeline size and rules; the first tower is frozen at times."""
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
    """Prevents stages that a trainer cannot express, missed better stages, and wrong bounds."""
    rng = np.random.default_rng(5)
    recomputed = refused = 0
    for towers in TOWERS * 2:
        cost, model, p, rules = random_case(rng, towers, freedom)
        packs = random_packs(rng, int(rng.integers(1, 5)), len(cost.features))
        every = brute_force(cost, model, packs, p, rules)
        task = SplitTask(cost, model, packs, p, rules=rules)
        task, result, is_refused = search_all(task, *every, rng.uniform(-0.1, 0.6))
        refused += is_refused
        quick, best_ms = search_stages(task, prove=False), result.step_ms
        assert quick.lower_bound_ms <= best_ms * (1 + 3e-9) <= quick.step_ms * (1 + 5e-9)
        recomputed += any(stage.recompute for stage in result.stages)
    assert recomputed >= 5 and refused, (recomputed, refused)


def limited_by(**rules: bool) -> TrainerConstraints:
    return TrainerConstraints(stages=StageRules(**rules))


def test_more_stages_than_rules_allow_are_refused():
    """Prevents a traceback if the rules allow no split into this many stages."""
    model = load_model("internvl-digits")
    layers = model.language.layers
    for rules, most in (
        ({"language_everywhere": True}, layers),
        ({"encoders_on_first": True}, layers + 1),
        ({}, model.layers),
    ):
        job = replace(job_spec(), trainer=limited_by(**rules)).with_sizes(Parallel(pipeline=most))
        with pytest.raises(UserError, match=rf"\b{most}\b"):
            job.with_sizes(Parallel(pipeline=most + 1))


def test_whole_encoders_cost_what_they_cost_alone():
    """Prevents tensor-parallel costs for encoders that a trainer computes without TP."""
    model, cluster = load_model("internvl2.5-8b"), load_cluster("h100-80g")
    sizes = Parallel(tensor=4, pipeline=2, data=2, sequence_parallel=True)
    shared_out = job_spec(model=model, cluster=cluster, precision="bf16", parallel=sizes)
    alone = shared_out.with_sizes(Parallel(pipeline=2, data=2))
    whole = replace(shared_out, trainer=limited_by(encoders_whole=True))
    for kind in whole.cost.kinds:
        as_in = shared_out if kind.tower == LANGUAGE else alone
        for name in (each.name for each in fields(UnitCost)):
            found, expected = (getattr(job.cost.units[kind.name], name) for job in (whole, as_in))
            np.testing.assert_array_equal(found, expected, f"{kind.name} {name}")
    of_whole, of_share = (
        trained_parameters(job.cost, held_units(job.cost, [encoders_stage(model)]))[0]
        for job in (whole, shared_out)
    )
    # InternViT-300M with its projector: 304 and 33 million parameters in the model's card.
    assert of_whole == pytest.approx(337e6, rel=0.01) and of_share < 100e6


def test_a_plan_for_a_trainer_is_checked_by_its_cost(tmp_path: Path):
    """Prevents a check or resumed run that predicts the plan for another trainer."""
    asked = request(parallel=Parallel(tensor=2, pipeline=2, sequence_parallel=True))
    swift = TARGETS["ms-swift"]
    made = make_plan(replace(asked, job=replace(asked.job, trainer=swift)))
    save_plan(made, tmp_path / "plan")
    check_plan(tmp_path / "plan")
    assert JobSpec.of_plan(made.plan).trainer == swift
    assert made.plan.stages[0].holds("language embed")
    # For this project's trainer the time would differ.
    other = made.plan.model_copy(update={"made_for": None})
    write_plan(other, tmp_path / "plan")
    with pytest.raises(UserError, match="prediction"):
        check_plan(tmp_path / "plan")


def test_what_does_not_go_with_limited_stages_is_refused():
    """Prevents limited stages with another method, levels or data-parallel encoders."""
    asked = request()
    limited = replace(asked.job, trainer=limited_by(encoders_on_first=True))
    with pytest.raises(UserError, match="joint search"):
        replace(asked, job=limited, split=SplitRule(method=PartitionMethod.LAYER))
    levels = (Level(caps=Caps.of(tiles=4, tokens=256)), Level(caps=asked.data.caps))
    with pytest.raises(UserError, match="levels"):
        replace(asked, job=limited, data=replace(asked.data, levels=levels))
    with pytest.raises(UserError, match="data-parallel encoders"):
        replace(limited, placement=EncoderPlacement.DATA_PARALLEL)
