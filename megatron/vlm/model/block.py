"""Transformer layers with recomputation of exactly the planned layers.

Shapes: S sequence, B batch, H hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
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

Outputs = tuple[torch.Tensor, ...]
"""Hidden states after a layer, and features made of them if any."""


def _for_gradient(run: Callable[[torch.Tensor], Outputs]) -> Callable[..., Outputs]:
    """Return a layer's forward for core's checkpoint, which keeps only the graph when run again."""

    def run_for_gradient(hidden_SBH: torch.Tensor) -> Outputs:
        outputs = run(hidden_SBH)
        if torch.is_grad_enabled():
            # The next layer already used the last output; autograd asks for its shape only.
            outputs[-1].data = outputs[-1].new_empty(1).expand(outputs[-1].shape)
        return outputs

    return run_for_gradient


class _Wanting(torch.autograd.Function):
    """Identity without gradient to the input."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, nothing: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, *gradients):
        return None, None


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """Side inputs and outputs of some layers, by number."""

    projectors: Mapping[int, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    """Feature projectors of layer outputs, recomputed with their layer."""
    made: list[torch.Tensor] = field(default_factory=list)
    """Projected features, in layer order."""
    adds: Mapping[int, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    """Functions that add features to a layer's output."""


class PlannedBlock(TransformerBlock):
    """Core's block, with recomputed layers given by number.

    Args:
        config: with `recompute_granularity="full"`, so that core calls `_checkpointed_forward`.
        recompute_layers: for every level, global numbers (from 0) of recomputed layers.
        groups: groups that divide the layers, Megatron's own by default.
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
        self._beside = Beside()

    def set_levels(self, recompute_layers: Sequence[Sequence[int]]) -> None:
        """Set each level's recomputed layers."""
        self.recompute_layers = tuple(map(frozenset, recompute_layers))

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: None,
        branch_scales_L2B: torch.Tensor | None = None,
        level: int = 0,
        routing: Routing | None = None,
        beside: Beside | None = None,
        **arguments: Any,
    ) -> torch.Tensor:
        """Run [S, B, H] through all layers, with drop-path scales; B may be 0 (no images)."""
        self._level = level
        self._branch_scales_L2B = branch_scales_L2B
        self._routing = routing
        if not hidden_states.numel():
            # Core's attention cannot reshape empty hidden states. Parameters join the graph with
            # no elements, so that they get zero gradients in layer order.
            beside = beside or Beside()
            for layer in self.layers:
                nothing = sum(weight.flatten()[:0].sum() for weight in layer.parameters())
                hidden_states = hidden_states + nothing
                projector = beside.projectors.get(layer.layer_number - 1)
                if projector is not None:
                    beside.made.append(projector(hidden_states))
            return hidden_states
        self._beside = beside or Beside()
        if self.training or beside is None:
            return super().forward(hidden_states, attention_mask, **arguments)
        # Core's own loop over layers has no side inputs.
        hidden_states = self._checkpointed_forward(
            hidden_states,
            attention_mask,
            use_inner_quantization_context=bool(self.config.fp8),
            **arguments,
        )
        return (
            hidden_states if self.final_layernorm is None else self.final_layernorm(hidden_states)
        )

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
        # Core's forward does not pass these; read now, as recomputation runs after other forwards.
        scales_L2B, again = self._branch_scales_L2B, self.recompute_layers[self._level]
        routing, beside = self._routing, self._beside
        self._beside = Beside()  # so that its tensors go with their micro-batch
        packed_again = packed_seq_params
        if isinstance(packed_seq_params, SharedAttention):
            packed_again = packed_seq_params.recomputed()
        for index, layer in enumerate(self.layers):
            # Nothing to keep before the first trained parameter.
            number = layer.layer_number - 1
            is_trained = torch.is_grad_enabled() and any(
                p.requires_grad for p in layer.parameters()
            )
            is_again = number in again and (hidden_states.requires_grad or is_trained)
            packed = packed_again if is_again else packed_seq_params
            projector = beside.projectors.get(number)

            def run(
                hidden_SBH: torch.Tensor,
                index: int = index,
                layer: Any = layer,
                packed: Any = packed,
                projector: Any = projector,
            ) -> Outputs:
                scales_2B = None
                if scales_L2B is not None:
                    scales_2B = scales_L2B[index].to(hidden_SBH.dtype)
                # With per-tensor scaling: entered here, so that recomputation enters it too.
                context = nullcontext()
                if use_inner_quantization_context:
                    context = get_fp8_context(self.config, layer.layer_number - 1)
                with context:
                    output_SBH = layer(
                        hidden_SBH,
                        attention_mask,
                        rotary_pos_emb=rotary_pos_emb,
                        packed_seq_params=packed,
                        tile_scales_2B=scales_2B,
                        routing=routing,
                    )[0]
                return (output_SBH,) if projector is None else (output_SBH, projector(output_SBH))

            if is_again:
                # Core's checkpoint needs an input with gradient, which the first layer with
                # adapters lacks if all earlier weights are frozen.
                if not hidden_states.requires_grad:
                    nothing = hidden_states.new_empty(0).requires_grad_()
                    hidden_states = _Wanting.apply(hidden_states, nothing)
                hidden_states, *features = self._checkpoint(_for_gradient(run), hidden_states)
            else:
                hidden_states, *features = run(hidden_states)
            if features:
                beside.made.extend(features)
                # A separate tensor: the stage frees sent tensors, and the projector keeps this one.
                hidden_states = hidden_states.view_as(hidden_states)
            if number in beside.adds:
                hidden_states = beside.adds[number](hidden_states)
        return hidden_states

    def _checkpoint(self, run: Callable[..., Outputs], hidden: torch.Tensor) -> Outputs:
        """Run a recomputed layer, in FP8 with Transformer Engine's checkpoint.

        It also keeps weights that are quantised without a graph.
        """
        if not self.config.fp8:
            return tensor_parallel.checkpoint(run, False, hidden)
        tracker = tensor_parallel.random.get_cuda_rng_tracker
        return te_checkpoint(run, False, tracker, self.pg_collection.tp, hidden)
