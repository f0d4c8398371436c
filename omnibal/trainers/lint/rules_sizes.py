"""Checks of sizes, GPUs, batches; layers by flags, megatron-core's layouts and LoongForge's lists.

The names of rules are the keys of `RULES`.
"""

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
from omnibal.trainers.lint.launch_settings import Launcher
from omnibal.trainers.lint.line import RECIPES, LaunchLine, even_ends
from omnibal.trainers.lint.rule import Problems

_SIZED_CHUNKS = "--num-layers-per-virtual-pipeline-stage"
_COUNTED_CHUNKS = "--num-virtual-stages-per-pipeline-rank"


def check_gpus(line: LaunchLine) -> Problems:
    launch, gpus, recipe = line.launch, line.launch.gpus, line.text(*RECIPES)
    if recipe is not None:
        given = f"settings of the recipe {recipe} are not read, and are checked as if absent"
        yield "recipe-settings", given, "add them to the line"
    if line.virtual is not None and launch.pipeline == 1:
        given = f"{line.virtual} chunks a stage need several stages, and PP is 1"
        yield "virtual-needs-stages", given, "leave the chunks out, or raise PP"
    if gpus is None:
        given = "rules of GPUs, batch and data-parallel size need the number of GPUs"
        change = f"give --gpus, a multiple of {lcm(line.grid, line.expert_grid):,}"
        yield "gpus-known", given, change
    elif gpus % line.grid:
        sizes = f"TP {launch.tensor} x PP {launch.pipeline} x CP {launch.context} = {line.grid}"
        given = f"{gpus:,} GPUs are no multiple of {sizes}"
        yield "gpus-divide-grid", given, f"use a multiple of {line.grid}"


