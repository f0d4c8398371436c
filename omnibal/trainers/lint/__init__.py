"""Launch lines of Megatron trainers: errors at start, and predicted cost."""
