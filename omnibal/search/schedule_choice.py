"""Choice of the fastest pipeline schedule under the same memory cap.

The 1F1B plan's encoders, packs and sizes are kept. Its idle time and recomputation bound the gain;
if that is small, no other schedule is tried. Otherwise a quick search ranks schedules, and the
fastest is planned in full.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from omnibal.base.errors import DoesNotFit, UserError
from omnibal.base.worker_pool import map_unordered, usable_cores
from omnibal.job.job import JobSpec
from omnibal.job.planner import (
    DealtPacks,
    PlanRequest,
    PlanResult,
    make_plan,
    order_plan,
    search_chunks,
)
from omnibal.model.limits import words
from omnibal.pipeline.prediction import relative_ms
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.pipeline.workload import Workload

_QUICK_EFFORT = 0.1
"""Effort of the quick search. The fastest schedule is searched again in full."""
MIN_SCHEDULE_GAIN = 0.005
"""Min share of the step time saved over 1F1B, which is simpler for trainers and links."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScheduleChoice:
    """Chosen schedule and the schedules it was compared with."""

    chosen: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD
    steps_ms: Mapping[PipelineSchedule, float] = field(default_factory=dict)
    """Step times, as planned if chosen or 1F1B (scaled by reordering), else of a quick search."""
    idle: Mapping[PipelineSchedule, float] = field(default_factory=dict)
    """Idle share of the step, of 1F1B and the chosen schedule. Empty if 1F1B is chosen."""
    refused: Mapping[PipelineSchedule, str] = field(default_factory=dict)
    """Reason why each impossible schedule cannot run."""

    @property
    def reason(self) -> str:
        """Comparison of step times, or why alternatives cannot run. Empty without alternatives."""
        usual, chosen = ONE_FORWARD_ONE_BACKWARD, self.chosen
        others = {schedule: ms for schedule, ms in self.steps_ms.items() if schedule != chosen}
        if not others:
            return "; ".join(
                f"{_schedule_text(schedule)} cannot be: {why}"
                for schedule, why in self.refused.items()
            )
        if chosen != usual:
            if usual not in others:
                return ""
            faster = 1 - self.steps_ms[chosen] / others[usual]
            verdict = f"{abs(faster):.1%} {'faster' if faster >= 0 else 'slower'}"
            idle = f"{self.idle[chosen]:.1%} of the step is idle in place of {self.idle[usual]:.1%}"
            return f"in {_schedule_text(chosen)} it is {verdict} than in 1f1b: {idle}"
        nearest = min(others, key=lambda schedule: others[schedule])
        slower = others[nearest] / self.steps_ms[chosen] - 1
        return f"in {_schedule_text(nearest)}, the fastest of {len(others)} others, {slower:+.1%}"

    def as_dict(self) -> dict[str, object]:
        return {
            "schedule": {"name": self.chosen.name, "chunks": self.chosen.chunks},
            "schedule_reason": self.reason,
            "schedule_steps_ms": {
                _schedule_text(schedule): ms for schedule, ms in self.steps_ms.items()
            },
        }


def schedules_of(names: Collection[str], job: JobSpec) -> list[PipelineSchedule]:
    """Return schedules of these names, without 1F1B, that fit a job's stages and layers."""
    stages, layers = job.parallel.pipeline, job.pipeline_model.layers
    every = PipelineSchedule.candidates(names)
    return [schedule for schedule in every if 1 < stages and stages * schedule.chunks <= layers]


def obstacle(request: PlanRequest, schedule: PipelineSchedule, micro_batches: int) -> str | None:
    """Return why a job cannot run a schedule of up to `micro_batches` a rank and step, or None."""
    if not request.split.is_joint:
        return "only the joint search cuts a model for it"
    job = request.job
    if job.trainer.name is not None:
        stages = job.parallel.pipeline
        return job.trainer.schedule_obstacle(schedule.name, stages, micro_batches)
    is_shared = any(level.context > 1 for level in request.data.levels)
    if is_shared and not schedule.rule(2, schedule.chunks, 1).is_prefix_closed:
        return "ranks that share packs may have different numbers of them"
    return _obstacle_of_job(job, schedule)


