"""Units of a stage in order, sharded over data-parallel ranks."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding

from megatron.vlm.model.groups import ShardGroups
from megatron.vlm.model.images import ImageEmbedding
from megatron.vlm.model.sharded_weights import FirstValues, FlatWeights, ShardedUnit, ShardedWeights
from megatron.vlm.model.stage import VLMStage
from megatron.vlm.model.vision import VisionEmbedding
from omnibal.model.units import LANGUAGE

_READS_NO_WEIGHTS_BACK = (VisionEmbedding, ImageEmbedding, LanguageModelEmbedding)
"""Modules with a backward that reads no weights: their inputs need no gradient."""


def divide_weights(
    stage: VLMStage,
    dense: ShardGroups,
    experts: ShardGroups,
    first_values: FirstValues,
    fed: Collection[str] = (),
) -> None:
    """Initialize a stage's weights unit by unit and shard each unit at once.

    A unit is as in a plan: an embedding, a layer, a projector, or the head with its norm.

    Args:
        stage: built in `without_matrices`.
        dense: ranks that shard dense weights.
        experts: ranks that shard the experts they share.
        fed: towers of the stage's inputs that need a gradient.
    """
    units = _Units({True: dense, False: experts}, first_values)
    for name, encoder in stage.encoders.items():
        units.is_fed = name in fed
        units.add_tower(name, [encoder.embedding])
        for layer in _layers(stage, name):
            projector = encoder.deepstack_projectors.get(layer.layer_number - 1)
            units.add(name, (layer,) if projector is None else (layer, projector))
        units.add_tower(name, [encoder.projector])
    units.is_fed = LANGUAGE in fed or any(
        flat.is_trained for unit in units.units for flat in unit.flats
    )
    units.add_tower(LANGUAGE, [stage.embedding, *_layers(stage, LANGUAGE)])
    if stage.head is not None:
        assert stage.language is not None and stage.language.final_layernorm is not None
        # A tied head uses the embedding's weights.
        tied = [stage.embedding] if stage.head.weight is None and stage.embedding else []
        units.add(LANGUAGE, (stage.language.final_layernorm, stage.head), also=tied)
    stage.sharded = ShardedWeights(units=tuple(units.units))


def _layers(stage: VLMStage, tower: str) -> list[Any]:
    block = stage.blocks.get(tower)
    return [] if block is None else list(block.layers)


class _Units:
    """Builder of a stage's units."""

    def __init__(self, groups: dict[bool, ShardGroups], first_values: FirstValues) -> None:
        self.units: list[ShardedUnit] = []
        self.is_fed = False
        """Whether the next unit's input needs a gradient."""
        self._groups, self._first_values = groups, first_values
        self._flats: dict[torch.nn.Parameter, FlatWeights] = {}

    def add_tower(self, name: str, modules: Sequence[torch.nn.Module | None]) -> None:
        """Add one unit per module."""
        for module in modules:
            if module is not None:
                self.add(name, (module,))

    def add(
        self, tower: str, modules: tuple[torch.nn.Module, ...], also: Sequence[torch.nn.Module] = ()
    ) -> None:
        """Add one unit, which may use modules of earlier units too (`also`)."""
        own = self._divided([p for module in modules for p in module.parameters()])
        shared = [self._flats[p] for module in also for p in module.parameters()]
        flats = tuple(dict.fromkeys([*own, *shared]))
        self.is_fed = self.is_fed or any(flat.is_trained for flat in flats)
        reads_none = isinstance(modules[0], _READS_NO_WEIGHTS_BACK)
        unit = ShardedUnit(
            tower=tower,
            modules=modules,
            flats=flats,
            reduced=tuple(flat for flat in own if flat.is_trained),
            gathers_again=self.is_fed and not reads_none,
        )
        self.units.append(unit)

    def _divided(self, parameters: Sequence[torch.nn.Parameter]) -> list[FlatWeights]:
        """Shard a unit's parameters by type, ranks and training, and the tied matrix separately."""
        alike: dict[tuple[bool, bool, torch.dtype, bool], list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            # Core's marks of expert parameters, and of a tied matrix, which two stages shard alike.
            marks = vars(parameter)
            is_tied = marks.get("shared_embedding", False)
            is_trained = parameter.requires_grad
            key = marks.get("allreduce", True), is_tied, parameter.dtype, is_trained
            alike.setdefault(key, []).append(parameter)
        flats = [
            FlatWeights(own, self._groups[key[0]], self._first_values) for key, own in alike.items()
        ]
        self._flats |= {p: flat for flat in flats for p in flat.parameters}
        return flats
