"""What ranks encode in rounds: shares of every round's items, their times, and memory.

Shapes: S steps, B groups of a step, L pipelines of a group, N ranks of a group, G groups that go by
rounds, W rounds, p stages.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from omnibal.cost.encoder_phase import ITEM, EncodersCost
from omnibal.model.data_parallel_encoders import DataParallelEncoders, EncoderRound, EncoderRounds
from omnibal.pipeline.encoder_passes import encoding_ms
from omnibal.pipeline.encoder_waits import (
    ItemShares,
    features_exchange_ms,
    memory_of_encoders,
)
from omnibal.pipeline.encoding import EncoderMemory, RoundWork
from omnibal.pipeline.workload import Workload


def with_rounds(
    workload: Workload,
    features: tuple[str, ...],
    cost: EncodersCost,
    beside: DataParallelEncoders,
) -> Workload:
    """The workload with the work and the memory of its encoders' rounds; unchanged without any.

    Args:
        workload: with encoders before and after all micro-batches
            (`omnibal.pipeline.encoder_waits.with_encoders`).
        features: names of its features.
    """
    encoding = workload.encoding
    if encoding is None or not beside.rounds:
        return workload
    memory, work = encoding.encoder_memory, []
    for rounds in beside.rounds:
        shares = list(shares_of_rounds(workload, features, cost, beside, rounds))
        if not shares:
            continue
        work.append(
            work_of(shares, rounds.rounds, groups_of(workload, beside, rounds), cost, beside)
        )
        memory = _most(memory, _memory(shares, cost, beside))
    encoding = replace(encoding, encoder_memory=memory, rounds=tuple(work))
    return replace(workload, encoding=encoding)


def groups_of(
    workload: Workload, beside: DataParallelEncoders, rounds: EncoderRounds
) -> np.ndarray:
    """Groups that go by the rounds, since every pipeline has their number of micro-batches: place
    of their step among the workload's and of the group in it, int64 [2, G]."""
    steps, step = np.unique(workload.step, return_inverse=True)
    ranks = workload.data_parallel_size
    counts = np.bincount(step * ranks + workload.dp_rank, minlength=len(steps) * ranks)
    of_group = counts.reshape(len(steps), -1, beside.pipelines)
    return np.array(np.nonzero((of_group == rounds.micro_batches).all(axis=2)))


def shares_of_rounds(
    workload: Workload,
    features: tuple[str, ...],
    cost: EncodersCost,
    beside: DataParallelEncoders,
    rounds: EncoderRounds,
) -> Iterator[ItemShares]:
    """Shares of every round's items, of the steps in which any group goes by the rounds; other
    groups have none."""
    step, group = groups_of(workload, beside, rounds)
    if not len(step):
        return
    _, step_of_row = np.unique(workload.step, return_inverse=True)
    goes = np.zeros((int(step_of_row[-1]) + 1, workload.data_parallel_size), bool)
    goes.reshape(len(goes), -1, beside.pipelines)[step, group] = True
    is_within, first = goes[step_of_row, workload.dp_rank], 0
    bare, before = replace(workload, encoding=None), dict[str, np.ndarray]()
    for one in rounds.rounds:
        stop = first + one.micro_batches
        rows = is_within & (workload.slot >= first) & (workload.slot < stop)
        found = ItemShares.of(bare.rows(rows), features, cost, beside, one.load_ms)
        yield replace(found, before=before)
        before = {name: before.get(name, 0) + items for name, items in found.encoded.items()}
        first = stop


