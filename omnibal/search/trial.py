"""Trials of a job on existing packs: one packing serves many parallel sizes and step sizes.

Jobs are compared at equal samples per step. If these are not a whole number of micro-batches, time
per sample is interpolated between the plans with the next lower and higher number, because rounding
would give some jobs larger steps with less bubble.
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
"""Min number of steps in the evaluation samples."""
_ESTIMATED_STEPS = 4  # steps to simulate for an estimate
_ESTIMATE_EFFORT = 0.003
"""Effort of the stage search for estimates."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Comparison:
    """Basis for comparing candidates: samples, pack rules and samples per step."""

    job: JobSpec
    lengths: Lengths
    settings: PackSettings = field(default_factory=PackSettings)
    samples_per_step: int
    """Samples per step of all data-parallel ranks."""
    samples: int
    """Random samples to evaluate candidates on. More for large steps, all if fewer."""
    rules: PackRules = ANY_PACKS
    split: SplitRule = JOINT
    """Rules for splitting the model over stages and choosing recomputed layers."""
    all_samples: int = 0
    """Number of samples these were drawn from. 0 if not drawn."""

    def __post_init__(self) -> None:
        model_of_lengths(self.job.model, self.lengths)

    def drawn(self, share: int = 1) -> Self:
        """Draw the evaluation samples, or 1 / `share` of them."""
        wanted = max(self.samples // share, MIN_STEPS * self.samples_per_step)
        lengths = draw_samples(self.lengths, wanted, self.settings.seed)
        return replace(self, lengths=lengths, all_samples=self.all_samples or len(self.lengths))

    def sample_data(self, levels: tuple[Level, ...]) -> SampleData:
        """Data of a trial with packs of these levels. Packs per step are not set yet.

        Full steps and next fit are off: filling the last step is overweighted on few samples, and
        reading order does not change packs.
        """
        return SampleData(
            lengths=self.lengths,
            settings=replace(self.settings, epochs=1, curriculum_steps=0, samples_per_step=None),
            levels=levels,
            packs_per_step=self.job.parallel.data,
            rules=self.rules.model_copy(update={"full_steps": False, "next_fit": False}),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trial:
    job: JobSpec
    data: SampleData
    packed: Sequence[Packs]
    split: SplitRule = JOINT

    def micro_batches(self, samples_per_step: int) -> float:
        """Mean micro-batches per rank and step, not rounded."""
        (packs,), data = self.packed, self.data
        contexts = np.array([level.context for level in data.levels])
        shares = int(contexts[levels_of_packs(packs, data.lengths, data.levels)].sum())
        return micro_batches_at(samples_per_step, len(data.lengths), shares, self.job.parallel.data)

    def step_sizes(self, samples_per_step: int) -> list["StepSize"]:
        """Steps of next lower and higher micro-batches, weighted to `samples_per_step`."""
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
        sizes = zip(whole, requests, samples, weights, strict=False)
        return [
            StepSize(micro_batches=number, request=request, samples=each, steps_per_sample=weight)
            for number, request, each, weight in sizes
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
    """Job on data with given steps: windows of a stream, or an earlier plan."""

    request: PlanRequest

    def micro_batches(self, samples_per_step: int) -> float:
        """Mean micro-batches of the busiest rank per step."""
        packs, _ = self.request.data.schedule(self.request.job)
        most = np.zeros(packs.steps)
        np.maximum.at(most, packs.step, packs.slot + 1)
        return float(most.mean())

    def step_sizes(self, samples_per_step: int) -> list["StepSize"]:
        """Return the given steps, for any samples per step."""
        packs, _ = self.request.data.schedule(self.request.job)
        samples = len(packs.packs.samples) / packs.steps
        whole = max(round(self.micro_batches(samples_per_step)), 1)
        steps = {"samples": samples, "steps_per_sample": 1 / samples}
        return [StepSize(micro_batches=whole, request=self.request, **steps)]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepSize:
    """Trial with a whole number of micro-batches, part of a mix of two sizes."""

    micro_batches: int
    request: PlanRequest
    samples: float
    """Mean samples per step."""
    steps_per_sample: float
    """Steps of this size per sample of the mix. Negative if extrapolated."""


def micro_batches_at(samples_per_step: int, samples: int, packs: int, ranks: int) -> float:
    """Micro-batches per rank in a step of `samples_per_step` samples, not rounded."""
    # Rounded so that equal numbers of ranks and packs give exactly 1.
    return round(min(samples_per_step, samples) * packs / samples / ranks, 9)


def estimated_ms_per_sample(size: StepSize) -> float:
    """Quickly estimate the time per sample, with initial stages on a few steps."""
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
    """Min time per sample of data-parallel encoders: before its first forward, and in total.

    Assumes perfect balance, full passes and hidden communication. 0 if encoders are in the
    pipeline.
    """
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
    ms_per_sample: float
    lost: LostTime
    """Breakdown of the time per sample. Entries add up to `ms_per_sample`."""


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
