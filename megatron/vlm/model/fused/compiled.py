"""Compilation of fused operations' bodies on CUDA."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

Body = Callable[..., Any]  # returns new tensors; the first argument is a tensor


def compiled_on_cuda(name: str) -> Callable[[Body], Body]:
    """Return a decorator that compiles a body without autograd for CUDA tensors, else calls it.

    Args:
        name: operation's name in a fake device's counts.
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
    run = torch.compile(body)

    @functools.wraps(body)
    def run_detached(*arguments: Any) -> Any:
        # Else torch would compile each combination of `requires_grad` separately.
        return run(*tree_map_only(torch.Tensor, torch.Tensor.detach, arguments))

    return run_detached
