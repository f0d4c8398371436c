"""Data-parallel encoders: every rank of the job encodes a share of a step's items.

The pipeline is then of the language model alone. Before a step's first micro-batch, the ranks of an
encoding group (all ranks of a few pipelines) encode what the packs of these pipelines hold, each an
equal share of the work; one exchange brings the features to the stages that embed tokens. After the
last backward, another brings their gradients back. OrchMLLM (arXiv 2503.23830) balances each
modality so over data-parallel ranks, by what it finds at run time; here the plan knows all sizes.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from omnibal.base.frozen import Count, Frozen
from omnibal.model.config import ClusterConfig
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


class DataParallelEncoders(Frozen):
    """How data-parallel encoders run; tables are by encoder."""

    pipelines: Count
    """Data-parallel ranks, each a pipeline with all its ranks, that encode together: an aligned
    block."""
    items_per_pass: dict[str, Count]
    """Most items that a rank runs through the encoder at once."""
    kept_items: dict[str, _Items]
    """Most items of a step of which a rank keeps the activations. Of all others it keeps none, and
    runs the forward again before the backward."""
    item_ms: dict[str, _Ms]
    """Predicted time of an item, forward and backward, by which ranks' shares are equal."""
    sharded: Count = 1
    """Neighbouring ranks of the job, in Megatron's order, that divide weights, gradients and
    optimizer state of the encoders: an aligned block. 1: every rank has all weights. They run
    equally many passes of each kind, of which some may be empty."""


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
