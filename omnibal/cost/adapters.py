"""What low-rank adapters add to a layer whose weights are frozen.

Beside every product y = x W stand x A and its product with B, added to y (Hu et al. 2021, LoRA,
arXiv 2106.09685, section 4.1). Their ranks are a few dozen, so that both products take as long as
their inputs and outputs are read and written. The layer keeps its products' inputs, which A's
gradient needs; gradients of W are not made.
"""

from dataclasses import replace

import numpy as np

from omnibal.cost.counts import Counts, Device

_KERNELS = 3
"""Of an adapter in forward: two products and a sum; in backward twice as many, as of all else."""


def with_adapters(counts: Counts, device: Device) -> Counts:
    """Counts of a layer with an adapter beside every product, without their few parameters."""
    size, nothing = device.element_bytes, 0 * counts.moved_bytes
    adapted = [product for product in counts.products if not product.is_fp32]
    # Forward reads x, and reads y twice and writes it twice: B's output, and the sum.
    forward = [product.rows * (product.inner + 4 * product.outer) * size for product in adapted]
    # Backward reads y's gradient for B's and for its input's, x for A's, and adds to x's gradient.
    backward = [
        product.rows * (2 * product.outer + 5 * product.inner) * size for product in adapted
    ]
    return replace(
        counts,
        moved_bytes=counts.moved_bytes + np.sum([nothing, *forward], axis=0),
        back_moved_bytes=counts.back_moved_bytes + np.sum([nothing, *backward], axis=0),
        kernels=counts.kernels + _KERNELS * len(adapted),
    )
