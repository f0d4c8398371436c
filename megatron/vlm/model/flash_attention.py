"""Torch's flash attention over packed samples (torch >= 2.11).

Shapes: T packed tokens, N heads, G key/value heads, D head size.
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable

import torch
from megatron.core.packed_seq_params import PackedSeqParams

_HOPPER = 9
"""Major compute capability for FlashAttention 3."""


@functools.cache
def prefer_flash_attention_3() -> bool:
    """Use FlashAttention 3 (Shah et al. 2024, arXiv 2407.08608) in torch, if available.

    It needs a Hopper device and the package. Returns whether it is used. All towers' attention goes
    through torch, which otherwise uses FlashAttention 2.
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
    packed: PackedSeqParams,
    causal: bool,
) -> torch.Tensor:
    """Attend with one kernel call for the whole pack, on CUDA in 16 bit only.

    Keys and values are never repeated, as copies would be kept for backward. The kernel supports
    grouped queries in torch 2.11 too, which has no option for them.
    """
    from torch.nn.attention.varlen import varlen_attn

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
    """Return whether a call must say that keys have fewer heads than queries."""
    return "enable_gqa" in inspect.signature(attention).parameters
