"""The plan, searched or hand-written, as read by training: `plan.json`."""

import hashlib
import json
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from omnibal.base.files import read_json_model, write_json_model
from omnibal.base.frozen import Count, Frozen, written_unless
from omnibal.data.lengths import LengthsOrigin
from omnibal.model.adapter_settings import AdapterConfig, adapter_mistake, trained_kinds
from omnibal.model.config import ClusterConfig, ModelConfig, Precision
from omnibal.model.data_parallel_encoders import DataParallelEncoders, takes_whole_samples
from omnibal.model.fp8 import FP8_MULTIPLE
from omnibal.model.levels import MAX_LEVELS, Level, largest_caps
from omnibal.model.limits import Caps, words
from omnibal.model.parallel import Parallel
from omnibal.model.targets import TargetName
from omnibal.model.units import LANGUAGE, deepstack_of, frozen_mistake, unit_kinds
from omnibal.pipeline.prediction import Prediction
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.pipeline.stage_units import SpanText, Stage
from omnibal.pipeline.unit_runs import stage_units

SCHEMA_VERSION: Final = 3
PLAN_FILE = "plan.json"
PACKS_FILE = "packs.parquet"
LENGTHS_FILE = "lengths.parquet"
PORTIONS_FOLDER = "portions"  # with one subfolder of lengths and packs per portion
PROFILE_FILE = "profile.json"  # measured costs; absent if costs were counted
REFIT_FILE = "refit.json"  # correction of the costs by a run, if any
PLAN_FILES = PLAN_FILE, PACKS_FILE, LENGTHS_FILE, PROFILE_FILE, REFIT_FILE
MAX_EPOCHS = 1_000  # as all are packed before training
MAX_SEED = 2**63 - 1  # of an int64 column

PackedBy = Literal["balanced", "isf", "next_fit", "other"]
"""Packing rule of `omnibal plan`, or "other"; next_fit is for streams and trainers that pack."""


class Shapes(Frozen):
    """Size and number of the micro-batches of a step."""

    caps: Caps
    micro_batches_per_step: Count  # max per data-parallel rank in a full step; one step may differ
    image_tokens: Count | None = written_unless(None)
    """Tokens per image of shapes at native resolution, or None if each pack is one image."""


class SourceSeen(Frozen):
    """Samples of one source of a mixture, and how often the run trains them."""

    name: str
    samples: NonNegativeInt
    seen: tuple[NonNegativeInt, ...]  # samples trained up to each step of `by_step`, with repeats


class MixtureSeen(Frozen):
    """Samples seen per source in the course of the run."""

    by_step: tuple[Count, ...]  # step counts from the start of the run, ending with the total
    sources: tuple[SourceSeen, ...]

    def sentences(self) -> list[str]:
        """Return a sentence per step of `by_step`: samples and epochs seen of every source."""
        return [
            f"by step {step:,}: "
            + ", ".join(
                f"{source.name} {source.seen[place]:,} samples "
                f"({source.seen[place] / source.samples:.2f} epochs)"
                for source in self.sources
                if source.samples
            )
            for place, step in enumerate(self.by_step)
        ]


class DataPortion(Frozen):
    """Counts and content hashes of a portion of the samples in one epoch."""

    samples: Count
    left_out: NonNegativeInt = written_unless(0)
    packs: Count
    steps: Count
    lengths_sha256: str
    packs_sha256: str
    steps_sha256: str


