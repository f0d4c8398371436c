"""Rules: sizes, GPUs, batches; layers by flags, megatron-core's layouts and LoongForge's lists."""

from math import lcm

from omnibal.trainers.export.layout import (
    DECODER,
    EMBEDDING,
    ENCODER,
    LOSS,
    PREDICTION,
    LayoutError,
    PPLayout,
)
from omnibal.trainers.lint.launch_settings import ARGPARSE, MEGATRON, Launcher
from omnibal.trainers.lint.line import RECIPES, LaunchLine, even_ends
from omnibal.trainers.lint.rule import BLOCK, BRIDGE, CORE, LOONGFORGE, SWIFT, Problems, Rules

RULES = Rules()
rule, core_config, validate_args = RULES.rule, RULES.core_config, RULES.validate_args
_PARALLEL_STATE = "core/parallel_state.py"
_CORE_SCHEDULES = "core/pipeline_parallel/schedules.py"
_LAYOUT = "core/transformer/pipeline_parallel_layer_layout.py"
_LISTS = "loongforge/train/arguments.py, _validate_legacy_pipeline_args, " + LOONGFORGE
_MODEL_LISTS = "loongforge/train/arguments.py, _validate_custom_model_args, " + LOONGFORGE
_SIZED_CHUNKS = "--num-layers-per-virtual-pipeline-stage"
_COUNTED_CHUNKS = "--num-virtual-stages-per-pipeline-rank"


@rule("this command, --gpus", severity="warning")
def gpus_known(line: LaunchLine) -> Problems:
    """Rules of GPUs, batch and data-parallel size are unchecked without."""
    if line.launch.gpus is None:
        multiple = lcm(line.grid, line.expert_grid)
        yield "the number of GPUs is unknown", f"give --gpus, a multiple of {multiple:,}"


@rule("this command", severity="warning", launchers={Launcher.MEGATRON_BRIDGE})
def recipe_settings(line: LaunchLine) -> Problems:
    """Settings of a recipe are not read, and are checked as if absent."""
    recipe = line.text(*RECIPES)
    if recipe is not None:
        yield f"the recipe {recipe} has settings of its own", "add them to the line"


@rule(f"{_PARALLEL_STATE}:740, {CORE}")
def gpus_divide_grid(line: LaunchLine) -> Problems:
    """GPUs must be a multiple of tensor x pipeline x context size."""
    launch = line.launch
    if launch.gpus is not None and launch.gpus % line.grid:
        sizes = f"TP {launch.tensor} x PP {launch.pipeline} x CP {launch.context} = {line.grid}"
        yield f"{launch.gpus:,} GPUs and {sizes}", f"use a multiple of {line.grid}"


