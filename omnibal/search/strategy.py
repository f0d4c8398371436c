"""Parallel sizes at caps, tried on samples that all choices share: packs, bound, estimate and plan.

Every trial is a task that can be sent to another process, and its result depends on the choice and
the setting alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from omnibal.data.packs import Packs
from omnibal.data.steps import pack_epochs
from omnibal.errors import DoesNotFit
from omnibal.job import JobSpec
from omnibal.limits import Caps
from omnibal.parallel import Parallel
from omnibal.pipeline.bounds import least_step_ms
from omnibal.pipeline.prediction import LostTime
from omnibal.pipeline.stage_memory import fits_cap
from omnibal.search.feasible import least_state_gib, need_beside_cap_gib
from omnibal.search.trial import (
    Comparison,
    StepSize,
    Trial,
    estimated_ms_per_sample,
    micro_batches_at,
    step_sizes,
    time_per_sample,
)

_TRIAL_EFFORT = 0.1
"""Of the search for a strategy's stages; those of the fastest are searched for again, in full."""
_TRIAL_TYPES = 64
"""Sizes that samples are told apart by when they are packed for trials."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StrategyRequest(Comparison):
    """Devices to share out among tensor, pipeline and data parallelism, and what is trained.

    Every strategy replaces the parallel sizes of the job.
    """

    gpus: int
    caps: Caps | None = None
    """Caps of every strategy; None to choose them too."""
    tensor: int | None = None
    """Tensor-parallel size; this and the next three are chosen where None. Measured costs fix
    it."""
    pipeline: int | None = None
    data: int | None = None
    expert: int | None = None

    @property
    def given(self) -> dict[str, int]:
        """Sizes that multiply to the devices and are not to be chosen, by their options."""
        sizes = {"--tp": self.tensor, "--pp": self.pipeline, "--dp": self.data}
        return {name: size for name, size in sizes.items() if size is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """Parallel sizes with the best of the caps that were tried with them."""

    parallel: Parallel
    caps: Caps
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


Choice = tuple[Parallel, Caps]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Setting:
    """Samples and packs that strategies are tried on; can be sent to another process."""

    request: StrategyRequest
    """Request with the samples that were drawn."""
    packs: dict[Caps, Packs]
    jobs: dict[Parallel, JobSpec] = field(default_factory=dict)
    """Jobs of the sizes that were asked for in this process."""

    def job(self, parallel: Parallel) -> JobSpec:
        """The job with these sizes, made once."""
        if parallel not in self.jobs:
            self.jobs[parallel] = self.request.job.sized(parallel)
        return self.jobs[parallel]

    def micro_batches(self, choice: Choice) -> float:
        """Micro-batches per rank in a step of the requested samples; not a whole number."""
        (parallel, caps), request = choice, self.request
        packs, samples = len(self.packs[caps]), len(request.lengths)
        return micro_batches_at(request.samples_per_step, samples, packs, parallel.data)

    def trial(self, choice: Choice) -> Trial:
        """The job with these sizes, on the packs of these caps."""
        parallel, caps = choice
        data = self.request.sample_data(caps)
        return Trial(job=self.job(parallel), data=data, packed=[self.packs[caps]])

    def step_sizes(self, choice: Choice) -> list[StepSize]:
        """The steps that are mixed to the requested samples."""
        wanted = self.request.samples_per_step
        return step_sizes(self.trial(choice), wanted, self.micro_batches(choice))

    def nearest(self, choice: Choice) -> StepSize:
        """The step whose micro-batches are nearest to those of the requested samples."""
        wanted = self.micro_batches(choice)
        return min(self.step_sizes(choice), key=lambda size: abs(size.micro_batches - wanted))


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
    """The same in steps of the nearest number of micro-batches alone."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackSamples:
    """Packing of the samples under given caps."""

    setting: Setting

    def __call__(self, caps: Caps) -> tuple[Caps, Packs]:
        # Packs are the same for any parallel sizes.
        request = self.setting.request
        drawn = request.sample_data(caps).draw_request(request.job)
        (packs,) = pack_epochs(request.lengths, drawn, most_types=_TRIAL_TYPES)
        return caps, packs


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FindBound:
    """Computation of a bound on a choice's time per sample; its need where the state alone does not
    fit."""

    setting: Setting

    def __call__(self, choice: Choice) -> tuple[Choice, Bound | Need]:
        job = self.setting.job(choice[0])
        state_gib = least_state_gib(job)
        if not fits_cap(state_gib, job.memory_cap_gib):
            return choice, Need(gib=state_gib)
        sizes, wanted = self.setting.step_sizes(choice), self.setting.micro_batches(choice)
        stages = job.parallel.pipeline
        steps_ms = [
            least_step_ms(
                job.cost, job.pipeline_model, size.request.workload(), stages, job.trainer.stages
            )
            for size in sizes
        ]
        both = list(zip(sizes, steps_ms, strict=True))
        nearest, step_ms = min(both, key=lambda each: abs(each[0].micro_batches - wanted))
        about_ms = sum(size.steps_per_sample * of_size_ms for size, of_size_ms in both)
        # A term with a negative weight would need an upper bound.
        is_bound = all(size.steps_per_sample >= 0 for size in sizes)
        bound = Bound(
            least_ms=about_ms if is_bound else 0.0,
            about_ms=about_ms,
            of_nearest_ms=step_ms / nearest.samples,
        )
        return choice, bound


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Estimate:
    """Estimate of a choice's time per sample, in steps of the nearest micro-batches alone."""

    setting: Setting

    def __call__(self, choice: Choice) -> tuple[Choice, float | Need]:
        size = self.setting.nearest(choice)
        need_gib = _need_gib([size])
        if not fits_cap(need_gib, size.request.job.memory_cap_gib):
            return choice, Need(gib=need_gib)
        return choice, estimated_ms_per_sample(size)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evaluate:
    """Planning of a choice."""

    setting: Setting
    fits: bool = False
    """Whether choices are known to fit in steps of the nearest micro-batches."""

    def __call__(self, choice: Choice) -> tuple[Choice, Strategy | Need]:
        try:
            return choice, self._planned(choice)
        except DoesNotFit:
            # In steps of one of both sizes.
            return choice, Need(gib=_need_gib(self.setting.step_sizes(choice)))

    def _planned(self, choice: Choice) -> Strategy | Need:
        setting, (parallel, caps) = self.setting, choice
        if not self.fits:
            need_gib = _need_gib(setting.step_sizes(choice))
            if not fits_cap(need_gib, setting.job(parallel).memory_cap_gib):
                return Need(gib=need_gib)
        trial, micro_batches = setting.trial(choice), setting.micro_batches(choice)
        wanted = setting.request.samples_per_step
        timed = time_per_sample(trial, wanted, micro_batches, _TRIAL_EFFORT)
        assert timed.plan.prediction is not None
        return Strategy(
            parallel=parallel,
            caps=caps,
            micro_batches=timed.micro_batches,
            samples_per_second=1e3 / timed.ms_per_sample,
            ms_per_sample=timed.ms_per_sample,
            lost=timed.lost,
            peak_gib=max(stage.memory.peak_gib for stage in timed.plan.prediction.stages),
            recomputed_layers=sum(stage.recomputed_layers for stage in timed.plan.stages),
            why="",
        )


def _need_gib(sizes: Sequence[StepSize]) -> float:
    """Memory of one device that some split needs at most, or all need at least where none fits, at
    the step size that needs more."""
    return max(need_beside_cap_gib(size.request.job, size.request.workload()) for size in sizes)
