"""Re-planning from runs whose true costs are known, as their logs are made of these."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from cli_cases import PLAN, failure, run
from plan_cases import MODEL, example_lengths, job_spec, origin_of

from omnibal.base.errors import UserError
from omnibal.cost.model import CostModel
from omnibal.cost.refitted import Refit, Refitted, UnitFactors
from omnibal.cost.source import ANALYTIC
from omnibal.job.check import check_plan, open_plan
from omnibal.job.job import JobSpec
from omnibal.job.plan import plan_sha256
from omnibal.job.plan_data import SampleData
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import PlanRequest, PlanResult, make_ordered_plan
from omnibal.job.runlog import PassTimes, RunInfo, RunLog, StageRecord, StepRecord
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import MAX_DEVICES, Parallel
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.pipeline.simulate import simulate_levels
from omnibal.pipeline.stage_cost import per_step_costs, workload_times
from omnibal.replanning import replan

DEEP = MODEL.with_tower("vision", layers=12).model_copy(
    update={"language": MODEL.language.model_copy(update={"layers": 24})}
)
LENGTHS = example_lengths(origin_of(DEEP), count=1500)


def spoiled(unit: str, factor: float, slowness: tuple[float, ...] = ()) -> Refitted:
    """The counted costs with one kind of unit, or the devices of stages, so many times as slow."""
    features = ("fixed", "tiles", "tokens", "squared_tokens", "loss_tokens")
    factors = UnitFactors(
        forward=dict.fromkeys(features, factor), backward=dict.fromkeys(features, factor)
    )
    refit = Refit(root_sha256="", step=0, units={unit: factors}, pipeline=4, slowness=slowness)
    return Refitted(ANALYTIC, refit)


def planned(job: JobSpec, schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD) -> PlanResult:
    level = Level(caps=Caps.of(tiles=8, tokens=512))
    data = SampleData(lengths=LENGTHS, levels=(level,), packs_per_step=8 * job.parallel.data)
    return make_ordered_plan(PlanRequest(job=job, data=data, schedule=schedule))


@cache
def deep_job(data: int = 1) -> JobSpec:
    return job_spec(model=DEEP, parallel=Parallel(pipeline=4, data=data))


def logged(
    result: PlanResult, truth: CostModel, job: JobSpec, steps: int = 50, slow: dict | None = None
) -> RunLog:
    """What a run of the plan logs on devices of these costs, with 3 % of noise a pass.

    Args:
        slow: factors by stage and data-parallel rank.
    """
    plan, (packs, lengths) = result.plan, result.data
    workload = job.workload(packs, lengths, plan.pack_levels)
    times = workload_times(truth, plan.stages_at_levels, workload)
    once = per_step_costs(truth, plan.stages, plan.schedule)
    rng = np.random.default_rng(0)
    forward, backward = times.forward_ms.copy(), times.backward_ms.copy()
    for (stage, rank), factor in (slow or {}).items():
        forward[workload.dp_rank == rank, stage] *= factor
        backward[workload.dp_rank == rank, stage] *= factor
    forward, backward = (each * rng.normal(1, 0.03, each.shape) for each in (forward, backward))
    # Another program takes the machine now and then.
    backward[rng.random(len(backward)) < 0.05] *= 4
    ranks = plan.parallel.data
    records = []
    for step in range(min(steps, packs.steps)):
        turn = step % ranks
        rows = np.flatnonzero((workload.step == step) & (workload.dp_rank == turn))
        of_ranks = [
            np.flatnonzero((workload.step == step) & (workload.dp_rank == r)) for r in range(ranks)
        ]
        records.append(
            StepRecord(
                step=step, epoch=0, loss=1.0, loss_tokens=1, samples=1, tokens=1, step_ms=10.0,
                learning_rate=0.0, grad_norm=1.0,
                stages=tuple(
                    StageRecord(
                        forward_ms=0, backward_ms=0, wait_ms=0, data_ms=0, peak_gib=0,
                        optimizer_ms=float((once.update_ms + once.exchange_ms)[stage]),
                        ranks_ms=tuple(
                            float((forward + backward)[each, stage].sum()) for each in of_ranks
                        ) if ranks > 1 else (),
                    )
                    for stage in range(len(plan.stages))
                ),
                passes=PassTimes(
                    dp_rank=turn,
                    forward_ms=tuple(map(tuple, forward[rows].T.tolist())),
                    backward_ms=tuple(map(tuple, backward[rows].T.tolist())),
                ),
            )
        )  # fmt: skip
    info = RunInfo(model=plan.model.name, packs_sha256="", plan_sha256=plan_sha256(plan))
    return RunLog(info=info, records=tuple(records))


def true_ms(result: PlanResult, truth: CostModel, job: JobSpec) -> float:
    plan, (packs, lengths) = result.plan, result.data
    workload = job.workload(packs, lengths, plan.pack_levels)
    return float(simulate_levels(truth, plan.stages_at_levels, workload).step_ms.mean())


def opened(result: PlanResult, folder):
    save_plan(result, folder)
    return open_plan(folder)


@pytest.mark.parametrize(
    ("unit", "factor"), [("vision_layer", 1.4), ("language_layer", 1 / 1.4)], ids=["more", "less"]
)
def test_spoiled_costs_recover(tmp_path, unit, factor):
    """Prevents: a run that does not tell what of its plan was mispredicted: a profile that is off
    by 40 % for a kind of layer, against the plan of the right costs."""
    job = deep_job()
    wrong = planned(replace(job, cost_source=spoiled(unit, factor)))
    right = planned(job)
    files = opened(wrong, tmp_path / "plan")
    anew = replan(files, logged(wrong, job.cost, job))
    assert true_ms(wrong, job.cost, job) > 1.05 * true_ms(right, job.cost, job)
    assert true_ms(anew.result, job.cost, job) <= 1.03 * true_ms(right, job.cost, job)
    found = next(one for one in anew.fit.kinds if one.name == unit)
    assert found.factor == pytest.approx(1 / factor, rel=0.05)
    assert anew.plan.data.steps_sha256 == wrong.plan.data.steps_sha256
    save_plan(anew.result, tmp_path / "new")
    assert any("refitted on" in line for line in check_plan(tmp_path / "new"))


def test_a_slow_stage_gets_fewer_layers(tmp_path):
    """Prevents: a slow node that all others wait for, step after step."""
    job = deep_job()
    told = replace(job, cost_source=spoiled("head", 1.0, slowness=(1, 1.5, 1, 1)))
    before, right = planned(job), planned(told)
    files = opened(before, tmp_path / "plan")
    anew = replan(files, logged(before, told.cost, told))
    slowness = [stage.slowness for stage in anew.fit.stages]
    assert slowness == pytest.approx([1, 1.5, 1, 1], rel=0.04)
    gained = 1 - true_ms(anew.result, told.cost, told) / true_ms(before, told.cost, told)
    assert gained > 0.1 and anew.gain == pytest.approx(gained, abs=0.03)
    assert true_ms(anew.result, told.cost, told) <= 1.03 * true_ms(right, told.cost, told)
    again = replan(opened(anew.result, tmp_path / "anew"), logged(anew.result, told.cost, told))
    slowness = [stage.slowness for stage in again.fit.stages]
    assert slowness == pytest.approx([1, 1.5, 1, 1], rel=0.04), "forgotten by the second time"


def test_a_slow_rank_is_named(tmp_path):
    """Prevents: a slow device that is lost in the mean over data-parallel ranks."""
    job = deep_job(2)
    result = planned(job)
    anew = replan(
        opened(result, tmp_path / "plan"), logged(result, job.cost, job, slow={(2, 1): 1.5})
    )
    ranks = [stage.slow_ranks for stage in anew.fit.stages]
    assert [list(each) for each in ranks] == [[], [], [1], []]
    assert anew.fit.stages[2].slowness == pytest.approx(1.5, rel=0.04)
    slow_ranks = ((1.0,) * 4, (1.0, 1.0, 1.5, 1.0))
    refit = Refit(root_sha256="", step=0, pipeline=4, slow_ranks=slow_ranks)
    told = replace(job, cost_source=Refitted(ANALYTIC, refit))
    gained = 1 - true_ms(anew.result, told.cost, told) / true_ms(result, told.cost, told)
    assert gained > 0.05 and anew.gain == pytest.approx(gained, abs=0.03)
    of_stages = planned(replace(job, cost_source=spoiled("head", 1.0, slowness=(1, 1, 1.5, 1))))
    assert true_ms(anew.result, told.cost, told) <= 1.01 * true_ms(of_stages, told.cost, told)


def test_a_slow_rank_gets_fewer_packs(tmp_path):
    """Prevents: ranks that wait for a slow one, step after step."""
    job = job_spec(model=DEEP, parallel=Parallel(pipeline=1, data=2))
    refit = Refit(root_sha256="", step=0, slow_ranks=((1.0,), (1.5,)))
    told = replace(job, cost_source=Refitted(ANALYTIC, refit))
    before = planned(job)
    first = SampleData.of_plan(before.plan, before.data)
    right = make_ordered_plan(PlanRequest(job=told, data=first))
    anew = replan(opened(before, tmp_path / "plan"), logged(before, told.cost, told))
    assert anew.fit.stages[0].slow_ranks == pytest.approx({1: 1.5}, rel=0.04)
    gained = 1 - true_ms(anew.result, told.cost, told) / true_ms(before, told.cost, told)
    assert gained > 0.15 and anew.gain == pytest.approx(gained, abs=0.03)
    assert true_ms(anew.result, told.cost, told) <= 1.02 * true_ms(right, told.cost, told)
    assert anew.plan.data.steps_sha256 == before.plan.data.steps_sha256
    again = replan(opened(anew.result, tmp_path / "anew"), logged(anew.result, told.cost, told))
    assert again.fit.stages[0].slow_ranks == pytest.approx({1: 1.5}, rel=0.04)
    assert true_ms(again.result, told.cost, told) <= 1.02 * true_ms(right, told.cost, told)


def test_a_run_of_another_plan_is_refused(tmp_path):
    """Prevents: costs fitted on passes of other stages."""
    job = deep_job()
    result = planned(job)
    log = logged(result, job.cost, job)
    files = opened(result, tmp_path / "plan")
    with pytest.raises(UserError, match="trained by last, which is the newest in its folder"):
        replan(files, replace(log, info=log.info.model_copy(update={"plan_sha256": "x"})))
    with pytest.raises(UserError, match="passes of 3 steps"):
        replan(files, replace(log, records=log.records[:5]))


def test_fewer_devices_keep_the_steps(tmp_path):
    """Prevents: samples that are lost or doubled when a node is lost."""
    job = deep_job(2)
    result = planned(job)
    anew = replan(opened(result, tmp_path / "plan"), None, gpus=4)
    assert (anew.plan.parallel.pipeline, anew.plan.parallel.data) == (4, 1)
    assert anew.plan.data.steps_sha256 == result.plan.data.steps_sha256
    other = replan(opened(result, tmp_path / "plan"), None, gpus=3)
    assert other.plan.parallel.world_size == 3
    assert other.plan.data.steps_sha256 == result.plan.data.steps_sha256
    with pytest.raises(UserError, match="each must have one: give fewer GPUs"):
        replan(opened(result, tmp_path / "plan"), None, gpus=100_000)
    steps = result.plan.data.steps
    with pytest.raises(UserError, match=f"{steps + 1} steps were given .* the plan has {steps}"):
        replan(opened(result, tmp_path / "plan"), None, gpus=4, after=steps + 1)


def test_devices_and_outputs_that_cannot_be_are_refused(tmp_path, capsys):
    """Prevents: a traceback for more nodes than a job can have."""
    run(PLAN, "-o", tmp_path / "plan")
    capsys.readouterr()
    anew = ("replan", tmp_path / "plan", "-o")
    told = failure(capsys, *anew, tmp_path / "new", "--nodes", MAX_DEVICES)
    assert "a job has 1,000,000 at most: give fewer nodes" in told
    told = failure(capsys, *anew, tmp_path / "plan" / "new", "--gpus", 4)
    assert "which this command reads" in told


def test_devices_without_room_for_a_schedule_go_on_in_another(tmp_path):
    """Prevents: an elastic run that ends, as one device is left and its plan had chunks."""
    result = planned(deep_job(), PipelineSchedule(name="interleaved", chunks=2))
    assert len(result.plan.stages) == 8
    anew = replan(opened(result, tmp_path / "plan"), None, gpus=1)
    assert (anew.plan.schedule.name, len(anew.plan.stages)) == ("1f1b", 1)
    assert anew.plan.data.steps_sha256 == result.plan.data.steps_sha256
