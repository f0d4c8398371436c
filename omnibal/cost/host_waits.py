"""Waits of a device for its host, which launches a pass's kernels one after another.

A layer's pass takes at least the host's time to launch its kernels, in ms:

    wait = max(launch - compute, 0)

Costs are linear in features, so a wait is a feature itself. Embeddings, projectors and head have
few kernels, launched while layers still run, so they do not wait.
"""

import numpy as np

from omnibal.cost.model import CostModel, UnitCost, with_features
from omnibal.model.units import host_features, is_time


def with_host_waits(cost: CostModel) -> CostModel:
    """Return costs with two more features per waiting layer kind: ms in forward, in backward."""
    layers = _find_waiting_units(cost)
    cost = with_features(cost, [name for layer in layers for name in host_features(layer)])
    for kind in cost.kinds:
        if kind.measured_name in layers:
            unit = cost.units[kind.name]
            forward, backward = map(cost.features.index, host_features(kind.measured_name))
            unit.forward_ms[forward] = 1.0
            unit.backward_ms[backward] = unit.recompute_ms[forward] = float(unit.has_backward)
    return cost


def host_waits(cost: CostModel, features: np.ndarray) -> np.ndarray:
    """Return a copy of features [..., F] with the columns of host waits computed."""
    # Device time depends on the features before the times, which are waits.
    features, first = features.copy(), [*map(is_time, cost.features), True].index(True)
    for name, unit in _find_waiting_units(cost).items():
        passes = zip((unit.forward_ms, unit.backward_ms), unit.host_ms or (0, 0), strict=True)
        for column, (times_ms, host_ms) in zip(host_features(name), passes, strict=True):
            device_ms = features[..., :first] @ times_ms[:first]
            features[..., cost.features.index(column)] = np.maximum(host_ms - device_ms, 0)
    return features


def _find_waiting_units(cost: CostModel) -> dict[str, UnitCost]:
    """Return units of layers with a measured launch time, by `measured_name`."""
    units = ((kind, cost.units[kind.name]) for kind in cost.kinds if kind.is_layer)
    return {kind.measured_name: unit for kind, unit in units if unit.host_ms}
