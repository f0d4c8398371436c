"""Parallel sizes, and which of them a model and a cluster allow."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field, ValidationError, model_validator

from omnibal.base.errors import UserError, refuse_if
from omnibal.base.files import one_line_error
from omnibal.base.frozen import Frozen, written_unless
from omnibal.model.config import ClusterConfig, ModelConfig
from omnibal.model.rate_tables import Place

MAX_DEVICES = 1_000_000  # of any parallel size; more is a typo
_MIN_BUCKET = 40_000_000  # parameters; both are Megatron-core's defaults
_BUCKET_PER_RANK = 1_000_000  # parameters per data-parallel rank
_KV_HEADS = "language.kv_heads"
SIZE_OPTIONS = {"tensor": "--tp", "pipeline": "--pp", "data": "--dp", "expert": "--ep"}
Size = Annotated[int, Field(ge=1, le=MAX_DEVICES)]


class WeightSharding(StrEnum):
    """Sharding of weights, gradients and optimizer state over data-parallel ranks."""

    REPLICATED = "replicated"  # as Megatron's distributed optimizer: only its state is sharded
    FULL = "full"  # over all data-parallel ranks (FSDP, ZeRO-3)
    HYBRID = "hybrid"  # within groups of neighbouring ranks, replicated between groups (HSDP)


class Parallel(Frozen):
    """Parallel sizes; the job has tensor x pipeline x data processes."""

    tensor: Size = 1
    pipeline: Size
    data: Size = 1
    sequence_parallel: bool = False  # Megatron's, of the language model
    expert: Size = written_unless(1)  # over tensor x data ranks; expert tensor size is 1
    sharded: Size = written_unless(1)  # data-parallel ranks per shard group: 1, a divisor, all

    @model_validator(mode="after")
    def _sizes_fit_together(self) -> "Parallel":
        tensor, data, expert, sharded = self.tensor, self.data, self.expert, self.sharded
        routing, ranks = self.routing_ranks, f"tensor {tensor} x data {data} ranks of a stage"
        refuse_if(self.sequence_parallel and tensor == 1, "sequence_parallel needs tensor >= 2")
        refuse_if(tensor * data % expert, f"expert size {expert} must divide the {ranks}")
        message = f"expert size {expert} must divide tensor size {tensor} or be a multiple of it"
        refuse_if(expert % tensor and tensor % expert, message)
        shards = f"sharded {sharded}, the ranks of a shard group,"
        refuse_if(data % sharded, f"{shards} must divide data {data}")
        # Expert-parallel and shard groups run in lockstep, so either must hold the other.
        message = f"{shards} must divide the {routing} data-parallel ranks that share experts"
        refuse_if(sharded % routing and routing % sharded, f"{message}, or be a multiple of them")
        return self

    @property
    def sharding(self) -> WeightSharding:
        if self.sharded == 1:
            return WeightSharding.REPLICATED
        return WeightSharding.FULL if self.sharded == self.data else WeightSharding.HYBRID

    @property
    def expert_data(self) -> int:
        """Ranks of a stage that hold the same experts and reduce their gradients."""
        return self.tensor * self.data // self.expert

    @property
    def routing_ranks(self) -> int:
        """Data-parallel ranks of an expert-parallel group: 1 if tensor-parallel ranks suffice."""
        return max(self.expert // self.tensor, 1)

    @property
    def lockstep_ranks(self) -> int:
        """Data-parallel ranks that run equal steps, due to expert parallelism or sharding."""
        return max(self.routing_ranks, self.sharded)

    @property
    def expert_shards(self) -> int:
        """Ranks that shard expert weights: ranks of a shard group with the same experts."""
        if self.sharded == 1:
            return 1
        return max(self.tensor * self.sharded // self.expert, 1)

    def with_sizes(self, **sizes: int) -> "Parallel":
        """Return the parallel sizes with changes. Raise UserError if they do not fit together."""
        try:
            return Parallel.model_validate({**dict(self), **sizes})
        except ValidationError as error:
            raise one_line_error(error, "parallel sizes", "give others") from error

    def with_sharding(self, sharding: WeightSharding, cluster: ClusterConfig) -> "Parallel | None":
        """Return the parallel sizes with another sharding, or None if the sizes rule it out."""
        # A hybrid group is the data-parallel ranks of a node; a job on one node has none.
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
            return self.with_sizes(sharded=sizes[sharding])
        except UserError:  # expert-parallel groups would span parts of shard groups
            return None

    @property
    def world_size(self) -> int:
        """Processes of the job, one per device."""
        return self.tensor * self.pipeline * self.data

    @property
    def bucket_parameters(self) -> int:
        """Parameters per gradient bucket, by Megatron-core's rule."""
        return max(_MIN_BUCKET, _BUCKET_PER_RANK * self.data)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by short name: TP, PP, DP, and EP if above 1."""
        sizes = {"TP": self.tensor, "PP": self.pipeline, "DP": self.data}
        return sizes if self.expert == 1 else sizes | {"EP": self.expert}

    def __str__(self) -> str:
        """Sizes such as "TP 2 x PP 1 x DP 4, EP 8"."""
        factors = [f"{name} {size}" for name, size in self.sizes.items() if name != "EP"]
        experts = [f"EP {self.expert}"] if self.expert > 1 else []
        weights = [f"weights over {self.sharded}"] if self.sharded > 1 else []
        return ", ".join([" x ".join(factors), *experts, *weights])

    @property
    def options(self) -> str:
        """Command-line options for these sizes."""
        sizes = " ".join(f"--{name.lower()} {size}" for name, size in self.sizes.items())
        return sizes if self.sharded == 1 else f"{sizes} --sharding {self.sharding}"

    def place(self, rank: int) -> dict[str, int]:
        """Return a rank's position by kind of group, with "expert" only if expert > 1."""
        # Megatron's order: tensor is fastest.
        order = {"tensor": self.tensor, "data": self.data, "pipeline": self.pipeline}
        place, left = {}, rank
        for name, size in order.items():
            left, place[name] = divmod(left, size)
        # The expert size divides a stage's ranks, so a stage begins a group.
        return place if self.expert == 1 else place | {"expert": rank % self.expert}


