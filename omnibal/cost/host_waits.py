"""Waits of a device for its host, which launches a pass's kernels one after another.

A pass of a layer takes at least the host's time to launch it:

    wait = max(launch - compute, 0)

It is a feature of the micro-batch, as it is not linear in sizes. Embeddings, projectors and head
launch few kernels while layers still run, so they do not wait.
"""

import numpy as np

from omnibal.cost.model import CostModel, UnitCost, with_features
from omnibal.model.units import host_features, is_time


def with_host_waits(cost: CostModel) -> CostModel:
    """Return costs with two features per layer kind: waits in forward and in backward."""
    layers = _layers(cost)
    cost = with_features(cost, [name for layer in layers for name in host_features(layer)])
    for kind in cost.kinds:
        if kind.measured_name in layers:
            unit = cost.units[kind.name]
            forward, backward = map(cost.features.index, host_features(kind.measured_name))
            unit.forward_ms[forward] = 1.0
            unit.backward_ms[backward] = unit.recompute_ms[forward] = float(unit.has_backward)
    return cost


def host_waits(cost: CostModel, features: np.ndarray) -> np.ndarray:
    """Return features [..., F] with every micro-batch's waits for the host filled in."""
    # Times come after the features that compute time depends on.
    features, first = features.copy(), [*map(is_time, cost.features), True].index(True)
    for name, unit in _layers(cost).items():
        passes = zip((unit.forward_ms, unit.backward_ms), unit.host_ms or (0, 0), strict=True)
        for column, (times_ms, host_ms) in zip(host_features(name), passes, strict=True):
            device_ms = features[..., :first] @ times_ms[:first]
            features[..., cost.features.index(column)] = np.maximum(host_ms - device_ms, 0)
    return features


def _layers(cost: CostModel) -> dict[str, UnitCost]:
    """Return layers that wait, by their kind's name without deepstack."""
    units = ((kind, cost.units[kind.name]) for kind in cost.kinds if kind.is_layer)
    return {kind.measured_name: unit for kind, unit in units if unit.host_ms}
