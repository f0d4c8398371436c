"""Ranks begin exchanges in the same order per group, over every feature of the trainer.

Ranks with different orders deadlock on NCCL, and on gloo only with unlucky delays. So the orders
are compared, with random delays before each exchange.
"""

import functools
import time
from collections import defaultdict
from itertools import pairwise
from typing import NamedTuple

import data_parallel_encoder_cases as dp
import numpy as np
import overlap_cases as overlap
import pytest
import shared_training_cases as shared
import tensor_parallel_cases as tensor_parallel
import torch
import torch.distributed as dist
from checkpoint_cases import train_range
from evaluation_cases import pipeline_answers
from pipeline_cases import pipeline_plan
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from omnibal.model.config import load_model

MOST_DELAY_S = 0.002
UNEVEN = ("alltoall", "gather_", "scatter_", "broadcast")
"""Prefixes of collectives with unequal sizes per rank."""


class Exchange(NamedTuple):
    """A collective or message begun by a rank."""

    kind: str
    """Name of torch's operation, such as `allreduce_`."""
    group: tuple[int, ...]
    """Ranks of its group."""
    name: str
    """Name of the group; several groups may have equal ranks."""
    numbers: int
    """Elements of its tensors; 0 if sizes may differ between ranks."""
    dtype: str
    peer: int | None
    """Peer rank of a message; None for a collective."""


class ExchangeLog(TorchDispatchMode):
    """Logs exchanges begun by this rank while active, each after a random delay."""

    def __init__(self):
        super().__init__()
        self.begun = []
        self._rng = np.random.default_rng(dist.get_rank())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            time.sleep(self._rng.uniform(0, MOST_DELAY_S))
            self.begun.append(exchange_of(func.overloadpacket.__name__, args))
        return func(*args, **(kwargs or {}))


def exchange_of(kind, args):
    [group] = [
        dist.ProcessGroup.unbox(each)
        for each in args
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type())
    ]
    ranks = tuple(dist.get_process_group_ranks(group))
    uneven = kind.lstrip("_").startswith(UNEVEN)
    tensors = [] if uneven else [one for one in tree_leaves(args) if torch.is_tensor(one)]
    peer = None
    if kind in ("send", "recv_"):
        peer = ranks[next(each for each in args if type(each) is int)]
    dtype = str(tensors[0].dtype) if tensors else ""
    numbers = sum(one.numel() for one in tensors)
    return Exchange(kind, ranks, group.group_name, numbers, dtype, peer)


def logged_exchanges(links, work, *arguments):
    """Return exchanges begun by this rank in `work(links, *arguments)`."""
    with ExchangeLog() as log:
        work(links, *arguments)
    return log.begun


def disagreements(logs):
    """Describe exchanges begun in different orders by ranks of a group, and unmatched messages."""
    collectives = defaultdict(lambda: defaultdict(list))
    messages = defaultdict(lambda: ([], []))
    for rank, log in enumerate(logs):
        for each in log:
            sends = each.kind == "send"
            if each.peer is None:
                collectives[each.name, each.group][rank].append(each)
            else:
                way = (rank, each.peer) if sends else (each.peer, rank)
                messages[each.name, *way][sends].append((each.numbers, each.dtype))
    found = []
    for (name, group), by_rank in collectives.items():
        first = by_rank[group[0]]
        for rank in group[1:]:
            own = by_rank[rank]
            if own != first:
                same = zip(first, own, strict=False)
                differs = next(
                    (place for place, (one, other) in enumerate(same) if one != other),
                    min(len(first), len(own)),
                )
                found.append(
                    f"group {name} of ranks {group}: exchange {differs} of {len(first)} is "
                    f"{first[differs : differs + 1]} on rank {group[0]}, and of {len(own)} "
                    f"{own[differs : differs + 1]} on rank {rank}"
                )
    for (_, *way), (received, sent) in messages.items():
        if sent != received:
            found.append(f"messages from and to {way}: {sent} and {received}")
    return found


def log_work(plan, work, *arguments):
    """Return every rank's exchanges in `work`; assert that groups agree on the order."""
    logs = run_ranks(plan.parallel, logged_exchanges, work, plan, *arguments)
    assert disagreements(logs) == []
    return logs


def log_training(plan, steps, **options):
    return log_work(plan, functools.partial(tensor_parallel.train_steps, **options), steps)


def kinds_of(logs):
    return {each.kind for log in logs for each in log}


@pytest.mark.parametrize("name", ["pp2-dp2-vision", "dp4-experts"])
def test_ranks_that_share_packs(name):
    """Prevents deadlock of a rank with packs of other context-parallel sizes than its block's."""
    case = shared.CASES[name]
    assert min(map(len, log_training(shared.plan_of(case), **shared.options_of(case)))) > 20


@pytest.mark.parametrize("name", ["pp2-dp2", "tp2-sp-dp2-divided", "pp4", "pp2-dp2-zb-v"])
def test_data_parallel_encoders(tmp_path, name):
    """Prevents a rank without items from skipping a feature exchange that other ranks begin."""
    case = dp.CASES[name]
    feed = dp.feed_of(case.drop_path)
    assert kinds_of(log_training(dp.plan_of(case), dp.STEPS[:2], save=tmp_path, feed=feed))


def save_and_go_on(links, plan, directory):
    train_range(links, plan, 0, 1, None, directory)
    train_range(links, plan, 1, 2, directory, None)


@pytest.mark.parametrize("sizes", [{"tensor": 2, "sequence_parallel": True}, {"data": 2}])
def test_saving_and_loading(tmp_path, sizes):
    """Prevents deadlock: collectives of a save or load begun by only some ranks."""
    logs = log_work(pipeline_plan(4, **sizes), save_and_go_on, tmp_path)
    assert any("gather" in kind for kind in kinds_of(logs))


def test_evaluation_with_experts(digits):
    """Prevents deadlock: a rank that has answered its questions must keep exchanging tokens."""
    plan = pipeline_plan(3, model=load_model("internvl-digits-moe"), data=2, expert=2)
    assert any("alltoall" in kind for kind in kinds_of(log_work(plan, pipeline_answers, digits)))


def test_buckets_are_reduced_in_one_order_and_another_is_noticed(small_buckets):
    """Prevents buckets reduced in the order of each rank's backward, and a log that misses it."""
    logs = log_training(pipeline_plan(5, model=overlap.MODEL, data=2), overlap.STEPS)
    assert "send" in kinds_of(logs)
    own = logs[3]
    shared_by_two = [at for at, each in enumerate(own) if each.peer is None and len(each.group) > 1]
    first, second = next(
        pair
        for pair in pairwise(shared_by_two)
        if len({own[at].name for at in pair}) == 1 and len({own[at] for at in pair}) == 2
    )
    swapped = [*own]
    swapped[first], swapped[second] = own[second], own[first]
    [found] = disagreements([*logs[:3], swapped])
    assert "on rank 3" in found
    received = next(at for at, each in enumerate(own) if each.kind == "recv_")
    [lost] = disagreements([*logs[:3], own[:received] + own[received + 1 :]])
    assert lost.startswith("messages")
