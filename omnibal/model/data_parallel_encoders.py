"""Data-parallel encoders: every rank of the job encodes a share of a step's items.

The pipeline is then of the language model alone. Before a step's first micro-batch, the ranks of an
encoding group (all ranks of a few pipelines) encode what the packs of these pipelines hold, each an
equal share of the work; one exchange brings the features to the stages that embed tokens. After the
last backward, another brings their gradients back. OrchMLLM (arXiv 2503.23830) balances each
modality so over data-parallel ranks, by what it finds at run time; here the plan knows all sizes.

A step may be encoded in *rounds* of consecutive micro-batches, each with exchanges of its own, so
that a rank encodes while its stage would wait: features of later micro-batches after the first
forwards, gradients of earlier ones before the last backwards. Optimus (arXiv 2408.03505) lays
encoders into bubbles so, by kernels and on each pipeline's own ranks.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from omnibal.base.frozen import Count, Frozen
from omnibal.model.config import ClusterConfig, ModelConfig
from omnibal.model.parallel import Parallel, WeightSharding

_Items = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]
_Ms = Annotated[float, Field(ge=0, le=1e12)]


class EncoderPlacement(StrEnum):
    """Where a model's encoders run."""

    PIPELINE = "pipeline"
    """As the first units of the pipeline's stages."""
    DATA_PARALLEL = "beside"
    """Replicated on every rank, before and after the pipeline of the language model; the value is
    the key of plan.json."""

    @property
    def option(self) -> str:
        """The value of `--encoder` that asks for it."""
        return "data-parallel" if self is EncoderPlacement.DATA_PARALLEL else self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTimes:
    """Predicted time of an encoder's items of samples, forward and backward."""

    item_ms: float
    square_ms: float
    """Time for each 1 of the sum over images and frames of their items squared."""

    def ms(self, items: np.ndarray, squares: np.ndarray) -> np.ndarray:
        """Time of samples with so many items. [...]"""
        return self.item_ms * items + self.square_ms * squares


_Place = Annotated[int, Field(ge=0, strict=True)]


class EncoderRound(Frozen):
    """Consecutive micro-batches of which the features are encoded and exchanged together; tables
    are by pipeline stage."""

    micro_batches: Count
    """Micro-batches of every pipeline of the group, after those of the rounds before."""
    forward_after: tuple[_Place, ...]
    """Operations of the stage's list in the plan's schedule, without encoders, after which its
    ranks encode their share and send it."""
    backward_after: tuple[_Place, ...]
    """Operations after which they receive gradients of what they have encoded, and run its
    backward."""
    load_ms: tuple[_Ms, ...]
    """Time that a rank of the stage counts as having before the round's items are dealt, so that
    stages with little time to spare encode less."""


class EncoderRounds(Frozen):
    """The rounds of steps in which every pipeline of the group runs so many micro-batches.

    Every stage encodes all rounds, in their order, before the first round's backward, so that all
    ranks of a group begin the same exchanges in one order.
    """

    micro_batches: Count
    rounds: tuple[EncoderRound, ...] = Field(min_length=2)

    @model_validator(mode="after")
    def _are_in_order(self) -> "EncoderRounds":
        held = sum(one.micro_batches for one in self.rounds)
        if held != self.micro_batches:
            raise ValueError(
                f"rounds of {held} micro-batches for steps of {self.micro_batches}; a step's "
                "rounds have all of its micro-batches"
            )
        tables = [
            table
            for one in self.rounds
            for table in (one.forward_after, one.backward_after, one.load_ms)
        ]
        if len({len(table) for table in tables}) != 1:
            raise ValueError("tables of rounds for different numbers of stages; each stage has one")
        places = [one.forward_after for one in self.rounds]
        places += [one.backward_after for one in self.rounds]
        for stage, of_stage in enumerate(zip(*places, strict=True)):
            if list(of_stage) != sorted(of_stage):
                raise ValueError(
                    f"stage {stage} encodes after {of_stage} operations; rounds are encoded in "
                    "their order, all of them before the first one's backward"
                )
        return self


