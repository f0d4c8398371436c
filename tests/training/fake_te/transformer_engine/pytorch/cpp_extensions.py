"""Names that Megatron-core asks for; nothing here computes in 8 bits."""

cast_to_fp8 = None
