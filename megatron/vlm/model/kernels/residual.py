"""Kernels of what stands between the blocks of a layer: residual adds and norms.

Shapes: R rows (positions), H hidden size, B batch (tiles, the faster axis of the rows), P parts of
the rows whose gradients of weights are summed apart, M moments (rstd; for LayerNorm mean too).
"""

import torch
import triton
import triton.language as tl

_PARTS = 256  # programs that sum parts of the weights' gradients


@triton.jit
def _add_norm(
    residual, branch, bias, scale, tile_scale, weight, norm_bias, summed, normed, moments,
    rows, width, batch, eps, ADDS: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
    TILES: tl.constexpr, NORM: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = row * width + column
    x = tl.load(residual + place, inside, 0).to(tl.float32)
    if ADDS:
        added = tl.load(branch + place, inside, 0).to(tl.float32)
        if BIAS:
            added += tl.load(bias + column, inside, 0).to(tl.float32)
        if SCALE:
            added *= tl.load(scale + column, inside, 0).to(tl.float32)
        if TILES:
            added *= tl.load(tile_scale + row % batch).to(tl.float32)
        rounded = (x + added).to(summed.dtype.element_ty)
        tl.store(summed + place, rounded, inside)
        x = rounded.to(tl.float32)  # what backward will find
    if NORM:
        if CENTRED:
            mean = tl.sum(x, 0) / width
            x = tl.where(inside, x - mean, 0)
            tl.store(moments + rows + row, mean)
        rstd = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
        tl.store(moments + row, rstd)
        x = x * rstd * tl.load(weight + column, inside, 0).to(tl.float32)
        if CENTRED:
            x += tl.load(norm_bias + column, inside, 0).to(tl.float32)
        tl.store(normed + place, x.to(normed.dtype.element_ty), inside)


@triton.jit
def _norm_backward(
    gradient, passed, hidden, moments, weight, result, parts, rows, width,
    PASSED: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part, stride = tl.program_id(0), tl.num_programs(0)
    pitch = width.to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    factor = tl.load(weight + column, inside, 0).to(tl.float32)
    weight_sum = tl.zeros([BLOCK], tl.float32)
    bias_sum = tl.zeros([BLOCK], tl.float32)
    for number in range(part, rows, stride):
        place = number * pitch + column
        grad = tl.load(gradient + place, inside, 0).to(tl.float32)
        unit = tl.load(hidden + place, inside, 0).to(tl.float32)
        rstd = tl.load(moments + number)
        if CENTRED:
            unit = tl.where(inside, unit - tl.load(moments + rows + number), 0)
            bias_sum += grad
        unit *= rstd
        weight_sum += grad * unit
        grad *= factor
        along = tl.sum(grad * unit, 0) / width
        if CENTRED:
            grad -= tl.sum(grad, 0) / width
        grad = rstd * (grad - unit * along)
        if PASSED:
            grad += tl.load(passed + place, inside, 0).to(tl.float32)
        tl.store(result + place, grad.to(result.dtype.element_ty), inside)
    tl.store(parts + part * width + column, weight_sum, inside)
    if CENTRED:
        tl.store(parts + (stride + part) * width + column, bias_sum, inside)


@triton.jit
def _scaled_add_backward(
    gradient, branch, bias, scale, tile_scale, result, parts, rows, width, batch,
    BIAS: tl.constexpr, SCALE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part, stride = tl.program_id(0), tl.num_programs(0)
    pitch = width.to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    bias_sum = tl.zeros([BLOCK], tl.float32)
    scale_sum = tl.zeros([BLOCK], tl.float32)
    if SCALE:
        factor = tl.load(scale + column, inside, 0).to(tl.float32)
        shift = tl.zeros([BLOCK], tl.float32)
        if BIAS:
            shift = tl.load(bias + column, inside, 0).to(tl.float32)
    for number in range(part, rows, stride):
        place = number * pitch + column
        grad = tl.load(gradient + place, inside, 0).to(tl.float32)
        if TILES:
            grad *= tl.load(tile_scale + number % batch).to(tl.float32)
        if SCALE:
            scale_sum += grad * (tl.load(branch + place, inside, 0).to(tl.float32) + shift)
            grad *= factor
        if SCALE or TILES:
            tl.store(result + place, grad.to(result.dtype.element_ty), inside)
        if BIAS:
            bias_sum += grad
    if BIAS:
        tl.store(parts + part * width + column, bias_sum, inside)
    if SCALE:
        tl.store(parts + (stride + part) * width + column, scale_sum, inside)


def _row_launch(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


def add_norm(
    residual_RH: torch.Tensor,
    branch: tuple[torch.Tensor | None, ...],
    norm: tuple[torch.Tensor | None, ...],
    eps: float,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Write the residual with a scaled branch added, its norm and its moments; all contiguous.

    Args:
        branch: what is added [R, H], its bias [H], scale [H] and tiles' scales [B], each or None.
        norm: weight and bias [H]; no weight means no norm, no bias RMSNorm.
        outputs: sum and norm [R, H], moments [M, R]; of these only what is asked for is written.
    """
    added_RH, bias_H, scale_H, tile_scale_B = branch
    weight_H, norm_bias_H = norm
    width = residual_RH.shape[-1]
    rows = residual_RH.numel() // width
    if rows:
        _add_norm[(rows,)](
            residual_RH, added_RH, bias_H, scale_H, tile_scale_B, weight_H, norm_bias_H, *outputs,
            rows, width, residual_RH.shape[-2], eps, ADDS=added_RH is not None,
            BIAS=bias_H is not None, SCALE=scale_H is not None, TILES=tile_scale_B is not None,
            NORM=weight_H is not None, CENTRED=norm_bias_H is not None, **_row_launch(width),
        )  # fmt: skip


def norm_backward(
    gradient_RH: torch.Tensor,
    passed_RH: torch.Tensor | None,
    hidden_RH: torch.Tensor,
    moments_MR: torch.Tensor,
    weight_H: torch.Tensor,
    result_RH: torch.Tensor,
) -> torch.Tensor:
    """Write the gradient of what was normed and return its weights', float32 [M, H].

    Args:
        passed_RH: gradient that comes past the norm, to be added; or None.
    """
    width = len(weight_H)
    rows = hidden_RH.numel() // width
    sums = len(moments_MR)
    count = min(rows, _PARTS)
    parts_MPH = hidden_RH.new_empty((sums, count, width), dtype=torch.float32)
    if rows:
        _norm_backward[(count,)](
            gradient_RH, passed_RH, hidden_RH, moments_MR, weight_H, result_RH, parts_MPH, rows,
            width, PASSED=passed_RH is not None, CENTRED=sums == 2, **_row_launch(width),
        )  # fmt: skip
    return parts_MPH.sum(1)


def scaled_add_backward(
    gradient_RH: torch.Tensor,
    branch: tuple[torch.Tensor | None, ...],
    result_RH: torch.Tensor,
) -> torch.Tensor:
    """Write the gradient of the branch and return those of bias and scale, float32 [2, H].

    Args:
        branch: as in `add_norm`; without a scale the branch itself is not read.
    """
    added_RH, bias_H, scale_H, tile_scale_B = branch
    width = gradient_RH.shape[-1]
    rows = gradient_RH.numel() // width
    count = min(rows, _PARTS)
    parts_2PH = gradient_RH.new_empty((2, count, width), dtype=torch.float32)
    if rows:
        _scaled_add_backward[(count,)](
            gradient_RH, added_RH, bias_H, scale_H, tile_scale_B, result_RH, parts_2PH, rows,
            width, gradient_RH.shape[-2], BIAS=bias_H is not None, SCALE=scale_H is not None,
            TILES=tile_scale_B is not None, **_row_launch(width),
        )  # fmt: skip
    return parts_2PH.sum(1)
