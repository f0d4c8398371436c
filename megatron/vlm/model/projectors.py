"""Projectors of encoders: from hidden states of items to embeddings of language tokens.

Deepstack projectors (Qwen3-VL, arXiv 2511.21631, section 2) project an inner layer's output.

Shapes: V positions of an item, B items, H hidden size of the encoder, K tokens of all items, W
width of a token's concatenated positions, E language hidden size. Images and videos at native
resolution are one item of V positions, B = 1.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vlm.model.fused.activations import bias_gelu
from megatron.vlm.model.image_places import ImagePlaces
from megatron.vlm.model.layers import Norm
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import Encoder, ImagesEncoder, TilesEncoder


class Projector(MegatronModule):
    """Norm, concatenation of a token's positions, and an MLP: Linear, GELU, Linear.

    The norm is over H before the concatenation, or over W after it.
    """

    def __init__(
        self,
        model: ModelConfig,
        tower: Encoder,
        config: TransformerConfig,
        tp_group: dist.ProcessGroup,
        *,
        is_deepstack: bool = False,
    ) -> None:
        super().__init__(config)
        self.tp_group, self._fold = tp_group, _fold_of(tower)
        self._norms_tokens = is_deepstack or isinstance(tower, TilesEncoder)
        inputs = tower.projector_input_size
        inner = outputs = model.language.hidden_size
        if isinstance(tower, ImagesEncoder):
            inner = tower.projector_hidden_size or inputs
        if isinstance(tower, TilesEncoder):
            # A LayerNorm even if the encoder has RMSNorm, as in InternVL.
            self.norm: torch.nn.Module = torch.nn.LayerNorm(inputs, dtype=config.params_dtype)
        else:
            width = inputs if self._norms_tokens else tower.hidden_size
            self.norm = Norm(config, width, tower.norm_eps)
        options: Any = {"config": config, "init_method": config.init_method, "bias": True}
        options["tp_group"] = tp_group
        # `bias_gelu` adds the first bias.
        self.linear_fc1 = ColumnParallelLinear(inputs, inner, **options, skip_bias_add=True)
        self.linear_fc2 = RowParallelLinear(
            inner, outputs, **options, input_is_parallel=True, skip_bias_add=False
        )

    def forward(self, hidden_VBH: torch.Tensor, places: ImagePlaces | None = None) -> torch.Tensor:
        """Return token features [K, E]; `places` restores data order from window order."""
        if self._norms_tokens:
            tokens_KW = self.norm(self._fold(hidden_VBH))
        else:
            tokens_KW = self._fold(self.norm(hidden_VBH))
        features_KE = self.linear_fc2(bias_gelu(*self.linear_fc1(tokens_KW)))[0]
        return features_KE if places is None else places.restore_order(features_KE)


def _fold_of(tower: Encoder) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from positions [V, B, H] to tokens [K, W], in the order of items."""
    if isinstance(tower, TilesEncoder):
        # InternVL's pixel shuffle (`ps_version v2`); position 0 is the class token.
        factor = tower.pixel_shuffle_factor
        side = tower.patches_per_side // factor
        pattern = "(row r column c) b h -> (b row column) (r c h)"
        sizes = {"row": side, "column": side, "r": factor, "c": factor}
        return lambda hidden_VBH: rearrange(hidden_VBH[1:], pattern, **sizes)
    number = tower.positions_per_item // tower.tokens_per_item
    return lambda hidden_VBH: rearrange(hidden_VBH, "(k n) b h -> (b k) (n h)", n=number)


class DeepstackProjectors(MegatronModule):
    """An encoder's deepstack projectors on a stage, named by index in `deepstack_layers`."""

    def __init__(
        self, config: TransformerConfig, projectors: Mapping[int, torch.nn.Module]
    ) -> None:
        super().__init__(config)
        for number, projector in projectors.items():
            self.add_module(str(number), projector)
