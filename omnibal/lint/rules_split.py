"""Rules of the layers of stages and their chunks, where no layout is given."""

from omnibal.lint.launch import Launcher
from omnibal.lint.line import ARGPARSE, Line
from omnibal.lint.rule import CORE, MEGATRON_LM, SWIFT, Broken, Rule
from omnibal.lint.split import even_ends

_BLOCK = "core/transformer/transformer_block.py"
_CONFIG = "core/transformer/transformer_config.py"
_VALIDATE = f"training/arguments.py, validate_args, {MEGATRON_LM}"


def _chunks(line: Line) -> int:
    return line.virtual or 1


def _other_ends(line: Line) -> str:
    """Layers of first and last stages that would be whole, in words."""
    ends = even_ends(line.sizes.layers, line.launch.pipeline, _chunks(line))
    if ends is None or line.launch.account_for_embedding or line.launch.account_for_loss:
        return "choose another PP, or give a layout"
    first, middle, last = ends
    between = f", which leaves {middle} on each between" if line.launch.pipeline > 2 else ""
    return f"give {first} layers to the first stage and {last} to the last{between}, or a layout"


def _counted(line: Line) -> str:
    extra = line.layers_to_split - line.sizes.layers
    return f"{line.sizes.layers} layers" + (f" and {extra} for embedding and loss" if extra else "")


def _even(line: Line) -> Broken | None:
    stages = line.launch.pipeline
    if not line.is_plain or line.layers_to_split % stages == 0:
        return None
    return Broken(f"{_counted(line)} on {stages} stages", _other_ends(line))


def _even_chunks(line: Line) -> Broken | None:
    launch, stages = line.launch, line.launch.pipeline
    if not line.is_plain or line.virtual is None or stages == 1:
        return None
    if launch.layers_per_virtual_stage is not None or line.layers_to_split % stages:
        return None
    layers = line.layers_to_split // stages
    if layers % line.virtual == 0:
        return None
    divisors = [str(count) for count in range(2, layers + 1) if layers % count == 0]
    return Broken(
        f"{layers} layers of a stage ({_counted(line)} on {stages}) in {line.virtual} chunks",
        f"use {' or '.join(divisors)} chunks, or a layout",
    )


def _ends(line: Line) -> dict[str, int]:
    given = {"first": line.launch.first_layers, "last": line.launch.last_layers}
    return {end: count for end, count in given.items() if count is not None}


def _has_ends(line: Line) -> bool:
    return bool(_ends(line)) and line.launch.layout is None


def _ends_positive(line: Line) -> Broken | None:
    wrong = {end: count for end, count in _ends(line).items() if count <= 0}
    if not _has_ends(line) or not wrong:
        return None
    given = ", ".join(f"{count} layers on the {end} stage" for end, count in wrong.items())
    return Broken(given, "give it at least one, or write a layout, where a stage may have none")


def _ends_in_chunks(line: Line) -> Broken | None:
    chunks = _chunks(line)
    wrong = {end: count for end, count in _ends(line).items() if count % chunks}
    if not _has_ends(line) or not wrong:
        return None
    given = ", ".join(f"{count} layers on the {end} stage" for end, count in wrong.items())
    return Broken(f"{given} in {chunks} chunks", f"use multiples of {chunks}, or a layout")


def _middle(line: Line) -> tuple[int, int]:
    """Layers and stages that are left without those of given ends."""
    ends = _ends(line)
    return line.sizes.layers - sum(ends.values()), line.launch.pipeline - len(ends)


def _middle_exists(line: Line) -> Broken | None:
    layers, stages = _middle(line)
    if not _has_ends(line) or bool(layers) == bool(stages):
        return None
    ends = ", ".join(f"{end} {count}" for end, count in _ends(line).items())
    return Broken(
        f"{line.sizes.layers} layers on {line.launch.pipeline} stages, {ends}: {layers} layers are "
        f"left for {stages} stages",
        _other_ends(line) if line.launch.pipeline > 1 else "leave those numbers out",
    )


def _middle_positive(line: Line) -> Broken | None:
    layers, stages = _middle(line)
    if not _has_ends(line) or stages <= 0 or layers >= 0:
        return None
    ends = ", ".join(f"{end} {count}" for end, count in _ends(line).items())
    return Broken(
        f"{line.sizes.layers} layers on {line.launch.pipeline} stages, {ends}: {layers} layers are "
        f"left for {stages} stages",
        _other_ends(line),
    )


def _middle_even(line: Line) -> Broken | None:
    layers, stages = _middle(line)
    if not _has_ends(line) or stages == 0 or layers % stages == 0:
        return None
    return Broken(f"{layers} layers are left for {stages} stages", _other_ends(line))


def _middle_in_chunks(line: Line) -> Broken | None:
    layers, stages = _middle(line)
    if not _has_ends(line) or stages == 0 or layers % stages or line.virtual is None:
        return None
    if layers // stages % line.virtual == 0:
        return None
    return Broken(
        f"{layers // stages} layers of every other stage in {line.virtual} chunks",
        _other_ends(line),
    )


