"""Launch lines of Megatron trainers: what cannot start, and what the rest will cost."""
