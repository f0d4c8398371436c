"""Checks of a plan directory before training, and reasons why a plan cannot be trained."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths
from omnibal.job.plan import PACKS_FILE, DataPlan, Plan, SettingsHashes, read_plan
from omnibal.job.plan_data import model_of_lengths, packs_of_steps
from omnibal.job.plan_files import PlanFiles, iterate_portions, make_job, read_plan_data
from omnibal.job.plan_portions import count_through_run, portion_of_step, read_portion
from omnibal.job.planner import check_memory, predict_memories, predict_plan, scale_prediction
from omnibal.model.config import LanguageConfig, ModelConfig
from omnibal.model.encoders import ClipsEncoder, ImagesEncoder, TilesEncoder
from omnibal.model.layer_kinds import ExpertsConfig
from omnibal.model.levels import exchange_mistake
from omnibal.model.limits import check_limits, words
from omnibal.model.parallel import WeightSharding, expert_counts
from omnibal.model.targets import OWN, trainer_of
from omnibal.model.units import LANGUAGE
from omnibal.packing.balance_metrics import seen_by_step
from omnibal.packing.packs import ScheduledPacks
from omnibal.packing.shares import shares_of
from omnibal.packing.steps import most_slots, steps_of
from omnibal.pipeline.prediction import Prediction
from omnibal.pipeline.unit_runs import check_stages

_TRAINED_ENCODERS = {"vision": (TilesEncoder, ImagesEncoder), "audio": (ClipsEncoder,)}
# Values that the trainer builds, of settings with other values in the planner.
_TRAINED_SETTINGS: Mapping[type, Mapping[str, object]] = {
    ImagesEncoder: {
        "projector": "mlp",
        "class_token": False,
        "embed_norm": False,
        "final_norm": False,
        "bias": True,
        "qk_norm": False,
        "layer_scale_init": None,
    },
    LanguageConfig: {
        "activation": "gated",
        "positions": "rotary",
        "bias": False,
        "norm_bias": False,
        "sinks": False,
        "post_norms": False,
    },
    ExpertsConfig: {"selection_bias": False},
}
_REPLAN = "make the plan again with `omnibal plan`"
_FIGURE_TOLERANCE = 1e-6  # relative: BLAS of two machines sums in different orders


def check_plan(directory: Path) -> list[str]:
    """Return a sentence per passed check of a plan directory, without a device."""
    return check_and_open(directory)[1]


def open_plan(directory: Path, *, to_train: bool = False) -> PlanFiles:
    """Read and check a plan directory. `to_train`: first portion only, prediction not compared."""
    files, _ = check_and_open(directory, to_train=to_train)
    if to_train or files.plan.data is None or not files.plan.data.portions:
        return files
    return replace(files, data=read_plan_data(files.plan, directory))


def check_and_open(directory: Path, *, to_train: bool = False) -> tuple[PlanFiles, list[str]]:
    """Check a plan directory; return its files, with at most one portion, and passed checks."""
    plan = read_plan(directory)
    _check_sharded(plan, directory)
    job = make_job(plan, directory)
    obstacle = job.split_obstacle(plan.schedule)
    if obstacle is not None:
        raise UserError(
            f"{directory}: schedule {plan.schedule.name} splits backwards, but "
            f"{obstacle}: drop schedule, or {_REPLAN}"
        )
    can_be_cut = f"{plan.model.name} can be cut for {plan.parallel}"
    passed = ["plan.json follows the schema", can_be_cut, _check_partition(plan)]
    data, shapes = plan.data, plan.data or plan.shapes
    if shapes is not None:
        check_limits(shapes.caps.names, plan.model.item_features, plan.model.name)
    files = PlanFiles(plan=plan, job=job, data=None, directory=directory)
    if data is not None and data.portions:
        first, lines = _check_portion(files, data, 0, to_train=to_train)
        files = replace(files, data=first)
        passed += [f"first portion: {line}" for line in lines]
        # Training checks each other portion when it begins: a start should not read terabytes.
        if not to_train:
            for index in range(1, len(data.portions)):
                _check_portion(files, data, index, to_train=False)
            passed += [f"all {len(data.portions):,} portions of {data.epochs:,} epochs are valid"]
            passed += _check_mixture(data, iterate_portions(data, directory))
        passed += _check_fewest(data)
    elif shapes is not None:
        files = replace(files, data=read_plan_data(plan, directory))
        if data is not None:
            packs, lengths = files.steps
            passed += _check_packs(plan, data, lengths, packs)
            passed += _check_mixture(data, [files.steps])
        costs = _check_costs(files, to_train=to_train)
        passed += [f"costs are of {job.cost.source}", costs]
    elif plan.prediction is not None:
        raise UserError(
            "the stored prediction is of another plan: this one has neither data nor shapes, "
            f"so no steps; remove `prediction` from plan.json, or {_REPLAN}"
        )
    else:
        passed.append("the plan has neither data nor shapes: memory is not checked")
    return files, passed + _check_settings(plan)


def _check_mixture(data: DataPlan, portions: Iterable[tuple[ScheduledPacks, Lengths]]) -> list[str]:
    """Return the mixture's sentences; raise unless its sample counts match the packs."""
    mixture = data.mixture
    if mixture is None:
        return []
    planned = np.array([source.seen for source in mixture.sources]).T  # [steps, sources]
    counts, names = np.zeros_like(planned), [source.name for source in mixture.sources]
    for packs, lengths in portions:
        if names != list(lengths.source_names):
            raise UserError(
                f"data.mixture is of {', '.join(names)}, and the lengths of "
                f"{', '.join(lengths.source_names)}; {_REPLAN}"
            )
        counts += seen_by_step(packs, lengths, mixture.by_step)
    if mixture.by_step[-1] != data.steps or (planned != counts).any():
        place = int((planned != counts).any(axis=1).argmax())
        raise UserError(
            f"data.mixture says that {planned[place].tolist()} samples of {', '.join(names)} are "
            f"seen by step {mixture.by_step[place]:,} of {data.steps:,}, and the packs have "
            f"{counts[place].tolist()}; correct it, or {_REPLAN}"
        )
    return mixture.sentences()


