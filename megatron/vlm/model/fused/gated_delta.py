"""Element-wise operations around the gated delta rule, fused on CUDA.

Shapes: T packed tokens, N heads, D head size, C channels, W convolution width. `borders` are the
first tokens of samples, then the end, int32 [samples + 1].
"""

import torch
import torch.nn.functional as F

from megatron.vlm.model.fused.compiled import compiled_on_cuda
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


def _shift(rows_TC: torch.Tensor, by: int, places_T: torch.Tensor) -> torch.Tensor:
    """Return the row `by` tokens before each token, or 0 before its sample, float32 [T, C]."""
    shifted_TC = F.pad(rows_TC, (0, 0, by, 0))[: len(rows_TC)].float()
    return shifted_TC * (places_T >= by).unsqueeze(1)


def _convolve(
    rows_TC: torch.Tensor, weight_C1W: torch.Tensor, places_T: torch.Tensor
) -> torch.Tensor:
    """Return the causal convolution within samples before SiLU, float32 [T, C]."""
    taps_WC = weight_C1W[:, 0].t().float().flip(0)  # the token's, then earlier tokens' weights
    sums_TC = rows_TC.float() * taps_WC[0]
    for by in range(1, len(taps_WC)):
        sums_TC = sums_TC + _shift(rows_TC, by, places_T) * taps_WC[by]
    return sums_TC


@compiled_on_cuda("convolution")
def _convolve_and_activate(
    rows_TC: torch.Tensor, weight_C1W: torch.Tensor, borders: torch.Tensor
) -> torch.Tensor:
    places_T, _ = locate_tokens(borders, len(rows_TC))
    return F.silu(_convolve(rows_TC, weight_C1W, places_T)).to(rows_TC.dtype)


@compiled_on_cuda("convolution_backward")
def _convolution_backward(
    gradient_TC: torch.Tensor,
    rows_TC: torch.Tensor,
    weight_C1W: torch.Tensor,
    borders: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    places_T, _ = locate_tokens(borders, len(rows_TC))
    sums_TC = _convolve(rows_TC, weight_C1W, places_T)
    of_sums_TC = gradient_TC.float() * _silu_slope(sums_TC)
    taps_WC = weight_C1W[:, 0].t().float().flip(0)
    of_rows_TC, of_taps = of_sums_TC * taps_WC[0], [(of_sums_TC * rows_TC).sum(0)]
    for by in range(1, len(taps_WC)):
        of_taps.append((of_sums_TC * _shift(rows_TC, by, places_T)).sum(0))
        own_TC = of_sums_TC * (places_T >= by).unsqueeze(1)
        of_rows_TC = of_rows_TC + F.pad(own_TC, (0, 0, 0, by))[by:] * taps_WC[by]
    of_weight_C1W = torch.stack(of_taps).flip(0).t().unsqueeze(1)
    return of_rows_TC.to(rows_TC.dtype), of_weight_C1W.to(weight_C1W.dtype)


def _silu_slope(values: torch.Tensor) -> torch.Tensor:
    """Return the derivative of SiLU."""
    share = values.sigmoid()
    return share * (1 + values * (1 - share))


class PackedConvolution(torch.autograd.Function):
    """Return SiLU of a causal convolution per channel within samples, [T, C]; keeps its input."""

    @staticmethod
    def forward(ctx, rows_TC, weight_C1W, borders):
        ctx.save_for_backward(rows_TC, weight_C1W, borders)
        return _convolve_and_activate(rows_TC, weight_C1W, borders)

    @staticmethod
    def backward(ctx, *gradients):
        return *_convolution_backward(gradients[0].contiguous(), *ctx.saved_tensors), None


@compiled_on_cuda("decay_and_rate")
def _decay_and_rate(
    decay_TN: torch.Tensor, logit_TN: torch.Tensor, log_rate_N: torch.Tensor, bias_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    steps_TN = F.softplus(decay_TN.float() + bias_N.float())
    return -log_rate_N.float().exp() * steps_TN, logit_TN.float().sigmoid().to(logit_TN.dtype)


@compiled_on_cuda("decay_and_rate_backward")
def _decay_and_rate_backward(
    of_decay_TN: torch.Tensor,
    of_beta_TN: torch.Tensor,
    decay_TN: torch.Tensor,
    logit_TN: torch.Tensor,
    log_rate_N: torch.Tensor,
    bias_N: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    rates_N, inputs_TN = log_rate_N.float().exp(), decay_TN.float() + bias_N.float()
    of_steps_TN = -of_decay_TN * rates_N
    of_inputs_TN = of_steps_TN * inputs_TN.sigmoid()
    of_log_rate_N = (of_steps_TN * F.softplus(inputs_TN)).sum(0)
    beta_TN = logit_TN.float().sigmoid()
    of_logit_TN = of_beta_TN.float() * beta_TN * (1 - beta_TN)
    return (
        of_inputs_TN.to(decay_TN.dtype),
        of_logit_TN.to(logit_TN.dtype),
        of_log_rate_N.to(log_rate_N.dtype),
        of_inputs_TN.sum(0).to(bias_N.dtype),
    )


class DecayAndRate(torch.autograd.Function):
    """Log decays -exp(log_rate) softplus(decay + bias), float32; beta = sigmoid(logit)."""

    @staticmethod
    def forward(ctx, decay_TN, logit_TN, log_rate_N, bias_N):
        inputs = (decay_TN, logit_TN, log_rate_N, bias_N)
        ctx.save_for_backward(*inputs)
        return _decay_and_rate(*inputs)

    @staticmethod
    def backward(ctx, *gradients):
        return _decay_and_rate_backward(*gradients, *ctx.saved_tensors)


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
    of_gate = gradient * units * weight_D * _silu_slope(gate)
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
