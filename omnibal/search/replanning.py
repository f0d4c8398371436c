"""Replanning from a run: fit costs on its measurements and plan the rest.

Steps keep their samples, so checkpoints stay valid. Stages, recomputed layers, ranks and slots are
searched again, and parallel sizes too if the number of devices changes.
"""

from dataclasses import dataclass, replace

from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan
from omnibal.job.plan_files import PlanFiles
from omnibal.job.plan_portions import EarlierPortions, join_portions
from omnibal.job.planner import PlanResult, extend_to_portions, predict_plan
from omnibal.job.refit import RunFit, earlier_refit, fit_run, select_records, with_refit
from omnibal.job.runlog import RunLog
from omnibal.model.parallel import Parallel
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, ScheduleName
from omnibal.search.goal import Earlier, Free, Goal, Listener
from omnibal.search.planning import plan as plan_goal
from omnibal.search.strategy import FreeSizes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Replanned:
    result: PlanResult
    fit: RunFit | None  # costs fitted on the run, or None without a run
    before_ms: float | None  # earlier plan's step by fitted costs, None if the devices changed

    @property
    def plan(self) -> Plan:
        return self.result.plan

    @property
    def step_ms(self) -> float:
        return _step_ms(self.result)

    @property
    def gain(self) -> float:
        """Saved share of the step time, by the fitted costs. 0 if the devices changed."""
        return 0.0 if not self.before_ms else 1 - self.step_ms / self.before_ms


def replan(
    files: PlanFiles,
    run: RunLog | None,
    gpus: int | None = None,
    after: int | None = None,
    listener: Listener | None = None,
) -> Replanned:
    """Return the fastest plan for the rest of a run. UserError if the plan cannot be of a run.

    Args:
        run: log to fit costs on, or None to keep the costs.
        gpus: devices of the new plan, or None to keep their number.
        after: trained steps, by default the log's, or 0 without a run.
    """
    plan, job = files.plan, files.job
    if plan.data is None or plan.made_for is not None:
        raise UserError("a plan of shapes or of another trainer has no run: give a run's plan")
    if after is not None and after > plan.data.steps:
        raise UserError(f"{after} trained steps exceed the plan's {plan.data.steps}: give fewer")
    fit = None if run is None else _fit_costs(files, run, after)
    refit = earlier_refit(plan, job, after or 0) if fit is None else fit.refit
    job = with_refit(job, refit)
    if gpus not in (None, plan.parallel.world_size):
        assert gpus is not None
        result = _plan_other_sizes(files, job, gpus, listener)
        return Replanned(result=result, fit=fit, before_ms=None)
    # The earlier plan keeps its portions on disk as they are.
    before, directory = _predict_result(plan, job, files.steps), files.directory
    if plan.data.portions and directory is not None:
        portions = EarlierPortions(data=plan.data, directory=directory, are_kept=True)
        before = extend_to_portions(before, portions, plan.data.runs_of_first)
    results = [plan_goal(_replan_goal(files, job), listener).result, before]
    if job.cost.slow_ranks and plan.parallel.pipeline > 1 and not plan.data.portions:
        # Plan fewer layers for stages with a slow rank, instead of fewer packs for the rank.
        as_stages = with_refit(job, refit.with_slow_stages())
        result = plan_goal(_replan_goal(files, as_stages), listener).result
        assert result.data is not None, "the plan has data"
        results.append(_predict_result(result.plan, job, result.data))
    # The earlier plan is a candidate too, so replanning never predicts a slower step.
    return Replanned(result=min(results, key=_step_ms), fit=fit, before_ms=_step_ms(before))


def _step_ms(result: PlanResult) -> float:
    return result.plan.known_prediction.step_ms


def _fit_costs(files: PlanFiles, run: RunLog, after: int | None) -> RunFit:
    plan, data, directory = files.plan, files.plan.data, files.directory
    records = select_records(plan, run.info, run.records)
    packs, lengths = files.steps
    if data is not None and data.portions and directory is not None:
        packs, lengths = join_portions(data, directory, [record.step for record in records])
    workload = files.job.workload(packs, lengths, plan.pack_levels)
    step = run.records[-1].step + 1 if after is None else after
    return fit_run(plan, files.job, workload, records, step)


def _predict_result(plan: Plan, job: JobSpec, data: tuple[ScheduledPacks, Lengths]) -> PlanResult:
    """Return a plan of these packs and lengths, predicted with the job's costs."""
    packs, lengths = data
    workload = job.workload(packs, lengths, plan.pack_levels)
    prediction = predict_plan(plan, job, packs, workload)
    return PlanResult(
        plan=plan.model_copy(update={"prediction": prediction}),
        data=data,
        search=None,
        cost_source=job.cost_source,
    )


def _replan_goal(
    files: PlanFiles,
    job: JobSpec,
    sizes: FreeSizes | None = None,
    schedule: ScheduleName | None = None,
) -> Goal:
    """Return the goal to plan the same steps with the same placement and, by default, schedule."""
    plan = files.plan
    data = Earlier(plan=plan, data=files.data, directory=files.directory)
    schedule = schedule or plan.schedule.name
    free = Free(sizes=sizes, placements=(job.placement,), schedule=schedule)
    # Data-parallel encoders are searched together with the stages.
    return Goal(job=replace(job, data_parallel_encoders=None), data=data, free=free)


def _plan_other_sizes(
    files: PlanFiles, job: JobSpec, gpus: int, listener: Listener | None
) -> PlanResult:
    """Return a plan for other devices: other data-parallel size if possible, else all sizes."""
    parallel = _resize_data(files.plan.parallel, gpus)
    if parallel is not None and job.allows(parallel):
        try:
            return plan_goal(_replan_goal(files, job.with_sizes(parallel)), listener).result
        except UserError:
            pass  # the search over all sizes reports its own error
    sizes, usual = FreeSizes(gpus=gpus), ONE_FORWARD_ONE_BACKWARD.name
    try:
        return plan_goal(_replan_goal(files, job, sizes), listener).result
    except UserError:
        if files.plan.schedule.name == usual:
            raise
    # With few devices the schedule's chunks may not fit. A run can resume with any schedule.
    return plan_goal(_replan_goal(files, job, sizes, usual), listener).result


def _resize_data(parallel: Parallel, gpus: int) -> Parallel | None:
    """Return sizes that use all devices by another data-parallel size, or None if impossible."""
    data, remainder = divmod(gpus, parallel.tensor * parallel.pipeline)
    if remainder or not data:
        return None
    is_full = parallel.sharded == parallel.data
    sharded = data if parallel.sharded > 1 and is_full else min(parallel.sharded, data)
    if data % sharded or parallel.tensor * data % parallel.expert:
        return None
    return parallel.model_copy(update={"data": data, "sharded": sharded})
