"""Modules of the stand-in: parameters and numbers of a linear, and of attention.

Shapes: S sequence, B batch, T packed tokens, N heads, D head size.
"""

from itertools import pairwise
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from . import distributed as distributed
from .fp8 import FP8GlobalStateManager, fp8_autocast

__all__ = ["DotProductAttention", "GroupedLinear", "LayerNormLinear", "Linear", "distributed"]
__all__ += ["fp8_autocast", "ops"]
LayerNormLinear = GroupedLinear = torch.nn.Module
ops = SimpleNamespace(Sequential=object, FusibleOperation=object)


class Linear(torch.nn.Module):
    """y = x W^T + b, whose rows ("column") or columns ("row") are divided over `tp_size` ranks."""

    def __init__(
        self, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False,
        tp_group=None, tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None,
        init_method=None, bias=True, return_bias=False, params_dtype=None, parallel_mode=None,
        device="cuda",
    ):  # fmt: skip
        super().__init__()
        shape = [out_features, in_features]
        shape[parallel_mode == "row"] //= tp_size
        self.return_bias, self.use_bias = return_bias, bias
        self.weight = torch.nn.Parameter(torch.zeros(shape, dtype=params_dtype, device=device))
        self.bias = None
        if bias:
            zeros = torch.zeros(shape[0], dtype=params_dtype, device=device)
            self.bias = torch.nn.Parameter(zeros)

    def get_extra_state(self):
        return torch.empty(0)

    def set_extra_state(self, state):
        pass

    def forward(self, inputs, is_first_microbatch=None):
        recipe = FP8GlobalStateManager.recipe
        if recipe is not None:
            self._check_fp8(inputs, is_first_microbatch)
            FP8GlobalStateManager.products.append((recipe, tuple(inputs.shape)))
        if self.return_bias:
            return F.linear(inputs, self.weight), self.bias
        return F.linear(inputs, self.weight, self.bias)

    def _check_fp8(self, inputs, is_first_microbatch):
        """As the real one: sizes, and weights that are quantised in the first micro-batch alone,
        which later ones are multiplied with as they were."""
        rows = inputs.shape[:-1].numel()
        assert rows % 16 == 0 and all(size % 16 == 0 for size in self.weight.shape), (
            f"FP8 execution of {rows} rows with weights {tuple(self.weight.shape)}"
        )
        if is_first_microbatch is None or is_first_microbatch:
            self.quantised = self.weight.detach().clone()
        assert torch.equal(self.quantised, self.weight), "weights of an earlier step"


class DotProductAttention(torch.nn.Module):
    """Attention of [S, B, N, D], or of packed samples [T, N, D] by their borders."""

    def __init__(
        self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0,
        attn_mask_type="causal", sequence_parallel=False, tp_size=1, get_rng_state_tracker=None,
        tp_group=None, layer_number=None, attention_type="self", cp_group=None,
        cp_global_ranks=None, cp_stream=None, softmax_scale=None,
    ):  # fmt: skip
        super().__init__()

    def forward(
        self, query, key, value, attention_mask=None, qkv_format=None, cu_seqlens_q=None,
        cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None,
        max_seqlen_q=None, max_seqlen_kv=None, attn_mask_type=None,
    ):  # fmt: skip
        assert cu_seqlens_q_padded is None and cu_seqlens_kv_padded is None
        if qkv_format != "thd":
            heads = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            assert attn_mask_type == "no_mask"
            return F.scaled_dot_product_attention(*heads).permute(2, 0, 1, 3).flatten(2)
        assert attn_mask_type == "padding_causal"
        parts = []
        for first, last in pairwise(cu_seqlens_q.tolist()):
            heads = (x[first:last].transpose(0, 1) for x in (query, key, value))
            parts.append(F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True))
        return torch.cat(parts, 1).transpose(0, 1).flatten(1)
