"""Options of linears: FP8, adapters, deferred weight gradients, and buffers of libraries.

FP8 follows Transformer Engine's `module/linear.py` and `grouped_linear.py` (1.x and 2.x): a linear
quantises its input in forward and its output gradient in backward, row- and column-wise, keeps the
input in FP8, and quantises weights once a step. Under sequence parallelism the gather is in FP8.

Low-rank adapters add (x A) B to x W (Hu et al. 2021, LoRA, arXiv 2106.09685, section 4.1), as in
`megatron/vlm/model/adapters.py`: all A's of a linear in one product, all B's and the sum in
another. Both are usually memory-bound. A's gradient needs x, which is then kept.

Weight gradients of trained linears in layers, projectors and head can be deferred
(`omnibal.pipeline.schedules`, `megatron/vlm/model/deferred_weights.py`), but not of embeddings,
routers and adapters.

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
    """Return a unit with products in FP8 if enabled; UserError if their sizes do not allow it.

    Args:
        whole: names of kept lines that other operations read too, so they stay in bf16. Other lines
            that only weight gradients need are kept in FP8.
        copied: inputs kept in FP8 in addition to bf16, and their elements [features].
    """
    if device.fp8 is None:
        return unit
    kernels = tuple(_quantize_kernel(device, kernel) for kernel in unit.kernels)
    products = [kernel for kernel in kernels if kernel.dtype == "fp8" and kernel.phase == "forward"]
    # Moments of backward hold both copies of the widest output gradient.
    casts: list[Kernel] = []  # of inputs in forward and of output gradients in backward
    for product in products:
        rows_bytes = product.rows * device.fp8.cast_bytes
        sides_bytes = rows_bytes * product.inner, rows_bytes * product.outer
        kinds = element_wise(*sides_bytes, device.fp8.cast_kernels, "cast")
        casts += [replace(cast, modules=product.modules) for cast in kinds]
    copies_bytes = _COPIES * np.max([product.rows * product.outer for product in products], axis=0)
    return replace(
        unit,
        kernels=(*kernels, *casts),
        kept=(
            *(
                replace(line, bytes=line.bytes / _BF16_BYTES)
                if line.for_weights and line.what not in whole
                else line
                for line in unit.kept
            ),
            *(Kept(f"{name} in FP8", "", elements, for_weights=True) for name, elements in copied),
        ),
        working=tuple(
            replace(moment, bytes=moment.bytes + copies_bytes) for moment in unit.working
        ),
    )


def _quantize_kernel(device: Device, kernel: Kernel) -> Kernel:
    """Return a kernel in FP8 if it is a linear's product or gather; routers and gates are not."""
    if kernel.name == GATHERED:
        return replace(kernel, bytes=kernel.bytes / _BF16_BYTES)
    if kernel.kind != "product" or kernel.dtype == "fp32" or kernel.outer <= 1:
        return kernel
    if kernel.inner % FP8_MULTIPLE or kernel.outer % FP8_MULTIPLE:
        sizes = f"{kernel.inner:g} to {kernel.outer:g} at --tp {device.tensor}"
        rule = f"precision fp8 needs products with multiples of {FP8_MULTIPLE}"
        raise UserError(f"{rule}, and a layer has one of {sizes}: take another --tp, or bf16")
    return replace(kernel, dtype="fp8")


