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
MANY, OF_MANY = {"parallel": Parallel(pipeline=32)}, FreeSizes(gpus=32, pipeline=32)
IN_FP8 = {"precision": "fp8"}


def job(model: str = "internvl3-2b", **changes) -> JobSpec:
    """A model on two stages of two pipelines."""
    given = {"parallel": Parallel(pipeline=2, data=2)} | changes
    return training_job(model, "h100-80g", **given)


def plan_of(job: JobSpec, schedule: ScheduleName | None, **free) -> Planned:
    data = replace(DATA, micro_batches=None, packs_per_step=4) if free else DATA
    return plan(Goal(job=job, data=data, free=Free(schedule=schedule, **free)))


@cache
def planned(schedule: ScheduleName | None, *, runs_all: bool = True) -> Planned:
    """The plan in a schedule, or in the best that a trainer of all or of 1F1B runs."""
    return plan_of(job() if runs_all else replace(job(), trainer=ONE_ALONE), schedule)


def test_the_fastest_of_all_schedules_is_taken() -> None:
    """Prevents: a schedule that is slower than another one, or over the memory cap."""
    best = planned(None)
    assert best.result.plan.schedule == best.schedule.chosen
    others = {name: planned(name) for name in ("1f1b", "zb-v", "interleaved")}
    steps_ms = {name: each.prediction.step_ms for name, each in others.items()}
    assert all(each.result.plan.schedule.name == name for name, each in others.items())
    assert best.prediction.step_ms <= min(steps_ms.values()) * 1.005
    assert best.prediction.step_ms < 0.95 * steps_ms["1f1b"]
    for each in (best, *others.values()):
        peak_gib = max(stage.memory.peak_gib for stage in each.prediction.stages)
        assert fits_cap(peak_gib, job().memory_cap_gib)
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
    one, every = (
        plan_of(each, None, sizes=sizes) for each in (replace(job(), trainer=ONE_ALONE), job())
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
    made, usual = (
        plan_of(job(), name, sizes=FreeSizes(gpus=2)).result.plan
        for name in ("interleaved", "1f1b")
    )
    assert (made.schedule.name, made.parallel.pipeline) == ("interleaved", 2)
    assert usual.parallel.pipeline == 1


@pytest.mark.parametrize(
    ("changes", "schedule", "free", "message"),
    [
        (MANY, "interleaved", {}, "here are 32 with 52 layers together"),
        (MANY, "interleaved", {"sizes": OF_MANY}, "here are 32 with 52 layers together"),
        (IN_FP8, "zb-h1", {}, "products in FP8"),
        (IN_FP8, "zb-v", {}, r"--schedule zb-v cannot be: products in FP8"),
        ({"parallel": Parallel(pipeline=1, data=2)}, "interleaved", {}, "needs 2 pipeline stages"),
        ({"trainer": "megatron-lm"}, "zb-h1", {}, Feature.SCHEDULE.value),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_before_any_search(
    monkeypatch: pytest.MonkeyPatch, changes: dict, schedule: ScheduleName, free: dict, message: str
) -> None:
    """Prevents: minutes of a search in 1F1B before a line that the sizes alone decide, and plans
    that the trainer refuses."""

    def searched(*_: object, **__: object) -> None:
        raise AssertionError("a plan was searched for")

    monkeypatch.setattr(planning, "make_ordered_plan", searched)
    monkeypatch.setattr(planning, "search_with_levels", searched)
    with pytest.raises(UserError, match=message):
        plan_of(job(**changes), schedule, **free)
