"""Task of a stage search: a model's costs and micro-batches, and the limits of its stages."""

from dataclasses import dataclass

import numpy as np

from omnibal.cost.model import CostModel
from omnibal.model.config import ModelConfig
from omnibal.model.targets import FREE, StageRules
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.pipeline.workload import Workload


@dataclass(frozen=True, slots=True, eq=False)
class SplitTask:
    """A model to split into pipeline stages."""

    cost: CostModel  # of all levels
    model: ModelConfig  # of the pipeline, without data-parallel encoders
    workload: Workload
    stages: int
    memory_cap_bytes: float = np.inf  # per device
    rules: StageRules = FREE  # of the trainer
    schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD
