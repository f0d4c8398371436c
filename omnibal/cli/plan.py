"""`omnibal plan`: make a plan directory."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnibal import tables
from omnibal.beside import EncoderPlacement
from omnibal.cli.console import print_notes, print_result, progress, status
from omnibal.cli.levels import (
    LevelOptions,
    balance_of,
    levels_of_plan,
    levels_table,
    notes_on_steps,
)
from omnibal.cli.options import (
    DEFAULT_CAP_SAMPLES,
    DEFAULT_MICRO_BATCHES,
    ChosenMaxTilesOption,
    ChosenMaxTokensOption,
    JobOptions,
    JsonOption,
    LimitOption,
    MicroBatchesOption,
    PackingRuleOption,
    SeedOption,
    SizeOptions,
    limits_given,
    refuse_given,
)
from omnibal.cli.trainers import TrainerOptions, cost_of_limits, notes_for, summary_of
from omnibal.cli.windows import Dispatch, window_facts
from omnibal.config import ClusterConfig, ModelConfig
from omnibal.data.lengths import Lengths, length_files, read_lengths
from omnibal.data.packing import PackingMethod
from omnibal.errors import DoesNotFit, UserError
from omnibal.families.named import named_model
from omnibal.frozen import MAX_COUNT
from omnibal.limits import Caps, check_limits, memory_cap_gib, option_of, words
from omnibal.outputs import check_folder
from omnibal.parallel import MAX_DEVICES, Parallel
from omnibal.pipeline.baselines import PartitionMethod, RecomputeRule
from omnibal.pipeline.prediction import Prediction
from omnibal.plan import MAX_EPOCHS, Plan
from omnibal.targets import ANY_PACKS, OWN, PackRules, Sharding, TrainerConstraints, trainer_of

if TYPE_CHECKING:  # they import scipy, which `omnibal --help` should not wait for
    from omnibal.job import JobSpec
    from omnibal.plan_data import MockData, PlanData, SampleData, StreamData
    from omnibal.planner import PlanRequest, PlanResult
    from omnibal.search.encoder_placement import PlacementChoice
    from omnibal.search.parallel_sizes import StrategySearch
    from omnibal.search.strategy import Strategy

DEFAULT_IMAGE_SHARE = 0.5
"""Of the tokens of a pack of shapes."""
IMAGE_TOKENS = 1_024
"""Tokens of an image at its native resolution in packs of shapes: 1,024 x 1,024 pixels where a
token is of 32 x 32, as in Qwen3-VL."""
_ROOM_OF_CAPS = 1.25
"""Tokens of the smallest packs that are compared, of the longest sample's, at most."""
_DATA_OPTIONS = (
    "image_share lengths max_tiles max_tokens limit micro_batches epochs seed packing levels "
    "curriculum_steps window dispatch"
).split()
_STRATEGY_OPTIONS = "micro_batches sequence_parallel steps_of method recompute".split()
_WINDOW_OPTIONS = "window dispatch".split()
_STEP_OPTIONS = "micro_batches seed packing curriculum_steps".split()
"""Options by which packs are made and matched into steps, which a window leaves no choice of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions(LevelOptions):
    """Options for the samples, their packing and the number of epochs."""

    max_tiles: ChosenMaxTilesOption = None
    max_tokens: ChosenMaxTokensOption = None
    limit: LimitOption = None
    image_share: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="without --lengths and with --max-tokens alone: share of a pack's tokens that are "
            f"images' [default: {DEFAULT_IMAGE_SHARE}]",
        ),
    ] = None
    lengths: Annotated[
        list[Path] | None,
        typer.Option(help="lengths of the data (may be repeated); without, a plan of shapes only"),
    ] = None
    micro_batches: MicroBatchesOption = DEFAULT_MICRO_BATCHES
    epochs: Annotated[
        int, typer.Option(min=1, max=MAX_EPOCHS, help="times that every sample is trained")
    ] = 1
    seed: SeedOption = 0
    packing: PackingRuleOption = PackingMethod.BALANCED
    window: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_COUNT,
            help="consecutive samples of a step, for a stream that may not be reordered; packs are "
            "balanced inside each (default: samples are shuffled)",
        ),
    ] = None
    dispatch: Annotated[
        Dispatch,
        typer.Option(
            help="with --window: on gives ranks equal shares, off packs and deals samples as they "
            "are read"
        ),
    ] = Dispatch.ON
    steps_of: Annotated[
        Path | None,
        typer.Option(
            help="plan directory whose data to keep, step by step, so that its run can go on with "
            "other parallel sizes"
        ),
    ] = None

    def files(self) -> list[Path]:
        """List the files that the data is read from."""
        earlier = [] if self.steps_of is None else [self.steps_of]
        return [*earlier, *length_files(self.lengths or [])]

    def samples(self) -> Lengths | None:
        """Read the lengths; None for a plan of shapes only."""
        return read_lengths(self.lengths) if self.lengths else None

    def caps(self, model: ModelConfig, packed_by_tokens: Lengths | None = None) -> Caps | None:
        """Return the caps of a pack for a model; None where they are to be searched for.

        Args:
            model: whose items are limited.
            packed_by_tokens: samples whose packs a trainer limits by their tokens alone.

        Raises:
            UserError: some features that the model has are limited and others not, or features are
                limited that it does not have, or that the trainer does not limit.
        """
        from omnibal.plan_data import caps_of_tokens, limited_features, shape_caps

        given = limits_given(self.limit, self.max_tiles, self.max_tokens)
        if not given and self.lengths:
            return None
        needed = limited_features(model)
        if packed_by_tokens is not None:
            _refuse_other_limits(given)
            return caps_of_tokens(packed_by_tokens, needed, given["tokens"])
        if not self.lengths and self.steps_of is None and "tokens" in given:
            is_full = set(given).issuperset(needed)
            if is_full and self.image_share is not None:
                raise UserError(
                    f"--image-share {self.image_share} was given with caps of all that a pack "
                    f"holds, {words(needed)}, which decide it: leave it or the caps of items out"
                )
            share = DEFAULT_IMAGE_SHARE if self.image_share is None else self.image_share
            given = shape_caps(model, given, share)
        check_limits([*given, *needed], model.item_features, model.name)
        if not set(given).issuperset(needed):
            raise UserError(_caps_needed(needed))
        return Caps.of(**given)

    def streamed(self, samples: Lengths, caps: Caps, window: int) -> "StreamData":
        """Describe the samples as a stream with these caps and windows."""
        from omnibal.plan_data import StreamData

        return StreamData(
            lengths=samples,
            caps=caps,
            window=window,
            is_dispatched=self.dispatch is Dispatch.ON,
            epochs=self.epochs,
        )

    def packed(
        self,
        samples: Lengths,
        caps: Caps,
        packs_per_step: int,
        rules: PackRules = ANY_PACKS,
    ) -> "SampleData":
        """Describe the samples with these caps and `packs_per_step` packs of all ranks."""
        from omnibal.plan_data import SampleData

        return SampleData(
            lengths=samples,
            caps=caps,
            packing=self.packing,
            packs_per_step=packs_per_step,
            epochs=self.epochs,
            seed=self.seed,
            rules=rules,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyOptions(TrainerOptions):
    """Options for what a plan is for: a trainer, and a number of devices and samples per step."""

    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_DEVICES,
            help="devices to choose parallel sizes for; any of --tp, --pp, --dp and --ep that is "
            "given stays as it is",
        ),
    ] = None
    samples_per_step: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_COUNT,
            help="of all ranks, with --gpus; strategies are compared at this step size (default: "
            "36 for every node; a pack a device without --lengths)",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionOptions:
    """Options for the pipeline split and activation recomputation."""

    method: Annotated[PartitionMethod, typer.Option(help="how the model is split over stages")] = (
        PartitionMethod.OMNIBAL
    )
    recompute: Annotated[
        RecomputeRule | None,
        typer.Option(
            help="which layers are recomputed [default: cheapest with omnibal, front with others]"
        ),
    ] = None

    def rule(self) -> RecomputeRule:
        """Return the recompute rule that was given, or the one that goes with the method."""
        if self.recompute is not None:
            return self.recompute
        is_joint = self.method is PartitionMethod.OMNIBAL
        return RecomputeRule.CHEAPEST if is_joint else RecomputeRule.FRONT

    @property
    def is_joint(self) -> bool:
        """Whether split and recomputed layers are searched for together."""
        joint = (PartitionMethod.OMNIBAL, RecomputeRule.CHEAPEST)
        return (self.method, self.rule()) == joint


class EncoderChoice(StrEnum):
    """Placements of encoders to plan, of which the faster is taken."""

    AUTO = "auto"
    PIPELINE = "pipeline"
    BESIDE = "beside"

    @property
    def placements(self) -> tuple[EncoderPlacement, ...]:
        """The placements to plan: both, but for the pipeline alone."""
        if self is EncoderChoice.PIPELINE:
            return (EncoderPlacement.PIPELINE,)
        return tuple(EncoderPlacement)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementOptions(PartitionOptions):
    """Options for where units run: encoders, the split and recomputation."""

    encoder: Annotated[
        EncoderChoice,
        typer.Option(
            help="where encoders run: as units of the pipeline's stages, whole on every rank "
            "beside the pipeline, or where it is predicted to be faster"
        ),
    ] = EncoderChoice.PIPELINE


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """All options that a plan is made of."""

    given: JobOptions
    data: DataOptions
    strategy: StrategyOptions
    sizes: SizeOptions
    partition: PlacementOptions
    limits: TrainerConstraints
    """Those that the plan is made under: the trainer's, or none, to compare with."""

    def job(self, parallel: Parallel | None, placement: EncoderPlacement) -> "JobSpec":
        """Make the job with these parallel sizes, or the smallest, under the limits."""
        return self.given.job(parallel, placement, self.limits)

    def caps(self, model: ModelConfig, samples: Lengths | None) -> Caps | None:
        """Return the caps that were given; None where they are to be searched for."""
        return self.data.caps(model, samples if self.strategy.packs_by_tokens else None)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Planned:
    """A plan, and the strategies that were compared, if any were."""

    result: "PlanResult"
    found: "StrategySearch | None"

    @property
    def prediction(self) -> Prediction:
        """What is predicted of the plan."""
        assert self.result.plan.prediction is not None
        return self.result.plan.prediction

    @property
    def gap(self) -> float:
        """Share by which a plan may be faster that was not found, by what is proven."""
        searched = 0.0 if self.result.search is None else self.result.search.gap
        return max(searched, 0.0 if self.found is None else self.found.gap)