def _obstacle_of_job(job: JobSpec, schedule: PipelineSchedule) -> str | None:
    """Return why a job cannot run a schedule, whatever its data. None if nothing prevents it."""
    if job.trainer.name is not None:
        # Other trainers' ranks have equal numbers of micro-batches, so lockstep is kept.
        return None
    if job.parallel.lockstep_ranks > 1:
        return "ranks that share out experts or divide weights run 1f1b in lockstep"
    return job.split_obstacle(schedule)


def remaining_share(job: JobSpec, names: Collection[str], micro_batches: float) -> float:
    """Return a lower bound on the step time of the best of some schedules, over 1F1B's.

    1F1B of n micro-batches on p equal stages takes n + p - 1 passes. v chunks divide the bubble of
    p - 1 by v (Narayanan et al. 2021, arXiv 2104.04473, section 2.2), backwards in two parts by 3
    (Qi et al. 2023, arXiv 2401.10241, table 1).
    """
    able = [s for s in schedules_of(names, job) if _obstacle_of_job(job, s) is None]
    bubble, passes = job.parallel.pipeline - 1, max(micro_batches, 1.0)
    divisor = max((schedule.chunks * (3 if schedule.in_two else 1) for schedule in able), default=1)
    return (passes + bubble / divisor) / (passes + bubble)


def may_run(job: JobSpec, name: str) -> bool:
    """Whether a job's model, sizes and precision allow a schedule of this name, not 1F1B."""
    return any(_obstacle_of_job(job, schedule) is None for schedule in schedules_of({name}, job))


def check_may_run(jobs: Sequence[JobSpec], name: str) -> None:
    """Raise UserError if no job may run this schedule, before any search."""
    if not any(may_run(job, name) for job in jobs):
        job = max(jobs, key=lambda job: (job.parallel.pipeline, job.pipeline_model.layers))
        whys = (_obstacle_of_job(job, schedule) for schedule in schedules_of({name}, job))
        raise _cannot_be(job, name, [why for why in whys if why])


def _cannot_be(job: JobSpec, name: str, whys: Sequence[str]) -> UserError:
    """Error of a job that cannot run a schedule, with these reasons or for too few layers."""
    few = (
        "it needs 2 pipeline stages at least, with a layer in every chunk, and here are "
        f"{job.parallel.pipeline} with {job.pipeline_model.layers} layers together"
    )
    why = words(list(dict.fromkeys(whys))) if whys else few
    return UserError(f"--schedule {name} cannot be: {why}; give --schedule 1f1b")


