"""Choice of the fastest pipeline schedule under the same memory cap.

The 1F1B plan's encoders and packs are kept. Its idle time and recomputation bound the gain: others
are planned by the length of their bubbles, while they may be faster than the best.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from omnibal.base.errors import DoesNotFit, UserError
from omnibal.job.job import JobSpec
from omnibal.job.planner import PlanRequest, PlanResult, make_plan
from omnibal.model.limits import words
from omnibal.pipeline.prediction import Prediction
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule

_TRIAL_SHARE = 0.25
"""Effort of searching another schedule than 1F1B in trials, as a share of 1F1B's."""
_LEAST_BUBBLE = 0.5  # min share left of the bubble of equal stages, as stages may be uneven
MIN_SCHEDULE_GAIN = 0.005
"""Min share of the step time saved over 1F1B, which is simpler for trainers and links."""


class CannotRunSchedule(UserError):
    """No schedule that was asked for can run or fits, but 1F1B may fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleChoice:
    """Chosen schedule and the schedules it was compared with."""

    chosen: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD
    steps_ms: Mapping[PipelineSchedule, float] = field(default_factory=dict)
    """Step times, as planned if chosen or 1F1B (scaled by reordering), else of a trial, scaled."""
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

    def with_trial(self, trial: Self, ordered: Prediction) -> Self:
        """Return the comparison with a trial's other schedules, scaled to the plan after ordering.

        Args:
            ordered: prediction of the chosen plan, with its micro-batches reordered.
        """
        planned_ms = self.steps_ms[self.chosen]
        from_trial = planned_ms / trial.steps_ms.get(self.chosen, planned_ms)
        steps_ms = {s: ms * from_trial for s, ms in trial.steps_ms.items()} | dict(self.steps_ms)
        steps_ms = {s: ms * ordered.step_ms / planned_ms for s, ms in steps_ms.items()}
        steps_ms[self.chosen] = ordered.step_ms
        return replace(
            self,
            steps_ms=steps_ms if len(steps_ms) > 1 else {},
            idle=self.idle and {**self.idle, self.chosen: ordered.bubble_fraction},
            refused={**trial.refused, **self.refused},
        )


def schedules_of(names: Collection[str], job: JobSpec) -> list[PipelineSchedule]:
    """Return schedules of these names that fit a job's stages and layers, as 1F1B always does."""
    stages, layers = job.parallel.pipeline, job.pipeline_model.layers
    return [
        schedule
        for schedule in PipelineSchedule.candidates(names)
        if schedule == ONE_FORWARD_ONE_BACKWARD
        or (1 < stages and stages * schedule.chunks <= layers)
    ]


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
    if job.trainer.name is not None or schedule == ONE_FORWARD_ONE_BACKWARD:
        # Other trainers' ranks have equal numbers of micro-batches, so lockstep is kept.
        return None
    if job.parallel.lockstep_ranks > 1:
        return "ranks that share out experts or divide weights run 1f1b in lockstep"
    return job.split_obstacle(schedule)


def able_schedules(names: Collection[str], job: JobSpec) -> list[PipelineSchedule]:
    """Return schedules of these names that a job's model, sizes and precision allow."""
    return [s for s in schedules_of(names, job) if _obstacle_of_job(job, s) is None]


def bubble_divisor(schedule: PipelineSchedule) -> int:
    """Return how many times shorter the bubble of equal stages is than in 1F1B.

    v chunks divide it by v (Narayanan et al. 2021, arXiv 2104.04473, section 2.2), backwards in two
    parts by 3 (Qi et al. 2023, arXiv 2401.10241, table 1).
    """
    return schedule.chunks * (3 if schedule.in_two else 1)


def least_share(job: JobSpec, names: Collection[str], micro_batches: float) -> float:
    """Return a lower bound on the step time in the best of some schedules, over 1F1B's.

    1F1B of n micro-batches on p equal stages takes n + p - 1 passes, a bubble of p - 1.
    """
    bubble, passes = job.parallel.pipeline - 1, max(micro_batches, 1.0)
    divisor = max(map(bubble_divisor, able_schedules(names, job)), default=1)
    return (passes + bubble / divisor) / (passes + bubble)


