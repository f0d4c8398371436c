"""Rules of LoongForge's lists of layers and recomputed layers."""

from functools import partial

from omnibal.trainers.lint.launch import Launcher
from omnibal.trainers.lint.line import Line
from omnibal.trainers.lint.rule import LOONGFORGE, Problems, RuleGroup

RULES = RuleGroup()
rule = partial(RULES.rule, launchers={Launcher.LOONGFORGE})
_ARGUMENTS = "loongforge/train/arguments.py"
_OF_SPLIT = f"{_ARGUMENTS}, _validate_legacy_pipeline_args, {LOONGFORGE}"
_LAYERS, _CHUNKS = "--custom-pipeline-layers", "--custom-virtual-pipeline-layers"
_RECOMPUTE = "--custom-pipeline-recompute-layers"


def _flag(line: Line) -> str:
    return _CHUNKS if line.launch.is_by_chunk else _LAYERS


@rule(_OF_SPLIT)
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


@rule(_OF_SPLIT)
def listed_layers_add_up(line: Line) -> Problems:
    """The numbers of a list must add up to the model's layers."""
    layers, given = line.sizes.layers, line.launch.layers_by_stage
    if given is not None and sum(given) != layers:
        numbers = ",".join(map(str, given))
        yield (
            f"{_flag(line)} {numbers} adds up to {sum(given)}, the model has {layers} layers",
            "correct the numbers, or check that the configuration is the right model's",
        )


@rule(_OF_SPLIT)
def listed_layers_fill_chunks(line: Line) -> Problems:
    """A stage must have a layer for each of its chunks."""
    layers, chunks = line.launch.layers_by_stage, line.launch.virtual
    if layers is None or line.launch.is_by_chunk or chunks is None:
        return
    if min(layers) < chunks:
        change = f"give every stage at least {chunks}"
        yield f"{_LAYERS} has a stage of {min(layers)} layers for {chunks} chunks", change


@rule(f"{_ARGUMENTS}, _validate_custom_model_args, {LOONGFORGE}")
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
