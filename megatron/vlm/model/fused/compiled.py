"""Bodies of fused operations: plain torch, compiled if its tensors are on a CUDA device."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

Body = Callable[..., Any]
"""A function that returns new tensors; its first argument is a tensor, others may be tuples."""


def compiled_on_cuda(name: str) -> Callable[[Body], Body]:
    """Decorate a body, whose result nothing differentiates.

    Args:
        name: of the operation, as plans and fake devices know it.
    """

    def decorate(body: Body) -> Body:
        @functools.wraps(body)
        def run(*arguments: Any) -> Any:
            if not arguments[0].is_cuda:
                return body(*arguments)
            return compile_body(name, body)(*arguments)

        return run

    return decorate


@functools.cache
def compile_body(name: str, body: Body) -> Body:
    """Return the compiled body, which takes shapes that change as they come."""
    run = torch.compile(body)

    @functools.wraps(body)
    def run_detached(*arguments: Any) -> Any:
        # Else each choice of tensors that need gradients would be compiled apart.
        return run(*tree_map_only(torch.Tensor, torch.Tensor.detach, arguments))

    return run_detached
