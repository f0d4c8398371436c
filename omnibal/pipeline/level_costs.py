"""Costs and features of several levels side by side, as those of one cost model.

A share has its features in the block of its own level, and 0 in the others'. Times and bytes stay
one product of features and coefficients, so that whatever sums units over stages or micro-batches
in flight is told nothing of levels.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from omnibal.cost.model import CostModel, UnitCost
from omnibal.pipeline.workload import Workload


def side_by_side(costs: Sequence[CostModel]) -> CostModel:
    """One cost model of all levels: the features of the first level, then those of the next.

    What happens once a step, parameters and links are the same at every level: they are the
    first's.
    """
    first = costs[0]
    if len(costs) == 1:
        return first
    units = {name: _joined([cost.units[name] for cost in costs]) for name in first.units}
    return replace(first, features=first.features * len(costs), units=units)


def features_of(workload: Workload, cost: CostModel) -> np.ndarray:
    """Features of a workload in the blocks of their levels, as `cost` has them.
    [rows, levels * features]"""
    if cost.levels == 1:
        return workload.features
    rows, count = workload.features.shape
    blocks = np.zeros((rows, cost.levels, count))
    blocks[np.arange(rows), workload.level] = workload.features
    return blocks.reshape(rows, -1)


def _joined(units: Sequence[UnitCost]) -> UnitCost:
    moments = max(len(unit.transient_bytes) for unit in units)
    return UnitCost(
        forward_ms=np.concatenate([unit.forward_ms for unit in units]),
        backward_ms=np.concatenate([unit.backward_ms for unit in units]),
        recompute_ms=np.concatenate([unit.recompute_ms for unit in units]),
        collective_ms=np.concatenate([unit.collective_ms for unit in units], axis=1),
        padding_ms=np.concatenate([unit.padding_ms for unit in units], axis=1),
        activation_bytes=np.concatenate([unit.activation_bytes for unit in units]),
        boundary_bytes=np.concatenate([unit.boundary_bytes for unit in units]),
        output_bytes=np.concatenate([unit.output_bytes for unit in units]),
        output_gradient_bytes=np.concatenate([unit.output_gradient_bytes for unit in units]),
        transient_bytes=np.concatenate(
            [_of_moments(unit.transient_bytes, moments) for unit in units], axis=1
        ),
        parameters=units[0].parameters,
        trained_parameters=units[0].trained_parameters,
    )


def _of_moments(transient_bytes: np.ndarray, moments: int) -> np.ndarray:
    """With moments of no working memory added. [moments, features]"""
    return np.pad(transient_bytes, ((0, moments - len(transient_bytes)), (0, 0)))
