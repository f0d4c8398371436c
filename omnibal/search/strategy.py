"""Parallel sizes and caps, tried on shared samples: packs, bound, estimate and plan.

Every trial is a picklable task that depends only on the choice and the setting.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self, TypeVar

from omnibal.base.errors import DoesNotFit, UserError
from omnibal.data.lengths import Lengths, draw_samples
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import SampleData, StreamData, limited_features, model_of_lengths
from omnibal.job.planner import PlanRequest
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.levels import Level, largest_caps
from omnibal.model.limits import Caps, in_canonical_order
from omnibal.model.parallel import SIZE_OPTIONS, Parallel, WeightSharding
from omnibal.model.targets import ANY_PACKS, PackRules
from omnibal.packing.pack_settings import PackSettings
from omnibal.packing.packs import Packs
from omnibal.packing.steps import pack_epochs
from omnibal.pipeline.baselines import JOINT, SplitRule
from omnibal.pipeline.bounds import min_step_ms
from omnibal.pipeline.prediction import LostTime, PredictedStep
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD
from omnibal.pipeline.stage_memory import fits_cap
from omnibal.search.engine import try_all
from omnibal.search.memory_need import least_need_gib, least_state_gib
from omnibal.search.schedule_choice import (
    CannotRunSchedule,
    ScheduleChoice,
    able_schedules,
    least_share,
    plan_in_best_schedule,
    schedules_of,
)
from omnibal.search.trial import (
    MIN_STEPS,
    GivenTrial,
    Trial,
    encoders_ms_per_sample,
    estimated_over_bound,
    mean_samples,
    micro_batches_at,
)

_TRIAL_EFFORT = 0.4
"""Effort of the stage search in trials. Less misjudges data-parallel encoders by 5 to 18 %."""
MOST_SCHEDULED = 4
"""Max strategies of one round of trials to plan in other schedules than 1F1B."""
_TRIAL_TYPES = 64  # number of distinct sample sizes when packing for trials


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeSizes:
    """Number of GPUs, and fixed tensor, pipeline, data and expert sizes, None to search."""

    gpus: int
    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    expert: int | None = None
    sequence_parallel: bool | None = None
    """Whether tensor sizes above 1 use sequence parallelism. None for the default, which is yes."""

    @property
    def fixed_sizes(self) -> dict[str, int]:
        """Fixed tensor, pipeline and data sizes, by option. Their product must divide the GPUs."""
        sizes = {"--tp": self.tensor, "--pp": self.pipeline, "--dp": self.data}
        return {name: size for name, size in sizes.items() if size is not None}

    def are(self, parallel: Parallel) -> bool:
        """Whether `parallel` has the fixed sizes."""
        return all(getattr(self, n) in (None, getattr(parallel, n)) for n in SIZE_OPTIONS)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StrategyRequest:
    """A job, the choices that are open, and the training data to compare them on."""

    job: JobSpec
    sizes: FreeSizes
    placements: tuple[EncoderPlacement, ...] = (EncoderPlacement.PIPELINE,)
    """Encoder placements to choose from."""
    shardings: tuple[WeightSharding, ...] = (WeightSharding.REPLICATED,)
    """Weight shardings of the trainer to choose from."""
    layouts: tuple[Parallel, ...] = ()
    """Given layouts, in every sharding to choose from. Empty for all layouts of `sizes`."""
    split: SplitRule = JOINT
    """Rules for splitting the model over stages and choosing recomputed layers."""
    schedules: frozenset[str] = frozenset({ONE_FORWARD_ONE_BACKWARD.name})
    """Names of pipeline schedules to choose from."""
    caps: Caps | None = None
    """Caps of every strategy. None to search for caps."""
    fixed_caps: Mapping[str, int] = field(default_factory=dict)
    """Caps by feature that a search keeps, if `caps` is None."""
    lengths: Lengths
    given: StreamData | SampleData | None = None
    """Data with given steps, which all strategies train. A stream's packs follow the caps."""
    settings: PackSettings = field(default_factory=PackSettings)
    rules: PackRules = ANY_PACKS
    samples_per_step: int  # samples per step of all data-parallel ranks
    samples: int
    """Min number of samples drawn to compare on: more for large steps, all if fewer."""
    all_samples: int = 0
    """Number of samples these were drawn from. 0 if not drawn."""

    def __post_init__(self) -> None:
        model_of_lengths(self.job.model, self.lengths)

    @property
    def limited_features(self) -> list[str]:
        """Features whose sums in a pack are capped, in canonical order."""
        return in_canonical_order({*limited_features(self.job.model), *self.fixed_caps})

    def draw_samples(self) -> Self:
        """Return the request on drawn samples: first windows of a stream, all of given steps."""
        wanted = max(self.samples, MIN_STEPS * self.samples_per_step)
        if self.given is not None:
            given = self.given.subsample(wanted)
            return replace(self, given=given, lengths=given.lengths)
        lengths = draw_samples(self.lengths, wanted, self.settings.seed)
        return replace(self, lengths=lengths, all_samples=self.all_samples or len(self.lengths))

    def sample_data(self, levels: tuple[Level, ...]) -> SampleData:
        """Return data of a trial with packs of these levels. Packs per step are a placeholder.

        Full steps and next fit are off: filling the last step is overweighted on few samples, and
        next fit mostly reorders packs.
        """
        return SampleData(
            lengths=self.lengths,
            settings=replace(self.settings, epochs=1, curriculum_steps=0, samples_per_step=None),
            levels=levels,
            packs_per_step=self.job.parallel.data,
            rules=self.rules.model_copy(update={"full_steps": False, "next_fit": False}),
        )