def _check_portion(
    files: PlanFiles, data: DataPlan, index: int, *, to_train: bool
) -> tuple[tuple[ScheduledPacks, Lengths], list[str]]:
    """Read and check one portion as a separate plan; return packs, lengths and passed checks."""
    assert files.directory is not None, "portions are read from files"
    epoch, number = divmod(index, data.portions_per_epoch)
    plan, portion_data = files.plan.of_portion(index), data.of_portion(index)
    packs, lengths = read_portion(data, index, files.directory)
    if plan.prediction is not None:
        share = portion_data.samples / (data.epochs * data.samples)
        prediction = scale_prediction(plan.prediction, share)
        plan = plan.model_copy(update={"prediction": prediction})
    portion_files = replace(files, plan=plan, data=(packs, lengths))
    try:
        passed = _check_packs(plan, portion_data, lengths, packs)
        passed.append(_check_costs(portion_files, to_train=to_train))
    except UserError as error:
        raise UserError(f"portion {number} of epoch {epoch}: {error}") from error
    return (packs, lengths), passed


def _check_fewest(data: DataPlan) -> list[str]:
    """Return the gap of an epoch's packs above the lower bound; raise if it is negative."""
    bound = data.fewest_packs
    if bound is None:
        return []
    packs = sum(portion.packs for portion in data.portions[: data.portions_per_epoch])
    if packs < bound and not data.left_out:
        raise _data_error("fewest_packs", bound, f"an epoch has {packs:,} packs")
    return [f"an epoch has {packs:,} packs, {packs / bound - 1:.3%} above the lower bound"]


def _check_settings(plan: Plan) -> list[str]:
    """Raise if `model` or `data` was edited: some settings change no figure checked before."""
    hashes = plan.settings_sha256
    if hashes is None:  # not written by `omnibal plan`
        return []
    actual = SettingsHashes.compute(plan.model, plan.data)
    for (part, planned), (_, found) in zip(hashes, actual, strict=True):
        if planned != found:
            raise UserError(
                f"`{part}` of plan.json was edited, as settings_sha256 differs: restore `{part}`, "
                f"{_REPLAN}, or remove settings_sha256 if the edit is meant"
            )
    settings = "the model's settings" if plan.data is None else "settings of model and data"
    return [f"{settings} are as planned"]


