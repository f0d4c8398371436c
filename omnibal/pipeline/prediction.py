"""Types of a plan's prediction: times, stage memory, lost time."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeFloat

from omnibal.base.frozen import Frozen, written_unless


class StageMemory(Frozen):
    """Predicted memory of one device of the stage, at the moment of its peak."""

    weights_gib: NonNegativeFloat
    gradients_gib: NonNegativeFloat
    optimizer_gib: NonNegativeFloat
    activations_gib: NonNegativeFloat  # activations of all micro-batches in flight
    transient_gib: NonNegativeFloat
    """Working memory at the peak beyond the max activations, and library buffers."""

    @property
    def state_gib(self) -> float:
        return self.weights_gib + self.gradients_gib + self.optimizer_gib

    @property
    def passes_gib(self) -> float:
        """Activations and working memory, in GiB."""
        return self.activations_gib + self.transient_gib

    @property
    def peak_gib(self) -> float:
        """Peak memory of the device, in GiB."""
        return self.state_gib + self.passes_gib


_IN_WORDS = {"expert_wait_ms": "wait in lockstep"}
"""Display names that differ: ranks that shard weights also wait without experts."""


class LostTime(Frozen):
    """Breakdown of a mean step's time, in ms; entries sum to the step. Each is the simulated time
    saved by removing one more cause, in this order, but expert wait before rank imbalance."""

    reading_ms: float = written_unless(0.0)
    """Waiting for data that the machine's cores cannot read in time."""
    rank_imbalance_ms: float
    """Waiting for the slowest data-parallel rank, at the end or in a shared pack."""
    expert_wait_ms: float = written_unless(0.0)
    """Lockstep waits of ranks that shard experts or weights, and their empty micro-batches."""
    context_exchange_ms: float = written_unless(0.0)
    """Context-parallel exchange, for attention and encoder features."""
    communication_ms: float
    """Exposed P2P sends and data-parallel exchange, and tensor-parallel collectives."""
    weight_update_ms: float
    recompute_ms: float
    padding_ms: float
    """Compute on padding: heads to a multiple of TP, and tokens to the longest pack."""
    stage_imbalance_ms: float
    """Unequal stages, or 0 if equal stages would be no faster, as with few micro-batches."""
    bubble_ms: float  # pipeline fill and drain, and unequal micro-batches
    ideal_ms: float  # needed work, spread evenly over all devices without waiting

    def causes(self) -> dict[str, float]:
        """Return ms by display name from the ideal time up, without absent causes."""
        entries = reversed(list(self.model_dump().items()))
        return {
            _IN_WORDS.get(name, name.removesuffix("_ms").replace("_", " ")): ms
            for name, ms in entries
        }


class DataParallelExchange(Frozen):
    """Gradient reduction and weight all-gather, of data-parallel encoders too, in a mean step."""

    total_ms: NonNegativeFloat  # without overlap: the slowest stage's, plus the encoders'
    exposed_ms: float  # exposed time in the step


class StagePrediction(Frozen):
    """Times per micro-batch, mean over packs and summed over the stage's chunks, and memory."""

    forward_ms: NonNegativeFloat
    backward_ms: NonNegativeFloat  # backward time including recomputation
    wait_fraction: Annotated[float, Field(ge=0, le=1)]
    """Idle share of the stage: no compute, exchange or update."""
    memory: StageMemory


class ReadingPrediction(Frozen):
    """Processor time of loader processes for a mean step."""

    stage_ms: tuple[NonNegativeFloat, ...]  # time for one rank of each stage
    cores_ms: NonNegativeFloat
    """Min time for a node's cores to read the step, and to compute it if on CPU."""


class EncoderPhasePrediction(Frozen):
    """Data-parallel encoders: mean times of the slowest group's busiest rank, and memory."""

    forward_ms: NonNegativeFloat
    backward_ms: NonNegativeFloat  # backward time, including recomputed forwards of items not kept
    exchange_ms: NonNegativeFloat  # both exchanges of features between encoders and pipelines
    busiest: NonNegativeFloat
    """Encoding time of the busiest rank over the mean, or 1 if nothing is encoded."""
    memory: StageMemory  # on a device that embeds tokens; other devices hold no features


class Prediction(Frozen):
    """Result of simulating the plan on its own packs."""

    cost_source: str
    """"analytic:<cluster>, <whose> rates" or "profile:<device>, <n> processes,
    provider <provider>"."""
    step_ms: NonNegativeFloat  # mean step time over the simulated steps
    lost: LostTime
    bubble_fraction: Annotated[float, Field(ge=0, le=1)]
    """Idle share of device time for any cause, mean over stages and steps."""
    samples_per_second_per_gpu: NonNegativeFloat | None
    """Samples per second per GPU. None, as `gpu_days`, for a plan of shapes only."""
    gpu_days: NonNegativeFloat | None  # GPU-days of all planned epochs
    exchange: DataParallelExchange
    stages: tuple[StagePrediction, ...]
    data_parallel_encoders: EncoderPhasePrediction | None = written_unless(None)
    """Data-parallel encoders, or None if stages hold them."""
    reading: ReadingPrediction | None = written_unless(None)
    """Reading of the data, or None if not profiled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedStep:
    """Predicted step of a strategy, to compare it with plans."""

    step_ms: float
    samples_per_second_per_gpu: float | None
    lost: LostTime


def relative_ms(step: Prediction | PredictedStep) -> float:
    """Return device time per sample in ms, or the step time of plans without samples."""
    per_second = step.samples_per_second_per_gpu
    return step.step_ms if per_second is None else 1e3 / per_second
