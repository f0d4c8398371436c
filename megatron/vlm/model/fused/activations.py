"""SwiGLU and GELU of input + bias; only the input and the bias are saved for backward.

Shapes: R rows (all leading axes), F feed-forward width of this rank, I = 2F (gate, then value).
"""

import torch
import torch.nn.functional as F

from megatron.vlm.model.fused.compiled import differentiable
from omnibal.model.encoders import Gelu

_QUICK_SLOPE = 1.702


@differentiable("swiglu")
def swiglu(inner_RI: torch.Tensor, bias_I: torch.Tensor | None = None) -> torch.Tensor:
    """Return silu(gate) * value (arXiv 2002.05202) of inner + bias: [..., 2F] to [..., F]."""
    biased_RI = inner_RI if bias_I is None else inner_RI + bias_I
    gate_RF, value_RF = biased_RI.chunk(2, -1)
    return F.silu(gate_RF) * value_RF


@differentiable("bias_gelu")
def bias_gelu(inner_RF: torch.Tensor, bias_F: torch.Tensor, form: Gelu = "gelu") -> torch.Tensor:
    """Return GELU of inner + bias in this form, [..., F]."""
    biased_RF = inner_RF + bias_F
    if form == "quick_gelu":
        return biased_RF * torch.sigmoid(_QUICK_SLOPE * biased_RF)
    return F.gelu(biased_RF, approximate="tanh" if form == "gelu_tanh" else "none")
