"""Trials of a job on existing packs: one packing serves many parallel sizes and step sizes.

Jobs are compared at a number of samples per step, which need not make a whole number of
micro-batches. Time per sample is then read off a line, through the plan with the next lower whole
number and the plan with the next higher: rounding would give some jobs larger steps than others,
whose bubble is smaller.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from omnibal.cost.encoder_phase import ITEM
from omnibal.data.lengths import Lengths, draw_samples
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan
from omnibal.job.plan_data import SampleData, model_of_lengths
from omnibal.job.planner import PlanRequest, make_plan, placement_problem
from omnibal.model.encoders import squares_of
from omnibal.model.levels import Level
from omnibal.model.targets import ANY_PACKS, PackRules
from omnibal.packing.by_level import levels_of_packs
from omnibal.packing.packs import Packs
from omnibal.pipeline.baselines import JOINT, SplitRule
from omnibal.pipeline.encoder_search import estimated_step_ms_beside
from omnibal.pipeline.partition import estimated_step_ms
from omnibal.pipeline.prediction import LostTime
from omnibal.pipeline.stage_memory import GIB
from omnibal.steps.pack_settings import PackSettings

MIN_STEPS = 8
"""Least number of steps that the samples for evaluating candidates make."""
_ESTIMATED_STEPS = 4  # steps that an estimate looks at
_ESTIMATE_EFFORT = 0.003
"""Effort of the search for stages, where a time is only estimated."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Comparison:
    """Common basis on which candidates are compared: samples, packing rule and samples per step."""

    job: JobSpec
    lengths: Lengths
    settings: PackSettings = field(default_factory=PackSettings)
    samples_per_step: int
    """Samples per step of all data-parallel ranks, at which candidates are compared."""
    samples: int
    """Samples drawn at random to evaluate candidates on; more for large steps, all if fewer."""
    rules: PackRules = ANY_PACKS
    """What packs may be."""
    split: SplitRule = JOINT
    """Rules that split the model over stages and choose the recomputed layers."""
    all_samples: int = 0
    """Samples that these were drawn from; 0 where all are here."""

    def __post_init__(self) -> None:
        model_of_lengths(self.job.model, self.lengths)

    def drawn(self, share: int = 1) -> Self:
        """Draw the samples that candidates are evaluated on, or 1 / `share` of them."""
        wanted = max(self.samples // share, MIN_STEPS * self.samples_per_step)
        lengths = draw_samples(self.lengths, wanted, self.settings.seed)
        return replace(self, lengths=lengths, all_samples=self.all_samples or len(self.lengths))

    def sample_data(self, levels: tuple[Level, ...]) -> SampleData:
        """Data of a trial with packs of these levels; the packs per step are not set yet.

        Of few samples, filling the last step would take a share of packs that it does not take of
        all, and the order in which packs are read changes none of them.
        """
        of_trials = {"full_steps": False, "next_fit": False}
        return SampleData(
            lengths=self.lengths,
            settings=replace(self.settings, epochs=1, curriculum_steps=0),
            levels=levels,
            packs_per_step=self.job.parallel.data,
            rules=self.rules.model_copy(update=of_trials),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trial:
    """A job on packed samples, before the packs per step are known."""

    job: JobSpec
    data: SampleData
    packed: Sequence[Packs]
    """Packs of every epoch."""
    split: SplitRule = JOINT

    def micro_batches(self, samples_per_step: int) -> float:
        """Micro-batches per rank in a step of so many samples; not a whole number."""
        (packs,), data = self.packed, self.data
        contexts = np.array([level.context for level in data.levels])
        shares = int(contexts[levels_of_packs(packs, data.lengths, data.levels)].sum())
        return micro_batches_at(samples_per_step, len(data.lengths), shares, self.job.parallel.data)

    def step_sizes(self, samples_per_step: int) -> list["StepSize"]:
        """Steps of the next whole numbers of micro-batches, mixed to so many samples; where both
        have equally many samples, those of the nearest."""
        micro_batches = max(self.micro_batches(samples_per_step), 1.0)
        samples_of_all = len(self.data.lengths)
        wanted = min(samples_per_step, samples_of_all)
        whole = sorted({math.floor(micro_batches), math.ceil(micro_batches)})
        requests = [self._at(number) for number in whole]
        drawn = [request.data.steps for request in requests]
        samples = [samples_of_all / steps.steps for steps in drawn if steps is not None]
        if samples[0] == samples[-1]:
            nearest = whole.index(round(micro_batches))
            whole, requests = [whole[nearest]], [requests[nearest]]
            weights = [1 / samples[0]]
        else:
            more = (wanted - samples[0]) / (samples[-1] - samples[0])
            weights = [(1 - more) / wanted, more / wanted]
        return [
            StepSize(
                micro_batches=number, request=request, samples=of_step, steps_per_sample=weight
            )
            for number, request, of_step, weight in zip(
                whole, requests, samples, weights, strict=False
            )
        ]

    def _at(self, micro_batches: int) -> PlanRequest:
        """Draw steps of `micro_batches` micro-batches per rank."""
        packs_per_step = micro_batches * self.job.parallel.data
        sized = replace(self.data, packs_per_step=packs_per_step, steps=None)
        return PlanRequest(
            job=self.job,
            data=sized.drawn(self.job, self.packed),
            method=self.split.method,
            recompute=self.split.recompute,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GivenTrial:
    """A job on data whose steps are given: windows of a stream, or the steps of an earlier plan."""

    request: PlanRequest

    def micro_batches(self, samples_per_step: int) -> float:
        """Micro-batches of the busiest rank in a step, in the mean."""
        packs, _ = self.request.data.schedule(self.request.job)
        most = np.zeros(packs.steps)
        np.maximum.at(most, packs.step, packs.slot + 1)
        return float(most.mean())

    def step_sizes(self, samples_per_step: int) -> list["StepSize"]:
        """The steps as they are, whatever number of samples is asked for."""
        packs, _ = self.request.data.schedule(self.request.job)
        samples = len(packs.packs.samples) / packs.steps
        whole = max(round(self.micro_batches(samples_per_step)), 1)
        each = 1 / samples
        return [
            StepSize(
                micro_batches=whole, request=self.request, samples=samples, steps_per_sample=each
            )
        ]


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


def estimated_ms_per_sample(size: StepSize) -> float:
    """Estimate the time per sample in steps of one size in a fraction of a plan's work, from the
    first stages that are found on a few of them."""
    job, levels = size.request.job, size.request.data.levels
    some = size.request.workload().some_steps(_ESTIMATED_STEPS)
    if job.has_data_parallel_encoders:
        problem = placement_problem(job, some, levels)
        return estimated_step_ms_beside(problem, _ESTIMATE_EFFORT) / size.samples
    step_ms = estimated_step_ms(
        job.cost_of_all(levels),
        job.pipeline_model,
        some,
        job.parallel.pipeline,
        job.memory_cap_gib * GIB,
        rules=job.trainer.stages,
        effort=_ESTIMATE_EFFORT,
    )
    return step_ms / size.samples


def encoders_ms_per_sample(
    job: JobSpec, lengths: Lengths, samples_per_step: float
) -> tuple[float, float]:
    """Least time per sample of data-parallel encoders before its first forward, and in all,
    if ranks had equal shares and full passes, and computation hid the exchange of divided weights;
    0 where they are in the pipeline."""
    costs = list(job.encoders_costs.values())
    if not costs:
        return 0.0, 0.0
    before_ms = after_ms = 0.0
    for encoder in costs[0].encoders.values():
        names = [encoder.feature] + [squares_of(encoder.feature)] * encoder.is_of_samples
        items = np.array([lengths.column(name).mean() for name in names])
        before_ms += float(items @ encoder.forward_ms[ITEM:])
        after_ms += float(items @ encoder.backward_ms[ITEM:])
    ranks = job.parallel.world_size
    once_ms = min(cost.gather_ms + cost.reduction_ms for cost in costs) / samples_per_step
    return before_ms / ranks, (before_ms + after_ms) / ranks + once_ms


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timed:
    """Predicted time per sample of a trial, and the plan nearest to the requested samples."""

    plan: Plan
    micro_batches: int
    """Micro-batches per rank of the plan."""
    ms_per_sample: float
    lost: LostTime
    """Breakdown of the time per sample; the entries add up to `ms_per_sample`."""


def time_per_sample(trial: Trial | GivenTrial, samples_per_step: int, effort: float = 1.0) -> Timed:
    """Predict the time per sample at exactly `samples_per_step` samples per step."""
    plans: dict[int, Plan] = {}
    ms_per_sample = 0.0
    lost = np.zeros(len(LostTime.model_fields))
    for size in trial.step_sizes(samples_per_step):
        plan = plans[size.micro_batches] = make_plan(size.request, effort).plan
        ms_per_sample += size.steps_per_sample * plan.predicted.step_ms
        lost += size.steps_per_sample * np.array([ms for _, ms in plan.predicted.lost])
    nearest = max(round(trial.micro_batches(samples_per_step)), 1)
    return Timed(
        plan=plans[nearest],
        micro_batches=nearest,
        ms_per_sample=ms_per_sample,
        lost=LostTime(**dict(zip(LostTime.model_fields, lost.tolist(), strict=True))),
    )
