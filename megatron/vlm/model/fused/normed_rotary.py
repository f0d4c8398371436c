"""Rotary position embedding behind a norm of every head of q and of k, as Qwen3 has it, and both
taken out of their product with v: one kernel, and backward one.

Shapes: T packed tokens, G key/value heads of this rank, Q queries' heads of each, N = G * Q,
D head size.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from megatron.vlm.model.fused.operation import operation
from megatron.vlm.model.fused.rotary import (
    Heads,
    Rotation,
    eager_split_and_rotate,
    sizes_of_gradients,
    sizes_of_product,
)
from megatron.vlm.model.fused.sizes import require, require_shapes

_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class HeadWeights(NamedTuple):
    """Weights of q's norm and of k's, [D] each and the same for all heads, and what is added to
    their mean squares."""

    query_D: torch.Tensor
    key_D: torch.Tensor
    eps: float


def split_norm_and_rotate(
    qkv: torch.Tensor, queries_per_group: int, turned_by: Rotation, norms: HeadWeights
) -> Heads:
    """Take q, k and v out of [T, G, (Q + 2) D], with q's and k's heads divided by their root mean
    squares, weighted, and turned by their positions' angles.

    What is given is kept for backward; v is a view of it.
    """
    if qkv.is_cuda:
        return NormAndRotate.apply(qkv, queries_per_group, *turned_by, *norms)
    return eager_split_norm_and_rotate(qkv, queries_per_group, turned_by, norms)


def eager_split_norm_and_rotate(
    qkv: torch.Tensor, queries_per_group: int, turned_by: Rotation, norms: HeadWeights
) -> Heads:
    """`split_norm_and_rotate` in plain torch, for every device."""
    query_D, key_D, eps = norms
    size = len(query_D)
    heads = qkv.unflatten(-1, (-1, size))
    query, key, value = heads.split([queries_per_group, 1, 1], 2)
    query, key = (F.rms_norm(x, (size,), w, eps) for x, w in ((query, query_D), (key, key_D)))
    normed = torch.cat([query, key, value], 2).flatten(2)
    return eager_split_and_rotate(normed, queries_per_group, turned_by)


def _kernels() -> ModuleType:
    # needs Triton, which CUDA's torch brings
    from megatron.vlm.model.kernels import normed_rotary

    return normed_rotary


def _require_weights(operation: str, weights_D: Sequence[torch.Tensor], size: int) -> None:
    given = f"{len(weights_D)} tensors"
    require(operation, "weights_D", given, len(weights_D) == 2, "be 2 tensors")
    named = {f"weights_D[{i}]": (weight, (size,)) for i, weight in enumerate(weights_D)}
    require_shapes(operation, **named)


def _write_forward(outputs, qkv, queries_per_group, *rest):
    _kernels().forward(qkv, *rest, outputs)
    return outputs


@operation("norm_and_rotate", _write_forward)
def _forward(
    qkv: torch.Tensor,
    queries_per_group: int,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    weights_D: Sequence[torch.Tensor],
    eps: float,
) -> _Parts:
    operation = "norm_and_rotate"
    tokens, groups, size = sizes_of_product(operation, qkv, queries_per_group, cosines, sines)
    _require_weights(operation, weights_D, size)
    return (
        qkv.new_empty((tokens, groups * queries_per_group, size)),
        qkv.new_empty((tokens, groups, size)),
        qkv.new_empty((tokens, groups, queries_per_group + 1), dtype=torch.float32),
    )


def _write_backward(outputs, query_TND, key_TGD, value_TGD, *rest):
    result, of_weights_2D = outputs
    sums_2D = _kernels().backward((query_TND, key_TGD, value_TGD), *rest, result)
    return result, sums_2D.to(of_weights_2D.dtype)


@operation("norm_and_rotate_backward", _write_backward)
def _backward(
    query_TND: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    qkv: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    weights_D: Sequence[torch.Tensor],
    rstds_TGH: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    operation, gradients = "norm_and_rotate_backward", (query_TND, key_TGD, value_TGD)
    tokens, groups, size = sizes_of_gradients(operation, gradients, cosines, sines)
    per_group = query_TND.shape[1] // groups
    require_shapes(
        operation,
        qkv=(qkv, (tokens, groups, (per_group + 2) * size)),
        rstds_TGH=(rstds_TGH, (tokens, groups, per_group + 1)),
    )
    _require_weights(operation, weights_D, size)
    return torch.empty_like(qkv), weights_D[0].new_empty((2, size))


class NormAndRotate(torch.autograd.Function):
    """`split_norm_and_rotate` by kernels, for any device that runs them."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: torch.Tensor,
        queries_per_group: int,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        query_weight_D: torch.Tensor,
        key_weight_D: torch.Tensor,
        eps: float,
    ) -> Heads:
        qkv = qkv.contiguous()
        weights_D = [query_weight_D, key_weight_D]
        arguments = (qkv, queries_per_group, cosines, sines, weights_D, eps)
        query_TND, key_TGD, rstds_TGH = _forward(*arguments)
        ctx.save_for_backward(qkv, cosines, sines, *weights_D, rstds_TGH)
        return query_TND, key_TGD, qkv[..., -len(query_weight_D) :]

    @staticmethod
    def backward(ctx, *gradients):
        qkv, cosines, sines, *weights_D, rstds_TGH = ctx.saved_tensors
        parts = [gradient.contiguous() for gradient in gradients]
        of_qkv, of_weights_2D = _backward(*parts, qkv, cosines, sines, weights_D, rstds_TGH)
        return of_qkv, None, None, None, *of_weights_2D, None
