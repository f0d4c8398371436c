"""FP8 products: casts, kept inputs, weight copies.

As in Transformer Engine's `module/linear.py` and `grouped_linear.py` (1.x and 2.x): a linear
quantises its input in forward and output gradient in backward, row- and column-wise, keeps the
input in FP8, and quantises weights once a step. Under sequence parallelism the gather is in FP8.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from omnibal.base.errors import UserError
from omnibal.cost.device import Device
from omnibal.cost.kernels import GATHERED, Kernel, Kernels, element_wise
from omnibal.cost.work import Kept, Unit
from omnibal.model.fp8 import FP8_MULTIPLE

_BF16_BYTES, _COPIES = 2, 2
"""Row- and column-wise copies, one byte each."""


def with_fp8(
    device: Device,
    unit: Unit,
    *,
    whole: Collection[str] = (),
    copied: Sequence[tuple[str, np.ndarray]] = (),
) -> Unit:
    """Return a unit with products in FP8 if enabled, except routers and shared-expert gates.

    Moments of backward have both copies of the widest output gradient.

    Args:
        whole: kept lines with several consumers, which keep their bytes. Other lines that only
            weight gradients need are inputs of linears, and kept in FP8.
        copied: inputs also kept in bf16, and their elements [features].
    """
    if device.fp8 is None:
        return unit
    kernels = tuple(_quantize_kernel(device, kernel) for kernel in unit.kernels)
    products = [one for one in kernels if one.dtype == "fp8" and one.of == "forward"]
    copies_bytes = _COPIES * np.max([one.rows * one.outer for one in products], axis=0)
    return replace(
        unit,
        kernels=(*kernels, *(cast for one in products for cast in _casts(device, one))),
        kept=(
            *(
                replace(line, bytes=line.bytes / _BF16_BYTES)
                if line.for_weights and line.what not in whole
                else line
                for line in unit.kept
            ),
            *(Kept(f"{what} in FP8", "", elements, for_weights=True) for what, elements in copied),
        ),
        working=tuple(replace(one, bytes=one.bytes + copies_bytes) for one in unit.working),
    )


def _quantize_kernel(device: Device, kernel: Kernel) -> Kernel:
    """Return a linear's pass, or the gather of its operand, in FP8."""
    if kernel.name == GATHERED:
        return replace(kernel, bytes=kernel.bytes / _BF16_BYTES)
    if kernel.kind != "product" or kernel.dtype == "fp32" or kernel.outer <= 1:
        return kernel
    if kernel.inner % FP8_MULTIPLE or kernel.outer % FP8_MULTIPLE:
        raise UserError(
            f"precision fp8 was given, and a layer has a product of {kernel.inner:g} to "
            f"{kernel.outer:g} on each of {device.tensor} tensor-parallel ranks; both sizes must "
            f"be multiples of {FP8_MULTIPLE}: take another --tp, or bf16"
        )
    return replace(kernel, dtype="fp8")


def _casts(device: Device, product: Kernel) -> Kernels:
    """Kernels that quantise a product's input in forward and output gradient in backward."""
    assert device.fp8 is not None
    rows_bytes = product.rows * device.fp8.cast_bytes
    casts = element_wise(
        rows_bytes * product.inner, rows_bytes * product.outer, device.fp8.cast_kernels, "cast"
    )
    return tuple(replace(cast, modules=product.modules) for cast in casts)


def weight_copy_bytes(device: Device, products: Kernels) -> float:
    """Bytes of row- and column-wise FP8 weights, minus bf16 weights if these are not kept."""
    if device.fp8 is None:
        return 0.0
    weights = sum(one.weights for one in products if one.dtype == "fp8")
    return (_COPIES - (0 if device.fp8.keeps_bf16_weights else _BF16_BYTES)) * weights
