"""Kernels of the norms of q and k over all heads.

Shapes: R rows (positions of tiles), N heads of this rank, D head size, W = N * D.
"""

import torch
import triton
import triton.language as tl

_PARTS = 256  # programs that sum parts of the weights' gradients


@triton.jit
def _squares(qkv, sums, rows, width, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = row * 3 * width + column // D * 3 * D + column % D
    query = tl.load(qkv + place, inside, 0).to(tl.float32)
    key = tl.load(qkv + place + D, inside, 0).to(tl.float32)
    tl.store(sums + row, tl.sum(query * query, 0))
    tl.store(sums + rows + row, tl.sum(key * key, 0))


@triton.jit
def _norms(
    qkv, sums, query_weight, key_weight, query_out, key_out, rstds, rows, width, whole, eps,
    SUMS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = row * 3 * width + column // D * 3 * D + column % D
    query = tl.load(qkv + place, inside, 0).to(tl.float32)
    key = tl.load(qkv + place + D, inside, 0).to(tl.float32)
    if SUMS:
        query_sum = tl.load(sums + row)
        key_sum = tl.load(sums + rows + row)
    else:
        query_sum = tl.sum(query * query, 0)
        key_sum = tl.sum(key * key, 0)
    query_rstd = tl.rsqrt(query_sum / whole + eps)
    key_rstd = tl.rsqrt(key_sum / whole + eps)
    tl.store(rstds + row, query_rstd)
    tl.store(rstds + rows + row, key_rstd)
    query *= query_rstd * tl.load(query_weight + column, inside, 0).to(tl.float32)
    key *= key_rstd * tl.load(key_weight + column, inside, 0).to(tl.float32)
    dtype = query_out.dtype.element_ty
    tl.store(query_out + row * width + column, query.to(dtype), inside)
    tl.store(key_out + row * width + column, key.to(dtype), inside)


@triton.jit
def _along(
    query_grad, key_grad, qkv, query_weight, key_weight, rstds, sums, rows, width,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = row * 3 * width + column // D * 3 * D + column % D
    flat = row * width + column
    query = tl.load(qkv + place, inside, 0).to(tl.float32) * tl.load(rstds + row)
    key = tl.load(qkv + place + D, inside, 0).to(tl.float32) * tl.load(rstds + rows + row)
    query *= tl.load(query_grad + flat, inside, 0).to(tl.float32)
    key *= tl.load(key_grad + flat, inside, 0).to(tl.float32)
    query *= tl.load(query_weight + column, inside, 0).to(tl.float32)
    key *= tl.load(key_weight + column, inside, 0).to(tl.float32)
    tl.store(sums + row, tl.sum(query, 0))
    tl.store(sums + rows + row, tl.sum(key, 0))


@triton.jit
def _backward_of_one(grad, unit, rstd, weight, along, whole, SUMS: tl.constexpr):
    """Gradient of one of q and k, and its row's share of the weight's."""
    share = grad * unit
    grad *= weight
    if not SUMS:
        along = tl.sum(grad * unit, 0)
    return rstd * (grad - unit * (along / whole)), share


@triton.jit
def _backward(
    query_grad, key_grad, value_grad, qkv, query_weight, key_weight, rstds, along, result, parts,
    rows, width, whole, SUMS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part, stride = tl.program_id(0), tl.num_programs(0)
    pitch = width.to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    of_query = tl.load(query_weight + column, inside, 0).to(tl.float32)
    of_key = tl.load(key_weight + column, inside, 0).to(tl.float32)
    query_sum = tl.zeros([BLOCK], tl.float32)
    key_sum = tl.zeros([BLOCK], tl.float32)
    dtype = result.dtype.element_ty
    for number in range(part, rows, stride):
        flat = number * pitch + column
        place = number * 3 * pitch + column // D * 3 * D + column % D
        query_rstd, key_rstd = tl.load(rstds + number), tl.load(rstds + rows + number)
        query_along, key_along = 0.0, 0.0
        if SUMS:
            query_along, key_along = tl.load(along + number), tl.load(along + rows + number)
        query = tl.load(qkv + place, inside, 0).to(tl.float32) * query_rstd
        grad = tl.load(query_grad + flat, inside, 0).to(tl.float32)
        grad, share = _backward_of_one(grad, query, query_rstd, of_query, query_along, whole, SUMS)
        query_sum += share
        tl.store(result + place, grad.to(dtype), inside)
        key = tl.load(qkv + place + D, inside, 0).to(tl.float32) * key_rstd
        grad = tl.load(key_grad + flat, inside, 0).to(tl.float32)
        grad, share = _backward_of_one(grad, key, key_rstd, of_key, key_along, whole, SUMS)
        key_sum += share
        tl.store(result + place + D, grad.to(dtype), inside)
        tl.store(result + place + 2 * D, tl.load(value_grad + flat, inside, 0), inside)
    tl.store(parts + part * width + column, query_sum, inside)
    tl.store(parts + (stride + part) * width + column, key_sum, inside)


def _row_launch(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


def _rows(qkv_RN3D: torch.Tensor) -> int:
    return qkv_RN3D.numel() // (qkv_RN3D.shape[-2] * qkv_RN3D.shape[-1])


def squares(qkv_RN3D: torch.Tensor, sums_2R: torch.Tensor) -> None:
    """Write the sums of squares of q and of k of every row, float32; all are contiguous."""
    heads, three_sizes = qkv_RN3D.shape[-2:]
    size, rows = three_sizes // 3, _rows(qkv_RN3D)
    if rows:
        _squares[(rows,)](
            qkv_RN3D, sums_2R, rows, heads * size, D=size, **_row_launch(heads * size)
        )


def norms(
    qkv_RN3D: torch.Tensor,
    weights_W: list[torch.Tensor],
    sums_2R: torch.Tensor | None,
    width: int,
    eps: float,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Write normed q and k [R, N, D] and their rstd, float32 [2, R]; all are contiguous.

    Args:
        sums_2R: sums of squares over all ranks; None where this rank has all heads.
        width: of all ranks' heads together, without padding.
    """
    heads, three_sizes = qkv_RN3D.shape[-2:]
    size, rows = three_sizes // 3, _rows(qkv_RN3D)
    if rows:
        _norms[(rows,)](
            qkv_RN3D, sums_2R, *weights_W, *outputs, rows, heads * size, width, eps,
            SUMS=sums_2R is not None, D=size, **_row_launch(heads * size),
        )  # fmt: skip


def along(
    gradients_RND: list[torch.Tensor],
    qkv_RN3D: torch.Tensor,
    weights_W: list[torch.Tensor],
    rstds_2R: torch.Tensor,
    sums_2R: torch.Tensor,
) -> None:
    """Write the gradients' parts along normed q and k, summed over this rank's heads."""
    heads, three_sizes = qkv_RN3D.shape[-2:]
    size, rows = three_sizes // 3, _rows(qkv_RN3D)
    if rows:
        _along[(rows,)](
            *gradients_RND[:2], qkv_RN3D, *weights_W, rstds_2R, sums_2R, rows, heads * size,
            D=size, **_row_launch(heads * size),
        )  # fmt: skip


def backward(
    gradients_RND: list[torch.Tensor],
    qkv_RN3D: torch.Tensor,
    weights_W: list[torch.Tensor],
    rstds_2R: torch.Tensor,
    along_2R: torch.Tensor | None,
    width: int,
    result_RN3D: torch.Tensor,
) -> torch.Tensor:
    """Write the gradient of q, k and v in one and return the weights', float32 [2, W].

    Args:
        along_2R: what `along` writes, summed over ranks; None where this rank has all heads.
    """
    heads, three_sizes = qkv_RN3D.shape[-2:]
    size, rows = three_sizes // 3, _rows(qkv_RN3D)
    count = min(rows, _PARTS)
    parts_2PW = qkv_RN3D.new_empty((2, count, heads * size), dtype=torch.float32)
    if rows:
        _backward[(count,)](
            *gradients_RND, qkv_RN3D, *weights_W, rstds_2R, along_2R, result_RN3D, parts_2PW,
            rows, heads * size, width, SUMS=along_2R is not None, D=size,
            **_row_launch(heads * size),
        )  # fmt: skip
    return parts_2PW.sum(1)
