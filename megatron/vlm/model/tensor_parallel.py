"""Sharding of parameters over tensor-parallel ranks, with padding where they do not divide.

Whatever is padded is padded at the end of its divided axis, with zeros: heads of encoders
(InternViT-6B has 25) and words of the vocabulary. A padded head's q, k and v are zero and so are
the columns that take its output, and padded words never reach the softmax. Either way all of it has
zero gradients, stays zero, and changes nothing.
"""

import re
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import MLP

from megatron.vlm.model.experts import StackedLinear
from megatron.vlm.model.providers import LayerParts
from omnibal.model.config import ModelConfig

_VOCABULARY_NAME = re.compile(r"^(embedding\.word_embeddings|head)\.weight$")
_HEADS_NAME = re.compile(
    r"^([a-z0-9]+)\.layers\.\d+\.(?:self_attention\."
    r"(?:linear_(qkv)\.(?:weight|bias)|linear_proj\.weight|[qk]_layernorm\.weight)"
    r"|adapters\.(?:(qkv)\.lora_b|[qkv]_proj\.lora_b|(?:out_)?proj\.lora_a))$"
)


def padded_size(size: int, ranks: int) -> int:
    """The least multiple of `ranks` that is not below `size`."""
    return size + -size % ranks


def unpadded_size(model: ModelConfig, name: str) -> int | None:
    """Size of a parameter's divided axis in the whole model; None where it is never padded."""
    if _VOCABULARY_NAME.match(name):
        return model.language.vocab_size
    match = _HEADS_NAME.match(name)
    if match is None or match[1] not in model.encoders:
        return None
    tower = model.encoders[match[1]]
    return tower.heads * tower.head_width * (3 if match[2] or match[3] else 1)


def describe_partitions(stage: torch.nn.Module, parts: LayerParts) -> None:
    """Give every parameter Megatron-core's attributes of how it is divided over the ranks.

    Core gives matrices theirs only when it draws them itself. The optimizer tells by them which
    parameters are on every rank and count once in the gradient's norm.
    """
    columns: Any = (ColumnParallelLinear, VocabParallelEmbedding, parts.column_linear)
    rows: Any = (RowParallelLinear, parts.row_linear)
    for module in stage.modules():
        if isinstance(module, columns):
            for parameter in module.parameters(recurse=False):
                divide(parameter, dim=0)
        elif isinstance(module, rows):
            divide(module.weight, dim=1)
    for module in stage.modules():
        if isinstance(module, MLP) and module.config.gated_linear_unit:
            # A rank holds its part of the gate, then its part of what is gated.
            for parameter in module.linear_fc1.parameters():
                parameter.partition_stride = 2
        if isinstance(module, StackedLinear):
            # Over expert-parallel ranks: every tensor-parallel rank's count in the norm.
            divide(module.weight, dim=0)
    for parameter in stage.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)


def divide(parameter: Any, dim: int) -> None:
    """Give a parameter core's attributes; Transformer Engine's have some of them already."""
    parameter.tensor_model_parallel = True
    parameter.partition_dim, parameter.partition_stride = dim, 1


def whole_shape(
    parameter: torch.nn.Parameter, unpadded: int | None, group: dist.ProcessGroup
) -> torch.Size:
    """Shape over all ranks of a tensor-parallel group together, without padding."""
    shape = list(parameter.shape)
    if parameter.tensor_model_parallel:
        shape[parameter.partition_dim] = unpadded or shape[parameter.partition_dim] * group.size()
    return torch.Size(shape)


def own_shard(
    whole: torch.Tensor, parameter: torch.nn.Parameter, group: dist.ProcessGroup
) -> torch.Tensor:
    """This rank's part of a tensor of `whole_shape`, zeros where the parameter is padded."""
    if not parameter.tensor_model_parallel:
        return whole
    rank, ranks = group.rank(), group.size()
    axis = parameter.partition_dim
    padding = list(whole.shape)
    padding[axis] = parameter.shape[axis] * ranks - whole.shape[axis]
    padded = torch.cat([whole, whole.new_zeros(padding)], axis)
    return torch.cat(padded.chunk(ranks * parameter.partition_stride, axis)[rank::ranks], axis)
