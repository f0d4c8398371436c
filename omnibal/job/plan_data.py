"""Data of a plan's micro-batches: a dataset's samples, a stream or mock samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths, LengthsOrigin, check_positions, draw_samples
from omnibal.data.native_resolution import Segments, sizes_of
from omnibal.job.filling import worth_filling
from omnibal.job.job import JobSpec
from omnibal.job.plan import DataPlan, DataPortion, PackedBy, Plan, Shapes
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import ImageRule
from omnibal.model.levels import FillRule, Level, are_plain, largest_caps
from omnibal.model.limits import Caps, check_packs_per_step, in_canonical_order, words
from omnibal.model.targets import ANY_PACKS, PackRules
from omnibal.packing.full_steps import whole_steps
from omnibal.packing.next_fit import form_next_fit_packs
from omnibal.packing.pack_settings import PackSettings
from omnibal.packing.packing import PackingMethod
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.packing.steps import Steps, deal_steps, draw_steps, pack_epochs, size_load, steps_of
from omnibal.packing.windows import schedule_windows

_NATIVE_TOKENS = "image_tokens"
MAX_TRAINED_SAMPLES = 200_000_000  # max samples over several epochs, as a plan lists each in memory


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleData:
    """A dataset's samples, with packing and step settings."""

    lengths: Lengths
    settings: PackSettings = field(default_factory=PackSettings)
    levels: tuple[Level, ...]  # levels of the packs, at least one, by rising caps
    packs_per_step: int  # over all data-parallel ranks, shared packs counted per rank
    steps: Steps | None = None  # of an earlier plan with equal levels and settings, or None to draw
    rules: PackRules = ANY_PACKS  # pack rules, if each pack is on one rank with equal limits
    packed_by: PackedBy | None = None  # rule that packed the given steps, or None without steps

    @classmethod
    def of_plan(cls, plan: Plan, data: tuple[ScheduledPacks, Lengths] | None) -> Self:
        """Return data with an earlier plan's steps, kept as they are; raises UserError."""
        made = plan.data
        if made is None or data is None:
            raise UserError(
                "--steps-of was given a plan of shapes only, which has no steps; give a plan made "
                "with --lengths"
            )
        if made.method == "other":
            raise UserError(
                "--steps-of was given a plan with packs by another tool; give a plan with "
                f"data.method {' or '.join(PackingMethod)}"
            )
        if made.portions:
            raise UserError(
                f"the earlier plan has {len(made.portions)} portions, and no directory to read "
                "them from: give its directory too"
            )
        packs, lengths = data
        # `packed_by` keeps the method; given steps are not packed again, so BALANCED may stand in.
        is_known = made.method in list(PackingMethod)
        settings = PackSettings(
            packing=PackingMethod(made.method) if is_known else PackingMethod.BALANCED,
            epochs=made.epochs,
            seed=made.seed,
            curriculum_steps=made.curriculum_steps,
            samples_per_step=made.samples_per_step,
        )
        return cls(
            lengths=lengths,
            settings=settings,
            packed_by=made.method,
            packs_per_step=made.packs_per_step,
            levels=plan.pack_levels,
            steps=steps_of(packs),
        )

    @property
    def caps(self) -> Caps:
        return largest_caps(self.levels)

    def with_caps(self, caps: Caps) -> Self:
        """Return data with other caps. Packs must have one level (ValueError)."""
        (level,) = self.levels
        return replace(self, levels=(level.model_copy(update={"caps": caps}),))

    def check(self, job: JobSpec) -> None:
        """Raise for data that cannot be planned for a job."""
        check_packs_per_step(job.parallel.data, self.micro_batches(job))
        ranks = job.parallel.data
        if self.steps is None and (self.packs_per_step < 1 or self.packs_per_step % ranks):
            raise UserError(
                f"packs_per_step is {self.packs_per_step:,}, and must be a multiple of the "
                f"{ranks:,} data-parallel ranks: give "
                f"{max(self.packs_per_step // ranks, 1) * ranks:,}"
            )
        _check_lengths(self.lengths, self.settings.epochs, job.model)

    def micro_batches(self, job: JobSpec) -> int:
        """Max micro-batches of a data-parallel rank in a full step."""
        return -(-self.packs_per_step // job.parallel.data)

    def pack(self, job: JobSpec) -> list[Packs]:
        """Return the packs of every epoch, [] if `steps` are given."""
        if self.steps is not None:
            return []
        may_fill = None
        # A filler sample lengthens the exchange of a shared pack, so only cheap ones may fill.
        if len(self.levels) > 1 and self.settings.fill is FillRule.COST:
            costs = job.costs_at(self.levels)
            may_fill = worth_filling(costs, job.pipeline_model, self.lengths, self.levels)
        return pack_epochs(self.lengths, self.settings, self.levels, may_fill, rules=self.rules)

    def with_steps(self, job: JobSpec, packs: Sequence[Packs] | None = None) -> Self:
        """Return data with `steps`: unless given, drawn from `packs` (default: `pack(job)`)."""
        if self.steps is not None:
            return self
        steps = draw_steps(
            self.lengths,
            self.settings,
            self.levels,
            self._load(job),
            self.pack(job) if packs is None else packs,
            packs_per_step=self.packs_per_step,
            packs_per_row=job.parallel.data,
            rules=self.rules,
        )
        return replace(self, steps=steps)

    def _load(self, job: JobSpec) -> Callable[[Packs], np.ndarray]:
        return lambda packs: job.load_at_ms(packs, self.lengths, self.levels)

    def for_ranks(self, old: JobSpec, new: JobSpec) -> Self:
        """Return data for job `new` with as many micro-batches per rank, unless steps are given."""
        if self.steps is not None:
            return self
        return replace(self, packs_per_step=self.micro_batches(old) * new.parallel.data)

    def subsample(self, most: int) -> Self:
        """Return data of at most `most` random samples, or all if steps are given."""
        if self.steps is not None:
            return self
        return replace(self, lengths=draw_samples(self.lengths, most, self.settings.seed))

    def schedule(self, job: JobSpec) -> tuple[ScheduledPacks, Lengths]:
        """Return all epochs' packs, dealt to steps and ranks by predicted time, and lengths."""
        lengths, steps = self.lengths, self.with_steps(job).steps
        assert steps is not None
        load, ranks, rules = self._load(job), job.parallel.data, self.rules
        packs = deal_steps(
            steps,
            lengths,
            load,
            ranks,
            self.levels,
            lockstep_ranks=job.parallel.lockstep_ranks,
            slowness=job.rank_slowness if are_plain(self.levels) else None,
        )
        # Trainers' pack rules know one level: ranks that share its packs count as one.
        context = self.levels[0].context if len(self.levels) == 1 else 1
        blocks, packs_per_step = ranks // context, self.packs_per_step // context
        if rules.next_fit:
            packs = form_next_fit_packs(packs, lengths, load(packs.packs), blocks, packs_per_step)
            packs = replace(packs, dp_rank=packs.dp_rank * context)
        if rules.full_steps:
            packs = whole_steps(packs, packs_per_step, blocks)
        return packs, lengths

    def describe(self, packs: ScheduledPacks, job: JobSpec) -> DataPlan:
        """Return the `data` of plan.json for scheduled packs."""
        settings = self.settings
        samples_per_step = None if self.rules.full_steps else settings.samples_per_step
        packs_per_step, micro_batches = self.packs_per_step, self.micro_batches(job)
        if samples_per_step is not None:
            packs_per_step, micro_batches = max_packs_of_step(packs, self.levels)
        by_rule: PackedBy = "next_fit" if self.rules.next_fit else settings.packing.value
        return describe_data(
            packs,
            self.lengths,
            caps=self.caps,
            method=self.packed_by or by_rule,
            seed=settings.seed,
            epochs=settings.epochs,
            packs_per_step=packs_per_step,
            micro_batches_per_step=micro_batches,
            samples_per_step=samples_per_step,
            curriculum_steps=settings.curriculum_steps,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _SingleLevelData:
    """Packs of one level, each on one rank, without steps of an earlier plan."""

    caps: Caps

    @property
    def levels(self) -> tuple[Level, ...]:
        return (Level(caps=self.caps),)

    def with_caps(self, caps: Caps) -> Self:
        return replace(self, caps=caps)

    @property
    def steps(self) -> None:
        """None: mock data and windows have no steps to reuse."""

    def pack(self, job: JobSpec) -> list[Packs]:
        """Return []: `schedule` makes the packs, as they depend on the ranks."""
        return []

    def with_steps(self, job: JobSpec, packs: Sequence[Packs] | None = None) -> Self:
        return self

    def for_ranks(self, old: JobSpec, new: JobSpec) -> Self:
        return self


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MockData(_SingleLevelData):
    """A step of mock samples, each filling a pack, for plans of shapes only."""

    micro_batches_per_step: int
    image_tokens: int | None = None  # per image at native resolution, None for one image per pack

    def check(self, job: JobSpec) -> None:
        """Raise for too many packs per step."""
        check_packs_per_step(job.parallel.data, self.micro_batches_per_step)

    @property
    def lengths(self) -> None:
        """None: the model keeps its own tiling."""

    def subsample(self, most: int) -> Self:
        return self

    def schedule(self, job: JobSpec) -> tuple[ScheduledPacks, Lengths]:
        """Return the only step: equally many full packs on every rank."""
        return data_at_caps(self.describe(), job.parallel.data)

    def describe(self, packs: object = None, job: object = None) -> Shapes:
        return Shapes.model_validate(self, from_attributes=True)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StreamData(_SingleLevelData):
    """Samples in reading order. A step is a window of them, independent of packs and ranks."""

    lengths: Lengths
    window: int  # samples per step, over all ranks
    is_dispatched: bool  # whether a window is balanced over ranks, or dealt in reading order
    epochs: int

    @classmethod
    def of_plan(cls, plan: Plan, data: tuple[ScheduledPacks, Lengths] | None) -> Self | None:
        """Return the data of an earlier plan of windows, to pack again, None for other plans."""
        if plan.data is None or plan.data.window is None or data is None:
            return None
        return cls(
            lengths=data[1],
            caps=plan.data.caps,
            window=plan.data.window,
            is_dispatched=plan.data.method != "next_fit",
            epochs=plan.data.epochs,
        )

    def check(self, job: JobSpec) -> None:
        """Raise for data that cannot be planned for a job."""
        ranks, samples = job.parallel.data, min(self.window, len(self.lengths))
        if samples < ranks:
            raise UserError(
                f"a window of {samples:,} samples leaves {ranks - samples:,} of {ranks:,} "
                f"data-parallel ranks idle in every step: give --window {ranks} or more, more "
                "samples, or fewer ranks"
            )
        check_packs_per_step(ranks, -(-samples // ranks))
        _check_lengths(self.lengths, self.epochs, job.model)

    def subsample(self, most: int) -> Self:
        """Return data of the first windows, up to `most` samples but at least one window."""
        count = max(most // self.window, 1) * self.window
        first = np.arange(min(count, len(self.lengths)))
        return replace(self, lengths=self.lengths.take(first))

    def schedule(self, job: JobSpec) -> tuple[ScheduledPacks, Lengths]:
        packs = schedule_windows(
            self.lengths,
            self.caps,
            job.parallel,
            lambda packs: job.load_ms(packs, self.lengths),
            window=self.window,
            is_dispatched=self.is_dispatched,
            epochs=self.epochs,
        )
        return packs, self.lengths

    def describe(self, packs: ScheduledPacks, job: JobSpec) -> DataPlan:
        packs_per_step, micro_batches = max_packs_of_step(packs, self.levels)
        return describe_data(
            packs,
            self.lengths,
            caps=self.caps,
            method="balanced" if self.is_dispatched else "next_fit",
            seed=0,
            epochs=self.epochs,
            packs_per_step=packs_per_step,
            micro_batches_per_step=micro_batches,
            window=self.window,
            steps_sha256=steps_of(packs).window_sha256,
        )


PlanData = SampleData | StreamData | MockData


def packs_of_steps(packs: ScheduledPacks, levels: Sequence[Level]) -> np.ndarray:
    """Return packs of every step over all ranks, shared packs counted for each. int64 [steps]"""
    context = np.array([level.context for level in levels])[packs.level]
    return np.bincount(packs.step, weights=context).astype(np.int64)


def max_packs_of_step(packs: ScheduledPacks, levels: Sequence[Level]) -> tuple[int, int]:
    """Return the max packs per step over all ranks, and per rank."""
    return int(packs_of_steps(packs, levels).max()), int(packs.slot.max()) + 1


def _check_lengths(lengths: Lengths, epochs: int, model: ModelConfig) -> None:
    samples = len(lengths)
    if epochs > 1 and epochs * samples > MAX_TRAINED_SAMPLES:
        raise UserError(
            f"{epochs:,} epochs of {samples:,} samples are {epochs * samples:,}, and a plan of "
            f"several epochs lists at most {MAX_TRAINED_SAMPLES:,} samples: give fewer --epochs"
        )
    model_of_lengths(model, lengths)


def limited_features(model: ModelConfig) -> tuple[str, ...]:
    """Return features that need a cap: the encoders' items and "tokens", in canonical order."""
    return tuple(in_canonical_order([*model.item_features, "tokens"]))


def shape_caps(model: ModelConfig, given: Mapping[str, int], image_share: float) -> dict[str, int]:
    """Return `given` caps; missing image caps fill `image_share` (0 to 1) of the tokens."""
    caps = dict(given)
    for tower in model.encoders.values():
        if tower.feature not in caps and tower.of_images:
            wanted = image_share * given["tokens"] / tower.tokens_per_item
            caps[tower.feature] = max(round(wanted), 1)  # whole tiles
    return caps


def smallest_caps(lengths: Lengths | None, names: Sequence[str]) -> Caps:
    """Return the smallest caps that every sample fits. Mock samples, without lengths, fit any."""
    if lengths is None:
        return Caps.of(**dict.fromkeys(names, 1))
    return Caps.of(**{name: max(int(lengths.column(name).max()), 1) for name in names})


def caps_of_tokens(lengths: Lengths, names: Sequence[str], tokens: int) -> Caps:
    """Return a cap on tokens, with other caps high enough for all packs of `tokens` tokens."""
    caps = {"tokens": tokens}
    for name in names:
        if name != "tokens":
            # Fractional knapsack: samples by items per token, and a part of the last one. No
            # pack of whole samples has more items.
            items = lengths.column(name)
            densest_first = np.argsort(-items / np.maximum(lengths.tokens, 1), kind="stable")
            token_sums = np.append(0, np.cumsum(lengths.tokens[densest_first], dtype=np.int64))
            item_sums = np.append(0, np.cumsum(items[densest_first], dtype=np.int64))
            most = int(np.ceil(np.interp(tokens, token_sums, item_sums)))
            caps[name] = max(most, int(items.max()), 1)
    return Caps.of(**caps)


def data_at_caps(shapes: Shapes, data_parallel: int) -> tuple[ScheduledPacks, Lengths]:
    """Return a step of one-sample mock packs at the caps, and the samples' lengths."""
    # One sample per pack, and one image without `image_tokens`, maximise attention's cost.
    count = data_parallel * shapes.micro_batches_per_step
    check_packs_per_step(data_parallel, shapes.micro_batches_per_step)
    columns = {name: np.full(count, shapes.caps[name], np.int32) for name in shapes.caps.names}
    tokens = columns.pop("tokens")
    loss_tokens = columns.pop("loss_tokens", np.zeros(count, np.int32))
    size, squares, image_sizes = shapes.image_tokens, {}, None
    if size is not None and _NATIVE_TOKENS in columns:
        full, remainder = divmod(shapes.caps[_NATIVE_TOKENS], size)
        images = [Segments(1, size)] * full + [Segments(1, remainder)] * (remainder > 0)
        image_sizes = sizes_of([images] * count)
        squares[f"squared_{_NATIVE_TOKENS}"] = image_sizes.squares
    lengths = Lengths(
        loss_tokens=loss_tokens,
        items=columns,
        tokens=tokens,
        source=np.zeros(count, np.int32),
        source_names=("at the caps",),
        squares=squares,
        image_sizes=image_sizes,
    )
    steps = Steps(
        packs=Packs.from_lists([[sample] for sample in range(count)]),
        step=np.zeros(count, np.int64),
        epoch=np.zeros(count, np.int32),
    )
    levels = [Level(caps=shapes.caps)]
    load = partial(size_load, lengths=lengths)
    return deal_steps(steps, lengths, load, data_parallel, levels), lengths


def model_of_lengths(model: ModelConfig, lengths: Lengths | None) -> ModelConfig:
    """Return the model with the scan's settings; raise UserError if it cannot take the data."""
    if lengths is None:
        return model
    known = model.item_features
    foreign = [
        name for name in lengths.item_names if name not in known and lengths.items[name].any()
    ]
    if foreign:
        raise UserError(
            f"the lengths count {words(foreign)}, and {model.name} has no encoder for them: it "
            f"takes {words([*known, 'tokens'])}; give lengths of these alone, or another model"
        )
    longest = int(lengths.tokens.argmax())
    source = lengths.source_names[lengths.source[longest]]
    check_positions(int(lengths.tokens[longest]), model, f"sample {longest} of {source}")
    return model if lengths.origin is None else _match_origin(model, lengths.origin)


def _match_origin(model: ModelConfig, origin: LengthsOrigin) -> ModelConfig:
    """Return the model with the scan's chat template and tiling or pixels; raise if it differs."""
    of_model = LengthsOrigin.of_model(model)
    tower, rule, needed_rule = model.images, origin.images, of_model.images
    if needed_rule is not None and rule is not None:
        pixels = {"min_pixels": rule.min_pixels, "max_pixels": rule.max_pixels}
        needed_rule = needed_rule.model_copy(update=pixels)
    settings = {  # of the scan and of the model
        "tiles of": (origin.tiles, of_model.tiles),
        "images at native resolution by": (rule, needed_rule),
        "recordings in": (origin.clips, of_model.clips),
        "system_message": (origin.system_message, model.system_message),
    }
    for name, (scanned, needed) in settings.items():
        if scanned != needed:
            raise UserError(
                f"the lengths were scanned with {name} {_show_unlike(scanned, needed)}, but "
                f"{model.name} has {_show_unlike(needed, scanned)}; scan them for this model with "
                "`omnibal lengths`"
            )
    model = model.model_copy(update={"chat_template": origin.chat_template})
    if tower is not None and rule is not None:
        (name,) = (name for name, encoder in model.encoders.items() if encoder is tower)
        return model.with_tower(name, **pixels)
    return model.with_tower("vision", tiling=origin.tiling) if model.takes_images else model


def _show_unlike(one: object, other: object) -> str:
    """Return a setting as text; of two rules, the fields that differ."""
    if not isinstance(one, ImageRule):
        return "none" if one is None else str(one)
    if not isinstance(other, ImageRule):
        return "a rule"
    return ", ".join(f"{name} {value!r}" for name, value in one if value != dict(other)[name])


def describe_data(packs: ScheduledPacks, lengths: Lengths, **settings: Any) -> DataPlan:
    """Return a plan's data; `settings` are the fields that packs and lengths do not determine."""
    counts = count_data(packs, lengths, epochs=settings["epochs"])
    return DataPlan(**dict(counts) | {"origin": lengths.origin} | settings)


def count_data(packs: ScheduledPacks, lengths: Lengths, *, epochs: int = 1) -> DataPortion:
    """Return counts and hashes of packs; `left_out` samples of `epochs` passes are in no pack."""
    return DataPortion(
        samples=len(lengths),
        left_out=epochs * len(lengths) - len(packs.packs.samples),
        packs=len(packs),
        steps=packs.steps,
        lengths_sha256=lengths.sha256,
        packs_sha256=packs.sha256,
        steps_sha256=steps_of(packs).sha256,
    )
