"""FP8 GEMMs of Transformer Engine under Megatron-core.

Linears of language layers quantise inputs, weights and output gradients, with a scale per tensor or
block. Attention, router, embedding, head, encoders and optimizer run as in bf16.
"""

from typing import Literal

from omnibal.base.frozen import Frozen

Fp8Recipe = Literal["tensorwise", "delayed", "blockwise", "mxfp8"]  # --fp8-recipe
# Required multiple of an FP8 GEMM's sizes: `get_fp8_align_size` of Megatron-core's fp8_utils.py,
# `assert_dim_for_fp8_exec` of Transformer Engine's utils.py.
FP8_MULTIPLE = 16


class Fp8(Frozen):
    """FP8 options that change costs; defaults are this project's trainer's."""

    # Unlike delayed scaling, current scaling has no history in checkpoints and no exchange among
    # ranks, which may run different numbers of micro-batches.
    recipe: Fp8Recipe = "tensorwise"
    keeps_bf16_weights: bool = True  # in addition to FP8 copies; not with --fp8-param-gather

    @property
    def cast_bytes(self) -> int:
        """Bytes moved to quantise an element of 2 bytes."""
        # Read, written row-wise and column-wise: Hopper's GEMMs need both layouts
        # (`is_non_tn_fp8_gemm_supported`). A tensor's scale needs another read.
        return 2 + 1 + 1 + (2 if self.recipe == "tensorwise" else 0)

    @property
    def cast_kernels(self) -> int:
        return 2 if self.recipe == "tensorwise" else 1


TRAINED_FP8 = Fp8()  # this project's trainer
FP8_FORMAT = "hybrid"  # its --fp8-format: E4M3 forward, E5M2 gradients
