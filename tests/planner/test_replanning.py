"""Re-planning from logs of runs with known true costs."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from cli_cases import PLAN, failure, run
from plan_cases import MODEL, example_lengths, job_spec, origin_of

from omnibal.base.errors import UserError
from omnibal.cost.refitted import Refit, UnitFactors
from omnibal.cost.source import CostSource
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
from omnibal.search.replanning import Replanned, replan

DEEP = MODEL.with_tower("vision", layers=12).with_tower("language", layers=24)
LENGTHS = example_lengths(origin_of(DEEP), count=1500)


def slow_costs(unit: str, factor: float, **of_devices) -> CostSource:
    """Return counted costs with one kind of unit, or devices of stages, slower by a factor."""
    features = ("fixed", "tiles", "tokens", "squared_tokens", "loss_tokens")
    factors = dict.fromkeys(features, factor)
    units = {unit: UnitFactors(forward=factors, backward=factors)}
    refit = Refit(**({"root_sha256": "", "step": 0, "units": units, "pipeline": 4} | of_devices))
    return CostSource(refit=refit)


@cache
def plan_job(job: JobSpec, schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD) -> PlanResult:
    level = Level(caps=Caps.of(tiles=8, tokens=512))
    data = SampleData(lengths=LENGTHS, levels=(level,), packs_per_step=8 * job.parallel.data)
    return make_ordered_plan(PlanRequest(job=job, data=data, schedule=schedule))


@cache
def deep_job(data: int = 1) -> JobSpec:
    return job_spec(model=DEEP, parallel=Parallel(pipeline=4, data=data))


def make_log(result: PlanResult, job: JobSpec, slow: dict | None = None) -> RunLog:
    """Return the log of a run on devices with the job's costs, with 3 % noise per pass.

    Args:
        slow: factors by stage and data-parallel rank.
    """
    plan, (packs, lengths) = result.plan, result.data
    workload = job.workload(packs, lengths, plan.pack_levels)
    times = workload_times(job.cost, plan.stages_at_levels, workload)
    once = per_step_costs(job.cost, plan.stages, plan.schedule)
    once_ms = (once.update_ms + once.exchange_ms).tolist()
    rng = np.random.default_rng(0)
    forward, backward = times.forward_ms.copy(), times.backward_ms.copy()
    for (stage, rank), factor in (slow or {}).items():
        forward[workload.dp_rank == rank, stage] *= factor
        backward[workload.dp_rank == rank, stage] *= factor
    forward, backward = (each * rng.normal(1, 0.03, each.shape) for each in (forward, backward))
    # Another program slows the machine now and then.
    backward[rng.random(len(backward)) < 0.05] *= 4
    ranks, records = plan.parallel.data, []
    zeros = dict.fromkeys(("forward_ms", "backward_ms", "wait_ms", "data_ms", "peak_gib"), 0)
    ones = dict.fromkeys(("loss", "loss_tokens", "samples", "tokens", "step_ms", "grad_norm"), 1)
    for step in range(min(50, packs.steps)):
        in_step = workload.step == step
        rows = [np.flatnonzero(in_step & (workload.dp_rank == rank)) for rank in range(ranks)]
        ranks_ms = np.array([(forward + backward)[each].sum(axis=0) for each in rows]).T.tolist()
        stages = tuple(
            StageRecord(**zeros, optimizer_ms=ms, ranks_ms=tuple(of_ranks) if ranks > 1 else ())
            for ms, of_ranks in zip(once_ms, ranks_ms, strict=True)
        )
        turn = step % ranks
        of_turn = {"forward_ms": forward[rows[turn]].T, "backward_ms": backward[rows[turn]].T}
        passes = {name: tuple(map(tuple, each.tolist())) for name, each in of_turn.items()}
        records.append(
            StepRecord(
                **ones, step=step, epoch=0, learning_rate=0.0, stages=stages,
                passes=PassTimes(dp_rank=turn, **passes),
            )
        )  # fmt: skip
    info = RunInfo(model=plan.model.name, packs_sha256="", plan_sha256=plan_sha256(plan))
    return RunLog(info=info, records=tuple(records))


def true_ms(result: PlanResult, job: JobSpec) -> float:
    plan, (packs, lengths) = result.plan, result.data
    workload = job.workload(packs, lengths, plan.pack_levels)
    return float(simulate_levels(job.cost, plan.stages_at_levels, workload).step_ms.mean())


def reopen(result: PlanResult, folder):
    save_plan(result, folder)
    return open_plan(folder)


def replan_run(folder, result: PlanResult, told: JobSpec, **options) -> Replanned:
    """Replan from a run on devices with the job's costs."""
    return replan(reopen(result, folder), make_log(result, told, **options))


def assert_gained(anew: Replanned, before: PlanResult, told: JobSpec, least: float) -> None:
    """Assert a gain as predicted, and above `least`."""
    gained = 1 - true_ms(anew.result, told) / true_ms(before, told)
    assert gained > least and anew.gain == pytest.approx(gained, abs=0.03)


def assert_nearly(anew: Replanned, right: PlanResult, told: JobSpec, most: float = 1.03) -> None:
    """Assert a step time near the plan made with true costs."""
    assert true_ms(anew.result, told) <= most * true_ms(right, told)


