"""A measured profile of a model with known true cost."""

from dataclasses import replace

import numpy as np
from cost_cases import analytic_cost

from omnibal.cost.model import CostModel
from omnibal.cost.profile import (
    LinkMeasurement,
    OptimizerMeasurement,
    Profile,
    UnitMeasurement,
    model_sha256,
)
from omnibal.model.config import load_cluster, load_model
from omnibal.model.parallel import Parallel

MODEL = load_model("internvl-digits")
CLUSTER = load_cluster("laptop-cpu")
PARALLEL = Parallel(pipeline=2)
SHAPES = [
    *((0, 30, 500, 20), (1, 64, 2000, 10), (3, 128, 9000, 100)),
    *((5, 256, 20000, 40), (7, 512, 90000, 300)),
]
"""Tiles, tokens, squared tokens, loss tokens."""


def true_cost() -> CostModel:
    """Return analytic costs plus overheads and 10 % more activation memory."""
    cost = analytic_cost(MODEL, CLUSTER, PARALLEL, "fp32")
    overhead_ms = np.array([0.05, 0, 0, 0, 0])
    units = {
        unit: replace(
            known,
            forward_ms=3 * known.forward_ms + overhead_ms,
            backward_ms=5 * known.backward_ms + 2 * overhead_ms,
            recompute_ms=2 * known.forward_ms + overhead_ms / 2,
            activation_bytes=1.1 * known.activation_bytes,
        )
        for unit, known in cost.units.items()
    }
    return replace(cost, units=units)


def measurements_of(cost: CostModel, noise: float = 0.0) -> tuple[UnitMeasurement, ...]:
    rng = np.random.default_rng(0)
    measurements = []
    for unit, known in cost.units.items():
        for shape in SHAPES:
            tiles, tokens, squared_tokens, loss_tokens = shape
            features, factor = np.array([1, *shape]), rng.uniform(1 - noise, 1 + noise, 3)
            measurement = UnitMeasurement(
                unit=unit,
                tiles=tiles,
                tokens=tokens,
                squared_tokens=squared_tokens,
                loss_tokens=loss_tokens,
                forward_ms=features @ known.forward_ms * factor[0],
                backward_ms=features @ known.backward_ms * factor[1],
                recompute_ms=features @ known.recompute_ms * factor[2],
                activation_bytes=round(features @ known.activation_bytes),
            )
            measurements.append(measurement)
    return tuple(measurements)


def measure(noise: float = 0.0, **changed: object) -> Profile:
    """Return the true cost's profile. Each time is off by at most a fraction `noise`."""
    profile = Profile(
        device="test CPU",
        precision="fp32",
        model=MODEL.name,
        model_sha256=model_sha256(MODEL),
        tensor=1,
        processes=2,
        measurements=measurements_of(true_cost(), noise),
        optimizer=tuple(
            OptimizerMeasurement(parameters=n, optimizer_ms=0.2 + 1e-5 * n)
            for n in (1000, 50_000, 400_000)
        ),
        links=tuple(LinkMeasurement(bytes=n, ms=0.03 + 2e-6 * n) for n in (0, 10_000, 1_000_000)),
    )
    return profile.model_copy(update=changed)
