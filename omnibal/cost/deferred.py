"""Deferred weight gradients (`omnibal.pipeline.schedules`).

The trainer defers trained linears of layers, projectors and head
(`megatron/vlm/model/deferred_weights.py`), but not embeddings, routers, adapters or collectives.
"""

import numpy as np

from omnibal.cost.device import Device
from omnibal.cost.kernels import Kernel, Kernels
from omnibal.cost.work import EXPERT_PRODUCTS, Unit, Working
from omnibal.model.units import HEAD, LANGUAGE, UnitKind


def deferred_products(kind: UnitKind, unit: Unit, *, trained: bool) -> Kernels:
    """Weight gradients of a unit that are deferred."""
    if kind.is_embed or not trained:
        return ()
    gradients = (one for one in unit.kernels if one.of == "weight_gradient")
    return tuple(one for one in gradients if one.kind == "product" and one.dtype != "fp32")


def late_bytes(device: Device, kind: UnitKind, unit: Unit, late: Kernels) -> np.ndarray:
    """Bytes held for deferred gradients: inputs, output gradients, working memory, [3, features].

    Under sequence parallelism tensors between blocks wait sharded and are gathered for their
    product.
    """
    nothing = 0 * unit.boundary_bytes
    inputs, gradients, working = nothing, nothing, nothing
    given: set[str] = set()
    for product in late:
        of_input, of_output, gathered = _sides(device, kind, unit, product)
        if not product.given or product.given not in given:  # linears may share an input
            inputs = inputs + of_input
        given.add(product.given)
        gradients = gradients + of_output
        room = gathered + nothing
        if product.name in EXPERT_PRODUCTS:  # other products add directly to the gradient buffer
            room[0] += product.weights * device.element_bytes
        working = np.maximum(working, room)
    return np.stack([inputs, gradients, working])


def two_part_bytes(
    device: Device, kind: UnitKind, unit: Unit, late: Kernels, each: Working
) -> np.ndarray:
    """Working memory at a moment of a backward with deferred weight gradients, [features]."""
    trained = bool(late)
    inputs = {product.given for product in late} & set(each.gone)
    stay = [line.bytes for line in unit.kept_lines(trained=trained) if line.what in inputs]
    done = unit.products[len(unit.products) - each.after :]
    stay += [_sides(device, kind, unit, one)[1] for one in done if one.dtype != "fp32"]
    return unit.working_bytes(each, trained=trained) + np.sum([0 * each.bytes, *stay], axis=0)


def _sides(
    device: Device, kind: UnitKind, unit: Unit, product: Kernel
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Held bytes of a product's input and output gradient, and gathered bytes, [features] each."""
    rows = product.rows * device.element_bytes
    of_input, of_output = rows * product.inner, rows * product.outer
    width = float(unit.boundary_bytes.max()) / device.element_bytes / device.whole  # hidden
    is_divided = device.whole < 1 and kind.tower == LANGUAGE and kind.name != HEAD
    is_whole = product.groups == 1 and product.rows.max() >= 1
    if not (is_divided and is_whole and width in (product.inner, product.outer)):
        return of_input, of_output, 0 * rows
    gathered = (1 - device.whole) * rows * width
    if product.inner == width:
        return of_input - gathered, of_output, gathered
    return of_input, of_output - gathered, gathered
