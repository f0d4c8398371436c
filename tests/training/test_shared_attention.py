"""Attention over a pack that ranks share, beside one process that has all of it, in float64."""

import weakref

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from megatron.vlm.inputs.batch import borders_of
from megatron.vlm.inputs.pack_share import Share
from megatron.vlm.model import attention
from megatron.vlm.model import shared_attention as shared_attention_module
from megatron.vlm.model.attention import attend_packed
from megatron.vlm.model.exchange import exchange_rows
from megatron.vlm.model.shared_attention import shared_attention
from omnibal.model.levels import ContextExchange, CutRule, Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel

pytestmark = pytest.mark.quick

RANKS, HEADS, KEY_HEADS, SIZE = 4, 8, 4, 8
PACKS = [(13, 40, 7, 36), (96,), (3,), (30, 2, 2, 1, 1, 1)]
"""Of samples of these lengths; one is shorter than there are ranks."""
CPU = torch.device("cpu")


def level_of(cut, exchange):
    caps = Caps.of(tiles=1, tokens=1)
    return Level(caps=caps, context=RANKS, cut=cut, exchange=exchange, attention_weight=0.02)


def whole_pack(samples):
    """Queries, keys, values and the output's gradient of a pack, float64."""
    torch.manual_seed(sum(samples))
    heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    return [torch.randn(sum(samples), n, SIZE, dtype=torch.float64) for n in heads]


def rows_of(share, samples):
    starts = torch.tensor([0, *samples]).cumsum(0)
    own = share.own_pieces
    places = [
        torch.arange(first, stop) + starts[sample]
        for sample, first, stop in zip(own.sample, own.first, own.stop, strict=True)
    ]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *places])


def attend_shares(links, padding):
    """Worst difference of output and gradients of every cut, exchange and pack from all tokens."""
    attention._QUERIES_OF_A_MASK = 5  # fewer than most pieces have
    worst = {}
    for cut in CutRule:
        for exchange in ContextExchange:
            for samples in PACKS:
                level = level_of(cut, exchange)
                share = Share.of(torch.tensor(samples).numpy(), level, dist.get_rank())
                for again in (False, True):
                    key = (cut.value, exchange.value, samples, again)
                    worst[key] = difference(share, samples, padding, again)
    return worst


def difference(share, samples, padding, again):
    *qkv, gradient = whole_pack(samples)
    alone = [heads.clone().requires_grad_() for heads in qkv]
    borders = borders_of(samples, samples, CPU)
    expected = attend_packed(*alone, borders, True)
    expected.backward(gradient)
    rows = rows_of(share, samples)
    # What the padding has must not matter to any sample.
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
        shared = shared.recomputed() if again else shared
        got = shared.attend(*own, attend_packed)
    got.backward(torch.cat([gradient[rows], torch.zeros(extra, *got.shape[1:])]))
    pairs = [(got[: len(rows)], expected[rows])]
    pairs += [
        (mine.grad[: len(rows)], whole.grad[rows]) for mine, whole in zip(own, alone, strict=True)
    ]
    return max(float((a - b).abs().max()) if len(a) else 0.0 for a, b in pairs)


@pytest.mark.parametrize("padding", [0, 3])
def test_shares_attend_as_one_process(padding):
    """Prevents: a query that misses keys of other ranks or sees later ones, and gradients that do
    not come back to the rank whose token it was, for every cut and exchange."""
    for worst in run_ranks(Parallel(pipeline=1, data=RANKS), attend_shares, padding):
        assert len(worst) == len(CutRule) * len(ContextExchange) * len(PACKS) * 2
        for case, error in worst.items():
            assert error < 1e-12, case


def gathered_keys(links):
    """(Keys that live between forward and backward, gathers of both) not recomputed, and again."""
    samples, found = (200,), []
    level = level_of(CutRule.ZIGZAG, ContextExchange.GATHER)
    share = Share.of(torch.tensor(samples).numpy(), level, dist.get_rank())
    rows, shared = rows_of(share, samples), shared_attention(share, 0, dist.group.WORLD, CPU)
    gather = shared_attention_module.gather_rows
    for one in (shared, shared.recomputed()):
        made = []

        def counted(*arguments, made=made):
            keys = gather(*arguments)
            made.append(weakref.ref(keys.untyped_storage()))
            return keys

        shared_attention_module.gather_rows = counted
        own = [heads[rows].requires_grad_() for heads in whole_pack(samples)[:3]]
        output = one.attend(*own, attend_packed)
        alive = sum(keys() is not None for keys in made)
        output.sum().backward()
        found.append((alive, len(made), sum(keys() is not None for keys in made)))
    return found


def test_gathered_keys_are_not_kept_for_backward():
    """Prevents: keys of the whole pack in memory for every layer and micro-batch in flight; and a
    third exchange in a layer that is recomputed anyway."""
    for kept, recomputed in run_ranks(Parallel(pipeline=1, data=RANKS), gathered_keys):
        assert kept == (0, 2, 0)
        assert recomputed == (1, 1, 0)


def test_exchange_of_rows_and_its_gradient():
    """Prevents: features that reach another rank than their tokens, where some ranks send none."""
    for passed in run_ranks(Parallel(pipeline=1, data=RANKS), check_exchange):
        assert passed


def check_exchange(links):
    """Rank r sends r * (to + 1) % 3 rows to each; every row says whence it came and where it
    goes, and its gradient must be what its receiver says."""
    rank = dist.get_rank()
    count = [[source * (target + 1) % 3 for target in range(RANKS)] for source in range(RANKS)]
    sent, received = count[rank], [count[source][rank] for source in range(RANKS)]
    rows = torch.tensor(
        [[rank, target, n] for target in range(RANKS) for n in range(sent[target])],
        dtype=torch.float64,
    ).reshape(-1, 3).requires_grad_()  # fmt: skip
    got = exchange_rows(rows, sent, received, dist.group.WORLD)
    expected = [[source, rank, n] for source in range(RANKS) for n in range(received[source])]
    (got * (rank + 1)).sum().backward()
    factors = rows.detach()[:, 1:2] + 1
    same = got.tolist() == expected or (not expected and not len(got))
    return same and torch.equal(rows.grad, factors.expand_as(rows))
