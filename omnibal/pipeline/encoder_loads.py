"""Pipelines' waits for the data-parallel encoders of a workload, and the encoders' memory."""

import operator
from dataclasses import dataclass

import numpy as np

from omnibal.pipeline.prediction import EncoderPhasePrediction


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderMemory:
    """Max memory of data-parallel encoders on every device, over all steps, in bytes."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    kept: float = 0.0  # activations and inputs from the encoders' forward to their backward
    buffers: float = 0.0  # buffers of the communication library
    features: float = 0.0  # of a step, and their gradients, only on devices that embed tokens
    arrival: float = 0.0  # added to `features` as they arrive, only on devices that embed tokens
    encoding: float = 0.0  # added to `resident` while encoding, outside the pipeline's passes
    evaluation: float = 0.0  # added to `evaluating` while encoding
    whole: float = 0.0  # unsharded weights in evaluation, on a device that embeds tokens

    @property
    def resident(self) -> float:
        """Memory held while the pipeline runs, without features."""
        return self.weights + self.gradients + self.optimizer + self.kept + self.buffers

    def is_within(self, other: "EncoderMemory") -> bool:
        """Return whether every pipeline that fits with `other` also fits with this."""
        return all(map(operator.le, self._device_peaks, other._device_peaks))

    @property
    def evaluating(self) -> float:
        """State and `whole` in evaluation of a device that embeds tokens; 0 if not sharded."""
        return self.resident - self.kept + self.whole if self.whole else 0.0

    @property
    def _device_peaks(self) -> tuple[float, ...]:
        """Peaks without the pipeline's memory: two of all devices in a step, two of devices
        that embed tokens, two in evaluation."""
        embeds = self.resident + self.features
        in_step = self.resident, embeds, self.resident + self.encoding, embeds + self.arrival
        return (*in_step, self.evaluating, self.evaluating + self.evaluation)


NO_ENCODERS = EncoderMemory()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncoderWaits:
    """Encoder times before a pipeline's first forward and after its last backward, in ms.

    All are [rows, 2], a row per micro-batch: a step's first has the time before, its last the
    time after, else 0.
    """

    all: np.ndarray  # for the busiest rank of the encoding group, with all exchanges
    even: np.ndarray  # with all ranks of the group equally busy
    silent: np.ndarray  # with equally busy ranks, without exchanges
    needed: np.ndarray  # with equally busy ranks, without exchanges or recomputation
    unreduced: np.ndarray  # as `all`, without all ranks' weight gather and gradient reduction


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Encoding:
    """Waits, memory and predicted phases of a workload's data-parallel encoders."""

    waits: EncoderWaits
    encoder_memory: EncoderMemory
    predicted: EncoderPhasePrediction  # mean times over the steps of the run
    exchange_ms: float  # weight and gradient exchange time of encoders in a step
