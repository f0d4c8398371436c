"""Vocabulary-parallel cross entropy that keeps 16-bit logits.

It makes a 16-bit gradient, 4 bytes per logit at peak; torch's fp32 softmax and gradients need 12.
Sums are in fp32 in both.

Shapes: L loss positions, W words of this rank with padding at the end.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.vlm.model.fused.compiled import compiled_on_cuda


@dataclass(frozen=True, slots=True)
class OwnWords:
    first: int  # number in the vocabulary of this rank's first word
    count: int  # unpadded words
    group: dist.ProcessGroup | None  # ranks that divide the vocabulary, or None for one rank


def cross_entropy(logits_LW: torch.Tensor, labels_L: torch.Tensor, words: OwnWords) -> torch.Tensor:
    """Return the loss of each position, float32 [L]; labels are numbers in the vocabulary."""
    return CrossEntropy.apply(logits_LW, labels_L, words)


def hide_padding(logits_LW: torch.Tensor, words: OwnWords) -> None:
    """Set the logits of padded words to -inf, in place."""
    # Hidden from autograd: these words have no gradient.
    logits_LW.detach()[:, words.count :].fill_(-torch.inf)


@compiled_on_cuda("cross_entropy")
def _local_parts(
    logits_LW: torch.Tensor, labels_L: torch.Tensor, first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maximum local logit [L], and the sum of exponentials and the label's logit [2, L].

    The label's logit is 0 if another rank has it. All are float32.
    """
    # Over padded rows: a kernel loads value by value if 16 does not divide the row length.
    words_W = torch.arange(logits_LW.shape[1], device=logits_LW.device)
    own_LW = torch.where(words_W < count, logits_LW.float(), -torch.inf)
    largest_L = own_LW.amax(1)
    shift_L = largest_L.clamp_min(torch.finfo(torch.float32).min)  # if all words are padding
    sums_L = torch.exp(own_LW - shift_L.unsqueeze(1)).sum(1)
    own_labels_L = labels_L - first  # outside [0, count) if another rank has the word
    is_own_L = (own_labels_L >= 0) & (own_labels_L < count)
    places_L1 = own_labels_L.clamp(0, logits_LW.shape[1] - 1).unsqueeze(1)
    of_labels_L = logits_LW.gather(1, places_L1).squeeze(1).float()
    return largest_L, torch.stack((sums_L, torch.where(is_own_L, of_labels_L, 0.0)))


@compiled_on_cuda("cross_entropy_backward")
def _logit_gradient(
    gradient_L: torch.Tensor,
    logits_LW: torch.Tensor,
    labels_L: torch.Tensor,
    normalizer_L: torch.Tensor,
    first: int,
    count: int,
) -> torch.Tensor:
    words_W = torch.arange(logits_LW.shape[1], device=logits_LW.device)
    shares_LW = torch.exp(logits_LW.float() - normalizer_L.unsqueeze(1))
    is_label_LW = words_W == (labels_L - first).unsqueeze(1)
    gradient_LW = torch.where(is_label_LW, shares_LW - 1, shares_LW) * gradient_L.unsqueeze(1)
    # A label of the next rank has the number of a padded word here.
    return torch.where(words_W < count, gradient_LW, 0.0).to(logits_LW.dtype)


def combine_parts(
    largest_L: torch.Tensor, sums_2L: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return losses and log-sum-exp, [L] each, from every rank's `_local_parts`; collective."""
    if group is not None:
        # Each rank's sum of exponentials is relative to its own maximum.
        own_largest_L = largest_L.clone()
        dist.all_reduce(largest_L, op=dist.ReduceOp.MAX, group=group)
        sums_2L[0] *= torch.exp(own_largest_L - largest_L)
        dist.all_reduce(sums_2L, group=group)
    normalizer_L = largest_L + sums_2L[0].log()
    return normalizer_L - sums_2L[1], normalizer_L


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_LW, labels_L, words):
        logits_LW = logits_LW.contiguous()
        largest_L, sums_2L = _local_parts(logits_LW, labels_L, words.first, words.count)
        losses_L, normalizer_L = combine_parts(largest_L, sums_2L, words.group)
        ctx.save_for_backward(logits_LW, labels_L, normalizer_L)
        ctx.words = words
        return losses_L

    @staticmethod
    def backward(ctx, gradient_L):
        words = ctx.words
        gradient_L = gradient_L.contiguous()
        saved = ctx.saved_tensors
        return _logit_gradient(gradient_L, *saved, words.first, words.count), None, None
