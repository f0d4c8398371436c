"""What fused operations refuse, as their kernels would read past the end of it on a device."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.vlm.model.fused import (
    activations,
    cross_entropy,
    head_norms,
    normed_rotary,
    residual,
    rotary,
)


def of(*shape):
    return torch.ones(shape)


HIDDEN, VECTOR, TILES = (5, 2, 8), (8,), (2,)
QKV, HEADS, WEIGHTS, MOMENTS = (5, 2, 3, 12), (5, 2, 3, 4), (12,), (2, 5, 2)
OPERATIONS = {
    "swiglu": (activations._swiglu, lambda: (of(5, 1, 6),)),
    "swiglu_backward": (activations._swiglu_backward, lambda: (of(5, 1, 3), of(5, 1, 6))),
    "bias_swiglu": (activations._bias_swiglu, lambda: (of(5, 1, 6), of(6))),
    "bias_swiglu_backward": (
        activations._bias_swiglu_backward, lambda: (of(5, 1, 3), of(5, 1, 6), of(6)),
    ),
    "bias_gelu": (activations._bias_gelu, lambda: (of(5, 1, 6), of(6), 0.0, 0.0)),
    "bias_gelu_backward": (
        activations._bias_gelu_backward, lambda: (of(5, 1, 6), of(5, 1, 6), of(6), 1.7, 0.1),
    ),
    "cross_entropy": (
        cross_entropy._partial, lambda: (of(5, 9), of(5).long(), 0, 9),
    ),
    "cross_entropy_backward": (
        cross_entropy._backward, lambda: (of(5), of(5, 9), of(5).long(), of(5), 0, 9),
    ),
    "head_squares": (head_norms._squares, lambda: (of(*QKV),)),
    "head_norms": (
        head_norms._norms,
        lambda: (of(*QKV), [of(*WEIGHTS), of(*WEIGHTS)], of(*MOMENTS), 24, 1e-6),
    ),
    "head_norms_along": (
        head_norms._along,
        lambda: ([of(*HEADS)] * 3, of(*QKV), [of(*WEIGHTS)] * 2, of(*MOMENTS)),
    ),
    "head_norms_backward": (
        head_norms._backward,
        lambda: ([of(*HEADS)] * 3, of(*QKV), [of(*WEIGHTS)] * 2, of(*MOMENTS), of(*MOMENTS), 24),
    ),
    "norm": (residual._norm, lambda: (of(*HIDDEN), of(*VECTOR), of(*VECTOR), 1e-6)),
    "scaled_add": (
        residual._scaled_add,
        lambda: (of(*HIDDEN), of(*HIDDEN), of(*VECTOR), of(*VECTOR), of(*TILES)),
    ),
    "scaled_add_norm": (
        residual._scaled_add_norm,
        lambda: (
            of(*HIDDEN), of(*HIDDEN), of(*VECTOR), of(*VECTOR), of(*TILES), of(*VECTOR),
            of(*VECTOR), 1e-6,
        ),
    ),
    "norm_backward": (
        residual._norm_backward,
        lambda: (of(*HIDDEN), of(*HIDDEN), of(*HIDDEN), of(1, 5, 2), of(*VECTOR)),
    ),
    "scaled_add_backward": (
        residual._scaled_add_backward,
        lambda: (of(*HIDDEN), of(*HIDDEN), of(*VECTOR), of(*VECTOR), of(*TILES)),
    ),
    "split_and_rotate": (rotary._rotate, lambda: (of(5, 2, 16), 2, of(5, 2), of(5, 2))),
    "split_and_rotate_backward": (
        rotary._rotate_back,
        lambda: (of(5, 4, 4), of(5, 2, 4), of(5, 2, 4), of(5, 2), of(5, 2)),
    ),
    "norm_and_rotate": (
        normed_rotary._forward,
        lambda: (of(5, 2, 16), 2, of(5, 2), of(5, 2), [of(4), of(4)], 1e-6),
    ),
    "norm_and_rotate_backward": (
        normed_rotary._backward,
        lambda: (
            of(5, 4, 4), of(5, 2, 4), of(5, 2, 4), of(5, 2, 16), of(5, 2), of(5, 2),
            [of(4), of(4)], of(5, 2, 3),
        ),
    ),
}  # fmt: skip
"""Every operation, with arguments that go together."""

FREE = {
    ("swiglu", "inner_RI"): (0, 1),
    ("bias_swiglu", "inner_RI"): (0, 1),
    ("bias_gelu", "inner_RF"): (0, 1),
    ("norm", "hidden_SBH"): (0, 1),
    ("head_squares", "qkv_SBN3D"): (0, 1, 2),
    ("split_and_rotate", "qkv"): (1,),
    ("norm_and_rotate", "qkv"): (1,),
}
"""Axes of which nothing else says how long they are."""


def shortened(argument, free):
    """The argument one shorter along each axis that is not free; of a list, without its last one
    and with a shorter one."""
    if isinstance(argument, list):
        yield argument[:-1]
        for other in shortened(argument[-1], free):
            yield [*argument[:-1], other]
    elif isinstance(argument, torch.Tensor):
        for axis, size in enumerate(argument.shape):
            if axis not in free:
                yield argument.narrow(axis, 0, size - 1).contiguous()


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("is_fake", [False, True], ids=["real", "fake"])
def test_operations_refuse_sizes_that_do_not_go_together(name, is_fake):
    """Prevents: a kernel that reads what lies after a tensor, in training or unseen in a count of
    bytes on a fake device."""
    operation, made = OPERATIONS[name]
    names = [argument.name for argument in operation._opoverload._schema.arguments]
    with FakeTensorMode() if is_fake else torch.device("cpu"):
        arguments = made()
        if is_fake:
            operation(*arguments)
        tried = 0
        for place, argument in enumerate(arguments):
            for other in shortened(argument, FREE.get((name, names[place]), ())):
                changed = (*arguments[:place], other, *arguments[place + 1 :])
                with pytest.raises(ValueError, match=rf"^omnibal::{name}: \w+.* is .* and must "):
                    operation(*changed)
                tried += 1
    assert tried >= 1


def test_refusals_name_the_argument_and_what_it_must():
    """Prevents: an error that leaves it to the reader which tensor of seven was wrong."""
    with pytest.raises(ValueError) as caught:
        residual._norm_backward(of(*HIDDEN), None, of(*HIDDEN), of(2, 5, 2), of(7))
    assert str(caught.value) == "omnibal::norm_backward: weight_H is [7] and must be [8]"
    with pytest.raises(ValueError, match=r"labels_L is of strides \[2\] and must be contiguous"):
        cross_entropy._partial(of(5, 9), of(10).long()[::2], 0, 8)
    with pytest.raises(ValueError, match=r"count is 10 and must be within logits_LW's 9 words"):
        cross_entropy._partial(of(5, 9), of(5).long(), 0, 10)
    with pytest.raises(ValueError, match=r"output_SBH is None and must be given, as scale_H is"):
        residual._scaled_add_backward(of(*HIDDEN), None, None, of(*VECTOR), None)
    with pytest.raises(ValueError, match=r"^omnibal::scaled_add_backward: bias_H is \[1\]"):
        residual._scaled_add_backward(of(*HIDDEN), None, of(1), None, None)


def test_all_operations_are_here():
    """Prevents: an operation that is added without its sizes being checked."""
    modules = (activations, cross_entropy, head_norms, normed_rotary, residual, rotary)
    made = {
        value for module in modules for value in vars(module).values()
        if isinstance(value, torch.library.CustomOpDef)
    }  # fmt: skip
    assert made == {operation for operation, _ in OPERATIONS.values()}
