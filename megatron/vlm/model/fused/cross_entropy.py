"""Cross entropy of logits that tensor-parallel ranks may share: keeps the logits as they come.

Torch's own keeps an fp32 softmax and makes two fp32 gradients, 12 bytes a logit at its peak; this
one keeps the 16 bit logits and makes a 16 bit gradient, 4 bytes. Sums are in fp32 either way.

Shapes: L loss positions, W words of this rank, of which the last may be padding.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel

from megatron.vlm.model.fused.operation import operation
from megatron.vlm.model.fused.sizes import require, require_shapes


@dataclass(frozen=True, slots=True)
class OwnWords:
    """Words of a vocabulary whose logits this rank has."""

    first: int
    """Number of the first one in the whole vocabulary."""
    count: int
    """Words without padding; logits after them stand for no word."""
    group: dist.ProcessGroup | None
    """Ranks that have the others; None where this one has all."""


def cross_entropy(logits_LW: torch.Tensor, labels_L: torch.Tensor, words: OwnWords) -> torch.Tensor:
    """Return the loss of each position, float32 [L].

    Args:
        labels_L: numbers of words in the whole vocabulary.
    """
    if logits_LW.is_cuda:
        return CrossEntropy.apply(logits_LW, labels_L, words)
    return eager_cross_entropy(logits_LW, labels_L, words)


def eager_cross_entropy(
    logits_LW: torch.Tensor, labels_L: torch.Tensor, words: OwnWords
) -> torch.Tensor:
    """`cross_entropy` in plain torch, for every device."""
    logits_LW = logits_LW.float()
    hide_padding(logits_LW, words)
    if words.group is None:
        return F.cross_entropy(logits_LW, labels_L, reduction="none")
    return tensor_parallel.vocab_parallel_cross_entropy(logits_LW, labels_L)


def hide_padding(logits_LW: torch.Tensor, words: OwnWords) -> None:
    """Take words of padding out of the softmax, in place.

    Autograd need not know: their share of the softmax is 0, and so is their gradient.
    """
    logits_LW.detach()[:, words.count :].fill_(-torch.inf)


def _kernels() -> ModuleType:
    from megatron.vlm.model.kernels import cross_entropy  # needs Triton, which CUDA's torch brings

    return cross_entropy


def _write_partial(outputs, *arguments):
    _kernels().partial(*arguments, *outputs)
    return outputs


@operation("cross_entropy", _write_partial)
def _partial(
    logits_LW: torch.Tensor, labels_L: torch.Tensor, first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest own logit of each position; sum of all exponentials over it, and the label's logit,
    which is 0 where another rank has it."""
    _require_own_words("cross_entropy", logits_LW, first, count)
    positions = len(logits_LW)
    require_shapes("cross_entropy", labels_L=(labels_L, (positions,)))
    return (
        logits_LW.new_empty(positions, dtype=torch.float32),
        logits_LW.new_empty((2, positions), dtype=torch.float32),
    )


def _require_own_words(operation: str, logits_LW: torch.Tensor, first: int, count: int) -> None:
    shape = list(logits_LW.shape)
    require(operation, "logits_LW", shape, len(shape) == 2, "have two axes")
    require_shapes(operation, logits_LW=(logits_LW, shape))
    require(operation, "first", first, first >= 0, "be 0 or more")
    words = shape[1]
    require(operation, "count", count, 0 <= count <= words, f"be within logits_LW's {words} words")


def _write_backward(result_LW, *arguments):
    _kernels().backward(*arguments, result_LW)
    return result_LW


@operation("cross_entropy_backward", _write_backward)
def _backward(
    gradient_L: torch.Tensor,
    logits_LW: torch.Tensor,
    labels_L: torch.Tensor,
    normalizer_L: torch.Tensor,
    first: int,
    count: int,
) -> torch.Tensor:
    _require_own_words("cross_entropy_backward", logits_LW, first, count)
    positions = logits_LW.shape[:1]
    require_shapes(
        "cross_entropy_backward",
        gradient_L=(gradient_L, positions),
        labels_L=(labels_L, positions),
        normalizer_L=(normalizer_L, positions),
    )
    return torch.empty_like(logits_LW)


def combined(
    largest_L: torch.Tensor, sums_2L: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and log-sum-exp of the whole vocabulary, [L] each, from `_partial` of every rank."""
    if group is not None:
        own_largest_L = largest_L.clone()
        dist.all_reduce(largest_L, op=dist.ReduceOp.MAX, group=group)
        sums_2L[0] *= torch.exp(own_largest_L - largest_L)
        dist.all_reduce(sums_2L, group=group)
    normalizer_L = largest_L + sums_2L[0].log()
    return normalizer_L - sums_2L[1], normalizer_L


class CrossEntropy(torch.autograd.Function):
    """`cross_entropy` by kernels, for any device that runs them."""

    @staticmethod
    def forward(
        ctx: Any, logits_LW: torch.Tensor, labels_L: torch.Tensor, words: OwnWords
    ) -> torch.Tensor:
        logits_LW = logits_LW.contiguous()
        largest_L, sums_2L = _partial(logits_LW, labels_L, words.first, words.count)
        losses_L, normalizer_L = combined(largest_L, sums_2L, words.group)
        ctx.save_for_backward(logits_LW, labels_L, normalizer_L)
        ctx.words = words
        return losses_L

    @staticmethod
    def backward(ctx, gradient_L):
        words = ctx.words
        gradient_L = gradient_L.contiguous()
        return (
            _backward(gradient_L, *ctx.saved_tensors, words.first, words.count), None, None
        )  # fmt: skip
