"""Goal: job, data and free choices for `omnibal.search.planning.plan`.

Pack limits that are None, and the choices that `free` leaves, are searched for.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol

from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.levels import FillRule
from omnibal.model.limits import Caps, words
from omnibal.model.parallel import WeightSharding
from omnibal.packing.pack_settings import PackSettings
from omnibal.packing.packing import PackingMethod
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.baselines import JOINT, SplitRule
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, ScheduleName
from omnibal.search.conflicts import Feature, check_together
from omnibal.search.level_estimates import ANY_LEVELS, LevelRule
from omnibal.search.strategy import FreeSizes


def _check_minimum(least: int, **counts: int | None) -> None:
    """Raise UserError unless counts are None or integers >= `least`."""
    for name, count in counts.items():
        if count is not None and (not isinstance(count, int) or count < least):
            raise UserError(
                f"{name} {count!r} was given, and must be a whole number from {least} on: give one"
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Samples(PackSettings):
    """Samples of a dataset, shuffled and packed."""

    lengths: Lengths
    caps: Caps | None = None
    """Caps of the longest packs. None to search for them."""
    micro_batches: int | None = None
    """Micro-batches per rank and step, if all were full packs of the longest level. Excludes
    `samples_per_step`; if both are None, a default is chosen."""
    available: tuple[int, ...] = ()
    """Samples available per source of a mixture (`omnibal.data.mixture`), for reporting repeats."""

    def __post_init__(self) -> None:
        steps = {"micro_batches": self.micro_batches, "samples_per_step": self.samples_per_step}
        _check_minimum(1, epochs=self.epochs, portion_samples=self.portion_samples, **steps)
        _check_minimum(0, seed=self.seed, curriculum_steps=self.curriculum_steps)
        for given, kind in ((self.packing, PackingMethod), (self.fill, FillRule)):
            if not isinstance(given, kind):
                raise UserError(
                    f"{given!r} was given for a {kind.__name__}; give one of {list(kind)}"
                )

    @property
    def settings(self) -> PackSettings:
        """Pack settings, without lengths and limits."""
        return PackSettings(
            **{setting.name: getattr(self, setting.name) for setting in fields(PackSettings)}
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stream:
    """Samples trained in order, a window per step."""

    lengths: Lengths
    window: int  # samples per step
    caps: Caps | None = None
    is_dispatched: bool = True  # whether ranks get equal shares of a window
    epochs: int = 1

    def __post_init__(self) -> None:
        _check_minimum(1, window=self.window, epochs=self.epochs)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShapesAlone:
    """Caps of packs, without a dataset."""

    caps: Caps
    micro_batches: int | None = None
    packs_per_step: int | None = None
    """Packs of all ranks per step if sizes are free. None for max(devices, 8)."""

    def __post_init__(self) -> None:
        _check_minimum(1, micro_batches=self.micro_batches, packs_per_step=self.packs_per_step)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Earlier:
    """Data of an earlier plan, step by step."""

    plan: Plan
    data: tuple[ScheduledPacks, Lengths] | None  # None if the plan has none
    directory: Path | None = None  # of the plan; required if its data is in portions


GoalData = Samples | Stream | ShapesAlone | Earlier


@dataclass(frozen=True, kw_only=True, slots=True)
class Free:
    """Free choices in addition to pack limits. Split, recomputation and levels are by default."""

    sizes: FreeSizes | None = None
    """Devices and fixed parallel sizes. None to keep the job's sizes."""
    levels: LevelRule = ANY_LEVELS  # sets of levels to choose from
    placements: tuple[EncoderPlacement, ...] = (EncoderPlacement.PIPELINE,)  # to choose from
    shardings: tuple[WeightSharding, ...] | None = None
    """Weight shardings to choose from, if the trainer supports them. None for the job's."""
    split: SplitRule = JOINT
    schedule: ScheduleName | None = ONE_FORWARD_ONE_BACKWARD.name
    """Pipeline schedule. None for the fastest that the trainer supports."""

    def __post_init__(self) -> None:
        if self.shardings == ():
            raise UserError("shardings are empty; give one at least, or None for the job's own")
        if not self.placements:
            raise UserError("placements are empty; give one of encoders at least to choose from")
        if self.sizes is not None:
            sizes = self.sizes
            _check_minimum(1, gpus=sizes.gpus, expert=sizes.expert, **sizes.fixed_sizes)

    @classmethod
    def everything(cls, gpus: int) -> "Free":
        """Return all choices free but the schedule: sizes, levels, encoder placement, sharding."""
        return cls(
            sizes=FreeSizes(gpus=gpus),
            placements=tuple(EncoderPlacement),
            shardings=tuple(WeightSharding),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Goal:
    """Job, its data, and free choices.

    Raises:
        UserError: features conflict (`omnibal.search.conflicts.CONFLICTS`), or the trainer does not
            support the model, adapters, shardings or schedule.
    """

    job: JobSpec  # job, with its parallel sizes if they are not free
    data: GoalData
    free: Free = field(default_factory=Free)

    def __post_init__(self) -> None:
        check_together({feature: feature.value for feature in self.features})
        if self.free.shardings is not None:
            self.job.trainer.check_shardings(self.free.shardings)
        trainer, schedule = self.job.trainer, self.free.schedule
        obstacle = trainer.model_obstacle(self.job.model)
        if obstacle is not None:
            raise UserError(f"{obstacle}: choose another --model, or leave --for out")
        if self.job.adapters is not None and not trainer.has_adapters:
            raise UserError(
                f"adapters were asked for, and no flags of {trainer.title} are written for them: "
                "leave out --lora-rank, or give another --for"
            )
        if trainer.name is not None and schedule not in (None, *trainer.schedules):
            raise UserError(
                f"--schedule {schedule} was given for {trainer.title}, which runs "
                f"{words(sorted(trainer.schedules))}: give --schedule auto for the fastest of these"
            )

    @property
    def shardings(self) -> tuple[WeightSharding, ...]:
        """Shardings to choose from: supported choices, or if none, all that are supported."""
        asked = self.free.shardings or (self.job.parallel.sharding,)
        has = self.job.trainer.shardings
        return tuple(way for way in asked if way in has) or has

    @property
    def features(self) -> set[Feature]:
        """Features in use that may conflict."""
        data, free = self.data, self.free
        has = {
            Feature.SIZES: free.sizes is not None,
            Feature.LEVELS: free.levels.is_forced,
            Feature.SPLIT: not free.split.is_joint,
            Feature.SCHEDULE: free.schedule not in (None, ONE_FORWARD_ONE_BACKWARD.name),
            Feature.ENCODERS: free.placements == (EncoderPlacement.DATA_PARALLEL,),
            Feature.TRAINER: self.job.trainer.name is not None,
            Feature.WINDOW: isinstance(data, Stream),
            Feature.EARLIER: isinstance(data, Earlier),
        }
        if isinstance(data, Samples):
            has[Feature.MICRO_BATCHES] = data.micro_batches is not None
            has[Feature.SAMPLES_PER_STEP] = data.samples_per_step is not None
            has[Feature.CURRICULUM] = data.curriculum_steps > 0
            has[Feature.MIXTURE] = bool(data.available)
            has[Feature.EPOCHS] = data.epochs > 1
        if isinstance(data, ShapesAlone):
            has[Feature.MICRO_BATCHES] = data.micro_batches is not None
        return {feature for feature, is_there in has.items() if is_there}


class Listener(Protocol):
    """Receiver of notes and progress of a search."""

    def note(self, text: str) -> None:
        """Receive a sentence for the user."""

    def progress(self, title: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """Begin work of `total` parts. Call the context's value with the number newly done."""
        return nullcontext(lambda done: None)

    def status(self, what: str) -> AbstractContextManager[None]:
        """Begin work of unknown length."""
        return nullcontext()


class Silence(Listener):
    """Listener that ignores everything."""

    def note(self, text: str) -> None:
        """Ignore a note."""
