"""Kernels of the activation functions between the two products of a feed-forward.

Shapes: R rows (tokens or positions), F feed-forward width of this rank, I = 2F gate and value.
"""

import torch
import triton
import triton.language as tl

_COLUMNS = 1024  # of a program
_TILE_ROWS, _TILE_COLUMNS = 8, 512  # of a program that sums a bias's gradient
_ROW_GROUPS = 64
"""Parts of the rows whose gradients of a bias are summed apart."""


@triton.jit
def _swiglu(inner, output, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(inner + row * 2 * width + column, inside, 0).to(tl.float32)
    value = tl.load(inner + row * 2 * width + width + column, inside, 0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * value
    tl.store(output + row * width + column, result.to(output.dtype.element_ty), inside)


@triton.jit
def _swiglu_backward(gradient, inner, result, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    grad = tl.load(gradient + row * width + column, inside, 0).to(tl.float32)
    gate = tl.load(inner + row * 2 * width + column, inside, 0).to(tl.float32)
    value = tl.load(inner + row * 2 * width + width + column, inside, 0).to(tl.float32)
    share = tl.sigmoid(gate)
    grad_gate = grad * value * share * (1 + gate * (1 - share))
    grad_value = grad * gate * share
    dtype = result.dtype.element_ty
    tl.store(result + row * 2 * width + column, grad_gate.to(dtype), inside)
    tl.store(result + row * 2 * width + width + column, grad_value.to(dtype), inside)


@triton.jit
def _bias_gelu(inner, bias, output, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < width)
    biased = tl.load(inner + row * width + column, inside, 0).to(tl.float32)
    biased += tl.load(bias + column, column < width, 0).to(tl.float32)
    result = 0.5 * biased * (1 + tl.math.erf(biased * 0.7071067811865476))
    tl.store(output + row * width + column, result.to(output.dtype.element_ty), inside)


@triton.jit
def _bias_gelu_backward(
    gradient, inner, bias, result, bias_parts, rows, width, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr
):  # fmt: skip
    group, groups = tl.program_id(0), tl.num_programs(0)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    shift = tl.load(bias + column, column < width, 0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(group * ROWS, rows, groups * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (row < rows) & (column < width)
        grad = tl.load(gradient + row * width + column, inside, 0).to(tl.float32)
        biased = tl.load(inner + row * width + column, inside, 0).to(tl.float32) + shift
        below = 0.5 * (1 + tl.math.erf(biased * 0.7071067811865476))
        density = tl.exp(-0.5 * biased * biased) * 0.3989422804014327
        grad *= below + biased * density
        tl.store(result + row * width + column, grad.to(result.dtype.element_ty), inside)
        total += grad
    place = bias_parts + group * width + column
    tl.store(place, tl.sum(total, 0)[None, :], column < width)


def swiglu(inner_RI: torch.Tensor, output_RF: torch.Tensor) -> None:
    """Write silu(gate) * value; all tensors are contiguous."""
    width = output_RF.shape[-1]
    rows = output_RF.numel() // width
    if rows:
        _swiglu[(rows, triton.cdiv(width, _COLUMNS))](inner_RI, output_RF, width, _COLUMNS)


def swiglu_backward(
    gradient_RF: torch.Tensor, inner_RI: torch.Tensor, result_RI: torch.Tensor
) -> None:
    """Write the gradient of gate and value; all tensors are contiguous."""
    width = gradient_RF.shape[-1]
    rows = gradient_RF.numel() // width
    if rows:
        grid = (rows, triton.cdiv(width, _COLUMNS))
        _swiglu_backward[grid](gradient_RF, inner_RI, result_RI, width, _COLUMNS)


def bias_gelu(inner_RF: torch.Tensor, bias_F: torch.Tensor, output_RF: torch.Tensor) -> None:
    """Write gelu(inner + bias) with the error function; all tensors are contiguous."""
    width = len(bias_F)
    rows = inner_RF.numel() // width
    if rows:
        grid = (triton.cdiv(rows, _TILE_ROWS), triton.cdiv(width, _TILE_COLUMNS))
        _bias_gelu[grid](inner_RF, bias_F, output_RF, rows, width, _TILE_ROWS, _TILE_COLUMNS)


def bias_gelu_backward(
    gradient_RF: torch.Tensor, inner_RF: torch.Tensor, bias_F: torch.Tensor, result_RF: torch.Tensor
) -> torch.Tensor:
    """Write the gradient of the input and return the bias's, float32 [F]."""
    width = len(bias_F)
    rows = inner_RF.numel() // width
    groups = min(_ROW_GROUPS, triton.cdiv(rows, _TILE_ROWS))
    parts = inner_RF.new_empty((groups, width), dtype=torch.float32)
    if rows:
        _bias_gelu_backward[(groups, triton.cdiv(width, _TILE_COLUMNS))](
            gradient_RF, inner_RF, bias_F, result_RF, parts, rows, width, _TILE_ROWS, _TILE_COLUMNS
        )
    return parts.sum(0)