class DataParallelEncoders(Frozen):
    """How data-parallel encoders run; tables are by encoder."""

    pipelines: Count
    """Data-parallel ranks, each a pipeline with all its ranks, that encode together: an aligned
    block."""
    items_per_pass: dict[str, Count]
    """Most items that a rank runs through the encoder at once; of whole samples one may have
    more."""
    kept_items: dict[str, _Items]
    """Most items of a step of which a rank keeps the activations, of as many whole samples where
    these stay together. Of all others it keeps none, and runs the forward again before the
    backward."""
    item_ms: dict[str, _Ms]
    """Predicted time of an item, forward and backward, by which ranks' shares are equal."""
    square_ms: dict[str, _Ms] = Field(default={}, exclude_if=lambda times: not times)
    """Time of a unit of the sum over a sample's images and frames of their items squared, which
    comes to it, of encoders of images at their native resolution alone."""
    sharded: Count = 1
    """Neighbouring ranks of the job, in Megatron's order, that divide weights, gradients and
    optimizer state of the encoders: an aligned block. 1: every rank has all weights. They run
    equally many passes of each kind, of which some may be empty."""
    rounds: tuple[EncoderRounds, ...] = Field(default=(), exclude_if=lambda rounds: not rounds)
    """Rounds of steps by their number of micro-batches, each number once. Steps of other numbers,
    or of pipelines with different ones, are encoded before their first micro-batch and after their
    last. Items are kept round after round up to `kept_items`. Only where ranks have all weights."""

    @model_validator(mode="after")
    def _has_each_number_once(self) -> "DataParallelEncoders":
        numbers = [one.micro_batches for one in self.rounds]
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"rounds of steps of {numbers} micro-batches; give each number once")
        if self.rounds and self.sharded > 1:
            raise ValueError(
                f"rounds beside encoders whose weights {self.sharded} ranks divide; leave out "
                "`rounds`, or set `sharded` to 1"
            )
        return self

    def rounds_of(self, micro_batches: int) -> tuple[EncoderRound, ...]:
        """Rounds of a step in which every pipeline of a group runs so many micro-batches; empty
        where it has none."""
        found = [one.rounds for one in self.rounds if one.micro_batches == micro_batches]
        return found[0] if found else ()

    @property
    def sample_times(self) -> dict[str, SampleTimes]:
        """Times by which whole samples are dealt, of the encoders that take such."""
        return {
            name: SampleTimes(item_ms=self.item_ms[name], square_ms=each)
            for name, each in self.square_ms.items()
        }


def takes_whole_samples(model: ModelConfig) -> list[str]:
    """Encoders whose items attend to each other, so that a sample's go to one rank."""
    return [name for name, tower in model.encoders.items() if tower.squares is not None]


def encoder_shards(way: WeightSharding, parallel: Parallel, cluster: ClusterConfig) -> int | None:
    """Neighbouring ranks of a job that divide the weights of data-parallel encoders, if ranks hold
    them in this way; None where they cannot.

    A hybrid block has the ranks of one node, as many as those of a language model that is divided
    so, with all tensor-parallel ranks; on one node it has all ranks.
    """
    world = parallel.world_size
    node = max(cluster.gpus_per_node // parallel.tensor, 1) * parallel.tensor
    sizes = {
        WeightSharding.REPLICATED: 1,
        WeightSharding.FULL: world,
        WeightSharding.HYBRID: min(node, world),
    }
    return sizes[way] if world % sizes[way] == 0 else None


def nodes_of_groups(parallel: Parallel, pipelines: int, gpus_per_node: int) -> np.ndarray:
    """Node of every rank of every encoding group of a job, int64 [groups, ranks].

    Megatron numbers ranks tensor first, then data, then pipeline; ranks of a group are in the order
    of `omnibal.dispatch.items.share_items`: pipeline, stage, tensor.

    Args:
        pipelines: of a group.
    """
    node = np.arange(parallel.world_size) // gpus_per_node
    in_order = node.reshape(parallel.pipeline, parallel.data, parallel.tensor)
    ranks = pipelines * parallel.pipeline * parallel.tensor
    return in_order.transpose(1, 0, 2).reshape(-1, ranks)
