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
def _share(value, LINEAR: tl.constexpr, CUBIC: tl.constexpr):
    """Share of a value that GELU lets through: of a normal distribution, or of a sigmoid."""
    if LINEAR == 0:
        share = 0.5 * (1 + tl.math.erf(value * 0.7071067811865476))
    else:
        share = tl.sigmoid(value * (LINEAR + CUBIC * value * value))
    return share


@triton.jit
def _bias_gelu(
    inner, bias, output, rows, width, LINEAR: tl.constexpr, CUBIC: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < width)
    biased = tl.load(inner + row * width + column, inside, 0).to(tl.float32)
    biased += tl.load(bias + column, column < width, 0).to(tl.float32)
    result = biased * _share(biased, LINEAR, CUBIC)
    tl.store(output + row * width + column, result.to(output.dtype.element_ty), inside)


@triton.jit
def _bias_gelu_backward(
    gradient, inner, bias, result, bias_parts, rows, width, LINEAR: tl.constexpr,
    CUBIC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
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
        share = _share(biased, LINEAR, CUBIC)
        if LINEAR == 0:
            density = tl.exp(-0.5 * biased * biased) * 0.3989422804014327
        else:
            density = share * (1 - share) * (LINEAR + 3 * CUBIC * biased * biased)
        grad *= share + biased * density
        tl.store(result + row * width + column, grad.to(result.dtype.element_ty), inside)
        total += grad
    place = bias_parts + group * width + column
    tl.store(place, tl.sum(total, 0)[None, :], column < width)


@triton.jit
def _bias_swiglu(
    inner, bias, output, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < width)
    gate = tl.load(inner + row * 2 * width + column, inside, 0).to(tl.float32)
    gate += tl.load(bias + column, column < width, 0).to(tl.float32)
    value = tl.load(inner + row * 2 * width + width + column, inside, 0).to(tl.float32)
    value += tl.load(bias + width + column, column < width, 0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * value
    tl.store(output + row * width + column, result.to(output.dtype.element_ty), inside)


@triton.jit
def _bias_swiglu_backward(
    gradient, inner, bias, result, bias_parts, rows, width, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr
):  # fmt: skip
    group, groups = tl.program_id(0), tl.num_programs(0)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    gate_shift = tl.load(bias + column, column < width, 0).to(tl.float32)
    value_shift = tl.load(bias + width + column, column < width, 0).to(tl.float32)
    gate_total = tl.zeros([ROWS, COLUMNS], tl.float32)
    value_total = tl.zeros([ROWS, COLUMNS], tl.float32)
    dtype = result.dtype.element_ty
    for first in range(group * ROWS, rows, groups * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (row < rows) & (column < width)
        grad = tl.load(gradient + row * width + column, inside, 0).to(tl.float32)
        place = row * 2 * width + column
        gate = tl.load(inner + place, inside, 0).to(tl.float32) + gate_shift
        value = tl.load(inner + place + width, inside, 0).to(tl.float32) + value_shift
        share = tl.sigmoid(gate)
        grad_gate = grad * value * share * (1 + gate * (1 - share))
        grad_value = grad * gate * share
        tl.store(result + place, grad_gate.to(dtype), inside)
        tl.store(result + place + width, grad_value.to(dtype), inside)
        gate_total += grad_gate
        value_total += grad_value
    place = bias_parts + group * 2 * width + column
    tl.store(place, tl.sum(gate_total, 0)[None, :], column < width)
    tl.store(place + width, tl.sum(value_total, 0)[None, :], column < width)


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


def bias_gelu(
    inner_RF: torch.Tensor,
    bias_F: torch.Tensor,
    slopes: tuple[float, float],
    output_RF: torch.Tensor,
) -> None:
    """Write gelu(inner + bias) in the form of these slopes; all tensors are contiguous."""
    rows, width = _rows_and_width(output_RF)
    if rows:
        grid = (triton.cdiv(rows, _TILE_ROWS), triton.cdiv(width, _TILE_COLUMNS))
        _bias_gelu[grid](
            inner_RF, bias_F, output_RF, rows, width, *slopes, _TILE_ROWS, _TILE_COLUMNS
        )


def bias_gelu_backward(
    gradient_RF: torch.Tensor,
    inner_RF: torch.Tensor,
    bias_F: torch.Tensor,
    slopes: tuple[float, float],
    result_RF: torch.Tensor,
) -> torch.Tensor:
    """Write the gradient of the input and return the bias's, float32 [F]."""
    rows, width = _rows_and_width(gradient_RF)
    parts = _parts_of_sum(rows, bias_F)
    if rows:
        _bias_gelu_backward[(len(parts), triton.cdiv(width, _TILE_COLUMNS))](
            gradient_RF, inner_RF, bias_F, result_RF, parts, rows, width, *slopes,
            _TILE_ROWS, _TILE_COLUMNS,
        )  # fmt: skip
    return parts.sum(0)


def bias_swiglu(inner_RI: torch.Tensor, bias_I: torch.Tensor, output_RF: torch.Tensor) -> None:
    """Write silu(gate) * value of both with their biases; all tensors are contiguous."""
    rows, width = _rows_and_width(output_RF)
    if rows:
        grid = (triton.cdiv(rows, _TILE_ROWS), triton.cdiv(width, _TILE_COLUMNS))
        _bias_swiglu[grid](inner_RI, bias_I, output_RF, rows, width, _TILE_ROWS, _TILE_COLUMNS)


def bias_swiglu_backward(
    gradient_RF: torch.Tensor, inner_RI: torch.Tensor, bias_I: torch.Tensor, result_RI: torch.Tensor
) -> torch.Tensor:
    """Write the gradient of gate and value and return the biases', float32 [I]."""
    rows, width = _rows_and_width(gradient_RF)
    parts = _parts_of_sum(rows, bias_I)
    if rows:
        _bias_swiglu_backward[(len(parts), triton.cdiv(width, _TILE_COLUMNS))](
            gradient_RF, inner_RI, bias_I, result_RI, parts, rows, width, _TILE_ROWS, _TILE_COLUMNS
        )
    return parts.sum(0)


def _rows_and_width(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.numel() // tensor.shape[-1], tensor.shape[-1]


def _parts_of_sum(rows: int, bias: torch.Tensor) -> torch.Tensor:
    """Room for the parts of a bias's gradient, float32 [groups, width]."""
    groups = min(_ROW_GROUPS, triton.cdiv(rows, _TILE_ROWS))
    return bias.new_empty((groups, len(bias)), dtype=torch.float32)
