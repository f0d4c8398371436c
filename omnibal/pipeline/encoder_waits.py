"""Data-parallel encoders on a run's packs: pipeline waits and memory.

The ranks of an encoding group encode the items of its pipelines' packs (shares by
`omnibal.packing.items`). A group's step takes

    busiest forward + exchange + slowest pipeline + exchange + busiest backward,

and a step takes its slowest group's time. Ranks that shard encoder weights run in lockstep in
blocks: every rank is as busy as its block's busiest (per pass, for whole samples), plus exposed
weight and gradient exchange. The time enters the workload as two features of each pipeline's first
and last micro-batch (`omnibal.model.units.ENCODER_WAITS_MS`).

Shapes: S steps, B groups, L pipelines of a group, R ranks of a pipeline, N = L * R of a group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from omnibal.cost.encoder_phase_costs import ITEM, EncoderCost, EncodersCost
from omnibal.model.data_parallel_encoders import DataParallelEncoders
from omnibal.model.units import ENCODER_WAITS_MS
from omnibal.packing.items import Homes, items_at_home, shares_of_ranks, unit_of_time
from omnibal.packing.whole_samples import (
    DealtSamples,
    SampleItems,
    deal_whole_samples,
    passes_of_samples,
)
from omnibal.pipeline.encoder_loads import EncoderMemory, EncoderWaits, Encoding
from omnibal.pipeline.encoder_passes import (
    EncoderPasses,
    EqualPasses,
    WholePasses,
    encoding_ms,
    exposed_ms,
)
from omnibal.pipeline.prediction import EncoderPhasePrediction, StageMemory
from omnibal.pipeline.stage_memory import GIB
from omnibal.pipeline.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ItemShares:
    """Items of every encoder, by the pipeline of their packs and by encoding rank."""

    steps: np.ndarray  # step numbers, [S]
    pipelines: int  # pipelines per group (L)
    held: Mapping[str, np.ndarray]  # items in every pipeline's packs, by encoder, int64 [S * B, L]
    encoded: Mapping[str, np.ndarray]  # items encoded by every rank, by encoder, int64 [S * B, N]
    # Samples by encoding rank for whole-sample encoders; ranks as in `encoded`.
    samples: Mapping[str, DealtSamples] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        workload: Workload,
        features: tuple[str, ...],
        cost: EncodersCost,
        dp_encoders: DataParallelEncoders,
    ) -> "ItemShares":
        """Return the shares of a workload's items; `features` names its columns."""
        steps, step = np.unique(workload.step, return_inverse=True)
        pipeline = step * workload.data_parallel_size + workload.dp_rank
        held, samples = dict[str, np.ndarray](), dict[str, SampleItems]()
        for name, encoder in cost.encoders.items():
            of_rows = workload.features[:, features.index(encoder.feature)]
            if name in dp_encoders.square_ms:
                samples[name] = workload.samples[encoder.feature]
                of_rows = samples[name].of_rows
            pipelines = len(steps) * workload.data_parallel_size
            items = np.bincount(pipeline, of_rows, pipelines).astype(np.int64)
            held[name] = items.reshape(-1, dp_encoders.pipelines)
        return cls.deal_items(steps, held, samples, pipeline, dp_encoders, cost.ranks_of_pipeline)

    @classmethod
    def deal_items(
        cls,
        steps: np.ndarray,
        held: Mapping[str, np.ndarray],
        samples: Mapping[str, SampleItems],
        pipeline: np.ndarray,
        dp_encoders: DataParallelEncoders,
        ranks_of_pipeline: int,
    ) -> "ItemShares":
        """Return shares of `held` items; `pipeline` is that of each sample row, int64 [rows]."""
        groups = len(next(iter(held.values()), ()))
        dealt, load = deal_whole_samples(
            samples, pipeline, dp_encoders, ranks_of_pipeline=ranks_of_pipeline, groups=groups
        )
        encoded = shares_of_ranks(
            {name: held[name] for name in held if name not in samples},
            ranks_of_pipeline=ranks_of_pipeline,
            item_ms=dp_encoders.item_ms,
            load=load,
            unit_ms=unit_of_time(dp_encoders.item_ms, dp_encoders.square_ms),
        )
        size = dp_encoders.pipelines * ranks_of_pipeline
        for name, own in dealt.items():
            encoded[name] = own.of_ranks(own.items, groups * size).reshape(groups, size)
        return cls(
            steps=steps, pipelines=dp_encoders.pipelines, held=held, encoded=encoded, samples=dealt
        )

    def passes(self, name: str, dp_encoders: DataParallelEncoders) -> EncoderPasses:
        return self.passes_of(name, dp_encoders.items_per_pass[name], dp_encoders.kept_items[name])

    def passes_of(self, name: str, items_per_pass: int, kept_items: int) -> EncoderPasses:
        """Return passes of at most `items_per_pass` items; ranks keep at most `kept_items`."""
        items = self.encoded[name]
        if name not in self.samples:
            return EqualPasses(items=items, items_per_pass=items_per_pass, kept_items=kept_items)
        return WholePasses(
            passes=passes_of_samples(self.samples[name], items_per_pass, kept_items),
            place=np.arange(items.size).reshape(items.shape),
        )

    def blocks(self, cost: EncodersCost) -> np.ndarray:
        """Return the weight-sharding block of every rank, int64 [S * B, N].

        Blocks are neighbours in Megatron's order (tensor, data, pipeline). Ranks of a group are in
        the order of `shares_of_ranks` (pipeline, stage, tensor).
        """
        sizes, steps = cost.parallel, len(self.steps)
        block = np.arange(steps * sizes.world_size) // cost.sharded
        in_order = block.reshape(steps, sizes.pipeline, sizes.data, sizes.tensor)
        ranks = self.pipelines * cost.ranks_of_pipeline
        return in_order.transpose(0, 2, 1, 3).reshape(-1, ranks)

    def at_home(self, name: str, cost: EncodersCost) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return items encoded on the node that embeds their tokens: by rank for its own pipeline,
        by rank for all, int64 [S * B, L, R] each, and by pipeline of their packs, [S * B, L]."""
        node = np.tile(cost.nodes(self.pipelines), (len(self.steps), 1))
        homes, held = Homes.from_nodes(node, cost.ranks_of_pipeline), self.held[name]
        if name in self.samples:
            items = self.samples[name].at_home(homes)
        else:
            items = items_at_home(held.ravel(), self.encoded[name].ravel(), homes)
        own, of_rank, of_pipeline = items
        by_rank = *held.shape, cost.ranks_of_pipeline
        return own.reshape(by_rank), of_rank.reshape(by_rank), of_pipeline.reshape(held.shape)

    def max_items(self) -> dict[str, int]:
        """Return the max items per rank and step of each encoder."""
        return {name: int(items.max(initial=0)) for name, items in self.encoded.items()}


def with_encoders(
    workload: Workload,
    features: tuple[str, ...],
    cost: EncodersCost,
    dp_encoders: DataParallelEncoders,
) -> Workload:
    """Return a workload with encoder waits (columns of `features`) and its `encoding`."""
    shares = ItemShares.build(workload, features, cost, dp_encoders)
    pairs = [(encoder, shares.passes(name, dp_encoders)) for name, encoder in cost.encoders.items()]
    forward, backward, exposed = _slowest(shares, cost, pairs)
    ahead, behind = exposed.mean(axis=1).T  # weight and gradient exchange, [S * B]
    of_passes: np.ndarray = sum(encoding_ms(encoder, p).mean(axis=1) for encoder, p in pairs)
    mean_forward, mean_backward, mean_recompute = of_passes.T
    exchange, exchange_back = (
        features_exchange_ms(shares, cost, is_back=is_back) for is_back in (False, True)
    )
    encoder_memory = memory_of_encoders(shares, cost, dp_encoders)

    def at_ends(before_ms: np.ndarray, after_ms: np.ndarray) -> np.ndarray:
        of_pipelines = _of_pipelines(shares, before_ms, after_ms)
        return waits_at_ends(workload, shares.steps, of_pipelines)

    silent = mean_forward, mean_backward + mean_recompute
    unreduced = forward + exchange, backward + exchange_back
    waits = EncoderWaits(
        all=at_ends(unreduced[0] + cost.gather_ms, unreduced[1] + cost.reduction_ms),
        even=at_ends(
            silent[0] + ahead + exchange + cost.gather_ms,
            silent[1] + behind + exchange_back + cost.reduction_ms,
        ),
        silent=at_ends(*silent),
        needed=at_ends(mean_forward, mean_backward),
        unreduced=at_ends(*unreduced),
    )
    values = workload.features.copy()
    values[:, [features.index(name) for name in ENCODER_WAITS_MS]] = waits.all
    longest = forward + backward
    slowest = longest.reshape(len(shares.steps), -1).argmax(axis=1)
    of_step = np.arange(len(shares.steps)), slowest

    def mean_of_slowest(group_ms: np.ndarray) -> float:
        return float(group_ms.reshape(len(shares.steps), -1)[of_step].mean())

    mean_ms = mean_forward + mean_backward + mean_recompute + exposed.mean(axis=1).sum(axis=1)
    encoding = Encoding(
        waits=waits,
        encoder_memory=encoder_memory,
        predicted=EncoderPhasePrediction(
            forward_ms=mean_of_slowest(forward),
            backward_ms=mean_of_slowest(backward),
            exchange_ms=mean_of_slowest(exchange + exchange_back),
            busiest=float(longest.sum() / mean_ms.sum()) if mean_ms.any() else 1.0,
            # Tables show a device that embeds tokens.
            memory=StageMemory(
                weights_gib=encoder_memory.weights / GIB,
                gradients_gib=encoder_memory.gradients / GIB,
                optimizer_gib=encoder_memory.optimizer / GIB,
                activations_gib=(encoder_memory.kept + encoder_memory.features) / GIB,
                transient_gib=(encoder_memory.buffers + encoder_memory.encoding) / GIB,
            ),
        ),
        exchange_ms=cost.gather_ms + cost.reduction_ms,
    )
    return replace(workload, features=values, encoding=encoding)


def memory_of_encoders(
    shares: ItemShares, cost: EncodersCost, dp_encoders: DataParallelEncoders
) -> EncoderMemory:
    """Return the max encoder memory per device over all steps.

    A rank holds its features or their gradients while encoding, and twice when reordering them for
    the exchange. A rank that embeds tokens also holds its pipeline's features, twice on arrival,
    and tensor-parallel ranks their part until gathered. Kept passes run backward, and are freed,
    before other passes are recomputed.

    Evaluation has no exchange: a rank that embeds tokens holds all encoder weights unsharded, plus
    its state, one pass's working memory, and twice its encoded features.
    """
    # By rank for whole samples, else of the busiest rank.
    kept_bytes: np.ndarray | float = 0.0
    working: list[np.ndarray | float] = [0.0]
    evaluating = [0.0]
    rows_bytes = arriving_bytes = features_bytes = held_bytes = np.zeros((1, 1))
    tensor = cost.parallel.tensor
    arriving = 2 + (1 / tensor if tensor > 1 else 0)
    for name, encoder in cost.encoders.items():
        passes = shares.passes(name, dp_encoders)
        if encoder.is_trained:
            own_bytes = passes.kept_bytes(encoder)
            kept_bytes = kept_bytes + own_bytes
            first, again = (partial(encoder.pass_bytes, is_kept=kept) for kept in (True, False))
            working.append(passes.largest(first, is_kept=True))
            working.append(passes.largest(again, is_kept=False) - kept_bytes)
            inputs_bytes = encoder.input_bytes * passes.work(is_kept=False)[..., ITEM]
            held_bytes = held_bytes + own_bytes + inputs_bytes
        else:
            # The default binds this encoder: a closure would see the loop's last.
            def with_inputs(work: np.ndarray, frozen: EncoderCost = encoder) -> np.ndarray:
                return frozen.pass_bytes(work, is_kept=True) + frozen.input_bytes * work[..., ITEM]

            working += [passes.largest(with_inputs, is_kept=kept) for kept in (True, False)]
        not_kept = shares.passes_of(name, dp_encoders.items_per_pass[name], 0)
        largest = not_kept.largest(partial(encoder.pass_bytes, is_kept=True), is_kept=False)
        evaluating.append(float(np.max(largest, initial=0)))
        rows_bytes = rows_bytes + encoder.feature_bytes * shares.encoded[name]
        of_pipeline = encoder.feature_bytes * shares.held[name]
        times = 2 if encoder.is_trained else 1  # features, and their gradients
        features_bytes = features_bytes + times * of_pipeline
        arriving_bytes = arriving_bytes + (arriving - times) * of_pipeline
    held = float(held_bytes.max(initial=0))
    # `rows_bytes` twice when reordering rows for the exchange.
    while_encoding = [held_bytes + used + rows_bytes for used in (*working, rows_bytes)]
    return EncoderMemory(
        weights=cost.weights_bytes,
        gradients=cost.gradients_bytes,
        optimizer=cost.optimizer_bytes,
        kept=held,
        buffers=cost.buffers_bytes(shares.pipelines),
        features=float(features_bytes.max(initial=0)),
        arrival=float(arriving_bytes.max(initial=0)),
        encoding=max(float(used.max(initial=0)) for used in while_encoding) - held,
        evaluation=max(evaluating) + 2 * float(rows_bytes.max(initial=0)),
        whole=cost.evaluation_bytes,
    )


def _slowest(
    shares: ItemShares, cost: EncodersCost, pairs: Sequence[tuple[EncoderCost, EncoderPasses]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return times of all encoders' passes: forward and backward of every group's slowest rank,
    [S * B], and exposed exchange of weights and gradients of every rank, [S * B, N, 2]."""
    blocks = shares.blocks(cost) if cost.sharded > 1 else None
    all_ms, exchange_ms = np.zeros((1, 1, 3)), np.zeros((1, 1, 2))
    for encoder, passes in pairs:
        # Ranks that shard weights gather them together, pass by pass.
        busiest = passes if blocks is None else passes.in_lockstep(blocks)
        all_ms = all_ms + encoding_ms(encoder, busiest)
        exchange_ms = exchange_ms + exposed_ms(encoder, busiest)
    forward = (all_ms[..., 0] + exchange_ms[..., 0]).max(axis=1)
    backward = (all_ms[..., 1] + all_ms[..., 2] + exchange_ms[..., 1]).max(axis=1)
    return forward, backward, exchange_ms


