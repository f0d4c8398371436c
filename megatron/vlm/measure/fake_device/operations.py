"""Torch's operations on a CUDA device: kernels, FLOPs, bytes, workspace and requirements.

They differ from a CPU build's: attention and RMSNorm are one kernel each, and the device refuses
some arguments.

Shapes: B batch, N heads, G key/value heads, S query positions, K key positions, D head size,
T packed tokens, M, K and N rows, inner and columns of a matrix product.
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch._C._distributed_c10d import FakeWork
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from megatron.vlm.model.delta_net import CHUNK
from megatron.vlm.model.tensor_parallel import padded_size
from omnibal.job.fake_replay import HostRead, OperationCount, OperationKind, UnalignedProduct

aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_MAX_HEAD_SIZE = 256  # of FlashAttention-2's kernels
_FLASH_BLOCK_ROWS = 128  # its backward rounds up to this
_FP32_BYTES = 4
_ALIGNED_ELEMENTS = 8  # 16-bit matrices' leading dimensions are multiples for the fastest kernels
_PRODUCTS = {
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addbmm", "aten::_scaled_mm")
}
_WRITE_ONLY = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_"}
_NO_KERNEL = {
    *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"),
    *("aten::new_empty_strided", "aten::lift_fresh", "aten::_unsafe_view", "aten::detach"),
    *("aten::resize_", "aten::set_", "aten::record_stream", "aten::is_same_size"),
    *("aten::_local_scalar_dense", "aten::lift", "aten::_has_compatible_shallow_copy_type"),
}
# These read only the output's rows of their first argument.
_GATHERS = {"aten::embedding", "aten::index_select", "aten::index", "aten::gather"}


class RefusedByDeviceError(RuntimeError):
    """An operation with tensors of types, devices or layouts that a real device refuses."""


def _raise_refused(operation: str, why: str, tensors: Sequence[torch.Tensor]) -> None:
    described = ", ".join(
        f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
        for tensor in tensors
    )
    raise RefusedByDeviceError(f"{operation}: {why}; given are {described}")


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in arguments or results, including lists."""
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def factors(args: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    first, second, *others = tensors_in(args)
    return (second, others[0]) if others else (first, second)  # an addend comes first


def _check_product(operation: str, args: Sequence[Any]) -> None:
    """Raise unless the factors have one type and device."""
    # Fake tensors would promote types.
    tensors = list(tensors_in(args))
    output_type = next(
        (argument for argument in args if isinstance(argument, torch.dtype)), tensors[-1].dtype
    )
    types = {argument.dtype for argument in factors(args)}
    if len(types) > 1 or (len(tensors) > 2 and tensors[0].dtype not in {output_type, *types}):
        _raise_refused(operation, "a matrix product needs tensors of one type", tensors)
    check_one_device(operation, args)


def check_one_device(operation: str, args: Sequence[Any]) -> None:
    """Raise if host and device tensors are mixed."""
    tensors = list(tensors_in(args))
    # Except tensors without axes: host scalars.
    if len({tensor.device for tensor in tensors if tensor.dim()}) > 1:
        _raise_refused(operation, "all tensors must be on the device", tensors)


def _check_attention(operation: str, args: Sequence[Any]) -> None:
    """Raise for types, head sizes, strides and borders that flash attention refuses."""
    query, key, value = args[:3]
    tensors = [query, key, value]
    check_one_device(operation, args)
    if query.dtype not in _HALF or len({tensor.dtype for tensor in tensors}) > 1:
        _raise_refused(operation, "flash attention needs bf16 or fp16, all of one type", tensors)
    if any(tensor.stride(-1) != 1 for tensor in tensors):
        _raise_refused(operation, "flash attention needs the last dimension contiguous", tensors)
    if query.shape[-1] > _MAX_HEAD_SIZE or query.shape[-1] % _ALIGNED_ELEMENTS:
        text = f"head size must be a multiple of 8 up to {_MAX_HEAD_SIZE}"
        _raise_refused(operation, text, tensors)
    for borders in args[3:5]:
        if isinstance(borders, torch.Tensor) and borders.dtype != torch.int32:
            _raise_refused(operation, "borders of samples must be int32", [borders])


def _attention_backward_bytes(args: Sequence[Any]) -> int:
    """Return the workspace of flash attention's backward for inputs [B, N, S, D]."""
    _, query, key = args[:3]
    batch, heads, rows, size = query.shape
    return _flash_backward_bytes(
        batch * heads * padded_size(rows, _FLASH_BLOCK_ROWS),
        size,
        batch * heads * key.shape[2] if key.shape[1] != heads else 0,
        query.element_size(),
    )


def _packed_attention_backward_bytes(args: Sequence[Any]) -> int:
    """Return the workspace of flash attention's backward for packed inputs [T, N, D]."""
    _, query, key, _, _, _, borders = args[:7]
    tokens, heads, size = query.shape
    rows = tokens + _FLASH_BLOCK_ROWS * (borders.shape[0] - 1)  # every sample in full blocks
    grouped = key.shape[0] * heads if key.shape[1] != heads else 0
    return _flash_backward_bytes(heads * rows, size, grouped, query.element_size())


def _flash_backward_bytes(rows: int, size: int, grouped_rows: int, element_bytes: int) -> int:
    # As FlashAttention-2's `mha_bwd`: float32 query gradient, a float32 per row, and with GQA the
    # key and value gradients per query head.
    width = padded_size(size, 32 if size <= 128 else 64)
    return rows * (width + 1) * _FP32_BYTES + 2 * grouped_rows * size * element_bytes


def _copied_operand_bytes(args: Sequence[Any]) -> int:
    """Return the bytes of operands that are copied, as cuBLAS needs rows or columns of stride 1."""
    return sum(
        tensor.numel() * tensor.element_size()
        for tensor in tensors_in(args)
        if tensor.dim() >= 2 and tensor.numel() and 1 not in tensor.stride()[-2:]
    )


class _AttentionRule(NamedTuple):
    """An attention operation: number of matrix products, and positions of its arguments."""

    products: int
    query: int  # [B, N, S, D] or packed [T, N, D]; the key is next, [B, G, K, D] or [T, G, D]
    is_causal: int
    borders: int | None = None
    check: Callable[[str, Sequence[Any]], None] | None = None
    working_bytes: Callable[[Sequence[Any]], int] | None = None

    def flops(self, args: Sequence[Any]) -> float:
        """Return the FLOPs of all pairs of positions within samples, half of them if causal."""
        # Not torch's count, which may lack GQA.
        query = args[self.query]
        if self.borders is None:
            pairs = query.numel() * args[self.query + 1].shape[2]
        else:
            # Borders are on the fake device, without values: samples count as equally long.
            pairs = query.numel() * len(query) / max(len(args[self.borders]) - 1, 1)
        is_causal = args[self.is_causal : self.is_causal + 1] == (True,)
        return 2.0 * self.products * pairs / (2 if is_causal else 1)


_ATTENTIONS = {
    "aten::_scaled_dot_product_flash_attention": _AttentionRule(2, 0, 4, check=_check_attention),
    "aten::_scaled_dot_product_flash_attention_backward": _AttentionRule(
        5, 1, 11, working_bytes=_attention_backward_bytes
    ),
    "aten::_scaled_dot_product_efficient_attention": _AttentionRule(2, 0, 6),
    "aten::_scaled_dot_product_efficient_attention_backward": _AttentionRule(5, 1, 11),
    "torch_attn::_varlen_attn": _AttentionRule(2, 0, 7, borders=3, check=_check_attention),
    "torch_attn::_varlen_attn_backward": _AttentionRule(
        5, 1, 10, 6, check_one_device, _packed_attention_backward_bytes
    ),
}


@dataclass(frozen=True, slots=True)
class DeviceOperation:
    """An operation of torch, or a fused function of this project, on a device."""

    name: str  # qualified, such as aten::mm
    kind: OperationKind = "element-wise"
    launches: bool = True  # whether it launches a kernel and is not a view
    check: Callable[[str, Sequence[Any]], None] | None = None  # of name and arguments; may raise
    working_bytes: Callable[[Sequence[Any]], int] | None = None  # workspace for the arguments
    results: Callable[..., Any] | None = None  # makes results if torch has no shape function

    @property
    def is_product(self) -> bool:
        return self.name in _PRODUCTS

    def moved_bytes(self, args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> int:
        """Return bytes read and written in device memory, every tensor once; none on the host."""
        if self.name in _GATHERS:  # bytes read equal the bytes written
            return sum(map(_bytes, tensors_in(args[1:]))) + 2 * sum(map(_bytes, outputs))
        read = args[1:] if self.name in _WRITE_ONLY else args
        return sum(map(_bytes, (*tensors_in(read), *outputs)))

    def flops(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Any) -> float:
        """Return the FLOPs of a matrix product or attention, 0 for other operations."""
        if self.is_product:
            left, right = factors(args)  # [M, K] and [K, N]
            return 2.0 * left.numel() * right.shape[-1]
        if self.name in _ATTENTIONS:
            return _ATTENTIONS[self.name].flops(args)
        rule = None if func is None else flop_registry.get(func._overloadpacket)
        return 0.0 if rule is None else float(rule(*args, **kwargs, out_val=results))


@cache
def describe_operation(func: Any) -> DeviceOperation:
    """Return the kind, kernels and requirements of an overload of a torch operation."""
    name = func.name().partition(".")[0]
    namespace, _, plain = name.partition("::")
    kind: OperationKind = "element-wise"
    check: Callable[[str, Sequence[Any]], None] | None = None
    working: Callable[[Sequence[Any]], int] | None = None
    results = _RESULTS.get(func)
    if namespace in ("c10d", "_c10d_functional"):
        kind = "communication"
        if "coalesced" in plain:
            # A handle: coalesced collectives have no shape function in torch.
            results = lambda *_, **__: FakeWork().boxed()  # noqa: E731
    elif "attention" in plain or "attn" in plain:
        kind = "attention"
    elif name in _PRODUCTS or "wgrad" in plain or "conv" in plain:
        kind = "matrix product"
    if name in _PRODUCTS:
        check, working = _check_product, _copied_operand_bytes
    elif name in _ATTENTIONS:
        check, working = _ATTENTIONS[name].check, _ATTENTIONS[name].working_bytes
    elif namespace not in ("aten", "prim", "c10d", "_c10d_functional", "profiler"):
        check = check_one_device
    launches = not (func.is_view or name in _NO_KERNEL)
    return DeviceOperation(name, kind, launches, check, working, results)


def _bytes(tensor: torch.Tensor) -> int:
    if tensor.device.type != "cuda":
        return 0
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride or not size else 1  # an expanded axis has stride 0
    return elements * tensor.element_size()


class LaunchCounts:
    """Counts of launches, of host reads, and of matrix products with unaligned rows."""

    def __init__(self) -> None:
        # Kernels, FLOPs and bytes, by phase, operation and kind.
        self._sums = defaultdict[tuple[str, str, OperationKind], np.ndarray](lambda: np.zeros(3))
        self._reads = Counter[tuple[str, str, str]]()
        # Number of products, and their FLOPs.
        self._unaligned = defaultdict[tuple, np.ndarray](lambda: np.zeros(2))

    def clear(self) -> None:
        for sums in (self._sums, self._reads, self._unaligned):
            sums.clear()

    def add(self, phase: str, operation: DeviceOperation, flops: float, moved: int) -> None:
        self._sums[phase, operation.name, operation.kind] += (1, flops, moved)

    def add_product(
        self, where: str, operation: str, args: Sequence[Any], output: torch.Tensor, flops: float
    ) -> None:
        """Count a matrix product only if it is 16-bit, with rows not aligned to 16 bytes."""
        matrices = [tensor for tensor in tensors_in((*args, output)) if tensor.dim() >= 2]
        steps = tuple(max(tensor.stride()[-2:]) for tensor in matrices)  # leading dimensions
        if output.element_size() == 2 and any(step % _ALIGNED_ELEMENTS for step in steps):
            left, right = factors(args)
            sizes = (left.shape[-2], left.shape[-1], right.shape[-1])
            self._unaligned[where, operation, sizes, steps] += (1, flops)

    def add_read(self, phase: str, operation: str, where: str) -> None:
        self._reads[phase, operation, where] += 1

    def operations(self) -> tuple[OperationCount, ...]:
        return tuple(
            OperationCount(
                phase=phase,
                operation=operation,
                kind=kind,
                kernels=int(kernels),
                tflop=flops / 1e12,
                gigabytes=moved / 1e9,
            )
            for (phase, operation, kind), (kernels, flops, moved) in sorted(self._sums.items())
        )

    def host_reads(self) -> tuple[HostRead, ...]:
        return tuple(
            HostRead(phase=phase, operation=operation, where=where, count=count)
            for (phase, operation, where), count in sorted(self._reads.items())
        )

    def unaligned_products(self) -> tuple[UnalignedProduct, ...]:
        """Return products with unaligned rows, largest FLOPs first."""
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


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return attention of [B, N, S, D] by the device's kernel: flash (16 bit), memory-efficient
    (32 bit or large heads, without GQA) or unfused."""
    if attn_mask is None and query.dtype in _HALF and query.shape[-1] <= _MAX_HEAD_SIZE:
        size = query.shape[-1]
        padding = -size % _ALIGNED_ELEMENTS
        if padding:
            scale = scale or size**-0.5
            query, key, value = (F.pad(tensor, (0, padding)) for tensor in (query, key, value))
        output = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, return_debug_mask=False, scale=scale
        )[0]
        return output[..., :size] if padding else output
    if attn_mask is None and not enable_gqa:
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, None, query.requires_grad, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _fused_rms_norm(
    hidden: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty tensors for the normed tensor, and for every row's rstd, float32."""
    rows = hidden.shape[: hidden.dim() - len(shape)]
    rstds = hidden.new_empty((*rows, *[1] * len(shape)), dtype=torch.float32)
    return _like(hidden), rstds


def _fused_rms_norm_backward(
    gradient: torch.Tensor,
    hidden: torch.Tensor,
    shape: Sequence[int],
    rstds: torch.Tensor,
    weight: torch.Tensor | None,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    has_weight = wanted[1] and weight is not None
    return _like(hidden) if wanted[0] else None, _like(weight) if has_weight else None


def _like(tensor: Any) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


# Results of kernels that a CPU build lacks, or that have no shape function in torch.
_RESULTS: dict[Any, Callable[..., Any]] = {
    # A product added to `out`; torch 2.11 takes its type for a factor.
    aten.addmm.dtype_out: lambda *_, out, **__: out,
    aten._fused_rms_norm.default: _fused_rms_norm,
    aten._fused_rms_norm_backward.default: _fused_rms_norm_backward,
}


def _delta_rule(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> Any:
    return torch.empty_like(value), value.new_empty(*value.shape[:2], CHUNK)


def _delta_rule_gradients(_: Any, inputs: Sequence[torch.Tensor], *more: Any) -> Any:
    return tuple(map(torch.empty_like, inputs))


def _delta_rule_backward_bytes(args: Sequence[Any]) -> int:
    """Return the workspace of flash-linear-attention's backward: w, u, values and states again,
    and their gradients."""
    _, (query, _, value, *_), *_ = args
    size, value_size = query.shape[-1], value.shape[-1]
    elements = 3 * size + 5 * value_size + 2 * size * value_size // CHUNK
    return value.shape[0] * value.shape[1] * elements * value.element_size()


# Results of `delta_net`'s functions, and their workspace, by name.
DELTA_RULES: dict[str, tuple[Callable[..., Any], Callable[..., int] | None]] = {
    "run_rule": (_delta_rule, None),
    "run_rule_backward": (_delta_rule_gradients, _delta_rule_backward_bytes),
}


@contextlib.contextmanager
def use_device_kernels(read: Callable[[Any], float | int]) -> Iterator[None]:
    """Make torch choose CUDA kernels for tensors that claim to be on `cuda`.

    A CPU build would decompose attention and RMSNorm into operations that save more.

    Args:
        read: returns a scalar's value to the host, for `torch.tensor`, which bypasses modes.
    """

    def never_run(*_: object) -> None:
        raise AssertionError("a fake device has no kernels to run")

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("scaled_dot_product_attention", _sdpa, "AutogradCUDA")
        library.impl("_local_scalar_dense", read, "CUDA")
        for operation in _RESULTS:
            name = operation.name()
            if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
                # If the kernel exists, RMSNorm of one type uses it, with its own derivative.
                library.impl(name.removeprefix("aten::"), never_run, "CUDA")
        yield
    finally:
        library._destroy()
