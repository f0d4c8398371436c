"""Matrix products in FP8, as Transformer Engine has them under Megatron-core.

Weights, activations between layers, master weights and optimizer state are those of bf16. The
linears of the language model's layers quantise their inputs, weights and output gradients, one
scale a tensor or a block, and multiply in FP8; attention, router, embedding, head and encoders are
in bf16.
"""

from typing import Literal

from omnibal.base.frozen import Frozen

Fp8Recipe = Literal["tensorwise", "delayed", "blockwise", "mxfp8"]
"""How scales are found, by the names of Megatron-core's `fp8_recipe`."""
FP8_MULTIPLE = 16
"""What sizes and tokens of an FP8 product must be multiples of (`get_fp8_align_size` in
Megatron-core's `fp8_utils.py`; `assert_dim_for_fp8_exec` in Transformer Engine's `utils.py`)."""


class Fp8(Frozen):
    """Choices that change what FP8 costs; as they stand, those of this project's trainer.

    Scales of the tensor at hand need no history in checkpoints, and no exchange among ranks with
    different numbers of micro-batches, as delayed scaling does.
    """

    recipe: Fp8Recipe = "tensorwise"
    keeps_bf16_weights: bool = True
    """Whether weights are kept in bf16 beside their FP8 copies; `--fp8-param-gather` does not."""

    @property
    def cast_bytes(self) -> int:
        """Bytes read and written to quantise an element of 2 bytes: read, written in FP8 by rows,
        and by columns, since Hopper's products take both operands along the summed dimension
        (`is_non_tn_fp8_gemm_supported`) and scales of blocks differ by direction; read once more
        before where the scale is of the tensor itself."""
        return 2 + 1 + 1 + (2 if self.recipe == "tensorwise" else 0)

    @property
    def cast_kernels(self) -> int:
        """Kernels that quantise a tensor."""
        return 2 if self.recipe == "tensorwise" else 1


TRAINED_FP8 = Fp8()
"""As this project's trainer has it, and plans say it."""
FP8_FORMAT = "hybrid"
"""Format of this project's trainer: E4M3 forward, E5M2 for gradients (`fp8` of Megatron-core)."""
