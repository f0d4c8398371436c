"""Attention of all towers: full within a tile, clip, image or window; causal within a sample.

Shapes: S sequence (packed language tokens, or positions of an item), B batch (1, or items), H
hidden size, N heads, G key/value heads, D head size, T packed tokens, K keys (T unless packs are
shared), W width of this rank's heads.
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vlm.inputs.batch import Borders
from megatron.vlm.model.fused.head_norms import HeadNorms
from megatron.vlm.model.fused.rotary import NormAndRotate, Rotation, SplitAndRotate
from megatron.vlm.model.image_places import ImageBorders
from megatron.vlm.model.shared_attention import SharedAttention
from megatron.vlm.model.tensor_parallel import DividedModule, divide

_HOPPER = 9  # major compute capability for FlashAttention 3
_HEAD_SIZE_MULTIPLE = 8  # required by the packed kernel
_QUERIES_OF_A_MASK = 256  # maximum queries per explicit mask


class AllHeadsRMSNorm(DividedModule):
    """Weight [W] of InternViT's q or k norm: an RMSNorm over all heads of all ranks.

    `TileAttention` runs both norms. Core's norms are per head: `hidden_size` is D here.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        ranks = config.tensor_model_parallel_size
        own_width = config.num_attention_heads // ranks * hidden_size
        # Core passes no group here; without a group a rank has all heads.
        rank = parallel_state.get_tensor_model_parallel_rank() if ranks > 1 else 0
        start = rank * own_width
        # Ones, and zeros for padded heads.
        weight_W = torch.arange(start, start + own_width) < config.hidden_size
        self.weight = torch.nn.Parameter(weight_W.to(config.params_dtype))
        divide(self.weight, dim=0)


class TileAttention(SelfAttention):
    """Attention of the vision tower; norms of q and k, if any, span all heads."""

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, *unused: object, **unused_too: object
    ) -> tuple[torch.Tensor, ...]:
        qkv_SBX, _ = self.linear_qkv(hidden_states)
        heads = self.num_attention_heads_per_partition
        qkv_SBN3D = qkv_SBX.unflatten(-1, (heads, -1))  # core stores q, k and v by head
        if not self.config.qk_layernorm:
            return qkv_SBN3D.chunk(3, -1)
        weights_W = (self.q_layernorm.weight, self.k_layernorm.weight)
        is_divided = self.config.tensor_model_parallel_size > 1
        group = parallel_state.get_tensor_model_parallel_group() if is_divided else None
        width, eps = self.config.hidden_size, self.config.layernorm_epsilon
        return HeadNorms.apply(qkv_SBN3D, *weights_W, width, eps, group)


