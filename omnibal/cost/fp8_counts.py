"""Counts of FP8 products: casts, kept inputs, weight copies.

As in Transformer Engine's `module/linear.py` and `grouped_linear.py` (1.x and 2.x): a linear
quantises its input in forward and output gradient in backward, row- and column-wise, keeps the
input in FP8, and quantises weights once a step. Under sequence parallelism the gather is in FP8.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from omnibal.base.errors import UserError
from omnibal.cost.counts import Device, Kept, Product, Working
from omnibal.model.fp8 import FP8_MULTIPLE

_BF16_BYTES, _COPIES = 2, 2
"""Row- and column-wise copies, one byte each."""


def in_fp8(device: Device, products: Sequence[Product]) -> tuple[Product, ...]:
    """Return a layer's products, in FP8 if enabled, except routers and shared-expert gates."""
    if device.fp8 is None:
        return tuple(products)
    marked = [replace(one, is_fp8=not one.is_fp32 and one.outer > 1) for one in products]
    for one in marked:
        if one.is_fp8 and (one.inner % FP8_MULTIPLE or one.outer % FP8_MULTIPLE):
            raise UserError(
                f"precision fp8 was given, and a layer has a product of {one.inner:g} to "
                f"{one.outer:g} on each of {device.tensor} tensor-parallel ranks; both sizes must "
                f"be multiples of {FP8_MULTIPLE}: take another --tp, or bf16"
            )
    return tuple(marked)


def cast_bytes(
    device: Device, products: Sequence[Product], like: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes to quantise inputs in forward and gradients in backward, [features] each."""
    forward, backward = 0 * like, 0 * like
    if device.fp8 is not None:
        for one in (each for each in products if each.is_fp8):
            forward = forward + one.rows * one.inner * device.fp8.cast_bytes
            backward = backward + one.rows * one.outer * device.fp8.cast_bytes
    return forward, backward


def cast_kernels(device: Device, products: Sequence[Product]) -> int:
    """Kernels that quantise inputs in forward, also the number for gradients in backward."""
    return 0 if device.fp8 is None else device.fp8.cast_kernels * sum(p.is_fp8 for p in products)


def weight_cast_bytes(device: Device) -> float:
    """Bytes to quantise a parameter once a step; embedding and head are counted too."""
    return 0.0 if device.fp8 is None else float(device.fp8.cast_bytes)


def weight_copy_bytes(device: Device, products: Sequence[Product]) -> float:
    """Bytes of row- and column-wise FP8 weights, minus bf16 weights if these are not kept."""
    if device.fp8 is None:
        return 0.0
    weights = sum(one.inner * one.outer * one.groups for one in products if one.is_fp8)
    return (_COPIES - (0 if device.fp8.keeps_bf16_weights else _BF16_BYTES)) * weights


def kept_in_fp8(
    device: Device,
    kept: Sequence[Kept],
    *,
    whole: Collection[str],
    copied: Sequence[tuple[str, np.ndarray]],
) -> tuple[Kept, ...]:
    """Return a layer's kept activations with linear inputs in FP8.

    Args:
        kept: activations with bf16 inputs, which only weight gradients need.
        whole: lines with several consumers, which keep their bytes.
        copied: inputs also kept in bf16, and their elements [features].
    """
    if device.fp8 is None:
        return tuple(kept)
    return (
        *(
            replace(line, bytes=line.bytes / _BF16_BYTES)
            if line.for_weights and line.what not in whole
            else line
            for line in kept
        ),
        *(Kept(f"{what} in FP8", "", elements, for_weights=True) for what, elements in copied),
    )


def working_in_fp8(
    device: Device, working: Sequence[Working], products: Sequence[Product]
) -> tuple[Working, ...]:
    """Return moments of backward with both copies of the widest output gradient."""
    elements = [one.rows * one.outer for one in products if one.is_fp8]
    if device.fp8 is None or not elements:
        return tuple(working)
    copies = _COPIES * np.max(elements, axis=0)
    return tuple(replace(moment, bytes=moment.bytes + copies) for moment in working)
