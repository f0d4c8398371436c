"""Types of 8-bit tensors, of which there are none."""


class QuantizedTensor:
    """Never made."""
