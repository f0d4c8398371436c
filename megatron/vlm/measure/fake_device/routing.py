"""Even routing of tokens to experts on a fake device, which has no data to route by.

Megatron-core's dispatcher runs as in training, with equal counts for all experts.
Shapes: S tokens, E experts, R copies of tokens (rows), H hidden size.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch


class _Select(torch.autograd.Function):
    """`masked_select` of a given number of values: a fake mask has no values to count."""

    @staticmethod
    def forward(ctx, values_ES, mask_ES, rows):
        ctx.save_for_backward(values_ES, mask_ES)
        return values_ES.new_empty(rows)

    @staticmethod
    def backward(ctx, *gradients):
        values_ES, mask_ES = ctx.saved_tensors
        gradient_ES = torch.zeros_like(values_ES)
        return gradient_ES.masked_scatter(mask_ES, gradients[0]), None, None


def _permute(
    tokens_SH: torch.Tensor,
    routing_map_SE: torch.Tensor,
    probs: torch.Tensor,
    num_out_tokens: int,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy tokens for their experts, as core's `permute` without Transformer Engine.

    Returns:
        Rows [R, H], their weights [R] and their tokens [R].
    """
    chosen_ES = routing_map_SE.bool().T.contiguous()
    places_ES = torch.arange(len(tokens_SH), device=tokens_SH.device).expand(len(chosen_ES), -1)
    places_R = _Select.apply(places_ES, chosen_ES, num_out_tokens)
    weights_R = _Select.apply(probs.T.contiguous(), chosen_ES, num_out_tokens)
    return tokens_SH.index_select(0, places_R), weights_R, places_R


def _sort_chunks(
    rows: torch.Tensor,
    split_sizes: np.ndarray,
    sorted_idxs: Sequence[int],
    probs: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    # Only sizes matter, so the chunks stay in order.
    sizes = split_sizes.tolist()
    weights = None if probs is None else torch.cat(probs.split(sizes))
    return torch.cat(rows.split(sizes)), weights


def _divide_evenly(total: int, parts: int) -> np.ndarray:
    """Return `parts` integers that differ by at most one and sum to `total`."""
    bounds = np.arange(parts + 1) * total // parts
    return np.diff(bounds)


def _spread_tokens(dispatcher: Any, routing_map_SE: torch.Tensor) -> np.ndarray:
    """Set the token counts of core's `preprocess`; return the counts of this rank's experts."""
    ranks, experts = dispatcher.ep_size, dispatcher.num_local_experts
    dispatcher.num_out_tokens = len(routing_map_SE) * dispatcher.config.moe_router_topk
    # [ranks, experts of a rank]
    sent = _divide_evenly(dispatcher.num_out_tokens, dispatcher.num_experts).reshape(ranks, experts)
    if ranks > 1:
        dispatcher.input_splits = dispatcher.output_splits = sent.sum(1)
    # This rank receives as many rows from a rank as it sends there: all ranks are equally full.
    own = np.stack([_divide_evenly(int(rows), experts) for rows in sent.sum(1)])
    dispatcher.num_global_tokens_per_local_expert = own
    return own.sum(0)


@contextlib.contextmanager
def route_evenly(read: Callable[[], None]) -> Iterator[None]:
    """Make core's dispatcher spread tokens evenly; `read` replaces copies of counts to the host."""
    from megatron.core.transformer.moe import token_dispatcher

    def synchronize(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if point == dispatcher.cuda_dtoh_point:  # core's point of copying counts to the host
            read()
        return tokens_per_expert

    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    with (
        patch.object(dispatcher, "preprocess", _spread_tokens),
        patch.object(dispatcher, "_maybe_dtoh_and_synchronize", synchronize),
        patch.object(token_dispatcher, "permute", _permute),
        patch.object(token_dispatcher, "sort_chunks_by_idxs", _sort_chunks),
    ):
        yield
