"""Transformer layers of both towers as specs over Megatron-core's TransformerLayer.

Shapes: S sequence (packed language tokens, or positions of one tile), B batch (1, or tiles),
H hidden size, N heads, G key/value heads, D head size, T packed tokens, W width of this rank's
heads.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
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
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from omnibal.encoders import TilesEncoder


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
        for parameter in self.parameters():
            # Each rank sees its part of the sequence; core then sums the gradients over ranks.
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        """Normalise every position, [S, B, H] to the same shape."""
        if self.bias is None:
            return F.rms_norm(hidden_SBH, (self.hidden_size,), self.weight, self.eps)
        return F.layer_norm(hidden_SBH, (self.hidden_size,), self.weight, self.bias, self.eps)


class AllHeadsRMSNorm(torch.nn.Module):
    """InternViT's qk-norm: RMSNorm over the whole width, all heads together.

    Core builds q and k norms for one head; this one spans the heads of all tensor-parallel ranks,
    of which each holds its own heads' weights. Padded heads are zero and have zero weights.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.width = config.hidden_size
        ranks = config.tensor_model_parallel_size
        own_width = config.num_attention_heads // ranks * hidden_size
        start = parallel_state.get_tensor_model_parallel_rank() * own_width
        weight_W = (torch.arange(start, start + own_width) < self.width).to(config.params_dtype)
        self.weight = torch.nn.Parameter(weight_W)
        set_tensor_model_parallel_attributes(self.weight, True, dim=0, stride=1)
        self.is_divided = ranks > 1

    def forward(self, heads_SBND: torch.Tensor) -> torch.Tensor:
        """Normalise all heads of a position together, [S, B, N, D] to the same shape."""
        flat_SBW = heads_SBND.flatten(2)
        if self.is_divided:
            normed_SBW = _DividedRMSNorm.apply(flat_SBW, self.weight, self.width, self.eps)
        else:
            normed_SBW = F.rms_norm(flat_SBW, (self.width,), self.weight, self.eps)
        return normed_SBW.view_as(heads_SBND)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ) -> dict[str, Any]:
        """State for a checkpoint (core's name): the weight is sharded along its axis."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


class _DividedRMSNorm(torch.autograd.Function):
    """RMSNorm over a width that is sharded over tensor-parallel ranks.

    One sum per position and direction is exchanged. Computes in float32 and keeps no more than
    `F.rms_norm` does.
    """

    @staticmethod
    def forward(
        ctx: Any, x_SBW: torch.Tensor, weight_W: torch.Tensor, width: int, eps: float
    ) -> torch.Tensor:
        squares_SB1 = x_SBW.float().square().sum(-1, keepdim=True)
        dist.all_reduce(squares_SB1, group=parallel_state.get_tensor_model_parallel_group())
        scale_SB1 = torch.rsqrt(squares_SB1 / width + eps)
        ctx.save_for_backward(x_SBW, weight_W, scale_SB1)
        ctx.width = width
        return (x_SBW * scale_SB1 * weight_W).to(x_SBW.dtype)

    @staticmethod
    def backward(ctx, gradient_SBW):
        x_SBW, weight_W, scale_SB1 = ctx.saved_tensors
        unit_SBW = x_SBW * scale_SB1
        own_SBW = gradient_SBW.float() * weight_W
        along_SB1 = (own_SBW * unit_SBW).sum(-1, keepdim=True)
        dist.all_reduce(along_SB1, group=parallel_state.get_tensor_model_parallel_group())
        gradient_x_SBW = scale_SB1 * (own_SBW - unit_SBW * (along_SB1 / ctx.width))
        gradient_weight_W = (gradient_SBW * unit_SBW).sum((0, 1))
        return gradient_x_SBW.to(x_SBW.dtype), gradient_weight_W.to(weight_W.dtype), None, None


class UnbiasedColumnParallelLinear(ColumnParallelLinear):
    """Column-parallel linear without a bias, for q, k and v of InternViT-6B.

    Its other linears have one, and core's `add_bias_linear` gives every linear of the tower a bias.
    """

    def __init__(self, input_size: int, output_size: int, *, bias: bool, **arguments: Any) -> None:
        super().__init__(input_size, output_size, bias=False, **arguments)


class LayerScaledAdd(torch.nn.Module):
    """Residual add with layer scale, `residual + scale * (x + bias)`: InternViT's `ls1` and `ls2`.

    It takes the place of core's bias-dropout-add, which is asked for a function and then called.

    Args:
        init: of the scale; None leaves it out, as in EVA-CLIP.
    """

    def __init__(self, hidden_size: int, init: float | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = None
        if init is not None:
            self.scale = torch.nn.Parameter(torch.full((hidden_size,), init, dtype=dtype))
        self.tile_scale_B1: torch.Tensor | None = None
        """Drop-path scales of the next forward's tiles, set by the block and used once."""

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        """Return the function that adds a scaled branch to its residual, as core asks for one."""
        tile_scale_B1, self.tile_scale_B1 = self.tile_scale_B1, None

        def add(
            branch_with_bias: tuple[torch.Tensor, torch.Tensor | None],
            residual_SBH: torch.Tensor,
            dropout: float,
        ) -> torch.Tensor:
            branch_SBH, bias_H = branch_with_bias
            if bias_H is not None:
                branch_SBH = branch_SBH + bias_H
            if tile_scale_B1 is not None:
                branch_SBH = branch_SBH * tile_scale_B1
            if self.scale is None:
                return residual_SBH + branch_SBH
            return torch.addcmul(residual_SBH, branch_SBH, self.scale)

        return add


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
        pg_collection: Any,
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
        """Attend; returns [S, B, N * D], or [T, N * D] for packed inputs."""
        if packed_seq_params is None:
            query_BNSD, key_BGSD, value_BGSD = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            context_BNSD = _attend(query_BNSD, key_BGSD, value_BGSD, self.causal)
            return context_BNSD.permute(2, 0, 1, 3).flatten(2)
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            return attend_flash(query, key, value, packed_seq_params, self.causal).flatten(1)
        return attend_by_segment(query, key, value, packed_seq_params, self.causal).flatten(1)


