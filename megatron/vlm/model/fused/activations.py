"""SwiGLU and GELU, with the bias before it: one kernel a direction, which keeps its input only.

Shapes: R rows (any number of leading axes), F feed-forward width of this rank, I = 2F gate and
value as the first product gives them.
"""

from enum import Enum
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from megatron.vlm.model.fused.operation import operation
from megatron.vlm.model.fused.sizes import require, require_shapes


class Gelu(Enum):
    """Forms of GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415): the slopes `a` and `b` of
    x * sigmoid(a x + b x^3), and zeros for the exact one, by the error function."""

    EXACT = (0.0, 0.0)
    TANH = (1.5957691216057308, 0.07135481627159736)
    """sqrt(8 / pi) and 0.044715 of it: 0.5 * (1 + tanh(y)) is sigmoid(2 y)."""
    QUICK = (1.702, 0.0)

    @property
    def slopes(self) -> tuple[float, float]:
        """Both slopes, as operations take them."""
        return self.value


def swiglu(inner_RI: torch.Tensor, bias_I: torch.Tensor | None = None) -> torch.Tensor:
    """Return silu(gate) * value (Shazeer 2020, arXiv 2002.05202): [..., 2F] to [..., F].

    Args:
        bias_I: to be added to gate and value first.
    """
    if not inner_RI.is_cuda:
        return eager_swiglu(inner_RI, bias_I)
    return Swiglu.apply(inner_RI) if bias_I is None else BiasSwiglu.apply(inner_RI, bias_I)


def bias_gelu(
    inner_RF: torch.Tensor, bias_F: torch.Tensor, form: Gelu = Gelu.EXACT
) -> torch.Tensor:
    """Return gelu(inner + bias)."""
    if inner_RF.is_cuda:
        return BiasGelu.apply(inner_RF, bias_F, *form.slopes)
    return eager_bias_gelu(inner_RF, bias_F, *form.slopes)


def eager_swiglu(inner_RI: torch.Tensor, bias_I: torch.Tensor | None = None) -> torch.Tensor:
    """`swiglu` in plain torch, for every device."""
    biased_RI = inner_RI if bias_I is None else inner_RI + bias_I
    gate_RF, value_RF = biased_RI.chunk(2, -1)
    return F.silu(gate_RF) * value_RF


def eager_bias_gelu(
    inner_RF: torch.Tensor, bias_F: torch.Tensor, linear: float = 0.0, cubic: float = 0.0
) -> torch.Tensor:
    """`bias_gelu` in plain torch, for every device, of a form's slopes."""
    biased_RF = inner_RF + bias_F
    if not linear:
        return F.gelu(biased_RF)
    if cubic:
        return F.gelu(biased_RF, approximate="tanh")
    return biased_RF * torch.sigmoid(linear * biased_RF)


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


def _require_gate_and_value(
    operation: str, inner_RI: torch.Tensor, bias_I: torch.Tensor | None = None
) -> None:
    shape = list(inner_RI.shape)
    require_shapes(operation, inner_RI=(inner_RI, shape), bias_I=(bias_I, shape[-1:]))
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


def _write_bias_swiglu(output_RF, inner_RI, bias_I):
    _kernels().bias_swiglu(inner_RI, bias_I, output_RF)
    return output_RF


@operation("bias_swiglu", _write_bias_swiglu)
def _bias_swiglu(inner_RI: torch.Tensor, bias_I: torch.Tensor) -> torch.Tensor:
    _require_gate_and_value("bias_swiglu", inner_RI, bias_I)
    return inner_RI.new_empty((*inner_RI.shape[:-1], inner_RI.shape[-1] // 2))


def _write_bias_swiglu_backward(outputs, gradient_RF, inner_RI, bias_I):
    result_RI, of_bias_I = outputs
    sums_I = _kernels().bias_swiglu_backward(gradient_RF, inner_RI, bias_I, result_RI)
    return result_RI, sums_I.to(of_bias_I.dtype)


@operation("bias_swiglu_backward", _write_bias_swiglu_backward)
def _bias_swiglu_backward(
    gradient_RF: torch.Tensor, inner_RI: torch.Tensor, bias_I: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    _require_gate_and_value("bias_swiglu_backward", inner_RI, bias_I)
    shape = (*inner_RI.shape[:-1], inner_RI.shape[-1] // 2)
    require_shapes("bias_swiglu_backward", gradient_RF=(gradient_RF, shape))
    return torch.empty_like(inner_RI), torch.empty_like(bias_I)


def _write_bias_gelu(output_RF, inner_RF, bias_F, linear, cubic):
    _kernels().bias_gelu(inner_RF, bias_F, (linear, cubic), output_RF)
    return output_RF


@operation("bias_gelu", _write_bias_gelu)
def _bias_gelu(
    inner_RF: torch.Tensor, bias_F: torch.Tensor, linear: float, cubic: float
) -> torch.Tensor:
    shape = inner_RF.shape
    require_shapes("bias_gelu", inner_RF=(inner_RF, shape), bias_F=(bias_F, shape[-1:]))
    return torch.empty_like(inner_RF)


def _write_bias_gelu_backward(outputs, gradient_RF, inner_RF, bias_F, linear, cubic):
    result_RF, of_bias_F = outputs
    slopes = (linear, cubic)
    sums_F = _kernels().bias_gelu_backward(gradient_RF, inner_RF, bias_F, slopes, result_RF)
    return result_RF, sums_F.to(of_bias_F.dtype)


@operation("bias_gelu_backward", _write_bias_gelu_backward)
def _bias_gelu_backward(
    gradient_RF: torch.Tensor,
    inner_RF: torch.Tensor,
    bias_F: torch.Tensor,
    linear: float,
    cubic: float,
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
    """`swiglu` without a bias by kernels, for any device that runs them."""

    @staticmethod
    def forward(ctx: Any, inner_RI: torch.Tensor) -> torch.Tensor:
        inner_RI = inner_RI.contiguous()
        ctx.save_for_backward(inner_RI)
        return _swiglu(inner_RI)

    @staticmethod
    def backward(ctx, gradient_RF):
        return _swiglu_backward(gradient_RF.contiguous(), *ctx.saved_tensors)


class BiasSwiglu(torch.autograd.Function):
    """`swiglu` with a bias by kernels, for any device that runs them."""

    @staticmethod
    def forward(ctx: Any, inner_RI: torch.Tensor, bias_I: torch.Tensor) -> torch.Tensor:
        inner_RI = inner_RI.contiguous()
        ctx.save_for_backward(inner_RI, bias_I)
        return _bias_swiglu(inner_RI, bias_I)

    @staticmethod
    def backward(ctx, gradient_RF):
        return _bias_swiglu_backward(gradient_RF.contiguous(), *ctx.saved_tensors)


class BiasGelu(torch.autograd.Function):
    """`bias_gelu` by kernels, of a form's slopes, for any device that runs them."""

    @staticmethod
    def forward(
        ctx: Any,
        inner_RF: torch.Tensor,
        bias_F: torch.Tensor,
        linear: float = 0.0,
        cubic: float = 0.0,
    ) -> torch.Tensor:
        inner_RF = inner_RF.contiguous()
        ctx.save_for_backward(inner_RF, bias_F)
        ctx.slopes = linear, cubic
        return _bias_gelu(inner_RF, bias_F, linear, cubic)

    @staticmethod
    def backward(ctx, gradient_RF):
        gradient_RF = gradient_RF.contiguous()
        gradients = _bias_gelu_backward(gradient_RF, *ctx.saved_tensors, *ctx.slopes)
        return *gradients, None, None