def plan(
    context: typer.Context,
    given: JobOptions,
    output: Annotated[Path, typer.Option("--output", "-o", help="plan directory to write")],
    data: DataOptions,
    strategy: StrategyOptions,
    sizes: SizeOptions,
    partition: PlacementOptions,
    as_json: JsonOption = False,
) -> None:
    """Make the plan: packs, pipeline stages, recomputed layers, and what to expect of them."""
    from omnibal.pipeline.reading import slow_reading
    from omnibal.plan_files import check_replaceable, save_plan

    check_replaceable(output)
    check_folder("-o", output, [*given.files(), *data.files()])
    strategy.refuse_others(context, levels=data.levels, encoder=partition.encoder)
    _refuse_overruled(context, data, strategy)
    asked = _Asked(
        given=given,
        data=data,
        strategy=strategy,
        sizes=sizes,
        partition=partition,
        limits=trainer_of(strategy.made_for),
    )
    planned, choice = _planned(asked)
    save_plan(planned.result, output)
    slow = slow_reading(planned.prediction)
    print_notes(
        [*given.notes(), *([slow] if slow else []), *notes_for(strategy.target, planned.result)]
    )
    _print_plan(as_json, planned, choice, _compared(asked, planned))


def _compared(asked: _Asked, planned: _Planned) -> dict[str, Any]:
    """What the limits of a trainer cost, for JSON; a sentence on it goes to stderr."""
    strategy, result = asked.strategy, planned.result

    def plan_freely() -> tuple["PlanResult", float]:
        print_notes(["planning without the trainer's limits, to compare"])
        free = _planned_as(_without_limits(asked, result), EncoderPlacement.PIPELINE)
        return free.result, free.gap

    cost = None
    if strategy.target is not None and strategy.compare:
        cost = cost_of_limits(asked.limits, result, asked.data.packing, plan_freely)
    return summary_of(strategy, cost, has_samples=result.data is not None)


