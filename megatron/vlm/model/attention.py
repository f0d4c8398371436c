"""Attention of both towers: full within a tile, causal within a packed sample.

Shapes: S sequence (packed language tokens, or positions of one tile), B batch (1, or tiles),
H hidden size, N heads, G key/value heads, D head size, T packed tokens, W width of this rank's
heads.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron.vlm.model.flash_attention import attend_flash
from megatron.vlm.model.fused.head_norms import split_with_norms
from megatron.vlm.model.fused.rotary import Rotation, split_and_rotate

_HEAD_SIZE_MULTIPLE = 8


class AllHeadsRMSNorm(torch.nn.Module):
    """Weight of InternViT's q or k norm: RMSNorm over the whole width, all heads together.

    Core builds q and k norms for one head; this one spans the heads of all tensor-parallel ranks,
    of which each holds its own heads' weights. Padded heads are zero and have zero weights.
    `TileAttention` normalises q and k together.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        ranks = config.tensor_model_parallel_size
        own_width = config.num_attention_heads // ranks * hidden_size
        start = parallel_state.get_tensor_model_parallel_rank() * own_width
        weight_W = torch.arange(start, start + own_width) < config.hidden_size
        self.weight = torch.nn.Parameter(weight_W.to(config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, True, dim=0, stride=1)

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


class TileAttention(SelfAttention):
    """Attention of the vision tower; its norms of q and k, if any, span all heads."""

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, *unused: object, **unused_too: object
    ) -> tuple[torch.Tensor, ...]:
        """Project [S, B, H] to q, k and v, [S, B, N, D] (core's name)."""
        qkv_SBX, _ = self.linear_qkv(hidden_states)
        heads = self.num_attention_heads_per_partition
        qkv_SBN3D = qkv_SBX.unflatten(-1, (heads, -1))
        if not self.config.qk_layernorm:
            return qkv_SBN3D.chunk(3, -1)
        weights_W = (self.q_layernorm.weight, self.k_layernorm.weight)
        is_divided = self.config.tensor_model_parallel_size > 1
        group = parallel_state.get_tensor_model_parallel_group() if is_divided else None
        return split_with_norms(
            qkv_SBN3D, weights_W, self.config.hidden_size, self.config.layernorm_epsilon, group
        )


class PackedAttention(SelfAttention):
    """Attention of the language tower over packed samples, each with positions of its own."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: None,
        *,
        rotary_pos_emb: Rotation,
        packed_seq_params: PackedSeqParams,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend within samples, [S, 1, H] to the same shape, and return the bias to be added."""
        qkv_T1X, _ = self.linear_qkv(hidden_states)
        groups = self.num_query_groups_per_partition
        query_TND, key_TGD, value_TGD = split_and_rotate(
            qkv_T1X.squeeze(1).unflatten(-1, (groups, -1)),
            self.num_attention_heads_per_partition // groups,
            rotary_pos_emb,
        )
        context_TW = self.core_attention(
            query_TND,
            key_TGD,
            value_TGD,
            attention_mask,
            attn_mask_type=self.attn_mask_type,
            attention_bias=None,
            packed_seq_params=packed_seq_params,
        )
        return self.linear_proj(context_TW.reshape(len(query_TND), 1, -1))


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
        # The packed kernel takes no other head sizes; for one sample at a time, torch pads them.
        takes_heads = query.shape[-1] % _HEAD_SIZE_MULTIPLE == 0
        if query.is_cuda and takes_heads and query.dtype in (torch.bfloat16, torch.float16):
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
