"""Data-parallel encoders: every rank of the job encodes a share of a step's items.

Pipelines hold only the language model. Before a step's first micro-batch the ranks of an encoding
group (a few pipelines) encode equal shares of the work, and one exchange sends features to the
embedding stages; after the last backward another returns gradients. OrchMLLM (arXiv 2503.23830)
balances modalities likewise at run time; here the plan knows all sizes.
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
    """Placement of a model's encoders."""

    PIPELINE = "pipeline"  # first units of the pipeline's stages
    DATA_PARALLEL = "beside"
    """Replicated on every rank, before and after the pipeline. The value is a key of plan.json."""

    @property
    def option(self) -> str:
        """Value of `--encoder` for this placement."""
        return "data-parallel" if self is EncoderPlacement.DATA_PARALLEL else self.value

    @property
    def phrase(self) -> str:
        """Name within a sentence."""
        return "in the pipeline" if self is EncoderPlacement.PIPELINE else self.option


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTimes:
    """Predicted forward and backward time of a sample's items in an encoder."""

    item_ms: float
    square_ms: float  # time per unit of the sum over images and frames of their items squared

    def ms(self, items: np.ndarray, squares: np.ndarray) -> np.ndarray:
        """Time of samples, [...]."""
        return self.item_ms * items + self.square_ms * squares


class DataParallelEncoders(Frozen):
    """Settings of data-parallel encoders; tables are by encoder."""

    pipelines: Count  # pipelines (data-parallel ranks) that encode together: an aligned block
    items_per_pass: dict[str, Count]  # max items per encoder pass. A single sample may exceed it
    kept_items: dict[str, _Items]
    """Max items per step and rank with kept activations; other items repeat their forward."""
    item_ms: dict[str, _Ms]  # predicted forward and backward time per item, to balance shares
    square_ms: dict[str, _Ms] = written_unless({})
    """Additional time per squared item, of native-resolution image encoders."""
    sharded: Count = 1
    """Neighbouring ranks (Megatron's order) that shard encoder state: an aligned block; 1:
    replicated.

    They run equal numbers of passes; some may be empty.
    """

    @property
    def sample_times(self) -> dict[str, SampleTimes]:
        """Times to balance undivided samples, of encoders that take them."""
        return {
            name: SampleTimes(item_ms=self.item_ms[name], square_ms=each)
            for name, each in self.square_ms.items()
        }


def takes_whole_samples(model: ModelConfig) -> list[str]:
    """Encoders with attention across items, so that a sample stays on one rank."""
    return [name for name, tower in model.encoders.items() if tower.squares is not None]


def encoder_shards(way: WeightSharding, parallel: Parallel, cluster: ClusterConfig) -> int | None:
    """Number of ranks that shard data-parallel encoder weights, or None if impossible.

    A hybrid block is one node, as for the language model, with all tensor-parallel ranks; on a
    single node it is all ranks.
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
    """Node of every rank of every encoding group, int64 [groups, ranks].

    Megatron numbers ranks tensor, data, pipeline. A group's ranks are ordered pipeline, stage,
    tensor (`omnibal.steps.items.share_items`).
    """
    node = np.arange(parallel.world_size) // gpus_per_node
    in_order = node.reshape(parallel.pipeline, parallel.data, parallel.tensor)
    ranks = pipelines * parallel.pipeline * parallel.tensor
    return in_order.transpose(1, 0, 2).reshape(-1, ranks)
