"""Calls of the packed attention kernel, with stand-ins for torch 2.11's and 2.13's on CUDA.

Shapes: T packed tokens, K packed keys, N heads of queries, S and C tokens and keys of a sample.
"""

import importlib.util
from itertools import pairwise

import pytest
import torch
from torch.nn.attention import list_flash_attention_impls

from megatron.vlm.inputs.batch import borders_of
from megatron.vlm.model.attention import attend_by_segment, attend_flash, prefer_flash_attention_3

TOKENS = [5, 1, 12, 7]
KEYS = [9, 30, 12, 21]


def kernel_of_2_11(query, key, value, *borders_and_longest, window_size=(-1, -1)):
    """Return attention by sample; causal queries end where the keys end. Query head n reads key
    head n // (query heads per key head)."""
    served_N = torch.arange(query.shape[1]) // (query.shape[1] // key.shape[1])
    key, value = key[:, served_N], value[:, served_N]
    *borders, longest, longest_keys = borders_and_longest
    assert all(one.dtype == torch.int32 for one in borders)
    outputs = []
    for (start, end), (first, stop) in zip(*map(pairwise, borders), strict=True):
        assert end - start <= longest and stop - first <= longest_keys
        scores_NSC = torch.einsum("snd,cnd->nsc", query[start:end], key[first:stop])
        if window_size == (-1, 0):
            later_SC = torch.ones_like(scores_NSC[0]).triu(1 + (stop - first) - (end - start))
            scores_NSC = scores_NSC.masked_fill(later_SC.bool(), -torch.inf)
        weights_NSC = (scores_NSC / query.shape[-1] ** 0.5).softmax(-1)
        outputs.append(torch.einsum("nsc,cnd->snd", weights_NSC, value[first:stop]))
    return torch.cat(outputs)


def kernel_of_2_13(query, key, value, *borders_and_longest, window_size=(-1, -1), enable_gqa=False):
    assert enable_gqa or query.shape[1] == key.shape[1], "groups are not asked for"
    return kernel_of_2_11(query, key, value, *borders_and_longest, window_size=window_size)


@pytest.mark.parametrize("kernel", [kernel_of_2_11, kernel_of_2_13], ids=["2.11", "2.13"])
@pytest.mark.parametrize("heads", [(6, 2), (4, 1), (3, 3)], ids=["groups", "one-key", "equal"])
@pytest.mark.parametrize(
    ("keys", "causal"), [(TOKENS, True), (TOKENS, False), (KEYS, True)],
    ids=["causal", "full", "pieces"],
)  # fmt: skip
def test_every_torch_gets_the_arguments_it_knows(monkeypatch, kernel, heads, keys, causal):
    """Prevents a TypeError under torch 2.11, query heads that read wrong key heads, and a piece of
    a sample aligned to the sample's start instead of its end."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    generator = torch.Generator().manual_seed(0)
    shapes = ((TOKENS, heads[0]), (keys, heads[1]), (keys, heads[1]))
    qkv = [torch.randn(sum(tokens), n, 8, generator=generator) for tokens, n in shapes]
    packed = borders_of(TOKENS, keys, torch.device("cpu"))
    expected = attend_by_segment(*qkv, packed, causal)
    torch.testing.assert_close(attend_flash(*qkv, packed, causal), expected)


class _Attention(torch.autograd.Function):
    """Torch's packed attention, reduced to the tensors it saves."""

    @staticmethod
    def forward(ctx, query, key, value):
        ctx.save_for_backward(query, key, value)
        return query.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise AssertionError("no test runs this")


@pytest.mark.parametrize("knows_groups", [True, False], ids=["2.13", "2.11"])
def test_no_copy_of_keys_for_every_head_is_kept(monkeypatch, knows_groups):
    """Prevents saving keys and values per query head: no plan counts these copies, and gathered
    keys could not be freed."""
    with_option = lambda *given, window_size, enable_gqa: _Attention.apply(*given[:3])  # noqa: E731
    without = lambda *given, window_size: _Attention.apply(*given[:3])  # noqa: E731
    kernel = with_option if knows_groups else without
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    qkv = [torch.randn(sum(TOKENS), heads, 8, requires_grad=True) for heads in (6, 2, 2)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda saved: saved):
        attend_flash(*qkv, borders_of(TOKENS, TOKENS, torch.device("cpu")), True)
    assert sum(one.nbytes for one in kept) == sum(one.nbytes for one in qkv)
    assert {one.data_ptr() for one in kept} == {one.data_ptr() for one in qkv}


@pytest.mark.parametrize(
    ("installed", "major", "used"), [(True, 9, True), (True, 8, False), (False, 9, False)]
)
def test_flash_attention_3_is_asked_for_where_it_can_run(monkeypatch, installed, major, used):
    """Prevents a slower kernel on Hopper, and a crash on other devices or without the package."""
    asked = []
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: installed or None if name == "flash_attn_interface" else find(name),
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (major, 0))
    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", asked.append)
    assert prefer_flash_attention_3.__wrapped__() == used
    assert asked == ["FA3"] * used
    assert "FA3" in list_flash_attention_impls()
