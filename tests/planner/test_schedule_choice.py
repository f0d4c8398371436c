"""The schedule of a plan is the fastest that fits, and is said why."""

from dataclasses import replace
from functools import cache

import pytest
from plan_cases import MODEL, example_lengths, origin_of, request

from omnibal import Free, Goal, Planned, plan, planning, training_job
from omnibal.base.errors import UserError
from omnibal.job import plan_data
from omnibal.job.job import JobSpec
from omnibal.job.planner import PlanRequest, PlanResult, make_ordered_plan, ordered_plan
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.targets import OWN
from omnibal.packing.packing import PackingMethod
from omnibal.pipeline.schedules import ScheduleName
from omnibal.pipeline.stage_memory import fits_cap
from omnibal.search import schedule_choice
from omnibal.search.conflicts import Feature
from omnibal.search.goal import Samples, ShapesAlone
from omnibal.search.level_estimates import LevelRule
from omnibal.search.strategy import FreeSizes
from omnibal.steps.steps import pack_epochs

ONE_ALONE = OWN.model_copy(update={"schedules": frozenset({"1f1b"})})
DATA = ShapesAlone(caps=Caps.of(tokens=4096, tiles=8), micro_batches=4)


def job(*, runs_all: bool) -> JobSpec:
    """A model on two stages of two pipelines, for a trainer that runs all schedules or 1F1B."""
    made = training_job("internvl3-2b", "h100-80g", parallel=Parallel(pipeline=2, data=2))
    return made if runs_all else replace(made, trainer=ONE_ALONE)


@cache
def planned(schedule: ScheduleName | None, *, runs_all: bool = True) -> Planned:
    """The plan in a schedule, or in the best that the trainer runs."""
    goal = Goal(job=job(runs_all=runs_all), data=DATA, free=Free(schedule=schedule))
    return plan(goal)


def test_the_fastest_of_all_schedules_is_taken() -> None:
    """Prevents: a schedule that is slower than another one, or over the memory cap."""
    best = planned(None)
    assert best.result.plan.schedule == best.schedule.chosen
    names: tuple[ScheduleName, ...] = ("1f1b", "zb-v", "interleaved")
    others = {name: planned(name) for name in names}
    steps_ms = {name: each.prediction.step_ms for name, each in others.items()}
    assert {each.result.plan.schedule.name for each in others.values()} == set(names)
    assert best.prediction.step_ms <= min(steps_ms.values()) * 1.005
    assert best.prediction.step_ms < 0.95 * steps_ms["1f1b"]
    for each in (best, *others.values()):
        peak_gib = max(stage.memory.peak_gib for stage in each.prediction.stages)
        assert fits_cap(peak_gib, job(runs_all=True).memory_cap_gib)
        assert len(each.result.plan.stages) == 2 * each.result.plan.schedule.chunks
    saved = 1 - best.prediction.step_ms / steps_ms["1f1b"]
    assert f"{saved:.1%} faster than in 1f1b" in best.schedule.reason
    idle = others["1f1b"].prediction.bubble_fraction
    assert best.schedule.reason.endswith(f"in place of {idle:.1%}")


def test_what_the_trainer_does_not_run_is_planned_if_it_is_named() -> None:
    """Prevents: a plan by default that cannot be trained, and a schedule that cannot be studied."""
    usual = planned(None, runs_all=False)
    assert usual.result.plan.schedule.name == "1f1b"
    assert usual.schedule.reason == ""
    assert planned("zb-v", runs_all=False).result.plan == planned("zb-v").result.plan


def test_free_sizes_are_planned_in_the_best_schedule_too() -> None:
    """Prevents: a search of sizes that leaves schedules out, or takes a slower plan for them."""
    sizes = FreeSizes(gpus=4, pipeline=4)
    data = ShapesAlone(caps=DATA.caps, packs_per_step=4)
    one, every = (
        plan(Goal(job=job(runs_all=runs_all), data=data, free=Free(sizes=sizes, schedule=None)))
        for runs_all in (False, True)
    )
    assert every.result.plan.schedule.name != "1f1b"
    assert every.prediction.step_ms < one.prediction.step_ms


