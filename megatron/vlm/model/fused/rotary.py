"""Rotary position embedding of packed samples, with the split of q, k and v and Qwen3's head norms.

Shapes: T packed tokens, G key/value heads of this rank, Q query heads of a key/value head,
N = G * Q, D head size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron.vlm.model.fused.compiled import compiled_on_cuda

PackedHeads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q [T, N, D], k and v [T, G, D]


class Rotation(NamedTuple):
    """Cosines and sines of all tokens, float32 [T, D / 2]; made once per micro-batch.

    With partial RoPE they are fewer, and turn the first values of a head.
    """

    cosines: torch.Tensor
    sines: torch.Tensor


def locate_tokens(borders: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's position in its sample, and the sample's number, [T]; see `rotation`."""
    # All on the device, so that the host does not wait for `borders`.
    places_T = torch.arange(tokens, device=borders.device, dtype=borders.dtype)
    samples_T = torch.bucketize(places_T, borders[1:], right=True)
    return places_T - borders[samples_T], samples_T


def rotation(
    borders: torch.Tensor, tokens: int, frequencies: torch.Tensor, first: torch.Tensor | None = None
) -> Rotation:
    """Return the rotation of every token by its position in the sample.

    Args:
        borders: first tokens of samples or pieces, and the end, int32, on the device.
        tokens: total tokens.
        frequencies: angles per position (RoPE, arXiv 2104.09864), float32 [D / 2].
        first: for pieces of samples, first token within the sample, int32 [pieces], on the device.
    """
    positions_T, samples_T = locate_tokens(borders, tokens)
    if first is not None:
        positions_T += first[samples_T]
    angles = positions_T.to(frequencies.dtype).outer(frequencies)
    return Rotation(angles.cos(), angles.sin())


def sectioned_rotation(
    positions_3S: torch.Tensor, axes_F: torch.Tensor, frequencies: torch.Tensor
) -> Rotation:
    """Return the rotation of multimodal RoPE (Qwen2-VL, arXiv 2409.12191, section 2.1).

    Args:
        positions_3S: time, row and column of every token, [3, T].
        axes_F: axis of each frequency, int64 [D / 2].
        frequencies: float32 [D / 2].
    """
    angles = positions_3S.T.index_select(1, axes_F) * frequencies
    return Rotation(angles.cos(), angles.sin())