def in_best_schedule(
    request: PlanRequest,
    planned: PlanResult,
    names: Collection[str],
    *,
    is_forced: bool,
    is_ordered: bool,
) -> tuple[PlanRequest, PlanResult, ScheduleChoice]:
    """Return request and plan of the fastest of 1F1B and these schedules, and the comparison.

    Args:
        is_forced: whether 1F1B is excluded. Else it is kept unless another is clearly faster.
        is_ordered: whether all plans reorder micro-batches (`order_plan`).

    Raises:
        UserError: if forced and none is possible, or the fastest does not fit.
    """
    usual, search = ONE_FORWARD_ONE_BACKWARD, planned.search
    before = planned.plan.known_prediction
    job, encoders = request.job, planned.plan.data_parallel_encoders
    job = job if encoders is None else replace(job, data_parallel_encoders=encoders)
    free, refused = dict[PipelineSchedule, PlanRequest](), dict[PipelineSchedule, str]()
    for schedule in schedules_of(names, request.job):
        why = obstacle(request, schedule, planned.micro_batches)
        if why is None:
            free[schedule] = replace(request, job=job, schedule=schedule)
        else:
            refused[schedule] = why
    choice = ScheduleChoice(steps_ms={usual: before.step_ms}, refused=refused)
    if is_forced and not free:
        raise _cannot_be(request.job, next(iter(names)), list(refused.values()))
    # Another schedule gains at most the time lost between stages.
    lost = before.lost
    gain_ms = lost.bubble_ms + lost.stage_imbalance_ms + lost.recompute_ms + lost.communication_ms
    is_fast = search is None or gain_ms < MIN_SCHEDULE_GAIN * before.step_ms
    if not is_forced and (not free or is_fast):
        return request, planned, choice
    dealt = planned.dealt or request.data.schedule(request.job)  # the same packs on the same ranks
    # one choice needs no comparison
    quick = {} if is_forced and len(free) == 1 else _quick_steps_ms(free, dealt)
    best = min(quick, key=lambda schedule: quick[schedule]) if quick else next(iter(free))
    if not is_forced and search is not None:
        # Quick searches cover some steps of the run, so scale to the plan.
        scale = before.step_ms / search.step_ms
        quick_ms = {schedule: ms * scale for schedule, ms in quick.items()}
        choice = replace(choice, steps_ms={**choice.steps_ms, **quick_ms})
        if not quick or quick[best] >= search.step_ms:
            return request, planned, choice
    try:
        result = make_plan(free[best], dealt=dealt)
    except DoesNotFit as error:
        if not is_forced:
            return request, planned, choice
        # The job fits in 1F1B, so advice on memory would mislead.
        raise UserError(str(error)) from error
    result = order_plan(free[best], result) if is_ordered else result
    after = result.plan.known_prediction
    choice = replace(choice, steps_ms={**choice.steps_ms, best: after.step_ms})
    if not is_forced and relative_ms(after) >= (1 - MIN_SCHEDULE_GAIN) * relative_ms(before):
        return request, planned, choice
    idle = {usual: before.bubble_fraction, best: after.bubble_fraction}
    return free[best], result, replace(choice, chosen=best, idle=idle)


def in_order(
    request: PlanRequest, result: PlanResult, choice: ScheduleChoice
) -> tuple[PlanResult, ScheduleChoice]:
    """Reorder the chosen plan's micro-batches, and scale other schedules' step times alike."""
    ordered = order_plan(request, result)
    now, dealt = ordered.plan.known_prediction, result.plan.known_prediction
    steps_ms = {
        schedule: ms * now.step_ms / dealt.step_ms for schedule, ms in choice.steps_ms.items()
    }
    idle = choice.idle and {**choice.idle, choice.chosen: now.bubble_fraction}
    return ordered, replace(choice, steps_ms={**steps_ms, choice.chosen: now.step_ms}, idle=idle)


def _quick_steps_ms(
    requests: Mapping[PipelineSchedule, PlanRequest], dealt: DealtPacks
) -> dict[PipelineSchedule, float]:
    """Return step times of the schedules that fit memory, by quick searches in parallel."""
    # Requests differ only in their schedule.
    first = next(iter(requests.values()))
    workload = first.job.workload(*dealt, first.data.levels)
    tasks = [(request, workload) for request in requests.values()]
    found = dict(map_unordered(_quick_step_ms, tasks, min(usable_cores(), len(tasks))))
    return {schedule: ms for schedule in requests if (ms := found[schedule]) is not None}


def _quick_step_ms(task: tuple[PlanRequest, Workload]) -> tuple[PipelineSchedule, float | None]:
    request, workload = task
    try:
        return request.schedule, search_chunks(request, workload, _QUICK_EFFORT).step_ms
    except DoesNotFit:
        return request.schedule, None


def _schedule_text(schedule: PipelineSchedule) -> str:
    chunks = f" of {schedule.chunks} chunks" if schedule.name == "interleaved" else ""
    return f"{schedule.name}{chunks}"
