"""The units of one encoder that a stage holds, run one after the other.

Shapes: V positions of an item (a tile or a clip), B items, H hidden size of the encoder, K tokens
of all items, E language hidden size, L layers, of two branches each.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vlm.model.audio import AudioEmbedding, AudioProjector
from megatron.vlm.model.block import PlannedBlock
from megatron.vlm.model.layers import encoder_layer_spec
from megatron.vlm.model.providers import LayerParts
from megatron.vlm.model.vision import VisionEmbedding, VisionProjector
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import ClipsEncoder, Encoder, TilesEncoder
from omnibal.model.units import projector_unit
from omnibal.pipeline.stage import Stage


class EncoderUnits(NamedTuple):
    """An encoder's units; those that the stage does not hold are None."""

    embedding: torch.nn.Module | None
    layers: PlannedBlock | None
    projector: torch.nn.Module | None

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
        """Build what a stage holds of the encoder `name`.

        Args:
            groups: that layers and projector are divided over.
        """
        tower = model.encoders[name]
        numbers, layers = stage.layers(name), None
        if numbers:
            layers = PlannedBlock(
                config,
                [encoder_layer_spec(config, tower, parts)] * len(numbers),
                recompute_layers=[stage.recomputed(name)],
                final_norm=False,
                groups=groups,
            )
        embedding = projector = None
        if stage.holds(f"{name} embed"):
            embedding = _embedding(tower, config.params_dtype)
        if stage.holds(projector_unit(model, name)):
            is_vision = isinstance(tower, TilesEncoder)
            kind = VisionProjector if is_vision else AudioProjector
            projector = kind(model, config, groups.tp)
        return cls(embedding, layers, projector)

    def modules(self, name: str) -> Iterator[tuple[str, torch.nn.Module | None]]:
        """Every unit with its name in the whole model, as checkpoints have it."""
        yield f"{name}_embedding", self.embedding
        yield name, self.layers
        yield "projector" if name == "vision" else f"{name}_projector", self.projector

    @property
    def is_held(self) -> bool:
        """Whether the stage holds any of the encoder."""
        return any(unit is not None for unit in self)

    def run(
        self,
        given: torch.Tensor | None,
        *,
        branch_scales_L2B: torch.Tensor | None = None,
        level: int = 0,
    ) -> torch.Tensor:
        """Run all units.

        Args:
            given: what the encoder takes where the embedding is held, else hidden states [V, B, H].
            branch_scales_L2B: drop path of every layer that is held.
            level: of the pack.

        Returns:
            Features [K, E] where the projector is held, else hidden states [V, B, H].
        """
        assert given is not None
        hidden = given
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        if self.layers is not None:
            hidden = self.layers(hidden, None, branch_scales_L2B=branch_scales_L2B, level=level)
        if self.projector is not None:
            hidden = self.projector(hidden)
        return hidden


def _embedding(tower: Encoder, dtype: torch.dtype) -> torch.nn.Module:
    match tower:
        case TilesEncoder():
            return VisionEmbedding(tower, dtype)
        case ClipsEncoder():
            return AudioEmbedding(tower, dtype)
        case _:
            # `omnibal.job.check.model_obstacle` refuses the plan before.
            raise NotImplementedError(f"an encoder of {tower.kind} is planned and not trained")
