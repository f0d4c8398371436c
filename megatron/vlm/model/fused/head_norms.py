"""InternViT's q and k norms, each over all heads of all tensor-parallel ranks.

They split the interleaved product into q, k and v; backward returns the product's gradient. Forward
and backward have one all-reduce each, of a sum per position of q and of k.

Shapes: S sequence, B batch (tiles), N heads of this rank, D head size, W = N * D.
"""

from typing import Any

import torch
import torch.distributed as dist

from megatron.vlm.model.fused.compiled import compiled_on_cuda, prepare_gradients


def _sum_squares(qkv_SBN3D: torch.Tensor) -> torch.Tensor:
    """Return local sums of squares of q and k, float32 [2, S, B]."""
    query_SBND, key_SBND, _ = qkv_SBN3D.chunk(3, -1)
    return torch.stack([x_SBND.float().square().sum((2, 3)) for x_SBND in (query_SBND, key_SBND)])


_squares = compiled_on_cuda("head_squares")(_sum_squares)


def _normalize(
    qkv_SBN3D: torch.Tensor,
    query_weight_W: torch.Tensor,
    key_weight_W: torch.Tensor,
    sums_2SB: torch.Tensor,
    width: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return normed q and k, given all ranks' sums of squares."""
    rstds_2SB11 = torch.rsqrt(sums_2SB / width + eps)[..., None, None]
    parts = zip(qkv_SBN3D.chunk(3, -1), (query_weight_W, key_weight_W), rstds_2SB11, strict=False)
    query_SBND, key_SBND = (
        (x_SBND * rstd_SB11 * weight_W.view(x_SBND.shape[2:])).to(x_SBND.dtype)
        for x_SBND, weight_W, rstd_SB11 in parts
    )
    return query_SBND, key_SBND


@compiled_on_cuda("head_norms")
def _norms(
    qkv_SBN3D: torch.Tensor,
    query_weight_W: torch.Tensor,
    key_weight_W: torch.Tensor,
    sums_2SB: torch.Tensor | None,
    width: int,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Return normed q and k, and their sums of squares; `sums_2SB` is None for one rank."""
    if sums_2SB is None:
        sums_2SB = _sum_squares(qkv_SBN3D)
    given = (qkv_SBN3D, query_weight_W, key_weight_W, sums_2SB, width, eps)
    return *_normalize(*given), sums_2SB.clone()  # plans count it as kept by this operation


def _outputs(qkv_SBN3D: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    """Return all that depends on the joint q, k and v: normed q and k, v, and local sums."""
    value_SBND = qkv_SBN3D.chunk(3, -1)[2]
    return *_normalize(qkv_SBN3D, *others), value_SBND, _sum_squares(qkv_SBN3D)


def _gradient_of_sums(*inputs_and_gradients: Any) -> torch.Tensor:
    """Return the local gradient of the sums of squares, float32 [2, S, B]."""
    *inputs, gradients_SBND = inputs_and_gradients
    gradient_2SB: torch.Tensor = prepare_gradients(_normalize, inputs)(*gradients_SBND[:2])[3]
    return gradient_2SB


_along = compiled_on_cuda("head_norms_along")(_gradient_of_sums)


@compiled_on_cuda("head_norms_backward")
def _gradients(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the joint q, k and v, and of both weights, [2, W].

    Given are the inputs of `_normalize`, gradients of q, k and v, and the gradient of all ranks'
    sums, or None for one rank.
    """
    *inputs, gradients_SBND, of_sums_2SB = given
    if of_sums_2SB is None:
        of_sums_2SB = _gradient_of_sums(*inputs, gradients_SBND)
    of_inputs = prepare_gradients(_outputs, inputs)(*gradients_SBND, of_sums_2SB)
    dtype = inputs[0].dtype
    return of_inputs[0].to(dtype), torch.stack(of_inputs[1:3]).to(dtype)


class HeadNorms(torch.autograd.Function):
    """Return q and k, with RMSNorm over all ranks' heads, and v, a view of the input.

    Args:
        qkv_SBN3D: [S, B, N, 3 D], with q, k and v per head.
        width: unpadded width of all ranks' heads; padded heads are zeros.
        group: ranks that divide the heads, or None for one rank.
    """

    @staticmethod
    def forward(ctx, qkv_SBN3D, query_weight_W, key_weight_W, width, eps, group):
        qkv_SBN3D = qkv_SBN3D.contiguous()
        weights_W, sums_2SB = (query_weight_W, key_weight_W), None
        if group is not None:
            sums_2SB = _squares(qkv_SBN3D)
            dist.all_reduce(sums_2SB, group=group)
        query_SBND, key_SBND, sums_2SB = _norms(qkv_SBN3D, *weights_W, sums_2SB, width, eps)
        ctx.save_for_backward(qkv_SBN3D, *weights_W, sums_2SB)
        ctx.width, ctx.eps, ctx.group = width, eps, group
        return query_SBND, key_SBND, qkv_SBN3D.chunk(3, -1)[2]

    @staticmethod
    def backward(ctx, *gradients):
        inputs = (*ctx.saved_tensors, ctx.width, ctx.eps)
        parts = [gradient.contiguous() for gradient in gradients]
        of_sums_2SB = None
        if ctx.group is not None:
            of_sums_2SB = _along(*inputs, parts)
            dist.all_reduce(of_sums_2SB, group=ctx.group)
        of_qkv_SBN3D, of_weights_2W = _gradients(*inputs, parts, of_sums_2SB)
        return of_qkv_SBN3D, *of_weights_2W, None, None, None
