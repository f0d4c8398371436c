"""Costs and features of several levels, concatenated as one cost model.

A share has its features in its level's block and zeros elsewhere, so times and bytes stay one
product of features and coefficients.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from omnibal.cost.model import CostModel, UnitCost
from omnibal.pipeline.workload import Workload


def side_by_side(costs: Sequence[CostModel]) -> CostModel:
    """Return one cost model of all levels, features concatenated. Once-per-step costs, parameters
    and links are equal at all levels and come from the first."""
    first = costs[0]
    if len(costs) == 1:
        return first
    units = {name: _join_costs([cost.units[name] for cost in costs]) for name in first.units}
    return replace(first, features=first.features * len(costs), units=units)


def features_of(
    workload: Workload, cost: CostModel, *, without_padding: bool = False
) -> np.ndarray:
    """Return each pack's features in its level's block, 0 elsewhere, with or without padding to
    the longest pack. [rows, levels * features]"""
    features = workload.features
    if without_padding and workload.unpadded is not None:
        features = workload.unpadded
    if cost.levels == 1:
        return features
    rows, count = features.shape
    blocks = np.zeros((rows, cost.levels, count))  # zero at other levels than the row's
    blocks[np.arange(rows), workload.level] = features
    return blocks.reshape(rows, -1)


def _join_costs(units: Sequence[UnitCost]) -> UnitCost:
    joined: dict[str, Any] = {}
    for column in fields(UnitCost):
        values = [getattr(unit, column.name) for unit in units]
        if column.name in ("transient_bytes", "two_part_bytes"):  # [moments, features]
            # Moments that a level does not have cost nothing.
            moments = max(map(len, values))
            values = [np.pad(value, ((0, moments - len(value)), (0, 0))) for value in values]
        if isinstance(values[0], np.ndarray):
            joined[column.name] = np.concatenate(values, axis=-1)
    return replace(units[0], **joined)
