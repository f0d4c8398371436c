"""Data-parallel encoders of a workload: waits before and after its pipelines, and memory."""

import operator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from omnibal.base.arrays import rows_of
from omnibal.pipeline.prediction import EncoderPhasePrediction


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderMemory:
    """Memory of data-parallel encoders on every device, in bytes."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    kept: float = 0.0  # activations and inputs from the encoders' forward to their backward
    buffers: float = 0.0  # buffers of the communication library
    features: float = 0.0  # of a step, and their gradients, only on devices that embed tokens
    arrival: float = 0.0  # extra max memory as features arrive, only on devices that embed tokens
    encoding: float = 0.0  # extra max while encoding, before pipeline memory or received features
    evaluation: float = 0.0  # max memory of encoding in evaluation
    whole: float = 0.0  # unsharded weights in evaluation, on a device that embeds tokens

    @property
    def resident(self) -> float:
        """Memory held throughout the step, without features."""
        return self.weights + self.gradients + self.optimizer + self.kept + self.buffers

    def is_within(self, other: "EncoderMemory") -> bool:
        """Return whether every pipeline that fits with `other` also fits with this."""
        return all(map(operator.le, self._device_peaks, other._device_peaks))

    @property
    def evaluating(self) -> float:
        """Evaluation memory with token embed, or 0 if weights are never sharded."""
        return self.resident - self.kept + self.whole if self.whole else 0.0

    @property
    def _device_peaks(self) -> tuple[float, ...]:
        """Device memory without a pipeline: in a step, while encoding, on devices embedding tokens,
        and in evaluation."""
        embeds = self.resident + self.features
        in_step = self.resident, embeds, self.resident + self.encoding, embeds + self.arrival
        return (*in_step, self.evaluating, self.evaluating + self.evaluation)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncoderWaits:
    """Times before a pipeline's first forward and after its last backward, in ms.

    All are [rows, 2]: before in the row of the first micro-batch, after in the row of the last,
    else 0.
    """

    all: np.ndarray  # for the busiest rank of the encoding group, with all exchanges
    even: np.ndarray  # with all ranks of the group equally busy
    silent: np.ndarray  # with equally busy ranks, without exchanges
    needed: np.ndarray  # with equally busy ranks, without exchanges and recomputation
    unreduced: np.ndarray  # as `all`, without gradient and weight exchange of all ranks

    def rows(self, picked: np.ndarray | slice) -> Self:
        """Select rows."""
        return rows_of(self, picked)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Encoding:
    """Data-parallel encoders of a workload."""

    waits: EncoderWaits
    encoder_memory: EncoderMemory
    predicted: EncoderPhasePrediction  # mean times over the steps of the run
    exchange_ms: float  # weight and gradient exchange time of encoders in a step

    def rows(self, picked: np.ndarray | slice) -> Self:
        """Select rows; memory and means are unchanged."""
        return replace(self, waits=self.waits.rows(picked))
