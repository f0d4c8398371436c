"""`omnibal plan`: search a plan and write its directory."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import omnibal.cli.command_tables as tables
import omnibal.cli.options as shared
import omnibal.cli.plan_results as results
from omnibal.base.errors import UserError
from omnibal.base.outputs import check_folder
from omnibal.cli.console import ConsoleListener, print_notes, print_result
from omnibal.cli.help_groups import given_options
from omnibal.data.lengths import Lengths, length_files, read_lengths
from omnibal.families.named import model_notes
from omnibal.job.plan import MAX_EPOCHS, Plan
from omnibal.job.published_errors import errors_of_plan
from omnibal.model.config import ModelConfig
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.limits import (
    DEFAULT_MICRO_BATCHES,
    MAX_PACKS_PER_STEP,
    Caps,
    check_limits,
    memory_cap_gib,
    option_of,
    words,
)
from omnibal.model.parallel import WeightSharding
from omnibal.model.targets import TargetName, trainer_of
from omnibal.packing.pack_settings import PORTION_SAMPLES
from omnibal.packing.packing import PackingMethod
from omnibal.pipeline.baselines import PartitionMethod, RecomputeRule, SplitRule
from omnibal.pipeline.prediction import Prediction
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, ScheduleName
from omnibal.search.conflicts import Feature, check_complete, check_together

if TYPE_CHECKING:  # they import scipy, which `omnibal --help` should not wait for
    from omnibal.search.goal import Goal, GoalData
    from omnibal.search.level_estimates import LevelRule
    from omnibal.search.planning import Planned
    from omnibal.search.step_size import StepRate

DEFAULT_IMAGE_SHARE = 0.5  # image tokens / tokens of synthetic packs
_FEW_STEPS = 20  # optimizer steps below which a fine-tune hardly moves the weights
_CONFLICT_FEATURES = {
    "--max-tiles": Feature.LIMITS,
    "--max-tokens": Feature.LIMITS,
    "--limit": Feature.LIMITS,
    "--method": Feature.SPLIT,
    "--recompute": Feature.SPLIT,
    **{feature.value: feature for feature in Feature},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanDataOptions:
    levels: Annotated[
        str,
        typer.Option(
            "--packing-levels", metavar="auto|hbp|N", help="context-parallel sizes; 1: no CP"
        ),
    ] = "auto"
    curriculum_steps: Annotated[
        int, shared.count_option("first steps on the smallest level only", least=0)
    ] = 0
    max_tiles: Annotated[
        int | None, shared.count_option("max image tiles per pack (default: searched)")
    ] = None
    max_tokens: Annotated[
        int | None, shared.count_option("max language tokens per pack (default: searched)")
    ] = None
    limit: shared.LimitOption = None
    image_share: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="X",
            help=f"image tokens / tokens without data (default: {DEFAULT_IMAGE_SHARE})",
        ),
    ] = None
    lengths: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="data (repeatable; default: packs of --max-tokens)"),
    ] = None
    micro_batches: Annotated[
        int | None,
        shared.count_option(
            f"packs per DP rank and step (default without data: {DEFAULT_MICRO_BATCHES})",
            most=MAX_PACKS_PER_STEP,
        ),
    ] = None
    epochs: Annotated[int, shared.count_option("passes over the data", most=MAX_EPOCHS)] = 1
    seed: shared.SeedOption = 0
    packing: shared.PackingRuleOption = PackingMethod.BALANCED
    mixture: shared.MixtureOption = None
    portion_samples: Annotated[int, shared.count_option("max samples packed at once")] = (
        PORTION_SAMPLES
    )
    window: Annotated[
        int | None, shared.count_option("samples per step in file order (default: shuffle)")
    ] = None
    dispatch: Annotated[
        Literal["on", "off"], typer.Option(help="balance each --window over ranks")
    ] = "on"
    steps_of: Annotated[
        Path | None, typer.Option(metavar="DIR", help="plan whose steps are kept, for other sizes")
    ] = None

    @property
    def level_rule(self) -> "LevelRule":
        """Rule for the number of packing levels. Raise UserError for unknown `levels`."""
        from omnibal.search.level_estimates import MAX_SEARCHED, LevelRule

        rules = {str(count): LevelRule(count=count) for count in range(1, MAX_SEARCHED + 1)}
        rules |= {"auto": LevelRule(), "hbp": LevelRule(is_hbp=True)}
        if self.levels not in rules:
            raise UserError(
                f"--packing-levels {self.levels}: must be auto, hbp, or 1 to {MAX_SEARCHED}"
            )
        return rules[self.levels]

    def files(self) -> list[Path]:
        inputs = filter(None, (self.steps_of, self.mixture))
        return [*inputs, *length_files(self.lengths or [])]

    def caps(self, model: ModelConfig, packed_by_tokens: Lengths | None = None) -> Caps | None:
        """Return the caps of a pack, or None if they are searched.

        `packed_by_tokens`: the samples, if the trainer limits packs by tokens only, else None.
        """
        from omnibal.job.plan_data import caps_of_tokens, limited_features, shape_caps

        given = shared.limits_given(self.limit, self.max_tiles, self.max_tokens)
        if not given and self.lengths:
            return None
        needed = limited_features(model)
        if packed_by_tokens is not None:
            others = [option_of(name) for name in given if name != "tokens"]
            if others:
                raise UserError(
                    f"{words(others)} cannot be given with --for, which packs by tokens"
                )
            # Other features get the max that a pack of the given tokens can hold.
            return caps_of_tokens(packed_by_tokens, needed, given["tokens"])
        if not self.lengths and self.steps_of is None and "tokens" in given:
            is_full = set(given).issuperset(needed)
            if is_full and self.image_share is not None:
                raise UserError(
                    f"--image-share and caps of {words(needed)} are exclusive: drop one"
                )
            share = DEFAULT_IMAGE_SHARE if self.image_share is None else self.image_share
            given = shape_caps(model, given, share)
        check_limits([*given, *needed], model.item_features, model.name)
        if not set(given).issuperset(needed):
            options = words([option_of(name) for name in needed])
            raise UserError(f"give {options}; or none, with --lengths, to have them searched for")
        return Caps.of(**given)

    def goal_data(
        self, model: ModelConfig, samples_per_step: int | None, *, packed_by_tokens: bool
    ) -> "GoalData":
        """Return an earlier plan's steps, synthetic packs, a stream, or samples to pack."""
        from omnibal.job.check import check_and_open
        from omnibal.search.goal import Earlier, Samples, ShapesAlone, Stream

        if self.steps_of is not None:
            earlier, _ = check_and_open(self.steps_of)
            return Earlier(plan=earlier.plan, data=earlier.data, directory=self.steps_of)
        samples: Lengths | None = None
        available: tuple[int, ...] = ()
        if self.lengths:
            samples, available = shared.draw_mixture(
                read_lengths(self.lengths), self.mixture, self.seed
            )
        caps = self.caps(model, samples if packed_by_tokens else None)
        if samples is None:
            assert caps is not None
            return ShapesAlone(
                caps=caps, micro_batches=self.micro_batches, packs_per_step=samples_per_step
            )
        if self.window is not None:
            return Stream(
                lengths=samples,
                caps=caps,
                window=self.window,
                is_dispatched=self.dispatch == "on",
                epochs=self.epochs,
            )
        return Samples(
            lengths=samples,
            caps=caps,
            packing=self.packing,
            epochs=self.epochs,
            seed=self.seed,
            micro_batches=self.micro_batches,
            samples_per_step=samples_per_step,
            curriculum_steps=self.curriculum_steps,
            portion_samples=self.portion_samples,
            available=available,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyOptions:
    gpus: Annotated[int | None, shared.size_option("number of GPUs; unset sizes are searched")] = (
        None
    )
    samples_per_step: Annotated[
        int | None, shared.count_option("global batch size (default: 128 to 512, by --gpus)")
    ] = None
    made_for: Annotated[
        TargetName | None,
        typer.Option("--for", metavar="TRAINER", help=f"{', '.join(TargetName)} (default: own)"),
    ] = None
    compare: Annotated[bool, typer.Option(help="cost of the limits of --for")] = True


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementOptions:
    method: Annotated[PartitionMethod, typer.Option(help="split of the model over stages")] = (
        PartitionMethod.OMNIBAL
    )
    recompute: Annotated[
        RecomputeRule | None, typer.Option(help="recomputed layers (default: by --method)")
    ] = None
    sharding: Annotated[
        Literal["auto", "replicated", "full", "hybrid"] | None,
        typer.Option(
            help="weights; full: ZeRO-3, hybrid: within a node (default: auto with --gpus, else "
            "replicated or the --for trainer's)"
        ),
    ] = None
    encoder: Annotated[
        Literal["auto", "pipeline", "data-parallel"] | None,
        typer.Option(help="encoders (default: auto with --gpus, else pipeline)"),
    ] = None
    schedule: Annotated[Literal["auto", ScheduleName], typer.Option(help="auto: the fastest")] = (
        ONE_FORWARD_ONE_BACKWARD.name
    )

    @property
    def schedule_name(self) -> ScheduleName | None:
        """Name of the schedule, or None to search the fastest."""
        return None if self.schedule == "auto" else self.schedule

    def shardings(self, *, is_free: bool) -> tuple[WeightSharding, ...] | None:
        """Return the shardings to search, or None for the job's own."""
        chosen = self.sharding or ("auto" if is_free else None)
        if chosen == "auto":
            return tuple(WeightSharding)
        return None if chosen is None else (WeightSharding(chosen),)

    def placements(self, *, is_free: bool) -> tuple[EncoderPlacement, ...]:
        """Return the encoder placements to search."""
        chosen = self.encoder or ("auto" if is_free else EncoderPlacement.PIPELINE)
        return tuple(place for place in EncoderPlacement if chosen in ("auto", place))


def plan(
    context: typer.Context,
    given: shared.JobOptions,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="plan directory to write")
    ],
    data: PlanDataOptions,
    strategy: StrategyOptions,
    sizes: shared.SizeOptions,
    partition: PlacementOptions,
    as_json: shared.JsonOption = False,
) -> None:
    """Plan packs, parallel sizes, stages and recomputation."""
    from omnibal.job.plan_files import check_replaceable, save_plan
    from omnibal.pipeline.loader_time import slow_reading
    from omnibal.search import planning

    check_replaceable(output)  # before a search of minutes
    check_folder("-o", output, [*given.files(), *data.files()])
    _check_options(context, data, partition)
    goal = _make_goal(given, data, strategy, sizes, partition)
    planned = planning.plan(goal, ConsoleListener())
    written = save_plan(planned.result, output)  # before the comparisons, which take longer
    # The written plan also names its portions and mixture.
    planned = replace(planned, result=replace(planned.result, plan=written))
    rates = planning.rates_of_steps(goal, planned, ConsoleListener())
    slow = filter(None, [slow_reading(planned.prediction)])
    notes = [*model_notes(given.model), *_step_notes(planned, rates), *slow]
    print_notes([*notes, *results.notes_for_trainer(planned.result)])
    limits: dict[str, Any] = {"made_for": strategy.made_for}
    if strategy.made_for is not None and strategy.compare:
        limits |= results.cost_of_limits(goal, planned, data.packing)
    _print_plan(as_json, planned, rates, limits)


