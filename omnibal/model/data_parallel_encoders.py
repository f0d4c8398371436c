"""Data-parallel encoders: every rank of the job encodes a share of a step's items.

The pipeline is then of the language model alone. Before a step's first micro-batch, the ranks of an
encoding group (all ranks of a few pipelines) encode what the packs of these pipelines hold, each an
equal share of the work; one exchange brings the features to the stages that embed tokens. After the
last backward, another brings their gradients back. OrchMLLM (arXiv 2503.23830) balances each
modality so over data-parallel ranks, by what it finds at run time; here the plan knows all sizes.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import numpy as np
from pydantic import Field

from omnibal.base.frozen import Count, Frozen, written_unless
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
    square_ms: dict[str, _Ms] = written_unless({})
    """Time of a unit of the sum over a sample's images and frames of their items squared, which
    comes to it, of encoders of images at their native resolution alone."""
    sharded: Count = 1
    """Neighbouring ranks of the job, in Megatron's order, that divide weights, gradients and
    optimizer state of the encoders: an aligned block. 1: every rank has all weights. They run
    equally many passes of each kind, of which some may be empty."""

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
    """
    node = np.arange(parallel.world_size) // gpus_per_node
    in_order = node.reshape(parallel.pipeline, parallel.data, parallel.tensor)
    ranks = pipelines * parallel.pipeline * parallel.tensor
    return in_order.transpose(1, 0, 2).reshape(-1, ranks)
