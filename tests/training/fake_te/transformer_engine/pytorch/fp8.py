"""Names that Megatron-core asks for; nothing here computes in 8 bits."""

from contextlib import nullcontext

fp8_autocast = nullcontext


class FP8GlobalStateManager:
    """Whether 8-bit computation is on: never."""

    @staticmethod
    def is_fp8_enabled():
        return False
