"""InternViT's norms of q and k, each over all heads of all ranks together, for both at once.

They take q, k and v as their product gives them, interleaved by head, and backward gives the
gradient of that product. Between ranks, one sum a position goes for q and one for k, in one message
a direction.

Shapes: S sequence, B batch (tiles), N heads of this rank, D head size, W = N * D.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.vlm.model.fused.operation import operation
from megatron.vlm.model.fused.sizes import require, require_shapes

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k and v, [S, B, N, D]."""


def split_with_norms(
    qkv_SBN3D: torch.Tensor,
    weights_W: Sequence[torch.Tensor],
    width: int,
    eps: float,
    group: dist.ProcessGroup | None,
) -> Heads:
    """Take q, k and v apart, with q and k divided by their root mean square over all heads.

    Args:
        qkv_SBN3D: [S, B, N, 3 D]; a head's q, k and v.
        weights_W: of q's norm and of k's.
        width: of all ranks' heads together, without padding; padded heads are zero.
        group: ranks that the heads are divided over; None where this one has all.

    Returns:
        q, k and v; v is a view of what was given.
    """
    if qkv_SBN3D.is_cuda:
        return HeadNorms.apply(qkv_SBN3D, *weights_W, width, eps, group)
    query_SBND, key_SBND, value_SBND = qkv_SBN3D.chunk(3, -1)
    heads = (query_SBND, key_SBND)
    if group is None:
        query_SBND, key_SBND = eager_norms(heads, weights_W, eps)
    else:
        query_SBND, key_SBND = DividedNorms.apply(*heads, *weights_W, width, eps, group)
    return query_SBND, key_SBND, value_SBND


def eager_norms(
    heads_SBND: Sequence[torch.Tensor], weights_W: Sequence[torch.Tensor], eps: float
) -> list[torch.Tensor]:
    """Norms of some tensors over all heads in plain torch, where one rank has all of them."""
    return [
        F.rms_norm(x_SBND.flatten(2), weight_W.shape, weight_W, eps).view(x_SBND.shape)
        for x_SBND, weight_W in zip(heads_SBND, weights_W, strict=True)
    ]


