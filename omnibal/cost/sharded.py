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

What computation does not hide is a feature of the micro-batch, as it is not linear in its sizes.
Exchanges of tensor-parallel ranks and of ranks that share a pack hide nothing, as they take the
same links, and neither does recomputation, so that the time is on the safe side. All ranks of a
group meet in every exchange: they run their micro-batches in lockstep. Once a step the copies of a
share all-reduce its gradients, behind the last backward where a group keeps to its node, and after
it where gathers take the network too.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from omnibal.cost.links import pass_line, ring_ms_per_byte, shard_copies, shard_group
from omnibal.cost.model import CostModel, UnitCost, with_features
from omnibal.cost.shaped_rates import Line
from omnibal.model.config import ClusterConfig, ModelConfig, Precision
from omnibal.model.parallel import Parallel
from omnibal.model.runtime import RuntimeOptions
from omnibal.model.units import EXPOSED_MS, HEAD, LANGUAGE, unit_names


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
    """Time to gather the weights again before backward; 0 where there is none."""
    reduce_ms: np.ndarray
    """To reduce-scatter its gradients; 0 where it is frozen."""
    sequence: tuple[int, ...]
    """Kind of every unit, in model order."""

    @classmethod
    def of(
        cls,
        cost: CostModel,
        model: ModelConfig,
        cluster: ClusterConfig,
        parallel: Parallel,
        precision: Precision,
        runtime: RuntimeOptions,
    ) -> "ShardedExchange":
        """Count the exchange of the data-parallel ranks that divide weights.

        Args:
            cost: of ranks that hold weights whole.
            parallel: sizes; tensor-parallel ranks gather their parts side by side.
            precision: of weights.
            runtime: which says the precision that gradients are exchanged in.
        """
        line = pass_line(cluster, shard_group(parallel), precision)
        units = [cost.units[kind.name] for kind in cost.kinds]
        names, size = [kind.name for kind in cost.kinds], cost.weight_bytes_per_parameter
        reduced_size = _scattered_bytes(cost, runtime)

        def exchange_ms(parameters: Sequence[int], size: float) -> np.ndarray:
            bytes_ = size * np.array(parameters, np.float64)
            return np.where(bytes_ > 0, _ring_ms(line, bytes_, parallel.sharded), 0.0)

        return cls(
            forward_ms=np.stack([unit.forward_ms - unit.collective_ms[0] for unit in units]),
            backward_ms=np.stack([unit.backward_ms - unit.collective_ms[1] for unit in units]),
            gather_ms=exchange_ms([unit.parameters for unit in units], size),
            gather_back_ms=exchange_ms(
                [unit.parameters * unit.has_backward for unit in units], size
            ),
            reduce_ms=exchange_ms([unit.trained_parameters for unit in units], reduced_size),
            sequence=tuple(names.index(name) for name in unit_names(model)),
        )

    def exposed_ms(self, features: np.ndarray) -> np.ndarray:
        """What of the exchange no computation hides, before every micro-batch's forward and after
        its backward, [packs, 2].

        Args:
            features: of every micro-batch, [packs, F].
        """
        first, last = self.sequence[0], self.sequence[-1]
        forward, backward = features @ self.forward_ms.T, features @ self.backward_ms.T
        ahead = np.full(len(features), self.gather_ms[first])
        for (kind, after), times in Counter(pairwise(self.sequence)).items():
            ahead += times * np.maximum(self.gather_ms[after] - forward[:, kind], 0)
        behind = np.full(len(features), self.gather_back_ms[last] + self.reduce_ms[first])
        nothing = len(self.gather_ms)
        gather_ms, reduce_ms = np.append(self.gather_back_ms, 0), np.append(self.reduce_ms, 0)
        around = (nothing, *self.sequence, nothing)
        neighbours = Counter(zip(around[:-2], self.sequence, around[2:], strict=True))
        for (before, kind, after), times in neighbours.items():
            beside = gather_ms[before] + reduce_ms[after]
            behind += times * np.maximum(beside - backward[:, kind], 0)
        return np.stack([ahead, behind], axis=1)


def _ring_ms(line: Line, bytes_: np.ndarray, ranks: int) -> np.ndarray:
    """Time of a ring all-gather or reduce-scatter of so many bytes."""
    return line.fixed_ms + line.each_ms * bytes_ * (ranks - 1) / ranks if ranks > 1 else 0 * bytes_


def _scattered_bytes(cost: CostModel, runtime: RuntimeOptions) -> float:
    """Bytes of a gradient as it is reduce-scattered."""
    if runtime.scatters_weights_precision:
        return cost.weight_bytes_per_parameter
    return cost.gradient_bytes_per_parameter


