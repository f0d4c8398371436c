"""Types of a plan's prediction: times, memory of every stage, and where a step's time goes."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat

from omnibal.base.frozen import Frozen, written_unless


class StageMemory(Frozen):
    """Predicted memory of one device of the stage, at the moment of its peak."""

    weights_gib: NonNegativeFloat
    gradients_gib: NonNegativeFloat
    optimizer_gib: NonNegativeFloat
    activations_gib: NonNegativeFloat
    """Activations of all micro-batches in flight."""
    transient_gib: NonNegativeFloat
    """Working memory of a unit at the peak, on top of what is kept at most; and what libraries keep
    to the end of the run."""

    @property
    def state_gib(self) -> float:
        """Weights, gradients and optimizer state, in GiB."""
        return self.weights_gib + self.gradients_gib + self.optimizer_gib

    @property
    def passes_gib(self) -> float:
        """All else, in GiB."""
        return self.activations_gib + self.transient_gib

    @property
    def peak_gib(self) -> float:
        """Memory of the device at its peak, in GiB."""
        return self.state_gib + self.passes_gib


_IN_WORDS = {"expert_wait_ms": "wait in lockstep"}
"""Names of entries in words that are not those of their fields: ranks that divide weights wait for
one another too, without experts."""


class LostTime(Frozen):
    """Breakdown of a mean step's time into entries that add up to the step, in ms.

    Every entry is what the simulated step loses when one cause more is taken away, in this order.
    """

    reading_ms: float = written_unless(0.0)
    """Waiting for data that the machine's cores cannot read in time."""
    rank_imbalance_ms: float
    """Waiting for the slowest data-parallel rank, at the end or in a pack that ranks share."""
    expert_wait_ms: float = written_unless(0.0)
    """Waiting of ranks that share out experts, or that divide weights, for one another in every
    pass, and the empty micro-batches by which they stay in lockstep."""
    context_exchange_ms: float = written_unless(0.0)
    """Exchange of the ranks that share a pack, for its attention and its encoders' features."""
    communication_ms: float
    """Sends between stages as far as any stage waits for them, tensor-parallel collectives, and
    what is exposed of the exchange of data-parallel ranks."""
    weight_update_ms: float
    recompute_ms: float
    padding_ms: float
    """Work on attention heads that pad their number to a multiple of the tensor-parallel ranks, and
    on tokens that pad packs to the longest, for trainers that do."""
    stage_imbalance_ms: float
    """Stages that take longer than others; 0 where equal ones would be no faster, as with few
    micro-batches that suit unequal ones."""
    bubble_ms: float
    """Bubble: filling and draining the pipeline, and micro-batches that differ. Other idle time
    counts under the other causes."""
    ideal_ms: float
    """Ideal time: the needed work, spread evenly over all devices without waiting."""

    def named(self) -> dict[str, float]:
        """The entries from the ideal up, by their names in words; those of shared packs and experts
        only where there are any."""
        entries = reversed(list(self.model_dump().items()))
        return {
            _IN_WORDS.get(name, name.removesuffix("_ms").replace("_", " ")): ms
            for name, ms in entries
        }


class DataParallelExchange(Frozen):
    """Sum of gradients and gather of weights over data-parallel ranks, in a mean step."""

    total_ms: NonNegativeFloat
    """Time of the stage that exchanges longest, were nothing hidden behind computation."""
    exposed_ms: float
    """Time by which it prolongs the step."""


class StagePrediction(Frozen):
    """Mean times per micro-batch over the planned packs, of all chunks of the stage, and memory."""

    forward_ms: NonNegativeFloat
    backward_ms: NonNegativeFloat
    """Backward time, recomputation included."""
    wait_fraction: Annotated[float, Field(ge=0, le=1)]
    """Share of the step in which the stage neither computes, exchanges nor updates weights."""
    memory: StageMemory


class ReadingPrediction(Frozen):
    """Processor time that loader processes take to read a mean step."""

    stage_ms: tuple[NonNegativeFloat, ...]
    """Time for one rank of each stage."""
    cores_ms: NonNegativeFloat
    """Least time in which a node's cores read the step, and compute it where they do that too."""


class EncoderPhasePrediction(Frozen):
    """Data-parallel encoders: mean times over the steps, each of the busiest rank of the
    group of ranks that encodes longest, and memory."""

    forward_ms: NonNegativeFloat
    backward_ms: NonNegativeFloat
    """Backward time, second forwards of items that are not kept included."""
    exchange_ms: NonNegativeFloat
    """Both exchanges of features between encoders and pipelines."""
    busiest: NonNegativeFloat
    """Encoding time of the busiest rank over that of the mean one; 1 where nothing is encoded."""
    memory: StageMemory
    """Memory of a device that embeds tokens; part of the memory of every stage."""


class Prediction(Frozen):
    """Result of simulating the plan on its own packs."""

    cost_source: str
    """"analytic:<cluster>, <whose> rates" or "profile:<device>, <n> processes,
    provider <provider>"."""
    step_ms: NonNegativeFloat
    """Step time, mean over the simulated steps."""
    lost: LostTime
    bubble_fraction: Annotated[float, Field(ge=0, le=1)]
    """Idle share of device time for any cause, mean over stages and steps; `LostTime.bubble_ms` is
    only a part of it."""
    samples_per_second_per_gpu: NonNegativeFloat | None
    """Samples per second and GPU; None, as `gpu_days`, for a plan of shapes only."""
    gpu_days: NonNegativeFloat | None
    """GPU-days of all planned epochs."""
    exchange: DataParallelExchange
    stages: tuple[StagePrediction, ...]
    beside: EncoderPhasePrediction | None = written_unless(None)
    """Data-parallel encoders; None where they are units of the stages."""
    reading: ReadingPrediction | None = written_unless(None)
    """Reading of the data; None where no profile timed it."""

    @property
    def ideal_step_ms(self) -> float:
        """Time of the same computation without anything lost."""
        return self.lost.ideal_ms
