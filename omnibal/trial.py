"""A job tried on packs that are there: one packing serves many parallel sizes and step sizes.

Jobs are compared at a number of samples per step, which need not make a whole number of
micro-batches. Time per sample is then read off a line, through the plan with the next lower whole
number and the plan with the next higher: rounding would give some jobs larger steps than others,
whose bubble is smaller.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnibal.config import ModelConfig
from omnibal.cost.model import CostModel, pack_features
from omnibal.data.lengths import Lengths
from omnibal.data.packs import Packs, ScheduledPacks
from omnibal.data.steps import Steps, deal_steps, draw_steps, pack_epochs
from omnibal.parallel import check_parallel
from omnibal.pipeline.prediction import LostTime
from omnibal.pipeline.stage_cost import model_ms
from omnibal.pipeline.workload import Workload
from omnibal.plan import Plan, Shapes
from omnibal.planner import PlanRequest, data_at_caps, job_cost, make_plan, model_of_lengths


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Job:
    """A request with what `make_plan` makes of it before it searches for stages."""

    request: PlanRequest
    packed: Sequence[Packs]
    """Of every epoch; empty where the request has steps, or no lengths."""
    model: ModelConfig
    """With the tiling of the lengths."""
    cost: CostModel

    @classmethod
    def of(cls, request: PlanRequest, packed: Sequence[Packs]) -> "Job":
        """Costs of a request on packs that `packs_of` made of it, or of one of the same packs.

        Raises:
            UserError: the parallel sizes do not fit the model, the lengths were scanned for
                another model, or the profile is of something else.
        """
        check_parallel(request.model, request.parallel, request.cluster)
        model = model_of_lengths(request.model, request.lengths)
        job = model, request.cluster, request.parallel, request.precision
        cost = job_cost(request.profile, *job, request.frozen)
        return cls(request=request, packed=packed, model=model, cost=cost)

    def at(self, micro_batches: int) -> "Job":
        """The job with steps of so many packs per rank, which are drawn here."""
        packs_per_step = micro_batches * self.request.parallel.data
        sized = replace(self.request, packs_per_step=packs_per_step, steps=None)
        assert sized.lengths is not None
        steps = replace(self, request=sized)._steps(sized.lengths)
        return replace(self, request=replace(sized, steps=steps))

    def workload(self) -> Workload:
        """What the pipeline is given.

        Raises:
            UserError: an epoch has fewer packs than ranks.
        """
        dealt, lengths = self._dealt()
        features = pack_features(dealt.packs, lengths)
        return Workload.of(dealt, features, self.request.parallel.data)

    def plan(self) -> Plan:
        """As `make_plan` makes it, with the same exceptions."""
        return make_plan(self.request).plan

    def _dealt(self) -> tuple[ScheduledPacks, Lengths]:
        request, lengths = self.request, self.request.lengths
        ranks = request.parallel.data
        if lengths is None:
            shapes = Shapes(caps=request.caps, micro_batches_per_step=request.micro_batches)
            return data_at_caps(shapes, ranks)
        return deal_steps(
            self._steps(lengths), lengths, lambda packs: self._load_ms(packs, lengths), ranks
        ), lengths

    def _steps(self, lengths: Lengths) -> Steps:
        if self.request.steps is not None:
            return self.request.steps
        return draw_steps(
            lengths,
            self.request.data_request,
            lambda packs: self._load_ms(packs, lengths),
            self.packed,
        )

    def _load_ms(self, packs: Packs, lengths: Lengths) -> np.ndarray:
        return model_ms(self.cost, self.model, pack_features(packs, lengths))


def packs_of(request: PlanRequest) -> list[Packs]:
    """Packs of every epoch; none where steps are given or made up."""
    if request.lengths is None or request.steps is not None:
        return []
    return pack_epochs(request.lengths, request.data_request)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepSize:
    """A job with steps of a whole number of micro-batches, as one of two that are mixed."""

    micro_batches: int
    job: Job
    steps_per_sample: float
    """Its steps in the mix, over all samples; below 0 where the line goes on beyond both."""


def micro_batches_at(samples_per_step: int, samples: int, packs: int, ranks: int) -> float:
    """Packs of a rank in a step of so many samples."""
    # So many ranks as packs have one each, whatever the division makes of it.
    return round(min(samples_per_step, samples) * packs / samples / ranks, 9)


def step_sizes(job: Job, samples_per_step: int, micro_batches: float) -> list[StepSize]:
    """The whole numbers next to a number of micro-batches, mixed to the samples per step."""
    lengths = job.request.lengths
    assert lengths is not None
    wanted = min(samples_per_step, len(lengths))
    whole = sorted({math.floor(micro_batches), math.ceil(micro_batches)})
    jobs = [job.at(number) for number in whole]
    samples = [len(lengths) / _steps_of(sized) for sized in jobs]
    if samples[0] == samples[-1]:
        weights = [1 / samples[0], 0.0]
    else:
        more = (wanted - samples[0]) / (samples[-1] - samples[0])
        weights = [(1 - more) / wanted, more / wanted]
    return [
        StepSize(micro_batches=number, job=sized, steps_per_sample=weight)
        for number, sized, weight in zip(whole, jobs, weights, strict=False)
    ]


def _steps_of(job: Job) -> int:
    assert job.request.steps is not None
    return int(job.request.steps.step.max()) + 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timed:
    """A job's predicted time per sample, and the plan that comes nearest to the samples wanted."""

    plan: Plan
    micro_batches: int
    """Of that plan."""
    ms_per_sample: float
    lost: LostTime
    """Of a sample: it all adds up to `ms_per_sample`."""


def time_per_sample(job: Job, samples_per_step: int, micro_batches: float) -> Timed:
    """Predicted at exactly so many samples per step.

    Raises:
        UserError: a plan cannot be made, such as for lack of memory.
    """
    plans: dict[int, Plan] = {}
    ms_per_sample = 0.0
    lost = np.zeros(len(LostTime.model_fields))
    for size in step_sizes(job, samples_per_step, micro_batches):
        plan = plans[size.micro_batches] = size.job.plan()
        assert plan.prediction is not None
        ms_per_sample += size.steps_per_sample * plan.prediction.step_ms
        lost += size.steps_per_sample * np.array([*plan.prediction.lost.model_dump().values()])
    nearest = round(micro_batches)
    return Timed(
        plan=plans[nearest],
        micro_batches=nearest,
        ms_per_sample=ms_per_sample,
        lost=LostTime(**dict(zip(LostTime.model_fields, lost.tolist(), strict=True))),
    )