def pipeline_waits_ms(
    shares: ItemShares,
    cost: EncodersCost,
    dp_encoders: DataParallelEncoders,
    exchanges_ms: Sequence[np.ndarray],
) -> np.ndarray:
    """Return the waits before and after every pipeline, as `with_encoders` adds them, given the
    exchange times of features and gradients, [S * B] each. [S, ranks, 2]"""
    pairs = [(encoder, shares.passes(name, dp_encoders)) for name, encoder in cost.encoders.items()]
    forward, backward, _ = _slowest(shares, cost, pairs)
    before_ms = forward + exchanges_ms[0] + cost.gather_ms
    after_ms = backward + exchanges_ms[1] + cost.reduction_ms
    return _of_pipelines(shares, before_ms, after_ms)


def features_exchange_ms(shares: ItemShares, cost: EncodersCost, *, is_back: bool) -> np.ndarray:
    """Return the time of the exchange of features or, if `is_back`, of gradients. [S * B]

    Ranks that embed tokens receive equal parts of their pipeline's features and gather the others;
    features encoded locally are not sent. Traffic within the node overlaps with the network.
    """
    tensor = cost.parallel.tensor
    groups = len(next(iter(shares.held.values()), ()))
    # Frozen encoders get no gradients.
    carried = [name for name, enc in cost.encoders.items() if enc.is_trained or not is_back]
    if shares.pipelines * cost.ranks_of_pipeline == 1 or not carried:
        return np.zeros(groups)
    by_rank = groups, shares.pipelines, cost.ranks_of_pipeline
    # Bytes sent and received per rank, within and across nodes.
    moved_bytes, of_pipeline = np.zeros((2, 2, *by_rank)), np.zeros((groups, shares.pipelines))
    for name in carried:
        bytes_, held = cost.encoders[name].feature_bytes, shares.held[name]
        encoded = shares.encoded[name].reshape(by_rank)
        own, near, arriving = shares.at_home(name, cost)
        # The first ranks of a pipeline embed tokens.
        stays = own / tensor
        stays[..., tensor:] = 0
        sent = np.stack([near - stays, encoded - near])
        received = np.stack([arriving, held - arriving])[..., None] / tensor
        moved_bytes[0] += bytes_ * sent
        moved_bytes[1, ..., :tensor] += bytes_ * received
        moved_bytes[1, 0] -= bytes_ * stays
        of_pipeline += bytes_ * held
    # Sending and receiving overlap, and the group waits for its slowest rank.
    slowest_ms = cost.exchange_ms(shares.pipelines, *moved_bytes.max(axis=0)).max(axis=(1, 2))
    if is_back or tensor == 1:
        return slowest_ms
    # Each tensor-parallel rank receives a part and gathers the others.
    gathered = of_pipeline.max(axis=1) * (tensor - 1) / tensor
    gather_ms: np.ndarray = cost.tensor.fixed_ms + cost.tensor.each_ms * gathered
    return slowest_ms + gather_ms


def _of_pipelines(shares: ItemShares, before_ms: np.ndarray, after_ms: np.ndarray) -> np.ndarray:
    """Return waits of groups [S * B] for each of their pipelines. [S, ranks, 2]"""
    of_groups = np.stack([before_ms, after_ms], axis=1).reshape(len(shares.steps), -1, 2)
    return np.repeat(of_groups, shares.pipelines, axis=1)


def waits_at_ends(workload: Workload, steps: np.ndarray, waits_ms: np.ndarray) -> np.ndarray:
    """Return pipelines' waits [S, ranks, 2] in these steps by micro-batch: before at the first of a
    step, and after at the last. Others are 0. [rows, 2]"""
    is_first = workload.slot == 0
    # Rows are sorted by step, rank and slot.
    is_last = np.append(is_first[1:], True)
    is_end = np.stack([is_first, is_last], axis=1) & np.isin(workload.step, steps)[:, None]
    place = np.minimum(np.searchsorted(steps, workload.step), len(steps) - 1)
    return np.where(is_end, waits_ms[place, workload.dp_rank], 0.0)