def test_the_fastest_plan_is_put_in_order_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: packs that stay as dealt in the schedule that is taken, or are made anew for it."""
    asked = request(lengths=example_lengths(origin_of(MODEL)), packing=PackingMethod.BALANCED)
    samples = Samples(lengths=asked.data.lengths, caps=asked.data.caps, epochs=2, micro_batches=4)
    free = Free(levels=LevelRule(count=1), schedule=None)
    ordered, packed = list[PlanRequest](), list[object]()

    def noted(request: PlanRequest, result: PlanResult) -> PlanResult:
        ordered.append(request)
        return ordered_plan(request, result)

    def packs_noted(*given: object, **named: object) -> object:
        packed.append(given)
        return pack_epochs(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(schedule_choice, "ordered_plan", noted)
    monkeypatch.setattr(plan_data, "pack_epochs", packs_noted)
    made = plan(Goal(job=asked.job, data=samples, free=free))
    assert made.schedule.chosen.name != "1f1b"
    assert len(ordered) == len(packed) == 1
    expected = make_ordered_plan(replace(asked, schedule=made.schedule.chosen))
    assert made.result.plan == expected.plan
    assert made.schedule.steps_ms[made.schedule.chosen] == made.prediction.step_ms


def test_sizes_are_searched_among_those_with_room_for_the_schedule() -> None:
    """Prevents: a refusal because the best sizes in 1F1B have one stage, where others have more."""
    data = ShapesAlone(caps=DATA.caps, packs_per_step=4)
    free = Free(sizes=FreeSizes(gpus=2), schedule="interleaved")
    made = plan(Goal(job=job(runs_all=True), data=data, free=free))
    assert made.result.plan.schedule.name == "interleaved"
    assert made.result.plan.parallel.pipeline == 2
    usual = plan(Goal(job=job(runs_all=True), data=data, free=Free(sizes=FreeSizes(gpus=2))))
    assert usual.result.plan.parallel.pipeline == 1


def test_a_schedule_without_room_is_refused_before_any_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prevents: minutes of a search in 1F1B before a line that the sizes alone decide."""

    def searched(*_: object, **__: object) -> None:
        raise AssertionError("a plan was searched for")

    monkeypatch.setattr(planning, "make_ordered_plan", searched)
    monkeypatch.setattr(planning, "search_with_levels", searched)
    many = training_job("internvl3-2b", "h100-80g", parallel=Parallel(pipeline=32))
    with pytest.raises(UserError, match="here are 32 with 52 layers together"):
        plan(Goal(job=many, data=DATA, free=Free(schedule="interleaved")))
    sizes = FreeSizes(gpus=32, pipeline=32)
    with pytest.raises(UserError, match="here are 32 with 52 layers together"):
        data = ShapesAlone(caps=DATA.caps, packs_per_step=4)
        plan(Goal(job=many, data=data, free=Free(sizes=sizes, schedule="interleaved")))
    in_fp8 = replace(job(runs_all=True), precision="fp8")
    with pytest.raises(UserError, match="products in FP8"):
        plan(Goal(job=in_fp8, data=DATA, free=Free(schedule="zb-h1")))


def test_what_a_schedule_cannot_have_is_said_in_one_line() -> None:
    """Prevents: plans that the trainer refuses."""
    in_fp8 = replace(job(runs_all=True), precision="fp8")
    single = training_job("internvl3-2b", "h100-80g", parallel=Parallel(pipeline=1, data=2))
    other = training_job("internvl3-2b", "h100-80g", trainer="megatron-lm")
    for asked, schedule, message in (
        (in_fp8, "zb-v", r"--schedule zb-v cannot be: products in FP8"),
        (single, "interleaved", "needs 2 pipeline stages at least"),
        (other, "zb-h1", Feature.SCHEDULE.value),
    ):
        with pytest.raises(UserError, match=message):
            plan(Goal(job=asked, data=DATA, free=Free(schedule=schedule)))
