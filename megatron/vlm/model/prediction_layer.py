"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2) behind the last layer.

Position i joins its hidden state after the final norm with the embedding of token i + 1, runs a
layer, and the model's head predicts token i + 2.

Shapes: S packed tokens of this rank, E hidden size.
"""

from typing import Any

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vlm.model.layers import Norm, language_layer_spec
from omnibal.model.config import LanguageConfig


class PredictionLayer(MultiTokenPredictionLayer):
    """Core's projection, a layer like the model's last one, and norm."""

    def __init__(
        self,
        config: TransformerConfig,
        language: LanguageConfig,
        parts: BackendSpecProvider,
        groups: ProcessGroupCollection,
    ) -> None:
        submodules = MultiTokenPredictionLayerSubmodules(
            **dict.fromkeys(("enorm", "hnorm", "layer_norm"), Norm),
            eh_proj=parts.column_parallel_linear(),
            transformer_layer=language_layer_spec(config, language.kinds[-1], parts),
        )
        super().__init__(config, submodules, pg_collection=groups)

    def forward(  # type: ignore[override]
        self, hidden_S1E: torch.Tensor, embedded_S1E: torch.Tensor, **arguments: Any
    ) -> torch.Tensor:
        """Return the head's input [S, 1, E], given the embeddings of each position's next token."""
        joined_S1E = self._concat_embeddings(hidden_S1E, embedded_S1E)
        output_S1E, _ = self.transformer_layer(joined_S1E, None, **arguments)
        return self.final_layernorm(output_S1E)
