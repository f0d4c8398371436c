"""Rules of layers per stage and chunk without a layout."""

from omnibal.trainers.lint.launch import Launcher
from omnibal.trainers.lint.line import ARGPARSE, Line
from omnibal.trainers.lint.rule import CORE, SWIFT, Problems, RuleGroup
from omnibal.trainers.lint.split import even_ends

RULES = RuleGroup()
rule, core_config, validate_args = RULES.rule, RULES.core_config, RULES.validate_args
_BLOCK = "core/transformer/transformer_block.py"
_SIZED_CHUNKS = "--num-layers-per-virtual-pipeline-stage"
_COUNTED_CHUNKS = "--num-virtual-stages-per-pipeline-rank"


def _other_ends(line: Line) -> str:
    """Describe valid sizes of first and last stages."""
    ends = even_ends(line.sizes.layers, line.launch.pipeline, line.virtual or 1)
    if ends is None or line.launch.account_for_embedding or line.launch.account_for_loss:
        return "choose another PP, or give a layout"
    first, middle, last = ends
    between = f", which leaves {middle} on each between" if line.launch.pipeline > 2 else ""
    return f"give {first} layers to the first stage and {last} to the last{between}, or a layout"


def _counted(line: Line) -> str:
    """Describe the layers shared by stages."""
    extra = line.layers_to_split - line.sizes.layers
    return f"{line.sizes.layers} layers" + (f" and {extra} for embedding and loss" if extra else "")


def _even_share(line: Line) -> int | None:
    """Layers of every stage, or None if not evenly divided."""
    each, rest = divmod(line.layers_to_split, line.launch.pipeline)
    return each if line.is_plain and not rest else None


def _divisors(layers: int) -> list[int]:
    return [count for count in range(1, layers + 1) if layers % count == 0]


@rule(f"{_BLOCK}:155, transformer_config.py:1447-1460, {CORE}")
def layers_divide_stages(line: Line) -> Problems:
    """Without other flags the layers must be a multiple of the stages."""
    if line.is_plain and _even_share(line) is None:
        yield f"{_counted(line)} on {line.launch.pipeline} stages", _other_ends(line)


@rule(f"{_BLOCK}:174, transformer_config.py:1470, {CORE}")
def layers_divide_chunks(line: Line) -> Problems:
    """The layers of a stage must be a multiple of its chunks."""
    layers, stages, chunks = _even_share(line), line.launch.pipeline, line.virtual
    if layers is None or chunks is None or stages == 1:
        return
    if line.launch.layers_per_virtual_stage is None and layers % chunks:
        others = " or ".join(map(str, _divisors(layers)[1:]))
        yield (
            f"{layers} layers of a stage ({_counted(line)} on {stages}) in {chunks} chunks",
            f"use {others} chunks, or a layout",
        )


def _ends(line: Line) -> dict[str, int]:
    """Layers of the first and last stage, if given."""
    given = {"first": line.launch.first_layers, "last": line.launch.last_layers}
    return {end: count for end, count in given.items() if count is not None}


def _split_ends(line: Line) -> dict[str, int]:
    """Layers of the first and the last stage, if not overridden by a layout."""
    return _ends(line) if line.launch.layout is None else {}


def _on_ends(layers: dict[str, int]) -> str:
    return ", ".join(f"{count} layers on the {end} stage" for end, count in layers.items())


@core_config("1368, :1387")
def end_stages_hold_layers(line: Line) -> Problems:
    """The first and the last stage must hold a layer."""
    wrong = {end: count for end, count in _split_ends(line).items() if count <= 0}
    if wrong:
        change = "give it at least one, or write a layout, where a stage may have none"
        yield _on_ends(wrong), change


@core_config("1371, :1390")
def end_stages_divide_chunks(line: Line) -> Problems:
    """Layers of the first and the last stage must be multiples of the chunks."""
    chunks = line.virtual or 1
    wrong = {end: count for end, count in _split_ends(line).items() if count % chunks}
    if wrong:
        yield f"{_on_ends(wrong)} in {chunks} chunks", f"use multiples of {chunks}, or a layout"


