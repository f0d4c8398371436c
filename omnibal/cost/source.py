"""Source of a job's costs: counted, or measured on a device."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from omnibal.base.files import write_json_model
from omnibal.cost.analytic import analytic_cost
from omnibal.cost.model import CostModel
from omnibal.cost.profile import Profile, fit_cost, with_measured_rates
from omnibal.cost.refitted import Refit
from omnibal.cost.setting import CostSetting


@dataclass(frozen=True, slots=True)
class CostSource:
    """Counted costs at the cluster's rates, overridden by a profile's measurements if given."""

    profile: Profile | None = None  # measurements that replace counted costs, or None
    refit: Refit | None = field(default=None, kw_only=True)  # correction by a run, or None

    def costs(self, setting: CostSetting) -> CostModel:
        """Return costs of all units at context-parallel size 1, corrected by the refit."""
        setting, profile = self.with_rates(setting), self.profile
        cost = analytic_cost(setting) if profile is None else fit_cost(profile, setting)
        return cost if self.refit is None else self.refit.apply(cost, setting.parallel.pipeline)

    @property
    def tensor(self) -> int | None:
        """The only tensor-parallel size with costs, or None for any."""
        return None if self.profile is None else self.profile.tensor

    def with_rates(self, setting: CostSetting) -> CostSetting:
        """Return the setting with the profile's rates of products and exchange, if any."""
        if self.profile is None:
            return setting
        return replace(setting, cluster=with_measured_rates(setting.cluster, self.profile))

    def save(self, profile: Path, refit: Path) -> None:
        """Write the profile and the refit, if any, to these files."""
        if self.profile is not None:
            write_json_model(self.profile, profile)
        if self.refit is not None:
            write_json_model(self.refit, refit)


ANALYTIC = CostSource()  # source without measurements
