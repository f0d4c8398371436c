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
    """Core's block with a loop of its own, which recomputes layers given by number.

    Args:
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

    def set_levels(self, recompute_layers: Sequence[Sequence[int]]) -> None:
        """Set each level's recomputed layers."""
        self.recompute_layers = tuple(map(frozenset, recompute_layers))

    def forward(
        self,
        hidden_SBH: torch.Tensor,
        attention_mask: None,
        *,
        branch_scales_L2B: torch.Tensor | None = None,
        level: int = 0,
        routing: Routing | None = None,
        beside: Beside | None = None,
        rotary_pos_emb: Rotation | None = None,
        packed_seq_params: PackedSeqParams | SharedAttention | None = None,
    ) -> torch.Tensor:
        """Run [S, B, H] through all layers, with drop-path scales; B may be 0 (no images)."""
        beside = beside or Beside()
        if not hidden_SBH.numel():
            return self._join_graph(hidden_SBH, beside)
        if not self.training:
            branch_scales_L2B = None  # no drop path
        packed_again = packed_seq_params
        if isinstance(packed_seq_params, SharedAttention):
            packed_again = packed_seq_params.recomputed()
        for index, layer in enumerate(self.layers):
            number = layer.layer_number - 1
            is_again = self._is_recomputed(layer, level, hidden_SBH)
            run = self._run_of(
                layer,
                None if branch_scales_L2B is None else branch_scales_L2B[index],
                beside.projectors.get(number),
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_again if is_again else packed_seq_params,
                routing=routing,
            )
            if is_again:
                hidden_SBH, *features = self._checkpoint(run, hidden_SBH)
            else:
                hidden_SBH, *features = run(hidden_SBH)
            if features:
                beside.made.extend(features)
                # A separate tensor: the stage frees sent tensors, and the projector keeps this one.
                hidden_SBH = hidden_SBH.view_as(hidden_SBH)
            if number in beside.adds:
                hidden_SBH = beside.adds[number](hidden_SBH)
        return hidden_SBH if self.final_layernorm is None else self.final_layernorm(hidden_SBH)

    def _join_graph(self, hidden_SBH: torch.Tensor, beside: Beside) -> torch.Tensor:
        """Add all parameters to the graph of empty hidden states, with no elements.

        Core's attention cannot reshape these. Parameters get zero gradients, in layer order.
        """
        for layer in self.layers:
            nothing = sum(weight.flatten()[:0].sum() for weight in layer.parameters())
            hidden_SBH = hidden_SBH + nothing
            projector = beside.projectors.get(layer.layer_number - 1)
            if projector is not None:
                beside.made.append(projector(hidden_SBH))
        return hidden_SBH

    def _is_recomputed(self, layer: Any, level: int, hidden_SBH: torch.Tensor) -> bool:
        """Return whether to recompute a layer: before the first trained parameter none keeps any
        activations."""
        if not self.training or layer.layer_number - 1 not in self.recompute_layers[level]:
            return False
        is_trained = torch.is_grad_enabled() and any(p.requires_grad for p in layer.parameters())
        return hidden_SBH.requires_grad or is_trained

    def _run_of(
        self,
        layer: Any,
        scales_2B: torch.Tensor | None,
        projector: Callable[[torch.Tensor], torch.Tensor] | None,
        **arguments: Any,
    ) -> Callable[[torch.Tensor], Outputs]:
        """Return the forward of a layer, and of its feature projector if any."""

        def run(hidden_SBH: torch.Tensor) -> Outputs:
            scales = None if scales_2B is None else scales_2B.to(hidden_SBH.dtype)
            # With per-tensor scaling: entered here, so that recomputation enters it too.
            context = nullcontext()
            if self.config.fp8:
                context = get_fp8_context(self.config, layer.layer_number - 1)
            with context:
                output_SBH, _ = layer(hidden_SBH, None, tile_scales_2B=scales, **arguments)
            return (output_SBH,) if projector is None else (output_SBH, projector(output_SBH))

        return run

    def _checkpoint(self, run: Callable[..., Outputs], hidden_SBH: torch.Tensor) -> Outputs:
        """Run a recomputed layer, in FP8 with Transformer Engine's checkpoint.

        It also keeps weights that are quantised without a graph.
        """
        # Core's checkpoint needs an input with gradient, which the first layer with adapters lacks
        # if all earlier weights are frozen.
        if not hidden_SBH.requires_grad:
            nothing = hidden_SBH.new_empty(0).requires_grad_()
            hidden_SBH = _Wanting.apply(hidden_SBH, nothing)
        run = _for_gradient(run)
        if not self.config.fp8:
            return tensor_parallel.checkpoint(run, False, hidden_SBH)
        tracker = tensor_parallel.random.get_cuda_rng_tracker
        return te_checkpoint(run, False, tracker, self.pg_collection.tp, hidden_SBH)
