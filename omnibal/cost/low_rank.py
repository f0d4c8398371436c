"""Low-rank adapters (LoRA) of a frozen unit.

y = x W gains (x A) B (Hu et al. 2021, LoRA, arXiv 2106.09685, section 4.1), as run by
`megatron/vlm/model/adapters.py`: all A's of a linear in one product, all B's and the sum in
another. Both are usually memory-bound. A's gradient needs x, which is then kept.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from omnibal.cost.device import Device
from omnibal.cost.kernels import Kernel, KernelPass, element_wise
from omnibal.cost.work import EXPERT_PRODUCTS, Kept, Unit
from omnibal.model.adapters import AdapterConfig, Linear

_KERNELS_OF_A_PIECE = 2
"""Forward kernels that concatenate a piece if a linear has several."""


def with_adapters(
    unit: Unit,
    device: Device,
    adapters: AdapterConfig,
    linears: Mapping[str, Linear],
    *,
    part: float,
) -> Unit:
    """Return a frozen unit with adapters. Products without a name need `all-linear`.

    `part`: share of the sequence that a device holds between blocks.
    """
    kernels, added, given, parameters = list(unit.kernels), list[Kept](), set[str](), 0
    for product in unit.products:
        linear, number, share = linears.get(product.name), 1, 1.0
        rows_in = rows_out = product.rows
        if linear is not None:
            number, divides = len(linear.adapted), linear.divides_inputs
            adapted, whole = (
                sum(piece.outputs for piece in some) for some in (linear.adapted, linear.pieces)
            )
            share = adapted / whole
            rows_in = rows_in * (1.0 if divides else part)
            rows_out = rows_out * (part if divides else 1.0)
            rank_bytes = product.rows * adapters.rank * number * device.element_bytes
            if part < 1:  # gather or scatter
                kernels += device.rings("forward", rank_bytes)
                kernels += device.rings("backward", rank_bytes)
            else:
                kernels += device.rings("forward" if divides else "backward", 2 * rank_bytes, 2)
        elif product.dtype == "fp32" or not adapters.is_of_all:
            continue
        elif product.name and not (adapters.experts and product.name in EXPERT_PRODUCTS):
            continue
        if number > 1:
            nothing = 0 * product.rows
            kernels += element_wise(nothing, nothing, _KERNELS_OF_A_PIECE * number)
        rank = adapters.rank * number
        kernels += _products(product, rank, device, rows_in, rows_out)
        # Each output has the rank of its piece.
        weights = rank * product.inner + adapters.rank * product.outer * share
        parameters += round(product.groups * weights)
        given.add(product.given)
        between_bytes = rows_out * rank * device.element_bytes
        added.append(Kept(f"between A and B of {product.name}", product.name, between_bytes))
    kept = (
        replace(line, for_weights=line.for_weights and line.what not in given) for line in unit.kept
    )
    return replace(
        unit,
        kernels=tuple(kernels),
        kept=(*kept, *added),
        other_parameters=unit.other_parameters + parameters,
        adapter_parameters=parameters,
    )


def _products(
    product: Kernel, rank: int, device: Device, rows_in: np.ndarray, rows_out: np.ndarray
) -> Iterator[Kernel]:
    """Products with A and with B, twice as many in backward.

    Forward reads x and updates y; backward reads x and y's gradient and updates x's gradient.
    """
    passes: tuple[KernelPass, ...] = ("forward", "backward")
    for rows, width, tensors in (rows_in, product.inner, (1, 3)), (rows_out, product.outer, (2, 2)):
        for times, of in enumerate(passes, start=1):
            yield Kernel(
                kind="low_rank",
                of=of,
                rows=rows,
                inner=width,
                outer=times * rank,
                bytes=tensors[times - 1] * device.element_bytes * width * rows,
                launches=times,
            )
