"""Element-wise operations around the gated delta rule, fused on CUDA.

Shapes: T packed tokens, N heads, D head size, C channels, W convolution width. `borders` are the
first tokens of samples, then the end, int32 [samples + 1].
"""

import torch
import torch.nn.functional as F

from megatron.vlm.model.fused.compiled import compiled_on_cuda, differentiable
from megatron.vlm.model.fused.rotary import locate_tokens

_LENGTH_EPS = 1e-6  # added to q's and k's squared length, as in flash-linear-attention


@compiled_on_cuda("normalize_heads")
def normalize_heads(heads_TND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return heads scaled to length 1, and the scales, float32 [T, N]."""
    scale_TN = torch.rsqrt(heads_TND.float().square().sum(-1) + _LENGTH_EPS)
    return (heads_TND.float() * scale_TN.unsqueeze(-1)).to(heads_TND.dtype), scale_TN


@compiled_on_cuda("normalize_heads_backward")
def normalize_heads_backward(
    gradient_TND: torch.Tensor, unit_TND: torch.Tensor, scale_TN: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the heads before `normalize_heads`."""
    gradient, unit = gradient_TND.float(), unit_TND.float()
    across = gradient - unit * (unit * gradient).sum(-1, keepdim=True)
    return (across * scale_TN.unsqueeze(-1)).to(gradient_TND.dtype)


@differentiable("convolution")
def convolve(
    rows_TC: torch.Tensor, weight_C1W: torch.Tensor, borders: torch.Tensor
) -> torch.Tensor:
    """Return SiLU of a causal convolution per channel within samples, [T, C]."""
    tokens, rows = len(rows_TC), rows_TC.float()
    places_T, _ = locate_tokens(borders, tokens)
    taps_WC = weight_C1W[:, 0].t().float().flip(0)  # the token's, then earlier tokens' weights
    sums_TC = rows * taps_WC[0]
    for by in range(1, len(taps_WC)):
        earlier_TC = F.pad(rows, (0, 0, by, 0))[:tokens] * (places_T >= by).unsqueeze(1)
        sums_TC = sums_TC + earlier_TC * taps_WC[by]
    return F.silu(sums_TC).to(rows_TC.dtype)


@differentiable("decay_and_rate")
def decay_and_rate(
    decay_TN: torch.Tensor, logit_TN: torch.Tensor, log_rate_N: torch.Tensor, bias_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log decays -exp(log_rate) softplus(decay + bias), float32; beta = sigmoid(logit)."""
    steps_TN = F.softplus(decay_TN.float() + bias_N.float())
    return -log_rate_N.float().exp() * steps_TN, logit_TN.float().sigmoid().to(logit_TN.dtype)


@compiled_on_cuda("gated_norm")
def _gated_norm(
    heads_TND: torch.Tensor, gate_TND: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return heads' RMSNorm times SiLU of the gate, and their 1 / RMS, float32 [T, N, 1]."""
    heads = heads_TND.float()
    rstds = torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps)
    gated = heads * rstds * weight_D * F.silu(gate_TND.float())
    return gated.to(heads_TND.dtype), rstds


@compiled_on_cuda("gated_norm_backward")
def _gated_norm_backward(
    gradient_TND: torch.Tensor,
    heads_TND: torch.Tensor,
    gate_TND: torch.Tensor,
    weight_D: torch.Tensor,
    rstds: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    gradient, gate = gradient_TND.float(), gate_TND.float()
    units = heads_TND.float() * rstds
    share = gate.sigmoid()
    of_gate = gradient * units * weight_D * (share * (1 + gate * (1 - share)))
    of_normed = gradient * F.silu(gate)
    own = of_normed * weight_D
    of_heads = rstds * (own - units * (own * units).mean(-1, keepdim=True))
    return (
        of_heads.to(heads_TND.dtype),
        of_gate.to(gate_TND.dtype),
        (of_normed * units).sum((0, 1)).to(weight_D.dtype),
    )


class GatedNorm(torch.autograd.Function):
    """Return RMSNorm of each head times SiLU of its gate, [T, N, D]."""

    @staticmethod
    def forward(ctx, heads_TND, gate_TND, weight_D, eps):
        gated_TND, rstds = _gated_norm(heads_TND, gate_TND, weight_D, eps)
        ctx.save_for_backward(heads_TND, gate_TND, weight_D, rstds)
        return gated_TND

    @staticmethod
    def backward(ctx, *gradients):
        return *_gated_norm_backward(gradients[0].contiguous(), *ctx.saved_tensors), None
