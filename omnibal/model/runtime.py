"""Step options of a trainer, which `omnibal lint` reads from a launch line."""

from typing import Literal

from omnibal.base.frozen import Count, Frozen
from omnibal.model.fp8 import TRAINED_FP8, Fp8

RecomputedModule = Literal["moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]
"""Modules that backward can recompute, as in Megatron-core. Attention's kernel keeps little."""


class RuntimeOptions(Frozen):
    """Overlap and per-step options of a trainer."""

    overlap_gradients: bool = True
    """Whether gradient reduction overlaps the last backward (`--overlap-grad-reduce`)."""
    overlap_weights: bool = True
    """Whether weight gathers overlap the first forward (`--overlap-param-gather`)."""
    overlap_tensor: bool = False
    """Whether tensor-parallel exchange overlaps products (`--tp-comm-overlap`, user buffers)."""
    ring_tokens: Count | None = None
    """Tokens per sample under ring attention (`--cp-comm-type p2p`), None for gather or heads."""
    sample_tokens: Count | None = None
    """Tokens per sample if equal (synthetic data of a launch line), None for any length."""
    bf16_gradients: bool = False
    """Whether gradients are summed and reduced in bf16 (`--grad-reduce-in-bf16`)."""
    scatters_weights_precision: bool = False
    """Whether sharded gradients are scattered in the weights' precision (FSDP, ZeRO-3 default)."""
    averages_gradients: bool = False
    """Whether gradients are scaled in a separate pass (no `--ddp-average-in-collective`)."""
    fused_loss: bool = True
    """Whether one kernel computes loss and logits' gradient (`--cross-entropy-loss-fusion`)."""
    fused_routing: bool = False
    """Whether fused kernels permute tokens for experts (`--moe-permute-fusion`)."""
    transformer_engine: bool = False
    """Whether language layers use Transformer Engine, which allows FP8 products."""
    accumulates_in_products: bool = False
    """Whether its products accumulate weight gradients (`omnibal.cost.transformer_engine`)."""
    recomputed: tuple[RecomputedModule, ...] = ()
    """Modules of language layers that backward recomputes (`--recompute-modules`)."""
    fp8: Fp8 = TRAINED_FP8
    """FP8 options, used if the precision is fp8."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an accumulated and reduced gradient."""
        return 2 if self.bf16_gradients else 4


OWN_RUNTIME = RuntimeOptions()
"""Options of this project's trainer."""