def _step_notes(planned: "Planned", rates: "Sequence[StepRate]") -> list[str]:
    from omnibal.search.step_size import StepSamples, remark

    notes, data = list[str | None](), planned.result.plan.data
    if len(rates) > 1 and planned.strategies is not None:
        notes.append(remark(rates, planned.strategies.samples_per_step))
    if planned.asked_samples is not None and planned.result.data is not None and data is not None:
        asked = min(planned.asked_samples, data.samples)
        notes.append(StepSamples.count(planned.result.data[0]).note(asked))
    if data is not None and planned.strategies is not None and data.steps < _FEW_STEPS:
        notes.append(f"only {data.steps} steps in all; lower --samples-per-step or raise --epochs")
    return [note for note in notes if note is not None]


def _check_options(
    context: typer.Context, data: PlanDataOptions, partition: PlacementOptions
) -> None:
    """Raise UserError for conflicting or missing options."""
    given: dict[Feature, str] = {}  # options as typed, for messages
    for option, value in given_options(context):
        text, feature = option.opts[0], _CONFLICT_FEATURES.get(option.opts[0])
        if feature is not None:
            if value is False:
                text = option.secondary_opts[0]
            elif value is not True and not isinstance(value, list):
                text = f"{text} {value}"
            given[feature] = f"{given[feature]}, {text}" if feature in given else text
    # Values that change nothing conflict with nothing.
    if data.levels in ("auto", "1"):
        given.pop(Feature.LEVELS, None)
    if partition.schedule_name in (None, ONE_FORWARD_ONE_BACKWARD.name):
        given.pop(Feature.SCHEDULE, None)
    if partition.encoder == EncoderPlacement.DATA_PARALLEL:
        given[Feature.ENCODERS] = Feature.ENCODERS.value
    check_together(given)
    # An earlier plan brings its own lengths.
    has_samples = {Feature.SAMPLES: ""} if Feature.EARLIER in given else {}
    check_complete({**given, **has_samples})