@dataclass(frozen=True, slots=True)
class Sizing:
    """Parallel sizes, with weight sharding, and encoder placement."""

    parallel: Parallel
    placement: EncoderPlacement = EncoderPlacement.PIPELINE

    @property
    def options(self) -> str:
        """Command line options for these sizes."""
        is_default = self.placement is EncoderPlacement.PIPELINE
        return self.parallel.options + ("" if is_default else f" --encoder {self.placement}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """Parallel sizes and placement, with the best packs tried."""

    parallel: Parallel
    placement: EncoderPlacement = EncoderPlacement.PIPELINE
    levels: tuple[Level, ...]
    micro_batches: int  # micro-batches per rank and step, rounded to the nearest whole number
    samples_per_second: float  # samples per second of all devices
    ms_per_sample: float
    """Time per sample of all devices. Multiply by their number for device time."""
    lost: LostTime
    """Breakdown of the time per sample. Entries add up to `ms_per_sample`."""
    peak_gib: float  # peak memory per device of the fullest stage, at `micro_batches`
    schedule: ScheduleChoice  # fastest schedule of the trial, and its alternatives
    bubble_fraction: float  # idle share of device time, for any cause, at `micro_batches`
    recomputed_layers: int  # recomputed layers of all stages, at `micro_batches`
    why: str  # causes of the slowdown relative to the best strategy

    @property
    def caps(self) -> Caps:
        return largest_caps(self.levels)

    @property
    def sizing(self) -> Sizing:
        return Sizing(self.parallel, self.placement)

    @property
    def choice(self) -> tuple[Sizing, tuple[Level, ...]]:
        """Sizes, placement and levels: unique in a ranking."""
        return self.sizing, self.levels

    def predicted_step(self, samples_per_step: int) -> PredictedStep:
        lost = {name: samples_per_step * ms for name, ms in self.lost}
        return PredictedStep(
            step_ms=samples_per_step * self.ms_per_sample,
            samples_per_second_per_gpu=self.samples_per_second / self.parallel.world_size,
            lost=LostTime(**lost),
        )


Choice = tuple[Sizing, Caps]
Task = TypeVar("Task", bound=Hashable)


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Min memory per device of a choice that does not fit."""

    gib: float
    obstacle: str = ""  # why no schedule can run although the choice may fit in 1F1B

    @classmethod
    def after(cls, error: UserError, gib: float) -> Self:
        """Return the need of a choice that was not planned for this error."""
        return cls(gib=gib, obstacle=str(error) if isinstance(error, CannotRunSchedule) else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Bounds on the time per sample."""

    least_ms: float  # lower bound on the time per sample in the best schedule
    about_ms: float
    """Time per sample in 1F1B if steps and data-parallel encoders reach their bounds."""
    share: float  # lower bound on the time in the best schedule, over that in 1F1B


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Setting:
    """Picklable request, packs and jobs for trials of choices."""

    request: StrategyRequest  # request with the drawn samples
    packs: dict[Caps, Packs]
    jobs: dict[Sizing, JobSpec] = field(default_factory=dict)  # cache of jobs by sizes

    def job(self, sizing: Sizing) -> JobSpec:
        """Return the job with these sizes and placement, cached."""
        if sizing not in self.jobs:
            self.jobs[sizing] = self.request.job.with_sizes(sizing.parallel, sizing.placement)
        return self.jobs[sizing]

    @property
    def in_1f1b(self) -> Self:
        """Return the setting for trials in 1F1B, or in the schedules that were asked for instead.

        A trial in every schedule takes five times as long. `may_gain` says which are worth it.
        """
        usual = self.request.schedules & {ONE_FORWARD_ONE_BACKWARD.name}
        request = replace(self.request, schedules=usual or self.request.schedules)
        return replace(self, request=request)

    @property
    def in_others(self) -> Self:
        """Return the setting for trials in other schedules than 1F1B."""
        others = self.request.schedules - {ONE_FORWARD_ONE_BACKWARD.name}
        return replace(self, request=replace(self.request, schedules=others))

    def share(self, sizing: Sizing, micro_batches: float) -> float:
        """Return a lower bound on the step time in the best schedule, over that in `in_1f1b`."""
        schedules = self.request.schedules
        if ONE_FORWARD_ONE_BACKWARD.name not in schedules:
            return 1.0
        return least_share(self.job(sizing), schedules, micro_batches)

    def micro_batches(self, choice: Choice) -> float:
        """Return mean micro-batches per rank in a step of the requested samples, not rounded."""
        (sizing, caps), request = choice, self.request
        if request.given is not None:
            try:
                return self.trial(choice).micro_batches(request.samples_per_step)
            except UserError:
                return 0.0  # fewer samples than ranks
        packs, samples = len(self.packs[caps]), len(request.lengths)
        return micro_batches_at(request.samples_per_step, samples, packs, sizing.parallel.data)

    def trial(self, choice: Choice) -> Trial | GivenTrial:
        """Return a trial of these sizes on the packs at these caps, or on data with given steps."""
        (sizing, caps), request = choice, self.request
        job = self.job(sizing)
        if request.given is not None:
            given = request.given.for_ranks(request.job, job)
            if isinstance(given, StreamData):
                given = given.with_caps(caps)
            return GivenTrial(given=PlanRequest(job=job, data=given, split=request.split))
        data = request.sample_data((Level(caps=caps),))
        return Trial(job=job, data=data, packed=[self.packs[caps]], split=request.split)

    def trial_of_levels(self, sizing: Sizing, levels: tuple[Level, ...]) -> Trial:
        """Return a trial of these sizes on new packs of these levels."""
        request, job = self.request, self.job(sizing)
        data = request.sample_data(levels)
        return Trial(job=job, data=data, packed=data.pack(job), split=request.split)

    def request_of(self, choice: Choice) -> PlanRequest:
        """Return the choice's job on steps of the requested number of samples."""
        return self.trial(choice).request(self.request.samples_per_step)


def possible_choices(setting: Setting, choices: Sequence[Choice], processes: int) -> list[Choice]:
    """Return choices with a pack per rank in a mean step, or in all samples if layouts are given.

    Packs the samples under new caps, into `setting.packs`, unless data have given steps.
    """
    request, packs = setting.request, setting.packs
    if request.given is None:
        new = list(dict.fromkeys(caps for _, caps in choices if caps not in packs))
        packs.update(try_all(partial(pack_at, setting), new, processes))
        if request.layouts:
            return [
                choice for choice in choices if len(packs[choice[1]]) >= choice[0].parallel.data
            ]
    return [choice for choice in choices if setting.micro_batches(choice) >= 1]


def pack_at(setting: Setting, caps: Caps) -> tuple[Caps, Packs]:
    """Return the caps and packs of the samples under them, for any parallel sizes."""
    data = setting.request.sample_data((Level(caps=caps),))
    (packs,) = pack_epochs(
        data.lengths, data.settings, data.levels, rules=data.rules, max_types=_TRIAL_TYPES
    )
    return caps, packs


def find_bound(setting: Setting, choice: Choice) -> tuple[Choice, Bound | Need]:
    """Return the choice with bounds on its time per sample, or Need if its state does not fit."""
    job, request = setting.job(choice[0]), setting.request
    state_gib = least_state_gib(job)
    if not fits_cap(state_gib, job.memory_cap_gib):
        return choice, Need(gib=state_gib)
    sized = setting.request_of(choice)
    samples = mean_samples(sized)
    # Data-parallel encoders are added below.
    step_ms = min_step_ms(job.split_task(sized.workload(), sized.data.levels))
    # 0 if encoders are in the pipeline.
    before_ms, encoders_ms = encoders_ms_per_sample(job, request.lengths, samples)
    micro_batches, step_ms = setting.micro_batches(choice), step_ms / samples
    return choice, Bound(
        least_ms=least_share(job, request.schedules, micro_batches) * step_ms + before_ms,
        about_ms=step_ms + encoders_ms,
        share=setting.share(choice[0], micro_batches),
    )


def estimated_ms_per_sample(
    setting: Setting, request: PlanRequest, about_ms: float | None = None
) -> float:
    """Return a quick estimate of a trial's time per sample, in 1F1B if that is allowed.

    Args:
        about_ms: as in `Bound`. None to compute it.

    Raises:
        DoesNotFit, CannotRunSchedule: as `estimated_over_bound`.
    """
    job, samples = request.job, mean_samples(request)
    _, encoders_ms = encoders_ms_per_sample(job, setting.request.lengths, samples)
    if about_ms is None:
        step_ms = min_step_ms(job.split_task(request.workload(), request.data.levels))
        about_ms = step_ms / samples + encoders_ms
    schedules = able_schedules(setting.request.schedules, job)
    return estimated_over_bound(request, samples * encoders_ms, schedules) * about_ms


def estimate(
    setting: Setting, bounds: Mapping[Choice, Bound], choice: Choice
) -> tuple[Choice, float | Need]:
    """Return the choice with its time per sample by `estimated_ms_per_sample`, or Need."""
    sized = setting.request_of(choice)
    need_gib = least_need_gib(sized, is_exact=False)
    if not fits_cap(need_gib, sized.job.memory_cap_gib):
        return choice, Need(gib=need_gib)
    try:
        return choice, estimated_ms_per_sample(setting, sized, bounds[choice].about_ms)
    except (DoesNotFit, CannotRunSchedule) as error:
        # The encoder placements of an estimate may leave less memory than every split needs.
        return choice, Need.after(error, need_gib)


def plan_choice(setting: Setting, fits: bool, choice: Choice) -> tuple[Choice, Strategy | Need]:
    """Return the choice with its planned strategy, or Need. `fits` skips a memory check."""
    sizing = choice[0]
    try:
        if not fits:
            need_gib = least_need_gib(setting.request_of(choice), is_exact=False)
            if not fits_cap(need_gib, setting.job(sizing).memory_cap_gib):
                return choice, Need(gib=need_gib)
        return choice, planned_strategy(setting, sizing, setting.trial(choice))
    except (DoesNotFit, CannotRunSchedule) as error:
        need_gib = least_need_gib(setting.request_of(choice), is_exact=False)
        return choice, Need.after(error, need_gib)


def may_gain(
    setting: Setting, planned: Mapping[Task, Strategy], scheduled: Collection[Task] = ()
) -> list[Task]:
    """Return trials in 1F1B that another schedule may make the fastest, the most likely first.

    Args:
        scheduled: tasks that are already planned in all schedules.
    """
    best_ms = min((strategy.ms_per_sample for strategy in planned.values()), default=0.0)
    likely_ms = dict[Task, float]()
    for task, strategy in planned.items():
        share = setting.share(strategy.sizing, strategy.micro_batches)
        if task not in scheduled and share < 1 and share * strategy.ms_per_sample < best_ms:
            likely_ms[task] = share * strategy.ms_per_sample
    return sorted(likely_ms, key=lambda task: likely_ms[task])[:MOST_SCHEDULED]


def planned_strategy(setting: Setting, sizing: Sizing, trial: Trial | GivenTrial) -> Strategy:
    """Plan a trial in its best schedule, and return its time per sample at the requested step."""
    wanted = setting.request.samples_per_step
    request, micro_batches = trial.request(wanted), max(round(trial.micro_batches(wanted)), 1)
    schedules = schedules_of(setting.request.schedules, request.job)
    result, schedule = plan_in_best_schedule(request, schedules, _TRIAL_EFFORT, micro_batches)
    plan, predicted = result.plan, result.plan.known_prediction
    samples = mean_samples(request)
    ms_per_sample = predicted.step_ms / samples
    return Strategy(
        parallel=sizing.parallel,
        placement=sizing.placement,
        levels=plan.pack_levels,
        micro_batches=micro_batches,
        samples_per_second=1e3 / ms_per_sample,
        ms_per_sample=ms_per_sample,
        lost=LostTime(**{name: ms / samples for name, ms in predicted.lost}),
        peak_gib=max(stage.memory.peak_gib for stage in predicted.stages),
        schedule=schedule,
        bubble_fraction=predicted.bubble_fraction,
        recomputed_layers=sum(stage.recomputed_layers for stage in plan.stages_at_levels[-1]),
        why="",
    )