def check_parallel(
    model: ModelConfig,
    parallel: Parallel,
    cluster: ClusterConfig,
    *,
    tensor_across_nodes: bool = False,
    copies_gates: bool = False,  # of attention, over more ranks than key-value heads
) -> None:
    """Raise UserError unless the model and the cluster allow these parallel sizes."""
    size = f"pipeline size {parallel.pipeline}"
    refuse_if(
        parallel.pipeline > model.layers,
        f"{size} is more than the {model.layers} layers of {model.name}: choose fewer stages",
    )
    size, node = f"tensor size {parallel.tensor}", cluster.gpus_per_node
    refuse_if(
        parallel.tensor > node and not tensor_across_nodes,
        f"{size} is more than the {node} devices of a node of {cluster.name}: choose a smaller one",
    )
    sizes = _divided_sizes(model, copies_gates)
    _check_tensor(sizes, model.name, parallel.tensor, cluster.gpus_per_node)
    _check_expert(model, parallel)


def _check_tensor(sizes: dict[str, int], model_name: str, tensor: int, most: int) -> None:
    wrong = [f"{name} = {size}" for name, size in sizes.items() if not _divides(name, size, tensor)]
    fitting = (n for n in range(1, most + 1) if all(_divides(*item, n) for item in sizes.items()))
    message = f"tensor size {tensor} does not divide {', '.join(wrong)} of {model_name}"
    allowed = ", ".join(map(str, fitting))
    refuse_if(
        wrong, f"{message}, which allows {allowed}: choose another, and more stages if needed"
    )


def _divides(name: str, size: int, tensor: int) -> bool:
    # Fewer key-value heads than ranks are copied.
    return size % tensor == 0 or (name == _KV_HEADS and tensor % size == 0)


