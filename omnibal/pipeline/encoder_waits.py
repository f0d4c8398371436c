"""Data-parallel encoders on the packs of a run: what pipelines wait for, and what it takes.

The ranks of an encoding group encode what the packs of its pipelines hold, each the share that
`omnibal.dispatch.items` deals it. No pipeline of the group begins before the busiest of these ranks
has its features sent, and none of the ranks begins its backward before the slowest pipeline has
ended. A step therefore lasts as long as that of the slowest group:

    busiest forward + exchange + slowest pipeline + exchange + busiest backward.

Ranks that divide the encoders' weights meet in every unit of every pass: all of a block of
neighbouring ranks of the job run as many passes of every encoder, kept ones and others, as the one
with the most items, and each pass takes as long as that one's. So every rank is as busy as the
block's busiest of each encoder, and waits for what no computation hides of the exchange of weights
and gradients. A group whose ranks are of several blocks lasts as long as the slowest of these.

So the time of encoders is added to every pipeline of the group, before its first forward and after
its last backward, as two features of these micro-batches (`omnibal.model.units.ENCODER_WAITS_MS`).

Shapes: S steps, B groups, L pipelines of a group, N ranks of a group.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from omnibal.cost.encoder_phase import EncoderCost, EncodersCost
from omnibal.dispatch.items import shares_of_ranks
from omnibal.model.data_parallel_encoders import DataParallelEncoders
from omnibal.model.units import ENCODER_WAITS_MS
from omnibal.pipeline.encoding import EncoderMemory, EncoderWaits, Encoding
from omnibal.pipeline.prediction import EncoderPhasePrediction, StageMemory
from omnibal.pipeline.stage_memory import GIB
from omnibal.pipeline.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ItemShares:
    """Items of every encoder that packs hold and ranks encode, by step and group."""

    steps: np.ndarray
    """Numbers of the steps, [S]."""
    pipelines: int
    """L, pipelines of a group."""
    held: Mapping[str, np.ndarray]
    """Items of every pipeline's packs, by encoder, int64 [S * B, L]."""
    encoded: Mapping[str, np.ndarray]
    """Items that every rank encodes, by encoder, int64 [S * B, N]."""

    @classmethod
    def of(
        cls,
        workload: Workload,
        features: tuple[str, ...],
        cost: EncodersCost,
        pipelines: int,
        item_ms: Mapping[str, float],
    ) -> "ItemShares":
        """Share the items of a workload whose features have these names."""
        steps, step = np.unique(workload.step, return_inverse=True)
        ranks = workload.data_parallel_size
        cell, cells = step * ranks + workload.dp_rank, len(steps) * ranks
        held = {
            name: np.bincount(cell, workload.features[:, features.index(one.feature)], cells)
            .astype(np.int64)
            .reshape(-1, pipelines)
            for name, one in cost.encoders.items()
        }
        encoded = shares_of_ranks(held, ranks_of_pipeline=cost.ranks_of_pipeline, item_ms=item_ms)
        return cls(steps=steps, pipelines=pipelines, held=held, encoded=encoded)

    def in_lockstep(self, cost: EncodersCost) -> dict[str, np.ndarray]:
        """Items by which every rank is busy: the most of its block of ranks that divide weights.

        Blocks are of neighbours in Megatron's order: tensor first, then data, then pipeline. Ranks
        of a group are in that of `shares_of_ranks`: pipeline, stage, tensor. int64 [S * B, N]
        """
        if cost.sharded == 1:
            return dict(self.encoded)
        sizes = cost.parallel
        data = len(self.steps), sizes.data, sizes.pipeline, sizes.tensor
        found = {}
        for name, items in self.encoded.items():
            in_order = items.reshape(data).transpose(0, 2, 1, 3)
            of_block = in_order.reshape(-1, cost.sharded).max(axis=1, keepdims=True)
            busiest = np.broadcast_to(of_block, (len(of_block), cost.sharded))
            found[name] = busiest.reshape(in_order.shape).transpose(0, 2, 1, 3).reshape(items.shape)
        return found

    def most(self) -> dict[str, int]:
        """Most items of each encoder that any rank has in a step."""
        return {name: int(items.max(initial=0)) for name, items in self.encoded.items()}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _GroupTimes:
    """Times of every group's step in ms, [S * B]."""

    forward: np.ndarray
    """Forward of the busiest rank, with the exchange of weights that it waits for."""
    backward: np.ndarray
    """Backward of the busiest rank, with what runs again and the exchange that it waits for."""
    mean_forward: np.ndarray
    """Computation alone; this and the next two are means over ranks."""
    mean_backward: np.ndarray
    """Without what runs again."""
    mean_again: np.ndarray
    mean_exposed: np.ndarray
    """Exchange of weights and gradients that ranks wait for in forward and backward, [S * B, 2]."""
    exchange: np.ndarray
    """Exchange of features."""
    exchange_back: np.ndarray
    """Exchange of the gradients of features."""


