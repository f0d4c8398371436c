"""InternViT's q and k norms, each over all heads of all tensor-parallel ranks.

They split the interleaved product into q, k and v; backward returns the product's gradient. Forward
and backward have one all-reduce each, of a sum per position of q and of k.

Shapes: S sequence, B batch (tiles), N heads of this rank, D head size, W = N * D.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.vlm.model.fused.compiled import compiled_on_cuda

TileHeads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k and v, [S, B, N, D]


def _sum_squares(qkv_SBN3D: torch.Tensor) -> torch.Tensor:
    """Return local sums of squares of q and k, float32 [2, S, B]."""
    query_SBND, key_SBND, _ = qkv_SBN3D.chunk(3, -1)
    return torch.stack([x_SBND.float().square().sum((2, 3)) for x_SBND in (query_SBND, key_SBND)])


_squares = compiled_on_cuda("head_squares")(_sum_squares)


@compiled_on_cuda("head_norms")
def _norms(
    qkv_SBN3D: torch.Tensor,
    weights_W: Sequence[torch.Tensor],
    sums_2SB: torch.Tensor | None,
    width: int,
    eps: float,
) -> TileHeads:
    """Return normed q and k, and their rstds, float32 [2, S, B]."""
    if sums_2SB is None:  # this rank has all heads
        sums_2SB = _sum_squares(qkv_SBN3D)
    rstds_2SB = torch.rsqrt(sums_2SB / width + eps)
    query_SBND, key_SBND = (
        (x_SBND * rstd_SB11 * weight_W.view(x_SBND.shape[2:])).to(x_SBND.dtype)
        for x_SBND, rstd_SB11, weight_W in zip(
            qkv_SBN3D.chunk(3, -1)[:2], rstds_2SB[..., None, None], weights_W, strict=True
        )
    )
    return query_SBND, key_SBND, rstds_2SB


def _sum_along(
    qkv_SBN3D: torch.Tensor,
    gradients_SBND: Sequence[torch.Tensor],
    weights_W: Sequence[torch.Tensor],
    rstds_2SB: torch.Tensor,
) -> torch.Tensor:
    """Return local sums of weighted gradient times unit value, of q and k, float32 [2, S, B]."""
    pairs = _weighted_and_units(qkv_SBN3D, gradients_SBND, weights_W, rstds_2SB)
    return torch.stack([(own_SBND * unit_SBND).sum((2, 3)) for own_SBND, unit_SBND in pairs])


def _weighted_and_units(
    qkv_SBN3D: torch.Tensor,
    gradients_SBND: Sequence[torch.Tensor],
    weights_W: Sequence[torch.Tensor],
    rstds_2SB: torch.Tensor,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (gradient times weight, value times rstd) of q and of k, float32."""
    heads, rstds_2SB11 = qkv_SBN3D.chunk(3, -1)[:2], rstds_2SB[..., None, None]
    return [
        (gradient_SBND.float() * weight_W.view(x_SBND.shape[2:]), x_SBND * rstd_SB11)
        for gradient_SBND, x_SBND, weight_W, rstd_SB11 in zip(
            gradients_SBND[:2], heads, weights_W, rstds_2SB11, strict=True
        )
    ]


_along = compiled_on_cuda("head_norms_along")(_sum_along)


@compiled_on_cuda("head_norms_backward")
def _qkv_gradient(
    qkv_SBN3D: torch.Tensor,
    gradients_SBND: Sequence[torch.Tensor],
    weights_W: Sequence[torch.Tensor],
    rstds_2SB: torch.Tensor,
    along_2SB: torch.Tensor | None,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the joint q, k and v, and of both weights, [2, W]."""
    if along_2SB is None:  # this rank has all heads
        along_2SB = _sum_along(qkv_SBN3D, gradients_SBND, weights_W, rstds_2SB)
    # For y = w u with u = x * rstd: dx = rstd (w dy - u mean(w dy u)).
    along_2SB11 = (along_2SB / width)[..., None, None]
    pairs = _weighted_and_units(qkv_SBN3D, gradients_SBND, weights_W, rstds_2SB)
    of_heads = [
        (rstd_SB11 * (own_SBND - unit_SBND * along_SB11)).to(qkv_SBN3D.dtype)
        for (own_SBND, unit_SBND), rstd_SB11, along_SB11 in zip(
            pairs, rstds_2SB[..., None, None], along_2SB11, strict=True
        )
    ]
    of_weights = [
        (gradient_SBND * unit_SBND).sum((0, 1)).flatten()
        for gradient_SBND, (_, unit_SBND) in zip(gradients_SBND[:2], pairs, strict=True)
    ]
    of_qkv_SBN3D = torch.cat((*of_heads, gradients_SBND[2]), -1)
    return of_qkv_SBN3D, torch.stack(of_weights).to(weights_W[0].dtype)


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
        weights_W = (query_weight_W, key_weight_W)
        sums_2SB = None
        if group is not None:
            sums_2SB = _squares(qkv_SBN3D)
            dist.all_reduce(sums_2SB, group=group)
        query_SBND, key_SBND, rstds_2SB = _norms(qkv_SBN3D, weights_W, sums_2SB, width, eps)
        ctx.save_for_backward(qkv_SBN3D, *weights_W, rstds_2SB)
        ctx.width, ctx.group = width, group
        return query_SBND, key_SBND, qkv_SBN3D.chunk(3, -1)[2]

    @staticmethod
    def backward(ctx, *gradients):
        qkv_SBN3D, *weights_W, rstds_2SB = ctx.saved_tensors
        parts = [gradient.contiguous() for gradient in gradients]
        of_heads = (qkv_SBN3D, parts, weights_W, rstds_2SB)
        along_2SB = None
        if ctx.group is not None:
            along_2SB = _along(*of_heads)
            dist.all_reduce(along_2SB, group=ctx.group)
        of_qkv_SBN3D, of_weights_2W = _qkv_gradient(*of_heads, along_2SB, ctx.width)
        return of_qkv_SBN3D, *of_weights_2W, None, None, None