class DataPlan(Shapes):
    """How data are packed into steps, with hashes by which training refuses other data."""

    method: PackedBy
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)]
    epochs: Annotated[int, Field(ge=1, le=MAX_EPOCHS)]
    packs_per_step: Count  # over all ranks, shared packs counted per rank; one step may differ
    samples_per_step: Count | None = written_unless(None)
    """Mean, with packs and micro-batches per step as maxima; None if steps have equal packs."""
    samples: Count
    left_out: NonNegativeInt = written_unless(0)
    """Samples of all epochs in no pack, as the target trainer runs only full steps."""
    packs: Count
    steps: Count
    curriculum_steps: NonNegativeInt = written_unless(0)  # first steps with the shortest level only
    window: Count | None = written_unless(None)
    """Consecutive samples per step of a stream, likewise with maxima, or None."""
    portions: tuple[DataPortion, ...] = written_unless(())
    """Portions packed and trained in turn, each with files, or empty if all are packed together."""
    fewest_packs: Count | None = written_unless(None)  # lower bound per epoch, None if not proven
    mixture: MixtureSeen | None = written_unless(None)  # samples per source of a mixture
    lengths_sha256: str
    packs_sha256: str
    steps_sha256: str
    """SHA-256 of every step's samples, for any ranks. Plans with equal hashes can resume runs."""
    origin: LengthsOrigin | None

    @property
    def portions_per_epoch(self) -> int:
        return len(self.portions) // self.epochs

    @property
    def first_steps(self) -> tuple[int, ...]:
        return tuple(accumulate((portion.steps for portion in self.portions), initial=0))

    @property
    def packs_are_maxima(self) -> bool:
        """Whether steps differ in packs, so that packs and micro-batches per step are maxima."""
        return self.window is not None or self.samples_per_step is not None

    @property
    def runs_of_first(self) -> float:
        """Size of the run relative to its first portion, in samples."""
        return self.epochs * self.samples / self.portions[0].samples

    def of_portion(self, index: int) -> "DataPlan":
        """Return portion `index` of the run as the data of a plan without portions."""
        fields = dict(self.portions[index])
        fields |= {"epochs": 1, "portions": (), "fewest_packs": None, "mixture": None}
        # The curriculum is at the start of the run, so in the first portion.
        return self.model_copy(update=fields | ({"curriculum_steps": 0} if index else {}))

    @classmethod
    def join(cls, first: "DataPlan", portions: Sequence[DataPortion], epochs: int) -> "DataPlan":
        """Return the data of all portions: sums and joint hashes, with the settings of `first`."""
        # Samples are the same in every epoch, so they count once.
        one_epoch = portions[: len(portions) // epochs]
        joined: dict[str, object] = {"epochs": epochs, "portions": tuple(portions)}
        for name in DataPortion.model_fields:
            parts = one_epoch if name in _SAMPLE_FIELDS else portions
            values = [dict(part)[name] for part in parts]
            is_hash = name.endswith("sha256")
            joined[name] = _hash_text("".join(values)) if is_hash else sum(values)
        return first.model_copy(update=joined)

    @model_validator(mode="after")
    def _check_portions(self) -> "DataPlan":
        if self.window is not None and self.method not in ("balanced", "next_fit", "other"):
            raise ValueError(
                f"window is {self.window} and method {self.method!r}; with window, method must be "
                "balanced, next_fit or other"
            )
        if not self.portions:
            return self
        if len(self.portions) % self.epochs:
            raise ValueError(
                f"portions has {len(self.portions)} entries, not a multiple of {self.epochs} epochs"
            )
        joined_data = DataPlan.join(self, self.portions, self.epochs)
        for (name, given), (_, joined) in zip(self, joined_data, strict=True):
            if given != joined:
                raise ValueError(f"{name} is {given}, but {joined} over all entries of portions")
        return self


class PlannedLevel(Level):
    """A level of a plan, with recomputation of its own."""

    recompute: tuple[tuple[SpanText, ...], ...]  # layers to recompute, per entry of `Plan.stages`


class SettingsHashes(Frozen):
    """SHA-256 of a plan's settings, to detect edits of plan.json."""

    model: str
    data: str | None  # None for a plan of shapes only

    @classmethod
    def compute(cls, model: ModelConfig, data: DataPlan | None) -> Self:
        """Hash a model's full description, and the data's fields not covered by its files."""

        def hash_settings(settings: Frozen) -> str:
            values = settings.model_dump(mode="json", exclude=_FIELDS_IN_FILES)
            return _hash_text(json.dumps(values, sort_keys=True))

        return cls(model=hash_settings(model), data=None if data is None else hash_settings(data))


_SAMPLE_FIELDS = {"samples", "lengths_sha256"}  # DataPortion fields that are equal in all epochs
# DataPlan fields that checks of the files cover: counts, content hashes and lower bound.
_FIELDS_IN_FILES = {*DataPortion.model_fields, "portions", "fewest_packs", "mixture", "origin"}


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _check_divides(name: str, size: int, ranks: int, of_what: str) -> None:
    if ranks % size:
        raise ValueError(f"{name} is {size}, and must divide the {ranks} {of_what}")


class Plan(Frozen):
    """Everything needed to build and feed the training job."""

    schema_version: Literal[3] = SCHEMA_VERSION
    model: ModelConfig
    precision: Precision
    parallel: Parallel
    frozen: tuple[str, ...] = ()
    adapters: AdapterConfig | None = written_unless(None)  # trained with frozen base matrices
    made_for: TargetName | None = written_unless(None)  # trainer, None for this project's
    stages: tuple[Stage, ...]
    """Runs of units in model order: pipeline stages, or chunks that `schedule` places on them."""
    schedule: PipelineSchedule = written_unless(ONE_FORWARD_ONE_BACKWARD)
    levels: Annotated[tuple[PlannedLevel, ...], Field(max_length=MAX_LEVELS)] = ()
    """Context-parallel levels by rising caps, or empty for a single level of context size 1."""
    data_parallel_encoders: DataParallelEncoders | None = written_unless(None)
    cluster: ClusterConfig
    data: DataPlan | None  # None for a plan of shapes only, which cannot be trained
    shapes: Shapes | None = None  # micro-batches of a plan of shapes only: all full, at the caps
    settings_sha256: SettingsHashes | None = written_unless(None)  # None if not by `omnibal plan`
    prediction: Prediction | None = None

    @model_validator(mode="after")
    def _check_trained_and_predicted(self) -> "Plan":
        mistake = frozen_mistake(self.model, self.frozen)
        mistake = mistake or adapter_mistake(self.model, self.frozen, self.adapters)
        if mistake is not None:
            raise ValueError(mistake)
        stages = len(self.stages) // self.schedule.chunks
        if self.prediction is not None and len(self.prediction.stages) != stages:
            raise ValueError(
                f"prediction.stages has {len(self.prediction.stages)} entries for {stages} "
                "stages: remove `prediction`"
            )
        return self

    def trained_towers(self, cut: int) -> frozenset[str]:
        """Return towers and deepstack features with gradients sent back to entry `cut` of `stages`.

        Upstream are entries 0 to `cut`, and data-parallel encoders. An encoder needs a
        trained unit upstream, its deepstack features one that is no projector, and the language
        model a trained unit of any tower.
        """
        kinds, before = unit_kinds(self.model), self.stages[: cut + 1]
        upstream = {name for stage in before for name in stage_units(kinds, stage.units)}
        if self.data_parallel_encoders is not None:
            upstream |= {kind.name for kind in kinds if kind.tower != LANGUAGE}
        names = upstream & trained_kinds(self.model, self.frozen, self.adapters)
        trained = [kind for kind in kinds if kind.name in names]
        towers = {kind.tower for kind in trained}
        encoding = {kind.tower for kind in trained if not kind.is_projector}
        deepstack = deepstack_of(self.model)
        features = {feature.name for feature in deepstack if feature.tower in encoding}
        return frozenset(towers | features | {LANGUAGE} if towers else ())

    @property
    def token_multiple(self) -> int:
        """Tokens of a micro-batch are padded to a multiple of this, for SP and FP8."""
        parts = self.parallel.tensor if self.parallel.sequence_parallel else 1
        return parts * (FP8_MULTIPLE if self.precision == "fp8" else 1)

    def stages_at(self, level: int) -> tuple[Stage, ...]:
        """Stages with the recomputed layers of a level."""
        if not self.levels:
            return self.stages
        return tuple(
            stage.model_copy(update={"recompute": layers})
            for stage, layers in zip(self.stages, self.levels[level].recompute, strict=True)
        )

    @property
    def stages_at_levels(self) -> tuple[tuple[Stage, ...], ...]:
        return tuple(map(self.stages_at, range(len(self.levels)))) or (self.stages,)

    def parts_of(self, stage: int) -> tuple[int, ...]:
        """Indices into `stages` of a pipeline stage's chunks."""
        return tuple(self.schedule.parts_of(len(self.stages))[stage])

    @property
    def stage_of_parts(self) -> tuple[int, ...]:
        """Pipeline stage of every entry of `stages`."""
        place, size = self.schedule.placement, self.parallel.pipeline
        return tuple(place.stage_of(part, size) for part in range(len(self.stages)))

    def merge_chunks(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """Return one entry per pipeline stage, with the units of all its chunks."""
        return tuple(
            Stage(
                units=tuple(span for part in parts for span in stages[part].units),
                recompute=tuple(span for part in parts for span in stages[part].recompute),
            )
            for parts in self.schedule.parts_of(len(stages))
        )

    def units_of(self, stage: int) -> Stage:
        """Return a pipeline stage's units, chunk after chunk, without recomputation."""
        return Stage(units=self.merge_chunks(self.stages)[stage].units)

    def of_portion(self, index: int) -> "Plan":
        """Return the plan of portion `index`. Only the first keeps the run's prediction."""
        assert self.data is not None, "the plan has data"
        update: dict[str, object] = {"data": self.data.of_portion(index)}
        return self.model_copy(update=update | ({"prediction": None} if index else {}))

    @property
    def pipeline_model(self) -> ModelConfig:
        """The model without data-parallel encoders."""
        return self.model if self.data_parallel_encoders is None else self.model.without_encoders()

    @property
    def known_prediction(self) -> Prediction:
        """The prediction; AssertionError if absent."""
        assert self.prediction is not None, "`omnibal plan` predicts every plan"
        return self.prediction

    @property
    def pack_levels(self) -> tuple[Level, ...]:
        """Levels of the packs, at least one."""
        if self.levels:
            plain = ({n: value for n, value in level if n != "recompute"} for level in self.levels)
            return tuple(Level(**settings) for settings in plain)
        shapes = self.data or self.shapes
        assert shapes is not None
        return (Level(caps=shapes.caps),)

    @property
    def has_shared_packs(self) -> bool:
        """Whether any level is context-parallel."""
        return any(level.context > 1 for level in self.levels)

    @model_validator(mode="after")
    def _check_levels(self) -> "Plan":
        for index, (lower, level) in enumerate(pairwise(self.levels), start=1):
            same_names = level.caps.names == lower.caps.names
            if not same_names or level.caps["tokens"] <= lower.caps["tokens"]:
                raise ValueError(
                    f"levels[{index}].caps are {level.caps}, after {lower.caps}; levels must limit "
                    "the same features, in the order of rising max_tokens"
                )
        for index, level in enumerate(self.levels):
            if len(level.recompute) != len(self.stages):
                raise ValueError(
                    f"levels[{index}].recompute has {len(level.recompute)} entries for "
                    f"{len(self.stages)} stages; it must have one per stage"
                )
            ranks = self.parallel.data
            _check_divides(f"levels[{index}].context", level.context, ranks, "data-parallel ranks")
        if self.levels and any(stage.recompute for stage in self.stages):
            raise ValueError(
                "a stage names layers to recompute, and the plan has `levels`: move them into "
                "`recompute` of every level"
            )
        caps = self.data.caps if self.data else None
        if self.levels and caps is not None and caps != largest_caps(self.levels):
            raise ValueError(
                f"data.caps are {caps}, and must be the largest of `levels`: "
                f"{largest_caps(self.levels)}"
            )
        return self

    @model_validator(mode="after")
    def _check_encoders(self) -> "Plan":
        encoders, key = self.data_parallel_encoders, "data_parallel_encoders"
        if encoders is None:
            return self
        fields, names = ("items_per_pass", "kept_items", "item_ms"), set(self.model.encoders)
        squares = set(takes_whole_samples(self.model))
        for field, needed in (*((field, names) for field in fields), ("square_ms", squares)):
            given = set(dict(encoders)[field])
            if given != needed or not names:
                raise ValueError(
                    f"{key}.{field} has {words(sorted(given)) or 'no encoder'}, and must have "
                    f"{words(sorted(needed)) or 'none'} of {self.model.name}"
                )
        sizes = self.parallel
        _check_divides(f"{key}.pipelines", encoders.pipelines, sizes.data, "data-parallel ranks")
        _check_divides(f"{key}.sharded", encoders.sharded, sizes.world_size, "ranks of the job")
        return self


def portion_folder(directory: Path, number: int) -> Path:
    return directory / PORTIONS_FOLDER / f"{number:05}"


def portion_packs_file(epoch: int) -> str:
    return f"packs-{epoch:03}.parquet"


def plan_sha256(plan: Plan) -> str:
    """Return the SHA-256 of a plan without its prediction."""
    return _hash_text(plan.model_dump_json(exclude={"prediction"}))


def plan_files(directory: Path) -> list[Path]:
    """Return every path of a plan directory, existing or not; portions' only if they exist."""
    of_portions = sorted((directory / PORTIONS_FOLDER).glob("*/*.parquet"))
    return [*(directory / name for name in PLAN_FILES), *of_portions]


def write_plan(plan: Plan, directory: Path) -> None:
    """Write `plan.json`; equal plans give equal bytes."""
    write_json_model(plan, directory / PLAN_FILE)


def read_plan(directory: Path) -> Plan:
    remedy = "make the plan again with this version's `omnibal plan`, or give a plan's folder"
    return read_json_model(Plan, directory / PLAN_FILE, remedy)
