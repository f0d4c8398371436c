"""Functions on tensors."""
