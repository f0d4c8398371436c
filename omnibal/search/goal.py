"""A goal: what is to be planned, of which some is given and the rest is to be found.

`Goal(job, data, free)` says all that `omnibal.planning.plan` needs to know. What the job and the
data say stays as it is; limits of packs that are None, and all that `free` names, are searched for.
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
from omnibal.packing.packing import PackingMethod
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.baselines import JOINT, SplitRule
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, ScheduleName
from omnibal.search.conflicts import Feature, check_together
from omnibal.search.level_estimates import ANY_LEVELS, LevelRule
from omnibal.search.strategy import FreeSizes
from omnibal.steps.pack_settings import PackSettings


def _check_counts(least: int, **counts: int | None) -> None:
    """Refuse counts that are no whole numbers from the least on; None stands for none given."""
    for name, count in counts.items():
        if count is not None and (not isinstance(count, int) or count < least):
            raise UserError(
                f"{name} {count!r} was given, and must be a whole number from {least} on: give one"
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Samples(PackSettings):
    """A dataset's samples, shuffled and packed."""

    lengths: Lengths
    caps: Caps | None = None
    """Caps of the longest packs; None to search for them."""
    micro_batches: int | None = None
    """Packs of one rank in a step, were all of them full ones of the longest level."""
    samples_per_step: int | None = None
    """Samples of all ranks in a step, in place of micro-batches; None of both for the usual."""
    available: tuple[int, ...] = ()
    """Samples that each source has, where the lengths are a mixture (`omnibal.data.mixture`): the
    plan then says what is seen of each."""

    def __post_init__(self) -> None:
        steps = {"micro_batches": self.micro_batches, "samples_per_step": self.samples_per_step}
        _check_counts(1, epochs=self.epochs, portion_samples=self.portion_samples, **steps)
        _check_counts(0, seed=self.seed, curriculum_steps=self.curriculum_steps)
        for given, kind in ((self.packing, PackingMethod), (self.fill, FillRule)):
            if not isinstance(given, kind):
                raise UserError(
                    f"{given!r} was given for a {kind.__name__}; give one of {list(kind)}"
                )

    @property
    def settings(self) -> PackSettings:
        """The settings of the packs alone."""
        return PackSettings(
            **{each.name: getattr(self, each.name) for each in fields(PackSettings)}
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stream:
    """Samples that are trained in their order, a window of them in a step."""

    lengths: Lengths
    window: int
    caps: Caps | None = None
    is_dispatched: bool = True
    """Whether ranks get equal shares of a window."""
    epochs: int = 1

    def __post_init__(self) -> None:
        _check_counts(1, window=self.window, epochs=self.epochs)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShapesAlone:
    """Packs at the caps, without samples."""

    caps: Caps
    micro_batches: int | None = None
    packs_per_step: int | None = None
    """Packs of all ranks in a step, where sizes are free; a pack a device without."""

    def __post_init__(self) -> None:
        packs = {"micro_batches": self.micro_batches, "packs_per_step": self.packs_per_step}
        _check_counts(1, **packs)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Earlier:
    """The data of an earlier plan, step by step."""

    plan: Plan
    data: tuple[ScheduledPacks, Lengths] | None
    directory: Path | None = None
    """Where the plan is; needed of one whose data is in portions, which are read from there."""


GoalData = Samples | Stream | ShapesAlone | Earlier


@dataclass(frozen=True, kw_only=True, slots=True)
class Free:
    """What is searched for besides limits of packs that are not given.

    Recomputed layers and the split over stages are searched for together unless `split` says how
    they are chosen.
    """

    sizes: FreeSizes | None = None
    """Devices, and which parallel sizes are fixed; None to keep the job's sizes."""
    levels: LevelRule = ANY_LEVELS
    """Sets of levels to choose from."""
    placements: tuple[EncoderPlacement, ...] = (EncoderPlacement.PIPELINE,)
    """Placements of encoders to choose from."""
    shardings: tuple[WeightSharding, ...] | None = None
    """Ways to hold weights to choose from, as far as the trainer has them; None for the job's."""
    split: SplitRule = JOINT
    schedule: ScheduleName | None = ONE_FORWARD_ONE_BACKWARD.name
    """Pipeline schedule; None for the fastest of those that the trainer runs."""

    def __post_init__(self) -> None:
        if self.shardings == ():
            raise UserError("shardings are empty; give one at least, or None for the job's own")
        if not self.placements:
            raise UserError("placements are empty; give one of encoders at least to choose from")
        if self.sizes is not None:
            sizes = self.sizes
            _check_counts(1, gpus=sizes.gpus, expert=sizes.expert, **sizes.given)

    @classmethod
    def everything(cls, gpus: int) -> "Free":
        """All that can be: sizes, levels, placement of encoders and sharding of weights, on so many
        devices."""
        return cls(
            sizes=FreeSizes(gpus=gpus),
            placements=tuple(EncoderPlacement),
            shardings=tuple(WeightSharding),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Goal:
    """A job, its data, and what is free.

    Raises:
        UserError: two features do not go together (`omnibal.search.conflicts.CONFLICTS`), or
            another trainer holds weights in none of the ways or does not run the schedule.
    """

    job: JobSpec
    """The job, with its parallel sizes where they are not free."""
    data: GoalData
    free: Free = field(default_factory=Free)

    def __post_init__(self) -> None:
        check_together({feature: feature.value for feature in self.features})
        if self.free.shardings is not None:
            self.job.trainer.check_shardings(self.free.shardings)
        trainer, schedule = self.job.trainer, self.free.schedule
        if trainer.name is not None and schedule not in (None, *trainer.schedules):
            raise UserError(
                f"--schedule {schedule} was given for {trainer.title}, which runs "
                f"{words(sorted(trainer.schedules))}: give --schedule auto for the fastest of these"
            )

    @property
    def shardings(self) -> tuple[WeightSharding, ...]:
        """Ways to hold weights to choose from, which the trainer has."""
        asked = self.free.shardings or (self.job.parallel.sharding,)
        has = self.job.trainer.shardings
        return tuple(way for way in asked if way in has) or has

    @property
    def features(self) -> set[Feature]:
        """Features that do not go with everything."""
        data, free = self.data, self.free
        has = {
            Feature.SIZES: free.sizes is not None,
            Feature.LEVELS: free.levels.is_forced,
            Feature.SPLIT: not free.split.is_joint,
            Feature.SCHEDULE: free.schedule not in (None, ONE_FORWARD_ONE_BACKWARD.name),
            Feature.BESIDE: free.placements == (EncoderPlacement.DATA_PARALLEL,),
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
    """What is told of a search while it runs."""

    def note(self, text: str) -> None:
        """Take a sentence that the user should read."""

    def progress(self, title: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """Begin work of so many parts; the context is what to call with what is newly done."""
        return nullcontext(lambda done: None)

    def status(self, what: str) -> AbstractContextManager[None]:
        """Begin work whose length is not known."""
        return nullcontext()


class Silence(Listener):
    """A listener that tells nobody."""

    def note(self, text: str) -> None:
        """Drop a note."""
