"""Kernels of the loss: one pass over a rank's logits forward, and one back.

Shapes: L loss positions, W words of this rank.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 4096  # words of a step of a program


@triton.jit
def _partial(logits, labels, largest, sums, rows, width, first, count, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top = float("-inf")
    total = 0.0
    for start in range(0, count, BLOCK):
        word = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * width + word, word < count, float("-inf")).to(tl.float32)
        top_then = top
        top = tl.maximum(top, tl.max(x, 0))
        shift = tl.where(top == float("-inf"), 0.0, top)  # as long as all are minus infinity
        total = total * tl.exp(top_then - shift) + tl.sum(tl.exp(x - shift), 0)
    label = tl.load(labels + row) - first
    is_own = (label >= 0) & (label < count)
    of_label = tl.load(logits + row * width + label, is_own, 0).to(tl.float32)
    tl.store(largest + row, top)
    tl.store(sums + row, total)
    tl.store(sums + rows + row, of_label)


@triton.jit
def _backward(
    gradient, logits, labels, normalizer, result, width, first, count, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * width + word, word < count, float("-inf")).to(tl.float32)
    share = tl.exp(x - tl.load(normalizer + row))
    label = tl.load(labels + row) - first
    grad = (share - tl.where(word == label, 1.0, 0.0)) * tl.load(gradient + row)
    # A label of the next rank's has the number of a padded word here.
    grad = tl.where(word < count, grad, 0.0)
    tl.store(result + row * width + word, grad.to(result.dtype.element_ty), word < width)


def partial(
    logits_LW: torch.Tensor,
    labels_L: torch.Tensor,
    first: int,
    count: int,
    largest_L: torch.Tensor,
    sums_2L: torch.Tensor,
) -> None:
    """Write each position's largest logit, its sum of exponentials over that, and its label's
    logit; `logits_LW` is contiguous."""
    rows, width = logits_LW.shape
    if not count:  # all words of this rank are padding
        largest_L.fill_(-torch.inf)
        sums_2L.zero_()
    elif rows:
        _partial[(rows,)](
            logits_LW, labels_L, largest_L, sums_2L, rows, width, first, count, _BLOCK
        )


def backward(
    gradient_L: torch.Tensor,
    logits_LW: torch.Tensor,
    labels_L: torch.Tensor,
    normalizer_L: torch.Tensor,
    first: int,
    count: int,
    result_LW: torch.Tensor,
) -> None:
    """Write the logits' gradient, 0 for padded words; all tensors are contiguous."""
    rows, width = logits_LW.shape
    if rows:
        _backward[(rows, triton.cdiv(width, _BLOCK))](
            gradient_L, logits_LW, labels_L, normalizer_L, result_LW, width, first, count, _BLOCK
        )