def _attend(
    query_BNSD: torch.Tensor, key_BGSD: torch.Tensor, value_BGSD: torch.Tensor, causal: bool
) -> torch.Tensor:
    grouped = query_BNSD.shape[1] != key_BGSD.shape[1]
    return F.scaled_dot_product_attention(
        query_BNSD, key_BGSD, value_BGSD, is_causal=causal, enable_gqa=grouped
    )


def attend_by_segment(
    query_TND: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    packed: PackedSeqParams,
    causal: bool,
) -> torch.Tensor:
    """Attention by one kernel call a sample: linear in the pack, for every device and type."""
    segments = packed.cu_seqlens_q_padded.diff().tolist()
    contexts = []
    for qkv in zip(*(x.split(segments) for x in (query_TND, key_TGD, value_TGD)), strict=True):
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in qkv)
        contexts.append(_attend(query, key, value, causal).squeeze(0).transpose(0, 1))
    return torch.cat(contexts)


def attend_flash(
    query_TND: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    packed: PackedSeqParams,
    causal: bool,
) -> torch.Tensor:
    """Attention by one kernel call for the whole pack, for CUDA and 16 bit only."""
    from torch.nn.attention.varlen import varlen_attn

    heads_per_group = query_TND.shape[1] // key_TGD.shape[1]
    options = {}
    if heads_per_group > 1 and _takes_groups(varlen_attn):
        options["enable_gqa"] = True
    elif heads_per_group > 1:
        key_TGD, value_TGD = (x.repeat_interleave(heads_per_group, 1) for x in (key_TGD, value_TGD))
    return varlen_attn(
        query_TND,
        key_TGD,
        value_TGD,
        packed.cu_seqlens_q,
        packed.cu_seqlens_kv,
        packed.max_seqlen_q,
        packed.max_seqlen_kv,
        window_size=(-1, 0) if causal else (-1, -1),
        **options,
    )


@functools.cache
def _takes_groups(attention: Callable[..., torch.Tensor]) -> bool:
    """Whether the kernel supports grouped-query attention; not in torch 2.11."""
    return "enable_gqa" in inspect.signature(attention).parameters


def vision_layer_spec(config: TransformerConfig, vision: TilesEncoder) -> ModuleSpec:
    """An InternViT layer: full attention within a tile, layer scale (if any) after each branch."""
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


def _layer_spec(
    mask: AttnMaskType, linear_qkv: type, qk_norm: type, residual_add: Any
) -> ModuleSpec:
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
