"""Rules of parallel sizes and the number of GPUs."""

from math import lcm

from omnibal.lint.launch import Launcher
from omnibal.lint.line import ARGPARSE, Line
from omnibal.lint.rule import CORE, Problems, RuleGroup

RULES = RuleGroup()
rule = RULES.rule
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
