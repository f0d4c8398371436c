"""What data-parallel encoders add to a workload: waits before and after it, and memory."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from omnibal.base.arrays import rows_of
from omnibal.pipeline.prediction import EncoderPhasePrediction


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderMemory:
    """Memory that data-parallel encoders take of every device, in bytes."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    kept: float = 0.0
    """Activations and inputs, from the encoders' forward to their backward."""
    buffers: float = 0.0
    """Buffers of the communication library."""
    features: float = 0.0
    """Features of a step and their gradients, where tokens are embedded alone."""
    arrival: float = 0.0
    """Most that features take besides as they arrive, where tokens are embedded alone."""
    encoding: float = 0.0
    """Most that encoding takes besides what is kept, while nothing of the pipeline and none of its
    features are there."""
    evaluation: float = 0.0
    """Most that encoding held-out data takes."""
    whole: float = 0.0
    """Whole weights, where ranks divide them, of a device that embeds tokens while held-out data is
    evaluated; nothing of a step is there then."""

    @property
    def held(self) -> float:
        """What is there throughout the step, without features."""
        return self.weights + self.gradients + self.optimizer + self.kept + self.buffers

    def is_within(self, other: "EncoderMemory") -> bool:
        """Whether no pipeline that fits beside the other one does not fit beside this."""
        return all(own <= its for own, its in zip(self._least, other._least, strict=True))

    @property
    def evaluating(self) -> float:
        """What is there while held-out data is evaluated, on a device that embeds tokens; 0 where
        weights are whole anyway, and a step takes more."""
        return self.held - self.kept + self.whole if self.whole else 0.0

    @property
    def _least(self) -> tuple[float, ...]:
        """Memory of a device on which nothing of the pipeline is: in a step, while encoders run,
        where tokens are embedded, and in an evaluation."""
        embeds = self.held + self.features
        in_step = self.held, embeds, self.held + self.encoding, embeds + self.arrival
        return (*in_step, self.evaluating, self.evaluating + self.evaluation)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncoderWaits:
    """Times of a pipeline before its first forward and after its last backward, in ms.

    All are [rows, 2] of a workload: before in the row of its first micro-batch, after in that of
    its last one, and 0 elsewhere.
    """

    all: np.ndarray
    """As they are: of the busiest rank of the encoding group, with all that is exchanged."""
    even: np.ndarray
    """Were every rank of the group as busy as its mean one."""
    silent: np.ndarray
    """Waits with ranks that are equally busy, without what is exchanged."""
    needed: np.ndarray
    """Waits with ranks that are equally busy, without exchanges and what runs again."""
    unreduced: np.ndarray
    """As they are, but for the exchange of gradients and weights of all ranks."""

    def rows(self, picked: np.ndarray | slice) -> Self:
        """Waits of some rows."""
        return rows_of(self, picked)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Encoding:
    """Data-parallel encoders of a workload."""

    waits: EncoderWaits
    encoder_memory: EncoderMemory
    predicted: EncoderPhasePrediction
    """Mean times over the steps of the run."""
    exchange_ms: float
    """Time that ranks exchange weights and gradients of encoders in a step."""

    def rows(self, picked: np.ndarray | slice) -> Self:
        """Encoding of some rows; room and means stay those of all."""
        return replace(self, waits=self.waits.rows(picked))
