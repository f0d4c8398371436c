"""Tensor-parallel sharding of parameters, with zero padding at the end of divided axes.

Encoder heads (InternViT-6B has 25) and vocabulary words are padded. Padded heads have zero q, k, v
and output columns, and padded words skip the softmax; so their gradients are zero and they stay
zero.
"""

import math
import re
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron.vlm.model.experts import StackedLinear
from omnibal.model.config import ModelConfig

_VOCABULARY_NAME = re.compile(r"^(embedding\.word_embeddings|head|word_copy)\.weight$")
_HEADS_NAME = re.compile(
    r"^([a-z0-9]+)\.layers\.\d+\.(?:self_attention\."
    r"(?:linear_(qkv)\.(?:weight|bias)|linear_proj\.weight|[qk]_layernorm\.weight)"
    r"|adapters\.(?:(qkv)\.lora_b|[qkv]_proj\.lora_b|(?:out_)?proj\.lora_a))$"
)


def padded_size(size: int, ranks: int) -> int:
    """Return the smallest multiple of `ranks` >= `size`."""
    return size + -size % ranks


def unpadded_size(model: ModelConfig, name: str) -> int | None:
    """Return a parameter's unpadded global size along its divided axis, or None if never padded."""
    if _VOCABULARY_NAME.match(name):
        return model.language.vocab_size
    match = _HEADS_NAME.match(name)
    if match is None or match[1] not in model.encoders:
        return None
    tower = model.encoders[match[1]]
    return tower.heads * tower.head_width * (3 if match[2] or match[3] else 1)


def describe_partitions(stage: torch.nn.Module, *provided: type) -> None:
    """Set Megatron-core's sharding attributes on every parameter.

    The optimizer needs them to count replicated parameters once in the gradient norm.

    Args:
        provided: the provider's column-parallel and row-parallel linear.
    """
    # Core sets them only if it draws the matrices itself.
    columns: Any = (ColumnParallelLinear, VocabParallelEmbedding, provided[0])
    rows: Any = (RowParallelLinear, provided[1])
    for module in stage.modules():
        if isinstance(module, columns):
            for parameter in module.parameters(recurse=False):
                divide(parameter, dim=0)
        elif isinstance(module, rows):
            divide(module.weight, dim=1)
    for module in stage.modules():
        if isinstance(module, MLP) and module.config.gated_linear_unit:
            # A rank holds its part of the gate, then its part of the value.
            for parameter in module.linear_fc1.parameters():
                parameter.partition_stride = 2
        if isinstance(module, StackedLinear):
            # Divided over expert-parallel ranks: the norm counts every tensor-parallel rank.
            divide(module.weight, dim=0)
    for parameter in stage.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)


def divide(parameter: Any, dim: int) -> None:
    """Set core's attributes of a parameter divided along `dim`."""
    # Not core's function, which refuses parameters with attributes, as Transformer Engine's have.
    parameter.tensor_model_parallel = True
    parameter.partition_dim, parameter.partition_stride = dim, 1


class DividedModule(torch.nn.Module):
    """Module whose parameters are saved in parts by the attributes that `divide` sets."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the checkpoint state of the module's own parameters (core's name)."""
        tensors: dict[str, Any] = dict(self.named_parameters(recurse=False))
        return make_sharded_tensors_for_checkpoint(
            tensors,
            prefix,
            {name: p.partition_dim for name, p in tensors.items() if p.tensor_model_parallel},
            sharded_offsets,
            tp_group=metadata["tp_group"],
            dp_cp_group=metadata["dp_cp_group"],
        )


ShardRun: TypeAlias = tuple[int, int, int]  # start in the shard, start in the full axis, length


def own_runs(
    parameter: torch.nn.Parameter, axis: int, unpadded: int | None, group: dist.ProcessGroup
) -> tuple[int, list[ShardRun]]:
    """Return an axis's unpadded size over tensor-parallel ranks, and this rank's runs of it.

    Axis 1 includes all later axes, flattened. Padding is in no run.
    """
    own = math.prod(parameter.shape[axis:] if axis else parameter.shape[:1])
    if not parameter.tensor_model_parallel or axis != parameter.partition_dim:
        return own, [(0, 0, own)]
    size, length = unpadded or own * group.size(), own // parameter.partition_stride
    parts = range(parameter.partition_stride)
    runs = [(part * length, (part * group.size() + group.rank()) * length) for part in parts]
    return size, [(at, place, min(length, size - place)) for at, place in runs if place < size]