@rule(f"{_PARALLEL_STATE}:793, {CORE}")
def gpus_divide_expert_grid(line: LaunchLine) -> Problems:
    """GPUs must be a multiple of expert tensor x expert x pipeline size."""
    launch, grid = line.launch, line.expert_grid
    if launch.gpus is None or launch.gpus % grid == 0:
        return
    if launch.expert == 1 and launch.expert_tensor is None:
        return  # gpus-divide-grid checks a multiple of this grid
    size, change = f"ETP {line.expert_tensor}", f"use a multiple of {grid}, or a smaller EP"
    if line.expert_tensor > 1 and launch.expert_tensor is None:
        size += " (not given, so TP)"
    if line.expert_tensor > 1 and launch.gpus % (grid // line.expert_tensor) == 0:
        change = "set the expert tensor size to 1"
    sizes = f"{size} x EP {launch.expert} x PP {launch.pipeline} = {grid}"
    yield f"{launch.gpus:,} GPUs and {sizes}", change


@rule(f"{_PARALLEL_STATE}:746, {CORE}")
def virtual_needs_stages(line: LaunchLine) -> Problems:
    """Several chunks need several stages."""
    if line.virtual is not None and line.launch.pipeline == 1:
        yield f"{line.virtual} chunks of a stage with PP 1", "leave the chunks out, or raise PP"


@rule(f"{_PARALLEL_STATE}:808, {CORE}", launchers=ARGPARSE)
def rank_order(line: LaunchLine) -> Problems:
    """With this order of ranks, experts need the data-parallel size as number of replicas."""
    gpus, flag = line.launch.gpus, "use-tp-pp-dp-mapping"
    if gpus is None or line.data is None or gpus % line.expert_grid or line.launch.pipeline == 1:
        return
    copies = gpus // line.expert_grid
    if line.on(flag) and copies != line.data:
        given = f"--{flag} with data-parallel size {line.data} and {copies} expert replicas"
        yield given, "leave it out, or choose ETP x EP = TP x CP"


@rule(f"core/num_microbatches_calculator.py:340, {CORE}; megatron_args.py:1003, {SWIFT}")
def batch_divides(line: LaunchLine) -> Problems:
    """The global batch must be a multiple of micro-batch x data-parallel size."""
    launch, data = line.launch, line.data
    if data is None or launch.micro_batch is None or launch.global_batch is None:
        return
    at_once = launch.micro_batch * data
    if launch.global_batch % at_once and not line.on("decrease-batch-size-if-needed"):
        nearest = max(at_once, round(launch.global_batch / at_once) * at_once)
        batches = f"global batch {launch.global_batch:,}, micro-batch {launch.micro_batch}"
        given = f"{batches} and data-parallel size {data:,} ({launch.gpus:,} GPUs / {line.grid})"
        yield given, f"use a multiple of {at_once:,}, such as {nearest:,}"


@validate_args()
def rampup_by_samples(line: LaunchLine) -> Problems:
    """A ramp-up of the batch needs training by samples."""
    if line.number("train-iters") and "rampup-batch-size" in line.flags:
        yield "--rampup-batch-size with --train-iters", "train by --train-samples"


@rule(f"{_CORE_SCHEDULES}:995-1003, {CORE}", severity="refused-at-first-step")
def interleaved_groups(line: LaunchLine) -> Problems:
    """With several chunks a stage, stages <= micro-batches of a group <= micro-batches."""
    count, group, stages = line.micro_batches, line.chunk_group, line.launch.pipeline
    if line.virtual is not None and count is not None and not stages <= group <= count:
        change = "leave the group size out, or raise it"
        if group >= stages:
            change = f"use a global batch with at least {group} micro-batches"
        groups = f"{count} micro-batches in groups of {group}"
        yield f"{groups} on {stages} stages of {line.virtual} chunks", change


@rule(f"{_CORE_SCHEDULES}:1007-1015, {CORE}", severity="refused-at-first-step")
def interleaved_remainder(line: LaunchLine) -> Problems:
    """The last group must have 0 micro-batches, or at least the number of stages."""
    count, group, stages = line.micro_batches, line.chunk_group, line.launch.pipeline
    if line.virtual is not None and count is not None and group >= stages > count % group > 0:
        groups = f"{count} micro-batches in groups of {group} leave {count % group}"
        yield f"{groups} on {stages} stages", f"use a multiple of {group} micro-batches"


@validate_args(launchers=ARGPARSE | {Launcher.MEGATRON_BRIDGE})
def context_divides_sequence(line: LaunchLine) -> Problems:
    """The sequence must be a multiple of twice the context size."""
    length = line.number("seq-length") or line.launch.sequence_length
    context = line.launch.context
    if context > 1 and length is not None and length % (2 * context):
        yield f"{length:,} tokens and CP {context}", f"use a multiple of {2 * context} tokens"


@rule(f"training/config.py, validate, {BRIDGE}", launchers={Launcher.MEGATRON_BRIDGE})
def packing_and_micro_batch(line: LaunchLine) -> Problems:
    """A packed data set needs micro-batch 1; packing in the batch needs more."""
    size = line.launch.micro_batch
    if size is not None and size > 1 and line.on("enable-offline-packing"):
        yield f"a packed data set and micro-batch {size}", "use micro-batch 1"
    if size == 1 and line.on("enable-in-batch-packing"):
        yield "packing in the batch and micro-batch 1", "raise the micro-batch"


def _advise_ends(line: LaunchLine) -> str:
    """Return advice: layers for the end stages that leave an even middle, or another split."""
    ends = even_ends(line.sizes.layers, line.launch.pipeline, line.virtual or 1)
    if ends is None or line.launch.account_for_embedding or line.launch.account_for_loss:
        return "choose another PP, or give a layout"
    first, middle, last = ends
    between = f", {middle} on every middle stage" if line.launch.pipeline > 2 else ""
    return f"give {first} layers to the first stage and {last} to the last{between}, or a layout"


def _describe_layers(line: LaunchLine) -> str:
    extra = line.layers_to_split - line.sizes.layers
    return f"{line.sizes.layers} layers" + (f" and {extra} for embedding and loss" if extra else "")


def _even_share(line: LaunchLine) -> int | None:
    """Return layers of every stage (with embedding and loss, if counted), None if uneven."""
    share, left = divmod(line.layers_to_split, line.launch.pipeline)
    return share if line.has_even_split and not left else None


def _list_divisors(layers: int) -> list[str]:
    return [str(count) for count in range(1, layers + 1) if layers % count == 0]


@rule(f"{BLOCK}:155, transformer_config.py:1447-1460, {CORE}")
def layers_divide_stages(line: LaunchLine) -> Problems:
    """Without flags for the split, the layers must be a multiple of the stages."""
    if line.has_even_split and _even_share(line) is None:
        yield f"{_describe_layers(line)} on {line.launch.pipeline} stages", _advise_ends(line)


@rule(f"{BLOCK}:174, transformer_config.py:1470, {CORE}")
def layers_divide_chunks(line: LaunchLine) -> Problems:
    """The layers of a stage must be a multiple of its chunks."""
    layers, stages, chunks = _even_share(line), line.launch.pipeline, line.virtual
    if layers is None or chunks is None or stages == 1:
        return
    if line.launch.layers_per_virtual_stage is None and layers % chunks:
        given = f"{layers} layers of a stage ({_describe_layers(line)} on {stages})"
        change = f"use {' or '.join(_list_divisors(layers)[1:])} chunks, or a layout"
        yield f"{given} in {chunks} chunks", change


def _given_ends(line: LaunchLine) -> dict[str, int]:
    """Return the given layers of the first and last stage, by `first` and `last`."""
    ends = {"first": line.launch.first_layers, "last": line.launch.last_layers}
    return {end: count for end, count in ends.items() if count is not None}


def _ends_without_layout(line: LaunchLine) -> dict[str, int]:
    # With a layout, the rule `layout-alone` reports them.
    return _given_ends(line) if line.launch.layout is None else {}


def _describe_ends(layers: dict[str, int]) -> str:
    return ", ".join(f"{count} layers on the {end} stage" for end, count in layers.items())


@core_config("1368, :1387")
def end_stages_hold_layers(line: LaunchLine) -> Problems:
    """The first and the last stage must hold a layer."""
    wrong = {end: count for end, count in _ends_without_layout(line).items() if count <= 0}
    if wrong:
        yield _describe_ends(wrong), "give it at least 1, or write a layout, which may have 0"


@core_config("1371, :1390")
def end_stages_divide_chunks(line: LaunchLine) -> Problems:
    """Layers of the first and the last stage must be multiples of the chunks."""
    chunks = line.virtual or 1
    wrong = {end: count for end, count in _ends_without_layout(line).items() if count % chunks}
    if wrong:
        yield f"{_describe_ends(wrong)} in {chunks} chunks", f"use multiples of {chunks}"


def _count_middle(line: LaunchLine) -> tuple[int, int]:
    """Return the layers and stages outside of the given end stages, 0 and 0 without any."""
    ends = _ends_without_layout(line)
    if not ends:
        return 0, 0
    return line.sizes.layers - sum(ends.values()), line.launch.pipeline - len(ends)


def _describe_middle(line: LaunchLine) -> str:
    layers, stages = _count_middle(line)
    ends = ", ".join(f"{end} {count}" for end, count in _given_ends(line).items())
    return (
        f"{line.sizes.layers} layers on {line.launch.pipeline} stages, {ends}: {layers} layers are "
        f"left for {stages} stages"
    )


@core_config("1406")
def middle_stages_and_layers(line: LaunchLine) -> Problems:
    """Middle stages need layers, and remaining layers need middle stages."""
    layers, stages = _count_middle(line)
    if bool(layers) != bool(stages):
        change = _advise_ends(line) if line.launch.pipeline > 1 else "leave both numbers out"
        yield _describe_middle(line), change


@rule(
    f"only this command: {CORE} builds middle stages with a negative number of layers as "
    "empty, so the model gets too many layers"
)
def middle_stages_hold_layers(line: LaunchLine) -> Problems:
    """First and last stages must hold at most the model's layers."""
    layers, stages = _count_middle(line)
    if layers < 0 < stages:
        yield _describe_middle(line), _advise_ends(line)


@core_config("1414")
def middle_layers_divide_stages(line: LaunchLine) -> Problems:
    """Middle layers must be a multiple of the middle stages."""
    layers, stages = _count_middle(line)
    if stages and layers % stages:
        yield f"{layers} layers are left for {stages} stages", _advise_ends(line)


@core_config("1422")
def middle_layers_divide_chunks(line: LaunchLine) -> Problems:
    """The layers of a middle stage must be a multiple of its chunks."""
    layers, stages = _count_middle(line)
    if line.virtual is None or not stages or layers % stages:
        return
    share = layers // stages
    if share % line.virtual:
        yield f"{share} layers of middle stages in {line.virtual} chunks", _advise_ends(line)


@core_config("1294")
def end_stages_or_counted(line: LaunchLine) -> Problems:
    """Layers of the first or last stage exclude counting embedding or loss as layers."""
    is_counted = line.launch.account_for_embedding or line.launch.account_for_loss
    if is_counted and _given_ends(line):
        yield "both are given", "drop one"


@rule(f"megatron_args.py:885, {SWIFT}", launchers={Launcher.MS_SWIFT})
def end_stages_need_pipeline(line: LaunchLine) -> Problems:
    """Layers of the first or last stage need a pipeline."""
    if _given_ends(line) and line.launch.pipeline == 1:
        yield "layers of the first or last stage with PP 1", "leave them out, or raise PP"


@validate_args()
def one_way_of_chunks(line: LaunchLine) -> Problems:
    """Chunks must be set by one flag."""
    ways = {
        _SIZED_CHUNKS: line.launch.layers_per_virtual_stage,
        _COUNTED_CHUNKS: line.launch.virtual,
        "--pipeline-model-parallel-layout": line.launch.layout,
    }
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        yield " and ".join(given), "keep one"


@validate_args()
def sized_chunks_exclude_ends(line: LaunchLine) -> Problems:
    """Layers per chunk exclude layers of the first or last stage."""
    if line.launch.layers_per_virtual_stage is not None and _given_ends(line):
        yield f"{_SIZED_CHUNKS} with layers of an end stage", f"give {_COUNTED_CHUNKS} instead"


@validate_args()
def sized_chunks_divide_stage(line: LaunchLine) -> Problems:
    """The layers of a stage must be a multiple of a chunk's layers."""
    layers, size = _even_share(line), line.launch.layers_per_virtual_stage
    if layers is not None and size is not None and layers % size:
        change = f"use chunks of {' or '.join(_list_divisors(layers)[:-1])}"
        yield f"{layers} layers of a stage in chunks of {size}", change


@validate_args(severity="ignored", launchers=ARGPARSE | {Launcher.MS_SWIFT})
def one_chunk(line: LaunchLine) -> Problems:
    """One chunk is the default."""
    if line.launch.virtual == 1 and line.launch.layout is None:
        yield "one chunk of every stage", "leave it out"


@rule(f"{_LAYOUT}:282-321, {CORE}")
def layout_form(line: LaunchLine) -> Problems:
    """A layout must be in Megatron's form."""
    if isinstance(line.layout, LayoutError):
        yield line.layout.problem, line.layout.change


@rule(f"{_LAYOUT}:40, {CORE}")
def layout_divides_stages(line: LaunchLine) -> Problems:
    """The chunks of a layout must be a multiple of the stages."""
    if not isinstance(line.layout, PPLayout) or line.valid_layout is not None:
        return
    chunks, stages = len(line.layout.chunks), line.launch.pipeline
    possible = [
        f"PP {chunks // size}" + (f" with {size} chunks a stage" if size > 1 else "")
        for size in range(1, 9)
        if chunks % size == 0 and chunks // size > 1
    ]
    fitting = " or ".join(possible) or "one stage"
    yield f"the layout has {chunks} chunks for PP {stages}", f"set {fitting}, or another layout"


@core_config("1344", launchers=MEGATRON - {Launcher.MS_SWIFT})
def layout_chunks(line: LaunchLine) -> Problems:
    """A layout's chunks per stage must be the virtual pipeline size."""
    layout, given = line.valid_layout, line.launch.virtual
    if layout is not None and given is not None and given != layout.virtual:
        chunks = f"the layout has {layout.virtual} chunks for each of {layout.pipeline} stages"
        yield f"{chunks}, and the virtual pipeline size is {given}", "leave the size out"


@rule(f"megatron_args.py:1096-1117, {SWIFT}", severity="ignored", launchers={Launcher.MS_SWIFT})
def layout_over_virtual_size(line: LaunchLine) -> Problems:
    """A layout overrides the virtual pipeline size."""
    layout, given = line.valid_layout, line.launch.virtual
    if layout is not None and given is not None and given != layout.virtual:
        chunks = f"the layout has {layout.virtual} chunks a stage"
        yield f"{chunks} and the virtual pipeline size is {given}", "leave the size out"


@core_config("1307-1324")
def layout_alone(line: LaunchLine) -> Problems:
    """A layout excludes other flags of the split."""
    launch = line.launch
    others = {
        "layers of the first stage": launch.first_layers is not None,
        "layers of the last stage": launch.last_layers is not None,
        "counting the embedding as a layer": launch.account_for_embedding,
        "counting the loss as a layer": launch.account_for_loss,
    }
    given = ", ".join(name for name, is_given in others.items() if is_given)
    if launch.layout is not None and given:
        yield f"a layout with {given}", "drop one"


@rule(f"{_LAYOUT}:94-105, {CORE}")
def layout_ends(line: LaunchLine) -> Problems:
    """A layout must begin with its only embedding and end with its only loss."""
    layout = line.valid_layout
    if layout is None:
        return
    units = layout.units
    embeddings, losses = units.count(EMBEDDING), units.count(LOSS)
    if (units[:1], units[-1:], embeddings, losses) != (EMBEDDING, LOSS, 1, 1):
        shown = "" if ENCODER in units or not layout.short_text else f" {layout.short_text}"
        given = f"the layout{shown} has {embeddings} embeddings and {losses} losses"
        yield given, "begin it with E and end it with L"


@rule(f"{_LAYOUT}:106, {CORE}")
def layout_layers(line: LaunchLine) -> Problems:
    """A layout must have all layers of the model."""
    layout, layers = line.valid_layout, line.sizes.layers
    if layout is not None and (count := layout.units.count(DECODER)) != layers:
        change = f"add {layers - count}" if layers > count else f"remove {count - layers}"
        yield f"the layout has {count} layers (t), the model {layers}", change


@rule(f"{_LAYOUT}:111, {CORE}")
def layout_prediction_layers(line: LaunchLine) -> Problems:
    """Layers of multi-token prediction must be equal in layout and flags."""
    layout, given = line.valid_layout, line.launch.prediction_layers
    if layout is None:
        return
    count, allowed = layout.units.count(PREDICTION), {given or 0}
    if given is None and line.launch.launcher is Launcher.MEGATRON_BRIDGE:
        allowed.add(line.language.prediction_layers)
    if count not in allowed:
        layers = f"the layout has {count} layers of multi-token prediction (m)"
        flags = f"the flags {'none' if given is None else given}"
        yield f"{layers}, {flags}", f"make both {count or given}"


@rule(f"{_LAYOUT}:116-135, {CORE}")
def layout_prediction_place(line: LaunchLine) -> Problems:
    """Multi-token prediction must follow all layers, in the last chunk of one stage."""
    layout = line.valid_layout
    if layout is None or PREDICTION not in layout.units:
        return
    if DECODER in layout.units.partition(PREDICTION)[2]:
        yield "a layer (t) follows multi-token prediction (m)", "put m before L"
    held = [number for number, chunk in enumerate(layout.chunks) if PREDICTION in chunk]
    if len(held) > 1 or held[0] < (layout.virtual - 1) * layout.pipeline:
        places = ", ".join(map(layout.place, held))
        yield f"multi-token prediction (m) in {places}", "put all m before L"


@rule(f"{_LAYOUT}:147, {CORE}")
def layout_encoders(line: LaunchLine) -> Problems:
    """A layout cannot place encoders."""
    if line.valid_layout is not None and ENCODER in line.valid_layout.units:
        yield "the layout has encoder layers", "leave them out: they are on the first stage"


def _list_flag(line: LaunchLine) -> str:
    return f"--custom-{'virtual-' if line.launch.is_by_chunk else ''}pipeline-layers"


@rule(_LISTS, launchers={Launcher.LOONGFORGE})
def listed_layers_for_stages(line: LaunchLine) -> Problems:
    """A list of layers needs a number per stage or per chunk, and a comma."""
    launch, layers, parts = line.launch, line.launch.layers_by_stage, line.launch.pipeline
    if launch.is_by_chunk:
        parts *= launch.virtual or 1
    if layers is not None and (len(layers) != parts or parts == 1):
        name = "chunks" if launch.is_by_chunk else "stages"
        change = f"give {parts} numbers with commas" if parts > 1 else "leave it out for one stage"
        yield f"{_list_flag(line)} has {len(layers)} numbers for {parts} {name}", change


@rule(_LISTS, launchers={Launcher.LOONGFORGE})
def listed_layers_add_up(line: LaunchLine) -> Problems:
    """The numbers of a list must add up to the model's layers."""
    layers, given = line.sizes.layers, line.launch.layers_by_stage
    if given is not None and sum(given) != layers:
        numbers = f"{_list_flag(line)} {','.join(map(str, given))} adds up to {sum(given)}"
        yield f"{numbers}, the model has {layers} layers", "correct the numbers or the model"


@rule(_LISTS, launchers={Launcher.LOONGFORGE})
def listed_layers_fill_chunks(line: LaunchLine) -> Problems:
    """A stage must have a layer for each of its chunks."""
    layers, chunks = line.launch.layers_by_stage, line.launch.virtual
    if layers is None or line.launch.is_by_chunk or chunks is None:
        return
    if min(layers) < chunks:
        given = f"{_list_flag(line)} has a stage of {min(layers)} layers for {chunks} chunks"
        yield given, f"give every stage at least {chunks}"


@rule(_MODEL_LISTS, launchers={Launcher.LOONGFORGE})
def listed_recompute_for_stages(line: LaunchLine) -> Problems:
    """A list of recomputed layers needs a number per stage, and a comma."""
    numbers, stages = line.launch.recompute_by_stage, line.launch.pipeline
    if numbers is not None and (len(numbers) != stages or stages == 1):
        flag, change = "--custom-pipeline-recompute-layers", f"give {stages} numbers with commas"
        if stages == 1:
            change = "give --recompute-num-layers instead"
        yield f"{flag} has {len(numbers)} numbers for {stages} stages", change
