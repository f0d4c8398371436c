"""Counts of the second part of a backward: products that give weight gradients, and what waits.

A schedule may put that part off (`omnibal.pipeline.schedules`). The trainer does so with trained
linears of layers, projectors and head (`megatron/vlm/model/deferred_weights.py`); all else is of
the first part: embeddings, routers, adapters, and every collective.
"""

import numpy as np

from omnibal.cost.counts import Counts, Device, Product, Working
from omnibal.cost.feed_forward_counts import EXPERT_PRODUCTS
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
        of_input, of_output, gathered = _sides(device, kind, counts, product)
        if not product.given or product.given not in given:  # several linears may take one tensor
            inputs = inputs + of_input
        given.add(product.given)
        gradients = gradients + of_output
        room = gathered + nothing
        if product.name in EXPERT_PRODUCTS:  # others add to the buffer of gradients themselves
            room[0] += late_parameters((product,)) * device.element_bytes
        working = np.maximum(working, room)
    return np.stack([inputs, gradients, working])


def two_part_bytes(
    device: Device, kind: UnitKind, counts: Counts, late: tuple[Product, ...], each: Working
) -> np.ndarray:
    """Working memory at a moment of a backward whose weight gradients come later, besides all that
    the unit keeps, [features]: inputs of linears stay, and gradients of outputs that are done with.
    """
    trained = bool(late)
    inputs = {product.given for product in late} & set(each.gone)
    stay = [line.bytes for line in counts.kept_lines(trained=trained) if line.what in inputs]
    done = counts.products[len(counts.products) - each.after :]
    stay += [_sides(device, kind, counts, one)[1] for one in done if not one.is_fp32]
    return counts.working_bytes(each, trained=trained) + np.sum([0 * each.bytes, *stay], axis=0)


def _sides(
    device: Device, kind: UnitKind, counts: Counts, product: Product
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes of a product's input and of its output's gradient that wait, and those that are
    gathered of either. [features] each"""
    rows = product.rows * device.element_bytes
    of_input, of_output = rows * product.inner, rows * product.outer
    if not _has_divided_side(device, kind, counts, product):
        return of_input, of_output, 0 * rows
    gathered = (1 - device.whole) * rows * _width(device, counts)
    if product.inner == _width(device, counts):
        return of_input - gathered, of_output, gathered
    return of_input, of_output - gathered, gathered


def _width(device: Device, counts: Counts) -> float:
    """Width of the hidden state, of which a layer's input is."""
    return float(counts.boundary_bytes.max()) / device.element_bytes / device.whole


def _has_divided_side(device: Device, kind: UnitKind, counts: Counts, product: Product) -> bool:
    """Whether the product's input or output is a hidden state that ranks divide between blocks."""
    if device.whole == 1 or kind.tower != LANGUAGE or kind.name == HEAD:
        return False
    is_whole = product.groups == 1 and product.rows.max() >= 1
    return is_whole and _width(device, counts) in (product.inner, product.outer)
