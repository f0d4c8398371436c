"""Kernel of the rotary embedding, which also takes q, k and v out of their product and puts them
back.

Shapes: T tokens, G key/value heads of this rank, Q queries' heads of each, D head size.
"""

import torch
import triton
import triton.language as tl

_PAIRS = 1024  # of elements that a program turns


@triton.jit
def _rotate(
    qkv, query, key, value, cosines, sines, groups, PER_GROUP: tl.constexpr, HALF: tl.constexpr,
    BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slots: tl.constexpr = PER_GROUP + 2
    inside = pair < groups * slots * HALF
    column, slot = pair % HALF, pair // HALF
    group, within = slot // slots, slot % slots
    is_query, is_key, is_value = within < PER_GROUP, within == PER_GROUP, within > PER_GROUP
    whole = qkv + (token * groups * slots + slot) * 2 * HALF + column
    of_query = query + ((token * groups + group) * PER_GROUP + within) * 2 * HALF + column
    of_key = key + (token * groups + group) * 2 * HALF + column
    of_value = value + (token * groups + group) * 2 * HALF + column
    cosine = tl.load(cosines + token * HALF + column)
    sine = tl.load(sines + token * HALF + column)
    cosine = tl.where(is_value, 1.0, cosine)
    sine = tl.where(is_value, 0.0, sine)
    if BACK:
        sine = -sine
        first = tl.load(of_query, inside & is_query, 0).to(tl.float32)
        first += tl.load(of_key, inside & is_key, 0).to(tl.float32)
        first += tl.load(of_value, inside & is_value, 0).to(tl.float32)
        second = tl.load(of_query + HALF, inside & is_query, 0).to(tl.float32)
        second += tl.load(of_key + HALF, inside & is_key, 0).to(tl.float32)
        second += tl.load(of_value + HALF, inside & is_value, 0).to(tl.float32)
    else:
        first = tl.load(whole, inside, 0).to(tl.float32)
        second = tl.load(whole + HALF, inside, 0).to(tl.float32)
    dtype = qkv.dtype.element_ty
    turned_first = (first * cosine - second * sine).to(dtype)
    turned_second = (second * cosine + first * sine).to(dtype)
    if BACK:
        tl.store(whole, turned_first, inside)
        tl.store(whole + HALF, turned_second, inside)
    else:
        tl.store(of_query, turned_first, inside & is_query)
        tl.store(of_query + HALF, turned_second, inside & is_query)
        tl.store(of_key, turned_first, inside & is_key)
        tl.store(of_key + HALF, turned_second, inside & is_key)
        tl.store(of_value, turned_first, inside & is_value)
        tl.store(of_value + HALF, turned_second, inside & is_value)


def rotate(
    qkv: torch.Tensor,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cosines: torch.Tensor,
    sines: torch.Tensor,
    back: bool,
) -> None:
    """Write turned q and k, and v, out of their product; or back, gradients of them into its own.

    Args:
        qkv: [T, G, (Q + 2) * D]; a group's queries, its key and its value.
        parts: q [T, G * Q, D], k and v [T, G, D]; all tensors are contiguous.
        cosines, sines: float32 [T, D / 2].
        back: parts are read, turned the other way, and qkv is written.
    """
    tokens, groups, _ = qkv.shape
    query, key, _ = parts
    half, per_group = key.shape[-1] // 2, query.shape[-2] // groups
    if tokens:
        grid = (tokens, triton.cdiv(groups * (per_group + 2) * half, _PAIRS))
        _rotate[grid](
            qkv, *parts, cosines, sines, groups, PER_GROUP=per_group, HALF=half, BACK=back,
            BLOCK=_PAIRS,
        )  # fmt: skip
