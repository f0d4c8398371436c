"""The type of 8-bit tensors, of which there are none."""


class Float8Tensor:
    """Never made."""
