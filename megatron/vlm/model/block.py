"""A run of transformer layers that recomputes exactly the layers named by the plan.

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
"""Hidden states after a layer, and where something else takes them too, what that gives."""


def _for_gradient(run: Callable[[torch.Tensor], Outputs]) -> Callable[..., Outputs]:
    """The layer's forward for core's checkpoint, which when it runs again needs its graph alone."""

    def run_for_gradient(hidden_SBH: torch.Tensor) -> Outputs:
        outputs = run(hidden_SBH)
        if torch.is_grad_enabled():
            # Only what comes next needs the last one, and has had it. Autograd asks for its shape.
            outputs[-1].data = outputs[-1].new_empty(1).expand(outputs[-1].shape)
        return outputs

    return run_for_gradient


class _Wanting(torch.autograd.Function):
    """A tensor as it is, whose gradient ends here."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, nothing: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, *gradients):
        return None, None


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """What is done with the outputs of some layers, by number, besides handing them on."""

    projectors: Mapping[int, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    """Modules that make features of a layer's output; recomputed with their layer."""
    made: list[torch.Tensor] = field(default_factory=list)
    """Place for these features, in the order of their layers."""
    adds: Mapping[int, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    """Functions that add features to a layer's output, and give the sum."""


class PlannedBlock(TransformerBlock):
    """Core's block with its recompute rule replaced by a set of layer numbers.

    Core counts recomputed layers from the front of a stage; the plan names them one by one.

    Args:
        config: must have `recompute_granularity="full"`, which makes core's forward call
            `_checkpointed_forward` in training.
        recompute_layers: for every level of packs, global layer numbers, from 0, of layers whose
            activations are dropped after forward and computed again in backward.
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
        self._beside = Beside()

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
        beside: Beside | None = None,
        **arguments: Any,
    ) -> torch.Tensor:
        """Run [S, B, H] through all layers, with drop path's scales of both branches of each; B may
        be 0, as in a pack without images."""
        self._level = level
        self._branch_scales_L2B = branch_scales_L2B
        self._routing = routing
        if not hidden_states.numel():
            return self._empty_forward(hidden_states, beside or Beside())
        self._beside = beside or Beside()
        if self.training or beside is None:
            return super().forward(hidden_states, attention_mask, **arguments)
        # Core's own loop over layers has nothing beside them.
        hidden_states = self._checkpointed_forward(
            hidden_states,
            attention_mask,
            use_inner_quantization_context=bool(self.config.fp8),
            **arguments,
        )
        return (
            hidden_states if self.final_layernorm is None else self.final_layernorm(hidden_states)
        )

    def _empty_forward(self, hidden_SBH: torch.Tensor, beside: Beside) -> torch.Tensor:
        """Hidden states of no position, which core's attention cannot reshape.

        The parameters still join the graph, by none of their elements, so that this pack too gives
        each of them a gradient: zero; layer by layer, as gradients of whole ones come.
        """
        for layer in self.layers:
            hidden_SBH = hidden_SBH + sum(
                weight.flatten()[:0].sum() for weight in layer.parameters()
            )
            projector = beside.projectors.get(layer.layer_number - 1)
            if projector is not None:
                beside.made.append(projector(hidden_SBH))
        return hidden_SBH

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
        routing, beside = self._routing, self._beside
        self._beside = Beside()  # so that its tensors go with their micro-batch
        packed_again = packed_seq_params
        if isinstance(packed_seq_params, SharedAttention):
            packed_again = packed_seq_params.recomputed()
        for index, layer in enumerate(self.layers):
            # Before the first trained parameter there is nothing to keep.
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
                # Of a scale of each tensor's own: entered here, so that it is again in backward.
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
                # Core's checkpoint gives gradients only where the input wants one: not that of the
                # first layer with adapters, where all before is frozen.
                if not hidden_states.requires_grad:
                    nothing = hidden_states.new_empty(0).requires_grad_()
                    hidden_states = _Wanting.apply(hidden_states, nothing)
                hidden_states, *features = self._checkpoint(_for_gradient(run), hidden_states)
            else:
                hidden_states, *features = run(hidden_states)
            if features:
                beside.made.extend(features)
                # A tensor of its own: a stage lets go of what it sends, and the projector keeps it.
                hidden_states = hidden_states.view_as(hidden_states)
            if number in beside.adds:
                hidden_states = beside.adds[number](hidden_states)
        return hidden_states

    def _checkpoint(self, run: Callable[..., Outputs], hidden: torch.Tensor) -> Outputs:
        """Run a layer that is recomputed in backward, by whom core has do it: in FP8 by Transformer
        Engine, which then also keeps weights for backward that it quantises without a graph."""
        if not self.config.fp8:
            return tensor_parallel.checkpoint(run, False, hidden)
        tracker = tensor_parallel.random.get_cuda_rng_tracker
        return te_checkpoint(run, False, tracker, self.pg_collection.tp, hidden)