def with_encoders(
    workload: Workload,
    features: tuple[str, ...],
    cost: EncodersCost,
    beside: DataParallelEncoders,
    shares: ItemShares | None = None,
) -> Workload:
    """The workload with data-parallel encoders.

    Args:
        workload: without them.
        features: names of its features.
        shares: those of this workload, if they are known.
    """
    shares = shares or ItemShares.of(workload, features, cost, beside.pipelines, beside.item_ms)
    times = _group_times(shares, cost, beside)
    encoder_memory = memory_of_encoders(shares, cost, beside)
    waits = _waits(workload, shares, times, cost)
    values = workload.features.copy()
    values[:, [features.index(name) for name in ENCODER_WAITS_MS]] = waits.all
    longest = times.forward + times.backward
    slowest = longest.reshape(len(shares.steps), -1).argmax(axis=1)
    of_step = np.arange(len(shares.steps)), slowest

    def mean_of_slowest(each_ms: np.ndarray) -> float:
        return float(each_ms.reshape(len(shares.steps), -1)[of_step].mean())

    mean_ms = times.mean_forward + times.mean_backward + times.mean_again
    mean_ms = mean_ms + times.mean_exposed.sum(axis=1)
    encoding = Encoding(
        waits=waits,
        encoder_memory=encoder_memory,
        predicted=EncoderPhasePrediction(
            forward_ms=mean_of_slowest(times.forward),
            backward_ms=mean_of_slowest(times.backward),
            exchange_ms=mean_of_slowest(times.exchange + times.exchange_back),
            busiest=float(longest.sum() / mean_ms.sum()) if mean_ms.any() else 1.0,
            memory=_memory(encoder_memory),
        ),
        exchange_ms=cost.gather_ms + cost.reduction_ms,
    )
    return replace(workload, features=values, encoding=encoding)


def memory_of_encoders(
    shares: ItemShares, cost: EncodersCost, beside: DataParallelEncoders
) -> EncoderMemory:
    """Memory that encoders take of every device, at the step that needs most.

    While encoders run, a rank has its features, or their gradients, and after or before that twice,
    in the order in which they are made and in that in which they leave. A rank that embeds tokens
    has those of its pipeline twice, as they arrive and in their order. Tensor-parallel ranks have
    their part besides, until they have gathered all. Kept passes of an encoder run backward before
    its others run forward again, which find the memory of the former free.

    Held-out data is encoded without an exchange: a rank that embeds tokens then has all weights of
    the encoders whole, besides its state and what a pass of them or of the pipeline works with.
    """
    most, kept = shares.most(), 0.0
    working, evaluating = [0.0], [0.0]
    rows_bytes = arriving_bytes = features_bytes = inputs_bytes = np.zeros(1)
    tensor = cost.parallel.tensor
    arriving = 2 + (1 / tensor if tensor > 1 else 0)
    for name, one in cost.encoders.items():
        items = shares.encoded[name]
        stays = min(beside.kept_items[name], most[name]) if one.is_trained else 0
        a_pass = beside.items_per_pass[name]
        kept += one.kept(stays, a_pass)
        again = min(a_pass, most[name] - stays)
        working.append(one.pass_bytes(min(a_pass, stays), is_kept=True))
        working.append(one.pass_bytes(again, is_kept=not one.is_trained) - kept)
        evaluating.append(one.pass_bytes(min(a_pass, most[name]), is_kept=True))
        if one.is_trained:
            inputs_bytes = inputs_bytes + one.input_bytes * np.maximum(items - stays, 0)
        else:
            working[-1] += one.input_bytes * again + kept
        rows_bytes = rows_bytes + one.feature_bytes * items
        held_bytes = one.feature_bytes * shares.held[name]
        times = 2 if one.is_trained else 1
        features_bytes = features_bytes + times * held_bytes
        arriving_bytes = arriving_bytes + (arriving - times) * held_bytes
    rows = float(rows_bytes.max(initial=0))
    return EncoderMemory(
        weights=cost.weights_bytes,
        gradients=cost.gradients_bytes,
        optimizer=cost.optimizer_bytes,
        kept=kept + float(inputs_bytes.max(initial=0)),
        buffers=cost.buffers_bytes(shares.pipelines),
        features=float(features_bytes.max(initial=0)),
        arrival=float(arriving_bytes.max(initial=0)),
        encoding=max(max(working) + rows, 2 * rows),
        evaluation=max(evaluating) + 2 * rows,
        whole=cost.evaluation_bytes,
    )


