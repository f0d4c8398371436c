"""Trials of a job on existing packs: one packing serves many parallel sizes and step sizes.

Jobs are compared at a number of samples per step, which need not make a whole number of
micro-batches. Time per sample is then read off a line, through the plan with the next lower whole
number and the plan with the next higher: rounding would give some jobs larger steps than others,
whose bubble is smaller.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from omnibal.data.lengths import Lengths, draw_samples
from omnibal.data.packing import PackingMethod
from omnibal.data.packs import Packs
from omnibal.job import JobSpec
from omnibal.limits import Caps
from omnibal.pipeline.partition import estimated_step_ms
from omnibal.pipeline.prediction import LostTime
from omnibal.pipeline.stage_memory import GIB
from omnibal.plan import Plan
from omnibal.plan_data import SampleData, model_of_lengths
from omnibal.planner import PlanRequest, make_plan
from omnibal.targets import ANY_PACKS, PackRules

MIN_STEPS = 8
"""Least number of steps that the samples for evaluating candidates make."""
_ESTIMATED_STEPS = 4
_ESTIMATE_EFFORT = 0.003
"""Of the search for stages, where a time is only estimated."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Comparison:
    """Common basis on which candidates are compared: samples, packing rule and samples per step.

    Raises:
        UserError: the lengths were scanned for another model.
    """

    job: JobSpec
    lengths: Lengths
    packing: PackingMethod
    samples_per_step: int
    """Samples per step of all data-parallel ranks, at which candidates are compared."""
    samples: int
    """Samples drawn at random to evaluate candidates on; more for large steps, all if fewer."""
    seed: int
    rules: PackRules = ANY_PACKS
    """What packs may be."""

    def __post_init__(self) -> None:
        model_of_lengths(self.job.model, self.lengths)

    def drawn(self, share: int = 1) -> Self:
        """Draw the samples that candidates are evaluated on, or 1 / `share` of them."""
        wanted = max(self.samples // share, MIN_STEPS * self.samples_per_step)
        return replace(self, lengths=draw_samples(self.lengths, wanted, self.seed))

    def sample_data(self, caps: Caps) -> SampleData:
        """Data of a trial under these caps; the packs per step are not set yet.

        Of few samples, filling the last step would take a share of packs that it does not take of
        all, and the order in which packs are read changes none of them.
        """
        of_trials = {"full_steps": False, "next_fit": False}
        return SampleData(
            lengths=self.lengths,
            caps=caps,
            packing=self.packing,
            packs_per_step=self.job.parallel.data,
            epochs=1,
            seed=self.seed,
            rules=self.rules.model_copy(update=of_trials),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trial:
    """A job on packed samples, before the packs per step are known."""

    job: JobSpec
    data: SampleData
    packed: Sequence[Packs]
    """Packs of every epoch."""

    def at(self, micro_batches: int) -> PlanRequest:
        """Draw steps of `micro_batches` micro-batches per rank."""
        packs_per_step = micro_batches * self.job.parallel.data
        sized = replace(self.data, packs_per_step=packs_per_step, steps=None)
        return PlanRequest(job=self.job, data=sized.drawn(self.job, self.packed))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepSize:
    """A trial with steps of a whole number of micro-batches, as one of two that are mixed."""

    micro_batches: int
    request: PlanRequest
    samples: float
    """Samples of such a step, in the mean."""
    steps_per_sample: float
    """Weight: steps of this size per sample of the mix; negative where the line is extrapolated."""


def micro_batches_at(samples_per_step: int, samples: int, packs: int, ranks: int) -> float:
    """Micro-batches per rank in a step of `samples_per_step` samples; not a whole number."""
    # Rounded, so that as many ranks as packs get exactly one each.
    return round(min(samples_per_step, samples) * packs / samples / ranks, 9)


def step_sizes(trial: Trial, samples_per_step: int, micro_batches: float) -> list[StepSize]:
    """Steps of the whole numbers next to `micro_batches`, mixed to the samples per step; where both
    have equally many samples, those of the nearest."""
    lengths = trial.data.lengths
    wanted = min(samples_per_step, len(lengths))
    whole = sorted({math.floor(micro_batches), math.ceil(micro_batches)})
    requests = [trial.at(number) for number in whole]
    samples = [len(lengths) / _steps_of(request) for request in requests]
    if samples[0] == samples[-1]:
        nearest = whole.index(round(micro_batches))
        whole, requests = [whole[nearest]], [requests[nearest]]
        weights = [1 / samples[0]]
    else:
        more = (wanted - samples[0]) / (samples[-1] - samples[0])
        weights = [(1 - more) / wanted, more / wanted]
    return [
        StepSize(micro_batches=number, request=request, samples=of_step, steps_per_sample=weight)
        for number, request, of_step, weight in zip(whole, requests, samples, weights, strict=False)
    ]


def estimated_ms_per_sample(size: StepSize) -> float:
    """Estimate the time per sample in steps of one size in a fraction of a plan's work, from the
    first stages that are found on a few of them.

    Raises:
        DoesNotFit: no split fits the memory cap on these steps.
    """
    job = size.request.job
    step_ms = estimated_step_ms(
        job.cost,
        job.pipeline_model,
        size.request.workload().some_steps(_ESTIMATED_STEPS),
        job.parallel.pipeline,
        job.memory_cap_gib * GIB,
        rules=job.trainer.stages,
        effort=_ESTIMATE_EFFORT,
    )
    return step_ms / size.samples


def _steps_of(request: PlanRequest) -> int:
    assert request.data.steps is not None
    return int(request.data.steps.step.max()) + 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timed:
    """Predicted time per sample of a trial, and the plan nearest to the requested samples."""

    plan: Plan
    micro_batches: int
    """Micro-batches per rank of the plan."""
    ms_per_sample: float
    lost: LostTime
    """Breakdown of the time per sample; the entries add up to `ms_per_sample`."""


def time_per_sample(
    trial: Trial, samples_per_step: int, micro_batches: float, effort: float = 1.0
) -> Timed:
    """Predict the time per sample at exactly `samples_per_step` samples per step.

    Args:
        effort: of the search for stages, as in `search_stages`.

    Raises:
        UserError: a plan cannot be made, such as for lack of memory.
    """
    plans: dict[int, Plan] = {}
    ms_per_sample = 0.0
    lost = np.zeros(len(LostTime.model_fields))
    for size in step_sizes(trial, samples_per_step, micro_batches):
        plan = plans[size.micro_batches] = make_plan(size.request, effort).plan
        assert plan.prediction is not None
        ms_per_sample += size.steps_per_sample * plan.prediction.step_ms
        lost += size.steps_per_sample * np.array([ms for _, ms in plan.prediction.lost])
    nearest = round(micro_batches)
    return Timed(
        plan=plans[nearest],
        micro_batches=nearest,
        ms_per_sample=ms_per_sample,
        lost=LostTime(**dict(zip(LostTime.model_fields, lost.tolist(), strict=True))),
    )
