"""Results, memory and requirements of CUDA kernels that differ from a CPU build of torch.

Shapes: B batch, N heads, G key/value heads, S query positions, K key positions, D head size,
T packed tokens, M, K and N rows, inner and columns of a matrix product.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from megatron.vlm.model.tensor_parallel import padded_size

aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_MOST_HEAD_SIZE = 256  # of FlashAttention-2's kernels
_ROWS_OF_FLASH_BLOCK = 128  # its backward rounds up to this
FP32_BYTES = 4
ALIGNED_ELEMENTS = 8
"""Leading dimensions of 16-bit matrices must be multiples of this for the fastest kernels."""


class RefusedByDeviceError(RuntimeError):
    """An operation that a real device refuses: its tensors' types, devices or layouts differ."""


def _refuse(operation: str, why: str, tensors: Sequence[torch.Tensor]) -> None:
    described = ", ".join(
        f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)} on {one.device}"
        for one in tensors
    )
    raise RefusedByDeviceError(f"{operation}: {why}; given are {described}")


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """All tensors in arguments or results, including lists."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors_in(value)


def factors(args: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The two factors of a product, without the addend, which comes first."""
    first, second, *rest = tensors_in(args)
    return (second, rest[0]) if rest else (first, second)


def check_product(operation: str, args: Sequence[Any]) -> None:
    """Raise unless the factors have one type and device; fake tensors would promote types."""
    tensors = list(tensors_in(args))
    asked = next((one for one in args if isinstance(one, torch.dtype)), tensors[-1].dtype)
    types = {one.dtype for one in factors(args)}
    if len(types) > 1 or (len(tensors) > 2 and tensors[0].dtype not in {asked, *types}):
        _refuse(operation, "a matrix product needs tensors of one type", tensors)
    check_one_device(operation, args)


def check_one_device(operation: str, args: Sequence[Any]) -> None:
    """Raise if host and device tensors are mixed, except host scalars."""
    tensors = list(tensors_in(args))
    if len({one.device for one in tensors if one.dim()}) > 1:
        _refuse(operation, "all tensors must be on the device", tensors)


def check_attention(operation: str, args: Sequence[Any]) -> None:
    """Raise for types, head sizes, strides and borders that flash attention refuses."""
    query, key, value = args[:3]
    tensors = [query, key, value]
    check_one_device(operation, args)
    if query.dtype not in _HALF or len({one.dtype for one in tensors}) > 1:
        _refuse(operation, "flash attention needs bf16 or fp16, all of one type", tensors)
    if any(one.stride(-1) != 1 for one in tensors):
        _refuse(operation, "flash attention needs the last dimension contiguous", tensors)
    if query.shape[-1] > _MOST_HEAD_SIZE or query.shape[-1] % ALIGNED_ELEMENTS:
        _refuse(operation, f"head size must be a multiple of 8 up to {_MOST_HEAD_SIZE}", tensors)
    for borders in args[3:5]:
        if isinstance(borders, torch.Tensor) and borders.dtype != torch.int32:
            _refuse(operation, "borders of samples must be int32", [borders])


def attention_backward_bytes(args: Sequence[Any]) -> int:
    """Workspace of flash attention's backward for inputs [B, N, S, D].

    As in FlashAttention-2's `mha_bwd`: float32 query gradient, a float32 per row, and with GQA the
    key and value gradients per head.
    """
    _, query, key = args[:3]
    batch, heads, rows, size = query.shape
    return _flash_backward_bytes(
        batch * heads * padded_size(rows, _ROWS_OF_FLASH_BLOCK),
        size,
        batch * heads * key.shape[2] if key.shape[1] != heads else 0,
        query.element_size(),
    )


def packed_attention_backward_bytes(args: Sequence[Any]) -> int:
    """Workspace of flash attention's backward for packed inputs [T, N, D], in whole blocks."""
    _, query, key, _, _, _, borders = args[:7]
    tokens, heads, size = query.shape
    rows = tokens + _ROWS_OF_FLASH_BLOCK * (borders.shape[0] - 1)
    shared = key.shape[0] * heads if key.shape[1] != heads else 0
    return _flash_backward_bytes(heads * rows, size, shared, query.element_size())


def _flash_backward_bytes(rows: int, size: int, shared_rows: int, element_bytes: int) -> int:
    width = padded_size(size, 32 if size <= 128 else 64)
    return rows * (width + 1) * FP32_BYTES + 2 * shared_rows * size * element_bytes


def copied_operand_bytes(args: Sequence[Any]) -> int:
    """Bytes of copies made for cuBLAS of matrices with unsupported layouts."""
    return sum(
        one.numel() * one.element_size()
        for one in tensors_in(args)
        if one.dim() >= 2 and one.numel() and 1 not in one.stride()[-2:]
    )


def leading_dimensions(args: Sequence[Any], output: torch.Tensor) -> tuple[int, ...]:
    """Leading dimensions of a product's matrices."""
    matrices = [one for one in tensors_in((*args, output)) if one.dim() >= 2]
    return tuple(max(one.stride()[-2:]) for one in matrices)


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
    """Device attention for [B, N, S, D]: flash (16 bit), memory-efficient (32 bit) or unfused."""
    if attn_mask is None and query.dtype in _HALF and query.shape[-1] <= _MOST_HEAD_SIZE:
        size = query.shape[-1]
        padding = -size % ALIGNED_ELEMENTS
        if padding:
            scale = scale or size**-0.5
            query, key, value = (F.pad(one, (0, padding)) for one in (query, key, value))
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
    """The normed tensor, and a float32 per row for the backward."""
    rows = hidden.shape[: hidden.dim() - len(shape)]
    numbers = hidden.new_empty((*rows, *[1] * len(shape)), dtype=torch.float32)
    return _like(hidden), numbers


def _fused_rms_norm_backward(
    gradient: torch.Tensor,
    hidden: torch.Tensor,
    shape: Sequence[int],
    numbers: torch.Tensor,
    weight: torch.Tensor | None,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of input and weight, if wanted."""
    has_weight = wanted[1] and weight is not None
    return _like(hidden) if wanted[0] else None, _like(weight) if has_weight else None


def _like(tensor: Any) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _added_product(*_: object, out: torch.Tensor, **__: object) -> torch.Tensor:
    """A product added to `out`; torch 2.11 takes its type for a factor."""
    return out


RESULTS: dict[Any, Callable[..., Any]] = {
    aten.addmm.dtype_out: _added_product,
    aten._fused_rms_norm.default: _fused_rms_norm,
    aten._fused_rms_norm_backward.default: _fused_rms_norm_backward,
}
"""Results of kernels that a CPU build lacks, or without shape functions in torch."""


@contextlib.contextmanager
def device_kernels(read: Callable[[Any], float | int]) -> Iterator[None]:
    """Make torch choose CUDA kernels for tensors that claim to be on `cuda`.

    A CPU build decomposes attention and RMSNorm into operations that save more.

    Args:
        read: returns a scalar's value to the host, for `torch.tensor`, which bypasses modes.
    """

    def never_run(*_: object) -> None:
        raise AssertionError("a fake device has no kernels to run")

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("scaled_dot_product_attention", _sdpa, "AutogradCUDA")
        library.impl("_local_scalar_dense", read, "CUDA")
        for operation in RESULTS:
            name = operation.name()
            if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
                # If it exists, RMSNorm of one type uses it, with its own derivative.
                library.impl(name.removeprefix("aten::"), never_run, "CUDA")
        yield
    finally:
        library._destroy()
