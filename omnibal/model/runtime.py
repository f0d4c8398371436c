"""Step options of a trainer, which `omnibal lint` reads from a launch line."""

from typing import Annotated, Literal

from pydantic import Field

from omnibal.base.frozen import Count, Frozen, Rate
from omnibal.model.fp8 import TRAINED_FP8, Fp8

Dispatcher = Literal["alltoall", "allgather", "flex"]
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
    replicates_optimizer: bool = False
    """Whether every rank holds all optimizer state (ZeRO-0), if weights are not sharded."""
    keeps_weights: bool = False
    """Whether gathered weights stay from forward to backward (ZeRO-2, `SHARD_GRAD_OP`)."""
    scatters_weights_precision: bool = False
    """Whether sharded gradients are scattered in the weights' precision (FSDP, ZeRO-3 default)."""
    averages_gradients: bool = False
    """Whether gradients are scaled in a separate pass (no `--ddp-average-in-collective`)."""
    kept_logits: Count = 1
    """16-bit copies of the logits that the loss keeps: themselves, or values in fp32."""
    fused_loss: bool = True
    """Whether one kernel computes loss and logits' gradient (`--cross-entropy-loss-fusion`)."""
    plain: bool = False
    """Whether activation and rotation are separate kernels that keep their inputs and outputs."""
    fragmentation: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Memory that torch's allocator keeps idle, as a share of the passes'."""
    keeps_gradients: bool = False
    """Whether gradients in the weights' precision stay beside the accumulated ones."""
    dispatcher: Dispatcher = "alltoall"
    """How tokens are sent to experts (`--moe-token-dispatcher-type`)."""
    padded_experts: bool = False
    """Whether experts have equally many rows, so that the host waits for no counts of tokens
    (`--moe-pad-expert-input-to-capacity`)."""
    overlap_experts: bool = False
    """Whether exchange of experts runs beside another micro-batch's computation
    (`--overlap-moe-expert-parallel-comm`)."""
    fused_routing: bool = False
    """Whether fused kernels permute tokens for experts (`--moe-permute-fusion`)."""
    transformer_engine: bool = False
    """Whether language layers use Transformer Engine, which allows FP8 products."""
    accumulates_in_products: bool = False
    """Whether its products accumulate weight gradients (`omnibal.cost.linears`)."""
    recomputed: tuple[RecomputedModule, ...] = ()
    """Modules of language layers that backward recomputes (`--recompute-modules`)."""
    host_slowdown: Rate = 1.0
    """Time of the host to launch a kernel, relative to the cluster's `host_us`."""
    ring_host_us: Annotated[float, Field(ge=0)] = 0.0
    """Time of the host per tensor-parallel exchange and rank, where pipelines span nodes."""
    bucket_bytes: Count | None = None
    """Bytes of a bucket of gradients whose ring's latency counts, None for large ones."""
    product_slowdown: Rate = 1.0  # time of products, relative to the device's tables
    elementwise_slowdown: Rate = 1.0  # bytes that element-wise kernels move, relative to fused ones
    attention_slowdown: Rate = 1.0  # time of attention, relative to the device's usual kernel
    fp8: Fp8 = TRAINED_FP8  # FP8 options, used if the precision is fp8

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an accumulated and reduced gradient."""
        return 2 if self.bf16_gradients else 4


OWN_RUNTIME = RuntimeOptions()  # options of this project's trainer
