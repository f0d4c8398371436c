"""Rotary position embedding of packed samples: q, k and v taken out of their product and turned by
one kernel, and backward by one.

Shapes: T packed tokens, G key/value heads of this rank, Q queries' heads of each, N = G * Q,
D head size.
"""

from types import ModuleType
from typing import Any, NamedTuple

import torch

from megatron.vlm.model.fused.operation import operation
from megatron.vlm.model.fused.sizes import require, require_shapes

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q [T, N, D], k and v [T, G, D]."""


class Rotation(NamedTuple):
    """Cosines and sines of every token's angles, float32 [T, D / 2]; made once a micro-batch."""

    cosines: torch.Tensor
    sines: torch.Tensor


def rotation(
    borders: torch.Tensor,
    tokens: int,
    frequencies: torch.Tensor,
    first: torch.Tensor | None = None,
) -> Rotation:
    """Angles of every token at its position within its sample, without a word to the host.

    Args:
        borders: where samples begin and, at last, end, int32 [samples + 1], on the device.
        tokens: tokens of all samples together.
        frequencies: of RoPE (Su et al. 2021, arXiv 2104.09864), float32 [D / 2].
        first: where there are pieces of samples in their place, each one's first token within its
            sample, int32 [pieces], on the device.
    """
    places_T = torch.arange(tokens, device=borders.device, dtype=borders.dtype)
    samples_T = torch.bucketize(places_T, borders[1:], right=True)
    positions_T = places_T - borders[samples_T]
    if first is not None:
        positions_T += first[samples_T]
    angles = positions_T.to(frequencies.dtype).outer(frequencies)
    return Rotation(angles.cos(), angles.sin())


def sectioned_rotation(
    positions_3S: torch.Tensor, axes_F: torch.Tensor, frequencies: torch.Tensor
) -> Rotation:
    """Angles of every token of multimodal RoPE (Qwen2-VL, arXiv 2409.12191, section 2.1).

    Args:
        positions_3S: time, row and column of every token.
        axes_F: which of the three each frequency turns by, int64 [D / 2].
        frequencies: float32 [D / 2].
    """
    angles = positions_3S.T.index_select(1, axes_F) * frequencies
    return Rotation(angles.cos(), angles.sin())


def split_and_rotate(qkv: torch.Tensor, queries_per_group: int, turned_by: Rotation) -> Heads:
    """Take q, k and v out of [T, G, (Q + 2) D], with q and k turned by their positions' angles.

    What is given is not kept.
    """
    if qkv.is_cuda:
        return SplitAndRotate.apply(qkv, queries_per_group, *turned_by)
    return eager_split_and_rotate(qkv, queries_per_group, turned_by)


def eager_split_and_rotate(qkv: torch.Tensor, queries_per_group: int, turned_by: Rotation) -> Heads:
    """`split_and_rotate` in plain torch, for every device."""
    size = qkv.shape[-1] // (queries_per_group + 2)
    query, key_TGD, value_TGD = qkv.split([queries_per_group * size, size, size], -1)
    cosines, sines = (table.to(qkv.dtype).unsqueeze(1) for table in turned_by)

    def turned(heads_TND: torch.Tensor) -> torch.Tensor:
        first, second = heads_TND.chunk(2, -1)
        return torch.cat(
            (first * cosines - second * sines, second * cosines + first * sines), dim=-1
        )

    return (
        turned(query.reshape(len(qkv), queries_per_group * qkv.shape[1], size)),
        turned(key_TGD),
        value_TGD,
    )


def _kernels() -> ModuleType:
    from megatron.vlm.model.kernels import rotary  # needs Triton, which CUDA's torch brings

    return rotary


def sizes_of_product(
    operation: str,
    qkv: torch.Tensor,
    queries_per_group: int,
    cosines: torch.Tensor,
    sines: torch.Tensor,
) -> tuple[int, int, int]:
    """T, G and D of a product of q, k and v, which goes with its angles.

    Raises:
        ValueError: it does not, or an argument has other axes than it must.
    """
    shape = list(qkv.shape)
    require(operation, "qkv", shape, len(shape) == 3, "have three axes")
    require(operation, "queries_per_group", queries_per_group, queries_per_group > 0, "be positive")
    tokens, groups, width = shape
    size, rest = divmod(width, queries_per_group + 2)
    heads = f"have a last axis of {queries_per_group} queries, a key and a value of an even size"
    require(operation, "qkv", shape, rest == 0 and size % 2 == 0, heads)
    angles = (tokens, size // 2)
    require_shapes(operation, qkv=(qkv, shape), cosines=(cosines, angles), sines=(sines, angles))
    return tokens, groups, size


def sizes_of_gradients(
    operation: str, gradients: Heads, cosines: torch.Tensor, sines: torch.Tensor
) -> tuple[int, int, int]:
    """T, G and D of gradients of q, k and v, which go together and with their angles.

    Raises:
        ValueError: they do not, or an argument has other axes than it must.
    """
    query_TND, key_TGD, value_TGD = gradients
    shape, queries = list(key_TGD.shape), list(query_TND.shape)
    is_of_pairs = len(shape) == 3 and shape[2] % 2 == 0
    require(operation, "key_TGD", shape, is_of_pairs, "be [T, G, D] with an even D")
    tokens, groups, size = shape
    is_of_groups = len(queries) == 3 and queries[1] > 0 == queries[1] % max(groups, 1)
    require(operation, "query_TND", queries, is_of_groups, f"have some heads for each of {groups}")
    angles = (tokens, size // 2)
    require_shapes(
        operation,
        query_TND=(query_TND, (tokens, queries[1], size)),
        key_TGD=(key_TGD, shape),
        value_TGD=(value_TGD, shape),
        cosines=(cosines, angles),
        sines=(sines, angles),
    )
    return tokens, groups, size


def _write_rotate(parts, qkv, queries_per_group, cosines, sines):
    _kernels().rotate(qkv, parts, cosines, sines, back=False)
    return parts


@operation("split_and_rotate", _write_rotate)
def _rotate(
    qkv: torch.Tensor, queries_per_group: int, cosines: torch.Tensor, sines: torch.Tensor
) -> Heads:
    tokens, groups, size = sizes_of_product(
        "split_and_rotate", qkv, queries_per_group, cosines, sines
    )
    query_TND = qkv.new_empty((tokens, groups * queries_per_group, size))
    return query_TND, *(qkv.new_empty((tokens, groups, size)) for _ in range(2))


def _write_rotate_back(qkv, query_TND, key_TGD, value_TGD, cosines, sines):
    _kernels().rotate(qkv, (query_TND, key_TGD, value_TGD), cosines, sines, back=True)
    return qkv


@operation("split_and_rotate_backward", _write_rotate_back)
def _rotate_back(
    query_TND: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
) -> torch.Tensor:
    tokens, groups, size = sizes_of_gradients(
        "split_and_rotate_backward", (query_TND, key_TGD, value_TGD), cosines, sines
    )
    return query_TND.new_empty((tokens, groups, (query_TND.shape[1] // groups + 2) * size))


class SplitAndRotate(torch.autograd.Function):
    """`split_and_rotate` by kernels, for any device that runs them."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: torch.Tensor,
        queries_per_group: int,
        cosines: torch.Tensor,
        sines: torch.Tensor,
    ) -> Heads:
        ctx.save_for_backward(cosines, sines)
        return _rotate(qkv.contiguous(), queries_per_group, cosines, sines)

    @staticmethod
    def backward(ctx, *gradients):
        parts = [gradient.contiguous() for gradient in gradients]
        return _rotate_back(*parts, *ctx.saved_tensors), None, None, None
