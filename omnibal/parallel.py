"""Sizes of the parallel groups, and their limits by model and cluster."""

import math
from typing import Annotated

from pydantic import Field, model_validator

from omnibal.config import ClusterConfig, ModelConfig
from omnibal.errors import UserError
from omnibal.frozen import Frozen

MAX_DEVICES = 1_000_000
"""Most devices in any one dimension of parallelism."""
_SMALLEST_BUCKET = 40_000_000
_BUCKET_PER_RANK = 1_000_000
Size = Annotated[int, Field(ge=1, le=MAX_DEVICES)]


class Parallel(Frozen):
    """Sizes of the parallel groups; the launch needs tensor x pipeline x data processes."""

    tensor: Size = 1
    pipeline: Size
    data: Size = 1
    sequence_parallel: bool = False
    """Megatron sequence parallelism for the language model."""
    expert: Annotated[Size, Field(exclude_if=lambda size: size == 1)] = 1
    """Neighbouring ranks of a stage, of its tensor and data ranks, that share out the experts of a
    layer. An expert is never divided: Megatron's expert tensor-parallel size is 1."""

    @model_validator(mode="after")
    def _sequence_needs_tensor(self) -> "Parallel":
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError("sequence_parallel needs a tensor size of at least 2")
        return self

    @model_validator(mode="after")
    def _expert_divides_a_stage(self) -> "Parallel":
        if self.tensor * self.data % self.expert:
            raise ValueError(
                f"expert size {self.expert} must divide the {self.tensor * self.data} ranks of a "
                f"stage, tensor {self.tensor} x data {self.data}"
            )
        return self

    @property
    def expert_data(self) -> int:
        """Ranks of a stage that hold the same experts, and reduce their gradients."""
        return self.tensor * self.data // self.expert

    @property
    def world_size(self) -> int:
        """Processes of the job, one per device."""
        return self.tensor * self.pipeline * self.data

    @property
    def bucket_parameters(self) -> int:
        """Parameters that data-parallel ranks exchange at a time; Megatron-core's own rule."""
        return max(_SMALLEST_BUCKET, _BUCKET_PER_RANK * self.data)

    def __str__(self) -> str:
        return f"tensor {self.tensor} x pipeline {self.pipeline} x data {self.data}"

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by their short names, without what is divided besides: TP, PP, DP."""
        return {"TP": self.tensor, "PP": self.pipeline, "DP": self.data}

    @property
    def options(self) -> str:
        """The command-line options that give these sizes."""
        return " ".join(f"--{name.lower()} {size}" for name, size in self.sizes.items())

    def place(self, rank: int) -> dict[str, int]:
        """Place of a rank in every group: tensor varies fastest, then data, then pipeline.

        Megatron numbers ranks in this order.
        """
        order = {"tensor": self.tensor, "data": self.data, "pipeline": self.pipeline}
        place = {}
        for name, size in order.items():
            rank, place[name] = divmod(rank, size)
        return place

    def first_rank(self, stage: int) -> int:
        """Lowest rank of a pipeline stage."""
        return stage * self.tensor * self.data


def check_parallel(model: ModelConfig, parallel: Parallel, cluster: ClusterConfig) -> None:
    """Refuse parallel sizes that the model cannot be cut into.

    Raises:
        UserError: there are more stages than layers, tensor-parallel ranks do not divide the
            language model's heads or a feed-forward size, or they are more than a node's devices.
    """
    if parallel.pipeline > model.layers:
        raise UserError(
            f"pipeline size {parallel.pipeline} is more than the {model.layers} layers of "
            f"{model.name}; every stage must hold a layer: choose a pipeline size of at most "
            f"{model.layers}"
        )
    if parallel.tensor > cluster.gpus_per_node:
        raise UserError(
            f"tensor size {parallel.tensor} is more than the {cluster.gpus_per_node} devices of a "
            f"node of {cluster.name}, and its ranks must share one: choose at most that many"
        )
    divided = _divided_sizes(model)
    for name, size in divided.items():
        if size % parallel.tensor:
            divisors = [n for n in range(1, cluster.gpus_per_node + 1) if size % n == 0]
            common = math.gcd(*divided.values())
            possible = [n for n in divisors if common % n == 0]
            raise UserError(
                f"tensor size {parallel.tensor} does not divide {name} = {size} of {model.name}, "
                f"for which it must be one of {_listed(divisors)}; all of this model allows "
                f"{_listed(possible)}: choose that, and more pipeline stages where memory is short"
            )


def _divided_sizes(model: ModelConfig) -> dict[str, int]:
    """Sizes that tensor-parallel ranks must divide, by their names in a model file.

    An encoder's heads need not divide: InternViT's 25 are padded to a multiple of the tensor size.
    """
    language = model.language
    towers = model.encoders.items()
    sizes = {f"{name}.ffn_hidden_size": tower.ffn_hidden_size for name, tower in towers}
    sizes |= {"language.heads": language.heads, "language.kv_heads": language.kv_heads}
    for kind in dict.fromkeys(language.kinds):
        if kind.experts is None:
            sizes["language.ffn_hidden_size"] = language.ffn_hidden_size
            continue
        sizes[f"{kind.name}.ffn_hidden_size"] = kind.experts.ffn_hidden_size
        if kind.experts.shared_ffn_hidden_size is not None:
            sizes[f"{kind.name}.shared_ffn_hidden_size"] = kind.experts.shared_ffn_hidden_size
    return sizes


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
