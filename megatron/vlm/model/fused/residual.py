"""Residual adds and norms between the blocks of a layer.

Shapes: S sequence, B batch (tiles), H hidden size, M moments per position (rstd, LayerNorm's mean).
"""

from typing import Any, NamedTuple

import torch

from megatron.vlm.model.fused.compiled import compiled_on_cuda, prepare_gradients


class Branch(NamedTuple):
    """Branch added to a residual: `scale * tile_scale * (output + bias)`."""

    output_SBH: torch.Tensor
    bias_H: torch.Tensor | None = None
    scale_H: torch.Tensor | None = None  # layer scale (Touvron et al. 2021, arXiv 2103.17239)
    tile_scale_B: torch.Tensor | None = None  # drop path's scale per tile, without gradient


class NormWeights(NamedTuple):
    """Weights of a LayerNorm, or of an RMSNorm if without bias, over the last axis."""

    weight_H: torch.Tensor
    bias_H: torch.Tensor | None
    eps: float


def add_branch(residual_SBH: torch.Tensor, branch: Branch) -> torch.Tensor:
    if branch.bias_H is None and branch.scale_H is None and branch.tile_scale_B is None:
        return residual_SBH + branch.output_SBH
    return ScaledAdd.apply(residual_SBH, *branch)


def _normalize(
    hidden_SBH: torch.Tensor, weight_H: torch.Tensor, bias_H: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm and its moments, float32 [M, S, B]."""
    unit_SBH = hidden_SBH.float()
    means = []
    if bias_H is not None:
        mean_SB = unit_SBH.mean(-1)
        means.append(mean_SB)
        unit_SBH = unit_SBH - mean_SB.unsqueeze(-1)
    rstd_SB = torch.rsqrt(unit_SBH.square().mean(-1) + eps)
    normed_SBH = unit_SBH * rstd_SB.unsqueeze(-1) * weight_H
    if bias_H is not None:
        normed_SBH = normed_SBH + bias_H
    return normed_SBH.to(hidden_SBH.dtype), torch.stack((rstd_SB, *means))


_norm = compiled_on_cuda("norm")(_normalize)


def _sum_branch(
    residual_SBH: torch.Tensor,
    output_SBH: torch.Tensor,
    bias_H: torch.Tensor | None,
    scale_H: torch.Tensor | None,
    tile_scale_B: torch.Tensor | None,
) -> torch.Tensor:
    added_SBH = output_SBH.float()
    if bias_H is not None:
        added_SBH = added_SBH + bias_H
    if scale_H is not None:
        added_SBH = added_SBH * scale_H
    if tile_scale_B is not None:
        added_SBH = added_SBH * tile_scale_B.unsqueeze(-1)
    return (residual_SBH + added_SBH).to(residual_SBH.dtype)


_scaled_add = compiled_on_cuda("scaled_add")(_sum_branch)


@compiled_on_cuda("scaled_add_norm")
def _scaled_add_norm(
    residual_SBH: torch.Tensor, *branch_and_norm: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the norm of the sum, the sum and the norm's moments."""
    *branch, weight_H, norm_bias_H, eps = branch_and_norm
    summed_SBH = _sum_branch(residual_SBH, *branch)
    normed_SBH, moments_MSB = _normalize(summed_SBH, weight_H, norm_bias_H, eps)
    return normed_SBH, summed_SBH, moments_MSB


@compiled_on_cuda("norm_backward")
def _norm_backward(
    gradient_SBH: torch.Tensor,
    passed_SBH: torch.Tensor | None,
    hidden_SBH: torch.Tensor,
    moments_MSB: torch.Tensor,
    weight_H: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the norm's input, plus `passed_SBH`, and of its weights, [M, H]."""
    gradient_SBH = gradient_SBH.float()
    rstd_SB1, *means = moments_MSB.unsqueeze(-1)
    unit_SBH = hidden_SBH.float()
    if means:
        unit_SBH = unit_SBH - means[0]
    unit_SBH = unit_SBH * rstd_SB1
    own_SBH = gradient_SBH * weight_H
    # For y = w u with u = (x - mean) rstd: dx = rstd (w dy - u mean(w dy u) - mean(w dy)).
    result_SBH = own_SBH - unit_SBH * (own_SBH * unit_SBH).mean(-1, keepdim=True)
    of_weights = [gradient_SBH * unit_SBH]
    if means:
        result_SBH = result_SBH - own_SBH.mean(-1, keepdim=True)
        of_weights.append(gradient_SBH)
    result_SBH = result_SBH * rstd_SB1
    if passed_SBH is not None:
        result_SBH = result_SBH + passed_SBH
    of_weights_MH = torch.stack([of_weight.flatten(0, -2).sum(0) for of_weight in of_weights])
    return result_SBH.to(hidden_SBH.dtype), of_weights_MH.to(weight_H.dtype)


@compiled_on_cuda("scaled_add_backward")
def _scaled_add_backward(
    gradient_SBH: torch.Tensor,
    output_SBH: torch.Tensor | None,
    bias_H: torch.Tensor | None,
    *scales: torch.Tensor | None,
) -> list[torch.Tensor | None]:
    """Return gradients of a branch's output (None if unscaled), bias and scale, if there."""
    # Without a layer scale no gradient depends on the output, which is not kept then.
    any_SBH = gradient_SBH if output_SBH is None else output_SBH
    pull_back = prepare_gradients(_sum_branch, (gradient_SBH, any_SBH, bias_H, *scales))
    _, of_output, of_bias, of_scale, _ = pull_back(gradient_SBH)
    is_scaled = any(scale is not None for scale in scales)
    found = (of_output if is_scaled else None, of_bias, of_scale)
    return [None if own is None else own.to(gradient_SBH.dtype) for own in found]


class NormAndResidual(torch.autograd.Function):
    """Return the norm and the input as residual, so that backward fuses both gradients."""

    @staticmethod
    def forward(ctx, hidden_SBH, weight_H, bias_H, eps):
        ctx.set_materialize_grads(False)  # an output that no loss uses has no gradient
        contiguous_SBH = hidden_SBH.contiguous()
        normed_SBH, moments_MSB = _norm(contiguous_SBH, weight_H, bias_H, eps)
        ctx.save_for_backward(contiguous_SBH, moments_MSB, weight_H)
        return normed_SBH, hidden_SBH

    @staticmethod
    def backward(ctx, gradient_SBH, passed_SBH):
        gradients = _gradients_of_norm(gradient_SBH, passed_SBH, *ctx.saved_tensors)
        return *gradients, None


class ScaledAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual_SBH, *branch):
        parts = [_contiguous(tensor) for tensor in branch]
        ctx.save_for_backward(*_kept_of_branch(*parts))
        return _scaled_add(residual_SBH.contiguous(), *parts)

    @staticmethod
    def backward(ctx, gradient_SBH):
        return _gradients_of_add(gradient_SBH.contiguous(), ctx.saved_tensors)


class ScaledAddAndNorm(torch.autograd.Function):
    """Add a branch; return the norm and the new residual."""

    @staticmethod
    def forward(ctx, residual_SBH, *branch_and_norm):
        ctx.set_materialize_grads(False)
        *branch, weight_H, norm_bias_H, eps = branch_and_norm
        branch = [_contiguous(tensor) for tensor in branch]
        normed_SBH, summed_SBH, moments_MSB = _scaled_add_norm(
            residual_SBH.contiguous(), *branch, weight_H, norm_bias_H, eps
        )
        ctx.save_for_backward(*_kept_of_branch(*branch), summed_SBH, moments_MSB, weight_H)
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


def _kept_of_branch(output_SBH, bias_H, scale_H, tile_scale_B):
    # Only the gradient of the scale needs the output.
    return (None if scale_H is None else output_SBH), bias_H, scale_H, tile_scale_B


def _gradients_of_norm(gradient_SBH, passed_SBH, hidden_SBH, moments_MSB, weight_H):
    """Return the gradients of the norm's input, with `passed` added, and of its weights."""
    if gradient_SBH is None:  # no loss went through the norm
        return passed_SBH, None, None
    result_SBH, weights_MH = _norm_backward(
        gradient_SBH.contiguous(), _contiguous(passed_SBH), hidden_SBH, moments_MSB, weight_H
    )
    return result_SBH, weights_MH[0], weights_MH[1] if len(weights_MH) == 2 else None


def _gradients_of_add(total_SBH, branch):
    """Return the gradients of residual, output, bias and scale, and None for tile scales."""
    _, bias_H, scale_H, tile_scale_B = branch
    if total_SBH is None or (bias_H is None and scale_H is None and tile_scale_B is None):
        return total_SBH, total_SBH, None, None, None
    of_output_SBH, *of_vectors = _scaled_add_backward(total_SBH, *branch)
    return total_SBH, total_SBH if of_output_SBH is None else of_output_SBH, *of_vectors, None
