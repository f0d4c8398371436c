"""The packed kernel's call, with what torch 2.11 and 2.13 have for it on CUDA stood in for.

Shapes: T packed tokens, N heads of queries, G of keys and values, D head size.
"""

import importlib.util

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn.attention import list_flash_attention_impls

from megatron.vlm.inputs.batch import borders_of
from megatron.vlm.model.attention import attend_by_segment
from megatron.vlm.model.flash_attention import attend_flash, prefer_flash_attention_3

SEGMENTS = [5, 1, 12, 7]
BORDERS = torch.tensor([0, *SEGMENTS]).cumsum(0).to(torch.int32)
LONGEST = max(SEGMENTS)


def by_definition(query_TND, key_TND, value_TND, borders, window_size):
    """Softmax of all pairs of a sample that may see each other."""
    sample_T = torch.bucketize(torch.arange(len(query_TND)), borders[1:], right=True)
    seen_TT = sample_T[:, None] == sample_T[None, :]
    if window_size == (-1, 0):
        seen_TT = seen_TT.tril()
    scores_NTT = torch.einsum("qnd,knd->nqk", query_TND, key_TND) / query_TND.shape[-1] ** 0.5
    weights_NTT = scores_NTT.masked_fill(~seen_TT, -torch.inf).softmax(-1)
    return torch.einsum("nqk,knd->qnd", weights_NTT, value_TND)


def kernel_of_2_11(query, key, value, *borders_and_longest, window_size=(-1, -1)):
    assert query.shape == key.shape == value.shape, "as many heads of keys as of queries"
    borders, borders_of_keys, *longest = borders_and_longest
    assert torch.equal(borders, borders_of_keys) and longest == [LONGEST, LONGEST]
    return by_definition(query, key, value, borders, window_size)


def kernel_of_2_13(query, key, value, *borders_and_longest, window_size=(-1, -1), enable_gqa=False):
    queries_per_key = query.shape[1] // key.shape[1]
    assert enable_gqa or queries_per_key == 1, "groups are not asked for"
    served_N = torch.arange(query.shape[1]) // queries_per_key
    keys_and_values = (key[:, served_N], value[:, served_N])
    return kernel_of_2_11(query, *keys_and_values, *borders_and_longest, window_size=window_size)


@pytest.mark.parametrize("kernel", [kernel_of_2_11, kernel_of_2_13], ids=["2.11", "2.13"])
@pytest.mark.parametrize("heads", [(6, 2), (4, 1), (3, 3)], ids=["groups", "one-key", "equal"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_every_torch_gets_the_arguments_it_knows(monkeypatch, kernel, heads, causal):
    """Prevents: a TypeError at the first layer under a cluster's torch 2.11, and keys given to
    other queries than theirs."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    generator = torch.Generator().manual_seed(0)
    qkv = [
        torch.randn(sum(SEGMENTS), count, 8, generator=generator)
        for count in (heads[0], heads[1], heads[1])
    ]
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=BORDERS, cu_seqlens_kv=BORDERS,
        cu_seqlens_q_padded=BORDERS, cu_seqlens_kv_padded=BORDERS,
        max_seqlen_q=LONGEST, max_seqlen_kv=LONGEST,
    )  # fmt: skip
    expected = attend_by_segment(*qkv, packed, causal)
    torch.testing.assert_close(attend_flash(*qkv, packed, causal), expected)


def kernel_of_pieces(query, key, value, *borders_and_longest, window_size, enable_gqa):
    """By definition, a range of queries at a time, of which the last sees the last key."""
    borders, key_borders, longest, longest_keys = borders_and_longest
    assert window_size == (-1, 0) and enable_gqa
    assert borders.dtype == key_borders.dtype == torch.int32
    served_N = torch.arange(query.shape[1]) // (query.shape[1] // key.shape[1])
    key_KND, value_KND = key[:, served_N], value[:, served_N]
    outputs = []
    for start, end, first, stop in zip(
        borders[:-1], borders[1:], key_borders[:-1], key_borders[1:], strict=True
    ):
        assert end - start <= longest and stop - first <= longest_keys
        places = torch.arange(stop - first) - (stop - first)
        seen_SK = places[None, :] <= torch.arange(end - start)[:, None] - (end - start)
        scores = torch.einsum("snd,knd->nsk", query[start:end], key_KND[first:stop])
        scores = (scores / query.shape[-1] ** 0.5).masked_fill(~seen_SK, -torch.inf)
        outputs.append(torch.einsum("nsk,knd->snd", scores.softmax(-1), value_KND[first:stop]))
    return torch.cat(outputs)


def test_pieces_of_samples_have_keys_of_their_own(monkeypatch):
    """Prevents: a rank's piece of a shared pack that attends, on CUDA or on a CPU, to its sample
    from the front, as causal attention of unequal lengths is elsewhere."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel_of_pieces)
    queries, keys = [5, 1, 12, 7], [9, 30, 12, 21]
    packed = borders_of(queries, keys, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    qkv = [
        torch.randn(tokens, heads, 8, generator=generator)
        for tokens, heads in ((sum(queries), 6), (sum(keys), 2), (sum(keys), 2))
    ]
    expected = attend_by_segment(*qkv, packed, True)
    torch.testing.assert_close(attend_flash(*qkv, packed, True), expected)


@pytest.mark.parametrize(
    ("installed", "major", "used"), [(True, 9, True), (True, 8, False), (False, 9, False)]
)
def test_flash_attention_3_is_asked_for_where_it_can_run(monkeypatch, installed, major, used):
    """Prevents: a slower kernel on Hopper, and a crash on other devices or without the package."""
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
