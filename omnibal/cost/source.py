"""Source of a job's costs: counted, or measured on a device."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from omnibal.base.files import write_json_model
from omnibal.cost.analytic import analytic_cost
from omnibal.cost.model import CostModel
from omnibal.cost.profile import Profile, fit_cost, with_measured_rates, write_profile
from omnibal.cost.refitted import Refit
from omnibal.model.adapter_settings import AdapterConfig
from omnibal.model.config import ClusterConfig, ModelConfig, Precision
from omnibal.model.parallel import Parallel
from omnibal.model.runtime import OWN_RUNTIME, RuntimeOptions


@dataclass(frozen=True, slots=True)
class CostSource:
    """Counted costs at the cluster's rates, overridden by a profile's measurements if given."""

    profile: Profile | None = None  # measurements that replace counted costs, or None
    refit: Refit | None = field(default=None, kw_only=True)  # correction by a run, or None

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
        """Return costs of all units at context-parallel size 1, corrected by the refit."""
        sizes = model, self.fill_rates(cluster), parallel, precision, frozen
        if self.profile is None:
            cost = analytic_cost(*sizes, adapters=adapters, runtime=runtime)
        else:
            cost = fit_cost(self.profile, *sizes, adapters=adapters, runtime=runtime)
        return cost if self.refit is None else self.refit.apply(cost, parallel.pipeline)

    @property
    def tensor(self) -> int | None:
        """The only tensor-parallel size with costs, or None for any."""
        return None if self.profile is None else self.profile.tensor

    def fill_rates(self, cluster: ClusterConfig) -> ClusterConfig:
        """Return the cluster with the profile's rates of products and exchange, if any."""
        if self.profile is None or self.profile.rates is None:
            return cluster
        return with_measured_rates(cluster, self.profile)

    def save(self, profile: Path, refit: Path) -> None:
        """Write the profile and the refit, if any, to these files."""
        if self.profile is not None:
            write_profile(self.profile, profile)
        if self.refit is not None:
            write_json_model(self.refit, refit)


ANALYTIC = CostSource()  # source without measurements
