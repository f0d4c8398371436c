"""InternVL's vision encoder around its layers: tiles to positions, positions to image features.

Shapes: T tiles, C channels, P pixels per side, V positions of a tile (patches and class token),
H vision hidden size, K image tokens over all tiles, E language hidden size.
"""

import torch
import torch.distributed as dist
from einops import rearrange
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vlm.model.fused.activations import bias_gelu
from megatron.vlm.model.layers import projector_linears
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import TilesEncoder

IMAGE_CHANNELS = 3


class VisionEmbedding(torch.nn.Module):
    """Tiles to patch embeddings with a class token and learned positions."""

    def __init__(self, vision: TilesEncoder, dtype: torch.dtype) -> None:
        super().__init__()
        self.patch_size = vision.patch_size
        patch_values = IMAGE_CHANNELS * vision.patch_size**2
        self.patch_projection = torch.nn.Linear(patch_values, vision.hidden_size, dtype=dtype)
        self.class_token = torch.nn.Parameter(torch.zeros(vision.hidden_size, dtype=dtype))
        self.positions = torch.nn.Parameter(
            torch.zeros(vision.positions_per_item, vision.hidden_size, dtype=dtype)
        )

    def forward(self, pixels_TCPP: torch.Tensor) -> torch.Tensor:
        """Embed tiles: [T, C, P, P] to [V, T, H]."""
        patches = rearrange(
            pixels_TCPP.to(self.positions.dtype),
            "t c (row p1) (column p2) -> (row column) t (c p1 p2)",
            p1=self.patch_size,
            p2=self.patch_size,
        )
        embedded = self.patch_projection(patches)
        class_tokens = self.class_token.expand(1, embedded.shape[1], -1)
        return torch.cat([class_tokens, embedded]) + self.positions.unsqueeze(1)


class VisionProjector(MegatronModule):
    """Pixel shuffle (`ps_version v2`) and InternVL's MLP: LayerNorm, Linear, GELU, Linear."""

    def __init__(
        self, model: ModelConfig, config: TransformerConfig, tp_group: dist.ProcessGroup
    ) -> None:
        super().__init__(config)
        self.tp_group = tp_group
        self.patches_per_side = model.vision.patches_per_side
        self.factor = model.vision.pixel_shuffle_factor
        width, wide = model.language.hidden_size, model.vision.projector_input_size
        self.norm = torch.nn.LayerNorm(wide, dtype=config.params_dtype)
        self.linear_fc1, self.linear_fc2 = projector_linears(config, tp_group, wide, width, width)

    def forward(self, hidden_VTH: torch.Tensor) -> torch.Tensor:
        """Project [V, T, H] to [K, E], dropping the class token; tiles stay in order."""
        folded = rearrange(
            hidden_VTH[1:],
            "(row r column c) t h -> (t row column) (r c h)",
            row=self.patches_per_side // self.factor,
            column=self.patches_per_side // self.factor,
            r=self.factor,
            c=self.factor,
        )
        return self.linear_fc2(bias_gelu(*self.linear_fc1(self.norm(folded))))[0]
