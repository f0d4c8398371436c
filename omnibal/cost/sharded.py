"""Costs where data-parallel ranks divide weights and gradients too, as FSDP and ZeRO-3 do.

A rank keeps its share of every weight, of its gradient and of the optimizer's state. A unit's whole
weights are gathered before its forward and again before its backward, and let go after each; its
gradients are whole until they are reduce-scattered, after every micro-batch's backward (Rajbhandari
et al. 2020, ZeRO, arXiv 1910.02054, section 5; Zhao et al. 2023, FSDP, arXiv 2304.11277, section
3.2). The exchange runs beside the computation of the unit before it, one unit ahead:

    forward  = gather of the first + sum over units of max(forward, gather of the next)
    backward = gather of the last + reduce of the first
               + sum over units of max(backward, gather of the one before + reduce of the one after)

What computation does not hide is a feature of the micro-batch, as it is not linear in its sizes.
Recomputation is taken to hide nothing, so that the time is on the safe side where layers recompute;
so is the memory, as the largest unit is taken for the one gathered ahead. All ranks meet in every
exchange: they run their micro-batches in lockstep.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from omnibal.base.errors import UserError
from omnibal.cost.links import Group, pass_line
from omnibal.cost.model import CostModel, ParameterRates, UnitCost, with_features
from omnibal.cost.shaped_rates import Line
from omnibal.model.config import ClusterConfig, ModelConfig, Precision
from omnibal.model.parallel import Parallel
from omnibal.model.units import EXPOSED_MS, HEAD, unit_names

_GATHERED = 2
"""Units whose whole weights are there at a time: the one that computes, and the next one."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShardedExchange:
    """Exchange of weights and gradients, and the computation that it runs beside.

    Kinds of unit are in the order of the costs; K kinds, F features.
    """

    forward_ms: np.ndarray
    """Forward of a unit of every kind, [K, F]."""
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
        ranks: int,
        precision: Precision,
    ) -> "ShardedExchange":
        """Count the exchange of `ranks` data-parallel ranks.

        Args:
            cost: of ranks that hold weights whole.
            precision: of weights, in which gradients are exchanged too.
        """
        line = pass_line(cluster, Group(ranks), precision)
        units = [cost.units[kind.name] for kind in cost.kinds]
        names = [kind.name for kind in cost.kinds]
        size = cost.weight_bytes_per_parameter

        def exchange_ms(parameters: Sequence[int]) -> np.ndarray:
            bytes_ = size * np.array(parameters, np.float64)
            return np.where(bytes_ > 0, _ring_ms(line, bytes_, ranks), 0.0)

        return cls(
            forward_ms=np.stack([unit.forward_ms for unit in units]),
            backward_ms=np.stack([unit.backward_ms for unit in units]),
            gather_ms=exchange_ms([unit.parameters for unit in units]),
            gather_back_ms=exchange_ms([unit.parameters * unit.has_backward for unit in units]),
            reduce_ms=exchange_ms([unit.trained_parameters for unit in units]),
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


def check_sharded(parallel: Parallel) -> None:
    """Refuse parallel sizes that do not go with weights divided over data-parallel ranks.

    Raises:
        UserError: there are several stages, tensor- or expert-parallel ranks.
    """
    others = {"--pp": parallel.pipeline, "--tp": parallel.tensor, "--ep": parallel.expert}
    given = [f"{option} {size}" for option, size in others.items() if size > 1]
    if given:
        raise UserError(
            f"{', '.join(given)} was given, and the trainer divides weights over data-parallel "
            "ranks, which is planned for whole models alone: leave it out"
        )


def sharded_cost(cost: CostModel, ranks: int) -> CostModel:
    """Costs where `ranks` data-parallel ranks divide weights and gradients too.

    Two features more are times already: what the exchange of weights and gradients takes before a
    forward and after a backward besides what is hidden (`ShardedExchange.exposed_ms`).

    Args:
        cost: of ranks that hold weights whole and divide the optimizer's state.
    """
    most = max(unit.parameters for unit in cost.units.values())
    size = cost.weight_bytes_per_parameter
    units = {
        name: _sharded_unit(unit, size, most, is_head=name == HEAD)
        for name, unit in cost.units.items()
    }
    experts = cost.expert_rates
    return replace(
        cost,
        features=(*cost.features, *EXPOSED_MS),
        units=units,
        weight_bytes_per_parameter=size / ranks,
        gradient_bytes_per_parameter=cost.gradient_bytes_per_parameter / ranks,
        gradient_reduction_ms_per_parameter=0.0,
        weight_gather_ms_per_parameter=0.0,
        bucket_parameters=np.inf,
        expert_rates=ParameterRates(
            optimizer_bytes=experts.optimizer_bytes,
            optimizer_ms=experts.optimizer_ms,
            gradient_reduction_ms=0.0,
            weight_gather_ms=0.0,
        ),
        runs_in_lockstep=True,
        source=f"{cost.source}, weights and gradients divided over {ranks} ranks",
    )


def _sharded_unit(unit: UnitCost, size: float, most: int, *, is_head: bool) -> UnitCost:
    """A unit's costs with the two features more, and room for whole weights and gradients.

    Args:
        unit: costs where weights are whole.
        size: bytes of a weight, and of a gradient until it is divided.
        most: parameters of the largest unit, the next one at worst.
        is_head: whether it is the head, which takes the exposed exchange of all units: it has a
            backward whatever is frozen.
    """
    changed = with_features(unit, len(EXPOSED_MS))
    gathered = size * (unit.parameters + (_GATHERED - 1) * most)
    changed["transient_bytes"][:, 0] += gathered + size * unit.trained_parameters
    if not unit.has_backward:
        changed["passing_bytes"][0] += gathered
    if is_head:
        changed["forward_ms"][-2] = changed["backward_ms"][-1] = 1.0
        changed["collective_ms"][0, -2] = changed["collective_ms"][1, -1] = 1.0
    return replace(unit, **changed)


def exposed_columns(features: Collection[str]) -> list[int]:
    """Places of the two features among all."""
    names = list(features)
    return [names.index(name) for name in EXPOSED_MS]
