"""Counts of the second part of a backward: products that give weight gradients, and what waits.

A schedule may put that part off (`omnibal.pipeline.schedules`). The trainer does so with trained
linears of layers, projectors and head (`megatron/vlm/model/deferred_weights.py`); all else is of
the first part: embeddings, routers, adapters, and every collective.
"""

import numpy as np

from omnibal.cost.counts import Counts, Device, Product
from omnibal.model.units import HEAD, LANGUAGE, UnitKind


def late_products(kind: UnitKind, counts: Counts, *, trained: bool) -> tuple[Product, ...]:
    """Products of a unit whose weight gradients are of the second part."""
    if kind.is_embed or not trained:
        return ()
    return tuple(product for product in counts.products if not product.is_fp32)


def late_parameters(late: tuple[Product, ...]) -> float:
    """Weights of these products."""
    return sum(one.inner * one.outer * one.groups for one in late)


def late_bytes(
    device: Device, kind: UnitKind, counts: Counts, late: tuple[Product, ...]
) -> np.ndarray:
    """Bytes that wait for the second part, inputs of linears and gradients of their outputs, and
    those that one product works with besides. [3, features]

    Inputs are there since the forward, or since it was recomputed. Under sequence parallelism what
    stands between blocks waits divided, and is gathered again for its product.
    """
    nothing = 0 * counts.moved_bytes
    inputs, gradients, working = nothing, nothing, nothing
    given: set[str] = set()
    for product in late:
        rows = product.rows * device.element_bytes
        of_input, of_output = rows * product.inner, rows * product.outer
        gathered = nothing
        if _has_divided_side(device, kind, counts, product):
            gathered = (1 - device.whole) * rows * _width(device, counts)
            if product.inner == _width(device, counts):
                of_input = of_input - gathered
            else:
                of_output = of_output - gathered
        if not product.given or product.given not in given:  # several linears may take one tensor
            inputs = inputs + of_input
        given.add(product.given)
        gradients = gradients + of_output
        room = gathered.copy()
        room[0] += late_parameters((product,)) * device.element_bytes
        working = np.maximum(working, room)
    return np.stack([inputs, gradients, working])


def _width(device: Device, counts: Counts) -> float:
    """Width of the hidden state, of which a layer's input is."""
    return float(counts.boundary_bytes.max()) / device.element_bytes / device.whole


def _has_divided_side(device: Device, kind: UnitKind, counts: Counts, product: Product) -> bool:
    """Whether the product's input or output is a hidden state that ranks divide between blocks."""
    if device.whole == 1 or kind.tower != LANGUAGE or kind.name == HEAD:
        return False
    is_whole = product.groups == 1 and product.rows.max() >= 1
    return is_whole and _width(device, counts) in (product.inner, product.outer)