def _without_limits(asked: _Asked, result: "PlanResult") -> _Asked:
    """The same job without limits.

    A trainer that divides weights over all ranks has no other sizes; without that limit any sizes
    on as many devices are searched for, at as many samples per step.
    """
    from omnibal.search.limits import samples_per_step

    free = replace(asked, limits=OWN)
    if asked.limits.sharding is Sharding.OPTIMIZER or asked.strategy.gpus is not None:
        return free
    strategy = replace(
        asked.strategy,
        gpus=result.plan.parallel.world_size,
        samples_per_step=samples_per_step(result),
    )
    return replace(free, strategy=strategy, sizes=SizeOptions())


def _planned(asked: _Asked) -> tuple[_Planned, "PlacementChoice"]:
    """The plan of the fastest placement of encoders that was asked for, and their comparison.

    Raises:
        UserError: none of them can be planned.
    """
    from omnibal.search.encoder_placement import PlacementChoice, fastest, neither

    asked_for, placements = asked.partition.encoder, asked.partition.encoder.placements
    if asked_for is EncoderChoice.AUTO and not named_model(asked.given.model).encoders:
        placements = (EncoderPlacement.PIPELINE,)
    plans: dict[EncoderPlacement, _Planned] = {}
    refused: dict[EncoderPlacement, UserError] = {}
    for placement in placements:
        try:
            plans[placement] = _planned_as(asked, placement)
        except UserError as error:
            if asked_for == placement.value or len(placements) == 1:
                raise
            refused[placement] = error
    if not plans:
        raise neither(refused)
    predicted = {placement: plan.prediction for placement, plan in plans.items()}
    is_free = asked_for is EncoderChoice.AUTO
    chosen = fastest(predicted) if is_free else EncoderPlacement(asked_for.value)
    pipeline, is_compared = plans.get(EncoderPlacement.PIPELINE), len(placements) > 1
    choice = PlacementChoice(
        chosen=chosen,
        predicted=predicted,
        refused={placement: str(error) for placement, error in refused.items()},
        has_shared_packs=is_compared
        and pipeline is not None
        and pipeline.result.plan.has_shared_packs,
    )
    return plans[chosen], choice