def sharded_cost(
    cost: CostModel,
    model: ModelConfig,
    cluster: ClusterConfig,
    parallel: Parallel,
    precision: Precision,
    runtime: RuntimeOptions,
) -> CostModel:
    """Costs where data-parallel ranks divide weights and gradients too.

    Two features more are times already: what the exchange of weights and gradients takes before a
    forward and after a backward besides what is hidden (`ShardedExchange.exposed_ms`).

    Args:
        cost: of the ranks of one group (`Parallel.of_shards`) that hold weights whole and divide
            the optimizer's state.
        parallel: sizes of the job.
    """
    ranks, copies = parallel.sharded, shard_copies(parallel)
    size, gradient_size = cost.weight_bytes_per_parameter, cost.gradient_bytes_per_parameter
    whole = _whole_bytes(cost, model, _scattered_bytes(cost, runtime), ranks)
    # With layers of multi-token prediction, it begins with theirs.
    has_one_loss = not model.language.prediction_layers
    units = {
        name: _sharded_unit(
            unit,
            whole[name],
            is_head=name == HEAD,
            begins_with_loss=name == HEAD and has_one_loss,
        )
        for name, unit in cost.units.items()
    }
    # An all-reduce is two passes.
    reduction_ms = 2 * ring_ms_per_byte(cluster, copies, precision) * gradient_size / ranks
    is_hidden = copies.ranks > 1 and shard_group(parallel).is_within(cluster)
    in_copies = f" in {copies.ranks} copies" if copies.ranks > 1 else ""
    return replace(
        cost,
        features=(*cost.features, *EXPOSED_MS),
        units=units,
        weight_bytes_per_parameter=size / ranks,
        gradient_bytes_per_parameter=gradient_size / ranks,
        gradient_reduction_ms_per_parameter=reduction_ms,
        weight_gather_ms_per_parameter=0.0,
        bucket_parameters=parallel.bucket_parameters if is_hidden else np.inf,
        expert_rates=replace(
            cost.expert_rates, gradient_reduction_ms=reduction_ms, weight_gather_ms=0.0
        ),
        runs_in_lockstep=True,
        weight_parts=ranks,
        source=f"{cost.source}, weights and gradients divided over {ranks} ranks{in_copies}",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _WholeBytes:
    """Bytes of whole weights and gradients while a unit runs."""

    forward: float = 0.0
    backward: float = 0.0

    def at_most(self, other: "_WholeBytes") -> "_WholeBytes":
        """The larger of both, pass by pass."""
        return _WholeBytes(
            forward=max(self.forward, other.forward), backward=max(self.backward, other.backward)
        )


def _whole_bytes(
    cost: CostModel, model: ModelConfig, sent: float, ranks: int
) -> dict[str, _WholeBytes]:
    """Whole weights and gradients while a unit of each kind runs, by its name: the most of all its
    places in the model.

    In a forward the weights of the next unit are there too; in a backward those of the unit before,
    and the gradients of the unit after until they are divided, with the share that they become. A
    tied matrix has its gradients from the head's backward to the embedding's.

    Args:
        cost: of ranks that hold weights whole.
        sent: bytes of a gradient as it is reduce-scattered.
        ranks: that divide them.
    """
    units, names = cost.units, unit_names(model)
    kinds = {kind.name: kind for kind in cost.kinds}
    tied_bytes = sent * cost.tied_trained_parameters
    weights = {name: cost.weight_bytes_per_parameter * units[name].parameters for name in units}
    # No embedding's backward reads a weight.
    read_back = {
        name: weights[name] * (units[name].has_backward and not kinds[name].is_embed)
        for name in units
    }
    gradients = {name: sent * units[name].trained_parameters for name in units}
    divided = gradients | {HEAD: gradients[HEAD] - tied_bytes}
    most = dict.fromkeys(units, _WholeBytes())
    for before, name, after in set(zip(("", *names), names, (*names[1:], ""), strict=False)):
        waiting = tied_bytes * (kinds[name].is_layer and kinds[name].tower == LANGUAGE)
        waiting += divided.get(after, 0) * (1 + 1 / ranks)
        here = _WholeBytes(
            forward=weights[name] + weights.get(after, 0),
            backward=read_back[name] + read_back.get(before, 0) + gradients[name] + waiting,
        )
        most[name] = most[name].at_most(here)
    return most


def _sharded_unit(
    unit: UnitCost, whole: _WholeBytes, *, is_head: bool, begins_with_loss: bool
) -> UnitCost:
    """A unit's costs with the two features more, and room for whole weights and gradients.

    Args:
        unit: costs where weights are whole.
        is_head: whether it is the head, which takes the exposed exchange of all units: it has a
            backward whatever is frozen.
        begins_with_loss: whether the first moment of its backward is the loss's, before anything
            is gathered for it.
    """
    changed = with_features(unit, len(EXPOSED_MS))
    # The moment without working memory is its forward's, which has less of it than its backward.
    backward = 1 + begins_with_loss if unit.has_backward else None
    changed["transient_bytes"][:backward, 0] += whole.forward
    if backward is not None:
        changed["transient_bytes"][backward:, 0] += whole.backward
    if is_head:
        changed["forward_ms"][-2] = changed["backward_ms"][-1] = 1.0
        changed["collective_ms"][0, -2] = changed["collective_ms"][1, -1] = 1.0
    return replace(unit, **changed, whole_bytes=whole.backward)


def exposed_columns(features: Collection[str]) -> list[int]:
    """Places of the two features among all."""
    names = list(features)
    return [names.index(name) for name in EXPOSED_MS]
