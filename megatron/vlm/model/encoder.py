"""The units of one encoder on a stage.

Shapes: V positions of an item (a tile or a clip), B items, H hidden size of the encoder, K tokens
of all items, E language hidden size, L layers with two branches. Images at native resolution have
B = 1, with all positions in V.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vlm.backend import current_device
from megatron.vlm.inputs.batch import ITEM_FIELDS, MicroBatch
from megatron.vlm.model.block import LayerFeatures, PlannedBlock
from megatron.vlm.model.drop_path import branch_scales
from megatron.vlm.model.embeddings import AudioEmbedding, ImageEmbedding, VisionEmbedding
from megatron.vlm.model.image_places import ImagePlaces
from megatron.vlm.model.layers import encoder_layer_spec
from megatron.vlm.model.projectors import DeepstackProjectors, Projector
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import ImagesEncoder, TilesEncoder
from omnibal.model.units import projector_unit
from omnibal.pipeline.stage_units import Stage

_EMBEDDINGS: dict[str, type[torch.nn.Module]] = {
    "tiles": VisionEmbedding,
    "clips": AudioEmbedding,
    "images": ImageEmbedding,
}


class EncoderUnits:
    """An encoder's units on a stage; units of other stages are None."""

    def __init__(
        self,
        model: ModelConfig,
        name: str,
        stage: Stage,
        config: TransformerConfig,
        parts: BackendSpecProvider,
        groups: ProcessGroupCollection,
    ) -> None:
        self.name, self.tower, self.config = name, model.encoders[name], config
        tower, numbers = self.tower, stage.layers(name)
        self.embedding: torch.nn.Module | None = None
        self.layers: PlannedBlock | None = None
        self.projector: torch.nn.Module | None = None
        # By number from 0 of the layer whose output is projected.
        self.deepstack_projectors = dict[int, torch.nn.Module]()
        if stage.holds(f"{name} embed"):
            self.embedding = _EMBEDDINGS[tower.kind](tower, config.params_dtype)
        if numbers:
            specs = [encoder_layer_spec(config, tower, number, parts) for number in numbers]
            self.layers = PlannedBlock(config, specs, final_norm=False, groups=groups)
        if stage.holds(projector_unit(model, name)):
            self.projector = Projector(model, tower, config, groups.tp)
        for layer in tower.deepstack_layers if isinstance(tower, ImagesEncoder) else ():
            if layer in numbers:
                projector = Projector(model, tower, config, groups.tp, is_deepstack=True)
                self.deepstack_projectors[layer] = projector

    def modules(self) -> Iterator[tuple[str, torch.nn.Module | None]]:
        """Yield units by their name in the full model, as in checkpoints."""
        name = self.name
        yield f"{name}_embedding", self.embedding
        yield name, self.layers
        if self.deepstack_projectors:
            assert isinstance(self.tower, ImagesEncoder)
            index = self.tower.deepstack_layers.index
            named = {index(layer): module for layer, module in self.deepstack_projectors.items()}
            yield f"{name}_deepstack", DeepstackProjectors(self.config, named)
        yield "projector" if name == "vision" else f"{name}_projector", self.projector

    @property
    def is_held(self) -> bool:
        units = (self.embedding, self.layers, self.projector)
        return any(unit is not None for unit in units)

    def run(
        self, batch: MicroBatch, hidden: torch.Tensor | None, drop_path_rate: float
    ) -> list[torch.Tensor]:
        """Run this stage's units on a batch's items, or on hidden states [V, B, H].

        Returns:
            Features [K, E] if the projector is here, else hidden states [V, B, H]. Then deepstack
            features [K, E] of every local deepstack projector.
        """
        if self.embedding is not None:
            hidden = vars(batch)[ITEM_FIELDS[self.tower.feature][0]]
        assert hidden is not None
        places, arguments = tuple[ImagePlaces, ...](), dict[str, Any]()
        if isinstance(self.tower, ImagesEncoder):  # places of patches
            places = (ImagePlaces(batch.image_grids, self.tower, current_device()),)
            if self.layers is not None and hidden.numel():
                arguments["rotary_pos_emb"] = places[0].rotation(self.tower.head_width)
                arguments["packed_seq_params"] = places[0].borders
        features = LayerFeatures(
            projectors={
                number: partial(projector, places=places[0])
                for number, projector in self.deepstack_projectors.items()
            }
        )
        if self.embedding is not None:
            hidden = self.embedding(hidden, *places)
        if self.layers is not None:
            keys_B = batch.drop_path_keys_T
            if isinstance(self.tower, TilesEncoder) and keys_B is not None:
                numbers = [layer.layer_number - 1 for layer in self.layers.layers]
                scales_L2B = branch_scales(keys_B, numbers, self.tower.layers, drop_path_rate)
                scales_L2B = scales_L2B.to(current_device(), non_blocking=True)
                arguments["branch_scales_L2B"] = scales_L2B
            hidden = self.layers(hidden, None, level=batch.level, features=features, **arguments)
        if self.projector is not None:
            hidden = self.projector(hidden, *places)
        return [hidden, *features.outputs]