def _planned_as(asked: _Asked, placement: EncoderPlacement) -> _Planned:
    """The plan with encoders placed so."""
    from omnibal.planner import PlanRequest

    data, partition = asked.data, asked.partition
    if asked.strategy.gpus is None:
        job = asked.job(asked.sizes.parallel(), placement)
        request = PlanRequest(
            job=job,
            data=_plan_data(job, asked),
            method=partition.method,
            recompute=partition.rule(),
        )
        return _Planned(result=_make_plan_of_levels(request), found=None)
    job, samples = asked.job(None, placement), data.samples()
    if samples is None:
        return _planned_shapes(job, asked)
    tried = _find_strategy(job, samples, asked.caps(job.model, samples), asked)
    result, found = _make_plan_of_strategy(job, samples, tried, asked)
    return _Planned(result=result, found=found)


def _refuse_overruled(context: typer.Context, data: DataOptions, strategy: StrategyOptions) -> None:
    """Refuse options of the command line that another one overrules."""
    if strategy.gpus is None:
        refuse_given(context, ("samples_per_step",), "it goes with --gpus")
    else:
        if data.levels not in ("auto", "1"):
            raise UserError(
                f"--levels {data.levels} cannot be given: --gpus compares plans of one level; give "
                "--levels 1, or leave it out"
            )
        refuse_given(context, ("curriculum_steps",), "--gpus compares plans of one level")
        refuse_given(context, _WINDOW_OPTIONS, "--gpus compares plans of shuffled samples")
        refuse_given(context, _STRATEGY_OPTIONS, "--gpus chooses that")
    if data.steps_of is not None:
        refuse_given(context, _DATA_OPTIONS, "--steps-of takes that from its plan")
    elif data.window is None:
        refuse_given(context, ("dispatch",), "it goes with --window")
    elif not data.lengths:
        refuse_given(context, ("window",), "it is of samples, and there are no --lengths")
    else:
        refuse_given(context, _STEP_OPTIONS, "--window decides what a step is")
        if data.levels not in ("auto", "1"):
            raise UserError(
                f"--levels {data.levels} cannot be given: packs of a --window are of one level; "
                "leave it out"
            )


