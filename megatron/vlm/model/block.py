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
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vlm.inputs.batch import Borders
from megatron.vlm.model.experts import Routing
from megatron.vlm.model.fused.rotary import Rotation
from megatron.vlm.model.layers import Norm
from megatron.vlm.model.shared_attention import SharedAttention

Outputs = tuple[torch.Tensor, ...]  # a layer's hidden states, and features projected from them
Transform = Callable[[torch.Tensor], torch.Tensor]


class _RequireGradient(torch.autograd.Function):
    """Identity with an output in the graph, without a gradient of the input."""

    @staticmethod
    def forward(ctx, tensor, trained):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, *gradients):
        return None, None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFeatures:
    """Features projected from, or added to, outputs of layers, by layer number from 0."""

    projectors: Mapping[int, Transform] = field(default_factory=dict)  # recomputed with their layer
    outputs: list[torch.Tensor] = field(default_factory=list)  # projected features, in layer order
    additions: Mapping[int, Transform] = field(default_factory=dict)  # add to hidden states


class PlannedBlock(TransformerBlock):
    """Core's block with another loop, which recomputes layers given by number.

    Args:
        groups: process groups that divide the layers, core's by default.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_specs: Sequence[ModuleSpec],
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
        self.set_levels([[]])

    def set_levels(self, recompute_layers: Sequence[Sequence[int]]) -> None:
        """Recompute these layers (global numbers from 0) of packs of each level."""
        self.recompute_layers = tuple(map(frozenset, recompute_layers))

    def forward(
        self,
        hidden_SBH: torch.Tensor,
        attention_mask: None,
        *,
        branch_scales_L2B: torch.Tensor | None = None,
        level: int = 0,
        routing: Routing | None = None,
        features: LayerFeatures | None = None,
        rotary_pos_emb: Rotation | None = None,
        packed_seq_params: Borders | SharedAttention | None = None,
    ) -> torch.Tensor:
        """Run [S, B, H] through all layers, with drop-path scales; S or B may be 0 (no items)."""
        features = features or LayerFeatures()
        if not hidden_SBH.numel():
            # Core's attention cannot reshape empty tensors. Parameters still get zero gradients, in
            # layer order, as reductions on all ranks need.
            for layer in self.layers:
                hidden_SBH = hidden_SBH + sum(p.flatten()[:0].sum() for p in layer.parameters())
                projector = features.projectors.get(layer.layer_number - 1)
                if projector is not None:
                    features.outputs.append(projector(hidden_SBH))
            return hidden_SBH
        if not self.training:
            branch_scales_L2B = None  # no drop path
        recomputed_params = packed_seq_params
        if isinstance(packed_seq_params, SharedAttention):
            recomputed_params = packed_seq_params.for_recomputation()
        for index, layer in enumerate(self.layers):
            number = layer.layer_number - 1
            is_recomputed = self.training and number in self.recompute_layers[level]
            # Layers before the first trained parameter keep no activations: nothing to recompute.
            is_recomputed &= hidden_SBH.requires_grad or (
                torch.is_grad_enabled() and any(p.requires_grad for p in layer.parameters())
            )
            run = self._prepare_layer(
                layer,
                None if branch_scales_L2B is None else branch_scales_L2B[index],
                features.projectors.get(number),
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=recomputed_params if is_recomputed else packed_seq_params,
                routing=routing,
            )
            if is_recomputed:
                hidden_SBH, *projected = self._checkpoint(run, hidden_SBH)
            else:
                hidden_SBH, *projected = run(hidden_SBH)
            if projected:
                features.outputs.extend(projected)
                # Another tensor: the stage frees sent tensors, and the projector keeps this tensor.
                hidden_SBH = hidden_SBH.view_as(hidden_SBH)
            if number in features.additions:
                hidden_SBH = features.additions[number](hidden_SBH)
        return hidden_SBH if self.final_layernorm is None else self.final_layernorm(hidden_SBH)

    def _prepare_layer(
        self,
        layer: Any,
        scales_2B: torch.Tensor | None,
        projector: Transform | None,
        **arguments: Any,
    ) -> Callable[[torch.Tensor], Outputs]:
        """Return a function that runs a layer, and its feature projector if any."""

        def run(hidden_SBH: torch.Tensor) -> Outputs:
            scales = None if scales_2B is None else scales_2B.to(hidden_SBH.dtype)
            # Entered here, so that recomputation enters it too.
            context = nullcontext()
            if self.config.fp8:
                context = get_fp8_context(self.config, layer.layer_number - 1)
            with context:
                output_SBH, _ = layer(hidden_SBH, None, tile_scales_2B=scales, **arguments)
            return (output_SBH,) if projector is None else (output_SBH, projector(output_SBH))

        return run

    def _checkpoint(self, run: Callable[..., Outputs], hidden_SBH: torch.Tensor) -> Outputs:
        # Core's checkpoint differentiates only if an input requires a gradient, which the input of
        # the first layer with adapters does not if all earlier weights are frozen.
        if not hidden_SBH.requires_grad:
            trained = hidden_SBH.new_empty(0).requires_grad_()
            hidden_SBH = _RequireGradient.apply(hidden_SBH, trained)

        def run_for_graph(hidden_SBH: torch.Tensor) -> Outputs:
            outputs = run(hidden_SBH)
            if torch.is_grad_enabled():
                # Run again for its graph: later layers have used the output, and autograd checks
                # its shape only.
                outputs[-1].data = outputs[-1].new_empty(1).expand(outputs[-1].shape)
            return outputs

        if not self.config.fp8:
            return tensor_parallel.checkpoint(run_for_graph, False, hidden_SBH)
        # Transformer Engine's checkpoint also keeps weights that are quantised without a graph.
        tracker = tensor_parallel.random.get_cuda_rng_tracker
        return te_checkpoint(run_for_graph, False, tracker, self.pg_collection.tp, hidden_SBH)