def check_may_run(jobs: Sequence[JobSpec], names: Collection[str]) -> None:
    """Raise UserError if no job may run a schedule of these names, before any search."""
    if not any(able_schedules(names, job) for job in jobs):
        job = max(jobs, key=lambda job: (job.parallel.pipeline, job.pipeline_model.layers))
        whys = (_obstacle_of_job(job, schedule) for schedule in schedules_of(names, job))
        raise _cannot_be(job, [why for why in whys if why], names)


def _cannot_be(job: JobSpec, whys: Sequence[str], names: Collection[str]) -> CannotRunSchedule:
    """Error of a job that cannot run schedules, with these reasons or for too few layers."""
    few = (
        "it needs 2 pipeline stages at least, with a layer in every chunk, and here are "
        f"{job.parallel.pipeline} with {job.pipeline_model.layers} layers together"
    )
    why = words(list(dict.fromkeys(whys))) if whys else few
    return CannotRunSchedule(
        f"--schedule {words(sorted(names))} cannot be: {why}; give --schedule 1f1b"
    )


def plan_in_best_schedule(
    request: PlanRequest,
    schedules: Sequence[PipelineSchedule],
    effort: float = 1.0,
    micro_batches: int | None = None,
) -> tuple[PlanResult, ScheduleChoice]:
    """Return the plan in the fastest of some schedules, and the comparison.

    1F1B is planned first, for its encoders and dealt packs. It is chosen if it is one of the
    schedules, unless another is clearly faster.

    Args:
        effort: of the 1F1B search, below 1 for a trial.
        micro_batches: of a rank and step in the plan of a trial, whose own steps may differ.

    Raises:
        DoesNotFit: not even 1F1B fits.
        CannotRunSchedule: 1F1B is not one of the schedules, and no other can run or fits.
    """
    usual, planned = ONE_FORWARD_ONE_BACKWARD, make_plan(request, effort)
    others = [schedule for schedule in schedules if schedule != usual]
    is_forced, before = usual not in schedules, planned.plan.known_prediction
    count = micro_batches or planned.micro_batches
    refused = {s: why for s in others if (why := obstacle(request, s, count))}
    # Another schedule gains at most the time lost between stages, except for its own bubble.
    lost = before.lost
    busy_ms = before.step_ms - lost.stage_imbalance_ms - lost.recompute_ms - lost.communication_ms
    job, encoders = request.job, planned.plan.data_parallel_encoders
    job = job if encoders is None else replace(job, data_parallel_encoders=encoders)
    share = 1.0 if effort == 1 else _TRIAL_SHARE
    results, errors = {usual: planned}, list[DoesNotFit]()
    best_ms = math.inf if is_forced else (1 - MIN_SCHEDULE_GAIN) * before.step_ms
    for schedule in sorted(others, key=bubble_divisor, reverse=True):
        least_ms = busy_ms - lost.bubble_ms * (1 - _LEAST_BUBBLE / bubble_divisor(schedule))
        if schedule in refused or least_ms >= best_ms:
            continue
        try:
            asked = replace(request, job=job, schedule=schedule)
            results[schedule] = make_plan(asked, share * effort, dealt=planned.dealt)
            best_ms = min(best_ms, results[schedule].plan.known_prediction.step_ms)
        except DoesNotFit as error:
            errors.append(error)
    steps_ms = {s: result.plan.known_prediction.step_ms for s, result in results.items()}
    choice = ScheduleChoice(steps_ms=steps_ms, refused=refused)
    if len(results) == 1:
        if not is_forced:
            return planned, choice
        if errors:
            # The job fits in 1F1B, so advice on memory would mislead.
            raise CannotRunSchedule(str(errors[0]))
        raise _cannot_be(request.job, list(refused.values()), {s.name for s in others})
    best = min(list(results)[1:], key=lambda schedule: steps_ms[schedule])
    if not is_forced and steps_ms[best] >= (1 - MIN_SCHEDULE_GAIN) * before.step_ms:
        return planned, choice
    result = results[best]
    idle = {usual: before.bubble_fraction, best: result.plan.known_prediction.bubble_fraction}
    return result, replace(choice, chosen=best, idle=idle)


def _schedule_text(schedule: PipelineSchedule) -> str:
    chunks = f" of {schedule.chunks} chunks" if schedule.name == "interleaved" else ""
    return f"{schedule.name}{chunks}"