def _ends_or_counted(line: Line) -> Broken | None:
    launch = line.launch
    if not _ends(line) or not (launch.account_for_embedding or launch.account_for_loss):
        return None
    return Broken("both are given", "leave one of them out")


def _ends_need_stages(line: Line) -> Broken | None:
    if not _ends(line) or line.launch.pipeline > 1:
        return None
    return Broken("layers of the first or last stage with PP 1", "leave them out, or raise PP")


def _one_way_of_chunks(line: Line) -> Broken | None:
    ways = {
        "--num-layers-per-virtual-pipeline-stage": line.launch.layers_per_virtual_stage,
        "--num-virtual-stages-per-pipeline-rank": line.launch.virtual,
        "--pipeline-model-parallel-layout": line.launch.layout,
    }
    given = [name for name, value in ways.items() if value is not None]
    if len(given) < 2:
        return None
    return Broken(" and ".join(given), "leave all but one out")


def _sized_chunks_and_ends(line: Line) -> Broken | None:
    if line.launch.layers_per_virtual_stage is None or not _ends(line):
        return None
    return Broken(
        "--num-layers-per-virtual-pipeline-stage beside layers of the first or last stage",
        "give --num-virtual-stages-per-pipeline-rank in its place",
    )


def _sized_chunks(line: Line) -> Broken | None:
    size, stages = line.launch.layers_per_virtual_stage, line.launch.pipeline
    if size is None or not line.is_plain or line.layers_to_split % stages:
        return None
    layers = line.layers_to_split // stages
    if layers % size == 0:
        return None
    divisors = [str(count) for count in range(1, layers) if layers % count == 0]
    return Broken(
        f"{layers} layers of a stage in chunks of {size}", f"use chunks of {' or '.join(divisors)}"
    )


def _one_chunk(line: Line) -> Broken | None:
    if line.launch.virtual != 1 or line.launch.layout is not None:
        return None
    return Broken("one chunk of every stage", "leave it out")


SPLIT_RULES = (
    Rule(
        name="layers-divide-stages",
        holds="without other flags the layers must be a multiple of the stages",
        source=f"{_BLOCK}:155, transformer_config.py:1447-1460, {CORE}",
        broken=_even,
    ),
    Rule(
        name="layers-divide-chunks",
        holds="the layers of a stage must be a multiple of its chunks",
        source=f"{_BLOCK}:174, transformer_config.py:1470, {CORE}",
        broken=_even_chunks,
    ),
    Rule(
        name="end-stages-hold-layers",
        holds="the first and the last stage must hold a layer",
        source=f"{_CONFIG}:1368, :1387, {CORE}",
        broken=_ends_positive,
    ),
    Rule(
        name="end-stages-divide-chunks",
        holds="layers of the first and the last stage must be multiples of the chunks",
        source=f"{_CONFIG}:1371, :1390, {CORE}",
        broken=_ends_in_chunks,
    ),
    Rule(
        name="middle-stages-and-layers",
        holds="middle stages and layers for them must both be there, or both not",
        source=f"{_CONFIG}:1406, {CORE}",
        broken=_middle_exists,
    ),
    Rule(
        name="middle-stages-hold-layers",
        holds="first and last stages hold no more layers than the model has",
        source=f"this command alone: {CORE} builds middle stages of a negative number of layers as "
        "empty ones, so that the model has more layers than it should",
        broken=_middle_positive,
    ),
    Rule(
        name="middle-layers-divide-stages",
        holds="middle layers must be a multiple of the middle stages",
        source=f"{_CONFIG}:1414, {CORE}",
        broken=_middle_even,
    ),
    Rule(
        name="middle-layers-divide-chunks",
        holds="the layers of a middle stage must be a multiple of its chunks",
        source=f"{_CONFIG}:1422, {CORE}",
        broken=_middle_in_chunks,
    ),
    Rule(
        name="end-stages-or-counted",
        holds="layers of the first or last stage exclude counting embedding or loss as layers",
        source=f"{_CONFIG}:1294, {CORE}",
        broken=_ends_or_counted,
    ),
    Rule(
        name="end-stages-need-pipeline",
        holds="layers of the first or last stage need a pipeline",
        source=f"megatron_args.py:885, {SWIFT}",
        broken=_ends_need_stages,
        launchers=frozenset((Launcher.MS_SWIFT,)),
    ),
    Rule(
        name="one-way-of-chunks",
        holds="chunks are given in one way",
        source=_VALIDATE,
        broken=_one_way_of_chunks,
        launchers=ARGPARSE,
    ),
    Rule(
        name="sized-chunks-exclude-ends",
        holds="chunks by their layers exclude layers of the first or last stage",
        source=_VALIDATE,
        broken=_sized_chunks_and_ends,
        launchers=ARGPARSE,
    ),
    Rule(
        name="sized-chunks-divide-stage",
        holds="the layers of a stage must be a multiple of those of a chunk",
        source=_VALIDATE,
        broken=_sized_chunks,
        launchers=ARGPARSE,
    ),
    Rule(
        name="one-chunk",
        holds="one chunk is the same as none",
        source=_VALIDATE,
        broken=_one_chunk,
        severity="ignored",
        launchers=ARGPARSE | {Launcher.MS_SWIFT},
    ),
)
