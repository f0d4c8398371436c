"""Rules of parallel sizes and the number of GPUs."""

from math import lcm, prod

from omnibal.lint.flags import whole_number, words_of
from omnibal.lint.launch import Launcher
from omnibal.lint.line import ARGPARSE, Line
from omnibal.lint.rule import CORE, MEGATRON_LM, Broken, Rule


def _gpus_known(line: Line) -> Broken | None:
    if line.launch.gpus is not None:
        return None
    least = lcm(line.grid, line.expert_grid)
    return Broken(
        "the line does not say how many GPUs it runs on",
        f"give --gpus; {least:,} is the least that its sizes allow, and every multiple of it",
    )


def _recipe(line: Line) -> Broken | None:
    given = [name for name in ("recipe", "model-recipe-name", "mr") if line.text(name)]
    if not given:
        return None
    return Broken(
        f"the recipe {line.text(given[0])} has settings of its own",
        "add to the line what the recipe sets of parallel sizes, split and recomputation",
    )


def _grid_of(line: Line) -> str:
    launch = line.launch
    return f"TP {launch.tensor} x PP {launch.pipeline} x CP {launch.context} = {line.grid}"


def _grid(line: Line) -> Broken | None:
    gpus = line.launch.gpus
    if gpus is None or gpus % line.grid == 0:
        return None
    return Broken(
        f"{gpus:,} GPUs and {_grid_of(line)}", f"use a multiple of {line.grid}, or smaller sizes"
    )


def _expert_grid(line: Line) -> Broken | None:
    launch = line.launch
    if launch.gpus is None or launch.gpus % line.expert_grid == 0:
        return None
    if launch.expert == 1 and launch.expert_tensor is None:
        return None  # the grid is that of gpus-divide-grid, without context ranks
    unset = launch.expert_tensor is None and line.expert_tensor > 1
    of_default = " (not given, so TP)" if unset else ""
    return Broken(
        f"{launch.gpus:,} GPUs and ETP {line.expert_tensor}{of_default} x EP {launch.expert} x PP "
        f"{launch.pipeline} = {line.expert_grid}",
        "set the expert tensor size to 1"
        if line.expert_tensor > 1 and launch.gpus % (line.expert_grid // line.expert_tensor) == 0
        else f"use a multiple of {line.expert_grid}, or a smaller EP",
    )


def _virtual(line: Line) -> Broken | None:
    if line.virtual is None or line.launch.pipeline > 1:
        return None
    return Broken(
        f"{line.virtual} chunks of a stage with PP 1", "leave the chunks out, or raise PP"
    )


def _overlap(line: Line) -> Broken | None:
    off = line.on("no-overlap-p2p-communication")
    if line.virtual is None or not off or line.launch.pipeline > 2:
        return None
    return Broken(
        f"PP {line.launch.pipeline} with {line.virtual} chunks and --no-overlap-p2p-communication",
        "leave that flag out, or raise PP",
    )


def _context_levels(line: Line) -> Broken | None:
    sizes = line.text("hierarchical-context-parallel-sizes")
    if sizes is None:
        return None
    counts = [whole_number(size) or 0 for size in words_of(sizes)]
    if prod(counts) == line.launch.context:
        return None
    return Broken(f"sizes {sizes} and CP {line.launch.context}", "give sizes with that product")


def _context_exchange(line: Line) -> Broken | None:
    kinds = words_of(line.text("cp-comm-type"))
    if "a2a+p2p" not in kinds or "hierarchical-context-parallel-sizes" in line.flags:
        return None
    return Broken(
        "the exchange a2a+p2p without sizes", "give --hierarchical-context-parallel-sizes"
    )


def _order(line: Line) -> Broken | None:
    gpus, stages = line.launch.gpus, line.launch.pipeline
    if gpus is None or line.data is None or gpus % line.expert_grid or stages == 1:
        return None
    data = gpus // line.expert_grid
    if not line.on("use-tp-pp-dp-mapping") or data == line.data:
        return None
    return Broken(
        f"--use-tp-pp-dp-mapping with data-parallel size {line.data} and {data} copies of experts",
        "leave it out, or choose ETP and EP with ETP x EP = TP x CP",
    )


def _fsdp2(line: Line) -> Broken | None:
    if not line.on("use-torch-fsdp2"):
        return None
    launch = line.launch
    against = {
        f"PP {launch.pipeline}": launch.pipeline > 1,
        f"EP {launch.expert}": launch.expert > 1,
        "the distributed optimizer": line.on("use-distributed-optimizer"),
        "fp16": line.on("fp16"),
    }
    given = [words for words, holds in against.items() if holds]
    if not given:
        return None
    return Broken(f"--use-torch-fsdp2 with {', '.join(given)}", "leave one of them out")


GRID_RULES = (
    Rule(
        name="gpus-known",
        holds="rules of GPUs, batch and data-parallel size cannot be judged without",
        source="this command, --gpus",
        broken=_gpus_known,
        severity="warning",
    ),
    Rule(
        name="recipe-settings",
        holds="what a recipe sets is not read, and is judged as if it were not set",
        source="this command",
        broken=_recipe,
        severity="warning",
        launchers=frozenset((Launcher.MEGATRON_BRIDGE,)),
    ),
    Rule(
        name="gpus-divide-grid",
        holds="GPUs must be a multiple of tensor x pipeline x context size",
        source=f"core/parallel_state.py:740, {CORE}",
        broken=_grid,
    ),
    Rule(
        name="gpus-divide-expert-grid",
        holds="GPUs must be a multiple of expert tensor x expert x pipeline size",
        source=f"core/parallel_state.py:793, {CORE}",
        broken=_expert_grid,
    ),
    Rule(
        name="virtual-needs-stages",
        holds="a stage has several chunks only where there are several stages",
        source=f"core/parallel_state.py:746, {CORE}",
        broken=_virtual,
    ),
    Rule(
        name="two-stages-need-overlap",
        holds="chunks without overlapped transfers need more than two stages",
        source=f"training/arguments.py, validate_args, {MEGATRON_LM}",
        broken=_overlap,
        launchers=ARGPARSE,
    ),
    Rule(
        name="context-levels-multiply",
        holds="the product of hierarchical context sizes must be the context size",
        source=f"training/arguments.py, validate_args, {MEGATRON_LM}",
        broken=_context_levels,
    ),
    Rule(
        name="context-exchange-needs-levels",
        holds="a2a+p2p needs hierarchical context sizes",
        source=f"training/arguments.py, validate_args, {MEGATRON_LM}",
        broken=_context_exchange,
    ),
    Rule(
        name="rank-order",
        holds="experts must have as many copies as the rest where stages are not the last ranks",
        source=f"core/parallel_state.py:808, {CORE}",
        broken=_order,
        launchers=ARGPARSE,
    ),
    Rule(
        name="fsdp2-alone",
        holds="torch's FSDP2 allows no pipeline or expert parallelism, distributed optimizer or "
        "fp16",
        source=f"training/arguments.py, validate_args, {MEGATRON_LM}",
        broken=_fsdp2,
        launchers=ARGPARSE,
    ),
)