def open_portion(files: PlanFiles, step: int) -> tuple[range, ScheduledPacks, Lengths]:
    """Read and check the portion that holds `step`; return its steps, packs and lengths."""
    data = files.plan.data
    if data is None or not data.portions:
        packs, lengths = files.steps
        return range(packs.steps), packs, lengths
    index = portion_of_step(data, step)
    (packs, lengths), _ = _check_portion(files, data, index, to_train=True)
    steps = range(*data.first_steps[index : index + 2])
    return steps, count_through_run(packs, data, index), lengths


def _check_sharded(plan: Plan, directory: Path) -> None:
    """Raise if sharded weights conflict with the plan's trainer or precision."""
    # Checked before JobSpec, as its messages name command-line options, not keys of plan.json.
    parallel, trainer = plan.parallel, trainer_of(plan.made_for)
    ranks = f"{directory}: parallel.sharded is {parallel.sharded} of parallel.data {parallel.data}"
    if parallel.data > 1 and parallel.sharding not in trainer.shardings:
        sizes = {WeightSharding.REPLICATED: 1, WeightSharding.FULL: parallel.data}
        able = " or ".join(f"{way} ({sizes.get(way, 'between')})" for way in trainer.shardings)
        raise UserError(
            f"{ranks}, and weights of {trainer.title}, which made_for names, are {able}: set "
            f"parallel.sharded so, remove made_for, or {_REPLAN}"
        )
    if parallel.sharded > 1 and plan.precision == "fp8":
        raise UserError(
            f'{ranks}, and sharded weights are not supported with precision "fp8": set '
            f"parallel.sharded to 1, or {_REPLAN}"
        )


def training_obstacles(plan: Plan) -> list[str]:
    """Return reasons why a valid plan cannot be trained here, or by its target if it has one."""
    only_shapes = "the plan has shapes only and no data, so it cannot be trained"
    if plan.made_for is not None:
        return [] if plan.data is not None else [only_shapes]
    schedule, stages, adapters = plan.schedule, plan.parallel.pipeline, plan.adapters
    foreign, unquantised = model_obstacle(plan.model), precision_obstacle(plan)
    is_hybrid = plan.model.language.is_hybrid
    studied, shares = "the plan can be studied but not trained", "context-parallel packs"
    obstacles = {
        only_shapes: plan.data is None,
        f"the lengths do not name their data: {studied}; to train, plan with one file of `omnibal "
        "lengths`": plan.data is not None and plan.data.origin is None,
        f"the plan's schedule is {schedule.name}, and the trainer runs "
        f"{words(sorted(OWN.schedules))}: {studied}": schedule.name not in OWN.schedules,
        f"{foreign}: {studied}": foreign is not None,
        f"{unquantised}: {studied}": unquantised is not None,
        "adapters of experts' matrices are not trained: set experts of adapters to false": (
            adapters is not None and adapters.experts
        ),
        "adapters are not trained in FP8: plan with --precision bf16": (
            adapters is not None and plan.precision == "fp8"
        ),
        f"schedule has {schedule.chunks} chunks per stage, and the pipeline only one stage: leave "
        "schedule out": schedule.chunks > 1 and stages == 1,
        # Ranks of a shared pack must reach it in the same order, or their collectives deadlock.
        f"{shares} with schedule {schedule.name} run in orders that depend on a rank's number of "
        "micro-batches: plan with levels of context 1, or with --schedule interleaved": (
            plan.has_shared_packs and not schedule.rule(stages, schedule.chunks, 1).is_prefix_closed
        ),
        f"{shares} of {plan.model.name} need states of its gated delta layers exchanged, which the "
        "trainer does not: plan with --packing-levels 1": plan.has_shared_packs and is_hybrid,
        f"{shares} of {plan.model.name} need its audio features exchanged, which the trainer does "
        "not: plan with levels of context 1": plan.has_shared_packs and plan.model.takes_audio,
        f"{shares} of {plan.model.name} need features of data-parallel encoders of images at "
        "native resolution exchanged, which the trainer does not: plan with --encoder pipeline, or "
        "levels of context 1": (
            plan.has_shared_packs and bool(plan.model.images and plan.data_parallel_encoders)
        ),
    }
    return [obstacle for obstacle, is_true in obstacles.items() if is_true]


def precision_obstacle(plan: Plan) -> str | None:
    """Return why the trainer cannot train in the plan's precision, or None."""
    if plan.precision != "fp8":
        return None
    obstacles = {
        "experts, which the trainer multiplies in bf16 only": bool(expert_counts(plan.model)),
        "gated delta layers": plan.model.language.is_hybrid,
        "context-parallel packs, as Transformer Engine lacks their attention": (
            plan.has_shared_packs
        ),
        "data-parallel encoders": plan.data_parallel_encoders is not None,
    }
    reason = next((reason for reason, is_true in obstacles.items() if is_true), None)
    return None if reason is None else f"precision fp8 does not go with {reason}"