def work_of(
    shares: Sequence[ItemShares],
    rounds: tuple[EncoderRound, ...],
    groups: np.ndarray,
    cost: EncodersCost,
    beside: DataParallelEncoders,
) -> RoundWork:
    """Times of every round.

    Args:
        shares: of every round.
        groups: that go by the rounds, as `groups_of`.
    """
    step, group = groups
    _, place = np.unique(step, return_inverse=True)
    blocks = cost.parallel.data // beside.pipelines
    at = place * blocks + group
    sizes = -1, beside.pipelines, cost.parallel.pipeline, cost.parallel.tensor

    def of_stages(ms: np.ndarray) -> np.ndarray:
        return ms.reshape(sizes)[at].max(axis=3)

    forward_ms, backward_ms = [], []
    for each in shares:
        ms = sum(
            (encoding_ms(one, each.passes(name, beside)) for name, one in cost.encoders.items()),
            np.zeros(3),
        )
        forward_ms.append(of_stages(ms[..., 0]))
        backward_ms.append(of_stages(ms[..., 1] + ms[..., 2]))
    exchange_ms, back_ms = (
        np.stack([features_exchange_ms(each, cost, is_back=is_back)[at] for each in shares], axis=1)
        for is_back in (False, True)
    )
    return RoundWork(
        rounds=rounds,
        step=shares[0].steps[place],
        first_rank=group * beside.pipelines,
        forward_ms=np.stack(forward_ms, axis=2),
        backward_ms=np.stack(backward_ms, axis=2),
        exchange_ms=exchange_ms,
        exchange_back_ms=back_ms,
    )


def _memory(
    shares: Sequence[ItemShares], cost: EncodersCost, beside: DataParallelEncoders
) -> EncoderMemory:
    """Memory of encoders in rounds, were every rank at its most in all of it at once.

    All rounds are encoded before the first one's backward. Where tokens are embedded, a round has
    its features until its last forward and their gradients from its first one on: both while its
    own forwards run, which those of other rounds do not meanwhile.
    """
    held_bytes = sum((_held_bytes(each, cost, beside) for each in shares), np.zeros((1, 1)))
    of_rounds = [memory_of_encoders(each, cost, beside) for each in shares]
    features_bytes = sum((_rows_bytes(each.held, cost) for each in shares), np.zeros((1, 1)))
    trained = {name for name, one in cost.encoders.items() if one.is_trained}
    both_bytes = [_rows_bytes({n: each.held[n] for n in trained}, cost) for each in shares]
    features_bytes = features_bytes + np.max(both_bytes, axis=0)
    return replace(
        of_rounds[0],
        kept=float(held_bytes.max(initial=0)),
        features=float(features_bytes.max(initial=0)),
        arrival=0.0,
        encoding=0.0,
        among_passes=max(each.encoding + each.arrival for each in of_rounds),
    )


def _rows_bytes(items: Mapping[str, np.ndarray], cost: EncodersCost) -> np.ndarray:
    """Features of so many items of each encoder. [S * B, ...]"""
    each = (cost.encoders[name].feature_bytes * count for name, count in items.items())
    return sum(each, np.zeros((1, 1)))


def _held_bytes(shares: ItemShares, cost: EncodersCost, beside: DataParallelEncoders) -> np.ndarray:
    """What every rank holds of a round from forward to backward: activations that are kept, inputs
    of what runs again, and features that leave until they have arrived, or gradients that come
    back until they are needed. [S * B, N]"""
    held_bytes = _rows_bytes(shares.encoded, cost)
    for name, one in cost.encoders.items():
        if one.is_trained:
            passes = shares.passes(name, beside)
            kept_bytes = passes.work(is_kept=True) @ one.kept_bytes
            inputs_bytes = one.input_bytes * passes.work(is_kept=False)[..., ITEM]
            held_bytes = held_bytes + kept_bytes + inputs_bytes
    return held_bytes


def _most(one: EncoderMemory, other: EncoderMemory) -> EncoderMemory:
    """The more of each of two."""
    return replace(
        one,
        kept=max(one.kept, other.kept),
        features=max(one.features, other.features),
        arrival=max(one.arrival, other.arrival),
        encoding=max(one.encoding, other.encoding),
        among_passes=max(one.among_passes, other.among_passes),
    )
