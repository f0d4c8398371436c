"""Residual adds and norms between the blocks of a layer: one kernel a direction for each.

Shapes: S sequence, B batch (tiles), H hidden size, R = S * B rows, M moments of a row (rstd; for
LayerNorm mean too).
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from megatron.vlm.model.fused.operation import operation
from megatron.vlm.model.fused.sizes import require, require_shapes


@dataclass(frozen=True, slots=True)
class Branch:
    """What a block adds to its residual: scale * tile scale * (output + bias)."""

    output_SBH: torch.Tensor
    bias_H: torch.Tensor | None = None
    scale_H: torch.Tensor | None = None
    """Layer scale (Touvron et al. 2021, arXiv 2103.17239); None leaves it out."""
    tile_scale_B: torch.Tensor | None = None
    """Drop path's scale of each tile, which has no gradient; None leaves it out."""


@dataclass(frozen=True, slots=True)
class NormWeights:
    """Weights of a LayerNorm, or without a bias of an RMSNorm, over the last axis."""

    weight_H: torch.Tensor
    bias_H: torch.Tensor | None
    eps: float


def norm(hidden_SBH: torch.Tensor, weights: NormWeights) -> torch.Tensor:
    """Normalise every position."""
    return norm_and_residual(hidden_SBH, weights)[0]


