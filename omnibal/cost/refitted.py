"""Costs as a run has shown them: another source's, times factors by unit, pass and feature.

`omnibal.job.refit` fits the factors on the log of a run; `refit.json` keeps them beside the plan.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Self

import numpy as np
from pydantic import Field, NonNegativeInt

from omnibal.base.files import read_json_model, write_json_model
from omnibal.base.frozen import Count, Frozen
from omnibal.cost.model import CostModel, UnitCost
from omnibal.cost.shaped_rates import Line
from omnibal.cost.source import CostSource, ReadingMeasurement
from omnibal.model.adapters import AdapterConfig
from omnibal.model.config import ClusterConfig, ModelConfig, Precision
from omnibal.model.levels import Level
from omnibal.model.parallel import Parallel
from omnibal.model.runtime import OWN_RUNTIME, RuntimeOptions
from omnibal.model.units import UnitKind

_Factor = Annotated[float, Field(ge=1e-3, le=1e3)]
"""Measured time over that of the source."""
_Slowness = Annotated[float, Field(ge=1, le=1e3)]
"""Time of a device over that of a faster one."""


class UnitFactors(Frozen):
    """Factors of a kind of unit by the feature that a time is of."""

    forward: dict[str, _Factor] = Field(default_factory=dict)
    """Factors of forwards, and of what is recomputed."""
    backward: dict[str, _Factor] = Field(default_factory=dict)

    def times(self, more: "UnitFactors") -> "UnitFactors":
        """The factors with others on top of them."""
        return UnitFactors(
            forward=_product(self.forward, more.forward),
            backward=_product(self.backward, more.backward),
        )

    def applied(self, unit: UnitCost, features: Collection[str]) -> UnitCost:
        """The costs of a unit at so many times its times."""
        forward, backward = (
            np.array([of.get(name, 1.0) for name in features])
            for of in (self.forward, self.backward)
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


def _product(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    names = dict.fromkeys([*one, *other])
    return {name: one.get(name, 1.0) * other.get(name, 1.0) for name in names}


class Refit(Frozen):
    """Content of `refit.json`."""

    root_sha256: str
    """Hash of the plan that a user made (`omnibal.job.plan.plan_sha256`), of which this one was
    made, be it by way of others."""
    step: NonNegativeInt
    """Steps of the run that were trained before the plan was made."""
    measured_steps: NonNegativeInt = 0
    """Steps whose passes the factors were fitted on last; 0 where none was measured."""
    units: dict[str, UnitFactors] = Field(default_factory=dict)
    """Factors of the kinds of units, by their names."""
    update: _Factor = 1.0
    """Factor of what happens once a step: reduction and gather among data-parallel ranks, norm and
    update."""
    pipeline: Count = 1
    """Stages of the pipeline that was measured."""
    slowness: tuple[_Slowness, ...] = ()
    """Slowness of every part of the model's devices, as `CostModel.slowness` has it."""
    slow_ranks: tuple[tuple[_Slowness, ...], ...] = ()
    """Slowness of data-parallel ranks, as `CostModel.slow_ranks` has it."""

    def after(self, earlier: Self) -> Self:
        """The refit of costs that an earlier one had changed, as one of the first costs."""
        names = dict.fromkeys([*earlier.units, *self.units])
        none = UnitFactors()
        return self.model_copy(
            update={
                "units": {
                    name: earlier.units.get(name, none).times(self.units.get(name, none))
                    for name in names
                },
                "update": earlier.update * self.update,
            }
        )

    def with_slow_stages(self) -> Self:
        """The refit by which a stage is as slow on all ranks as on its slowest one."""
        slowest = np.array(self.slow_ranks).max(axis=0) * (self.slowness or 1.0)
        slowness = tuple((slowest / slowest.min()).tolist())
        return self.model_copy(update={"slowness": slowness, "slow_ranks": ()})


def read_refit(path: Path) -> Refit:
    """Read `refit.json`."""
    return read_json_model(Refit, path, "make the plan anew with `omnibal replan`")


@dataclass(frozen=True, slots=True)
class Refitted(CostSource):
    """Costs of a source, changed by what a run has measured."""

    source: CostSource
    refit: Refit

    def costs(
        self,
        model: ModelConfig,
        cluster: ClusterConfig,
        parallel: Parallel,
        precision: Precision,
        frozen: Collection[str] = (),
        *,
        adapters: AdapterConfig | None = None,
        runtime: RuntimeOptions = OWN_RUNTIME,
    ) -> CostModel:
        """Costs of all units; memory, messages between stages and exchanges of ranks that share
        packs stay the source's."""
        refit, sizes = self.refit, (model, cluster, parallel, precision, frozen)
        cost = self.source.costs(*sizes, adapters=adapters, runtime=runtime)
        none, is_measured = UnitFactors(), parallel.pipeline == refit.pipeline
        cost = replace(
            cost,
            units={
                name: refit.units.get(name, none).applied(unit, cost.features)
                for name, unit in cost.units.items()
            },
            slowness=refit.slowness if is_measured else (),
            slow_ranks=refit.slow_ranks if is_measured else (),
        )
        if not refit.measured_steps:
            return cost
        source = f"{cost.source}, refitted on {refit.measured_steps} steps of a run"
        factor = refit.update
        return replace(
            cost,
            optimizer_ms_fixed=cost.optimizer_ms_fixed * factor,
            rates=cost.rates.slowed(update=factor, exchange=factor),
            expert_rates=cost.expert_rates.slowed(update=factor, exchange=factor),
            source=source,
        )

    @property
    def tensor(self) -> int | None:
        return self.source.tensor

    @property
    def is_of_one_device(self) -> bool:
        return self.source.is_of_one_device

    @property
    def reading(self) -> ReadingMeasurement | None:
        return self.source.reading

    @property
    def link(self) -> Line | None:
        return self.source.link

    def with_rates(self, cluster: ClusterConfig) -> ClusterConfig:
        return self.source.with_rates(cluster)

    def exchange_ms(
        self, model: ModelConfig, unit: UnitKind, level: Level
    ) -> tuple[np.ndarray, np.ndarray] | None:
        return self.source.exchange_ms(model, unit, level)

    def save(self, profile: Path, refit: Path) -> None:
        self.source.save(profile, refit)
        write_json_model(self.refit, refit)
