"""FP8 matrix products of Transformer Engine under Megatron-core.

Linears of language layers quantise inputs, weights and output gradients with one scale per tensor
or block. Attention, router, embedding, head, encoders and the optimizer run as in bf16.
"""

from typing import Literal

from omnibal.base.frozen import Frozen

Fp8Recipe = Literal["tensorwise", "delayed", "blockwise", "mxfp8"]
"""Scaling recipes, named as Megatron-core's `fp8_recipe`."""
FP8_MULTIPLE = 16
"""Required multiple of sizes and tokens of an FP8 product (`get_fp8_align_size` of Megatron-core's
`fp8_utils.py`; `assert_dim_for_fp8_exec` of Transformer Engine's `utils.py`)."""


class Fp8(Frozen):
    """FP8 options that change costs; defaults are this project's trainer's.

    Current scaling needs no history in checkpoints and, unlike delayed scaling, no exchange among
    ranks with different numbers of micro-batches.
    """

    recipe: Fp8Recipe = "tensorwise"
    keeps_bf16_weights: bool = True
    """Whether bf16 weights are kept next to FP8 copies; not with `--fp8-param-gather`."""

    @property
    def cast_bytes(self) -> int:
        """Bytes to quantise a 2-byte element: read, write row-wise and column-wise.

        Hopper's products need both layouts (`is_non_tn_fp8_gemm_supported`). Per-tensor scales read
        once more.
        """
        return 2 + 1 + 1 + (2 if self.recipe == "tensorwise" else 0)

    @property
    def cast_kernels(self) -> int:
        """Kernels that quantise a tensor."""
        return 2 if self.recipe == "tensorwise" else 1


TRAINED_FP8 = Fp8()  # FP8 options of this project's trainer
FP8_FORMAT = "hybrid"
"""FP8 format of this project's trainer: E4M3 forward, E5M2 gradients (`fp8` of Megatron-core)."""
