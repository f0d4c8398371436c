"""Source of a job's costs: counted, or measured on a device."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from omnibal.base.files import write_json_model
from omnibal.base.frozen import Count, Frozen
from omnibal.cost.analytic import analytic_cost
from omnibal.cost.model import CostModel
from omnibal.cost.refitted import Refit
from omnibal.cost.shaped_rates import Line
from omnibal.model.adapters import AdapterConfig
from omnibal.model.config import ClusterConfig, ModelConfig, Precision
from omnibal.model.levels import Level
from omnibal.model.parallel import Parallel
from omnibal.model.runtime import OWN_RUNTIME, RuntimeOptions
from omnibal.model.units import UnitKind

MOST_MS = 1e12
"""Max measured time, which keeps fits finite."""


class ReadingMeasurement(Frozen):
    """CPU time to decode, tile, tokenize and hand over samples, without waiting for storage."""

    samples: Count
    """Number of samples read."""
    item_ms: dict[str, Annotated[float, Field(ge=0, le=MOST_MS)]]
    """Time per item, by feature."""
    token_ms: Annotated[float, Field(ge=0, le=MOST_MS)]
    """Time per token, including items' tokens."""
    cores: Count
    """CPU cores for reader processes."""
    is_shared: bool
    """Whether the model computes on these cores too."""


@dataclass(frozen=True, slots=True)
class CostSource:
    """Counted operations and bytes at the cluster's rates; measured sources override parts."""

    refit: Refit | None = field(default=None, kw_only=True)
    """Correction by a run, or None."""

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
        """Return costs of all units at context size 1."""
        sizes = model, cluster, parallel, precision, frozen
        cost = self._unit_costs(*sizes, adapters=adapters, runtime=runtime)
        return cost if self.refit is None else self.refit.applied(cost, parallel.pipeline)

    def _unit_costs(self, *sizes: Any, **options: Any) -> CostModel:
        return analytic_cost(*sizes, **options)

    @property
    def tensor(self) -> int | None:
        """The only tensor-parallel size with costs, None for any."""
        return None

    @property
    def is_of_one_device(self) -> bool:
        """Whether costs hold only for the cluster's own devices."""
        return False

    @property
    def reading(self) -> ReadingMeasurement | None:
        """Time to read the data, or None if not measured."""
        return None

    @property
    def link(self) -> Line | None:
        """Latency and time per byte between devices of a node, None to count it."""
        return None

    def with_rates(self, cluster: ClusterConfig) -> ClusterConfig:
        """Return the cluster with the rates for exchange."""
        return cluster

    def exchange_ms(
        self, model: ModelConfig, unit: UnitKind, level: Level
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Extra time of shared packs, two of [features at levels], or None to count it."""
        return None

    def save(self, profile: Path, refit: Path) -> None:
        """Write measurements and the refit to a plan's directory, if any."""
        if self.refit is not None:
            write_json_model(self.refit, refit)


ANALYTIC = CostSource()
"""Source without measurements."""
