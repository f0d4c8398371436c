"""The model: stages, tensor-parallel sharding, initial weights."""