def model_obstacle(model: ModelConfig) -> str | None:
    """Return why the trainer cannot build a model, or None."""
    foreign = [
        f"an encoder {name} of {tower.kind}"
        for name, tower in model.encoders.items()
        if not isinstance(tower, _TRAINED_ENCODERS.get(name, ()))
    ]
    for name, tower in model.encoders.items():
        foreign += _foreign_settings(name, tower)
    kinds = list(dict.fromkeys(model.language.kinds))
    foreign_kinds = [
        f"layers of kind {kind.name}{_foreign_experts(kind.experts)}"
        for kind in kinds
        if kind.window or kind.latent or _foreign_experts(kind.experts)
    ]
    if len({kind.linear for kind in kinds} - {None}) > 1 or len({k.experts for k in kinds}) > 1:
        names = " and ".join(kind.name for kind in kinds)
        foreign_kinds = [f"layers of kinds {names} together"]
    foreign += [*foreign_kinds, *_foreign_settings(LANGUAGE, model.language)]
    if model.language.prediction_layers > 1:
        foreign.append(f"{model.language.prediction_layers} prediction layers")
    if not foreign:
        return None
    return (
        f"not trainable here: {model.name} has {', '.join(foreign)} (supported: encoder vision of "
        "tiles, or of images as in Qwen2-VL to Qwen3.5; encoder audio of clips; full attention "
        "with rotary positions, gated delta layers; gated feed-forwards, or Qwen's experts, in all "
        "layers; a prediction layer)"
    )


def _foreign_settings(name: str, part: BaseModel) -> list[str]:
    """Return settings of a part of the model that the trainer does not build."""
    settings, trained = dict(part), _TRAINED_SETTINGS.get(type(part), {})
    return [f"{name}.{key} {settings[key]}" for key in trained if settings[key] != trained[key]]


def _foreign_experts(experts: ExpertsConfig | None) -> str:
    """Return MoE settings that the trainer does not build, in brackets; empty if none."""
    if experts is None:
        return ""
    foreign = _foreign_settings("experts", experts)
    # Core's router always normalizes sigmoids, and refuses a softmax over one expert.
    if experts.score == "sigmoid" and not experts.normalized:
        foreign.append("sigmoid scores that are not normalized")
    if experts.experts_per_token == 1 and experts.normalized:
        foreign.append("one expert a token, normalized")
    return f" (with {', '.join(foreign)})" if foreign else ""


def _check_partition(plan: Plan) -> str:
    """Raise unless stages hold every unit once, in order, and recompute validly at all levels."""
    chunks = plan.schedule.chunks
    needed = plan.parallel.pipeline * chunks
    if len(plan.stages) != needed:
        of_chunks = f" with {chunks} chunks each" if chunks > 1 else ""
        raise UserError(
            f"the plan has {len(plan.stages)} entries in stages for pipeline size "
            f"{plan.parallel.pipeline}{of_chunks}, which needs {needed}; correct parallel.pipeline "
            f"or schedule, or {_REPLAN}"
        )
    for level in range(len(plan.levels)):
        try:
            check_stages(plan.pipeline_model, plan.stages_at(level))
        except UserError as error:
            raise UserError(f"levels[{level}]: {error}") from error
    recomputed = {level.recompute for level in plan.levels}
    if plan.parallel.routing_ranks > 1 and len(recomputed) > 1:
        # A recomputed layer repeats its all-to-all in backward, which all ranks must join.
        raise UserError(
            f"levels recompute different layers with {plan.parallel.options}, and its "
            f"{plan.parallel.routing_ranks} lockstep ranks would deadlock: give all levels the "
            f"same recompute, or {_REPLAN}"
        )
    check_stages(plan.pipeline_model, plan.stages)
    layers = "every layer" if plan.data_parallel_encoders is None else "every language layer"
    of_chunks = f" of {chunks} chunks" if chunks > 1 else ""
    stages = f"{plan.parallel.pipeline} stages{of_chunks}"
    return f"{stages} hold {layers} of {plan.model.name} once, in order"


