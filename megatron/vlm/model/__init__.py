"""The model: a stage, how tensor-parallel ranks divide it, its first weights."""