def _refuse_other_limits(given: Mapping[str, int]) -> None:
    others = [option_of(name) for name in given if name != "tokens"]
    if others:
        raise UserError(
            f"{words(others)} cannot be given with --for: the trainer packs by tokens alone, and "
            "would not keep packs below it; leave it out, or lower --max-tokens"
        )


def _caps_needed(names: Sequence[str]) -> str:
    options = [option_of(name) for name in names]
    all_of, none = {1: ("", "no limit"), 2: ("both ", "neither")}.get(
        len(options), ("all of ", "none")
    )
    return (
        f"{words(names)} of a pack must be limited: give {all_of}{words(options)}, or {none}, with "
        "--lengths, to have them searched for"
    )


def _uncounted(model: ModelConfig, samples: Lengths | None) -> list[str]:
    """A note on items of the model that lengths have no column for; there are none of them; and on
    images whose squares were not counted."""
    missing = [] if samples is None else set(model.item_features) - set(samples.item_names)
    notes = [f"the lengths do not count {name}: no sample has any" for name in sorted(missing)]
    squared = [] if samples is None else samples.without_squares
    return notes + [
        f"the lengths do not say how many {name} an image has: those of a sample count as one "
        "image, the most that attention may cost; scan them with `omnibal lengths`"
        for name in squared
        if name in model.item_features
    ]


def _plan_data(job: "JobSpec", asked: _Asked) -> "PlanData":
    """Data of the plan's micro-batches, with caps and levels searched for where none are given."""
    from omnibal.check import open_plan
    from omnibal.plan_data import SampleData, StreamData, limited_features
    from omnibal.search.level_estimates import top_caps
    from omnibal.search.levels import shared_anew

    data, partition = asked.data, asked.partition
    if data.steps_of is not None:
        earlier = open_plan(data.steps_of)
        stream = StreamData.of_plan(earlier.plan, earlier.data)
        return stream or shared_anew(job, SampleData.of_plan(earlier.plan, earlier.data))
    samples = data.samples()
    caps = asked.caps(job.model, samples)
    print_notes(_uncounted(job.model, samples))
    if samples is None:
        assert caps is not None
        data.refuse_without_samples()
        return _shapes(job, caps, data.micro_batches)
    if data.window is not None:
        return data.streamed(samples, caps or _find_caps(job, samples, asked), data.window)
    packs_per_step = job.parallel.data * data.micro_batches
    if asked.strategy.target is not None:
        found = caps or _find_caps(job, samples, asked)
        return data.packed(samples, found, packs_per_step, asked.limits.packs)
    top = caps or top_caps(samples, limited_features(job.model))
    whole = data.packed(samples, top, packs_per_step)
    is_joint = partition.is_joint
    leveled = data.with_levels(job, whole, may_lower=caps is None, is_joint=is_joint)
    return leveled or data.packed(samples, caps or _find_caps(job, samples, asked), packs_per_step)


def _find_caps(job: "JobSpec", samples: Lengths, asked: _Asked) -> Caps:
    """The caps of least predicted time per sample, as `omnibal caps` finds them."""
    from omnibal.data.scan_pool import usable_cores
    from omnibal.search import caps as cap_search

    ranks, data, rules = job.parallel.data, asked.data, asked.limits.packs
    request = cap_search.CapSearchRequest(
        job=job,
        lengths=samples,
        packing=data.packing,
        samples_per_step=data.window
        or cap_search.usual_samples_per_step(ranks, data.micro_batches),
        samples=DEFAULT_CAP_SAMPLES,
        seed=data.seed,
        rules=rules,
        rule=cap_search.CapRule.TIME,
    )
    with progress("trying caps", cap_search.max_candidates(request)) as advance:
        found = cap_search.search_caps(request, advance, usable_cores())
    options = found.best.options[-1:] if rules.tokens_alone else found.best.options
    print_notes((f"found {' '.join(options)}", *cap_search.notes(request, found)))
    return found.best


