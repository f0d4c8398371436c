"""Transformer layers of both towers as specs over Megatron-core's TransformerLayer.

Shapes: S sequence (packed language tokens, or positions of one tile), B batch (1, or tiles),
H hidden size, N heads, G key/value heads, D head size, T packed tokens.
"""

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from omnibal.config import VisionConfig


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm over the last dimension, as `config.normalization` says."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))

    def forward(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return F.rms_norm(hidden_SBH, (self.hidden_size,), self.weight, self.eps)
        return F.layer_norm(hidden_SBH, (self.hidden_size,), self.weight, self.bias, self.eps)


class AllHeadsRMSNorm(torch.nn.Module):
    """InternViT's qk-norm: RMSNorm over the whole width, all heads together.

    Core builds q and k norms for one head; this one spans `num_attention_heads * kv_channels`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        width = config.num_attention_heads * hidden_size
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=config.params_dtype))

    def forward(self, heads_SBND: torch.Tensor) -> torch.Tensor:
        flat_SBH = heads_SBND.flatten(2)
        return F.rms_norm(flat_SBH, flat_SBH.shape[-1:], self.weight, self.eps).view_as(heads_SBND)


class UnbiasedColumnParallelLinear(ColumnParallelLinear):
    """For InternViT-6B, whose q, k and v have no bias while its other linears do.

    Core ties the two: `add_bias_linear` gives every linear of the tower a bias.
    """

    def __init__(self, input_size: int, output_size: int, *, bias: bool, **arguments) -> None:
        super().__init__(input_size, output_size, bias=False, **arguments)


class LayerScaledAdd(torch.nn.Module):
    """Residual add with layer scale, `residual + scale * (x + bias)`: InternViT's `ls1` and `ls2`.

    It takes the place of core's bias-dropout-add, which is asked for a function and then called.
    """

    def __init__(self, hidden_size: int, init: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((hidden_size,), init, dtype=dtype))

    def forward(self, training: bool, fused: bool):
        return self._add

    def _add(self, branch_with_bias, residual_SBH: torch.Tensor, dropout: float) -> torch.Tensor:
        branch_SBH, bias_H = branch_with_bias
        if bias_H is not None:
            branch_SBH = branch_SBH + bias_H
        return torch.addcmul(residual_SBH, branch_SBH, self.scale)


class PackedCoreAttention(MegatronModule):
    """Scaled dot-product attention, block-diagonal over the packed samples.

    With `packed_seq_params` the inputs are [T, N, D] and attention never crosses a sample's border;
    without, they are [S, B, N, D] and each batch entry attends within itself.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None,
        softmax_scale: float | None,
        pg_collection,
    ) -> None:
        super().__init__(config=config)
        self.causal = attn_mask_type == AttnMaskType.causal

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        attn_mask_type: AttnMaskType,
        attention_bias: None,
        packed_seq_params: PackedSeqParams | None,
    ) -> torch.Tensor:
        """Returns [S, B, N * D], or [T, N * D] for packed inputs."""
        if packed_seq_params is None:
            query_BNSD, key_BGSD, value_BGSD = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            context_BNSD = _attend(query_BNSD, key_BGSD, value_BGSD, self.causal)
            return context_BNSD.permute(2, 0, 1, 3).flatten(2)
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            return _attend_flash(query, key, value, packed_seq_params, self.causal).flatten(1)
        return _attend_by_segment(query, key, value, packed_seq_params, self.causal).flatten(1)


def _attend(query_BNSD, key_BGSD, value_BGSD, causal: bool) -> torch.Tensor:
    grouped = query_BNSD.shape[1] != key_BGSD.shape[1]
    return F.scaled_dot_product_attention(
        query_BNSD, key_BGSD, value_BGSD, is_causal=causal, enable_gqa=grouped
    )


def _attend_by_segment(query_TND, key_TGD, value_TGD, packed: PackedSeqParams, causal: bool):
    """One kernel call a sample: linear in the pack, and works on every device and type."""
    segments = packed.cu_seqlens_q_padded.diff().tolist()
    contexts = [
        _attend(*(x.transpose(0, 1).unsqueeze(0) for x in qkv), causal).squeeze(0).transpose(0, 1)
        for qkv in zip(*(x.split(segments) for x in (query_TND, key_TGD, value_TGD)), strict=True)
    ]
    return torch.cat(contexts)


def _attend_flash(query_TND, key_TGD, value_TGD, packed: PackedSeqParams, causal: bool):
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(
        query_TND,
        key_TGD,
        value_TGD,
        packed.cu_seqlens_q,
        packed.cu_seqlens_kv,
        packed.max_seqlen_q,
        packed.max_seqlen_kv,
        window_size=(-1, 0) if causal else (-1, -1),
        enable_gqa=query_TND.shape[1] != key_TGD.shape[1],
    )


def vision_layer_spec(config: TransformerConfig, vision: VisionConfig) -> ModuleSpec:
    """An InternViT layer: full attention within a tile, layer scale after each branch."""
    scaled_add = ModuleSpec(
        module=LayerScaledAdd,
        params={
            "hidden_size": vision.hidden_size,
            "init": vision.layer_scale_init,
            "dtype": config.params_dtype,
        },
    )
    linear_qkv = ColumnParallelLinear if vision.qkv_bias else UnbiasedColumnParallelLinear
    qk_norm = AllHeadsRMSNorm if vision.qk_norm else IdentityOp
    return _layer_spec(AttnMaskType.no_mask, linear_qkv, qk_norm, scaled_add)


def language_layer_spec() -> ModuleSpec:
    """An InternLM2 layer: causal attention within a sample."""
    return _layer_spec(AttnMaskType.causal, ColumnParallelLinear, IdentityOp, get_bias_dropout_add)


def _layer_spec(mask: AttnMaskType, linear_qkv: type, qk_norm: type, residual_add) -> ModuleSpec:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": mask},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=linear_qkv,
                    core_attention=PackedCoreAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=qk_norm,
                    k_layernorm=qk_norm,
                ),
            ),
            self_attn_bda=residual_add,
            pre_mlp_layernorm=Norm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(
                    linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear
                ),
            ),
            mlp_bda=residual_add,
        ),
    )
