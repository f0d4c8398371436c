"""Costs if data-parallel ranks shard weights and gradients (FSDP, ZeRO-3).

A rank holds 1 / `Parallel.sharded` of weights, gradients and optimizer state; with fewer shards
than ranks the groups are replicas (hybrid). Weights of a unit are gathered before its forward and
again before its backward, and freed after each; gradients are reduce-scattered after every
micro-batch (Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, section 5; Zhao et al. 2023, FSDP,
arXiv 2304.11277, section 3.2). The exchange overlaps with one unit's computation:

    forward  = gather of the first + sum over units of max(forward, gather of the next)
    backward = gather of the last + reduce of the first
               + sum over units of max(backward, gather of the previous + reduce of the next)

max(a, b) becomes a + b - hidden x min(a, b) if a lower overlap was measured
(`omnibal.model.rate_tables.Rates.hidden`). The head's weights stay gathered from forward to
backward. Experts are exchanged among the ranks that hold the same experts
(`Parallel.expert_shards`).

Exposed exchange is a feature of the micro-batch, as it is not linear in sizes. Tensor-, expert- and
context-parallel exchange hide nothing, since they take the same links; neither does recomputation.
Ranks of a group run micro-batches in lockstep. Replicas all-reduce gradient shards once a step,
hidden by the last backward if a sharding group fits in a node.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from omnibal.cost.device_rates import streamed_bytes_per_ms
from omnibal.cost.link_rates import hops_ms, pass_line, ring_ms_per_byte
from omnibal.cost.model import CostModel, ParameterRates, UnitCost, with_features
from omnibal.cost.setting import CostSetting
from omnibal.model.parallel import Group, Parallel, copies_group, state_group
from omnibal.model.rate_tables import RingKind
from omnibal.model.units import EXPOSED_MS, HEAD, LANGUAGE


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _ShardedParameters:
    """Parameters with the same sharding group, per unit kind, before sharding (K kinds)."""

    group: Group  # ranks that shard them
    copies: Group  # ranks that hold the same shard
    parameters: np.ndarray  # [K]
    trained: np.ndarray  # `parameters`, 0 for frozen units, [K]

    def shard_rates(self, rates: ParameterRates, setting: CostSetting) -> ParameterRates:
        """Return rates per complete parameter: a shard's bytes, and the replicas' all-reduce."""
        ranks, cluster, precision = self.group.ranks, setting.cluster, setting.precision
        # Replicas all-reduce gradient shards once a step: two ring passes.
        pass_ms = ring_ms_per_byte(cluster, self.copies, precision) * rates.gradient_bytes
        return replace(
            rates,
            weight_bytes=rates.weight_bytes / ranks,
            gradient_bytes=rates.gradient_bytes / ranks,
            gradient_reduction_ms=2 * pass_ms / ranks,
            weight_gather_ms=0.0,
        )


def _sharded_parameters(cost: CostModel, parallel: Parallel) -> list[_ShardedParameters]:
    """Return two items: all parameters except experts', and experts'."""
    units = cost.units.values()
    is_trained = np.array([unit.trained_parameters > 0 for unit in units])
    of_experts = np.array([unit.expert_parameters for unit in units], np.float64)
    of_units = np.array([unit.parameters for unit in units], np.float64)
    return [
        _ShardedParameters(
            group=state_group(parallel, of_experts=are_experts),
            copies=copies_group(parallel, of_experts=are_experts),
            parameters=parameters,
            trained=parameters * is_trained,
        )
        for are_experts, parameters in ((False, of_units - of_experts), (True, of_experts))
    ]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShardedExchange:
    """Exchange of weights and gradients, and the overlapping computation (K kinds, F features)."""

    forward_ms: np.ndarray  # forward time of every unit kind without exchanges, [K, F]
    backward_ms: np.ndarray
    gather_ms: np.ndarray  # gather time of the weights of every unit kind, [K]
    gather_back_ms: np.ndarray  # gather time before backward, or 0 if backward reads no weights
    reduce_ms: np.ndarray  # reduce-scatter time of gradients, or 0 if frozen
    again_ms: np.ndarray | None = None  # time of a second forward, of an encoder's passes, [K, F]
    sequence: tuple[int, ...]  # kind index of every unit, in model order
    hops_ms: float = 0.0  # latency of a ring's hops, which computation does not hide
    hidden: float = 1.0  # hidden share of the shorter of exchange and overlapped computation
    stages: int = 1

    def exposed_ms(self, features: np.ndarray) -> np.ndarray:
        """Return exposed time in forward and backward, [packs, 2], for `features` [packs, F].

        The sum over all stages, which are assumed to begin and end with the layers that take
        longest to gather, since their first gather and last reduction are exposed.
        """
        first, last = self.sequence[0], self.sequence[-1]
        forward, backward = features @ self.forward_ms.T, features @ self.backward_ms.T
        layers = [kind for kind, times in Counter(self.sequence).items() if times > 1]
        layer = max(layers or [first], key=lambda kind: self.gather_ms[kind])
        others = self.stages - 1
        ahead = np.full(len(features), self.gather_ms[first] + others * self.gather_ms[layer])
        for (kind, after), times in Counter(pairwise(self.sequence)).items():
            ahead += times * self._exposed_part_ms(self.gather_ms[after], forward[:, kind])
        of_layer = self.gather_back_ms[layer] + self.reduce_ms[layer]
        behind = np.full(
            len(features), self.gather_back_ms[last] + self.reduce_ms[first] + others * of_layer
        )
        nothing = len(self.gather_ms)  # index of no unit, before the first and after the last
        gather_ms, reduce_ms = np.append(self.gather_back_ms, 0), np.append(self.reduce_ms, 0)
        around = (nothing, *self.sequence, nothing)
        neighbours = Counter(zip(around[:-2], self.sequence, around[2:], strict=True))
        for (before, kind, after), times in neighbours.items():
            exchange_ms = gather_ms[before] + reduce_ms[after]
            behind += times * self._exposed_part_ms(exchange_ms, backward[:, kind])
        kinds = np.array(self.sequence)
        ahead += self.hops_ms * np.count_nonzero(self.gather_ms[kinds])
        behind += self.hops_ms * np.count_nonzero(self.gather_back_ms[kinds])
        behind += self.hops_ms * np.count_nonzero(self.reduce_ms[kinds])
        return np.stack([ahead, behind], axis=1)

    def passes_ms(self, work: np.ndarray) -> np.ndarray:
        """Return exposed time of forward, backward, second forward plus backward, [passes, 3]."""
        # `work`, [passes, 2 or 3]: 1, items and, if counted, squares.
        assert self.again_ms is not None
        ahead, behind = self.exposed_ms(work).T
        ahead_again = replace(self, forward_ms=self.again_ms).exposed_ms(work)[:, 0]
        # The last unit's weights are still gathered.
        again = ahead_again + behind - self.gather_back_ms[self.sequence[-1]]
        return np.stack([ahead, behind, again], axis=-1)

    def shares(self) -> np.ndarray:
        """Return the share of exposed forward and backward time of a unit by kind, [2, K]."""
        exchanged = np.stack([self.gather_ms, self.gather_back_ms + self.reduce_ms])
        if self.stages == 1:  # all to the head, which always has a backward
            return np.eye(len(self.gather_ms))[[-1, -1]]
        sums = exchanged[:, list(self.sequence)].sum(axis=1, keepdims=True)
        return exchanged / np.maximum(sums, 1e-300)

    def _exposed_part_ms(self, exchange_ms: float, computation_ms: np.ndarray) -> np.ndarray:
        """Return the exposed part of an exchange that overlaps with computation, [packs]."""
        return np.asarray(exchange_ms - self.hidden * np.minimum(exchange_ms, computation_ms))


def _count_exchange(
    cost: CostModel, names: Sequence[str], sent: float, setting: CostSetting
) -> ShardedExchange:
    """Return the exchange of units `names` in order, with `sent` bytes per gradient element."""
    cluster, parallel, precision = setting.cluster, setting.parallel, setting.precision
    units, kinds = list(cost.units.values()), [kind.name for kind in cost.kinds]
    hidden = cluster.measured_rates(precision).hidden

    def ring_ms(kind: RingKind, sharded: _ShardedParameters, sent_bytes: np.ndarray) -> np.ndarray:
        line, ranks = pass_line(cluster, sharded.group, precision, kind), sharded.group.ranks
        fixed_ms = line.fixed_ms * (sent_bytes > 0) * (ranks > 1)
        return fixed_ms + line.each_ms * sent_bytes * (ranks - 1) / ranks

    # Experts and other parameters take the same links, one after another.
    gather_ms, reduce_ms = np.zeros((2, len(units)))
    for sharded in _sharded_parameters(cost, parallel):
        gather_ms += ring_ms("all_gather", sharded, cost.rates.weight_bytes * sharded.parameters)
        reduce_ms += ring_ms("reduce_scatter", sharded, sent * sharded.trained)
    # The head's weights stay gathered from its forward. An embedding's backward reads none.
    is_back = [
        unit.has_backward and not kind.is_embed and kind.name != HEAD
        for unit, kind in zip(units, cost.kinds, strict=True)
    ]
    return ShardedExchange(
        forward_ms=np.stack([unit.forward_ms - unit.collective_ms[0] for unit in units]),
        backward_ms=np.stack([unit.backward_ms - unit.collective_ms[1] for unit in units]),
        gather_ms=gather_ms,
        gather_back_ms=gather_ms * is_back * (not setting.runtime.keeps_weights),
        hops_ms=hops_ms(cluster, state_group(parallel)),
        reduce_ms=reduce_ms,
        hidden=1.0 if hidden is None else hidden,
        sequence=tuple(kinds.index(name) for name in names),
        stages=parallel.pipeline,
    )


def sharded_cost(
    cost: CostModel,
    names: Sequence[str],
    setting: CostSetting,
    *,
    has_one_loss: bool = True,
) -> tuple[CostModel, ShardedExchange]:
    """Return costs with sharded weights and gradients, and the exchange of units `names`.

    Adds two features that are times: exposed exchange in forward and in backward
    (`ShardedExchange.exposed_ms`).

    Args:
        cost: of ranks with replicated weights and an equally sharded optimizer.
        names: sharded unit kinds, in execution order.
        has_one_loss: whether the head's backward begins with its only loss, false with multi-token
            prediction.
    """
    runtime, parallel = setting.runtime, setting.parallel
    others, experts = _sharded_parameters(cost, parallel)
    ranks, copies, expert_ranks = others.group.ranks, others.copies, experts.group.ranks
    in_weights = runtime.scatters_weights_precision
    sent = cost.rates.weight_bytes if in_weights else cost.rates.gradient_bytes
    bytes_per_ms = streamed_bytes_per_ms(setting.cluster, setting.precision)
    shared = with_features(cost, ())
    for part in (others, experts):
        # Complete gradients are zeroed, and their shards accumulated.
        moved = sent + (sent + 2 * cost.rates.gradient_bytes) / part.group.ranks
        for unit, trained in zip(shared.units.values(), part.trained, strict=True):
            unit.backward_ms[0] += moved * trained / bytes_per_ms
    exchange = _count_exchange(shared, names, sent, setting)
    whole = _whole_bytes(shared, exchange.sequence, sent, setting)
    shared = with_features(shared, EXPOSED_MS)
    units, shares = dict[str, UnitCost](), exchange.shares()
    for place, (name, unit) in enumerate(shared.units.items()):
        # Moment 0, without working memory, is forward's, and so is the moment of the only loss.
        backward = 2 if name == HEAD and has_one_loss else 1
        unit.transient_bytes[:backward, 0] += whole[place, 0]
        unit.transient_bytes[backward:, 0] += whole[place, int(unit.has_backward)]
        unit.forward_ms[-2], unit.backward_ms[-1] = shares[:, place]
        unit.collective_ms[[0, 1], [-2, -1]] = shares[:, place]
        units[name] = replace(unit, whole_bytes=float(whole[place, 1]))
    is_hidden = copies.ranks > 1 and others.group.is_within(setting.cluster)
    in_copies = f" in {copies.ranks} copies" if copies.ranks > 1 else ""
    of_experts = f", experts over {expert_ranks}" if cost.of_experts.any() else ""
    shared = replace(
        shared,
        units=units,
        rates=others.shard_rates(cost.rates, setting),
        bucket_parameters=parallel.bucket_parameters if is_hidden else np.inf,
        expert_rates=experts.shard_rates(cost.expert_rates, setting),
        runs_in_lockstep=True,
        weight_parts=ranks,
        source=f"{cost.source}, weights and gradients divided over {ranks} ranks{in_copies}"
        f"{of_experts}",
    )
    return shared, exchange


def _whole_bytes(
    cost: CostModel, sequence: Sequence[int], sent: float, setting: CostSetting
) -> np.ndarray:
    """Return peak bytes of gathered weights and gradients per unit kind and pass, [K, 2].

    The maximum over a kind's positions in the model.

    Args:
        sequence: kind index of every sharded unit, in execution order.
        sent: bytes of a gradient element in the reduce-scatter.
    """
    parallel = setting.parallel
    # In forward the next unit's weights are there too; in backward the previous unit's weights, and
    # the next unit's gradients with their shard. A tied matrix has gradients from the head's
    # backward to the embedding's.
    units, kinds, in_stages = cost.units.values(), cost.kinds, parallel.pipeline > 1
    sharded = [part for part in _sharded_parameters(cost, parallel) if part.group.ranks > 1]
    is_layer, no_unit = np.array([kind.is_layer for kind in kinds]), len(kinds)
    # No embedding's backward reads a weight. The last row, of no unit, is 0.
    reads = [unit.has_backward and not kinds[place].is_embed for place, unit in enumerate(units)]
    weights, read_back, gradients, summed = np.zeros((4, no_unit + 1))
    weights[:-1] = cost.rates.weight_bytes * sum(part.parameters for part in sharded)
    read_back[:-1] = weights[:-1] * reads
    gradients[:-1] = [sent * unit.trained_parameters for unit in units]
    # Gradients of the next unit during the reduction, with their shard.
    shards = sum(part.trained / part.group.ranks for part in sharded)
    summed[:-1] = gradients[:-1] + sent * shards
    tied_bytes = sent * cost.tied_trained_parameters
    summed[-2] -= tied_bytes * (1 + 1 / parallel.sharded)  # the head's
    peaks, around = np.zeros((no_unit, 2)), (no_unit, *sequence, no_unit)
    for before, here, after in set(zip(around[:-2], sequence, around[2:], strict=True)):
        waiting = tied_bytes * (is_layer[here] and kinds[here].tower == LANGUAGE) + summed[after]
        backward = read_back[here] + read_back[before] + gradients[here] + waiting
        passes = [weights[here] + weights[after], backward]
        if setting.runtime.keeps_weights:
            all_weights = weights[list(sequence)].sum()
            passes = [all_weights, all_weights + gradients[here] + waiting]
        # Any layer may be next to a cut, but a layer next to an embedding or head shares its stage.
        ends = [end for end in (before, after) if end < no_unit and not is_layer[end]]
        counts_for = ends if in_stages and is_layer[here] and ends else [here]
        peaks[counts_for] = np.maximum(peaks[counts_for], passes)
    if in_stages:  # a layer between two of its kind
        alone = np.stack([2 * weights, 2 * read_back + gradients + summed], axis=1)[:-1]
        peaks = np.where(is_layer[:, None], np.maximum(peaks, alone), peaks)
    return peaks


def exposed_columns(features: Sequence[str]) -> list[int]:
    """Return the column indices of the two exposed features."""
    return [features.index(name) for name in EXPOSED_MS]