def _memory(encoder_memory: EncoderMemory) -> StageMemory:
    """Memory as a table shows it, of a device that embeds tokens."""
    return StageMemory(
        weights_gib=encoder_memory.weights / GIB,
        gradients_gib=encoder_memory.gradients / GIB,
        optimizer_gib=encoder_memory.optimizer / GIB,
        activations_gib=(encoder_memory.kept + encoder_memory.features) / GIB,
        transient_gib=(encoder_memory.buffers + encoder_memory.encoding) / GIB,
    )


def _group_times(
    shares: ItemShares, cost: EncodersCost, beside: DataParallelEncoders
) -> _GroupTimes:
    busiest = shares.in_lockstep(cost)
    all_ms, mean_ms, exposed_ms = np.zeros((1, 1, 3)), np.zeros((1, 3)), np.zeros((1, 1, 2))
    for name, one in cost.encoders.items():
        sizes = beside.items_per_pass[name], beside.kept_items[name]
        all_ms = all_ms + encoding_ms(one, busiest[name], *sizes)
        mean_ms = mean_ms + encoding_ms(one, shares.encoded[name], *sizes).mean(axis=1)
        exposed_ms = exposed_ms + exposed_exchange_ms(one, busiest[name], *sizes)
    return _GroupTimes(
        forward=(all_ms[..., 0] + exposed_ms[..., 0]).max(axis=1),
        backward=(all_ms[..., 1] + all_ms[..., 2] + exposed_ms[..., 1]).max(axis=1),
        mean_forward=mean_ms[:, 0],
        mean_backward=mean_ms[:, 1],
        mean_again=mean_ms[:, 2],
        mean_exposed=exposed_ms.mean(axis=1),
        exchange=_exchange_ms(shares, cost, is_back=False),
        exchange_back=_exchange_ms(shares, cost, is_back=True),
    )


