"""Sizes that a fused operation's kernels count on: with others they would read out of bounds."""

from collections.abc import Sequence

import torch

Wanted = tuple[torch.Tensor | None, Sequence[int]]
"""An argument and the shape that it must have; one that is left out is None."""


def require(operation: str, argument: str, given: object, holds: bool, must: str) -> None:
    """Refuse an argument that does not hold what it must.

    Raises:
        ValueError: names operation and argument, what was given and what it must.
    """
    if not holds:
        raise ValueError(f"omnibal::{operation}: {argument} is {given} and must {must}")


def require_shapes(operation: str, **wanted: Wanted) -> None:
    """Refuse arguments of other shapes, or not contiguous, as kernels go through memory in order.

    Raises:
        ValueError: as `require`.
    """
    for argument, (tensor, shape) in wanted.items():
        if tensor is None:
            continue
        if tensor.shape != tuple(shape):  # words are made for an error alone, as this is a hot path
            require(operation, argument, list(tensor.shape), False, f"be {list(shape)}")
        if not tensor.is_contiguous():
            strides = f"of strides {list(tensor.stride())}"
            require(operation, argument, strides, False, "be contiguous")
