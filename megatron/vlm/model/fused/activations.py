"""SwiGLU and GELU of input + bias; only the input and the bias are saved for backward.

Shapes: R rows (all leading axes), F feed-forward width of this rank, I = 2F (gate, then value).
"""

from enum import Enum

import torch
import torch.nn.functional as F

from megatron.vlm.model.fused.compiled import compiled_on_cuda

_QUICK_SLOPE = 1.702


class Gelu(Enum):
    """Forms of GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""

    EXACT = "exact"
    TANH = "tanh"
    QUICK = "quick"  # x * sigmoid(1.702 x)


def swiglu(inner_RI: torch.Tensor, bias_I: torch.Tensor | None = None) -> torch.Tensor:
    """Return silu(gate) * value (arXiv 2002.05202) of inner + bias: [..., 2F] to [..., F]."""
    return _Activation.apply(inner_RI, bias_I, None)


def bias_gelu(
    inner_RF: torch.Tensor, bias_F: torch.Tensor, form: Gelu = Gelu.EXACT
) -> torch.Tensor:
    """Return GELU of inner + bias in this form, [..., F]."""
    return _Activation.apply(inner_RF, bias_F, form)


def _sum_of_rows(gradient_RF: torch.Tensor, bias_F: torch.Tensor) -> torch.Tensor:
    return gradient_RF.flatten(0, -2).sum(0).to(bias_F.dtype)


@compiled_on_cuda("swiglu")
def _swiglu(inner_RI: torch.Tensor, bias_I: torch.Tensor | None) -> torch.Tensor:
    biased_RI = inner_RI if bias_I is None else inner_RI + bias_I
    gate_RF, value_RF = biased_RI.chunk(2, -1)
    return F.silu(gate_RF) * value_RF


@compiled_on_cuda("bias_gelu")
def _bias_gelu(inner_RF: torch.Tensor, bias_F: torch.Tensor, form: Gelu) -> torch.Tensor:
    biased_RF = inner_RF + bias_F
    if form == Gelu.QUICK:
        return biased_RF * torch.sigmoid(_QUICK_SLOPE * biased_RF)
    return F.gelu(biased_RF, approximate="tanh" if form == Gelu.TANH else "none")


@compiled_on_cuda("swiglu_backward")
def _swiglu_backward(
    gradient_RF: torch.Tensor, inner_RI: torch.Tensor, bias_I: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    # In float32, so that the bias's gradient is a float32 sum over rows, rounded once.
    gradient_RF = gradient_RF.float()
    biased_RI = inner_RI.float() if bias_I is None else inner_RI.float() + bias_I
    gate_RF, value_RF = biased_RI.chunk(2, -1)
    of_gate_RF = torch.ops.aten.silu_backward(gradient_RF * value_RF, gate_RF)
    gradient_RI = torch.cat((of_gate_RF, gradient_RF * F.silu(gate_RF)), -1)
    of_bias_I = None if bias_I is None else _sum_of_rows(gradient_RI, bias_I)
    return gradient_RI.to(inner_RI.dtype), of_bias_I


@compiled_on_cuda("bias_gelu_backward")
def _bias_gelu_backward(
    gradient_RF: torch.Tensor, inner_RF: torch.Tensor, bias_F: torch.Tensor, form: Gelu
) -> tuple[torch.Tensor, torch.Tensor]:
    gradient_RF = gradient_RF.float()
    biased_RF = inner_RF.float() + bias_F
    if form == Gelu.QUICK:
        share_RF = torch.sigmoid(_QUICK_SLOPE * biased_RF)
        gradient_RF = gradient_RF * share_RF * (1 + _QUICK_SLOPE * biased_RF * (1 - share_RF))
    else:
        approximate = "tanh" if form == Gelu.TANH else "none"
        backward = torch.ops.aten.gelu_backward
        gradient_RF = backward(gradient_RF, biased_RF, approximate=approximate)
    return gradient_RF.to(inner_RF.dtype), _sum_of_rows(gradient_RF, bias_F)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inner_RI, bias_I, form):  # form: None for SwiGLU
        inner_RI = inner_RI.contiguous()
        ctx.save_for_backward(inner_RI, bias_I)
        ctx.form = form
        return _swiglu(inner_RI, bias_I) if form is None else _bias_gelu(inner_RI, bias_I, form)

    @staticmethod
    def backward(ctx, gradient_RF):
        given = gradient_RF.contiguous(), *ctx.saved_tensors
        if ctx.form is None:
            return *_swiglu_backward(*given), None
        return *_bias_gelu_backward(*given, ctx.form), None
