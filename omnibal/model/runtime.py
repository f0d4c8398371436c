"""How a trainer runs a step: which of its exchanges it hides, and what else decides a step's time.

`omnibal lint` reads them of a launch line; this project's trainer runs as `OWN_RUNTIME` says.
"""

from omnibal.base.frozen import Count, Frozen
from omnibal.model.fp8 import TRAINED_FP8, Fp8


class RuntimeOptions(Frozen):
    """What a trainer hides behind computation, and what it does once a step."""

    overlap_gradients: bool = True
    """Whether gradients are reduced bucket by bucket during the last backward of the step
    (`--overlap-grad-reduce`), or after it."""
    overlap_weights: bool = True
    """Whether new weights are gathered bucket by bucket during the first forward
    (`--overlap-param-gather`), or before the step ends."""
    overlap_tensor: bool = False
    """Whether the exchange of tensor-parallel ranks runs beside the product that it feeds or
    follows (`--tp-comm-overlap`, Transformer Engine's user buffers)."""
    ring_tokens: Count | None = None
    """Tokens of the samples during whose attention keys and values go round the ranks that share
    them (`--cp-comm-type p2p`); None where they are gathered before, or heads exchanged."""
    sample_tokens: Count | None = None
    """Tokens of every sample that a kernel of attention is given, where all are alike as a launch
    line's made-up ones are; None for samples of any length."""
    bf16_gradients: bool = False
    """Whether gradients are summed and reduced in bf16 (`--grad-reduce-in-bf16`), not in fp32."""
    scatters_weights_precision: bool = False
    """Whether gradients of weights that ranks divide are reduce-scattered in the weights' precision
    before they are summed over micro-batches (FSDP's and ZeRO-3's usual setting), instead of in the
    precision of that sum."""
    averages_gradients: bool = False
    """Whether gradients are divided by the number of data-parallel ranks in a pass of their own
    before they are reduced, as Megatron does without `--ddp-average-in-collective`."""
    fused_loss: bool = True
    """Whether one kernel makes the loss and the gradient of the logits, in their own precision
    (`--cross-entropy-loss-fusion`), instead of several in fp32."""
    fused_routing: bool = False
    """Whether fused kernels permute tokens for their experts (`--moe-permute-fusion`)."""
    transformer_engine: bool = False
    """Whether language layers are Megatron-core's of Transformer Engine, whose products can be in
    FP8."""
    accumulates_in_products: bool = False
    """Whether its products add gradients of weights to what is there, so that memory differs
    (`omnibal.cost.transformer_engine`)."""
    fp8: Fp8 = TRAINED_FP8
    """How products are in FP8, where the precision is."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient as it is summed over micro-batches and reduced."""
        return 2 if self.bf16_gradients else 4


OWN_RUNTIME = RuntimeOptions()
"""How this project's trainer runs."""