def _turn(heads_TND: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    # As Llama: the pairs are first and second half of a head, not neighbours.
    cosines, sines = cosines.unsqueeze(1), sines.unsqueeze(1)
    half = cosines.shape[-1]
    first, second, kept = heads_TND.split([half, half, heads_TND.shape[-1] - 2 * half], -1)
    turned = first * cosines - second * sines, second * cosines + first * sines
    return torch.cat((*turned, kept) if kept.shape[-1] else turned, dim=-1)


def _turn_back(heads_TND: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    return _turn(heads_TND, cosines, -sines)


def _group_queries(query_TND: torch.Tensor, groups: int) -> torch.Tensor:
    return query_TND.unflatten(1, (groups, query_TND.shape[1] // groups))


@compiled_on_cuda("split_and_rotate")
def _split_and_rotate(
    qkv: torch.Tensor, queries_per_group: int, cosines: torch.Tensor, sines: torch.Tensor
) -> PackedHeads:
    size = qkv.shape[-1] // (queries_per_group + 2)
    query, key_TGD, value_TGD = qkv.split([queries_per_group * size, size, size], -1)
    query_TND = query.reshape(len(qkv), queries_per_group * qkv.shape[1], size)
    query_TND, key_TGD = (_turn(x, cosines, sines).to(qkv.dtype) for x in (query_TND, key_TGD))
    return query_TND, key_TGD, value_TGD.clone(memory_format=torch.contiguous_format)


@compiled_on_cuda("split_and_rotate_backward")
def _rotate_back(
    query_TND: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
) -> torch.Tensor:
    query_TND, key_TGD = (_turn_back(x, cosines, sines).to(x.dtype) for x in (query_TND, key_TGD))
    query = _group_queries(query_TND, key_TGD.shape[1]).flatten(2)
    return torch.cat((query, key_TGD, value_TGD), -1)


class SplitAndRotate(torch.autograd.Function):
    """Split [T, G, (Q + 2) D] into q, k and v, with rotation of q and k; input is not kept."""

    @staticmethod
    def forward(ctx, qkv, queries_per_group, cosines, sines):
        ctx.save_for_backward(cosines, sines)
        return _split_and_rotate(qkv.contiguous(), queries_per_group, cosines, sines)

    @staticmethod
    def backward(ctx, *gradients):
        parts = [gradient.contiguous() for gradient in gradients]
        return _rotate_back(*parts, *ctx.saved_tensors), None, None, None


@compiled_on_cuda("norm_and_rotate")
def _norm_and_rotate(
    qkv: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    query_weight_D: torch.Tensor,
    key_weight_D: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return normed and rotated q and k, and rstd of each head, float32 [T, G, Q + 1]."""
    heads = qkv.unflatten(-1, (-1, len(query_weight_D)))[:, :, :-1].float()
    rstds = torch.rsqrt(heads.square().mean(-1) + eps)
    units = heads * rstds.unsqueeze(-1)
    query_TND = units[:, :, :-1].flatten(1, 2) * query_weight_D
    key_TGD = units[:, :, -1] * key_weight_D
    query_TND, key_TGD = (_turn(x, cosines, sines).to(qkv.dtype) for x in (query_TND, key_TGD))
    return query_TND, key_TGD, rstds


@compiled_on_cuda("norm_and_rotate_backward")
def _norm_and_rotate_backward(
    qkv: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    turned_by: Sequence[torch.Tensor],
    weights_D: Sequence[torch.Tensor],
    rstds: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of `qkv` and of both weights, [2, D]."""
    query_TND, key_TGD, value_TGD = gradients
    query_TND, key_TGD = (_turn_back(x, *turned_by) for x in (query_TND, key_TGD))
    query, key = _group_queries(query_TND, key_TGD.shape[1]), key_TGD.unsqueeze(2)
    rstds = rstds.unsqueeze(-1)
    units = qkv.unflatten(-1, (-1, key.shape[-1]))[:, :, :-1] * rstds
    own = torch.cat((query * weights_D[0], key * weights_D[1]), 2)
    of_heads = rstds * (own - units * (own * units).mean(-1, keepdim=True))
    of_query_D = (query * units[:, :, :-1]).sum((0, 1, 2))
    of_key_D = (key * units[:, :, -1:]).sum((0, 1, 2))
    of_qkv = torch.cat((of_heads.to(qkv.dtype), value_TGD.unsqueeze(2)), 2).flatten(2)
    return of_qkv, torch.stack((of_query_D, of_key_D)).to(weights_D[0].dtype)


class NormAndRotate(torch.autograd.Function):
    """Split [T, G, (Q + 2) D] into q, k and v, with RMSNorm per head and rotation of q and k.

    The norms' weights are shared by all heads. v is a view of the input, which is kept.
    """

    @staticmethod
    def forward(ctx, qkv, queries_per_group, cosines, sines, query_weight_D, key_weight_D, eps):
        qkv = qkv.contiguous()
        tables_and_weights = (cosines, sines, query_weight_D, key_weight_D)
        query_TND, key_TGD, rstds = _norm_and_rotate(qkv, *tables_and_weights, eps)
        ctx.save_for_backward(qkv, *tables_and_weights, rstds)
        return query_TND, key_TGD, qkv[..., -len(query_weight_D) :]

    @staticmethod
    def backward(ctx, *gradients):
        qkv, cosines, sines, *weights_D, rstds = ctx.saved_tensors
        parts = [gradient.contiguous() for gradient in gradients]
        of_qkv, of_weights_2D = _norm_and_rotate_backward(
            qkv, parts, (cosines, sines), weights_D, rstds
        )
        return of_qkv, None, None, None, *of_weights_2D, None
