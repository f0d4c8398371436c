"""Compilation of fused operations' bodies on CUDA, and their backward."""

import functools
from collections.abc import Callable, Sequence
from types import FunctionType
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
            chosen = compile_body(name, body) if is_compiled(arguments[0]) else body
            return chosen(*arguments)

        return run

    return decorate


def is_compiled(first: torch.Tensor) -> bool:
    """Return whether a body with this first argument is compiled."""
    return first.is_cuda


def differentiable(name: str) -> Callable[[Body], Body]:
    """Return a decorator that gives a body a backward, for which only its inputs are kept.

    Backward differentiates the body in float32, so that sums over rows are rounded once. Both are
    compiled on CUDA: the body under `name`, backward under `name` with "_backward".
    """

    def decorate(body: Body) -> Body:
        forward = compiled_on_cuda(name)(body)

        @compiled_on_cuda(f"{name}_backward")
        def backward(*gradients_and_inputs: Any) -> list[torch.Tensor | None]:
            *gradients, inputs = gradients_and_inputs
            pull_back = prepare_gradients(body, inputs)
            return [
                None if own is None else own.to(value.dtype)
                for own, value in zip(pull_back(*gradients), inputs, strict=True)
            ]

        def run(*inputs: Any) -> Any:
            return _KeepInputs.apply(forward, backward, *inputs)

        return functools.wraps(body)(run)

    return decorate


def prepare_gradients(body: Body, inputs: Sequence[Any]) -> Callable[..., list[Any]]:
    """Return a function from gradients of a body's outputs to those of its inputs, all float32.

    The body runs in float32. Gradients are None for inputs that are not floating-point tensors.
    """
    places = [place for place, value in enumerate(inputs) if _is_float(value)]

    def run_body(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        replaced = dict(zip(places, values, strict=True))
        outputs = body(*(replaced.get(place, own) for place, own in enumerate(inputs)))
        return outputs if isinstance(outputs, tuple) else (outputs,)

    _, pull_back = torch.func.vjp(run_body, *(inputs[place].float() for place in places))

    def pull_all(*gradients: torch.Tensor) -> list[torch.Tensor | None]:
        own = pull_back(tuple(gradient.float() for gradient in gradients))
        of_place = dict(zip(places, own, strict=True))
        return [of_place.get(place) for place in range(len(inputs))]

    return pull_all


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


class _KeepInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, run_backward, *inputs):
        inputs = tree_map_only(torch.Tensor, torch.Tensor.contiguous, inputs)
        tensors = [value if isinstance(value, torch.Tensor) else None for value in inputs]
        ctx.save_for_backward(*tensors)
        ctx.run_backward = run_backward
        ctx.others = [None if isinstance(value, torch.Tensor) else value for value in inputs]
        return run(*inputs)

    @staticmethod
    def backward(ctx, *gradients):
        pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
        inputs = [value if tensor is None else tensor for tensor, value in pairs]
        contiguous = (gradient.contiguous() for gradient in gradients)
        return None, None, *ctx.run_backward(*contiguous, inputs)


@functools.cache
def compile_body(name: str, body: Body) -> Body:
    code = body.__code__.replace(co_name=name)
    # Recompilations are limited per code object, which all backwards of `differentiable` share.
    own = FunctionType(code, body.__globals__, name, body.__defaults__, body.__closure__)
    run = torch.compile(own)

    @functools.wraps(body)
    def run_detached(*arguments: Any) -> Any:
        # Else torch would compile each combination of `requires_grad` separately.
        return run(*tree_map_only(torch.Tensor, torch.Tensor.detach, arguments))

    return run_detached
