"""Shard the units of a stage over data-parallel ranks (ZeRO-3)."""

from collections.abc import Collection, Iterator

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding

from megatron.vlm.model.embeddings import ImageEmbedding, VisionEmbedding
from megatron.vlm.model.groups import ShardGroups
from megatron.vlm.model.sharded_weights import FirstValues, FlatWeights, ShardedUnit, ShardedWeights
from megatron.vlm.model.stage import VLMStage
from omnibal.model.units import LANGUAGE

# Modules whose inputs need no gradient, so that their backward reads no weights.
_INPUT_EMBEDDINGS = (VisionEmbedding, ImageEmbedding, LanguageModelEmbedding)


def divide_weights(
    stage: VLMStage,
    dense: ShardGroups,
    experts: ShardGroups,
    first_values: FirstValues,
    input_towers: Collection[str] = (),
) -> None:
    """Initialize and shard a stage's weights unit by unit, and set `stage.sharded`.

    Args:
        stage: built in `without_matrices`.
        dense, experts: groups that shard dense and expert weights.
        first_values: writes the initial values of this rank's shard.
        input_towers: towers whose hidden states enter the stage and need a gradient.
    """
    groups = {True: dense, False: experts}
    units, flat_of = list[ShardedUnit](), dict[torch.nn.Parameter, FlatWeights]()
    towers_with_gradient = set(input_towers)  # of inputs or trained units so far
    for tower, modules in list_units(stage):
        # A flat tensor per group, data type and trained or frozen; a tied matrix has its own.
        alike: dict[tuple[bool, bool, torch.dtype, bool], list[torch.nn.Parameter]] = {}
        parameters = [p for module in modules for p in module.parameters()]
        head, embedding = stage.head, stage.embedding
        if head in modules and head is not None and head.weight is None and embedding is not None:
            parameters += embedding.parameters()  # used by a tied head
        for parameter in (p for p in parameters if p not in flat_of):
            # Core marks expert parameters and a tied matrix, which two stages hold.
            marks = vars(parameter)
            is_dense, is_tied = marks.get("allreduce", True), marks.get("shared_embedding", False)
            key = is_dense, is_tied, parameter.dtype, parameter.requires_grad
            alike.setdefault(key, []).append(parameter)
        own = [FlatWeights(alike[key], groups[key[0]], first_values) for key in alike]
        flat_of |= {p: flat for flat in own for p in flat.parameters}
        flats = tuple(dict.fromkeys(flat_of[p] for p in parameters))
        if any(flat.is_trained for flat in flats):
            towers_with_gradient |= {tower, LANGUAGE}
        unit = ShardedUnit(
            tower=tower,
            modules=modules,
            flats=flats,
            reduced=tuple(flat for flat in own if flat.is_trained),
            gathers_again=tower in towers_with_gradient
            and not isinstance(modules[0], _INPUT_EMBEDDINGS),
        )
        units.append(unit)
    stage.sharded = ShardedWeights(units=tuple(units))


def list_units(stage: VLMStage) -> Iterator[tuple[str, tuple[torch.nn.Module, ...]]]:
    """Yield tower and modules of every unit in order: embed, layer, projector, or head and norm."""
    for name, encoder in stage.encoders.items():
        layers = [] if encoder.layers is None else encoder.layers.layers
        if encoder.embedding is not None:
            yield name, (encoder.embedding,)
        for layer in layers:
            projector = encoder.deepstack_projectors.get(layer.layer_number - 1)
            yield name, (layer,) if projector is None else (layer, projector)
        if encoder.projector is not None:
            yield name, (encoder.projector,)
    if stage.embedding is not None:
        yield LANGUAGE, (stage.embedding,)
    if stage.language is not None:
        yield from ((LANGUAGE, (layer,)) for layer in stage.language.layers)
        if stage.head is not None:
            modules = (
                stage.language.final_layernorm,
                stage.word_copy,
                stage.prediction,
                stage.head,
            )
            yield LANGUAGE, tuple(module for module in modules if module is not None)