def _make_goal(
    given: shared.JobOptions,
    data: PlanDataOptions,
    strategy: StrategyOptions,
    sizes: shared.SizeOptions,
    partition: PlacementOptions,
) -> "Goal":
    from omnibal.search.goal import Free, Goal
    from omnibal.search.strategy import FreeSizes

    free_sizes, fixed_sizes = None, None
    if strategy.gpus is None:
        fixed_sizes = sizes.parallel()
    else:  # sizes that are given stay fixed in the search
        free_sizes = FreeSizes(
            gpus=strategy.gpus,
            tensor=sizes.tp,
            pipeline=sizes.pp,
            data=sizes.dp,
            expert=sizes.ep,
            sequence_parallel=sizes.sequence_parallel,
        )
    job = given.job(fixed_sizes, trainer=trainer_of(strategy.made_for))
    placements = partition.placements(is_free=free_sizes is not None)
    if partition.encoder != EncoderPlacement.DATA_PARALLEL and not job.model.encoders:
        placements = (EncoderPlacement.PIPELINE,)
    is_by_tokens = job.trainer.packs.tokens_alone
    goal_data = data.goal_data(job.model, strategy.samples_per_step, packed_by_tokens=is_by_tokens)
    # Only the search splits and recomputes jointly; baselines of the literature take first layers.
    is_joint = partition.method is PartitionMethod.OMNIBAL
    usual = RecomputeRule.CHEAPEST if is_joint else RecomputeRule.FRONT
    free = Free(
        sizes=free_sizes,
        levels=data.level_rule,
        placements=placements,
        shardings=partition.shardings(is_free=free_sizes is not None),
        split=SplitRule(method=partition.method, recompute=partition.recompute or usual),
        schedule=partition.schedule_name,
    )
    return Goal(job=job, data=goal_data, free=free)