def _middle(line: Line) -> tuple[int, int]:
    """Layers and stages between given ends, or 0 without ends."""
    ends = _split_ends(line)
    if not ends:
        return 0, 0
    return line.sizes.layers - sum(ends.values()), line.launch.pipeline - len(ends)


def _left(line: Line, layers: int, stages: int) -> str:
    """Describe the layers left by given ends."""
    ends = ", ".join(f"{end} {count}" for end, count in _ends(line).items())
    return (
        f"{line.sizes.layers} layers on {line.launch.pipeline} stages, {ends}: {layers} layers are "
        f"left for {stages} stages"
    )


@core_config("1406")
def middle_stages_and_layers(line: Line) -> Problems:
    """Middle stages and layers for them must both be there, or both not."""
    layers, stages = _middle(line)
    if bool(layers) != bool(stages):
        change = _other_ends(line) if line.launch.pipeline > 1 else "leave those numbers out"
        yield _left(line, layers, stages), change


@rule(
    f"this command alone: {CORE} builds middle stages of a negative number of layers as "
    "empty ones, so that the model has more layers than it should"
)
def middle_stages_hold_layers(line: Line) -> Problems:
    """First and last stages hold no more layers than the model has."""
    layers, stages = _middle(line)
    if layers < 0 < stages:
        yield _left(line, layers, stages), _other_ends(line)


@core_config("1414")
def middle_layers_divide_stages(line: Line) -> Problems:
    """Middle layers must be a multiple of the middle stages."""
    layers, stages = _middle(line)
    if stages and layers % stages:
        yield f"{layers} layers are left for {stages} stages", _other_ends(line)


@core_config("1422")
def middle_layers_divide_chunks(line: Line) -> Problems:
    """The layers of a middle stage must be a multiple of its chunks."""
    layers, stages = _middle(line)
    if line.virtual is None or not stages or layers % stages:
        return
    if layers // stages % line.virtual:
        given = f"{layers // stages} layers of every other stage in {line.virtual} chunks"
        yield given, _other_ends(line)


@core_config("1294")
def end_stages_or_counted(line: Line) -> Problems:
    """Layers of the first or last stage exclude counting embedding or loss as layers."""
    launch = line.launch
    if _ends(line) and (launch.account_for_embedding or launch.account_for_loss):
        yield "both are given", "leave one of them out"


@rule(f"megatron_args.py:885, {SWIFT}", launchers={Launcher.MS_SWIFT})
def end_stages_need_pipeline(line: Line) -> Problems:
    """Layers of the first or last stage need a pipeline."""
    if _ends(line) and line.launch.pipeline == 1:
        yield "layers of the first or last stage with PP 1", "leave them out, or raise PP"


@validate_args()
def one_way_of_chunks(line: Line) -> Problems:
    """Chunks are given in one way."""
    ways = {
        _SIZED_CHUNKS: line.launch.layers_per_virtual_stage,
        _COUNTED_CHUNKS: line.launch.virtual,
        "--pipeline-model-parallel-layout": line.launch.layout,
    }
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        yield " and ".join(given), "leave all but one out"


@validate_args()
def sized_chunks_exclude_ends(line: Line) -> Problems:
    """Chunks by their layers exclude layers of the first or last stage."""
    if line.launch.layers_per_virtual_stage is not None and _ends(line):
        change = f"give {_COUNTED_CHUNKS} in its place"
        yield f"{_SIZED_CHUNKS} beside layers of the first or last stage", change


@validate_args()
def sized_chunks_divide_stage(line: Line) -> Problems:
    """The layers of a stage must be a multiple of those of a chunk."""
    layers, size = _even_share(line), line.launch.layers_per_virtual_stage
    if layers is not None and size is not None and layers % size:
        others = " or ".join(map(str, _divisors(layers)[:-1]))
        yield f"{layers} layers of a stage in chunks of {size}", f"use chunks of {others}"


@validate_args(severity="ignored", launchers=ARGPARSE | {Launcher.MS_SWIFT})
def one_chunk(line: Line) -> Problems:
    """One chunk is the same as none."""
    if line.launch.virtual == 1 and line.launch.layout is None:
        yield "one chunk of every stage", "leave it out"