def _check_costs(files: PlanFiles, *, to_train: bool) -> str:
    """Raise if a stage exceeds its memory, or the prediction differs unless `to_train`."""
    plan, job = files.plan, files.job
    packs, lengths = files.steps
    workload = job.workload(packs, lengths, plan.pack_levels)
    if plan.prediction is None:
        memories = predict_memories(plan, job, workload)
    else:
        prediction = predict_plan(plan, job, packs, workload)
        memories = [stage.memory for stage in prediction.stages]
    passed = check_memory(memories, job)
    if plan.prediction is not None and not to_train:
        _check_prediction(plan.prediction, prediction)
    return passed


def _check_prediction(stored: Prediction, predicted: Prediction) -> None:
    """Raise if a figure of the new prediction differs from the plan's."""
    given = dict(_list_figures("prediction", stored))
    actual = dict(_list_figures("prediction", predicted))
    for name, value in actual.items():
        stored_value = given.get(name)
        is_same = stored_value == value
        if isinstance(stored_value, float) and isinstance(value, float):
            # A part of a step may be close to 0, so its error is relative to the step.
            size = predicted.step_ms if name.endswith("_ms") else max(abs(value), 1e-6)
            is_same = abs(stored_value - value) <= _FIGURE_TOLERANCE * size
        if not is_same:
            texts = [f"{x:.6g}" if isinstance(x, float) else str(x) for x in (stored_value, value)]
            raise UserError(
                "the stored prediction is of another plan or version of the costs: "
                f"{name} is {texts[0]}, and by costs from {predicted.cost_source} {texts[1]}; "
                f"remove `prediction` from plan.json, or {_REPLAN}"
            )


Figure = float | str | None


def _list_figures(
    name: str, value: BaseModel | tuple[BaseModel, ...] | Figure
) -> Iterator[tuple[str, Figure]]:
    """Yield every number and text of a prediction with its place in plan.json."""
    if isinstance(value, BaseModel):
        for field, inner in value:
            yield from _list_figures(f"{name}.{field}", inner)
    elif isinstance(value, tuple):
        for index, inner in enumerate(value):
            yield from _list_figures(f"{name}[{index}]", inner)
    else:
        yield name, value


def _check_packs(plan: Plan, data: DataPlan, lengths: Lengths, packs: ScheduledPacks) -> list[str]:
    """Check packs against their lengths and plan.json; return a sentence per check."""
    if data.origin != lengths.origin:
        raise UserError(
            "data.origin of plan.json and of lengths.parquet differ: restore the file, or "
            f"{_REPLAN}"
        )
    if model_of_lengths(plan.model, lengths) != plan.model:
        raise UserError(
            "the lengths were scanned with another tiling, or other min_pixels or max_pixels, than "
            f"plan.json has, so images would have other token counts: correct it, or {_REPLAN}"
        )
    for name, counted, planned in (
        ("samples", len(lengths), data.samples),
        ("packs", len(packs), data.packs),
        ("steps", packs.steps, data.steps),
        ("epochs", len(np.unique(packs.epoch)), data.epochs),
    ):
        if counted != planned:
            raise _data_error(name, planned, f"the plan's files hold {counted:,}")
    if data.curriculum_steps > packs.steps:
        limit = f"may be no more than the plan's {packs.steps:,} steps"
        raise _data_error("curriculum_steps", data.curriculum_steps, limit)
    samples = _check_samples(data, lengths, packs)
    names = [*lengths.item_names, "tokens"]
    for name in names:
        sums = packs.packs.sums(lengths.column(name))
        wrong = packs.column(name) != sums
        _refuse_rows(wrong, f"has other {name}", "they must be the sum of its samples'")
    _refuse_outside(packs.level, "level", len(plan.pack_levels))
    for index, level in enumerate(plan.levels):
        mistake = exchange_mistake(plan.model, plan.parallel, level)
        if mistake is not None:
            raise UserError(f"levels[{index}]: {mistake}")
    contexts = ", ".join(str(level.context) for level in plan.levels)
    levels = f"packs have {len(plan.levels)} levels of context size {contexts}"
    caps = data.caps.join("or") if not plan.levels else "the caps of its level"
    caps_of_levels = [level.caps for level in plan.pack_levels]
    over = [
        packs.packs.sums(lengths.column(name))
        > np.array([level_caps[name] for level_caps in caps_of_levels])[packs.level]
        for name in data.caps.names
    ]  # [features, packs]
    _refuse_rows(np.any(over, axis=0), "exceeds a cap", f"no pack may exceed {caps}")
    return [
        "packs and lengths are as planned",
        "lengths, plan and model agree on the data and on how images are cut",
        f"{len(packs):,} packs in {packs.steps:,} steps, as plan.json says",
        samples,
        f"{words(names)} of every pack are the sums of its samples'",
        *([levels] if plan.levels else []),
        f"no pack exceeds {caps}",
        _check_places(plan, data, packs),
        _check_steps(plan, data, packs),
    ]


