"""Costs corrected by a run: times of another source, multiplied by factors per unit and feature.

`omnibal.job.refit` fits the factors to a run's log; `refit.json` stores them with the plan.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Self

import numpy as np
from pydantic import Field, NonNegativeInt

from omnibal.base.files import read_json_model
from omnibal.base.frozen import Count, Frozen
from omnibal.cost.model import CostModel, UnitCost

_Factor = Annotated[float, Field(ge=1e-3, le=1e3)]  # measured time over the source's
_Slowness = Annotated[float, Field(ge=1, le=1e3)]  # time of a device over a faster device's


class UnitFactors(Frozen):
    """Factors of a unit kind's times by feature, 1 if absent."""

    forward: dict[str, _Factor] = Field(default_factory=dict)  # and recomputation
    backward: dict[str, _Factor] = Field(default_factory=dict)

    def times(self, more: "UnitFactors") -> "UnitFactors":
        """Return the product with other factors."""
        sides = (self.forward, more.forward), (self.backward, more.backward)
        forward, backward = (
            {name: first.get(name, 1.0) * second.get(name, 1.0) for name in first | second}
            for first, second in sides
        )
        return UnitFactors(forward=forward, backward=backward)

    def scale_unit(self, unit: UnitCost, features: Collection[str]) -> UnitCost:
        """Return the unit with times, except context and host times, multiplied by the factors."""
        forward, backward = (
            np.array([factors.get(name, 1.0) for name in features])
            for factors in (self.forward, self.backward)
        )
        both = np.stack([forward, backward])
        return replace(
            unit,
            forward_ms=unit.forward_ms * forward,
            backward_ms=unit.backward_ms * backward,
            weight_ms=unit.weight_ms * backward,
            recompute_ms=unit.recompute_ms * forward,
            collective_ms=unit.collective_ms * both,
            padding_ms=unit.padding_ms * both,
        )


class Refit(Frozen):
    """Content of `refit.json`."""

    root_sha256: str  # hash of the user's original plan (`omnibal.job.plan.plan_sha256`)
    step: NonNegativeInt  # steps trained before the plan was made
    measured_steps: NonNegativeInt = 0  # steps that the factors were last fitted to, 0 if none
    units: dict[str, UnitFactors] = Field(default_factory=dict)  # factors by unit kind name
    update: _Factor = 1.0  # factor of data-parallel reduction and gather, norm and update
    pipeline: Count = 1  # pipeline stages of the measured run
    slowness: tuple[_Slowness, ...] = ()  # slowdown per model part, as in `CostModel.slowness`
    slow_ranks: tuple[tuple[_Slowness, ...], ...] = ()  # as in `CostModel.slow_ranks`

    def after(self, earlier: Self) -> Self:
        """Return this refit times the earlier refit that it was measured under."""
        none, both = UnitFactors(), earlier.units | self.units
        units = {
            name: earlier.units.get(name, none).times(self.units.get(name, none)) for name in both
        }
        return self.model_copy(update={"units": units, "update": earlier.update * self.update})

    def with_slow_stages(self) -> Self:
        """Return the refit with every stage as slow as on its slowest rank."""
        slowest = np.array(self.slow_ranks).max(axis=0) * (self.slowness or 1.0)
        slowness = tuple((slowest / slowest.min()).tolist())
        return self.model_copy(update={"slowness": slowness, "slow_ranks": ()})

    def apply(self, cost: CostModel, stages: int) -> CostModel:
        """Return costs with corrected unit and update times, slowness if the run had `stages`."""
        none, is_measured = UnitFactors(), stages == self.pipeline
        cost = replace(
            cost,
            units={
                name: self.units.get(name, none).scale_unit(unit, cost.features)
                for name, unit in cost.units.items()
            },
            slowness=self.slowness if is_measured else (),
            slow_ranks=self.slow_ranks if is_measured else (),
        )
        if not self.measured_steps:
            return cost
        return replace(
            cost,
            optimizer_ms_fixed=cost.optimizer_ms_fixed * self.update,
            rates=cost.rates.scale_times(update=self.update, exchange=self.update),
            expert_rates=cost.expert_rates.scale_times(update=self.update, exchange=self.update),
            source=f"{cost.source}, refitted on {self.measured_steps} steps of a run",
        )


def read_refit(path: Path) -> Refit:
    """Read `refit.json`."""
    return read_json_model(Refit, path, "make the plan again with `omnibal replan`")
