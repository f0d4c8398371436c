"""Counts of deferred weight gradients (`omnibal.pipeline.schedules`).

The trainer defers trained linears of layers, projectors and head
(`megatron/vlm/model/deferred_weights.py`), but not embeddings, routers, adapters or collectives.
"""

import numpy as np

from omnibal.cost.counts import Counts, Device, Product, Working
from omnibal.cost.feed_forward_counts import EXPERT_PRODUCTS
from omnibal.model.units import HEAD, LANGUAGE, UnitKind


def late_products(kind: UnitKind, counts: Counts, *, trained: bool) -> tuple[Product, ...]:
    """Products of a unit with deferred weight gradients."""
    if kind.is_embed or not trained:
        return ()
    return tuple(product for product in counts.products if not product.is_fp32)


def late_parameters(late: tuple[Product, ...]) -> float:
    """Number of weights of these products."""
    return sum(one.inner * one.outer * one.groups for one in late)


def late_bytes(
    device: Device, kind: UnitKind, counts: Counts, late: tuple[Product, ...]
) -> np.ndarray:
    """Bytes held for deferred gradients: inputs, output gradients, working memory, [3, features].

    Under sequence parallelism tensors between blocks wait sharded and are gathered for their
    product.
    """
    nothing = 0 * counts.moved_bytes
    inputs, gradients, working = nothing, nothing, nothing
    given: set[str] = set()
    for product in late:
        of_input, of_output, gathered = _sides(device, kind, counts, product)
        if not product.given or product.given not in given:  # linears may share an input
            inputs = inputs + of_input
        given.add(product.given)
        gradients = gradients + of_output
        room = gathered + nothing
        if product.name in EXPERT_PRODUCTS:  # other products add directly to the gradient buffer
            room[0] += late_parameters((product,)) * device.element_bytes
        working = np.maximum(working, room)
    return np.stack([inputs, gradients, working])


def two_part_bytes(
    device: Device, kind: UnitKind, counts: Counts, late: tuple[Product, ...], each: Working
) -> np.ndarray:
    """Working memory at a moment of a backward with deferred weight gradients, [features]."""
    trained = bool(late)
    inputs = {product.given for product in late} & set(each.gone)
    stay = [line.bytes for line in counts.kept_lines(trained=trained) if line.what in inputs]
    done = counts.products[len(counts.products) - each.after :]
    stay += [_sides(device, kind, counts, one)[1] for one in done if not one.is_fp32]
    return counts.working_bytes(each, trained=trained) + np.sum([0 * each.bytes, *stay], axis=0)


def _sides(
    device: Device, kind: UnitKind, counts: Counts, product: Product
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Held bytes of a product's input and output gradient, and gathered bytes, [features] each."""
    rows = product.rows * device.element_bytes
    of_input, of_output = rows * product.inner, rows * product.outer
    width = float(counts.boundary_bytes.max()) / device.element_bytes / device.whole  # hidden
    is_divided = device.whole < 1 and kind.tower == LANGUAGE and kind.name != HEAD
    is_whole = product.groups == 1 and product.rows.max() >= 1
    if not (is_divided and is_whole and width in (product.inner, product.outer)):
        return of_input, of_output, 0 * rows
    gathered = (1 - device.whole) * rows * width
    if product.inner == width:
        return of_input - gathered, of_output, gathered
    return of_input, of_output - gathered, gathered
