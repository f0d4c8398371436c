"""Micro-batches padded to their longest sample, as systems that do not pack train them."""

from dataclasses import replace

import torch

from megatron.vlm.inputs.batch import MicroBatch

PADDING_TOKEN = 0


def padded_to_longest(batch: MicroBatch) -> MicroBatch:
    """The same samples, each of them followed by padding up to the length of the longest.

    Padding is computed like any token and changes nothing: attention is causal within a sample, and
    no padding carries loss.
    """
    sizes = torch.tensor(batch.segment_tokens)
    longest = max(batch.segment_tokens)
    moved_S = torch.arange(len(sizes)) * longest - (sizes.cumsum(0) - sizes)
    places_S = torch.arange(int(sizes.sum())) + moved_S.repeat_interleave(sizes)
    tokens = len(sizes) * longest
    moved: dict[str, torch.Tensor] = {}
    if batch.token_ids_S is not None:
        ids_S = batch.token_ids_S
        padded_S = ids_S.new_full((tokens,), PADDING_TOKEN)
        moved["token_ids_S"] = padded_S.index_copy(0, places_S.to(ids_S.device), ids_S)
    for name, positions in (
        ("image_positions_M", batch.image_positions_M),
        ("loss_positions_L", batch.loss_positions_L),
        ("answer_positions_A", batch.answer_positions_A),
    ):
        if positions is not None:
            moved[name] = places_S.to(positions.device)[positions]
    return replace(batch, tokens=tokens, segment_tokens=(longest,) * len(sizes), **moved)