def norm_and_residual(
    hidden_SBH: torch.Tensor, weights: NormWeights
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise every position, and hand on what was normalised as the residual.

    Backward adds the residual's gradient in the same kernel, if the residual is taken from here.
    """
    if hidden_SBH.is_cuda:
        return NormAndResidual.apply(hidden_SBH, *_parts(weights))
    return eager_norm(hidden_SBH, weights), hidden_SBH


def add(residual_SBH: torch.Tensor, branch: Branch) -> torch.Tensor:
    """Return the residual with the branch added."""
    is_plain = branch.bias_H is None and branch.scale_H is None and branch.tile_scale_B is None
    if is_plain or not residual_SBH.is_cuda:
        return eager_add(residual_SBH, branch)
    return ScaledAdd.apply(residual_SBH, *_parts(branch))


def add_and_norm(
    residual_SBH: torch.Tensor, branch: Branch, weights: NormWeights
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of the residual with the branch added, and the sum as the next residual."""
    if residual_SBH.is_cuda:
        return ScaledAddAndNorm.apply(residual_SBH, *_parts(branch), *_parts(weights))
    summed_SBH = eager_add(residual_SBH, branch)
    return eager_norm(summed_SBH, weights), summed_SBH


def eager_norm(hidden_SBH: torch.Tensor, weights: NormWeights) -> torch.Tensor:
    """`norm` in plain torch, for every device."""
    shape = weights.weight_H.shape
    if weights.bias_H is None:
        return F.rms_norm(hidden_SBH, shape, weights.weight_H, weights.eps)
    return F.layer_norm(hidden_SBH, shape, weights.weight_H, weights.bias_H, weights.eps)


def eager_add(residual_SBH: torch.Tensor, branch: Branch) -> torch.Tensor:
    """`add` in plain torch, for every device."""
    output_SBH = branch.output_SBH
    if branch.bias_H is not None:
        output_SBH = output_SBH + branch.bias_H
    if branch.tile_scale_B is not None:
        output_SBH = output_SBH * branch.tile_scale_B.unsqueeze(-1)
    if branch.scale_H is None:
        return residual_SBH + output_SBH
    return torch.addcmul(residual_SBH, output_SBH, branch.scale_H)


def _parts(group: Branch | NormWeights) -> tuple[Any, ...]:
    """Fields in order, as autograd's functions take no groups."""
    if isinstance(group, Branch):
        return group.output_SBH, group.bias_H, group.scale_H, group.tile_scale_B
    return group.weight_H, group.bias_H, group.eps


def _kernels() -> ModuleType:
    from megatron.vlm.model.kernels import residual  # needs Triton, which CUDA's torch brings

    return residual


def _require_norm(
    operation: str,
    hidden_SBH: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor | None = None,
) -> None:
    """Refuse a norm's weights that do not go with what is normed."""
    shape = hidden_SBH.shape
    require_shapes(
        operation,
        hidden_SBH=(hidden_SBH, shape),
        weight_H=(weight_H, shape[-1:]),
        bias_H=(bias_H, shape[-1:]),
    )


def _require_branch(
    operation: str, argument: str, residual_SBH: torch.Tensor, *branch: torch.Tensor | None
) -> None:
    """Refuse parts of a branch that do not go with an argument, the residual or its gradient."""
    shape = list(residual_SBH.shape)
    require(operation, argument, shape, len(shape) == 3, "have three axes")
    require_shapes(operation, **{argument: (residual_SBH, shape)})
    output_SBH, bias_H, scale_H, tile_scale_B = branch
    require_shapes(
        operation,
        output_SBH=(output_SBH, shape),
        bias_H=(bias_H, shape[-1:]),
        scale_H=(scale_H, shape[-1:]),
        tile_scale_B=(tile_scale_B, shape[1:2]),
    )


def _write_norm(outputs, hidden_SBH, weight_H, bias_H, eps):
    unused = (hidden_SBH, *outputs)
    _kernels().add_norm(hidden_SBH, (None,) * 4, (weight_H, bias_H), eps, unused)
    return outputs


@operation("norm", _write_norm)
def _norm(
    hidden_SBH: torch.Tensor, weight_H: torch.Tensor, bias_H: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    _require_norm("norm", hidden_SBH, weight_H, bias_H)
    return _new_normed(hidden_SBH, bias_H)


def _new_normed(
    hidden_SBH: torch.Tensor, bias_H: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    moments = 1 if bias_H is None else 2
    shape_MSB = (moments, *hidden_SBH.shape[:-1])
    return torch.empty_like(hidden_SBH), hidden_SBH.new_empty(shape_MSB, dtype=torch.float32)


def _write_scaled_add(summed_SBH, residual_SBH, *branch):
    unused = (summed_SBH, summed_SBH, summed_SBH)
    _kernels().add_norm(residual_SBH, branch, (None, None), 0.0, unused)
    return summed_SBH


@operation("scaled_add", _write_scaled_add)
def _scaled_add(
    residual_SBH: torch.Tensor,
    output_SBH: torch.Tensor,
    bias_H: torch.Tensor | None,
    scale_H: torch.Tensor | None,
    tile_scale_B: torch.Tensor | None,
) -> torch.Tensor:
    branch = (output_SBH, bias_H, scale_H, tile_scale_B)
    _require_branch("scaled_add", "residual_SBH", residual_SBH, *branch)
    return torch.empty_like(residual_SBH)


def _write_scaled_add_norm(outputs, residual_SBH, *branch_and_norm):
    *branch, weight_H, norm_bias_H, eps = branch_and_norm
    normed_SBH, summed_SBH, moments_MSB = outputs
    written = (summed_SBH, normed_SBH, moments_MSB)
    _kernels().add_norm(residual_SBH, branch, (weight_H, norm_bias_H), eps, written)
    return outputs


@operation("scaled_add_norm", _write_scaled_add_norm)
def _scaled_add_norm(
    residual_SBH: torch.Tensor,
    output_SBH: torch.Tensor,
    bias_H: torch.Tensor | None,
    scale_H: torch.Tensor | None,
    tile_scale_B: torch.Tensor | None,
    weight_H: torch.Tensor,
    norm_bias_H: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    operation, branch = "scaled_add_norm", (output_SBH, bias_H, scale_H, tile_scale_B)
    _require_branch(operation, "residual_SBH", residual_SBH, *branch)
    require_shapes(
        operation,
        weight_H=(weight_H, residual_SBH.shape[-1:]),
        norm_bias_H=(norm_bias_H, residual_SBH.shape[-1:]),
    )
    normed_SBH, moments_MSB = _new_normed(residual_SBH, norm_bias_H)
    return normed_SBH, torch.empty_like(residual_SBH), moments_MSB


def _write_norm_backward(outputs, *arguments):
    result_SBH, of_weights_MH = outputs
    return result_SBH, _kernels().norm_backward(*arguments, result_SBH).to(of_weights_MH.dtype)


@operation("norm_backward", _write_norm_backward)
def _norm_backward(
    gradient_SBH: torch.Tensor,
    passed_SBH: torch.Tensor | None,
    hidden_SBH: torch.Tensor,
    moments_MSB: torch.Tensor,
    weight_H: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    operation, shape, moments = "norm_backward", hidden_SBH.shape, len(moments_MSB)
    _require_norm(operation, hidden_SBH, weight_H)
    require(
        operation, "moments_MSB", list(moments_MSB.shape), moments in (1, 2), "begin with 1 or 2"
    )
    require_shapes(
        operation,
        gradient_SBH=(gradient_SBH, shape),
        passed_SBH=(passed_SBH, shape),
        moments_MSB=(moments_MSB, (moments, *shape[:-1])),
    )
    return torch.empty_like(hidden_SBH), weight_H.new_empty((moments, len(weight_H)))


def _write_scaled_add_backward(outputs, gradient_SBH, *branch):
    result_SBH, of_branch_2H = outputs
    sums_2H = _kernels().scaled_add_backward(gradient_SBH, branch, result_SBH)
    return result_SBH, sums_2H.to(of_branch_2H.dtype)


@operation("scaled_add_backward", _write_scaled_add_backward)
def _scaled_add_backward(
    gradient_SBH: torch.Tensor,
    output_SBH: torch.Tensor | None,
    bias_H: torch.Tensor | None,
    scale_H: torch.Tensor | None,
    tile_scale_B: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    operation, branch = "scaled_add_backward", (output_SBH, bias_H, scale_H, tile_scale_B)
    _require_branch(operation, "gradient_SBH", gradient_SBH, *branch)
    is_there = scale_H is None or output_SBH is not None
    require(operation, "output_SBH", None, is_there, "be given, as scale_H is")
    is_scaled = scale_H is not None or tile_scale_B is not None
    shape = gradient_SBH.shape if is_scaled else (0,)
    return gradient_SBH.new_empty(shape), gradient_SBH.new_empty((2, gradient_SBH.shape[-1]))


class NormAndResidual(torch.autograd.Function):
    """`norm_and_residual` by kernels, for any device that runs them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SBH: torch.Tensor,
        weight_H: torch.Tensor,
        bias_H: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        contiguous_SBH = hidden_SBH.contiguous()
        normed_SBH, moments_MSB = _norm(contiguous_SBH, weight_H, bias_H, eps)
        ctx.save_for_backward(contiguous_SBH, moments_MSB, weight_H)
        return normed_SBH, hidden_SBH

    @staticmethod
    def backward(ctx, gradient_SBH, passed_SBH):
        gradients = _gradients_of_norm(gradient_SBH, passed_SBH, *ctx.saved_tensors)
        return *gradients, None


class ScaledAdd(torch.autograd.Function):
    """`add` by kernels, for any device that runs them."""

    @staticmethod
    def forward(ctx: Any, residual_SBH: torch.Tensor, *branch: torch.Tensor | None) -> torch.Tensor:
        parts = [_contiguous(tensor) for tensor in branch]
        ctx.save_for_backward(*_kept_of_branch(parts))
        return _scaled_add(residual_SBH.contiguous(), *parts)

    @staticmethod
    def backward(ctx, gradient_SBH):
        return _gradients_of_add(gradient_SBH.contiguous(), ctx.saved_tensors)


class ScaledAddAndNorm(torch.autograd.Function):
    """`add_and_norm` by kernels, for any device that runs them."""

    @staticmethod
    def forward(
        ctx: Any, residual_SBH: torch.Tensor, *branch_and_norm: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        *branch, weight_H, norm_bias_H, eps = branch_and_norm
        branch = [_contiguous(tensor) for tensor in branch]
        normed_SBH, summed_SBH, moments_MSB = _scaled_add_norm(
            residual_SBH.contiguous(), *branch, weight_H, norm_bias_H, eps
        )
        ctx.save_for_backward(*_kept_of_branch(branch), summed_SBH, moments_MSB, weight_H)
        return normed_SBH, summed_SBH

    @staticmethod
    def backward(ctx, gradient_SBH, passed_SBH):
        *branch, summed_SBH, moments_MSB, weight_H = ctx.saved_tensors
        total_SBH, *of_norm = _gradients_of_norm(
            gradient_SBH, passed_SBH, summed_SBH, moments_MSB, weight_H
        )
        return *_gradients_of_add(total_SBH, branch), *of_norm, None


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _kept_of_branch(branch: Any) -> tuple[torch.Tensor | None, ...]:
    """A branch's output is needed again for the gradient of its scale only."""
    output_SBH, bias_H, scale_H, tile_scale_B = branch
    return (None if scale_H is None else output_SBH), bias_H, scale_H, tile_scale_B


def _gradients_of_norm(gradient_SBH, passed_SBH, hidden_SBH, moments_MSB, weight_H):
    """Gradients of what was normalised, with what is passed, and of the norm's weights."""
    if gradient_SBH is None:  # nothing that carries loss went through the norm
        return passed_SBH, None, None
    result_SBH, weights_MH = _norm_backward(
        gradient_SBH.contiguous(), _contiguous(passed_SBH), hidden_SBH, moments_MSB, weight_H
    )
    return result_SBH, weights_MH[0], weights_MH[1] if len(weights_MH) == 2 else None


def _gradients_of_add(total_SBH, branch):
    """Gradients of residual, output, bias, scale and, never, the tiles' scales."""
    _, bias_H, scale_H, tile_scale_B = branch
    if total_SBH is None or (bias_H is None and scale_H is None and tile_scale_B is None):
        return total_SBH, total_SBH, None, None, None
    scaled_SBH, (of_bias_H, of_scale_H) = _scaled_add_backward(total_SBH, *branch)
    return (
        total_SBH,
        scaled_SBH if scaled_SBH.numel() else total_SBH,
        None if bias_H is None else of_bias_H,
        None if scale_H is None else of_scale_H,
        None,
    )
