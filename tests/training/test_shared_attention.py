"""Attention over a context-parallel pack, against one process with all tokens, in float64."""

import weakref
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from megatron.vlm.inputs.batch import borders_of
from megatron.vlm.inputs.pack_share import PackShare
from megatron.vlm.model import attention
from megatron.vlm.model import shared_attention as shared_attention_module
from megatron.vlm.model.attention import attend_packed
from megatron.vlm.model.shared_attention import shared_attention
from omnibal.model.levels import ContextExchange, CutRule, Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel

pytestmark = pytest.mark.quick

RANKS, HEADS, KEY_HEADS, SIZE = 4, 8, 4, 8
FOUR = Parallel(pipeline=1, data=RANKS)
PACKS = [(13, 40, 7, 36), (96,), (3,), (30, 2, 2, 1, 1, 1)]
"""Sample lengths. One pack has fewer tokens than ranks."""
CPU = torch.device("cpu")


def share_of(samples, cut, exchange):
    caps = Caps.of(tiles=1, tokens=1)
    level = Level(caps=caps, context=RANKS, cut=cut, exchange=exchange, attention_weight=0.02)
    return PackShare.cut(np.array(samples), level, dist.get_rank())


def whole_pack(samples):
    """Return queries, keys, values and the output gradient of a pack, in float64."""
    torch.manual_seed(sum(samples))
    heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    return [torch.randn(sum(samples), n, SIZE, dtype=torch.float64) for n in heads]


def rows_of(share, samples):
    own, starts = share.own_pieces, np.cumsum([0, *samples])
    ends = zip(starts[own.sample] + own.first, starts[own.sample] + own.stop, strict=True)
    return torch.tensor([row for first, stop in ends for row in range(first, stop)], dtype=int)


def attend_shares(links, padding):
    """Return the largest error of output and gradients per cut, exchange and pack."""
    attention._QUERIES_OF_A_MASK = 5  # below the length of most pieces
    return {
        case: difference(*case, padding)
        for case in product(CutRule, ContextExchange, PACKS, (False, True))
    }


def difference(cut, exchange, samples, again, padding):
    share = share_of(samples, cut, exchange)
    *qkv, gradient = whole_pack(samples)
    alone = [heads.clone().requires_grad_() for heads in qkv]
    expected = attend_packed(*alone, borders_of(samples, samples, CPU), True)
    expected.backward(gradient)
    rows = rows_of(share, samples)
    # The padding's values must not affect any sample.
    extra = padding or int(len(rows) == 0)
    own = [
        torch.cat([heads[rows], torch.full((extra, *heads.shape[1:]), 7.0)]).requires_grad_()
        for heads in qkv
    ]
    shared = shared_attention(share, extra, dist.group.WORLD, CPU)
    if shared is None:
        segments = [*share.own_pieces.tokens.tolist(), *([extra] if extra else [])]
        got = attend_packed(*own, borders_of(segments, segments, CPU), True)
    else:
        got = (shared.for_recomputation() if again else shared).attend(*own, attend_packed)
    got.backward(torch.cat([gradient[rows], torch.zeros(extra, *got.shape[1:])]))
    found = [one[: len(rows)] for one in (got, *(mine.grad for mine in own))]
    wanted = [one[rows] for one in (expected, *(whole.grad for whole in alone))]
    pairs = zip(found, wanted, strict=True)
    return max((a - b).abs().max().item() if len(rows) else 0.0 for a, b in pairs)


@pytest.mark.parametrize("padding", [0, 3])
def test_shares_attend_as_one_process(padding):
    """Prevents queries that miss other ranks' keys or see later keys, and gradients that do not
    return to the token's rank, for all cuts and exchanges."""
    for worst in run_ranks(FOUR, attend_shares, padding):
        assert max(worst.values()) < 1e-12, max(worst, key=worst.__getitem__)


def count_gathered_keys(links):
    """Return (keys alive before backward, gathers, keys alive after), plain and recomputed."""
    samples, found = (200,), []
    share = share_of(samples, CutRule.ZIGZAG, ContextExchange.GATHER)
    rows, shared = rows_of(share, samples), shared_attention(share, 0, dist.group.WORLD, CPU)
    gather = shared_attention_module.gather_rows
    for one in (shared, shared.for_recomputation()):
        made = []

        def gather_and_count(*arguments, made=made):
            keys = gather(*arguments)
            made.append(weakref.ref(keys.untyped_storage()))
            return keys

        shared_attention_module.gather_rows = gather_and_count
        own = [heads[rows].requires_grad_() for heads in whole_pack(samples)[:3]]
        output = one.attend(*own, attend_packed)
        alive = sum(keys() is not None for keys in made)
        output.sum().backward()
        found.append((alive, len(made), sum(keys() is not None for keys in made)))
    return found


def test_gathered_keys_are_not_kept_for_backward():
    """Prevents saving the full pack's keys for every layer and micro-batch in flight, and a third
    gather in recomputed layers."""
    assert run_ranks(FOUR, count_gathered_keys) == [[(0, 2, 0), (1, 1, 0)]] * RANKS