def _shapes(job: "JobSpec", caps: Caps, micro_batches: int) -> "MockData":
    """Packs at the caps, and nothing else."""
    from omnibal.plan_data import MockData

    has_sizes = job.model.images is not None
    return MockData(
        caps=caps,
        micro_batches_per_step=micro_batches,
        image_tokens=IMAGE_TOKENS if has_sizes else None,
    )


def _planned_shapes(job: "JobSpec", asked: _Asked) -> _Planned:
    """The plan of shapes with the parallel sizes that are fastest for them, of a pack a device."""
    from omnibal.planner import PlanRequest, make_plan

    data, gpus = asked.data, asked.strategy.gpus
    caps = data.caps(job.model)
    assert caps is not None
    assert gpus is not None
    data.refuse_without_samples()
    packs = asked.strategy.samples_per_step or max(gpus, DEFAULT_MICRO_BATCHES)
    _, alike = _shapes(job, caps, packs).schedule(job.sized(Parallel(pipeline=1)))
    strategy = replace(asked.strategy, samples_per_step=packs)
    found = _find_strategy(job, alike, caps, replace(asked, strategy=strategy))
    best = found.best
    shapes = _shapes(job, caps, best.micro_batches)
    request = PlanRequest(job=job.sized(best.parallel), data=shapes)
    return _Planned(result=make_plan(request), found=found)


def _find_strategy(
    job: "JobSpec", samples: Lengths, caps: Caps | None, asked: _Asked
) -> "StrategySearch":
    """Parallel sizes and, where not given, caps of least predicted time per sample."""
    from omnibal.data.scan_pool import usable_cores
    from omnibal.search.parallel_sizes import (
        progress_total,
        search_strategies,
    )
    from omnibal.search.strategy import StrategyRequest

    data, strategy, sizes = asked.data, asked.strategy, asked.sizes
    assert strategy.gpus is not None
    usual = _usual_samples_per_step(asked, samples, caps, job.cluster)
    request = StrategyRequest(
        job=job,
        gpus=strategy.gpus,
        lengths=samples,
        packing=data.packing,
        samples_per_step=strategy.samples_per_step or usual,
        samples=DEFAULT_CAP_SAMPLES,
        seed=data.seed,
        rules=asked.limits.packs,
        caps=caps,
        tensor=sizes.tp,
        pipeline=sizes.pp,
        data=sizes.dp,
        expert=sizes.ep,
    )
    with progress("trying strategies", progress_total(request)) as advance:
        return search_strategies(request, advance, usable_cores())


def _usual_samples_per_step(
    asked: _Asked, samples: Lengths, caps: Caps | None, cluster: ClusterConfig
) -> int:
    """Samples per step where none are given; a pack a device at least where all ranks are
    data-parallel, so that each has one."""
    from omnibal.search.caps import usual_samples_per_step
    from omnibal.search.parallel_sizes import strategy_samples_per_step

    gpus, target = asked.strategy.gpus, asked.strategy.target
    assert gpus is not None
    usual = strategy_samples_per_step(gpus, cluster)
    if target is None or not target.has_data_parallelism_alone:
        return usual
    if caps is None:
        # A pack has room for the longest sample at least, and so for many of the mean length. Caps
        # are compared on samples that are drawn, of another mean.
        of_mean = float(samples.tokens.max() / samples.tokens.mean())
        fill = math.ceil(_ROOM_OF_CAPS * gpus * of_mean)
        return max(usual, usual_samples_per_step(gpus, 1), fill)
    return max(usual, math.ceil(gpus * caps["tokens"] / samples.tokens.mean()))


def _models_dumped(strategy: "Strategy") -> dict[str, Any]:
    """Fields of a strategy that are pydantic models, as plain values."""
    models = {"parallel": strategy.parallel, "caps": strategy.caps, "lost": strategy.lost}
    return {name: model.model_dump(mode="json") for name, model in models.items()}