def _check_samples(data: DataPlan, lengths: Lengths, packs: ScheduledPacks) -> str:
    """Raise unless every epoch has each sample once, except planned omissions."""
    sizes = np.diff(packs.packs.offsets)
    _refuse_rows(sizes < 1, "is empty", "every pack must hold a sample")
    sample_epoch = np.repeat(packs.epoch, sizes)
    left_out = 0
    for epoch in range(data.epochs):
        samples = packs.packs.samples[sample_epoch == epoch]
        inside = samples[(samples >= 0) & (samples < len(lengths))]
        times = np.bincount(inside, minlength=len(lengths))  # [samples]
        left_out += int(np.count_nonzero(times == 0))
        if len(inside) < len(samples) or (times > 1).any() or left_out > data.left_out:
            raise UserError(
                f"epoch {epoch} leaves out {np.count_nonzero(times == 0):,} of {len(lengths):,} "
                f"samples, repeats {np.count_nonzero(times > 1):,}, and names "
                f"{len(samples) - len(inside):,} that do not exist; {_REPLAN}"
            )
    if left_out != data.left_out:
        raise _data_error("left_out", data.left_out, f"packs leave out {left_out:,} samples")
    if left_out:
        return f"no sample comes twice in an epoch, and {left_out:,} are left out, as planned"
    return f"every one of {len(lengths):,} samples comes exactly once in each epoch"


def _check_places(plan: Plan, data: DataPlan, packs: ScheduledPacks) -> str:
    """Raise unless steps, ranks and slots are in range, sorted and without gaps."""
    step, rank, slot, epoch = packs.step, packs.dp_rank, packs.slot, packs.epoch
    # An epoch's odd step may have up to 1.5 times the micro-batches, and a partial round per level.
    # Windows have exact maxima. Other maxima are the first portion's; later ones may have more.
    ranks, slots = plan.parallel.data, data.micro_batches_per_step
    if not data.packs_are_maxima:
        slots = most_slots(data.packs_per_step, ranks) + len(plan.levels)
    elif data.window is None:
        slots = 2 * slots
    _refuse_rows(step < 0, "has no such step", "steps count from 0")
    _refuse_outside(rank, "dp_rank", ranks)
    _refuse_outside(slot, "slot", slots)
    step_up, rank_up, slot_up = (np.diff(column, prepend=-1) for column in (step, rank, slot))
    same_rank = (step_up == 0) & (rank_up == 0)
    in_order = (step_up > 0) | (step_up == 0) & (rank_up > 0) | same_rank & (slot_up > 0)
    _refuse_rows(~in_order, "is out of order", "rows are sorted by step, dp_rank and slot")
    if plan.levels:
        context = np.array([level.context for level in plan.levels])[packs.level]
        _refuse_rows(
            rank % context != 0,
            "does not begin a context-parallel group",
            "dp_rank must be a multiple of its level's context size",
        )
        # Ranks of a (step, slot) run together, so all its packs have one context size.
        place = step * (int(slot.max()) + 1) + slot
        _, first, of_place = np.unique(place, return_index=True, return_inverse=True)
        _refuse_rows(
            context != context[first][of_place],
            "has another context size than a pack of the same step and slot",
            "all packs of a step and slot must have one context size",
        )
    # Context-parallel ranks would deadlock after a slot without a pack on some rank: warm-up
    # depends on each rank's number of micro-batches.
    shares = shares_of(packs, plan.pack_levels)
    before = np.append(-1, shares.slot[:-1])
    same_rank = (np.diff(shares.step, prepend=-1) == 0) & (np.diff(shares.dp_rank, prepend=-1) == 0)
    after_gap = np.zeros(len(packs), bool)
    after_gap[shares.pack[shares.slot != np.where(same_rank, before + 1, 0)]] = True
    _refuse_rows(after_gap, "leaves out a slot", "slots of a rank count from 0 in each step")
    _refuse_rows(step_up > 1, "leaves out a step", "steps count from 0")
    epoch_change = np.diff(epoch, prepend=0)
    mixed = (epoch_change < 0) | ((step_up == 0) & (epoch_change > 0))
    _refuse_rows(mixed, "is of another epoch", "a step has one epoch, and epochs count up")
    return f"steps, ranks and slots are complete for data-parallel size {ranks}"