def encoding_ms(
    cost: EncoderCost, items: np.ndarray, items_per_pass: int, kept_items: int
) -> np.ndarray:
    """Computation of forward, backward, and what runs again between the two, of ranks with so many
    items [...]. [..., 3]

    No pass has kept items and others.
    """
    kept = np.minimum(items, kept_items)
    again = items - kept
    passes_again = -(-again // items_per_pass)
    passes = -(-kept // items_per_pass) + passes_again
    both = np.stack([passes, items], axis=-1)
    second = np.stack([passes_again, again], axis=-1)
    return np.stack(
        [both @ cost.forward_ms, both @ cost.backward_ms, second @ cost.again_ms], axis=-1
    )


def exposed_exchange_ms(
    cost: EncoderCost, items: np.ndarray, items_per_pass: int, kept_items: int
) -> np.ndarray:
    """Exchange of weights and gradients that computation does not hide in forward and backward, of
    ranks whose block's busiest has so many items [...]. [..., 2]"""
    if cost.exchange is None:
        return np.zeros((*items.shape, 2))
    # By the items of a pass; a pass of none is not run.
    of_pass = cost.exchange.exposed_ms(np.arange(1 + min(items_per_pass, items.max(initial=0))))
    of_pass[0] = 0
    kept = np.minimum(items, kept_items)
    kept_ms, again_ms = (
        of_pass[-1] * (each // items_per_pass)[..., None] + of_pass[each % items_per_pass]
        for each in (kept, items - kept)
    )
    forward_ms = kept_ms[..., 0] + again_ms[..., 0]
    backward_ms = kept_ms[..., 1] + cost.is_trained * again_ms[..., 2]
    return np.stack([forward_ms, backward_ms], axis=-1)


def _exchange_ms(shares: ItemShares, cost: EncodersCost, *, is_back: bool) -> np.ndarray:
    """Time of one exchange of features or of their gradients, [S * B].

    Every rank that embeds tokens receives an equal part of its pipeline's rows, and what it has
    encoded of that part stays where it is.
    """
    line, tensor = cost.line(shares.pipelines), cost.parallel.tensor
    groups = len(next(iter(shares.held.values()), ()))
    carried = [name for name, one in cost.encoders.items() if one.is_trained or not is_back]
    size = shares.pipelines * cost.ranks_of_pipeline
    if size == 1 or not carried:
        return np.zeros(groups)
    by_rank = groups, shares.pipelines, cost.ranks_of_pipeline
    moved, of_pipeline = np.zeros(by_rank), np.zeros((groups, shares.pipelines))
    received = np.zeros(by_rank)
    for name in carried:
        bytes_, held = cost.encoders[name].feature_bytes, shares.held[name]
        encoded = shares.encoded[name].reshape(by_rank)
        of_pipeline += bytes_ * held
        # A pipeline's first ranks encode its own items first, and they are those that embed.
        before = np.cumsum(encoded, axis=2) - encoded
        at_home = np.clip(held[..., None] - before, 0, encoded)
        at_home[..., tensor:] = 0
        moved += bytes_ * (encoded - at_home / tensor)
        received[..., :tensor] += bytes_ * (held[..., None] - at_home[..., :tensor]) / tensor
    most = np.maximum(moved, received).max(axis=(1, 2))
    exchange_ms = line.fixed_ms * (size - 1) + line.each_ms * most
    if is_back or tensor == 1:
        return exchange_ms
    gathered = of_pipeline.max(axis=1) * (tensor - 1) / tensor
    return exchange_ms + cost.tensor.fixed_ms + cost.tensor.each_ms * gathered


def _waits(
    workload: Workload, shares: ItemShares, times: _GroupTimes, cost: EncodersCost
) -> EncoderWaits:
    """Waits of every pipeline, in the rows of its first and of its last micro-batch of a step."""
    step = np.searchsorted(shares.steps, workload.step)
    groups = workload.data_parallel_size // shares.pipelines
    group = step * groups + workload.dp_rank // shares.pipelines
    is_first = workload.slot == 0
    # Rows are sorted by step, rank and slot.
    is_last = np.append(is_first[1:], True)

    def at_ends(before_ms: np.ndarray, after_ms: np.ndarray) -> np.ndarray:
        return np.stack([before_ms[group] * is_first, after_ms[group] * is_last], axis=1)

    forward, backward = times.forward + times.exchange, times.backward + times.exchange_back
    silent = times.mean_forward, times.mean_backward + times.mean_again
    ahead, behind = times.mean_exposed.T
    return EncoderWaits(
        all=at_ends(forward + cost.gather_ms, backward + cost.reduction_ms),
        even=at_ends(
            silent[0] + ahead + times.exchange + cost.gather_ms,
            silent[1] + behind + times.exchange_back + cost.reduction_ms,
        ),
        silent=at_ends(*silent),
        needed=at_ends(times.mean_forward, times.mean_backward),
        unreduced=at_ends(forward, backward),
    )
