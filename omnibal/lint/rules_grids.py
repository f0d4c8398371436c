"""Rules of parallel sizes and the number of GPUs."""

from math import lcm, prod

from omnibal.lint.flags import whole_number
from omnibal.lint.launch import Launcher
from omnibal.lint.line import ARGPARSE, Line
from omnibal.lint.rule import CORE, Problems, RuleGroup, true_of

RULES = RuleGroup("GPUs and grids")
rule, validate_args = RULES.rule, RULES.validate_args
_ALL = frozenset(Launcher)
_STATE = "core/parallel_state.py"


@rule("this command, --gpus", severity="warning")
def gpus_known(line: Line) -> Problems:
    """Rules of GPUs, batch and data-parallel size cannot be judged without."""
    if line.launch.gpus is None:
        least = lcm(line.grid, line.expert_grid)
        yield (
            "the line does not say how many GPUs it runs on",
            f"give --gpus; {least:,} is the least that its sizes allow, and every multiple of it",
        )


@rule("this command", severity="warning", launchers=frozenset((Launcher.MEGATRON_BRIDGE,)))
def recipe_settings(line: Line) -> Problems:
    """What a recipe sets is not read, and is judged as if it were not set."""
    for recipe in filter(None, map(line.text, ("recipe", "model-recipe-name", "mr"))):
        change = "add to the line what the recipe sets of parallel sizes, split and recomputation"
        yield f"the recipe {recipe} has settings of its own", change


@rule(f"{_STATE}:740, {CORE}")
def gpus_divide_grid(line: Line) -> Problems:
    """GPUs must be a multiple of tensor x pipeline x context size."""
    launch = line.launch
    if launch.gpus is not None and launch.gpus % line.grid:
        sizes = f"TP {launch.tensor} x PP {launch.pipeline} x CP {launch.context} = {line.grid}"
        change = f"use a multiple of {line.grid}, or smaller sizes"
        yield f"{launch.gpus:,} GPUs and {sizes}", change


@rule(f"{_STATE}:793, {CORE}")
def gpus_divide_expert_grid(line: Line) -> Problems:
    """GPUs must be a multiple of expert tensor x expert x pipeline size."""
    launch, grid = line.launch, line.expert_grid
    if launch.gpus is None or launch.gpus % grid == 0:
        return
    if launch.expert == 1 and launch.expert_tensor is None:
        return  # the grid is that of gpus-divide-grid, without context ranks
    size, change = f"ETP {line.expert_tensor}", f"use a multiple of {grid}, or a smaller EP"
    if line.expert_tensor > 1 and launch.expert_tensor is None:
        size += " (not given, so TP)"
    if line.expert_tensor > 1 and launch.gpus % (grid // line.expert_tensor) == 0:
        change = "set the expert tensor size to 1"
    sizes = f"{size} x EP {launch.expert} x PP {launch.pipeline} = {grid}"
    yield f"{launch.gpus:,} GPUs and {sizes}", change


@rule(f"{_STATE}:746, {CORE}")
def virtual_needs_stages(line: Line) -> Problems:
    """A stage has several chunks only where there are several stages."""
    if line.virtual is not None and line.launch.pipeline == 1:
        yield f"{line.virtual} chunks of a stage with PP 1", "leave the chunks out, or raise PP"


@validate_args()
def two_stages_need_overlap(line: Line) -> Problems:
    """Chunks without overlapped transfers need more than two stages."""
    stages, flag = line.launch.pipeline, "no-overlap-p2p-communication"
    if line.virtual is not None and line.on(flag) and stages <= 2:
        given = f"PP {stages} with {line.virtual} chunks and --{flag}"
        yield given, "leave that flag out, or raise PP"


@validate_args(launchers=_ALL)
def context_levels_multiply(line: Line) -> Problems:
    """The product of hierarchical context sizes must be the context size."""
    name, context = "hierarchical-context-parallel-sizes", line.launch.context
    sizes = line.text(name)
    if sizes is not None and prod(whole_number(size) or 0 for size in line.words(name)) != context:
        yield f"sizes {sizes} and CP {context}", "give sizes with that product"


@validate_args(launchers=_ALL)
def context_exchange_needs_levels(line: Line) -> Problems:
    """a2a+p2p needs hierarchical context sizes."""
    sizes = "hierarchical-context-parallel-sizes"
    if "a2a+p2p" in line.exchanges and sizes not in line.flags:
        yield "the exchange a2a+p2p without sizes", f"give --{sizes}"


@rule(f"{_STATE}:808, {CORE}", launchers=ARGPARSE)
def rank_order(line: Line) -> Problems:
    """Experts must have as many copies as the rest where stages are not the last ranks."""
    gpus, flag = line.launch.gpus, "use-tp-pp-dp-mapping"
    if gpus is None or line.data is None or gpus % line.expert_grid or line.launch.pipeline == 1:
        return
    copies = gpus // line.expert_grid
    if line.on(flag) and copies != line.data:
        change = "leave it out, or choose ETP and EP with ETP x EP = TP x CP"
        yield f"--{flag} with data-parallel size {line.data} and {copies} copies of experts", change


@validate_args()
def fsdp2_alone(line: Line) -> Problems:
    """Torch's FSDP2 allows no pipeline or expert parallelism, distributed optimizer or fp16."""
    stages, experts = line.launch.pipeline, line.launch.expert
    against = {
        f"PP {stages}": stages > 1,
        f"EP {experts}": experts > 1,
        "the distributed optimizer": line.on("use-distributed-optimizer"),
        "fp16": line.on("fp16"),
    }
    given = true_of(against)
    if line.on("use-torch-fsdp2") and given:
        yield f"--use-torch-fsdp2 with {', '.join(given)}", "leave one of them out"
