"""Parallel sizes, and their limits by model and cluster."""

import math
from enum import StrEnum
from typing import Annotated

from pydantic import Field, ValidationError, model_validator

from omnibal.base.errors import UserError
from omnibal.base.frozen import Frozen, written_unless
from omnibal.model.config import ClusterConfig, ModelConfig

MAX_DEVICES = 1_000_000  # max devices in any dimension
_SMALLEST_BUCKET = 40_000_000  # parameters; both are Megatron-core defaults
_BUCKET_PER_RANK = 1_000_000  # parameters per data-parallel rank
_KV_HEADS = "language.kv_heads"
SIZE_OPTIONS = {"tensor": "--tp", "pipeline": "--pp", "data": "--dp", "expert": "--ep"}
"""Command-line options by field."""
Size = Annotated[int, Field(ge=1, le=MAX_DEVICES)]


class WeightSharding(StrEnum):
    """Sharding of weights, gradients and optimizer state over data-parallel ranks."""

    REPLICATED = "replicated"  # replicated weights and gradients; optimizer state is sharded
    FULL = "full"  # sharded over all data-parallel ranks
    HYBRID = "hybrid"  # sharded within groups of neighbouring ranks, replicated between groups


class Parallel(Frozen):
    """Sizes of the parallel groups; the launch needs tensor x pipeline x data processes."""

    tensor: Size = 1
    pipeline: Size
    data: Size = 1
    sequence_parallel: bool = False  # Megatron sequence parallelism for the language model
    expert: Size = written_unless(1)
    """Expert-parallel size over tensor and data ranks; expert tensor-parallel size is 1."""
    sharded: Size = written_unless(1)
    """Data-parallel ranks that shard weights (ZeRO-3): 1 (replicated), all, or between (hybrid)."""

    @model_validator(mode="after")
    def _sizes_fit_together(self) -> "Parallel":
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError("sequence_parallel needs a tensor size of at least 2")
        if self.tensor * self.data % self.expert:
            raise ValueError(
                f"expert size {self.expert} must divide the {self.tensor * self.data} ranks of a "
                f"stage, tensor {self.tensor} x data {self.data}"
            )
        if self.expert % self.tensor and self.tensor % self.expert:
            raise ValueError(
                f"expert size {self.expert} must divide tensor size {self.tensor} or be a multiple "
                "of it, so that expert-parallel groups hold whole tensor-parallel ones or parts"
            )
        if self.data % self.sharded:
            raise ValueError(
                f"sharded {self.sharded}, the ranks that divide weights, must divide data "
                f"{self.data}: choose a divisor of {self.data}"
            )
        if self.sharded % self.routing_ranks and self.routing_ranks % self.sharded:
            raise ValueError(
                f"sharded {self.sharded}, the ranks that divide weights, must divide the "
                f"{self.routing_ranks} data-parallel ranks that share out experts (expert "
                f"{self.expert} over tensor {self.tensor}), or be a multiple of them, so that all "
                "of them run in lockstep: choose such a size"
            )
        return self

    @property
    def sharding(self) -> WeightSharding:
        """Sharding of weights over data-parallel ranks."""
        if self.sharded == 1:
            return WeightSharding.REPLICATED
        return WeightSharding.FULL if self.sharded == self.data else WeightSharding.HYBRID

    @property
    def expert_data(self) -> int:
        """Ranks of a stage that hold the same experts and reduce their gradients."""
        return self.tensor * self.data // self.expert

    @property
    def routing_ranks(self) -> int:
        """Data-parallel span of an expert-parallel group, or 1 if tensor-parallel ranks suffice."""
        return max(self.expert // self.tensor, 1)

    @property
    def lockstep_ranks(self) -> int:
        """Data-parallel ranks in lockstep due to expert parallelism or sharded weights."""
        return max(self.routing_ranks, self.sharded)

    @property
    def expert_shards(self) -> int:
        """Ranks that shard expert weights: ranks of a shard group with the same experts."""
        if self.sharded == 1:
            return 1
        return max(self.tensor * self.sharded // self.expert, 1)

    def changed(self, **sizes: int) -> "Parallel":
        """Return sizes with some changed."""
        try:
            return Parallel.model_validate({**dict(self), **sizes})
        except ValidationError as error:
            raise UserError(error.errors()[0]["msg"]) from error

    def held(self, sharding: WeightSharding, cluster: ClusterConfig) -> "Parallel | None":
        """Return sizes with another sharding, or None if impossible.

        A hybrid group is one node, and needs several nodes in the job.
        """
        node = max(cluster.gpus_per_node // self.tensor, 1)
        sizes = {
            WeightSharding.REPLICATED: 1,
            WeightSharding.FULL: self.data,
            WeightSharding.HYBRID: node,
        }
        is_hybrid = 1 < node < self.data and self.data % node == 0
        if sharding is WeightSharding.HYBRID and not is_hybrid:
            return None
        try:
            return self.changed(sharded=sizes[sharding])
        except UserError:  # expert-parallel groups would span parts of nodes
            return None

    @property
    def world_size(self) -> int:
        """Processes of the job, one per device."""
        return self.tensor * self.pipeline * self.data

    @property
    def bucket_parameters(self) -> int:
        """Parameters per bucket of data-parallel exchange (Megatron-core's rule)."""
        return max(_SMALLEST_BUCKET, _BUCKET_PER_RANK * self.data)

    def __str__(self) -> str:
        sizes = f"tensor {self.tensor} x pipeline {self.pipeline} x data {self.data}"
        sizes = sizes if self.expert == 1 else f"{sizes} (expert {self.expert})"
        return sizes if self.sharded == 1 else f"{sizes} (sharded over {self.sharded})"

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by short name: TP, PP, DP, and EP if above 1."""
        sizes = {"TP": self.tensor, "PP": self.pipeline, "DP": self.data}
        return sizes if self.expert == 1 else sizes | {"EP": self.expert}

    @property
    def text(self) -> str:
        """Sizes in short, such as "TP 2 x PP 1 x DP 4, EP 8"."""
        divided = [f"{name} {size}" for name, size in self.sizes.items() if name != "EP"]
        shared = [f"EP {self.expert}"] if self.expert > 1 else []
        weights = [f"weights over {self.sharded}"] if self.sharded > 1 else []
        return ", ".join([" x ".join(divided), *shared, *weights])

    @property
    def options(self) -> str:
        """Command-line options for these sizes."""
        sizes = " ".join(f"--{name.lower()} {size}" for name, size in self.sizes.items())
        return sizes if self.sharded == 1 else f"{sizes} --sharding {self.sharding}"

    def place(self, rank: int) -> dict[str, int]:
        """Position of a rank in every group; order tensor, data, pipeline, as in Megatron.

        With expert parallelism the last entry is the expert-parallel rank.
        """
        order = {"tensor": self.tensor, "data": self.data, "pipeline": self.pipeline}
        place, left = {}, rank
        for name, size in order.items():
            left, place[name] = divmod(left, size)
        # A stage has a multiple of the expert size, so its groups begin with the stage.
        return place if self.expert == 1 else place | {"expert": rank % self.expert}

    def first_rank(self, stage: int) -> int:
        """Lowest rank of a pipeline stage."""
        return stage * self.tensor * self.data


def check_parallel(
    model: ModelConfig,
    parallel: Parallel,
    cluster: ClusterConfig,
    *,
    tensor_across_nodes: bool = False,
) -> None:
    """Raise if the model does not allow these parallel sizes."""
    if parallel.pipeline > model.layers:
        raise UserError(
            f"pipeline size {parallel.pipeline} is more than the {model.layers} layers of "
            f"{model.name}; every stage must hold a layer: choose a pipeline size of at most "
            f"{model.layers}"
        )
    if parallel.tensor > cluster.gpus_per_node and not tensor_across_nodes:
        raise UserError(
            f"tensor size {parallel.tensor} is more than the {cluster.gpus_per_node} devices of a "
            f"node of {cluster.name}, and its ranks must share one: choose at most that many"
        )
    _check_tensor(model, parallel, cluster)
    _check_expert(model, parallel)


def _check_tensor(model: ModelConfig, parallel: Parallel, cluster: ClusterConfig) -> None:
    divided = _divided_sizes(model)
    for name, size in divided.items():
        if not _allows(name, size, parallel.tensor):
            numbers = range(1, cluster.gpus_per_node + 1)
            divisors = [n for n in numbers if _allows(name, size, n)]
            possible = [n for n in divisors if all(_allows(*one, n) for one in divided.items())]
            raise UserError(
                f"tensor size {parallel.tensor} does not divide {name} = {size} of {model.name}, "
                f"for which it must be one of {_listed(divisors)}; all of this model allows "
                f"{_listed(possible)}: choose that, and more pipeline stages where memory is short"
            )


def _allows(name: str, size: int, tensor: int) -> bool:
    """Whether `tensor` ranks divide a size, or copy key-value heads that are fewer."""
    return size % tensor == 0 or (name == _KV_HEADS and tensor % size == 0)


def _check_expert(model: ModelConfig, parallel: Parallel) -> None:
    numbers = expert_counts(model)
    if not numbers:
        if parallel.expert > 1:
            raise UserError(
                f"expert size {parallel.expert} was given, and {model.name} has no experts to "
                "share out: leave --ep out, or choose a model with a mixture of experts"
            )
        return
    divisor = math.gcd(*numbers)
    if divisor % parallel.expert:
        raise UserError(
            f"expert size {parallel.expert} does not divide the {_listed(list(numbers))} experts "
            f"of a layer of {model.name}, of which every rank must hold equally many: choose a "
            f"divisor of {divisor}"
        )
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        raise UserError(
            f"tensor size {parallel.tensor} was given without sequence parallelism, and "
            f"{model.name} has experts: every tensor-parallel rank must route tokens of its own; "
            "leave --no-sequence-parallel out, or choose --tp 1"
        )


def expert_counts(model: ModelConfig) -> tuple[int, ...]:
    """Distinct expert counts of the model's layers, or empty if dense."""
    kinds = model.language.kinds
    return tuple(dict.fromkeys(kind.experts.experts for kind in kinds if kind.experts is not None))


def expert_sizes(model: ModelConfig, tensor: int, data: int) -> list[int]:
    """Expert-parallel sizes allowed on tensor x data ranks, ascending."""
    numbers = expert_counts(model)
    most = math.gcd(tensor * data, *numbers) if numbers else 1
    divisors = (size for size in range(1, most + 1) if most % size == 0)
    return [size for size in divisors if size % tensor == 0 or tensor % size == 0]


def _divided_sizes(model: ModelConfig) -> dict[str, int]:
    """Sizes that the tensor-parallel size must divide, by name in a model file.

    Encoder heads are padded (InternViT's 25) and routed experts are never divided.
    """
    language = model.language
    towers = model.encoders.items()
    sizes = {f"{name}.ffn_hidden_size": tower.ffn_hidden_size for name, tower in towers}
    made = (language.heads + 2 * language.kv_heads) * language.head_width
    # Megatron-core 0.16.1 copies no output gate (`core/transformer/attention.py:1218`).
    key_values = f"{_KV_HEADS} (with output_gate)" if language.output_gate else _KV_HEADS
    sizes |= {"language.heads": language.heads, key_values: language.kv_heads}
    sizes["language's rows of q, k and v"] = made
    for kind in dict.fromkeys(language.kinds):
        if kind.experts is None:
            sizes["language.ffn_hidden_size"] = language.ffn_hidden_size
            continue
        if kind.experts.shared_ffn_hidden_size is not None:
            sizes[f"{kind.name}.shared_ffn_hidden_size"] = kind.experts.shared_ffn_hidden_size
    return sizes


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