def _make_plan(request: "PlanRequest") -> "PlanResult":
    """Make the plan, or raise an error that says what would fit."""
    from omnibal.planner import make_plan

    try:
        return make_plan(request)
    except DoesNotFit as error:
        shared = _shared(request)
        if shared is None:
            raise _with_advice(request, error) from error
    context = shared.data.levels[0].context
    print_notes([f"packs of the earlier plan do not fit one rank: {context} ranks share each"])
    return _make_plan(shared)


def _shared(request: "PlanRequest") -> "PlanRequest | None":
    """Packs of an earlier plan of one level, shared by ranks; None where that is no way to fit."""
    from omnibal.levels import Level
    from omnibal.plan_data import SampleData
    from omnibal.search.levels import shared_anew

    data = request.data
    if not isinstance(data, SampleData) or data.steps is None or data.levels:
        return None
    if request.job.is_beside:
        return None
    if (request.method, request.recompute) != (PartitionMethod.OMNIBAL, RecomputeRule.CHEAPEST):
        return None
    try:
        shared = shared_anew(request.job, replace(data, levels=(Level(caps=data.caps),)))
    except DoesNotFit:
        return None
    return replace(request, data=shared) if shared.levels[0].context > 1 else None


def _make_plan_of_levels(request: "PlanRequest") -> "PlanResult":
    """Make the plan, and again without levels of no packs: levels are chosen by other packs.

    The steps of an earlier plan keep their levels.
    """
    from omnibal.plan_data import SampleData
    from omnibal.search.level_trial import as_data_has, levels_in_use

    while True:
        result = _make_plan(request)
        data = request.data
        if result.data is None or not isinstance(data, SampleData) or data.steps is not None:
            return result
        used = levels_in_use(data.levels, result.data[0].level, data.least_caps())
        if used == data.levels:
            return result
        left_out = [level for level in data.levels if level not in used]
        print_notes(
            f"no pack is of the level of {level.caps['tokens']:,} tokens: it is left out"
            for level in left_out
        )
        if data.curriculum_steps and len(used) == 1:
            raise UserError(
                f"--curriculum-steps {data.curriculum_steps} was given, and all packs are of one "
                "level: leave it out, or give other --levels"
            )
        caps = used[-1].caps
        request = replace(request, data=replace(data, levels=as_data_has(used, caps), caps=caps))


def _make_plan_of_strategy(
    job: "JobSpec", samples: Lengths, found: "StrategySearch", asked: _Asked
) -> tuple["PlanResult", "StrategySearch"]:
    """The plan of the fastest strategy that fits on all data, and the strategies from it on.

    Strategies were found to fit on samples that were drawn, and all may need slightly more.
    """
    from omnibal.planner import PlanRequest, make_plan
    from omnibal.search.parallel_sizes import without_best

    left, first_error, first = found, None, None
    while True:
        best = left.best
        packs_per_step = best.parallel.data * best.micro_batches
        data = asked.data.packed(samples, best.caps, packs_per_step, asked.limits.packs)
        request = PlanRequest(job=job.sized(best.parallel), data=data)
        first = first or request
        try:
            return make_plan(request), left
        except DoesNotFit as error:
            first_error = first_error or error
        if len(left.ranking) == 1:
            raise _with_advice(first, first_error) from first_error
        left = without_best(left, "does not fit all data")
        old, new = best.parallel.options, left.best.parallel.options
        print_notes([f"{old} fits the samples it was tried on, and not all: taking {new}"])


def _with_advice(request: "PlanRequest", error: DoesNotFit) -> UserError:
    """Add to an error what would fit."""
    from omnibal.search.feasible import does_not_fit_message, find_changes

    with status("looking for what would fit"):
        advice = find_changes(request)
    return UserError(does_not_fit_message(error, advice))


