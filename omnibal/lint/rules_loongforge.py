"""Rules of LoongForge's lists of layers and recomputed layers."""

from omnibal.lint.launch import Launcher
from omnibal.lint.line import Line
from omnibal.lint.rule import LOONGFORGE, Broken, Rule

_ARGUMENTS = f"loongforge/train/arguments.py, _validate_legacy_pipeline_args, {LOONGFORGE}"
_LAYERS, _CHUNKS = "--custom-pipeline-layers", "--custom-virtual-pipeline-layers"
_RECOMPUTE = "--custom-pipeline-recompute-layers"
_ONLY = frozenset((Launcher.LOONGFORGE,))


def _list(line: Line) -> tuple[str, tuple[int, ...]] | None:
    layers = line.launch.layers_by_stage
    if layers is None:
        return None
    return (_CHUNKS if line.launch.is_by_chunk else _LAYERS), layers


def _count(line: Line) -> Broken | None:
    given = _list(line)
    if given is None:
        return None
    name, layers = given
    parts = line.launch.pipeline * ((line.launch.virtual or 1) if line.launch.is_by_chunk else 1)
    if len(layers) == parts and parts > 1:
        return None
    return Broken(
        f"{name} has {len(layers)} numbers for {parts} {'chunks' if name == _CHUNKS else 'stages'}",
        f"give {parts} numbers with commas" if parts > 1 else "leave it out with one stage",
    )


def _sum(line: Line) -> Broken | None:
    given = _list(line)
    if given is None or sum(given[1]) == line.sizes.layers:
        return None
    name, layers = given
    numbers = ",".join(map(str, layers))
    return Broken(
        f"{name} {numbers} adds up to {sum(layers)}, the model has {line.sizes.layers} layers",
        "correct the numbers, or check that the configuration is the right model's",
    )


def _filled(line: Line) -> Broken | None:
    given, chunks = _list(line), line.launch.virtual
    if given is None or line.launch.is_by_chunk or chunks is None or min(given[1]) >= chunks:
        return None
    return Broken(
        f"{_LAYERS} has a stage of {min(given[1])} layers for {chunks} chunks",
        f"give every stage at least {chunks}",
    )


def _alone(line: Line) -> Broken | None:
    launch = line.launch
    others = {
        "a layout": launch.layout is not None,
        "layers of the first or last stage": launch.first_layers is not None
        or launch.last_layers is not None,
        _LAYERS: launch.is_by_chunk and "custom-pipeline-layers" in line.flags,
    }
    given, beside = _list(line), [words for words, holds in others.items() if holds]
    if given is None or not beside:
        return None
    return Broken(f"{given[0]} beside {', '.join(beside)}", "leave one of them out")


def _chunked(line: Line) -> Broken | None:
    launch = line.launch
    if not launch.is_by_chunk or (launch.pipeline > 1 and launch.virtual is not None):
        return None
    return Broken(
        f"{_CHUNKS} with PP {launch.pipeline} and {launch.virtual or 'no'} chunks a stage",
        "give PP above 1 and --num-virtual-stages-per-pipeline-rank",
    )


def _recompute_count(line: Line) -> Broken | None:
    numbers, stages = line.launch.recompute_by_stage, line.launch.pipeline
    if numbers is None or (len(numbers) == stages and stages > 1):
        return None
    return Broken(
        f"{_RECOMPUTE} has {len(numbers)} numbers for {stages} stages",
        f"give {stages} numbers with commas"
        if stages > 1
        else "give --recompute-num-layers in its place",
    )


def _recompute_full(line: Line) -> Broken | None:
    if line.launch.recompute_by_stage is None or line.launch.recompute == "full":
        return None
    return Broken(
        f"{_RECOMPUTE} with granularity {line.launch.recompute or 'not given'}",
        "give --recompute-granularity full",
    )


LOONGFORGE_RULES = (
    Rule(
        name="listed-layers-for-stages",
        holds="a list of layers has a number for every stage, or for every chunk, and a comma",
        source=_ARGUMENTS,
        broken=_count,
        launchers=_ONLY,
    ),
    Rule(
        name="listed-layers-add-up",
        holds="the numbers of a list must add up to the model's layers",
        source=_ARGUMENTS,
        broken=_sum,
        launchers=_ONLY,
    ),
    Rule(
        name="listed-layers-fill-chunks",
        holds="a stage must have a layer for each of its chunks",
        source=_ARGUMENTS,
        broken=_filled,
        launchers=_ONLY,
    ),
    Rule(
        name="listed-layers-alone",
        holds="a list of layers says all of the split by itself",
        source=_ARGUMENTS,
        broken=_alone,
        launchers=_ONLY,
    ),
    Rule(
        name="listed-chunks-need-stages",
        holds="a list by chunks needs several stages and their number of chunks",
        source=_ARGUMENTS,
        broken=_chunked,
        launchers=_ONLY,
    ),
    Rule(
        name="listed-recompute-for-stages",
        holds="a list of recomputed layers has a number for every stage, and a comma",
        source=f"loongforge/train/arguments.py, _validate_custom_model_args, {LOONGFORGE}",
        broken=_recompute_count,
        launchers=_ONLY,
    ),
    Rule(
        name="listed-recompute-needs-full",
        holds="recomputed layers are listed for full recomputation",
        source=f"loongforge/train/arguments.py, _validate_custom_model_args, {LOONGFORGE}",
        broken=_recompute_full,
        launchers=_ONLY,
    ),
)
