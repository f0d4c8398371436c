"""Costs where data-parallel ranks divide weights and gradients too, as FSDP and ZeRO-3 do.

A rank keeps its share of every weight, of its gradient and of the optimizer's state: one of
`Parallel.sharded`, neighbours, which with fewer than all ranks are groups that hold copies of each
other (hybrid). A unit's whole weights are gathered before its forward and again before its
backward, and let go after each; its gradients are whole until they are reduce-scattered, after
every micro-batch's backward (Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, section 5; Zhao et
al. 2023, FSDP, arXiv 2304.11277, section 3.2), and summed as shares. The exchange runs beside the
computation of the unit before it, one unit ahead:

    forward  = gather of the first + sum over units of max(forward, gather of the next)
    backward = gather of the last + reduce of the first
               + sum over units of max(backward, gather of the one before + reduce of the one after)

where what runs in the time max(a, b) takes a + b - hidden x min(a, b) if it was measured that less
is hidden (`omnibal.model.rates.Rates.hidden`): on a CPU the cores that compute exchange too. The
head's weights stay from its forward to its backward, which is next, and no backward reads an
embedding's. In a backward, whole gradients are set to zero, and the share that they become is added
to that of the micro-batches before.

Experts are exchanged by themselves, among those ranks of the group, tensor-parallel ones too, that
hold the same (`Parallel.expert_shards`); where a group has all experts once, each of its ranks has
its own whole, with all of their state, and their gradients are still summed of whole ones.

What computation does not hide is a feature of the micro-batch, as it is not linear in its sizes.
Exchanges of tensor-parallel ranks, of tokens that go to their experts, and of ranks that share a
pack hide nothing, as they take the same links, and neither does recomputation, so that the time is
on the safe side. All ranks of a group meet in every exchange: they run their micro-batches in
lockstep. Once a step the copies of a share all-reduce its gradients, behind the last backward where
a group keeps to its node, and after it where gathers take the network too.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from omnibal.cost.analytic import streamed_bytes_per_ms
from omnibal.cost.links import (
    Group,
    expert_shard_copies,
    expert_state_group,
    hidden_share,
    pass_line,
    ring_ms_per_byte,
    shard_copies,
    shard_group,
)
from omnibal.cost.model import CostModel, ParameterRates, UnitCost, with_features
from omnibal.model.config import ClusterConfig, Precision
from omnibal.model.parallel import Parallel
from omnibal.model.rates import RingKind
from omnibal.model.runtime import RuntimeOptions
from omnibal.model.units import EXPOSED_MS, HEAD, LANGUAGE


@dataclass(frozen=True, kw_only=True, slots=True)
class _Alike:
    """Parameters that the same ranks divide: experts, or all others."""

    are_experts: bool
    group: Group
    """Ranks that divide them."""
    copies: Group
    """Ranks that hold the same part."""

    def of(self, unit: UnitCost) -> int:
        """How many a unit has on one device, were they whole."""
        experts = unit.expert_parameters
        return experts if self.are_experts else unit.parameters - experts

    def trained_of(self, unit: UnitCost) -> int:
        """How many of them are trained."""
        return self.of(unit) if unit.trained_parameters else 0

    def divided(
        self, rates: ParameterRates, cluster: ClusterConfig, precision: Precision
    ) -> ParameterRates:
        """Rates of divided parameters. Copies sum their gradients once a step: an all-reduce is two
        passes."""
        ranks = self.group.ranks
        pass_ms = ring_ms_per_byte(cluster, self.copies, precision) * rates.gradient_bytes
        return replace(
            rates,
            weight_bytes=rates.weight_bytes / ranks,
            gradient_bytes=rates.gradient_bytes / ranks,
            gradient_reduction_ms=2 * pass_ms / ranks,
            weight_gather_ms=0.0,
        )


def _alike(parallel: Parallel) -> tuple[_Alike, _Alike]:
    """All parameters but experts', and those of experts."""
    return (
        _Alike(are_experts=False, group=shard_group(parallel), copies=shard_copies(parallel)),
        _Alike(
            are_experts=True,
            group=expert_state_group(parallel),
            copies=expert_shard_copies(parallel),
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShardedExchange:
    """Exchange of weights and gradients, and the computation that it runs beside.

    Kinds of unit are in the order of the costs; K kinds, F features.
    """

    forward_ms: np.ndarray
    """Forward of a unit of every kind without its own exchanges, [K, F]."""
    backward_ms: np.ndarray
    gather_ms: np.ndarray
    """To gather the weights of a unit of every kind, [K]."""
    gather_back_ms: np.ndarray
    """Time to gather the weights again before backward; 0 where that reads none."""
    reduce_ms: np.ndarray
    """To reduce-scatter its gradients; 0 where it is frozen."""
    sequence: tuple[int, ...]
    """Kind of every unit, in model order."""
    hidden: float = 1.0
    """Hidden share of the shorter of an exchange and the computation beside it."""
    stages: int = 1
    """Pipeline stages that the units are of."""

    @classmethod
    def of(
        cls,
        cost: CostModel,
        names: Sequence[str],
        cluster: ClusterConfig,
        parallel: Parallel,
        precision: Precision,
        runtime: RuntimeOptions,
    ) -> "ShardedExchange":
        """Count the exchange of the data-parallel ranks that divide weights."""
        cost = _with_added_sums(cost, cluster, parallel, precision, runtime)
        units = [cost.units[kind.name] for kind in cost.kinds]
        kinds, size = [kind.name for kind in cost.kinds], cost.rates.weight_bytes
        reduced_size = _scattered_bytes(cost, runtime)

        def exchange_ms(
            kind: RingKind, size: float, parameters: Callable[[_Alike, UnitCost], int]
        ) -> np.ndarray:
            # Both kinds of parameters take the same links.
            all_ms = np.zeros(len(units))
            for alike in _alike(parallel):
                line = pass_line(cluster, alike.group, precision, kind)
                bytes_ = size * np.array([parameters(alike, unit) for unit in units], np.float64)
                if (ranks := alike.group.ranks) > 1:
                    ring_ms = line.fixed_ms + line.each_ms * bytes_ * (ranks - 1) / ranks
                    all_ms += np.where(bytes_ > 0, ring_ms, 0.0)
            return all_ms

        gather_ms = exchange_ms("all_gather", size, _Alike.of)
        # Not the head's, which stay from the forward right before it, and not an embedding's, which
        # no backward reads.
        is_back = [
            unit.has_backward and not kind.is_embed and kind.name != HEAD
            for unit, kind in zip(units, cost.kinds, strict=True)
        ]
        return cls(
            forward_ms=np.stack([unit.forward_ms - unit.collective_ms[0] for unit in units]),
            backward_ms=np.stack([unit.backward_ms - unit.collective_ms[1] for unit in units]),
            gather_ms=gather_ms,
            gather_back_ms=gather_ms * is_back,
            reduce_ms=exchange_ms("reduce_scatter", reduced_size, _Alike.trained_of),
            hidden=hidden_share(cluster, precision),
            sequence=tuple(kinds.index(name) for name in names),
            stages=parallel.pipeline,
        )

    def exposed_ms(self, features: np.ndarray) -> np.ndarray:
        """What of the exchange no computation hides, before every micro-batch's forward and after
        its backward, all stages together, [packs, 2].

        A stage gathers its first unit with nothing beside it, and sums that unit's gradients so.
        Stages are taken to begin and end with the layers that take longest to gather.

        Args:
            features: of every micro-batch, [packs, F].
        """
        first, last = self.sequence[0], self.sequence[-1]
        forward, backward = features @ self.forward_ms.T, features @ self.backward_ms.T
        layers = [kind for kind, times in Counter(self.sequence).items() if times > 1]
        layer = max(layers or [first], key=lambda kind: self.gather_ms[kind])
        others = self.stages - 1
        ahead = np.full(len(features), self.gather_ms[first] + others * self.gather_ms[layer])
        for (kind, after), times in Counter(pairwise(self.sequence)).items():
            ahead += times * self._exposed(self.gather_ms[after], forward[:, kind])
        of_layer = self.gather_back_ms[layer] + self.reduce_ms[layer]
        behind = np.full(
            len(features), self.gather_back_ms[last] + self.reduce_ms[first] + others * of_layer
        )
        nothing = len(self.gather_ms)
        gather_ms, reduce_ms = np.append(self.gather_back_ms, 0), np.append(self.reduce_ms, 0)
        around = (nothing, *self.sequence, nothing)
        neighbours = Counter(zip(around[:-2], self.sequence, around[2:], strict=True))
        for (before, kind, after), times in neighbours.items():
            beside = gather_ms[before] + reduce_ms[after]
            behind += times * self._exposed(beside, backward[:, kind])
        return np.stack([ahead, behind], axis=1)

    def shares(self) -> np.ndarray:
        """Share of what is exposed, of a forward and of a backward, that counts for a unit of every
        kind, [2, K]: by what the unit exchanges, so that a pipeline's stages have theirs."""
        exchanged = np.stack([self.gather_ms, self.gather_back_ms + self.reduce_ms])
        sums = exchanged[:, list(self.sequence)].sum(axis=1, keepdims=True)
        return exchanged / np.maximum(sums, 1e-300)

    def _exposed(self, exchange_ms: float, beside_ms: np.ndarray) -> np.ndarray:
        """What of an exchange is not hidden by the computation beside it. [packs]"""
        return np.asarray(exchange_ms - self.hidden * np.minimum(exchange_ms, beside_ms))


def _with_added_sums(
    cost: CostModel,
    cluster: ClusterConfig,
    parallel: Parallel,
    precision: Precision,
    runtime: RuntimeOptions,
) -> CostModel:
    """Costs with what a backward does with gradients besides: whole ones are set to zero before it,
    and the share that they are summed to is added to that of the micro-batches before."""
    sent, summed = _scattered_bytes(cost, runtime), 2 * cost.rates.gradient_bytes
    bytes_per_ms = streamed_bytes_per_ms(cluster, precision)

    def with_sums(unit: UnitCost) -> UnitCost:
        backward_ms = unit.backward_ms.copy()
        for alike in _alike(parallel):
            moved = sent + (sent + summed) / alike.group.ranks
            backward_ms[0] += moved * alike.trained_of(unit) / bytes_per_ms
        return replace(unit, backward_ms=backward_ms)

    return replace(cost, units={name: with_sums(unit) for name, unit in cost.units.items()})


def _scattered_bytes(cost: CostModel, runtime: RuntimeOptions) -> float:
    """Bytes of a gradient as it is reduce-scattered."""
    if runtime.scatters_weights_precision:
        return cost.rates.weight_bytes
    return cost.rates.gradient_bytes


def sharded_cost(
    cost: CostModel,
    names: Sequence[str],
    cluster: ClusterConfig,
    parallel: Parallel,
    precision: Precision,
    runtime: RuntimeOptions,
    *,
    has_one_loss: bool = True,
    shares: np.ndarray | None = None,
) -> CostModel:
    """Costs where data-parallel ranks divide weights and gradients too.

    Two features more are times already: what the exchange of weights and gradients takes before a
    forward and after a backward besides what is hidden (`ShardedExchange.exposed_ms`).

    Args:
        cost: of ranks that hold weights whole, and divide the optimizer's state as these do.
        names: of the kinds of the units that are divided, in the order in which they run.
        has_one_loss: whether the head's backward begins with its one loss; with layers of
            multi-token prediction, it begins with theirs.
        shares: of what is exposed, that units of every kind have in a pipeline
            (`ShardedExchange.shares`); None for all at the head, which has a backward whatever is
            frozen.
    """
    cost = _with_added_sums(cost, cluster, parallel, precision, runtime)
    others, experts = _alike(parallel)
    ranks, copies, expert_ranks = others.group.ranks, others.copies, experts.group.ranks
    sent = _scattered_bytes(cost, runtime)
    whole = _whole_bytes(cost, names, sent, parallel)
    if shares is None:
        shares = np.tile([float(name == HEAD) for name in cost.units], (2, 1))
    units = {
        name: _sharded_unit(
            unit, whole[name], exposed, begins_with_loss=name == HEAD and has_one_loss
        )
        for (name, unit), exposed in zip(cost.units.items(), shares.T, strict=True)
    }
    size = {"weight_bytes": cost.rates.weight_bytes, "gradient_bytes": cost.rates.gradient_bytes}
    of_experts_whole = replace(cost.expert_rates, **size)
    is_hidden = copies.ranks > 1 and others.group.is_within(cluster)
    in_copies = f" in {copies.ranks} copies" if copies.ranks > 1 else ""
    of_experts = f", experts over {expert_ranks}" if cost.of_experts.any() else ""
    return replace(
        cost,
        features=(*cost.features, *EXPOSED_MS),
        units=units,
        rates=others.divided(cost.rates, cluster, precision),
        bucket_parameters=parallel.bucket_parameters if is_hidden else np.inf,
        expert_rates=experts.divided(of_experts_whole, cluster, precision),
        runs_in_lockstep=True,
        weight_parts=ranks,
        source=f"{cost.source}, weights and gradients divided over {ranks} ranks{in_copies}"
        f"{of_experts}",
    )


def _whole_bytes(
    cost: CostModel, names: Sequence[str], sent: float, parallel: Parallel
) -> dict[str, np.ndarray]:
    """Bytes of whole weights and gradients while a unit of each kind runs, in its forward and its
    backward, [2], by its name: the most of all its places in the model.

    In a forward the weights of the next unit are there too; in a backward those of the unit before,
    and the gradients of the unit after until they are divided, with the share that they become. A
    tied matrix has its gradients from the head's backward to the embedding's.

    A stage of a pipeline may have the layers of a tower and not its ends: what a layer has to wait
    for or with beside an end counts for the end then, which works with no less.

    Args:
        sent: bytes of a gradient as it is reduce-scattered.
    """
    units, kinds = cost.units, {kind.name: kind for kind in cost.kinds}
    tied_bytes, in_stages = sent * cost.tied_trained_parameters, parallel.pipeline > 1
    divided = [alike for alike in _alike(parallel) if alike.group.ranks > 1]
    weights = {
        name: cost.rates.weight_bytes * sum(alike.of(unit) for alike in divided)
        for name, unit in units.items()
    }
    # No embedding's backward reads a weight.
    read_back = {
        name: weights[name] * (units[name].has_backward and not kinds[name].is_embed)
        for name in units
    }
    gradients = {name: sent * units[name].trained_parameters for name in units}
    # Whole ones of the unit after, which are being summed, with the share that they become.
    summed = {
        name: gradients[name]
        + sent * sum(alike.trained_of(unit) / alike.group.ranks for alike in divided)
        for name, unit in units.items()
    }
    summed[HEAD] -= tied_bytes * (1 + 1 / parallel.sharded)
    most = {name: np.zeros(2) for name in units}
    for before, name, after in set(zip(("", *names), names, (*names[1:], ""), strict=False)):
        waiting = tied_bytes * (kinds[name].is_layer and kinds[name].tower == LANGUAGE)
        waiting += summed.get(after, 0)
        backward = read_back[name] + read_back.get(before, 0) + gradients[name] + waiting
        here = [weights[name] + weights.get(after, 0), backward]
        counts_for = [name]
        if in_stages and kinds[name].is_layer:
            ends = [each for each in (before, after) if each and not kinds[each].is_layer]
            counts_for = ends or [name]
        for each in counts_for:
            most[each] = np.maximum(most[each], here)
    if in_stages:
        for name in units:
            if kinds[name].is_layer:
                backward = 2 * read_back[name] + gradients[name] + summed[name]
                most[name] = np.maximum(most[name], [2 * weights[name], backward])
    return most


def _sharded_unit(
    unit: UnitCost, whole: np.ndarray, exposed: np.ndarray, *, begins_with_loss: bool
) -> UnitCost:
    """A unit's costs with the two features more, and room for whole weights and gradients.

    Args:
        unit: costs where weights are whole.
        exposed: its share of the exposed exchange of all units, forward and backward.
        begins_with_loss: whether the first moment of its backward is the loss's, before anything
            is gathered for it.
    """
    changed = with_features(unit, len(EXPOSED_MS))
    # The moment without working memory is its forward's, which has less of it than its backward.
    backward = 1 + begins_with_loss if unit.has_backward else None
    changed["transient_bytes"][:backward, 0] += whole[0]
    if backward is not None:
        changed["transient_bytes"][backward:, 0] += whole[1]
    changed["forward_ms"][-2], changed["backward_ms"][-1] = exposed
    changed["collective_ms"][0, -2], changed["collective_ms"][1, -1] = exposed
    return replace(unit, **changed, whole_bytes=float(whole[1]))


def exposed_columns(features: Collection[str]) -> list[int]:
    """Places of the two features among all."""
    names = list(features)
    return [names.index(name) for name in EXPOSED_MS]
