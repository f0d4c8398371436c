"""Rules of LoongForge's lists of layers and recomputed layers."""

from functools import partial

from omnibal.lint.launch import Launcher
from omnibal.lint.line import Line
from omnibal.lint.rule import LOONGFORGE, Problems, RuleGroup, true_of

RULES = RuleGroup("LoongForge's lists", launchers=frozenset((Launcher.LOONGFORGE,)))
_ARGUMENTS = "loongforge/train/arguments.py"
split_rule = partial(RULES.rule, f"{_ARGUMENTS}, _validate_legacy_pipeline_args, {LOONGFORGE}")
recompute_rule = partial(RULES.rule, f"{_ARGUMENTS}, _validate_custom_model_args, {LOONGFORGE}")
_LAYERS, _CHUNKS = "--custom-pipeline-layers", "--custom-virtual-pipeline-layers"
_RECOMPUTE = "--custom-pipeline-recompute-layers"


def _flag(line: Line) -> str:
    return _CHUNKS if line.launch.is_by_chunk else _LAYERS


@split_rule()
def listed_layers_for_stages(line: Line) -> Problems:
    """A list of layers has a number for every stage, or for every chunk, and a comma."""
    launch, layers, parts = line.launch, line.launch.layers_by_stage, line.launch.pipeline
    if launch.is_by_chunk:
        parts *= launch.virtual or 1
    if layers is not None and (len(layers) != parts or parts == 1):
        of = "chunks" if launch.is_by_chunk else "stages"
        yield (
            f"{_flag(line)} has {len(layers)} numbers for {parts} {of}",
            f"give {parts} numbers with commas" if parts > 1 else "leave it out with one stage",
        )


@split_rule()
def listed_layers_add_up(line: Line) -> Problems:
    """The numbers of a list must add up to the model's layers."""
    layers, given = line.sizes.layers, line.launch.layers_by_stage
    if given is not None and sum(given) != layers:
        numbers = ",".join(map(str, given))
        yield (
            f"{_flag(line)} {numbers} adds up to {sum(given)}, the model has {layers} layers",
            "correct the numbers, or check that the configuration is the right model's",
        )


@split_rule()
def listed_layers_fill_chunks(line: Line) -> Problems:
    """A stage must have a layer for each of its chunks."""
    layers, chunks = line.launch.layers_by_stage, line.launch.virtual
    if layers is None or line.launch.is_by_chunk or chunks is None:
        return
    if min(layers) < chunks:
        change = f"give every stage at least {chunks}"
        yield f"{_LAYERS} has a stage of {min(layers)} layers for {chunks} chunks", change


@split_rule()
def listed_layers_alone(line: Line) -> Problems:
    """A list of layers says all of the split by itself."""
    launch = line.launch
    beside = {
        "a layout": launch.layout is not None,
        "layers of the first or last stage": launch.first_layers is not None
        or launch.last_layers is not None,
        _LAYERS: launch.is_by_chunk and "custom-pipeline-layers" in line.flags,
    }
    if launch.layers_by_stage is not None and any(beside.values()):
        yield f"{_flag(line)} beside {', '.join(true_of(beside))}", "leave one of them out"


@split_rule()
def listed_chunks_need_stages(line: Line) -> Problems:
    """A list by chunks needs several stages and their number of chunks."""
    stages, chunks = line.launch.pipeline, line.launch.virtual
    if line.launch.is_by_chunk and (stages == 1 or chunks is None):
        change = "give PP above 1 and --num-virtual-stages-per-pipeline-rank"
        yield f"{_CHUNKS} with PP {stages} and {chunks or 'no'} chunks a stage", change


@recompute_rule()
def listed_recompute_for_stages(line: Line) -> Problems:
    """A list of recomputed layers has a number for every stage, and a comma."""
    numbers, stages = line.launch.recompute_by_stage, line.launch.pipeline
    if numbers is not None and (len(numbers) != stages or stages == 1):
        yield (
            f"{_RECOMPUTE} has {len(numbers)} numbers for {stages} stages",
            f"give {stages} numbers with commas"
            if stages > 1
            else "give --recompute-num-layers in its place",
        )


@recompute_rule()
def listed_recompute_needs_full(line: Line) -> Problems:
    """Recomputed layers are listed for full recomputation."""
    granularity = line.launch.recompute or "not given"
    if line.launch.recompute_by_stage is not None and granularity != "full":
        yield f"{_RECOMPUTE} with granularity {granularity}", "give --recompute-granularity full"