@pytest.mark.parametrize(
    ("unit", "factor"), [("vision_layer", 1.4), ("language_layer", 1 / 1.4)], ids=["more", "less"]
)
def test_spoiled_costs_recover(tmp_path, unit, factor):
    """Prevents a run from keeping a profile that is off by 40 % for a kind of layer."""
    job, right = deep_job(), plan_job(deep_job())
    wrong = plan_job(replace(job, cost_source=slow_costs(unit, factor)))
    anew = replan_run(tmp_path / "plan", wrong, job)
    assert true_ms(wrong, job) > 1.05 * true_ms(right, job)
    assert_nearly(anew, right, job)
    found = next(one for one in anew.fit.kinds if one.name == unit)
    assert found.factor == pytest.approx(1 / factor, rel=0.05)
    assert anew.plan.data.steps_sha256 == wrong.plan.data.steps_sha256
    save_plan(anew.result, tmp_path / "new")
    assert any("refitted on" in line for line in check_plan(tmp_path / "new"))


def test_a_slow_stage_gets_fewer_layers(tmp_path):
    """Prevents a slow node that all other nodes wait for in every step."""
    told = replace(deep_job(), cost_source=slow_costs("head", 1.0, slowness=(1, 1.5, 1, 1)))
    before, right = plan_job(deep_job()), plan_job(told)
    anew = replan_run(tmp_path / "plan", before, told)
    again = replan_run(tmp_path / "anew", anew.result, told)
    for each in (anew, again):  # still known the second time
        slowness = [stage.slowness for stage in each.fit.stages]
        assert slowness == pytest.approx([1, 1.5, 1, 1], rel=0.04)
    assert_gained(anew, before, told, 0.1)
    assert_nearly(anew, right, told)


def test_a_slow_rank_is_named(tmp_path):
    """Prevents a slow device hidden in the mean over data-parallel ranks."""
    job = deep_job(2)
    result = plan_job(job)
    anew = replan_run(tmp_path / "plan", result, job, slow={(2, 1): 1.5})
    ranks = [stage.slow_ranks for stage in anew.fit.stages]
    assert [list(each) for each in ranks] == [[], [], [1], []]
    assert anew.fit.stages[2].slowness == pytest.approx(1.5, rel=0.04)
    slow_ranks = ((1.0,) * 4, (1.0, 1.0, 1.5, 1.0))
    told = replace(job, cost_source=slow_costs("head", 1.0, slow_ranks=slow_ranks))
    assert_gained(anew, result, told, 0.05)
    of_stages = plan_job(replace(job, cost_source=slow_costs("head", 1.0, slowness=(1, 1, 1.5, 1))))
    assert_nearly(anew, of_stages, told, 1.01)


def test_a_slow_rank_gets_fewer_packs(tmp_path):
    """Prevents ranks that wait for a slow rank in every step."""
    job = job_spec(model=DEEP, parallel=Parallel(pipeline=1, data=2))
    slow = slow_costs("head", 1.0, slow_ranks=((1.0,), (1.5,)), pipeline=1)
    told = replace(job, cost_source=slow)
    before = plan_job(job)
    first = SampleData.of_plan(before.plan, before.data)
    right = make_ordered_plan(PlanRequest(job=told, data=first))
    anew = replan_run(tmp_path / "plan", before, told)
    again = replan_run(tmp_path / "anew", anew.result, told)
    for each in (anew, again):
        assert each.fit.stages[0].slow_ranks == pytest.approx({1: 1.5}, rel=0.04)
        assert_nearly(each, right, told, 1.02)
    assert_gained(anew, before, told, 0.15)
    assert anew.plan.data.steps_sha256 == before.plan.data.steps_sha256


def test_a_run_of_another_plan_is_refused(tmp_path):
    """Prevents costs fitted on passes of other stages."""
    job, result = deep_job(), plan_job(deep_job())
    log = make_log(result, job)
    files = reopen(result, tmp_path / "plan")
    with pytest.raises(UserError, match="latest plan, the newest in its folder"):
        replan(files, replace(log, info=log.info.model_copy(update={"plan_sha256": "x"})))
    with pytest.raises(UserError, match="passes of 3 steps"):
        replan(files, replace(log, records=log.records[:5]))


def test_fewer_devices_keep_the_steps(tmp_path):
    """Prevents samples lost or doubled when a node is lost."""
    result = plan_job(deep_job(2))
    files, data = reopen(result, tmp_path / "plan"), result.plan.data
    four, three = (replan(files, None, gpus=gpus).plan for gpus in (4, 3))
    assert (four.parallel.pipeline, four.parallel.data) == (4, 1)
    assert three.parallel.world_size == 3
    assert four.data.steps_sha256 == three.data.steps_sha256 == data.steps_sha256
    with pytest.raises(UserError, match="each must have one: give fewer GPUs"):
        replan(files, None, gpus=100_000)
    steps = data.steps
    with pytest.raises(UserError, match=f"{steps + 1} trained steps exceed the plan's {steps}"):
        replan(files, None, gpus=4, after=steps + 1)


def test_devices_and_outputs_that_cannot_be_are_refused(tmp_path, capsys):
    """Prevents a traceback for more nodes than a job can have."""
    run(PLAN, "-o", tmp_path / "plan")
    capsys.readouterr()
    anew = ("replan", tmp_path / "plan", "-o")
    told = failure(capsys, *anew, tmp_path / "new", "--nodes", MAX_DEVICES)
    assert "above 1,000,000 devices: give fewer" in told
    told = failure(capsys, *anew, tmp_path / "plan" / "new", "--gpus", 4)
    assert "an input of this command" in told


def test_devices_without_room_for_a_schedule_go_on_in_another(tmp_path):
    """Prevents an elastic run that ends because its plan has chunks and one device is left."""
    result = plan_job(deep_job(), PipelineSchedule(name="interleaved", chunks=2))
    assert len(result.plan.stages) == 8
    anew = replan(reopen(result, tmp_path / "plan"), None, gpus=1)
    assert (anew.plan.schedule.name, len(anew.plan.stages)) == ("1f1b", 1)
    assert anew.plan.data.steps_sha256 == result.plan.data.steps_sha256
