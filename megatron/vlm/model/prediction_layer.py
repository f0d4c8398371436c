"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2) behind the last layer.

Position i joins its hidden state after the final norm with the embedding of token i + 1, runs a
layer, and the model's head predicts token i + 2.

Shapes: S packed tokens of this rank, E hidden size, X outputs of `eh_proj`: this rank's, then all.
"""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vlm.model.layers import Norm, language_layer_spec
from megatron.vlm.model.providers import LayerParts
from omnibal.model.config import LanguageConfig


class PredictionLayer(MegatronModule):
    """Projection, a layer like the model's last one, and norm, with core's names."""

    def __init__(
        self,
        config: TransformerConfig,
        language: LanguageConfig,
        parts: LayerParts,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.layernorm_epsilon
        self.enorm, self.hnorm = Norm(config, size, eps), Norm(config, size, eps)
        self.eh_proj = build_module(
            parts.column_linear,
            2 * size,
            size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=groups.tp,
        )
        layout: Any = config.pipeline_model_parallel_layout
        self.transformer_layer: Any = build_module(
            language_layer_spec(config, language.kinds[-1], parts),
            config=config,
            layer_number=language.layers + 1 - layout.get_layer_offset(),  # core adds the offset
        )
        self.final_layernorm = Norm(config, size, eps)

    def forward(
        self, hidden_S1E: torch.Tensor, embedded_S1E: torch.Tensor, **arguments: Any
    ) -> torch.Tensor:
        """Return the head's input [S, 1, E], given the embeddings of each position's next token."""
        joined_S12E = torch.cat([self.enorm(embedded_S1E), self.hnorm(hidden_S1E)], -1)
        columns_S1X, _ = self.eh_proj(joined_S12E)
        if self.config.tensor_model_parallel_size > 1:
            columns_S1X = gather_from_tensor_model_parallel_region(columns_S1X)
            if self.config.sequence_parallel:
                columns_S1X = scatter_to_sequence_parallel_region(columns_S1X)
        output_S1E, _ = self.transformer_layer(columns_S1X, None, **arguments)
        return self.final_layernorm(output_S1E)