def _print_plan(
    as_json: bool, planned: _Planned, choice: "PlacementChoice", limits: dict[str, Any]
) -> None:
    from omnibal.check import training_obstacles
    from omnibal.report.phases import phases_of_plan, phases_table
    from omnibal.report.tables import memory_table

    result, found, prediction = planned.result, planned.found, planned.prediction
    plan = result.plan
    gap = None if result.search is None else result.search.gap
    notes = training_obstacles(plan)
    if gap:
        notes.append(
            f"the search ended before its proof: stages that are up to {gap:.2%} faster may exist"
        )
    print_notes(notes)
    packs = None if result.data is None else result.data[0]
    windows = window_facts(result)
    if windows is not None:
        print_notes([windows.note])
    elif packs is not None:
        print_notes(notes_on_steps(packs))
    if found is not None and found.gap:
        print_notes([_note_on_choices(found)])
    summary = _plan_summary(plan, prediction) | {"search_gap": gap} | limits
    summary["image_share"] = None if plan.shapes is None else tables.share_of_images(plan)
    summary["window"] = None if windows is None else windows.as_dict()
    summary |= {"levels": levels_of_plan(plan, packs)} | balance_of(plan, result.data)
    if plan.model.encoders:
        summary["encoder"] = _encoder_summary(choice)
    phases = [] if result.data is None else phases_of_plan(plan, *result.data, result.cost_source)
    summary["phases"] = [asdict(phase) for phase in phases]
    strategies = []
    if found is not None:
        summary["strategies"] = [
            {**asdict(strategy), **_models_dumped(strategy)} for strategy in found.ranking
        ]
        summary["strategies_gap"] = found.gap
        strategies = [tables.strategy_table(found, memory_cap_gib(plan.cluster))]
    memory = memory_table(plan)
    assert memory is not None
    of_packs = levels_table(plan, packs), phases_table(phases)
    print_result(
        as_json,
        summary,
        *strategies,
        *(table for table in of_packs if table is not None),
        *tables.encoder_facts(plan, choice),
        tables.stages_table(plan, prediction),
        memory,
        tables.lost_time_table(prediction),
        tables.plan_facts(plan, prediction),
    )


def _note_on_choices(found: "StrategySearch") -> str:
    """How far the best of the strategies is proven."""
    proven = (
        f"the lowest bound of the others, which counts neither memory nor recomputation, is "
        f"{found.gap:.0%} below the best one's time, so another may be at most so much faster"
    )
    if found.gap == 1:
        proven = "not all others have a bound, so that none is proven to be slower"
    return (
        f"of {found.choices:,} choices of sizes and caps the {found.planned:,} of the least "
        f"estimated times were planned: {proven}"
    )


def _encoder_summary(choice: "PlacementChoice") -> dict[str, Any]:
    """The placement of encoders, and both predicted steps; None of what was not planned."""
    return {
        "placement": choice.chosen.value,
        "pipeline_step_ms": choice.step_ms(EncoderPlacement.PIPELINE),
        "beside_step_ms": choice.step_ms(EncoderPlacement.BESIDE),
        "reason": choice.reason,
    }


def _plan_summary(plan: Plan, prediction: Prediction) -> dict[str, Any]:
    # Scripts find the keys of InternVL's towers for every model.
    towers = dict.fromkeys(("vision", "language", *plan.model.towers))
    return {
        "stages": [
            {
                **{f"{tower}_layers": len(stage.layers(tower)) for tower in towers},
                "recompute": stage.recomputed_layers,
                **{f"recompute_{tower}": len(stage.recomputed(tower)) for tower in towers},
                "forward_ms": predicted.forward_ms,
                "backward_ms": predicted.backward_ms,
                "wait_fraction": predicted.wait_fraction,
                "peak_gib": predicted.memory.peak_gib,
            }
            for stage, predicted in zip(plan.stages, prediction.stages, strict=True)
        ],
        "step_ms": prediction.step_ms,
        "ideal_step_ms": prediction.ideal_step_ms,
        "lost_ms": prediction.lost.model_dump(),
        "exchange": prediction.exchange.model_dump(),
        "bubble_fraction": prediction.bubble_fraction,
        "samples_per_second_per_gpu": prediction.samples_per_second_per_gpu,
        "gpu_days": prediction.gpu_days,
        "memory_cap_gib": memory_cap_gib(plan.cluster),
        "cost_source": prediction.cost_source,
        "packs": plan.data.packs if plan.data else None,
        "steps": plan.data.steps if plan.data else None,
    }
