"""A run of transformer layers that recomputes exactly the layers named by the plan.

Shapes: S sequence, B batch, H hidden size.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.extensions.transformer_engine import te_checkpoint
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vlm.model.experts import Routing
from megatron.vlm.model.fused.rotary import Rotation
from megatron.vlm.model.layers import Norm
from megatron.vlm.model.shared_attention import SharedAttention


def _for_gradient(run: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The layer's forward for core's checkpoint, which when it runs again needs its graph alone."""

    def run_for_gradient(hidden_SBH: torch.Tensor) -> torch.Tensor:
        output_SBH = run(hidden_SBH)
        if torch.is_grad_enabled():
            # Only the next layer needs it, and has had it. Autograd asks for its shape.
            output_SBH.data = output_SBH.new_empty(1).expand(output_SBH.shape)
        return output_SBH

    return run_for_gradient


def _is_trained(layer: torch.nn.Module) -> bool:
    return torch.is_grad_enabled() and any(one.requires_grad for one in layer.parameters())


def _wanting(hidden_SBH: torch.Tensor) -> torch.Tensor:
    """The input of a layer that is recomputed, which core's checkpoint gives gradients only where
    it wants one itself: not that of the first layer with adapters, where all before is frozen."""
    if hidden_SBH.requires_grad:
        return hidden_SBH
    return _Wanting.apply(hidden_SBH, hidden_SBH.new_empty(0).requires_grad_())


class _Wanting(torch.autograd.Function):
    """A tensor as it is, whose gradient ends here."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, nothing: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, *gradients):
        return None, None


class PlannedBlock(TransformerBlock):
    """Core's block with its recompute rule replaced by a set of layer numbers.

    Core counts recomputed layers from the front of a stage; the plan names them one by one.

    Args:
        config: must have `recompute_granularity="full"`, which makes core's forward call
            `_checkpointed_forward` in training.
        layer_specs: one spec for each layer of this stage.
        recompute_layers: for every level of packs, global layer numbers, from 0, of layers whose
            activations are dropped after forward and computed again in backward.
        final_norm: whether the tower's last norm follows.
        groups: that the layers are divided over; without, Megatron's own of this job.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_specs: Sequence[ModuleSpec],
        recompute_layers: Sequence[Sequence[int]],
        final_norm: bool,
        groups: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(
            config,
            TransformerBlockSubmodules(layer_specs=list(layer_specs), layer_norm=Norm),
            post_layer_norm=final_norm,
            post_process=final_norm,
            pg_collection=groups,
        )
        self.set_levels(recompute_layers)
        self._level = 0
        self._branch_scales_L2B: torch.Tensor | None = None
        self._routing: Routing | None = None

    def set_levels(self, recompute_layers: Sequence[Sequence[int]]) -> None:
        """Set the recomputed layers of every level of packs."""
        self.recompute_layers = tuple(map(frozenset, recompute_layers))

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: None,
        branch_scales_L2B: torch.Tensor | None = None,
        level: int = 0,
        routing: Routing | None = None,
        **arguments: object,
    ) -> torch.Tensor:
        """Run [S, B, H] through all layers; B may be 0, as in a pack without images.

        Args:
            branch_scales_L2B: drop path of both branches of every layer.
            level: of the pack.
            routing: of the micro-batch, where layers have a mixture of experts.
        """
        self._level = level
        self._branch_scales_L2B = branch_scales_L2B
        self._routing = routing
        if hidden_states.numel():
            return super().forward(hidden_states, attention_mask, **arguments)
        # Core's attention cannot reshape an empty batch. The parameters still join the graph, by
        # none of their elements, so that this pack too gives each of them a gradient: zero.
        return hidden_states + sum(weight.flatten()[:0].sum() for weight in self.parameters())

    def _checkpointed_forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: None,
        rotary_pos_emb: Rotation | None,
        packed_seq_params: PackedSeqParams | SharedAttention | None,
        use_inner_quantization_context: bool,
        **unused: object,
    ) -> torch.Tensor:
        """Run [S, B, H] through all layers; called by core's forward in training."""
        # Core's forward does not hand these on. Taken here, as other micro-batches' forwards come
        # before this one's layers are recomputed.
        scales_L2B, again = self._branch_scales_L2B, self.recompute_layers[self._level]
        routing = self._routing
        packed_again = packed_seq_params
        if isinstance(packed_seq_params, SharedAttention):
            packed_again = packed_seq_params.recomputed()
        for index, layer in enumerate(self.layers):
            # Before the first trained parameter there is nothing to keep.
            is_again = layer.layer_number - 1 in again and (
                hidden_states.requires_grad or _is_trained(layer)
            )
            packed = packed_again if is_again else packed_seq_params

            def run(
                hidden_SBH: torch.Tensor,
                index: int = index,
                layer: Any = layer,
                packed: Any = packed,
            ) -> torch.Tensor:
                scales_2B = None
                if scales_L2B is not None:
                    scales_2B = scales_L2B[index].to(hidden_SBH.dtype)
                # Of a scale of each tensor's own: entered here, so that it is again in backward.
                context = nullcontext()
                if use_inner_quantization_context:
                    context = get_fp8_context(self.config, layer.layer_number - 1)
                with context:
                    return layer(
                        hidden_SBH,
                        attention_mask,
                        rotary_pos_emb=rotary_pos_emb,
                        packed_seq_params=packed,
                        tile_scales_2B=scales_2B,
                        routing=routing,
                    )[0]

            if is_again:
                hidden_states = self._checkpoint(_for_gradient(run), _wanting(hidden_states))
            else:
                hidden_states = run(hidden_states)
        return hidden_states

    def _checkpoint(self, run: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """Run a layer that is recomputed in backward, by whom core has do it: in FP8 by Transformer
        Engine, which then also keeps weights for backward that it quantises without a graph."""
        if not self.config.fp8:
            return tensor_parallel.checkpoint(run, False, hidden)
        tracker = tensor_parallel.random.get_cuda_rng_tracker
        return te_checkpoint(run, False, tracker, self.pg_collection.tp, hidden)