def _print_plan(
    as_json: bool, planned: "Planned", rates: "Sequence[StepRate]", limits: dict[str, Any]
) -> None:
    from omnibal.job.check import training_obstacles
    from omnibal.report import plan_tables
    from omnibal.search.step_size import StepSamples

    result, search, prediction = planned.result, planned.strategies, planned.prediction
    plan, choice, encoders = result.plan, planned.placement, result.plan.data_parallel_encoders
    gap = None if result.search is None else result.search.gap
    notes = training_obstacles(plan)
    if gap:
        notes.append(f"the stage search ended early: stages up to {gap:.2%} faster may exist")
    packs = None if result.data is None else result.data[0]
    windows = results.window_facts(result)
    if windows is not None:
        notes.append(windows[1])
    if search is not None and search.gap:
        notes.append(
            f"{search.planned:,} of {search.choices:,} choices of sizes and caps were planned; by "
            f"lower bounds another may be at most {search.gap:.0%} faster"
        )
    print_notes(notes)
    summary = _plan_summary(plan, prediction) | {"search_gap": gap} | limits
    summary["image_share"] = None if plan.shapes is None else tables.share_of_images(plan)
    summary["window"] = None if windows is None else windows[0]
    summary["levels"] = results.levels_of_plan(plan, packs)
    summary |= results.balance_of(result)
    if plan.model.encoders:
        summary["encoder"] = {
            "placement": choice.chosen,
            "pipeline_step_ms": choice.step_ms(EncoderPlacement.PIPELINE),
            "data_parallel_step_ms": choice.step_ms(EncoderPlacement.DATA_PARALLEL),
            "reason": choice.reason,
            **({} if encoders is None else {"sharded_ranks": encoders.sharded}),
        }
    lines = []
    if packs is not None and windows is None:  # a window fixes the samples per step
        size = StepSamples.count(packs)
        summary["step"] = {**asdict(size), "source": planned.step_source}
        lines.append(tables.step_text(size, planned.step_source))
    summary["step_sizes"] = rates
    if len(rates) > 1:
        lines.append(tables.rates_text(rates))
    summary |= planned.sharding.as_dict() | planned.schedule.as_dict()
    phases = results.phases_of_plan(result)
    summary["phases"] = phases
    strategies, close = None, None
    if search is not None:
        summary["strategies"] = [
            {**asdict(strategy), "caps": strategy.caps, "schedule": strategy.schedule.chosen}
            for strategy in search.ranking
        ]
        summary["strategies_gap"] = search.gap
        strategies = tables.strategy_table(search, memory_cap_gib(plan.cluster))
        close = summary["close_call"] = tables.close_call(search, errors_of_plan(plan))
    print_result(
        as_json,
        summary,
        *lines,
        strategies,
        close,
        results.levels_table(plan, packs),
        results.phases_table(phases),
        tables.encoder_facts(plan, choice),
        plan_tables.stages_table(plan),
        plan_tables.peak_table(plan),
        tables.lost_time_table(prediction),
        tables.plan_facts(plan, prediction, planned.sharding, planned.schedule),
    )