def check_expert_ranks(line: LaunchLine) -> Problems:
    launch, gpus, grid = line.launch, line.launch.gpus, line.expert_grid
    if gpus is None:
        return
    size, change = f"ETP {line.expert_tensor}", f"use a multiple of {grid}, or a smaller EP"
    if line.expert_tensor > 1 and launch.expert_tensor is None:
        size += " (not given, so TP)"
    if line.expert_tensor > 1 and gpus % (grid // line.expert_tensor) == 0:
        change = "set the expert tensor size to 1"
    # By default, gpus-divide-grid checks a multiple of this grid.
    if gpus % grid and (launch.expert > 1 or launch.expert_tensor is not None):
        sizes = f"{size} x EP {launch.expert} x PP {launch.pipeline} = {grid}"
        yield "gpus-divide-expert-grid", f"{gpus:,} GPUs are no multiple of {sizes}", change
    flag, copies = "use-tp-pp-dp-mapping", gpus // grid
    is_mapped = line.on(flag) and not gpus % grid and launch.pipeline > 1
    if is_mapped and line.data not in (None, copies):
        given = (
            f"--{flag} needs equally many replicas of model ({line.data}) and experts ({copies})"
        )
        yield "rank-order", given, "leave it out, or choose ETP x EP = TP x CP"


def check_batch(line: LaunchLine) -> Problems:
    launch, data, size = line.launch, line.data, line.launch.micro_batch
    if data is not None and size is not None and launch.global_batch is not None:
        at_once = size * data
        if launch.global_batch % at_once and not line.on("decrease-batch-size-if-needed"):
            nearest = max(at_once, round(launch.global_batch / at_once) * at_once)
            given = f"global batch {launch.global_batch:,} is no multiple of micro-batch {size} x "
            given += f"data-parallel size {data:,} ({launch.gpus:,} GPUs / {line.grid})"
            yield "batch-divides", given, f"use a multiple of {at_once:,}, such as {nearest:,}"
    if line.number("train-iters") and "rampup-batch-size" in line.flags:
        given = "--rampup-batch-size needs training by samples, and --train-iters is given"
        yield "rampup-by-samples", given, "train by --train-samples"
    length = line.number("seq-length") or launch.sequence_length
    if launch.context > 1 and length is not None and length % (2 * launch.context):
        given = f"{length:,} tokens are no multiple of twice the context size {launch.context}"
        yield "context-divides-sequence", given, f"use a multiple of {2 * launch.context} tokens"
    if size is not None and size > 1 and line.on("enable-offline-packing"):
        given = f"a packed data set needs micro-batch 1, not {size}"
        yield "packing-and-micro-batch", given, "use micro-batch 1"
    if size == 1 and line.on("enable-in-batch-packing"):
        given = "packing in the batch needs a micro-batch above 1"
        yield "packing-and-micro-batch", given, "raise the micro-batch"


def check_interleaving(line: LaunchLine) -> Problems:
    count, group, stages = line.micro_batches, line.chunk_group, line.launch.pipeline
    if line.virtual is None or count is None:
        return
    groups = f"{count} micro-batches in groups of {group}"
    if not stages <= group <= count:
        change = "leave the group size out, or raise it"
        if group >= stages:
            change = f"use a global batch with at least {group} micro-batches"
        given = (
            f"{groups} on {stages} stages: stages <= group <= micro-batches must hold for chunks"
        )
        yield "interleaved-groups", given, change
    if group >= stages > count % group > 0:
        given = f"{groups} leave {count % group}, fewer than the {stages} stages"
        yield "interleaved-remainder", given, f"use a multiple of {group} micro-batches"


def _advise_ends(line: LaunchLine) -> str:
    """Return advice: layers for the end stages that leave an even middle, or another split."""
    ends = even_ends(line.sizes.layers, line.launch.pipeline, line.virtual or 1)
    if ends is None or line.launch.account_for_embedding or line.launch.account_for_loss:
        return "choose another PP, or give a layout"
    first, middle, last = ends
    between = f", {middle} on every middle stage" if line.launch.pipeline > 2 else ""
    return f"give {first} layers to the first stage and {last} to the last{between}, or a layout"


def check_even_layers(line: LaunchLine) -> Problems:
    """Yield problems of a split without flags for it."""
    stages, chunks, size = line.launch.pipeline, line.virtual, line.launch.layers_per_virtual_stage
    if not line.has_even_split:
        return
    counted, given = line.layers_to_split - line.sizes.layers, f"{line.sizes.layers} layers"
    if counted:
        given += f" and {counted} for embedding and loss"
    layers, left = divmod(line.layers_to_split, stages)
    if left:
        given += f" are no multiple of {stages} stages, and no flag splits them"
        yield "layers-divide-stages", given, _advise_ends(line)
        return
    divisors = [str(count) for count in range(1, layers + 1) if layers % count == 0]
    if size is not None and layers % size:
        given = f"{layers} layers of a stage are no multiple of {size}, a chunk's layers"
        yield "sized-chunks-divide-stage", given, f"use chunks of {' or '.join(divisors[:-1])}"
    if size is None and chunks is not None and stages > 1 and layers % chunks:
        given = f"{layers} layers of a stage ({given} on {stages}) are no multiple of "
        change = f"use {' or '.join(divisors[1:])} chunks, or a layout"
        yield "layers-divide-chunks", f"{given}{chunks} chunks", change


def check_end_layers(line: LaunchLine) -> Problems:
    """Yield problems of given layers of the first and the last stage, and of layers between."""
    ends, chunks, advice = line.end_layers, line.virtual or 1, _advise_ends(line)
    if not ends or line.launch.layout is not None:  # layout-alone reports them
        return
    given = ", ".join(f"{end} {count}" for end, count in ends.items())
    if min(ends.values()) <= 0:
        change = "give it at least 1, or write a layout, which may have 0"
        yield "end-stages-hold-layers", f"an end stage holds no layer ({given})", change
    if any(count % chunks for count in ends.values()):
        given_layers = f"layers of an end stage ({given}) are no multiple of its {chunks} chunks"
        yield "end-stages-divide-chunks", given_layers, f"use multiples of {chunks}"
    layers, stages = line.sizes.layers - sum(ends.values()), line.launch.pipeline - len(ends)
    left = f"{line.sizes.layers} layers on {line.launch.pipeline} stages, {given}: {layers} layers "
    left += f"are left for {stages} stages"
    if bool(layers) != bool(stages):
        change = advice if line.launch.pipeline > 1 else "leave both numbers out"
        yield "middle-stages-and-layers", left, change
    if layers < 0 < stages:
        yield "middle-stages-hold-layers", left, advice
    if stages and layers % stages:
        yield "middle-layers-divide-stages", f"{left}, and are no multiple of them", advice
    elif stages and layers // stages % chunks:
        given = f"{layers // stages} layers of middle stages are no multiple of {chunks} chunks"
        yield "middle-layers-divide-chunks", given, advice


def check_split_flags(line: LaunchLine) -> Problems:
    """Yield flags that exclude each other or have no effect."""
    launch, has_ends = line.launch, bool(line.end_layers)
    has_layout, size = launch.layout is not None, launch.layers_per_virtual_stage
    is_counted = launch.account_for_embedding or launch.account_for_loss
    ends, counting = "layers of the first or last stage", "embedding or loss counted as layers"
    if is_counted and has_ends:
        yield "end-stages-or-counted", f"{ends} exclude {counting}", "drop one"
    if has_ends and launch.pipeline == 1:
        given = f"{ends} need a pipeline, and PP is 1"
        yield "end-stages-need-pipeline", given, "leave them out, or raise PP"
    if has_layout and (has_ends or is_counted):
        given = f"a layout excludes {ends if has_ends else counting}"
        yield "layout-alone", given, "drop one"
    ways = {
        _SIZED_CHUNKS: size is not None,
        _COUNTED_CHUNKS: launch.virtual is not None,
        "--pipeline-model-parallel-layout": has_layout,
    }
    given_ways = [name for name, is_given in ways.items() if is_given]
    if len(given_ways) > 1:
        yield "one-way-of-chunks", f"{' and '.join(given_ways)} both set chunks", "keep one"
    if size is not None and has_ends:
        given = f"{_SIZED_CHUNKS} excludes {ends}"
        yield "sized-chunks-exclude-ends", given, f"give {_COUNTED_CHUNKS} instead"
    if launch.virtual == 1 and not has_layout:
        yield "one-chunk", "one chunk of every stage is the default", "leave it out"


def check_layout(line: LaunchLine) -> Problems:
    """Yield problems of a layout's form and chunks."""
    layout, given, stages = line.layout, line.launch.virtual, line.launch.pipeline
    if isinstance(layout, LayoutError):
        yield "layout-form", layout.problem, layout.change
    if not isinstance(layout, PPLayout):
        return
    if line.valid_layout is None:
        chunks = len(layout.chunks)
        possible = [
            f"PP {chunks // size}" + (f" with {size} chunks a stage" if size > 1 else "")
            for size in range(1, 9)
            if chunks % size == 0 and chunks // size > 1
        ]
        change = f"set {' or '.join(possible) or 'one stage'}, or another layout"
        problem = f"the layout's {chunks} chunks are no multiple of PP {stages}"
        yield "layout-divides-stages", problem, change
    elif given not in (None, layout.virtual):
        problem = (
            f"the layout has {layout.virtual} chunks a stage, the virtual pipeline size {given}"
        )
        for rule in ("layout-chunks", "layout-over-virtual-size"):
            yield rule, problem, "leave the size out"


def check_layout_units(line: LaunchLine) -> Problems:
    """Yield problems of the units of a layout with equally many chunks on every stage."""
    layout, layers = line.valid_layout, line.sizes.layers
    if layout is None:
        return
    units, count = layout.units, layout.units.count(DECODER)
    embeddings, losses = units.count(EMBEDDING), units.count(LOSS)
    if (units[:1], units[-1:], embeddings, losses) != (EMBEDDING, LOSS, 1, 1):
        shown = "" if ENCODER in units or not layout.short_text else f" {layout.short_text}"
        given = f"the layout{shown} has {embeddings} embeddings and {losses} losses"
        given += ", and must begin with one and end with one"
        yield "layout-ends", given, "begin it with E and end it with L"
    if count != layers:
        change = f"add {layers - count}" if layers > count else f"remove {count - layers}"
        yield "layout-layers", f"the layout has {count} layers (t), the model {layers}", change
    if ENCODER in units:
        given = "a layout cannot place encoders, and this one has encoder layers"
        yield "layout-encoders", given, "leave them out: they are on the first stage"


def check_prediction_layers(line: LaunchLine) -> Problems:
    """Yield problems of the layers of multi-token prediction in a layout."""
    layout, given = line.valid_layout, line.launch.prediction_layers
    if layout is None:
        return
    count, allowed = layout.units.count(PREDICTION), {given or 0}
    if given is None and line.launch.launcher is Launcher.MEGATRON_BRIDGE:
        allowed.add(line.language.prediction_layers)
    if count not in allowed:
        flags = f"the flags {'none' if given is None else given}"
        layers = f"the layout has {count} layers of multi-token prediction (m), {flags}"
        yield "layout-prediction-layers", layers, f"make both {count or given}"
    if DECODER in layout.units.partition(PREDICTION)[2]:
        problem = "a layer (t) follows multi-token prediction (m)"
        yield "layout-prediction-place", problem, "put m before L"
    held = [number for number, chunk in enumerate(layout.chunks) if PREDICTION in chunk]
    if len(held) > 1 or (held and held[0] < (layout.virtual - 1) * layout.pipeline):
        places = ", ".join(map(layout.place, held))
        problem = f"multi-token prediction (m) is in {places}, not in the last chunk of one stage"
        yield "layout-prediction-place", problem, "put all m before L"


def check_lists(line: LaunchLine) -> Problems:
    """Yield problems of LoongForge's lists."""
    launch, layers, stages = line.launch, line.launch.layers_by_stage, line.launch.pipeline
    flag = f"--custom-{'virtual-' if launch.is_by_chunk else ''}pipeline-layers"
    name = "chunks" if launch.is_by_chunk else "stages"
    parts = stages * (launch.virtual or 1) if launch.is_by_chunk else stages
    if layers is not None and (len(layers) != parts or parts == 1):
        change = f"give {parts} numbers with commas" if parts > 1 else "leave it out for one stage"
        given = f"{flag} has {len(layers)} numbers for {parts} {name}"
        yield "listed-layers-for-stages", given, change
    if layers is not None and sum(layers) != line.sizes.layers:
        given = f"{flag} {','.join(map(str, layers))} adds up to {sum(layers)}, and the model has "
        change = "correct the numbers or the model"
        yield "listed-layers-add-up", f"{given}{line.sizes.layers} layers", change
    chunks = None if launch.is_by_chunk else launch.virtual
    if layers is not None and chunks is not None and min(layers) < chunks:
        given = f"{flag} has a stage of {min(layers)} layers for {chunks} chunks"
        yield "listed-layers-fill-chunks", given, f"give every stage at least {chunks}"
    numbers = launch.recompute_by_stage
    if numbers is not None and (len(numbers) != stages or stages == 1):
        change = f"give {stages} numbers with commas"
        if stages == 1:
            change = "give --recompute-num-layers instead"
        flag = "--custom-pipeline-recompute-layers"
        given = f"{flag} has {len(numbers)} numbers for {stages} stages"
        yield "listed-recompute-for-stages", given, change


CHECKS = (
    check_gpus,
    check_expert_ranks,
    check_batch,
    check_interleaving,
    check_even_layers,
    check_end_layers,
    check_split_flags,
    check_layout,
    check_layout_units,
    check_prediction_layers,
    check_lists,
)
