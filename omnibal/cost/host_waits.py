"""Waits of a device for its host, which launches a pass's kernels one after another.

A pass of a layer takes at least the host's time to launch it. What a micro-batch waits for is that
time minus the device's, if positive: a feature of the micro-batch, as it is not linear in sizes.
Embeddings, projectors and the head launch little and run behind layers, so theirs is not counted.
"""

import numpy as np

from omnibal.cost.model import CostModel, UnitCost, with_features
from omnibal.model.units import host_features, is_time


def with_host_waits(cost: CostModel) -> CostModel:
    """Return costs with two features for every kind of layer: waits in forward and backward."""
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
    """Features [..., F] with the waits of every micro-batch for the host."""
    features, first = features.copy(), [*map(is_time, cost.features), True].index(True)
    for name, unit in _layers(cost).items():
        passes = zip((unit.forward_ms, unit.backward_ms), unit.host_ms or (0, 0), strict=True)
        for column, (times_ms, host_ms) in zip(host_features(name), passes, strict=True):
            device_ms = features[..., :first] @ times_ms[:first]
            features[..., cost.features.index(column)] = np.maximum(host_ms - device_ms, 0)
    return features


def _layers(cost: CostModel) -> dict[str, UnitCost]:
    """Units of layers that wait, by the name of their kind without deepstack."""
    units = ((kind, cost.units[kind.name]) for kind in cost.kinds if kind.is_layer)
    return {kind.measured_name: unit for kind, unit in units if unit.host_ms}
