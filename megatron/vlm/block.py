"""A run of transformer layers that recomputes exactly the layers named by the plan.

Shapes: S sequence, B batch, H hidden size.
"""

from collections.abc import Sequence

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vlm.layers import Norm


class PlannedBlock(TransformerBlock):
    """Core's block with its recompute rule replaced by a set of layer numbers.

    Core counts recomputed layers from the front of a stage; the plan names them one by one.

    Args:
        config: must have `recompute_granularity="full"`, which makes core's forward call
            `_checkpointed_forward` in training.
        layer_specs: one spec for each layer of this stage.
        recompute_layers: global layer numbers, from 0, of layers whose activations are dropped
            after forward and computed again in backward.
        final_norm: whether the tower's last norm follows.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_specs: Sequence[ModuleSpec],
        recompute_layers: Sequence[int],
        final_norm: bool,
    ) -> None:
        super().__init__(
            config,
            TransformerBlockSubmodules(layer_specs=list(layer_specs), layer_norm=Norm),
            post_layer_norm=final_norm,
            post_process=final_norm,
        )
        self.recompute_layers = frozenset(recompute_layers)

    def forward(self, hidden_states: torch.Tensor, attention_mask: None, **arguments: object):
        """[S, B, H] through all layers; B may be 0, as in a pack without images."""
        if hidden_states.numel():
            return super().forward(hidden_states, attention_mask, **arguments)
        # Core's attention cannot reshape an empty batch. The parameters still join the graph, by
        # none of their elements, so that this pack too gives each of them a gradient: zero.
        return hidden_states + sum(weight.flatten()[:0].sum() for weight in self.parameters())

    def _checkpointed_forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: None,
        rotary_pos_emb: torch.Tensor | None,
        packed_seq_params: PackedSeqParams | None,
        **unused: object,
    ) -> torch.Tensor:
        """[S, B, H] through all layers; called by core's forward in training."""
        for layer in self.layers:

            def run(hidden_SBH: torch.Tensor, layer=layer) -> torch.Tensor:
                return layer(
                    hidden_SBH,
                    attention_mask,
                    rotary_pos_emb=rotary_pos_emb,
                    packed_seq_params=packed_seq_params,
                )[0]

            if layer.layer_number - 1 in self.recompute_layers:
                hidden_states = tensor_parallel.checkpoint(run, False, hidden_states)
            else:
                hidden_states = run(hidden_states)
        return hidden_states
