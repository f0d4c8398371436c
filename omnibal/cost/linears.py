"""What a job changes of units' linears: FP8, adapters, deferred weight gradients, library buffers.

FP8 is as in Transformer Engine's `module/linear.py` and `grouped_linear.py` (1.x and 2.x): a linear
quantises its input in forward and output gradient in backward, row- and column-wise, keeps the
input in FP8, and quantises weights once a step. Under sequence parallelism the gather is in FP8.

Low-rank adapters make y = x W gain (x A) B (Hu et al. 2021, LoRA, arXiv 2106.09685, section 4.1),
as run by `megatron/vlm/model/adapters.py`: all A's of a linear in one product, all B's and the sum
in another. Both are usually memory-bound. A's gradient needs x, which is then kept.

Deferred weight gradients (`omnibal.pipeline.schedules`) are those of trained linears of layers,
projectors and head (`megatron/vlm/model/deferred_weights.py`), but not of embeddings, routers,
adapters or collectives.

Transformer Engine's products accumulate weight gradients in the fp32 buffer and return an empty
gradient, cached forever per shape and dtype (`get_dummy_wgrad` of its
`pytorch/module/base.py`, 2.11; Megatron-core 0.16.1 uses it for the head too,
`tensor_parallel/layers.py`). Only the word embedding's gradient is temporary. The fused loss writes
its gradient over the logits.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from omnibal.base.errors import UserError
from omnibal.cost.device_rates import Device
from omnibal.cost.kernels import GATHERED, Kernel, KernelPass, Kernels, element_wise
from omnibal.cost.model import LibraryBuffer
from omnibal.cost.work import EXPERT_PRODUCTS, CountedUnit, Kept, Working
from omnibal.model.adapter_settings import AdapterConfig, Linear
from omnibal.model.fp8 import FP8_MULTIPLE
from omnibal.model.units import HEAD, LANGUAGE, UnitKind

_BF16_BYTES, _COPIES = 2, 2  # row- and column-wise copies, one byte each


def with_fp8(
    device: Device,
    unit: CountedUnit,
    *,
    whole: Collection[str] = (),
    copied: Sequence[tuple[str, np.ndarray]] = (),
) -> CountedUnit:
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
    products = [one for one in kernels if one.dtype == "fp8" and one.phase == "forward"]
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


_KERNELS_OF_A_PIECE = 2  # forward kernels that concatenate a piece if a linear has several


def with_adapters(
    unit: CountedUnit,
    device: Device,
    adapters: AdapterConfig,
    linears: Mapping[str, Linear],
    *,
    part: float,
) -> CountedUnit:
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
        kernels += _adapter_products(product, rank, device, rows_in, rows_out)
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


def _adapter_products(
    product: Kernel, rank: int, device: Device, rows_in: np.ndarray, rows_out: np.ndarray
) -> Iterator[Kernel]:
    """Products with A and with B, twice as many in backward.

    Forward reads x and updates y; backward reads x and y's gradient and updates x's gradient.
    """
    passes: tuple[KernelPass, ...] = ("forward", "backward")
    for rows, width, tensors in (rows_in, product.inner, (1, 3)), (rows_out, product.outer, (2, 2)):
        for times, phase in enumerate(passes, start=1):
            yield Kernel(
                kind="low_rank",
                phase=phase,
                rows=rows,
                inner=width,
                outer=times * rank,
                bytes=tensors[times - 1] * device.element_bytes * width * rows,
                launches=times,
            )


def deferred_products(kind: UnitKind, unit: CountedUnit, *, trained: bool) -> Kernels:
    """Weight gradients of a unit that are deferred."""
    if kind.is_embed or not trained:
        return ()
    gradients = (one for one in unit.kernels if one.phase == "weight_gradient")
    return tuple(one for one in gradients if one.kind == "product" and one.dtype != "fp32")


def late_bytes(device: Device, kind: UnitKind, unit: CountedUnit, late: Kernels) -> np.ndarray:
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
    device: Device, kind: UnitKind, unit: CountedUnit, late: Kernels, each: Working
) -> np.ndarray:
    """Working memory at a moment of a backward with deferred weight gradients, [features]."""
    trained = bool(late)
    inputs = {product.given for product in late} & set(each.freed)
    stay = [line.bytes for line in unit.kept_lines(trained=trained) if line.what in inputs]
    done = unit.products[len(unit.products) - each.finished :]
    stay += [_sides(device, kind, unit, one)[1] for one in done if one.dtype != "fp32"]
    return unit.working_bytes(each, trained=trained) + np.sum([0 * each.bytes, *stay], axis=0)


def _sides(
    device: Device, kind: UnitKind, unit: CountedUnit, product: Kernel
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


_WORKSPACE_BYTES = 32 * 2**20
"""cuBLAS workspace per stream from Hopper on (`get_cublas_workspace_size_bytes`), as in torch."""
_GROUPED_STREAMS = 4  # streams of grouped products, each with a workspace


def drop_weight_gradients(moments: Sequence[Working]) -> tuple[Working, ...]:
    """Return moments of a language unit's backward without temporary weight gradients."""
    return tuple(
        each if each.of_words else replace(each, weight=0)
        for each in moments
        if not each.beside_logits
    )


def library_buffers(
    trained: Mapping[str, CountedUnit], element_bytes: int
) -> tuple[LibraryBuffer, ...]:
    """Buffers that libraries keep for language units.

    `trained`: trained language unit kinds, by name.
    """
    with_shape: dict[tuple[float, float], set[str]] = {}
    for name, unit in trained.items():
        for product in unit.products:
            # Routers and single-output gates are not Transformer Engine layers.
            if product.dtype != "fp32" and product.outer > 1:
                with_shape.setdefault((product.inner, product.outer), set()).add(name)
    gradients = [
        LibraryBuffer(
            what=f"empty gradient of {inner:g} x {outer:g} weights",
            bytes=inner * outer * element_bytes,
            kinds=frozenset(kinds),
        )
        for (inner, outer), kinds in with_shape.items()
    ]
    some = frozenset(trained)
    grouped = frozenset(name for name, unit in trained.items() if unit.expert_parameters)
    workspaces = (
        LibraryBuffer(what="workspaces of products", bytes=2 * _WORKSPACE_BYTES, kinds=some),
        LibraryBuffer(
            what="workspaces of grouped products",
            bytes=_GROUPED_STREAMS * _WORKSPACE_BYTES,
            kinds=grouped,
        ),
    )
    return (*gradients, *workspaces)
