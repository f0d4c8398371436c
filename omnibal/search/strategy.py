"""Parallel sizes at caps, tried on samples that all choices share: packs, bound, estimate and plan.

Every trial is a task that can be sent to another process, and its result depends on the choice and
the setting alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

from omnibal.base.errors import DoesNotFit, UserError
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import SampleData, StreamData
from omnibal.job.planner import PlanRequest
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.levels import Level, largest_caps
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel, WeightSharding
from omnibal.packing.packs import Packs
from omnibal.pipeline.bounds import least_step_ms
from omnibal.pipeline.prediction import LostTime
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, ScheduleName
from omnibal.pipeline.stage_memory import fits_cap
from omnibal.search.engine import try_all
from omnibal.search.feasible import least_state_gib, need_vs_budget_gib
from omnibal.search.trial import (
    MIN_STEPS,
    Comparison,
    GivenTrial,
    StepSize,
    Trial,
    encoders_ms_per_sample,
    estimated_ms_per_sample,
    micro_batches_at,
    time_per_sample,
)
from omnibal.steps.steps import pack_epochs

_TRIAL_EFFORT = 0.1
"""Effort of the search for a strategy's stages; the fastest's are searched for again, in full."""
_TRIAL_TYPES = 64
"""Sizes that samples are told apart by when they are packed for trials."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeSizes:
    """Devices to share out among tensor, pipeline, data and expert parallelism, and what of that
    is fixed; measured costs fix the tensor size."""

    gpus: int
    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    expert: int | None = None
    sequence_parallel: bool | None = None
    """Whether tensor sizes above 1 have sequence parallelism; None where they have."""

    @property
    def given(self) -> dict[str, int]:
        """Sizes that multiply to the devices and are not to be chosen, by their options."""
        sizes = {"--tp": self.tensor, "--pp": self.pipeline, "--dp": self.data}
        return {name: size for name, size in sizes.items() if size is not None}

    def are(self, parallel: Parallel) -> bool:
        """Whether sizes are as given."""
        wanted = (self.tensor, self.pipeline, self.data, self.expert)
        sizes = (parallel.tensor, parallel.pipeline, parallel.data, parallel.expert)
        return all(want in (None, size) for want, size in zip(wanted, sizes, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StrategyRequest(Comparison):
    """Devices to share out, placements of encoders to choose from, and what is trained.

    Every strategy replaces the parallel sizes and the placement of the job.
    """

    sizes: FreeSizes
    placements: tuple[EncoderPlacement, ...] = (EncoderPlacement.PIPELINE,)
    shardings: tuple[WeightSharding, ...] = (WeightSharding.REPLICATED,)
    """Ways to hold weights, which the trainer has."""
    caps: Caps | None = None
    """Caps of every strategy; None to choose them too."""
    given: StreamData | SampleData | None = None
    """Data whose steps are given, which every strategy trains as they are."""
    schedule: ScheduleName = ONE_FORWARD_ONE_BACKWARD.name
    """Schedule that sizes must have room for; they are compared in 1F1B."""

    def drawn(self, share: int = 1) -> Self:
        """Draw samples to evaluate on; of data whose steps are given, all or the first windows."""
        if self.given is None:
            return Comparison.drawn(self, share)
        given = self.given.sampled(max(self.samples, MIN_STEPS * self.samples_per_step))
        return replace(self, given=given, lengths=given.lengths)


@dataclass(frozen=True, slots=True)
class Sizing:
    """Parallel sizes, how many ranks divide weights among them, and where encoders run."""

    parallel: Parallel
    placement: EncoderPlacement = EncoderPlacement.PIPELINE

    @property
    def options(self) -> str:
        """Options of the command line that give these sizes."""
        beside = self.placement is EncoderPlacement.DATA_PARALLEL
        return self.parallel.options + (" --encoder data-parallel" if beside else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """Parallel sizes and a placement with the best of the packs that were tried with them."""

    parallel: Parallel
    placement: EncoderPlacement = EncoderPlacement.PIPELINE
    levels: tuple[Level, ...]
    """Levels of the packs, one at least."""
    micro_batches: int
    """Micro-batches per rank and step: the whole number nearest to the requested samples."""
    samples_per_second: float
    """Samples per second of all devices together."""
    ms_per_sample: float
    """Time per sample of all devices together; times their number, the device time per sample."""
    lost: LostTime
    """Breakdown of the time per sample; the entries add up to `ms_per_sample`."""
    peak_gib: float
    """Peak memory of a device of the fullest stage; this and the next are at `micro_batches`."""
    recomputed_layers: int
    """Recomputed layers of all stages."""
    why: str
    """Reasons why it is slower than the best strategy."""

    @property
    def caps(self) -> Caps:
        """Caps of the longest packs."""
        return largest_caps(self.levels)

    @property
    def sizing(self) -> Sizing:
        """Parallel sizes and placement."""
        return Sizing(self.parallel, self.placement)


Choice = tuple[Sizing, Caps]


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Memory in GiB that a choice needs at least, and does not fit."""

    gib: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """What bounds on steps of whole numbers of micro-batches say of a choice."""

    least_ms: float
    """Lower bound on its time per sample; 0 where none is known."""
    about_ms: float
    """The time per sample if steps took as long as their bounds."""
    of_nearest_ms: float
    """The time per sample so, in steps of the nearest number of micro-batches alone."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Setting:
    """Samples and packs that strategies are tried on; can be sent to another process."""

    request: StrategyRequest
    """Request with the samples that were drawn."""
    packs: dict[Caps, Packs]
    jobs: dict[Sizing, JobSpec] = field(default_factory=dict)
    """Jobs of the sizes that were asked for in this process."""

    def job(self, sizing: Sizing) -> JobSpec:
        """The job with these sizes and placement, made once."""
        if sizing not in self.jobs:
            job = replace(self.request.job, parallel=sizing.parallel, placement=sizing.placement)
            self.jobs[sizing] = job
        return self.jobs[sizing]

    def micro_batches(self, choice: Choice) -> float:
        """Micro-batches per rank in a step of the requested samples; not a whole number."""
        (sizing, caps), request = choice, self.request
        if request.given is not None:
            try:
                return self.trial(choice).micro_batches(request.samples_per_step)
            except UserError:
                return 0.0  # there are fewer samples than ranks
        packs, samples = len(self.packs[caps]), len(request.lengths)
        return micro_batches_at(request.samples_per_step, samples, packs, sizing.parallel.data)

    def trial(self, choice: Choice) -> Trial | GivenTrial:
        """The job with these sizes, on the packs of these caps."""
        (sizing, caps), request = choice, self.request
        job, split = self.job(sizing), request.split
        if request.given is not None:
            given = request.given.for_ranks(request.job, job)
            planned = PlanRequest(
                job=job, data=given, method=split.method, recompute=split.recompute
            )
            return GivenTrial(request=planned)
        data = request.sample_data((Level(caps=caps),))
        return Trial(job=job, data=data, packed=[self.packs[caps]], split=split)

    def trial_of_levels(self, sizing: Sizing, levels: tuple[Level, ...]) -> Trial:
        """The job with these sizes, on packs of these levels, which are made here."""
        request, job = self.request, self.job(sizing)
        data = request.sample_data(levels)
        return Trial(job=job, data=data, packed=data.packed(job), split=request.split)

    def step_sizes(self, choice: Choice) -> list[StepSize]:
        """The steps that are mixed to the requested samples."""
        return self.trial(choice).step_sizes(self.request.samples_per_step)

    def nearest(self, choice: Choice) -> StepSize:
        """The step whose micro-batches are nearest to those of the requested samples."""
        wanted = self.micro_batches(choice)
        return min(self.step_sizes(choice), key=lambda size: abs(size.micro_batches - wanted))


def possible_choices(setting: Setting, choices: Sequence[Choice], processes: int) -> list[Choice]:
    """Choices with a pack for every rank; their packs are made here."""
    if setting.request.given is None:
        caps = list(dict.fromkeys(caps for _, caps in choices if caps not in setting.packs))
        work = partial(pack_at, setting)
        setting.packs.update(try_all(work, caps, processes, lambda done: None))
    return [choice for choice in choices if setting.micro_batches(choice) >= 1]


def pack_at(setting: Setting, caps: Caps) -> tuple[Caps, Packs]:
    """Pack the samples under given caps, which is the same for any parallel sizes."""
    data = setting.request.sample_data((Level(caps=caps),))
    (packs,) = pack_epochs(
        data.lengths, data.settings, data.levels, rules=data.rules, most_types=_TRIAL_TYPES
    )
    return caps, packs


def find_bound(setting: Setting, choice: Choice) -> tuple[Choice, Bound | Need]:
    """Find a bound on a choice's time per sample; its need if the state alone does not fit."""
    job, request = setting.job(choice[0]), setting.request
    state_gib = least_state_gib(job)
    if not fits_cap(state_gib, job.memory_cap_gib):
        return choice, Need(gib=state_gib)
    sizes, wanted = setting.step_sizes(choice), setting.micro_batches(choice)
    # But for data-parallel encoders.
    steps_ms = [
        least_step_ms(
            job.cost_of_all(size.request.data.levels),
            job.pipeline_model,
            size.request.workload(),
            job.parallel.pipeline,
            job.trainer.stages,
        )
        for size in sizes
    ]
    both = list(zip(sizes, steps_ms, strict=True))
    nearest, step_ms = min(both, key=lambda each: abs(each[0].micro_batches - wanted))
    about_ms = sum(size.steps_per_sample * of_size_ms for size, of_size_ms in both)
    before_ms, encoders_ms = encoders_ms_per_sample(job, request.lengths, request.samples_per_step)
    # A term with a negative weight would need an upper bound.
    is_bound = all(size.steps_per_sample >= 0 for size in sizes)
    return choice, Bound(
        least_ms=about_ms + before_ms if is_bound else 0.0,
        about_ms=about_ms + encoders_ms,
        of_nearest_ms=step_ms / nearest.samples + encoders_ms,
    )


def estimate(setting: Setting, choice: Choice) -> tuple[Choice, float | Need]:
    """Estimate a choice's time per sample, in steps of the nearest micro-batches alone."""
    size = setting.nearest(choice)
    need_gib = need_gib_of([size])
    if not fits_cap(need_gib, size.request.job.memory_cap_gib):
        return choice, Need(gib=need_gib)
    try:
        return choice, estimated_ms_per_sample(size)
    except DoesNotFit:
        # Data-parallel encoders leave less room than the least need has.
        return choice, Need(gib=need_gib)


def evaluate(setting: Setting, fits: bool, choice: Choice) -> tuple[Choice, Strategy | Need]:
    """Plan a choice, which `fits` says to fit in steps of the nearest micro-batches."""
    sizing = choice[0]
    try:
        if not fits:
            need_gib = need_gib_of(setting.step_sizes(choice))
            if not fits_cap(need_gib, setting.job(sizing).memory_cap_gib):
                return choice, Need(gib=need_gib)
        return choice, planned_strategy(setting, sizing, setting.trial(choice))
    except DoesNotFit:
        # In steps of one of both sizes.
        return choice, Need(gib=need_gib_of(setting.step_sizes(choice)))


def planned_strategy(setting: Setting, sizing: Sizing, trial: Trial | GivenTrial) -> Strategy:
    """The strategy of a trial."""
    timed = time_per_sample(trial, setting.request.samples_per_step, _TRIAL_EFFORT)
    return Strategy(
        parallel=sizing.parallel,
        placement=sizing.placement,
        levels=timed.plan.pack_levels,
        micro_batches=timed.micro_batches,
        samples_per_second=1e3 / timed.ms_per_sample,
        ms_per_sample=timed.ms_per_sample,
        lost=timed.lost,
        peak_gib=max(stage.memory.peak_gib for stage in timed.plan.predicted.stages),
        recomputed_layers=sum(stage.recomputed_layers for stage in timed.plan.stages_at_levels[-1]),
        why="",
    )


def need_gib_of(sizes: Sequence[StepSize]) -> float:
    """Memory of one device that some split needs at most, or all need at least where none fits, at
    the step size that needs more."""
    return max(
        need_vs_budget_gib(size.request.job, size.request.workload(), size.request.data.levels)
        for size in sizes
    )