def _check_steps(plan: Plan, data: DataPlan, packs: ScheduledPacks) -> str:
    """Raise unless steps have the planned sizes or windows, and hash."""
    steps = steps_of(packs)
    if data.window is None:
        passed, actual = _check_step_sizes(plan, data, packs), steps.sha256
    else:
        passed, actual = _check_windows(data, data.window, packs), steps.window_sha256
    if actual != data.steps_sha256:
        # A resumed run takes over another plan only if these hashes agree.
        found = f"the packs' steps have {actual[:12]}"
        raise _data_error("steps_sha256", data.steps_sha256[:12], found)
    return f"{passed}, as plan.json says"


def _check_windows(data: DataPlan, window: int, packs: ScheduledPacks) -> str:
    """Raise unless steps are the stream's windows in order, with the planned maxima."""
    for name, given, actual in (
        ("packs_per_step", data.packs_per_step, int(np.bincount(packs.step).max())),
        ("micro_batches_per_step", data.micro_batches_per_step, int(packs.slot.max()) + 1),
    ):
        if given != actual:
            raise _data_error(name, given, f"the maximum over steps is {actual:,}")
    windows = -(-data.samples // window)
    sizes = np.diff(packs.packs.offsets)
    read_at = packs.packs.samples // window + np.repeat(packs.epoch, sizes) * windows
    moved = read_at != np.repeat(packs.step, sizes)  # [samples in packs]
    _refuse_rows(
        np.logical_or.reduceat(moved, packs.packs.offsets[:-1]),
        "has a sample of another window",
        f"a step is {window:,} samples in the order of the lengths",
    )
    return f"steps are windows of {window:,} samples"


def _check_step_sizes(plan: Plan, data: DataPlan, packs: ScheduledPacks) -> str:
    """Raise unless all steps of an epoch but one have `packs_per_step` packs, or may vary."""
    if data.samples_per_step is not None:
        return f"steps have {len(packs.packs.samples) / packs.steps:,.0f} samples in the mean"
    ranks = plan.parallel.data
    slots = -(-data.packs_per_step // ranks)
    if data.micro_batches_per_step != slots:
        found = f"must be {slots}: {data.packs_per_step} packs_per_step over {ranks} ranks"
        raise _data_error("micro_batches_per_step", data.micro_batches_per_step, found)
    sizes = packs_of_steps(packs, plan.pack_levels)
    epoch_of_step = packs.epoch[np.searchsorted(packs.step, np.arange(len(sizes)))]
    others = np.bincount(epoch_of_step[sizes != data.packs_per_step], minlength=1)
    # With levels, steps may be kept from a plan with other context sizes, so counts may differ.
    if data.method != "other" and not plan.levels and others.max() > 1:
        found = f"{others.max():,} steps of an epoch have another number of packs; only one may"
        raise _data_error("packs_per_step", data.packs_per_step, found)
    return f"steps are of {data.packs_per_step:,} packs"


def _data_error(name: str, given: int | str, found: str) -> UserError:
    """Return the error of a field of `data` that its files or other fields contradict."""
    value = given if isinstance(given, str) else f"{given:,}"
    return UserError(f"data.{name} is {value}, and {found}; correct it, or {_REPLAN}")


def _refuse_outside(column: np.ndarray, name: str, count: int) -> None:
    outside = (column < 0) | (column >= count)
    plural = name.removeprefix("dp_")
    _refuse_rows(outside, f"has no such {name}", f"{plural}s go from 0 to {count - 1}")


def _refuse_rows(wrong: np.ndarray, mistake: str, rule: str) -> None:
    """Raise naming the first pack with `wrong`, bool [packs], if any."""
    rows = np.flatnonzero(wrong)
    if len(rows):
        raise UserError(
            f"{PACKS_FILE}: row {rows[0]} {mistake} ({len(rows):,} rows do); {rule}; {_REPLAN}"
        )
