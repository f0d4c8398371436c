"""Kernels that a stage launches, with their FLOPs and bytes, and host synchronizations."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from megatron.vlm.measure.fake_device.kernels import (
    ALIGNED_ELEMENTS,
    factors,
    leading_dimensions,
    tensors_in,
)
from omnibal.job.fake_replay import HostRead, OperationCount, OperationKind, UnalignedProduct

aten = torch.ops.aten
PRODUCTS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::addbmm",
    "aten::_scaled_mm",
)
_WRITE_ONLY = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_"}
_NO_KERNEL = {
    *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"),
    *("aten::new_empty_strided", "aten::lift_fresh", "aten::_unsafe_view", "aten::detach"),
    *("aten::resize_", "aten::set_", "aten::record_stream", "aten::is_same_size"),
    *("aten::_local_scalar_dense", "aten::lift", "aten::_has_compatible_shallow_copy_type"),
}
_GATHERS = {"aten::embedding": 0, "aten::index_select": 0, "aten::index": 0, "aten::gather": 0}
"""Operations that read only some rows of this argument, equal in number to the output rows."""


def kind_of(operation: str) -> OperationKind:
    """Kind of a launched operation, by its qualified name."""
    namespace, _, name = operation.partition("::")
    if namespace in ("c10d", "_c10d_functional"):
        return "communication"
    if "attention" in name or "attn" in name:
        return "attention"
    if operation in PRODUCTS or "wgrad" in name or "conv" in name:
        return "matrix product"
    return "element-wise"


def launches(func: Any) -> bool:
    """Whether an operation launches a kernel and is not a view."""
    return not (func.is_view or func.name().partition(".")[0] in _NO_KERNEL)


def moved_bytes(operation: str, args: Sequence[Any], results: Any) -> int:
    """Bytes of device memory that an operation reads and writes, each tensor once."""
    read = list(args)
    if operation in _WRITE_ONLY:
        read = read[1:]
    elif operation in _GATHERS:
        read[_GATHERS[operation]] = None  # equal to the bytes written, which count twice below
    twice = 2 if operation in _GATHERS else 1
    return sum(map(_bytes, tensors_in(read))) + twice * sum(map(_bytes, tensors_in(results)))


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor on the device; expanded dimensions count as 1."""
    if tensor.device.type != "cuda":
        return 0
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride or not size else 1
    return elements * tensor.element_size()


def flops_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Any) -> float:
    """FLOPs of a matrix product or attention. 0 for other operations."""
    operation = func.name().partition(".")[0]
    if operation in PRODUCTS:
        left, right = factors(args)
        return 2.0 * left.numel() * right.shape[-1]
    if operation in _ATTENTIONS:
        # All pairs of positions within samples. torch's count may lack GQA.
        kind = _ATTENTIONS[operation]
        query = args[kind.query]
        if kind.borders is None:
            pairs = query.numel() * args[kind.query + 1].shape[2]
        else:
            pairs = query.numel() * len(query) / max(len(args[kind.borders]) - 1, 1)
        is_causal = args[kind.is_causal : kind.is_causal + 1] == (True,)
        return 2.0 * kind.products * pairs / (2 if is_causal else 1)
    rule = flop_registry.get(func._overloadpacket)
    return 0.0 if rule is None else float(rule(*args, **kwargs, out_val=results))


class _Attention(NamedTuple):
    """An attention operation: number of matrix products, and positions of its arguments."""

    products: int
    query: int
    """Position of the query, [B, N, S, D] or packed [T, N, D]. The key follows, [B, G, K, D]."""
    is_causal: int
    """Position of the causal flag, which halves the pairs."""
    borders: int | None = None
    """Position of the packed samples' borders; on the device, so samples count as equally long."""


_ATTENTIONS = {
    "aten::_scaled_dot_product_flash_attention": _Attention(2, 0, 4),
    "aten::_scaled_dot_product_flash_attention_backward": _Attention(5, 1, 11),
    "aten::_scaled_dot_product_efficient_attention": _Attention(2, 0, 6),
    "aten::_scaled_dot_product_efficient_attention_backward": _Attention(5, 1, 11),
    "torch_attn::_varlen_attn": _Attention(2, 0, 7, borders=3),
    "torch_attn::_varlen_attn_backward": _Attention(5, 1, 10, borders=6),
}


class LaunchCounts:
    """Sums of launches, by phase and operation."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        self._reads: Counter[tuple[str, str, str]] = Counter()
        self._unaligned: dict[tuple, list[float]] = defaultdict(lambda: [0, 0.0])

    def clear(self) -> None:
        for sums in (self._sums, self._reads, self._unaligned):
            sums.clear()

    def add(self, phase: str, operation: str, flops: float, moved: int) -> None:
        sums = self._sums[phase, operation]
        sums[0] += 1
        sums[1] += flops
        sums[2] += moved

    def add_product(
        self, where: str, operation: str, args: Sequence[Any], output: torch.Tensor, flops: float
    ) -> None:
        """Record a 16-bit matrix product with rows not aligned to 16 bytes."""
        steps = leading_dimensions(args, output)
        if output.element_size() == 2 and any(step % ALIGNED_ELEMENTS for step in steps):
            left, right = factors(args)
            sizes = (left.shape[-2], left.shape[-1], right.shape[-1])
            sums = self._unaligned[where, operation, sizes, steps]
            sums[0] += 1
            sums[1] += flops

    def add_read(self, phase: str, operation: str, where: str) -> None:
        """Count one read of a device value by the host."""
        self._reads[phase, operation, where] += 1

    def operations(self) -> tuple[OperationCount, ...]:
        """All launches, by phase and operation."""
        return tuple(
            OperationCount(
                phase=phase,
                operation=operation,
                kind=kind_of(operation),
                kernels=int(kernels),
                tflop=flops / 1e12,
                gigabytes=moved / 1e9,
            )
            for (phase, operation), (kernels, flops, moved) in sorted(self._sums.items())
        )

    def host_reads(self) -> tuple[HostRead, ...]:
        """Places where the host waited for a device value."""
        return tuple(
            HostRead(phase=phase, operation=operation, where=where, count=count)
            for (phase, operation, where), count in sorted(self._reads.items())
        )

    def unaligned(self) -> tuple[UnalignedProduct, ...]:
        """Products with unaligned rows, largest FLOPs first."""
        ordered = sorted(self._unaligned.items(), key=lambda item: -item[1][1])
        return tuple(
            UnalignedProduct(
                where=where,
                operation=operation,
                sizes=sizes,
                leading_dimensions=steps,
                count=int(count),
                tflop=flops / 1e12,
            )
            for (where, operation, sizes, steps), (count, flops) in ordered
        )
