"""Where the costs of a job come from: counted, or measured on a device.

`JobSpec` has one source and asks it alone; nothing else tells one kind from another.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from omnibal.base.frozen import Count, Frozen
from omnibal.cost.analytic import analytic_cost
from omnibal.cost.model import CostModel
from omnibal.cost.shaped_rates import Line
from omnibal.model.adapters import AdapterConfig
from omnibal.model.config import ClusterConfig, ModelConfig, Precision
from omnibal.model.levels import Level
from omnibal.model.parallel import Parallel
from omnibal.model.runtime import OWN_RUNTIME, RuntimeOptions
from omnibal.model.units import UnitKind

MOST_MS = 1e12
"""Largest measured time, so that fits stay finite."""


class ReadingMeasurement(Frozen):
    """Processor time that reading samples drawn from the data takes: decoding, tiling, tokenizing
    and handing over; waiting for storage is not in it."""

    samples: Count
    """Samples that were read."""
    item_ms: dict[str, Annotated[float, Field(ge=0, le=MOST_MS)]]
    """Time for each item, by its feature."""
    token_ms: Annotated[float, Field(ge=0, le=MOST_MS)]
    """Time for each token, of text and of items."""
    cores: Count
    """Cores of the machine for processes that read."""
    is_shared: bool
    """Whether the model computes on these cores too."""


class CostSource:
    """Costs as counted: operations and bytes, against the cluster's rates.

    A source that has measured some of them is a subclass, which overrides what it has.
    """

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
        """Costs of all units, of packs that no ranks share."""
        sizes = model, cluster, parallel, precision, frozen
        return analytic_cost(*sizes, adapters=adapters, runtime=runtime)

    @property
    def tensor(self) -> int | None:
        """The one tensor-parallel size that it has costs of; None for any."""
        return None

    @property
    def is_of_one_device(self) -> bool:
        """Whether its costs are of the cluster's devices alone, and of no other preset's."""
        return False

    @property
    def reading(self) -> ReadingMeasurement | None:
        """Time to read the data; None where it was not measured."""
        return None

    @property
    def link(self) -> Line | None:
        """Time of a message and of a byte between devices of a node; None to count it."""
        return None

    def with_rates(self, cluster: ClusterConfig) -> ClusterConfig:
        """The cluster with the rates that exchanges are counted at."""
        return cluster

    def exchange_ms(
        self, model: ModelConfig, unit: UnitKind, level: Level
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Time that sharing packs within a node adds to a layer's forward and backward, both
        [features at levels]; None to count it."""
        return None

    def save(self, profile: Path, refit: Path) -> None:
        """Write what a plan's directory keeps of it; nothing where all is counted."""


ANALYTIC = CostSource()
"""Nothing is measured."""