def weight_copy_bytes(device: Device, products: Kernels) -> float:
    """Return bytes of row- and column-wise FP8 weights, minus bf16 weights if not kept."""
    if device.fp8 is None:
        return 0.0
    weights = sum(product.weights for product in products if product.dtype == "fp8")
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
    """Return a frozen unit with adapters.

    Args:
        linears: adapted linears by name; under `all-linear` also unnamed products and experts.
        part: share of the sequence that a device holds between blocks.
    """
    kernels, added, inputs, parameters = list(unit.kernels), list[Kept](), set[str](), 0
    for product in unit.products:
        linear, number, share = linears.get(product.name), 1, 1.0
        rows_in = rows_out = product.rows
        if linear is not None:
            number, divides = len(linear.adapted_pieces), linear.divides_inputs
            adapted, total = (
                sum(piece.outputs for piece in pieces)
                for pieces in (linear.adapted_pieces, linear.pieces)
            )
            share = adapted / total
            rows_in = rows_in * (1.0 if divides else part)
            rows_out = rows_out * (part if divides else 1.0)
            rank_bytes = product.rows * adapters.rank * number * device.element_bytes
            if part < 1:  # between A and B, rows are gathered or scattered
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
        inputs.add(product.given)
        between_bytes = rows_out * rank * device.element_bytes
        added.append(Kept(f"between A and B of {product.name}", product.name, between_bytes))
    kept = (
        # A's gradient needs the linear's input, though the unit is frozen.
        replace(line, for_weights=line.for_weights and line.what not in inputs)
        for line in unit.kept
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
    """Yield the products with A and with B, two in backward for one in forward."""
    # Forward reads x and updates y; backward reads x and y's gradient and updates x's gradient.
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
    """Return the weight gradients of a unit that can be deferred."""
    if kind.is_embed or not trained:
        return ()
    gradients = (kernel for kernel in unit.kernels if kernel.phase == "weight_gradient")
    return tuple(k for k in gradients if k.kind == "product" and k.dtype != "fp32")


def late_bytes(device: Device, kind: UnitKind, unit: CountedUnit, late: Kernels) -> np.ndarray:
    """Return bytes of deferred inputs, output gradients and working memory, [3, features]."""
    nothing = 0 * unit.boundary_bytes
    inputs, gradients, working = nothing, nothing, nothing
    seen: set[str] = set()
    for product in late:
        input_bytes, output_bytes, gathered_bytes = _operand_bytes(device, kind, unit, product)
        if not product.given or product.given not in seen:  # linears may share an input
            inputs = inputs + input_bytes
        seen.add(product.given)
        gradients = gradients + output_bytes
        buffer_bytes = gathered_bytes + nothing
        if product.name in EXPERT_PRODUCTS:  # other products add directly to the gradient buffer
            buffer_bytes[0] += product.weights * device.element_bytes
        working = np.maximum(working, buffer_bytes)
    return np.stack([inputs, gradients, working])


def two_part_bytes(
    device: Device, kind: UnitKind, unit: CountedUnit, late: Kernels, moment: Working
) -> np.ndarray:
    """Return working memory at a moment of backward with deferred weight gradients, [features]."""
    # Inputs and output gradients stay until the weight gradients.
    trained = bool(late)
    inputs = {product.given for product in late} & set(moment.freed)
    stay = [line.bytes for line in unit.kept_lines(trained=trained) if line.what in inputs]
    done = unit.products[len(unit.products) - moment.finished :]
    stay += [_operand_bytes(device, kind, unit, k)[1] for k in done if k.dtype != "fp32"]
    return unit.working_bytes(moment, trained=trained) + np.sum([0 * moment.bytes, *stay], axis=0)


def _operand_bytes(
    device: Device, kind: UnitKind, unit: CountedUnit, product: Kernel
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return bytes of a product's input, output gradient and gathered part, [features] each."""
    # Under sequence parallelism tensors between blocks wait sharded, and are gathered when used.
    rows = product.rows * device.element_bytes
    input_bytes, output_bytes = rows * product.inner, rows * product.outer
    hidden_bytes = float(unit.boundary_bytes.max()) / device.sequence_share
    width = hidden_bytes / device.element_bytes  # hidden size
    is_divided = device.sequence_share < 1 and kind.tower == LANGUAGE and kind.name != HEAD
    is_whole = product.groups == 1 and product.rows.max() >= 1
    if not (is_divided and is_whole and width in (product.inner, product.outer)):
        return input_bytes, output_bytes, 0 * rows
    gathered_bytes = (1 - device.sequence_share) * rows * width
    if product.inner == width:
        return input_bytes - gathered_bytes, output_bytes, gathered_bytes
    return input_bytes, output_bytes - gathered_bytes, gathered_bytes


# cuBLAS workspace per stream from Hopper on (`get_cublas_workspace_size_bytes`), as in torch.
_WORKSPACE_BYTES = 32 * 2**20
_GROUPED_STREAMS = 4  # streams of grouped products, each with a workspace


def drop_weight_gradients(moments: Sequence[Working]) -> tuple[Working, ...]:
    """Return backward moments without temporary gradients of weights and of unfused logits."""
    return tuple(
        moment if moment.of_words else replace(moment, weight=0)
        for moment in moments
        if not moment.has_logits_gradient
    )


def library_buffers(
    trained: Mapping[str, CountedUnit], element_bytes: int
) -> tuple[LibraryBuffer, ...]:
    """Return buffers that libraries keep for trained language units, given by kind name."""
    with_shape: dict[tuple[float, float], set[str]] = {}
    for name, unit in trained.items():
        for product in unit.products:
            # Routers and single-output gates are not Transformer Engine layers.
            if product.dtype != "fp32" and product.outer > 1:
                with_shape.setdefault((product.inner, product.outer), set()).add(name)
    empty_gradients = [
        (inner * outer * element_bytes, frozenset(kinds))
        for (inner, outer), kinds in with_shape.items()
    ]
    grouped = frozenset(name for name, unit in trained.items() if unit.expert_parameters)
    workspaces = (
        (2 * _WORKSPACE_BYTES, frozenset(trained)),  # of products
        (_GROUPED_STREAMS * _WORKSPACE_BYTES, grouped),
    )
    return (*empty_gradients, *workspaces)
