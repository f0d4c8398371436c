"""Transformer layers of all towers as specs over Megatron-core's TransformerLayer.

Shapes: S sequence (packed language tokens, or positions of an item), B batch (1, or items), H
hidden size, F feed-forward width of this rank.
"""

from typing import Any

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron.vlm.inputs.batch import Borders
from megatron.vlm.model.attention import (
    AllHeadsRMSNorm,
    ClipAttention,
    ImageAttention,
    PackedAttention,
    TileAttention,
)
from megatron.vlm.model.delta_net import GatedDeltaNet
from megatron.vlm.model.experts import MixtureOfExperts, Routing
from megatron.vlm.model.fused.activations import bias_gelu, swiglu
from megatron.vlm.model.fused.residual import (
    Branch,
    NormAndResidual,
    NormWeights,
    ScaledAddAndNorm,
    add_branch,
)
from megatron.vlm.model.fused.rotary import Rotation
from megatron.vlm.model.providers import without_bias
from megatron.vlm.model.shared_attention import SharedAttention
from omnibal.model.encoders import ClipsEncoder, EncoderLayers, Gelu, ImagesEncoder
from omnibal.model.layer_kinds import LayerKind


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm over the last axis, by `config.normalization`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps, self.is_zero_centered = eps, config.layernorm_zero_centered_gamma
        first = 0.0 if self.is_zero_centered else 1.0
        self.weight = torch.nn.Parameter(
            torch.full((hidden_size,), first, dtype=config.params_dtype)
        )
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            # A rank sees its part of the sequence, so core sums gradients over ranks.
            parameter.sequence_parallel = config.sequence_parallel

    @property
    def weights(self) -> NormWeights:
        # Stored minus 1 (core's zero-centered gamma); not rounded after the addition.
        weight = 1 + self.weight.float() if self.is_zero_centered else self.weight
        return NormWeights(weight, self.bias, self.eps)

    def forward(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        normed_SBH, _ = NormAndResidual.apply(hidden_SBH, *self.weights)
        return normed_SBH


class HeadNorm(Norm):
    """Weight of Qwen3's q or k norm: an RMSNorm shared by all heads, run in `PackedAttention`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(config, hidden_size, eps)
        # A rank sees its own heads, with or without sequence parallelism.
        self.weight.sequence_parallel = config.tensor_model_parallel_size > 1  # type: ignore[attr-defined]


class LayerScale(torch.nn.Module):
    """Learned scale of a block's output: InternViT's `ls1` and `ls2`.

    Replaces core's bias-dropout-add; `Layer` adds the returned branch.

    Args:
        init: initial scale, or None for no scale, as in EVA-CLIP and language models.
    """

    def __init__(self, hidden_size: int, init: float | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = None
        if init is not None:
            self.scale = torch.nn.Parameter(torch.full((hidden_size,), init, dtype=dtype))

    def forward(
        self,
        output_SBH: torch.Tensor,
        bias_H: torch.Tensor | None,
        tile_scale_B: torch.Tensor | None,
    ) -> Branch:
        return Branch(output_SBH, bias_H, self.scale, tile_scale_B)


class Layer(TransformerLayer):
    """Core's layer with fused element-wise operations; parts and parameter names are core's."""

    def __init__(self, *arguments: Any, gelu: Gelu = "gelu", **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.gelu = gelu

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: None = None,
        rotary_pos_emb: Rotation | None = None,
        packed_seq_params: Borders | SharedAttention | None = None,
        tile_scales_2B: torch.Tensor | None = None,
        routing: Routing | None = None,
        **unused: object,
    ) -> tuple[torch.Tensor, None]:
        """Return the layer's hidden states [S, B, H], and None for core's context."""
        # Residual adds are fused with the next norm, and norms' backwards with the gradient of the
        # residual.
        attention_scale_B, mlp_scale_B = (None, None) if tile_scales_2B is None else tile_scales_2B
        normed_SBH, residual_SBH = NormAndResidual.apply(
            hidden_states, *self.input_layernorm.weights
        )
        output_and_bias = self.self_attention(
            normed_SBH,
            attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
        )
        branch = self.self_attn_bda(*output_and_bias, attention_scale_B)
        normed_SBH, residual_SBH = ScaledAddAndNorm.apply(
            residual_SBH, *branch, *self.pre_mlp_layernorm.weights
        )
        del output_and_bias, branch  # only some backwards need this memory
        if isinstance(self.mlp, MixtureOfExperts):
            output_and_bias = self.mlp(normed_SBH, routing)
        else:
            inner, bias_F = self.mlp.linear_fc1(normed_SBH)  # the activation adds the bias
            output_and_bias = self.mlp.linear_fc2(
                swiglu(inner, bias_F)
                if self.config.gated_linear_unit
                else bias_gelu(inner, bias_F, self.gelu)
            )
            del inner
        branch = self.mlp_bda(*output_and_bias, mlp_scale_B)
        return add_branch(residual_SBH, branch), None


def encoder_layer_spec(
    config: TransformerConfig, tower: EncoderLayers, number: int, parts: BackendSpecProvider
) -> ModuleSpec:
    """Return the spec of layer `number` from 0: full attention in an item, image or window."""
    if isinstance(tower, ImagesEncoder):
        attention = _attention_spec(
            ImageAttention,
            parts,
            AttnMaskType.no_mask,
            qkv_bias=tower.qkv_bias,
            windowed=tower.is_windowed(number),
        )
        return _layer_spec(config, attention, parts, None, gelu=tower.activation)
    attention = _attention_spec(
        ClipAttention if isinstance(tower, ClipsEncoder) else TileAttention,
        parts,
        AttnMaskType.no_mask,
        qkv_bias=tower.qkv_bias,
        qk_norm=AllHeadsRMSNorm if tower.qk_norm else None,
    )
    return _layer_spec(config, attention, parts, tower.layer_scale_init)


def language_layer_spec(
    config: TransformerConfig, kind: LayerKind, parts: BackendSpecProvider
) -> ModuleSpec:
    """Return the spec of a decoder layer: attention within a sample, MLP or experts."""
    qk_norm = HeadNorm if config.qk_layernorm else None
    attention = _attention_spec(PackedAttention, parts, AttnMaskType.causal, qk_norm=qk_norm)
    if kind.linear is not None:
        projections = GatedDeltaNetSubmodules(
            in_proj=parts.column_parallel_linear(), out_proj=parts.row_parallel_linear()
        )
        # Core's prediction layer asks for the mask.
        params = {"linear": kind.linear, "attn_mask_type": AttnMaskType.causal}
        attention = ModuleSpec(GatedDeltaNet, params, projections)
    has_experts = config.num_moe_experts is not None
    return _layer_spec(config, attention, parts, None, MixtureOfExperts if has_experts else None)


def _attention_spec(
    module: type,
    parts: BackendSpecProvider,
    mask: AttnMaskType,
    *,
    qkv_bias: bool = True,
    qk_norm: type | None = None,
    **params: Any,
) -> ModuleSpec:
    """Return an attention spec; `qkv_bias=False` overrides the configuration's biases."""
    column = parts.column_parallel_linear()
    return ModuleSpec(
        module=module,
        params={"attn_mask_type": mask, **params},
        submodules=SelfAttentionSubmodules(
            linear_qkv=column if qkv_bias else without_bias(column),
            core_attention=parts.core_attention(),
            linear_proj=parts.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def _layer_spec(
    config: TransformerConfig,
    attention: ModuleSpec,
    parts: BackendSpecProvider,
    layer_scale_init: float | None,
    feed_forward: type[MixtureOfExperts] | None = None,
    gelu: Gelu = "gelu",
) -> ModuleSpec:
    size, dtype = config.hidden_size, config.params_dtype
    scale = {"hidden_size": size, "init": layer_scale_init, "dtype": dtype}
    layer_scale = ModuleSpec(module=LayerScale, params=scale)
    mlp = MLPSubmodules(
        linear_fc1=parts.column_parallel_linear(), linear_fc2=parts.row_parallel_linear()
    )
    return ModuleSpec(
        module=Layer,
        params={"gelu": gelu},
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=attention,
            self_attn_bda=layer_scale,
            pre_mlp_layernorm=Norm,
            mlp=feed_forward or ModuleSpec(module=MLP, submodules=mlp),
            mlp_bda=layer_scale,
        ),
    )
