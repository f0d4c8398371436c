"""Kernels of the rotary embedding behind norms of q's and k's heads.

Shapes: T tokens, G key/value heads of this rank, Q queries' heads of each, H = Q + 1 heads with a
norm, D head size.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_PAIRS = 1024  # of elements that a program turns
_PARTS = 256  # programs that sum parts of the weights' gradients


@triton.jit
def _forward(
    qkv, query_weight, key_weight, query, key, rstds, cosines, sines, rows, groups, eps,
    PER_GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    is_column = (column < HALF)[None, :]
    is_row = row < rows
    inside = is_row[:, None] & is_column
    normed: tl.constexpr = PER_GROUP + 1
    group, within = row // normed, row % normed
    is_query = (within < PER_GROUP)[:, None]
    place = qkv + ((group * (normed + 1) + within) * 2 * HALF)[:, None] + column[None, :]
    first = tl.load(place, inside, 0).to(tl.float32)
    second = tl.load(place + HALF, inside, 0).to(tl.float32)
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    rstd = tl.rsqrt(squares / (2 * HALF) + eps)
    tl.store(rstds + row, rstd, is_row)
    of_query, of_key = query_weight + column[None, :], key_weight + column[None, :]
    first *= rstd[:, None] * tl.where(
        is_query, tl.load(of_query, is_column, 0), tl.load(of_key, is_column, 0)
    ).to(tl.float32)
    second *= rstd[:, None] * tl.where(
        is_query, tl.load(of_query + HALF, is_column, 0), tl.load(of_key + HALF, is_column, 0)
    ).to(tl.float32)
    angle = (group // groups * HALF)[:, None] + column[None, :]
    cosine, sine = tl.load(cosines + angle, inside, 0), tl.load(sines + angle, inside, 0)
    dtype = query.dtype.element_ty
    turned_first = (first * cosine - second * sine).to(dtype)
    turned_second = (second * cosine + first * sine).to(dtype)
    of_query = query + ((group * PER_GROUP + within) * 2 * HALF)[:, None] + column[None, :]
    of_key = key + (group * 2 * HALF)[:, None] + column[None, :]
    tl.store(of_query, turned_first, inside & is_query)
    tl.store(of_query + HALF, turned_second, inside & is_query)
    tl.store(of_key, turned_first, inside & ~is_query)
    tl.store(of_key + HALF, turned_second, inside & ~is_query)


@triton.jit
def _one_of(of_query, of_key, of_value, is_query, is_key, is_value, inside):
    """Gradients of whichever a row is of."""
    whole = tl.load(of_query, inside & is_query, 0).to(tl.float32)
    whole += tl.load(of_key, inside & is_key, 0).to(tl.float32)
    return whole + tl.load(of_value, inside & is_value, 0).to(tl.float32)


@triton.jit
def _backward(
    query, key, value, qkv, query_weight, key_weight, rstds, cosines, sines, result, parts, rows,
    groups, PER_GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    part, stride = tl.program_id(0), tl.num_programs(0)
    slots: tl.constexpr = PER_GROUP + 2
    column = tl.arange(0, BLOCK)
    columns, is_column = column[None, :], (column < HALF)[None, :]
    query_first = tl.load(query_weight + columns, is_column, 0).to(tl.float32)
    query_second = tl.load(query_weight + HALF + columns, is_column, 0).to(tl.float32)
    key_first = tl.load(key_weight + columns, is_column, 0).to(tl.float32)
    key_second = tl.load(key_weight + HALF + columns, is_column, 0).to(tl.float32)
    query_sum_first = tl.zeros([BLOCK], tl.float32)
    query_sum_second = tl.zeros([BLOCK], tl.float32)
    key_sum_first = tl.zeros([BLOCK], tl.float32)
    key_sum_second = tl.zeros([BLOCK], tl.float32)
    dtype = result.dtype.element_ty
    for block in range(part, tl.cdiv(rows, ROWS), stride):
        row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
        group, within = row // slots, row % slots
        inside = (row < rows)[:, None] & is_column
        is_query = (within < PER_GROUP)[:, None]
        is_key = (within == PER_GROUP)[:, None]
        is_value = (within > PER_GROUP)[:, None]
        of_query = query + ((group * PER_GROUP + within) * 2 * HALF)[:, None] + columns
        of_key = key + (group * 2 * HALF)[:, None] + columns
        of_value = value + (group * 2 * HALF)[:, None] + columns
        grad_first = _one_of(of_query, of_key, of_value, is_query, is_key, is_value, inside)
        grad_second = _one_of(
            of_query + HALF, of_key + HALF, of_value + HALF, is_query, is_key, is_value, inside
        )
        angle = (group // groups * HALF)[:, None] + columns
        cosine = tl.load(cosines + angle, inside & ~is_value, 1)
        sine = tl.load(sines + angle, inside & ~is_value, 0)
        first = grad_first * cosine + grad_second * sine
        second = grad_second * cosine - grad_first * sine
        # A value has a unit of 0 and an rstd and a weight of 1, so that its gradient passes.
        place = (row * 2 * HALF)[:, None] + columns
        rstd = tl.load(
            rstds + (group * (slots - 1) + within)[:, None], (row < rows)[:, None] & ~is_value, 1
        )
        unit_first = tl.load(qkv + place, inside & ~is_value, 0).to(tl.float32) * rstd
        unit_second = tl.load(qkv + place + HALF, inside & ~is_value, 0).to(tl.float32) * rstd
        share_first, share_second = first * unit_first, second * unit_second
        query_sum_first += tl.sum(tl.where(is_query, share_first, 0.0), 0)
        query_sum_second += tl.sum(tl.where(is_query, share_second, 0.0), 0)
        key_sum_first += tl.sum(tl.where(is_key, share_first, 0.0), 0)
        key_sum_second += tl.sum(tl.where(is_key, share_second, 0.0), 0)
        first *= tl.where(is_query, query_first, tl.where(is_key, key_first, 1.0))
        second *= tl.where(is_query, query_second, tl.where(is_key, key_second, 1.0))
        along = tl.sum(first * unit_first, 1) + tl.sum(second * unit_second, 1)
        along = (along / (2 * HALF))[:, None]
        tl.store(result + place, (rstd * (first - unit_first * along)).to(dtype), inside)
        tl.store(result + place + HALF, (rstd * (second - unit_second * along)).to(dtype), inside)
    is_column = column < HALF
    place = parts + part * 4 * HALF + column
    tl.store(place, query_sum_first, is_column)
    tl.store(place + HALF, query_sum_second, is_column)
    tl.store(place + 2 * HALF, key_sum_first, is_column)
    tl.store(place + 3 * HALF, key_sum_second, is_column)


def _blocks(half: int) -> dict[str, int]:
    block = triton.next_power_of_2(half)
    return {"HALF": half, "BLOCK": block, "ROWS": max(_PAIRS // block, 1)}


def forward(
    qkv: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    weights_D: Sequence[torch.Tensor],
    eps: float,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Write normed and turned q [T, G * Q, D] and k [T, G, D], and the rstd of their heads.

    Args:
        qkv: [T, G, (Q + 2) * D]; a group's queries, its key and its value.
        cosines, sines: float32 [T, D / 2].
        weights_D: of q's norm and of k's.
        outputs: q, k and float32 [T, G, H]; all tensors are contiguous.
    """
    query, key, rstds = outputs
    _, groups, normed = rstds.shape
    rows, sizes = rstds.numel(), _blocks(key.shape[-1] // 2)
    if rows:
        _forward[(triton.cdiv(rows, sizes["ROWS"]),)](
            qkv, *weights_D, query, key, rstds, cosines, sines, rows, groups, eps,
            PER_GROUP=normed - 1, **sizes,
        )  # fmt: skip


def backward(
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    qkv: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    weights_D: Sequence[torch.Tensor],
    rstds: torch.Tensor,
    result: torch.Tensor,
) -> torch.Tensor:
    """Write the gradient of `qkv` and return the weights', float32 [2, D].

    Args:
        gradients: of q, k and v, as `forward` gives q and k.
        rstds: what `forward` wrote; all tensors are contiguous.
    """
    tokens, groups, normed = rstds.shape
    size = len(weights_D[0])
    rows, sizes = tokens * groups * (normed + 1), _blocks(size // 2)
    count = min(triton.cdiv(rows, sizes["ROWS"]), _PARTS)
    parts_P2D = qkv.new_empty((count, 2, size), dtype=torch.float32)
    if rows:
        _backward[(count,)](
            *gradients, qkv, *weights_D, rstds, cosines, sines, result, parts_P2D, rows, groups,
            PER_GROUP=normed - 1, **sizes,
        )  # fmt: skip
    return parts_P2D.sum(0)
