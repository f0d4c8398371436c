"""What the costs of a model's units depend on."""

from collections.abc import Collection
from dataclasses import dataclass

from omnibal.model.adapter_settings import AdapterConfig
from omnibal.model.config import ClusterConfig, ModelConfig, Precision
from omnibal.model.parallel import Parallel
from omnibal.model.runtime import OWN_RUNTIME, RuntimeOptions


@dataclass(frozen=True, slots=True, eq=False)
class CostSetting:
    """A model on devices under parallel sizes, and how it is trained."""

    model: ModelConfig
    cluster: ClusterConfig
    parallel: Parallel
    precision: Precision
    frozen: Collection[str] = ()  # names of model parts
    adapters: AdapterConfig | None = None
    runtime: RuntimeOptions = OWN_RUNTIME