def _plan_summary(plan: Plan, prediction: Prediction) -> dict[str, Any]:
    # Scripts read `vision_layers` for every model, even without such a tower.
    towers = dict.fromkeys(("vision", "language", *plan.model.towers))
    return {
        "stages": [
            {
                **{f"{tower}_layers": stage.number_of_layers(tower) for tower in towers},
                "recompute": stage.recomputed_layers,
                **{f"recompute_{tower}": len(stage.recomputed_in(tower)) for tower in towers},
                "forward_ms": predicted.forward_ms,
                "backward_ms": predicted.backward_ms,
                "wait_fraction": predicted.wait_fraction,
                "peak_gib": predicted.memory.peak_gib,
            }
            for stage, predicted in zip(
                plan.merge_chunks(plan.stages), prediction.stages, strict=True
            )
        ],
        "step_ms": prediction.step_ms,
        "ideal_step_ms": prediction.lost.ideal_ms,
        "lost_ms": prediction.lost,
        "exchange": prediction.exchange,
        "bubble_fraction": prediction.bubble_fraction,
        "samples_per_second_per_gpu": prediction.samples_per_second_per_gpu,
        "gpu_days": prediction.gpu_days,
        "memory_cap_gib": memory_cap_gib(plan.cluster),
        "cost_source": prediction.cost_source,
        "published_errors": errors_of_plan(plan),
        "packs": plan.data.packs if plan.data else None,
        "steps": plan.data.steps if plan.data else None,
    }
