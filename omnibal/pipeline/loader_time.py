"""Processor time of data loading during training, and its effect on step time.

Loaders yield to compute (`megatron.vlm.inputs.read_ahead`), so reading prolongs a step only if a
node's cores have too little time left.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from omnibal.cost.model import CostModel
from omnibal.cost.profile import ReadingMeasurement
from omnibal.model.config import ModelConfig
from omnibal.model.units import HEAD
from omnibal.pipeline.prediction import Prediction, ReadingPrediction
from omnibal.pipeline.simulate import StepTimes
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.workload import Workload

_NOTED_SHARE = 0.01  # share of a step spent waiting for data that deserves a note


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageReading:
    """Processor time to read a rank's micro-batches, by pipeline stage."""

    ms: np.ndarray  # per unit of each feature, [features, stages]
    cores_per_rank: float
    is_shared: bool  # whether ranks compute on these cores too

    @classmethod
    def build(
        cls,
        measured: ReadingMeasurement,
        model: ModelConfig,
        stages: Sequence[Stage],
        features: Sequence[str],
        *,
        has_data_parallel_encoders: bool,
        ranks: int,
    ) -> Self:
        """Return read times of stages, on CPUs such as the measured ones.

        A stage reads an encoder's items if it holds the encoder's embedding, and text if it has the
        token embedding or the head.

        Args:
            features: feature names, including "tokens".
            has_data_parallel_encoders: whether all stages read, each an equal part of the items.
            ranks: ranks of a node, which share its cores equally.
        """
        ms = np.zeros((len(features), len(stages)))
        reads_text = [stage.holds("language embed") or stage.holds(HEAD) for stage in stages]
        ms[list(features).index("tokens")] = measured.token_ms * np.array(reads_text)
        for name, tower in model.encoders.items():
            readers = [
                has_data_parallel_encoders or stage.holds(f"{name} embed") for stage in stages
            ]
            reader_ms = measured.item_ms.get(tower.feature, 0.0) / sum(readers)
            ms[list(features).index(tower.feature)] = reader_ms * np.array(readers)
        return cls(ms=ms, cores_per_rank=measured.cores / ranks, is_shared=measured.is_shared)

    def add_to(
        self, workload: Workload, cost: CostModel, simulated: StepTimes
    ) -> tuple[ReadingPrediction, StepTimes]:
        """Return mean read times, and `simulated` with steps no shorter than the cores need."""
        steps, index = np.unique(workload.step, return_inverse=True)
        row_ms = workload.features_of(cost) @ np.tile(self.ms, (cost.levels, 1))
        read_ms = np.zeros((len(steps), self.ms.shape[1]))
        np.add.at(read_ms, index, row_ms / workload.data_parallel_size)
        taken_ms = read_ms + (simulated.busy_ms if self.is_shared else 0.0)
        cores_ms = taken_ms.mean(axis=1) / self.cores_per_rank
        prediction = ReadingPrediction(
            stage_ms=tuple(read_ms.mean(axis=0).tolist()), cores_ms=float(cores_ms.mean())
        )
        return prediction, replace(simulated, step_ms=np.maximum(simulated.step_ms, cores_ms))


def slow_reading(prediction: Prediction) -> str | None:
    """Return a note if reading prolongs the step, as cores are too few, else None."""
    reading, step_ms = prediction.reading, prediction.step_ms
    if reading is None or prediction.lost.reading_ms <= _NOTED_SHARE * step_ms:
        return None
    trained_ms = step_ms - prediction.lost.reading_ms
    return (
        f"data cannot be read as fast as it is trained: a step takes {step_ms:,.0f} ms where "
        f"{trained_ms:,.0f} ms would do, as its stages read for {sum(reading.stage_ms):,.0f} ms of "
        "processor time and a node's cores are full; give the job more cores, or store images and "
        "recordings that are faster to decode, such as at the size that the model takes"
    )


def too_few_loaders(prediction: Prediction, num_workers: int) -> str | None:
    """Return a note if a stage's rank reads longer than its loaders have in a step, else None.

    With `num_workers` 0 a thread of the rank reads, which holds the interpreter: only time that the
    rank waits for other ranks is free for it.
    """
    reading = prediction.reading
    if reading is None:
        return None
    stage = int(np.argmax(reading.stage_ms))
    read_ms, step_ms = reading.stage_ms[stage], prediction.step_ms
    free_ms = num_workers * step_ms or prediction.stages[stage].wait_fraction * step_ms
    if read_ms <= free_ms + _NOTED_SHARE * step_ms:
        return None
    readers = f"--num-workers {num_workers} has" if num_workers else "its own thread has"
    return (
        f"training will wait for data: a rank of stage {stage} reads for {read_ms:,.0f} ms in a "
        f"step, and {readers} {free_ms:,.0f} ms of one for that; give --num-workers "
        f"{math.ceil(read_ms / step_ms)} or more"
    )