class ClipAttention(TileAttention):
    """Whisper's attention, without bias of keys."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        heads, bias_X = self.num_attention_heads_per_partition, self.linear_qkv.bias

        def zero_keys(gradient_X: torch.Tensor) -> torch.Tensor:
            # Core's joint bias has keys too, initially zero. Softmax does not depend on it, but
            # Adam would turn the rounding errors of its gradient into steps.
            gradient_N3D = gradient_X.clone().unflatten(0, (heads, 3, -1))
            gradient_N3D[:, 1] = 0
            return gradient_N3D.flatten()

        if bias_X is not None:
            bias_X.register_hook(zero_keys)


class PackedAttention(SelfAttention):
    """Attention of the language tower over packed samples, with positions per sample."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: None,
        *,
        rotary_pos_emb: Rotation,
        packed_seq_params: Borders | SharedAttention,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        qkv_T1X, _ = self.linear_qkv(hidden_states)
        groups, ranks = self.num_query_groups_per_partition, self.tp_group.size()
        queries_per_group = self.config.num_attention_heads // ranks // groups
        own_heads = queries_per_group
        if self.config.attention_output_gate:
            own_heads *= 2  # each query's gate follows it
        if self.config.num_query_groups < ranks:
            # Core divides the weight's rows, so that a group's heads are on several ranks, and each
            # needs its k and v. The gather's backward sums the gradients of these copies.
            all_T1X = all_gather_last_dim_from_tensor_parallel_region(qkv_T1X, group=self.tp_group)
            # This rank's group, and its part of the group's queries.
            own, part = divmod(self.tp_group.rank(), ranks // self.config.num_query_groups)
            size = self.hidden_size_per_attention_head
            all_T1GND = all_T1X.unflatten(-1, (self.config.num_query_groups, -1, size))
            heads_T1ND = all_T1GND[:, :, own]  # queries, then k and v
            queries = slice(part * own_heads, (part + 1) * own_heads)
            qkv_T1X = torch.cat([heads_T1ND[:, :, queries], heads_T1ND[:, :, -2:]], 2).flatten(2)
        qkv_TGX = qkv_T1X.squeeze(1).unflatten(-1, (groups, -1))
        gate_TW = None
        if self.config.attention_output_gate:
            heads_TGND = qkv_TGX.unflatten(-1, (own_heads + 2, -1))
            queries_TGQ2D = heads_TGND[:, :, :-2].unflatten(2, (-1, 2))
            gate_TW = queries_TGQ2D[:, :, :, 1].flatten(1)
            qkv_TGX = torch.cat([queries_TGQ2D[:, :, :, 0], heads_TGND[:, :, -2:]], 2).flatten(2)
        if self.config.qk_layernorm:
            (query_D, _, eps), (key_D, _, _) = self.q_layernorm.weights, self.k_layernorm.weights
            norms = (query_D, key_D, eps)
            heads = NormAndRotate.apply(qkv_TGX, queries_per_group, *rotary_pos_emb, *norms)
        else:
            heads = SplitAndRotate.apply(qkv_TGX, queries_per_group, *rotary_pos_emb)
        query_TND, key_TGD, value_TGD = heads
        context_TW = self.core_attention(
            query_TND,
            key_TGD,
            value_TGD,
            attention_mask,
            attn_mask_type=self.attn_mask_type,
            attention_bias=None,
            packed_seq_params=packed_seq_params,
        )
        if gate_TW is not None:
            context_TW = context_TW.reshape(gate_TW.shape) * gate_TW.sigmoid()
        return self.linear_proj(context_TW.reshape(len(query_TND), 1, -1))


class ImageAttention(PackedAttention):
    """Attention of an encoder over packed images or windows, rotated by rows and columns."""

    def __init__(self, *arguments: Any, windowed: bool, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.windowed = windowed

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: None,
        *,
        rotary_pos_emb: Rotation,
        packed_seq_params: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        image_borders: ImageBorders = packed_seq_params
        borders = image_borders.windows if self.windowed else image_borders.images
        assert borders is not None
        return super().forward(
            hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb, packed_seq_params=borders
        )


class PackedCoreAttention(MegatronModule):
    """Scaled dot-product attention, block-diagonal over packed samples.

    With `packed_seq_params` inputs are [T, N, D] and attention stays within a sample; without, [S,
    B, N, D] and within a batch entry. For shared packs `SharedAttention` replaces the parameters.
    """

    def __init__(
        self, config: TransformerConfig, attn_mask_type: AttnMaskType, **unused: Any
    ) -> None:
        super().__init__(config=config)
        self.causal = attn_mask_type == AttnMaskType.causal

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        packed_seq_params: Borders | SharedAttention | None,
        **unused: object,
    ) -> torch.Tensor:
        """Attend; return [S, B, N * D], or [T, N * D] for packed inputs."""
        if packed_seq_params is None:
            query_BNSD, key_BGSD, value_BGSD = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            context_BNSD = _attend(query_BNSD, key_BGSD, value_BGSD, self.causal)
            return context_BNSD.permute(2, 0, 1, 3).flatten(2)
        if isinstance(packed_seq_params, SharedAttention):
            return packed_seq_params.attend(query, key, value, attend_packed).flatten(1)
        return attend_packed(query, key, value, packed_seq_params, self.causal).flatten(1)


def attend_packed(
    query_TND: torch.Tensor,
    key_KGD: torch.Tensor,
    value_KGD: torch.Tensor,
    packed: Borders,
    causal: bool,
) -> torch.Tensor:
    """Attend from ranges of queries to their ranges of keys, [T, N, D].

    In causal ranges the last query sees the last key: masks are aligned at the end.
    """
    # The packed kernel takes only multiples of 8; in calls per range, torch pads other head sizes.
    takes_heads = query_TND.shape[-1] % _HEAD_SIZE_MULTIPLE == 0
    is_16_bit = query_TND.dtype in (torch.bfloat16, torch.float16)
    if query_TND.is_cuda and takes_heads and is_16_bit:
        return attend_flash(query_TND, key_KGD, value_KGD, packed, causal)
    return attend_by_segment(query_TND, key_KGD, value_KGD, packed, causal)


def _attend(
    query_BNSD: torch.Tensor, key_BGKD: torch.Tensor, value_BGKD: torch.Tensor, causal: bool
) -> torch.Tensor:
    before = key_BGKD.shape[2] - query_BNSD.shape[2]
    grouped = query_BNSD.shape[1] != key_BGKD.shape[1]
    if not causal or not before:
        return F.scaled_dot_product_attention(
            query_BNSD, key_BGKD, value_BGKD, is_causal=causal, enable_gqa=grouped
        )
    # Torch's causal mask is aligned at the first key, so masks are explicit. With few queries at a
    # time they are small, and later keys are skipped.
    contexts = []
    for query in query_BNSD.split(_QUERIES_OF_A_MASK, 2):
        queries = query.shape[2]
        before += queries
        everything = torch.ones(queries, before, dtype=torch.bool, device=query.device)
        seen = everything.tril(before - queries)
        keys, values = key_BGKD[:, :, :before], value_BGKD[:, :, :before]
        contexts.append(
            F.scaled_dot_product_attention(query, keys, values, seen, enable_gqa=grouped)
        )
    return torch.cat(contexts, 2)


def attend_by_segment(
    query_TND: torch.Tensor,
    key_KGD: torch.Tensor,
    value_KGD: torch.Tensor,
    packed: Borders,
    causal: bool,
) -> torch.Tensor:
    """Attend as `attend_packed`, with one kernel call per range, on every device and type."""
    # From the host's borders, so that this does not synchronize the device.
    queries = query_TND.split(packed.host_q.diff().tolist())
    key_counts = packed.host_kv.diff().tolist()
    keys, values = key_KGD.split(key_counts), value_KGD.split(key_counts)
    contexts = []
    for qkv in zip(queries, keys, values, strict=True):
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in qkv)
        contexts.append(_attend(query, key, value, causal).squeeze(0).transpose(0, 1))
    return torch.cat(contexts)


@functools.cache
def prefer_flash_attention_3() -> bool:
    """Activate FlashAttention 3 in torch (arXiv 2407.08608); return whether it is available.

    It needs a Hopper device and the package. Otherwise torch uses FlashAttention 2.
    """
    if importlib.util.find_spec("flash_attn_interface") is None or not torch.cuda.is_available():
        return False
    if torch.cuda.get_device_capability()[0] != _HOPPER:
        return False
    from torch.nn import attention

    attention.activate_flash_attention_impl("FA3")
    return True


def attend_flash(
    query_TND: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    packed: Borders,
    causal: bool,
) -> torch.Tensor:
    """Attend as `attend_packed`, with one kernel call for the pack; CUDA in 16 bit only."""
    from torch.nn.attention.varlen import varlen_attn

    # Keys and values are not repeated for grouped queries: copies would be kept for backward. torch
    # 2.11 supports groups too, without an option.
    is_grouped = query_TND.shape[1] != key_TGD.shape[1]
    options = {"enable_gqa": True} if is_grouped and asks_for_groups(varlen_attn) else {}
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
def asks_for_groups(attention: Callable[..., torch.Tensor]) -> bool:
    """Return whether `attention` needs `enable_gqa` for keys with fewer heads than queries."""
    return "enable_gqa" in inspect.signature(attention).parameters
