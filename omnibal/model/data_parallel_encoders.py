"""Data-parallel encoders: on every rank, copied or sharded, each encoding a share of the items.

Pipelines hold only the language model. The ranks of an encoding group (a few pipelines) encode
equal shares before the first micro-batch; one exchange sends features to the embedding stages, and
one returns gradients after the last backward. OrchMLLM (arXiv 2503.23830) balances modalities so at
run time; a plan knows all sizes before.
"""

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
    """Placement of a model's encoders, by value of `--encoder`."""

    PIPELINE = "pipeline"  # first units of the pipeline's stages
    DATA_PARALLEL = "data-parallel"  # every rank, before and after the pipeline

    @property
    def phrase(self) -> str:
        """Name within a sentence."""
        return "in the pipeline" if self is EncoderPlacement.PIPELINE else self.value


class DataParallelEncoders(Frozen):
    """Settings of data-parallel encoders; tables are by encoder."""

    pipelines: Count  # data-parallel ranks that encode together: an aligned block
    items_per_pass: dict[str, Count]  # max per encoder pass; a single sample may exceed it
    kept_items: dict[str, _Items]  # max per step and rank with kept activations; others: recompute
    item_ms: dict[str, _Ms]  # predicted forward + backward time, to balance shares
    square_ms: dict[str, _Ms] = written_unless({})
    """Per sum of squared items over images and frames, of encoders that take whole samples."""
    # Neighbouring ranks (Megatron's order) that shard encoder state, an aligned block. They run
    # equally many passes, perhaps empty, as each gathers weights.
    sharded: Count = 1


def takes_whole_samples(model: ModelConfig) -> list[str]:
    """Return the encoders with attention across items: a sample stays on one rank."""
    return [name for name, tower in model.encoders.items() if tower.squares is not None]


def encoder_shards(way: WeightSharding, parallel: Parallel, cluster: ClusterConfig) -> int | None:
    """Return how many ranks shard encoder weights, or None if that does not divide all ranks."""
    world = parallel.world_size
    # A hybrid block is a node's tensor-parallel groups, as for the language model.
    node = max(cluster.gpus_per_node // parallel.tensor, 1) * parallel.tensor
    sizes = {
        WeightSharding.REPLICATED: 1,
        WeightSharding.FULL: world,
        WeightSharding.HYBRID: min(node, world),
    }
    return sizes[way] if world % sizes[way] == 0 else None


def nodes_of_groups(parallel: Parallel, pipelines: int, gpus_per_node: int) -> np.ndarray:
    """Return the node of every rank of every encoding group, int64 [groups, ranks]."""
    node = np.arange(parallel.world_size) // gpus_per_node
    # Megatron numbers ranks by tensor, data, pipeline; ranks of a group are ordered by pipeline,
    # stage, tensor (`omnibal.packing.items.share_items`).
    in_order = node.reshape(parallel.pipeline, parallel.data, parallel.tensor)
    ranks = pipelines * parallel.pipeline * parallel.tensor
    return in_order.transpose(1, 0, 2).reshape(-1, ranks)