class DividedNorms(torch.autograd.Function):
    """RMSNorms of q and k over heads of several ranks in plain torch; computes in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        query_SBND: torch.Tensor,
        key_SBND: torch.Tensor,
        query_weight_W: torch.Tensor,
        key_weight_W: torch.Tensor,
        width: int,
        eps: float,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, ...]:
        heads, weights_ND = (
            (query_SBND, key_SBND),
            [weight_W.view(query_SBND.shape[2:]) for weight_W in (query_weight_W, key_weight_W)],
        )
        squares_2SB = torch.stack([x_SBND.float().square().sum((2, 3)) for x_SBND in heads])
        dist.all_reduce(squares_2SB, group=group)
        rstds_2SB11 = torch.rsqrt(squares_2SB / width + eps)[..., None, None]
        ctx.save_for_backward(*heads, *weights_ND, rstds_2SB11)
        ctx.width, ctx.group = width, group
        return tuple(
            (x * rstd * weight).to(x.dtype)
            for x, rstd, weight in zip(heads, rstds_2SB11, weights_ND, strict=True)
        )

    @staticmethod
    def backward(ctx, *gradients):
        *heads, query_weight_ND, key_weight_ND, rstds_2SB11 = ctx.saved_tensors
        weights_ND = (query_weight_ND, key_weight_ND)
        units = [x * rstd for x, rstd in zip(heads, rstds_2SB11, strict=True)]
        owns = [grad.float() * weight for grad, weight in zip(gradients, weights_ND, strict=True)]
        pairs = list(zip(owns, units, strict=True))
        along_2SB = torch.stack([(own * unit).sum((2, 3)) for own, unit in pairs])
        dist.all_reduce(along_2SB, group=ctx.group)
        along_2SB11 = (along_2SB / ctx.width)[..., None, None]
        of_heads = [
            (rstd * (own - unit * along)).to(unit_of.dtype)
            for (own, unit), rstd, along, unit_of in zip(
                pairs, rstds_2SB11, along_2SB11, heads, strict=True
            )
        ]
        of_weights = [
            (grad * unit).sum((0, 1)).flatten().to(weight.dtype)
            for grad, unit, weight in zip(gradients, units, weights_ND, strict=True)
        ]
        return *of_heads, *of_weights, None, None, None


def _kernels() -> ModuleType:
    from megatron.vlm.model.kernels import head_norms  # needs Triton, which CUDA's torch brings

    return head_norms


def _write_squares(sums_2SB, qkv_SBN3D):
    _kernels().squares(qkv_SBN3D, sums_2SB)
    return sums_2SB


@operation("head_squares", _write_squares)
def _squares(qkv_SBN3D: torch.Tensor) -> torch.Tensor:
    _require_heads("head_squares", qkv_SBN3D)
    return _new_moments(qkv_SBN3D)


def _new_moments(qkv_SBN3D: torch.Tensor) -> torch.Tensor:
    return qkv_SBN3D.new_empty((2, *qkv_SBN3D.shape[:2]), dtype=torch.float32)


def _require_heads(
    operation: str,
    qkv_SBN3D: torch.Tensor,
    weights_W: Sequence[torch.Tensor] | None = None,
    gradients_SBND: Sequence[torch.Tensor] | None = None,
    **moments_2SB: torch.Tensor | None,
) -> None:
    """Refuse tensors that do not go with the product of q, k and v; those left out are not used."""
    shape = list(qkv_SBN3D.shape)
    is_of_heads = len(shape) == 4 and shape[3] % 3 == 0
    require(operation, "qkv_SBN3D", shape, is_of_heads, "be [S, B, N, 3 D]")
    require_shapes(operation, qkv_SBN3D=(qkv_SBN3D, shape))
    *rows, heads, three_sizes = shape
    size = three_sizes // 3
    for argument, tensors, count, own in (
        ("weights_W", weights_W, 2, (heads * size,)),
        ("gradients_SBND", gradients_SBND, 3, (*rows, heads, size)),
    ):
        if tensors is not None:
            given = f"{len(tensors)} tensors"
            require(operation, argument, given, len(tensors) == count, f"be {count} tensors")
            named = {f"{argument}[{i}]": (tensor, own) for i, tensor in enumerate(tensors)}
            require_shapes(operation, **named)
    require_shapes(operation, **{name: (one, (2, *rows)) for name, one in moments_2SB.items()})


def _require_width(operation: str, width: int) -> None:
    require(operation, "width", width, width > 0, "be more than 0")


def _write_norms(outputs, *arguments):
    _kernels().norms(*arguments, outputs)
    return outputs


@operation("head_norms", _write_norms)
def _norms(
    qkv_SBN3D: torch.Tensor,
    weights_W: Sequence[torch.Tensor],
    sums_2SB: torch.Tensor | None,
    width: int,
    eps: float,
) -> Heads:
    _require_heads("head_norms", qkv_SBN3D, weights_W, sums_2SB=sums_2SB)
    _require_width("head_norms", width)
    *rows, three_sizes = qkv_SBN3D.shape
    query_SBND, key_SBND = (qkv_SBN3D.new_empty((*rows, three_sizes // 3)) for _ in range(2))
    return query_SBND, key_SBND, _new_moments(qkv_SBN3D)


def _write_along(sums_2SB, *arguments):
    _kernels().along(*arguments, sums_2SB)
    return sums_2SB


@operation("head_norms_along", _write_along)
def _along(
    gradients_SBND: Sequence[torch.Tensor],
    qkv_SBN3D: torch.Tensor,
    weights_W: Sequence[torch.Tensor],
    rstds_2SB: torch.Tensor,
) -> torch.Tensor:
    operation, tensors = "head_norms_along", (qkv_SBN3D, weights_W, gradients_SBND)
    _require_heads(operation, *tensors, rstds_2SB=rstds_2SB)
    return torch.empty_like(rstds_2SB)


def _write_backward(outputs, *arguments):
    result_SBN3D, of_weights_2W = outputs
    return result_SBN3D, _kernels().backward(*arguments, result_SBN3D).to(of_weights_2W.dtype)


@operation("head_norms_backward", _write_backward)
def _backward(
    gradients_SBND: Sequence[torch.Tensor],
    qkv_SBN3D: torch.Tensor,
    weights_W: Sequence[torch.Tensor],
    rstds_2SB: torch.Tensor,
    along_2SB: torch.Tensor | None,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    operation, tensors = "head_norms_backward", (qkv_SBN3D, weights_W, gradients_SBND)
    _require_heads(operation, *tensors, rstds_2SB=rstds_2SB, along_2SB=along_2SB)
    _require_width(operation, width)
    own_width = len(weights_W[0])
    return torch.empty_like(qkv_SBN3D), weights_W[0].new_empty((2, own_width))


class HeadNorms(torch.autograd.Function):
    """`split_with_norms` by kernels, for any device that runs them."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv_SBN3D: torch.Tensor,
        query_weight_W: torch.Tensor,
        key_weight_W: torch.Tensor,
        width: int,
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> Heads:
        qkv_SBN3D = qkv_SBN3D.contiguous()
        weights_W = [query_weight_W, key_weight_W]
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
        gradients_SBND = [gradient.contiguous() for gradient in gradients]
        along_2SB = None
        if ctx.group is not None:
            along_2SB = _along(gradients_SBND, qkv_SBN3D, weights_W, rstds_2SB)
            dist.all_reduce(along_2SB, group=ctx.group)
        arguments = (gradients_SBND, qkv_SBN3D, weights_W, rstds_2SB, along_2SB, ctx.width)
        of_qkv_SBN3D, of_weights_2W = _backward(*arguments)
        return of_qkv_SBN3D, *of_weights_2W, None, None, None
