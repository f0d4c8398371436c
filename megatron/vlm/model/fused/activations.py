"""SwiGLU, and GELU with the bias before it: one kernel a direction, which keeps its input only.

Shapes: R rows (any number of leading axes), F feed-forward width of this rank, I = 2F gate and
value as the first product gives them.
"""

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from megatron.vlm.model.fused.operation import operation
from megatron.vlm.model.fused.sizes import require, require_shapes


def swiglu(inner_RI: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * value (Shazeer 2020, arXiv 2002.05202): [..., 2F] to [..., F]."""
    if inner_RI.is_cuda:
        return Swiglu.apply(inner_RI)
    return eager_swiglu(inner_RI)


def bias_gelu(inner_RF: torch.Tensor, bias_F: torch.Tensor) -> torch.Tensor:
    """Return gelu(inner + bias), exactly, by the error function (Hendrycks and Gimpel 2016)."""
    if inner_RF.is_cuda:
        return BiasGelu.apply(inner_RF, bias_F)
    return eager_bias_gelu(inner_RF, bias_F)


def eager_swiglu(inner_RI: torch.Tensor) -> torch.Tensor:
    """`swiglu` in plain torch, for every device."""
    gate_RF, value_RF = inner_RI.chunk(2, -1)
    return F.silu(gate_RF) * value_RF


def eager_bias_gelu(inner_RF: torch.Tensor, bias_F: torch.Tensor) -> torch.Tensor:
    """`bias_gelu` in plain torch, for every device."""
    return F.gelu(inner_RF + bias_F)


def _kernels() -> ModuleType:
    from megatron.vlm.model.kernels import activations  # needs Triton, which CUDA's torch brings

    return activations


def _write_swiglu(output_RF, inner_RI):
    _kernels().swiglu(inner_RI, output_RF)
    return output_RF


@operation("swiglu", _write_swiglu)
def _swiglu(inner_RI: torch.Tensor) -> torch.Tensor:
    _require_gate_and_value("swiglu", inner_RI)
    return inner_RI.new_empty((*inner_RI.shape[:-1], inner_RI.shape[-1] // 2))


def _require_gate_and_value(operation: str, inner_RI: torch.Tensor) -> None:
    shape = list(inner_RI.shape)
    require_shapes(operation, inner_RI=(inner_RI, shape))
    is_even = bool(shape) and shape[-1] % 2 == 0
    require(operation, "inner_RI", shape, is_even, "have an even last axis, of gate and value")


def _write_swiglu_backward(result_RI, gradient_RF, inner_RI):
    _kernels().swiglu_backward(gradient_RF, inner_RI, result_RI)
    return result_RI


@operation("swiglu_backward", _write_swiglu_backward)
def _swiglu_backward(gradient_RF: torch.Tensor, inner_RI: torch.Tensor) -> torch.Tensor:
    _require_gate_and_value("swiglu_backward", inner_RI)
    shape = (*inner_RI.shape[:-1], inner_RI.shape[-1] // 2)
    require_shapes("swiglu_backward", gradient_RF=(gradient_RF, shape))
    return torch.empty_like(inner_RI)


def _write_bias_gelu(output_RF, inner_RF, bias_F):
    _kernels().bias_gelu(inner_RF, bias_F, output_RF)
    return output_RF


@operation("bias_gelu", _write_bias_gelu)
def _bias_gelu(inner_RF: torch.Tensor, bias_F: torch.Tensor) -> torch.Tensor:
    shape = inner_RF.shape
    require_shapes("bias_gelu", inner_RF=(inner_RF, shape), bias_F=(bias_F, shape[-1:]))
    return torch.empty_like(inner_RF)


def _write_bias_gelu_backward(outputs, gradient_RF, inner_RF, bias_F):
    result_RF, of_bias_F = outputs
    sums_F = _kernels().bias_gelu_backward(gradient_RF, inner_RF, bias_F, result_RF)
    return result_RF, sums_F.to(of_bias_F.dtype)


@operation("bias_gelu_backward", _write_bias_gelu_backward)
def _bias_gelu_backward(
    gradient_RF: torch.Tensor, inner_RF: torch.Tensor, bias_F: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = inner_RF.shape
    require_shapes(
        "bias_gelu_backward",
        gradient_RF=(gradient_RF, shape),
        inner_RF=(inner_RF, shape),
        bias_F=(bias_F, shape[-1:]),
    )
    return torch.empty_like(inner_RF), torch.empty_like(bias_F)


class Swiglu(torch.autograd.Function):
    """`swiglu` by kernels, for any device that runs them."""

    @staticmethod
    def forward(ctx: Any, inner_RI: torch.Tensor) -> torch.Tensor:
        inner_RI = inner_RI.contiguous()
        ctx.save_for_backward(inner_RI)
        return _swiglu(inner_RI)

    @staticmethod
    def backward(ctx, gradient_RF):
        return _swiglu_backward(gradient_RF.contiguous(), *ctx.saved_tensors)


class BiasGelu(torch.autograd.Function):
    """`bias_gelu` by kernels, for any device that runs them."""

    @staticmethod
    def forward(ctx: Any, inner_RF: torch.Tensor, bias_F: torch.Tensor) -> torch.Tensor:
        inner_RF = inner_RF.contiguous()
        ctx.save_for_backward(inner_RF, bias_F)
        return _bias_gelu(inner_RF, bias_F)

    @staticmethod
    def backward(ctx, gradient_RF):
        return _bias_gelu_backward(gradient_RF.contiguous(), *ctx.saved_tensors)
