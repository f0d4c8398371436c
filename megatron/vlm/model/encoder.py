"""The units of one encoder on a stage.

Shapes: V positions of an item (a tile or a clip), B items, H hidden size of the encoder, K tokens
of all items, E language hidden size, L layers with two branches. Images at native resolution have
B = 1, with all positions in V.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vlm.backend import current_device
from megatron.vlm.model.block import LayerFeatures, PlannedBlock
from megatron.vlm.model.embeddings import AudioEmbedding, ImageEmbedding, VisionEmbedding
from megatron.vlm.model.image_places import ImagePlaces
from megatron.vlm.model.layers import encoder_layer_spec
from megatron.vlm.model.projectors import DeepstackProjectors, Projector
from megatron.vlm.model.providers import LayerParts
from omnibal.data.native_resolution import Grid
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import Encoder, ImagesEncoder
from omnibal.model.units import projector_unit
from omnibal.pipeline.stage_units import Stage

_EMBEDDINGS: dict[str, type[torch.nn.Module]] = {
    "tiles": VisionEmbedding,
    "clips": AudioEmbedding,
    "images": ImageEmbedding,
}


class EncoderUnits(NamedTuple):
    """An encoder's units; units of other stages are None."""

    tower: Encoder
    embedding: torch.nn.Module | None
    layers: PlannedBlock | None
    projector: torch.nn.Module | None
    deepstack: DeepstackProjectors | None = None

    @classmethod
    def build(
        cls,
        model: ModelConfig,
        name: str,
        stage: Stage,
        config: TransformerConfig,
        parts: LayerParts,
        groups: ProcessGroupCollection,
    ) -> "EncoderUnits":
        tower = model.encoders[name]
        numbers, layers = stage.layers(name), None
        if numbers:
            layers = PlannedBlock(
                config,
                [encoder_layer_spec(config, tower, number, parts) for number in numbers],
                recompute_layers=[stage.recomputed_in(name)],
                final_norm=False,
                groups=groups,
            )
        embedding = projector = deepstack = None
        if stage.holds(f"{name} embed"):
            embedding = _EMBEDDINGS[tower.kind](tower, config.params_dtype)
        if stage.holds(projector_unit(model, name)):
            projector = Projector(model, tower, config, groups.tp)
        if isinstance(tower, ImagesEncoder):
            deepstack_projectors = {
                number: Projector(model, tower, config, groups.tp, is_deepstack=True)
                for number, layer in enumerate(tower.deepstack_layers)
                if layer in numbers
            }
            if deepstack_projectors:
                deepstack = DeepstackProjectors(config, deepstack_projectors)
        return cls(tower, embedding, layers, projector, deepstack)

    def modules(self, name: str) -> Iterator[tuple[str, torch.nn.Module | None]]:
        """Yield units by their name in the full model, as in checkpoints."""
        yield f"{name}_embedding", self.embedding
        yield name, self.layers
        if self.deepstack is not None:
            yield f"{name}_deepstack", self.deepstack
        yield "projector" if name == "vision" else f"{name}_projector", self.projector

    @property
    def is_held(self) -> bool:
        units = (self.embedding, self.layers, self.projector)
        return any(unit is not None for unit in units)

    @property
    def deepstack_projectors(self) -> dict[int, torch.nn.Module]:
        """Return the deepstack projectors of this stage's layers, by layer number from 0."""
        if self.deepstack is None:
            return {}
        assert isinstance(self.tower, ImagesEncoder)
        held = self.deepstack.named_children()
        return {self.tower.deepstack_layers[int(number)]: module for number, module in held}

    def run(
        self,
        given: torch.Tensor | None,
        grids: Sequence[Grid] = (),
        *,
        branch_scales_L2B: torch.Tensor | None = None,
        level: int = 0,
    ) -> list[torch.Tensor]:
        """Run this stage's units.

        Args:
            given: the encoder's inputs if the embedding is here, else hidden states [V, B, H].
            branch_scales_L2B: drop-path scales of both branches of every local layer.

        Returns:
            Features [K, E] if the projector is here, else hidden states [V, B, H]. Then deepstack
            features [K, E] of every local deepstack projector.
        """
        assert given is not None
        hidden, places, arguments = given, tuple[ImagePlaces, ...](), dict[str, Any]()
        if isinstance(self.tower, ImagesEncoder):  # places of patches
            places = (ImagePlaces(grids, self.tower, current_device()),)
            if hidden.numel():
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
            hidden = self.layers(
                hidden,
                None,
                branch_scales_L2B=branch_scales_L2B,
                level=level,
                features=features,
                **arguments,
            )
        if self.projector is not None:
            hidden = self.projector(hidden, *places)
        return [hidden, *features.outputs]
