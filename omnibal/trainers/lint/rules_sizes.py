"""Rules: parallel sizes, the number of GPUs, micro-batches and the sequence length."""

from math import lcm

from omnibal.trainers.lint.launch_settings import ARGPARSE, Launcher
from omnibal.trainers.lint.line import RECIPES, LaunchLine
from omnibal.trainers.lint.rule import BRIDGE, CORE, SWIFT, Problems, Rules

RULES = Rules()
rule, validate_args = RULES.rule, RULES.validate_args
_PARALLEL_STATE = "core/parallel_state.py"
_CORE_SCHEDULES = "core/pipeline_parallel/schedules.py"


@rule("this command, --gpus", severity="warning")
def gpus_known(line: LaunchLine) -> Problems:
    """Rules of GPUs, batch and data-parallel size are unchecked without."""
    if line.launch.gpus is None:
        multiple = lcm(line.grid, line.expert_grid)
        change = f"give --gpus; its sizes allow multiples of {multiple:,}"
        yield "the number of GPUs is unknown", change


@rule("this command", severity="warning", launchers={Launcher.MEGATRON_BRIDGE})
def recipe_settings(line: LaunchLine) -> Problems:
    """Settings of a recipe are not read, and are checked as if absent."""
    recipe = line.text(*RECIPES)
    if recipe is not None:
        change = "add the recipe's parallel sizes, split and recomputation to the line"
        yield f"the recipe {recipe} has settings of its own", change


@rule(f"{_PARALLEL_STATE}:740, {CORE}")
def gpus_divide_grid(line: LaunchLine) -> Problems:
    """GPUs must be a multiple of tensor x pipeline x context size."""
    launch = line.launch
    if launch.gpus is not None and launch.gpus % line.grid:
        sizes = f"TP {launch.tensor} x PP {launch.pipeline} x CP {launch.context} = {line.grid}"
        yield (
            f"{launch.gpus:,} GPUs and {sizes}",
            f"use a multiple of {line.grid}, or smaller sizes",
        )


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
        change = "leave it out, or choose ETP and EP with ETP x EP = TP x CP"
        yield f"--{flag} with data-parallel size {line.data} and {copies} expert replicas", change


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
        change = "train by --train-samples, or leave the ramp-up out"
        yield "--rampup-batch-size with --train-iters", change


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