def _check_expert(model: ModelConfig, parallel: Parallel) -> None:
    counts, size = expert_counts(model), f"expert size {parallel.expert}"
    if not counts:
        refuse_if(parallel.expert > 1, f"{size}: {model.name} has no experts: leave --ep out")
        return
    divisor, numbers = math.gcd(*counts), ", ".join(map(str, counts))
    message = f"{size} does not divide the {numbers} experts per layer of {model.name}"
    refuse_if(divisor % parallel.expert, f"{message}: choose a divisor of {divisor}")
    # Every tensor-parallel rank routes tokens of its own.
    is_whole = parallel.tensor > 1 and not parallel.sequence_parallel
    message = f"experts of {model.name} at tensor size {parallel.tensor} need sequence parallelism"
    refuse_if(is_whole, f"{message}: leave --no-sequence-parallel out")


def expert_counts(model: ModelConfig) -> tuple[int, ...]:
    """Return the distinct expert counts of the model's layers, empty if dense."""
    kinds = model.language.kinds
    return tuple(dict.fromkeys(kind.experts.experts for kind in kinds if kind.experts is not None))


def expert_sizes(model: ModelConfig, tensor: int, data: int) -> list[int]:
    """Return the expert-parallel sizes that tensor x data ranks allow, ascending."""
    numbers = expert_counts(model)
    largest = math.gcd(tensor * data, *numbers) if numbers else 1
    divisors = (size for size in range(1, largest + 1) if largest % size == 0)
    return [size for size in divisors if size % tensor == 0 or tensor % size == 0]


def _divided_sizes(model: ModelConfig, copies_gates: bool) -> dict[str, int]:
    """Return the sizes that the tensor-parallel size must divide, by name in a model file."""
    # Without heads of encoders, which are padded (InternViT's 25), and routed experts.
    language = model.language
    towers = model.encoders.items()
    sizes = {f"{name}.ffn_hidden_size": tower.ffn_hidden_size for name, tower in towers}
    qkv_rows = (language.heads + 2 * language.kv_heads) * language.head_width
    # Megatron-core 0.16.1 copies no output gate (`core/transformer/attention.py:1218`).
    key_values = _KV_HEADS + " (with output_gate)" * (language.output_gate and not copies_gates)
    sizes |= {"language.heads": language.heads, key_values: language.kv_heads}
    sizes["language's rows of q, k and v"] = qkv_rows
    for kind in dict.fromkeys(language.kinds):
        if kind.linear is not None:
            sizes[f"{kind.name}.key_heads"] = kind.linear.key_heads
        if kind.experts is None:
            sizes["language.ffn_hidden_size"] = language.ffn_hidden_size
            continue
        if kind.experts.shared_ffn_hidden_size is not None:
            sizes[f"{kind.name}.shared_ffn_hidden_size"] = kind.experts.shared_ffn_hidden_size
    return sizes


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that exchange, `stride` apart in Megatron's order (tensor first, then data)."""

    ranks: int
    stride: int = 1

    def is_within(self, cluster: ClusterConfig) -> bool:
        """Whether the group fits one node."""
        return self.ranks * self.stride <= cluster.gpus_per_node

    def place(self, cluster: ClusterConfig) -> Place:
        """Return the group's placement, as named in measured rates."""
        return "node" if self.is_within(cluster) else "network"


def state_group(parallel: Parallel, *, of_experts: bool = False) -> Group:
    """Return the ranks of a stage that shard optimizer state, and weights if sharded."""
    is_sharded = parallel.sharded > 1
    if of_experts:
        ranks = parallel.expert_shards if is_sharded else parallel.expert_data
        return Group(ranks, stride=parallel.expert)
    return Group(parallel.sharded if is_sharded else parallel.data, stride=parallel.tensor)


def copies_group(parallel: Parallel, *, of_experts: bool = False) -> Group:
    """Return the ranks of a stage that hold the same weight shard."""
    stride = parallel.tensor * parallel.sharded
    if of_experts:
        ranks = parallel.expert_data // parallel.expert_shards
        return Group(ranks, stride=max(stride, parallel.expert))
    return Group(parallel.data // parallel.sharded, stride=stride)
