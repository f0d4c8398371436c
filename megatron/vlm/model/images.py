"""Qwen's vision encoders around their layers: patches to positions, positions to image features.

All images and videos are one sequence. Deepstack projectors (Qwen3-VL, arXiv 2511.21631, section 2)
make features of one layer's output.

Shapes: P positions (patches) of all images, X values of a patch, H hidden size of the encoder, K
image tokens, a cell of patches each, E language hidden size.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vlm.model.fused.activations import bias_gelu
from megatron.vlm.model.image_places import ImagePlaces
from megatron.vlm.model.layers import Norm, projector_linears
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import ImagesEncoder


class ImageEmbedding(torch.nn.Module):
    """Patch embedding, with learned positions, if any, stretched over each image."""

    def __init__(self, tower: ImagesEncoder, dtype: torch.dtype) -> None:
        super().__init__()
        width = tower.hidden_size
        self.patch_projection = torch.nn.Linear(
            tower.values_per_patch, width, bias=tower.patch_bias, dtype=dtype
        )
        self.positions = None
        if tower.learned_positions:
            positions_NH = torch.zeros(tower.learned_positions, width, dtype=dtype)
            self.positions = torch.nn.Parameter(positions_NH)

    def forward(self, patches_PX: torch.Tensor, places: ImagePlaces) -> torch.Tensor:
        """Embed patches: [P, X] to [P, 1, H], in layer order."""
        dtype = self.patch_projection.weight.dtype
        patches_P1X = places.ordered(patches_PX.to(dtype)).unsqueeze(1)
        embedded_P1H = self.patch_projection(patches_P1X)
        if self.positions is not None:
            neighbours_P4, weights_P4 = places.neighbours()
            # Summed in float32: 16-bit weights would not add up to 1.
            positions_PH = F.embedding_bag(
                neighbours_P4, self.positions.float(), per_sample_weights=weights_P4, mode="sum"
            ).to(dtype)
            embedded_P1H = embedded_P1H + positions_PH.unsqueeze(1)
        return embedded_P1H


class ImageProjector(MegatronModule):
    """Norm, concatenation of a cell's patches, and an MLP: Linear, GELU, Linear.

    Args:
        norms_cells: whether the norm is over cells (deepstack projectors) or patches.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: TransformerConfig,
        tp_group: dist.ProcessGroup,
        *,
        norms_cells: bool = False,
    ) -> None:
        super().__init__(config)
        tower = model.images
        assert tower is not None
        self.tp_group = tp_group
        self.norms_cells, self.cell_positions = norms_cells, tower.positions_per_item
        wide, width = tower.projector_input_size, model.language.hidden_size
        inner = tower.projector_hidden_size or wide
        self.norm = Norm(config, wide if norms_cells else tower.hidden_size, tower.norm_eps)
        self.linear_fc1, self.linear_fc2 = projector_linears(config, tp_group, wide, inner, width)

    def forward(self, hidden_P1H: torch.Tensor, places: ImagePlaces) -> torch.Tensor:
        """Project [P, 1, H] to [K, E], in data order."""
        if self.norms_cells:
            folded = self.norm(self._folded(hidden_P1H))
        else:
            folded = self._folded(self.norm(hidden_P1H))
        features_KE = self.linear_fc2(bias_gelu(*self.linear_fc1(folded)))[0]
        return places.in_own_order(features_KE)

    def _folded(self, hidden_P1H: torch.Tensor) -> torch.Tensor:
        """Concatenate the patches of every cell, [K, H of all of them]."""
        width = self.cell_positions * hidden_P1H.shape[-1]
        return hidden_P1H.view(len(hidden_P1H) // self.cell_positions, width)


class DeepstackProjectors(MegatronModule):
    """An encoder's deepstack projectors on a stage, by layer number."""

    def __init__(self, config: TransformerConfig, projectors: dict[int, ImageProjector]) -> None:
        super().__init__(config)
        for number, projector in projectors.items():
            self.add_module(str(number), projector)
