"""Trials of a job on existing packs: one packing serves many parallel sizes and step sizes.

Jobs are compared at equal mean samples per step, because rounding to whole micro-batches would give
some jobs larger steps with less bubble.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from omnibal.base.errors import DoesNotFit
from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import SampleData
from omnibal.job.planner import PlanRequest, placement_problem, search_in_schedule
from omnibal.model.encoders import squares_of
from omnibal.packing.by_level import levels_of_packs
from omnibal.packing.packs import Packs
from omnibal.pipeline.baselines import JOINT, SplitRule
from omnibal.pipeline.bounds import min_step_ms
from omnibal.pipeline.encoder_search import estimate_placement
from omnibal.pipeline.partition import estimated_step_ms
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.search.schedule_choice import CannotRunSchedule, bubble_divisor

MIN_STEPS = 8  # min number of steps in the evaluation samples
_ESTIMATED_STEPS = 4  # steps to simulate for an estimate
_ESTIMATE_EFFORT = 0.003  # effort of the stage search for estimates


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trial:
    """Job on packs that exist, dealt into steps of any number of samples."""

    job: JobSpec
    data: SampleData
    packed: Sequence[Packs]  # of the only epoch
    split: SplitRule = JOINT

    def micro_batches(self, samples_per_step: int) -> float:
        """Mean micro-batches per rank and step, not rounded."""
        (packs,), data = self.packed, self.data
        contexts = np.array([level.context for level in data.levels])  # ranks per pack, [levels]
        shares = int(contexts[levels_of_packs(packs, data.lengths, data.levels)].sum())
        return micro_batches_at(samples_per_step, len(data.lengths), shares, self.job.parallel.data)

    def request(self, samples_per_step: int) -> PlanRequest:
        """Return a request with steps of `samples_per_step` samples in the mean."""
        ranks = self.job.parallel.data
        packs_per_step = ranks * max(round(self.micro_batches(samples_per_step)), 1)
        settings = replace(self.data.settings, samples_per_step=samples_per_step)
        sized = replace(self.data, settings=settings, packs_per_step=packs_per_step, steps=None)
        return PlanRequest(
            job=self.job, data=sized.with_steps(self.job, self.packed), split=self.split
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GivenTrial:
    """Job on data with given steps: windows of a stream, or an earlier plan."""

    given: PlanRequest

    def request(self, samples_per_step: int) -> PlanRequest:
        """Return the given request, whatever `samples_per_step`."""
        return self.given

    def micro_batches(self, samples_per_step: int) -> float:
        """Mean micro-batches of the busiest rank per step."""
        packs, _ = self.given.data.schedule(self.given.job)
        most = np.zeros(packs.steps)
        np.maximum.at(most, packs.step, packs.slot + 1)  # slots count from 0, [steps]
        return float(most.mean())


def mean_samples(request: PlanRequest) -> float:
    """Mean samples per step of a request with steps."""
    steps = request.data.steps or request.data.schedule(request.job)[0]
    return len(steps.packs.samples) / steps.steps


def micro_batches_at(samples_per_step: int, samples: int, packs: int, ranks: int) -> float:
    """Micro-batches per rank and step, if `samples` fill `packs`, each counted once per rank."""
    # Rounded so that equal numbers of ranks and packs give exactly 1.
    return round(min(samples_per_step, samples) * packs / samples / ranks, 9)


def estimated_over_bound(
    request: PlanRequest, encoders_ms: float, schedules: Sequence[PipelineSchedule]
) -> float:
    """Return a quick estimate of the step time over its lower bound in 1F1B, from a few steps.

    Args:
        encoders_ms: lower bound on the time of data-parallel encoders per step.
        schedules: possible schedules. The step is in 1F1B if that is one, else in the schedule of
            the shortest bubble that fits.

    Raises:
        DoesNotFit: no split fits in 1F1B.
        CannotRunSchedule: 1F1B is not one of the schedules, and none of them fits.
    """
    job, levels = request.job, request.data.levels
    some = request.workload().some_steps(_ESTIMATED_STEPS)  # the ratio hardly depends on the steps
    task = job.split_task(some, levels)
    least_ms = min_step_ms(task) + encoders_ms
    if job.has_data_parallel_encoders:
        problem = placement_problem(job, some, levels)
        encoders, step_ms = estimate_placement(problem, _ESTIMATE_EFFORT)
        job, some = replace(job, data_parallel_encoders=encoders), problem.with_encoders(encoders)
    else:
        step_ms = estimated_step_ms(task, _ESTIMATE_EFFORT)
    if ONE_FORWARD_ONE_BACKWARD in schedules:
        return step_ms / least_ms
    for schedule in sorted(schedules, key=bubble_divisor, reverse=True):
        with suppress(DoesNotFit):
            *_, found = search_in_schedule(job, some, levels, schedule, _ESTIMATE_EFFORT)
            return found.step_ms / least_ms
    raise CannotRunSchedule(f"--schedule {schedules[0].name} fits no cut; give --schedule 1f1b")


def encoders_ms_per_sample(
    job: JobSpec, lengths: Lengths, samples_per_step: float
) -> tuple[float, float]:
    """Min milliseconds per sample of data-parallel encoders: of forwards, and in total.

    Assumes perfect balance, full passes and hidden feature exchange. 0 if encoders are in stages.
    """
    costs = list(job.encoders_costs.values())
    if not costs:
        return 0.0, 0.0
    before_ms = after_ms = 0.0
    for encoder in costs[0].encoders.values():
        names = [encoder.feature] + [squares_of(encoder.feature)] * encoder.is_of_samples
        items = np.array([lengths.column(name).mean() for name in names])
        forward_ms, backward_ms = encoder.items_ms(items)
        before_ms, after_ms = before_ms + forward_ms, after_ms + backward_ms
    ranks = job.parallel.world_size  # encoders run on every rank
    once_ms = min(cost.gather_ms + cost.reduction_ms for cost in costs) / samples_per_step
    return before_ms / ranks, (before_ms + after_ms) / ranks + once_ms
