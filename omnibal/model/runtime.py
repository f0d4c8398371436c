"""Step options of a trainer. `omnibal lint` reads them from a launch line."""

from typing import Annotated, Literal

from pydantic import Field

from omnibal.base.frozen import Count, Frozen, Rate
from omnibal.model.fp8 import TRAINED_FP8, Fp8

Dispatcher = Literal["alltoall", "allgather", "flex"]
RecomputedModule = Literal["moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]


class RuntimeOptions(Frozen):
    """Overlap, precision and kernels of a trainer's step; defaults are this project's."""

    overlap_gradients: bool = True  # last backward hides reduction: --overlap-grad-reduce
    overlap_weights: bool = True  # first forward hides weight gathers: --overlap-param-gather
    overlap_tensor: bool = False  # GEMMs hide tensor-parallel exchange: --tp-comm-overlap
    ring_tokens: Count | None = None  # per sample under --cp-comm-type p2p, else None
    sample_tokens: Count | None = None  # if all samples are equally long (synthetic), else None
    bf16_gradients: bool = False  # summed and reduced in bf16: --grad-reduce-in-bf16
    replicates_optimizer: bool = False  # with replicated weights: no --use-distributed-optimizer
    keeps_weights: bool = False  # gathered weights stay until backward: ZeRO-2, SHARD_GRAD_OP
    # Sharded gradients are scattered in the weights' precision, the default of FSDP and ZeRO-3.
    scatters_weights_precision: bool = False
    averages_gradients: bool = False  # scaled in a pass: no --ddp-average-in-collective
    kept_logits: Count = 1  # 16-bit copies that the loss keeps; an fp32 copy counts as two
    fused_loss: bool = True  # a kernel for loss and gradient: --cross-entropy-loss-fusion
    plain: bool = False  # activation and RoPE are unfused kernels with inputs and outputs kept
    # Memory that torch's allocator keeps idle / memory of the passes.
    fragmentation: Annotated[float, Field(ge=0, le=1)] = 0.1
    keeps_gradients: bool = False  # in the weights' precision too, not only accumulated
    dispatcher: Dispatcher = "alltoall"  # --moe-token-dispatcher-type
    # --moe-pad-expert-input-to-capacity: equal rows, so the host waits for no token counts.
    padded_experts: bool = False
    # Another micro-batch's computation hides it: --overlap-moe-expert-parallel-comm.
    overlap_experts: bool = False
    fused_routing: bool = False  # --moe-permute-fusion
    transformer_engine: bool = False  # of language layers; FP8 needs it
    accumulates_in_products: bool = False  # weight gradients: --gradient-accumulation-fusion
    recomputed: tuple[RecomputedModule, ...] = ()  # in language layers: --recompute-modules
    host_slowdown: Rate = 1.0  # kernel launch time / the cluster's `host_us`
    # Host time per tensor-parallel exchange and rank if a pipeline spans nodes.
    ring_host_us: Annotated[float, Field(ge=0)] = 0.0
    bucket_bytes: Count | None = None  # of gradients; None: so large that latency is negligible
    product_slowdown: Rate = 1.0  # GEMM time / the device's tables
    elementwise_slowdown: Rate = 1.0  # bytes moved by element-wise kernels / by fused kernels
    attention_slowdown: Rate = 1.0  # attention time / that of the device's usual kernel
    fp8: Fp8 = TRAINED_FP8  # used if the precision is fp8

    @property
    def gradient_bytes(self) -> int:
        """Bytes per accumulated and reduced gradient."""
        return 2 if self.bf16_gradients else 4


OWN_RUNTIME = RuntimeOptions()  # this project's trainer
