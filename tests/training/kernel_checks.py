"""Kernels against plain torch: PYTHONPATH=. python tests/training/kernel_checks.py DEVICE NAME...

On the device `cpu`, Triton's interpreter runs them, with TRITON_INTERPRET=1 in the environment.

Shapes: S sequence, B batch, H hidden size, F feed-forward width, N heads, D head size, T tokens.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from megatron.vlm.model.fused import (
    activations,
    cross_entropy,
    head_norms,
    normed_rotary,
    residual,
    rotary,
)

DTYPES = (torch.float32, torch.bfloat16)
BF16_ROUNDING = 2.0**-8
SUMMED_IN_PARTS = {
    "activations": "_ROW_GROUPS", "residual": "_PARTS", "head_norms": "_PARTS",
    "normed_rotary": "_PARTS",
}  # fmt: skip
"""Modules of kernels that add up rows, and their names of the most parts of a sum."""

Tensors = tuple[torch.Tensor | None, ...]


class Case:
    """Random tensors of a type on a device, and what is computed of them in two ways."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(0)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def rows(self, many: int, few: int) -> int:
        """More rows than there are parts of a sum over rows: `many` on a device, and `few` in the
        interpreter, where `sum_in_few_parts` makes these do and each takes a millisecond."""
        return few if self.device == "cpu" else many

    def few(self, shapes: Sequence[Any]) -> Sequence[Any]:
        """All in fp32; in bf16, which changes loads and stores only, the first two."""
        return shapes if self.dtype == torch.float32 else shapes[:2]

    def compare(
        self,
        kernels: Callable[..., Any],
        eager: Callable[..., Any],
        inputs: Sequence[torch.Tensor | None],
        fixed: Sequence[object] = (),
        roundings: int = 1,
    ) -> None:
        """Outputs and all inputs' gradients agree: in fp32 to its last digits, in bf16 to some
        roundings of what float64 gives."""
        found = self._outputs_and_gradients(kernels, inputs, fixed, self.dtype)
        expected = self._outputs_and_gradients(eager, inputs, fixed, torch.float64)
        tight = self.dtype == torch.float32
        rounding = roundings * BF16_ROUNDING
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert one.dtype == self.dtype and one.shape == other.shape, number
            if not one.numel():
                continue
            largest = other.abs().max().item()
            tolerance = (2e-6 if tight else rounding) * max(largest, 1e-3)
            torch.testing.assert_close(
                one.double(), other, rtol=2e-5 if tight else rounding, atol=tolerance,
                msg=lambda text, number=number: f"{kernels}, tensor {number}: {text}",
            )  # fmt: skip

    def _outputs_and_gradients(
        self,
        function: Callable[..., Any],
        inputs: Sequence[torch.Tensor | None],
        fixed: Sequence[object],
        dtype: torch.dtype,
    ) -> list[torch.Tensor]:
        own = [
            None if tensor is None else tensor.detach().to(dtype).requires_grad_()
            for tensor in inputs
        ]
        outputs = function(*own, *fixed)
        outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
        generator = torch.Generator().manual_seed(1)
        weights = [
            torch.randn(output.shape, generator=generator).to(self.device, self.dtype).to(dtype)
            for output in outputs
        ]
        # Not contiguous, as gradients may come.
        weights = [weight.transpose(0, -1).contiguous().transpose(0, -1) for weight in weights]
        torch.autograd.backward(outputs, weights)
        gradients = [tensor.grad for tensor in own if tensor is not None]
        return [tensor.detach() for tensor in (*outputs, *gradients)]


def promised(op: Any, *arguments: object) -> None:
    """The fake of an operation gives the shapes, types and strides that the real one gives."""
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def check_activations(case: Case) -> None:
    """SwiGLU and GELU, over widths that are no multiple of a block."""
    for shape in case.few([(5, 1, 6), (1, 1, 1030), (0, 1, 8), (case.rows(270, 13), 2, 14)]):
        inner = case.random(*shape)
        case.compare(activations.Swiglu.apply, activations.eager_swiglu, [inner])
        bias = case.random(shape[-1])
        case.compare(activations.BiasSwiglu.apply, activations.eager_swiglu, [inner, bias])
        for form in activations.Gelu:
            case.compare(
                activations.BiasGelu.apply, activations.eager_bias_gelu, [inner, bias], form.slopes
            )
    # A view whose rows lie apart.
    strided = case.random(6, 2, 10)[:, 1:, :8]
    case.compare(activations.Swiglu.apply, activations.eager_swiglu, [strided])
    inner, bias, gradient = case.random(3, 2, 8), case.random(8), case.random(3, 2, 4)
    promised(activations._swiglu, inner)
    promised(activations._swiglu_backward, gradient, inner)
    promised(activations._bias_swiglu, inner, bias)
    promised(activations._bias_swiglu_backward, gradient, inner, bias)
    promised(activations._bias_gelu, inner, bias, 1.7, 0.1)
    promised(activations._bias_gelu_backward, inner, inner, bias, 0.0, 0.0)


def _eager_norm(hidden: Any, weight: Any, bias: Any, eps: float) -> Any:
    return residual.eager_norm(hidden, residual.NormWeights(weight, bias, eps)), hidden * 1


def _eager_add(shortcut: Any, output: Any, bias: Any, scale: Any, tile_scale: Any) -> Any:
    return residual.eager_add(shortcut, residual.Branch(output, bias, scale, tile_scale))


def _eager_both(shortcut: Any, *branch_and_norm: Any) -> Any:
    *branch, weight, bias, eps = branch_and_norm
    return _eager_norm(_eager_add(shortcut, *branch), weight, bias, eps)


def _add_and_norm(shortcut: Any, output: Any, bias: Any, scale: Any, *rest: Any) -> Any:
    weight, norm_bias, tile_scale, eps = rest
    return residual.ScaledAddAndNorm.apply(
        shortcut, output, bias, scale, tile_scale, weight, norm_bias, eps
    )


def _eager_add_and_norm(shortcut: Any, output: Any, bias: Any, scale: Any, *rest: Any) -> Any:
    weight, norm_bias, tile_scale, eps = rest
    return _eager_both(shortcut, output, bias, scale, _like(tile_scale, shortcut), weight,
                       norm_bias, eps)  # fmt: skip


def _like(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(other.dtype)


def check_residual(case: Case) -> None:
    """Norms and residual adds, with and without each of their parts."""
    for tokens, tiles, width in case.few(
        [(1, 1, 5), (7, 3, 20), (0, 2, 8), (case.rows(130, 5), 2, 3), (2, 1, 3200)]
    ):
        shape = (tokens, tiles, width)
        hidden, output = case.random(*shape), case.random(*shape)
        bias, scale, weight, norm_bias = (case.random(width) for _ in range(4))
        drop = case.random(tiles)
        for shift in (None, norm_bias):
            case.compare(
                residual.NormAndResidual.apply, _eager_norm, [hidden, weight, shift], [1e-6]
            )
        parts = ((bias, scale, drop), (bias, None, None), (None, scale, None), (None, None, drop))
        for some_bias, some_scale, some_drop in parts:
            case.compare(
                residual.ScaledAdd.apply,
                lambda *inputs: _eager_add(*inputs[:4], _like(inputs[4], inputs[0])),
                [hidden, output, some_bias, some_scale], [some_drop],
            )  # fmt: skip
        for shift, add in ((None, (bias, scale, drop)), (norm_bias, (None, None, None))):
            case.compare(
                _add_and_norm, _eager_add_and_norm, [hidden, output, *add[:2], weight, shift],
                [add[2], 1e-5], roundings=4,  # the sum's own is normalised with it
            )  # fmt: skip
    strided = case.random(4, 4, 12)[:, ::2, 2:10]
    case.compare(
        residual.NormAndResidual.apply, _eager_norm, [strided, case.random(8), None], [1e-6]
    )
    _check_residual_promises(case)


def _check_residual_promises(case: Case) -> None:
    hidden, output = case.random(4, 2, 8), case.random(4, 2, 8)
    vector, drop = case.random(8), case.random(2)
    moments = torch.ones((2, 4, 2), device=case.device)
    for shift in (None, vector):
        promised(residual._norm, hidden, vector, shift, 1e-5)
        promised(residual._scaled_add_norm, hidden, output, vector, shift, drop, vector, shift, 1.0)
        promised(residual._scaled_add, hidden, output, vector, shift, drop)
        promised(residual._scaled_add_backward, hidden, output, vector, shift, None)
    for count, passed in ((1, None), (2, output)):
        promised(residual._norm_backward, hidden, passed, output, moments[:count], vector)


def _eager_heads(qkv: Any, query_weight: Any, key_weight: Any, *rest: Any) -> Any:
    query, key, value = qkv.chunk(3, -1)
    weights = (query_weight, key_weight)
    return *head_norms.eager_norms((query, key), weights, rest[1]), value


def check_head_norms(case: Case) -> None:
    """Norms of q and k on one rank, and as two ranks compute them with sums from each other."""
    tall = case.rows(260, 9)
    for shape in case.few([(5, 2, 3, 8), (1, 1, 2, 4), (tall, 1, 1, 2), (0, 1, 2, 4)]):
        tokens, tiles, heads, size = shape
        qkv = case.random(tokens, tiles, heads, 3 * size)
        weights = [case.random(heads * size) for _ in range(2)]
        fixed = [heads * size, 1e-6, None]
        case.compare(head_norms.HeadNorms.apply, _eager_heads, [qkv, *weights], fixed)
        promised(head_norms._norms, qkv, weights, None, heads * size, 1e-6)
    _check_divided_head_norms(case, case.random(7, 2, 4, 3 * 6))


def _check_divided_head_norms(case: Case, qkv: torch.Tensor) -> None:
    width = 4 * 6
    weights = [case.random(width) for _ in range(2)]
    gradients = [case.random(7, 2, 4, 6) for _ in range(3)]
    whole = [tensor.clone().double().requires_grad_() for tensor in (qkv, *weights)]
    outputs = _eager_heads(*whole, width, 1e-6)
    torch.autograd.backward(outputs, [gradient.double() for gradient in gradients])
    parts = [
        (
            qkv[:, :, own].contiguous(),
            [weight.view(4, 6)[own].flatten() for weight in weights],
            [gradient[:, :, own].contiguous() for gradient in gradients],
        )
        for own in (slice(0, 2), slice(2, 4))
    ]
    sums = sum(head_norms._squares(own) for own, _, _ in parts)
    normed = [head_norms._norms(own, mine, sums, width, 1e-6) for own, mine, _ in parts]
    rstds = normed[0][2]
    alongs = [head_norms._along(grads, own, mine, rstds) for own, mine, grads in parts]
    total = alongs[0] + alongs[1]
    backs = [
        head_norms._backward(grads, own, mine, rstds, total, width) for own, mine, grads in parts
    ]
    found = [torch.cat([part[which] for part in normed], 2) for which in range(2)]
    found += [torch.cat([part[0] for part in backs], 2), torch.cat([part[1] for part in backs], 1)]
    expected = [*outputs[:2], whole[0].grad, torch.stack([tensor.grad for tensor in whole[1:]])]
    tolerance = 1e-5 if case.dtype == torch.float32 else 2 * BF16_ROUNDING
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one.double(), other.detach(), rtol=tolerance, atol=tolerance * other.abs().max().item()
        )
    own, mine, grads = parts[0]
    promised(head_norms._squares, own)
    promised(head_norms._along, grads, own, mine, rstds)
    promised(head_norms._backward, grads, own, mine, rstds, total, width)


def _eager_rotary(qkv: Any, per_group: int, cosines: Any, sines: Any) -> Any:
    turned_by = rotary.Rotation(cosines, sines)
    query, key, value = rotary.eager_split_and_rotate(qkv, per_group, turned_by)
    return query, key, value * 1


def check_rotary(case: Case) -> None:
    """Rotation of q and k of groups of heads, and back."""
    cases = [((3, 1, 6), 2, 3, 8), ((1,), 1, 1, 2), ((0,), 1, 2, 4), ((2, 4), 5, 6, 64)]
    for samples, groups, per_group, size in case.few(cases):
        borders = torch.tensor([0, *samples], device=case.device).cumsum(0).to(torch.int32)
        tokens = sum(samples)
        frequencies = 0.1 ** torch.arange(size // 2, device=case.device)
        tables = rotary.rotation(borders, tokens, frequencies)
        qkv = case.random(tokens, groups, (per_group + 2) * size)
        case.compare(rotary.SplitAndRotate.apply, _eager_rotary, [qkv], [per_group, *tables])
        promised(rotary._rotate, qkv, per_group, *tables)
        parts = rotary._rotate(qkv, per_group, *tables)
        promised(rotary._rotate_back, *parts, *tables)


def _normed_rotary(qkv: Any, query_weight: Any, key_weight: Any, *rest: Any) -> Any:
    per_group, cosines, sines, eps = rest
    arguments = (qkv, per_group, cosines, sines, query_weight, key_weight, eps)
    query, key, value = normed_rotary.NormAndRotate.apply(*arguments)
    return query, key, value * 1


def _eager_normed_rotary(qkv: Any, query_weight: Any, key_weight: Any, *rest: Any) -> Any:
    per_group, cosines, sines, eps = rest
    query, key, value = normed_rotary.eager_split_norm_and_rotate(
        qkv, per_group, rotary.Rotation(cosines, sines),
        normed_rotary.HeadWeights(query_weight, key_weight, eps),
    )  # fmt: skip
    return query, key, value * 1


def check_normed_rotary(case: Case) -> None:
    """Norms of q's and k's heads, and their rotation, of sizes that are no power of two too."""
    last = case.rows(70, 12)
    cases = [((3, 1, 6), 2, 3, 8), ((1,), 1, 1, 2), ((0,), 1, 2, 4), ((2, last), 3, 2, 96)]
    for samples, groups, per_group, size in case.few(cases):
        borders = torch.tensor([0, *samples], device=case.device).cumsum(0).to(torch.int32)
        tokens = sum(samples)
        frequencies = 0.1 ** torch.arange(size // 2, device=case.device)
        tables = rotary.rotation(borders, tokens, frequencies)
        qkv = case.random(tokens, groups, (per_group + 2) * size)
        weights = [case.random(size) for _ in range(2)]
        fixed = [per_group, *tables, 1e-3]
        case.compare(_normed_rotary, _eager_normed_rotary, [qkv, *weights], fixed, roundings=2)
        promised(normed_rotary._forward, qkv, per_group, *tables, weights, 1e-3)
        query, key, rstds = normed_rotary._forward(qkv, per_group, *tables, weights, 1e-3)
        promised(normed_rotary._backward, query, key, key, qkv, *tables, weights, rstds)


def check_cross_entropy(case: Case) -> None:
    """The loss with and without padded words, on one rank and as two ranks share the words."""
    for positions, width, count in case.few([(5, 130, 130), (3, 5001, 4999), (0, 8, 7), (1, 2, 1)]):
        logits = 4 * case.random(positions, width)
        labels = torch.arange(positions, device=case.device) * 7 % count
        words = cross_entropy.OwnWords(0, count, None)
        case.compare(
            lambda logits, labels=labels, words=words: cross_entropy.CrossEntropy.apply(
                logits, labels, words
            ).to(logits.dtype),
            lambda logits, labels=labels, count=count: F.cross_entropy(
                logits[:, :count], labels, reduction="none"
            ),
            [logits],
        )
        promised(cross_entropy._partial, logits, labels, 0, count)
    # A whole block without any word that can be.
    late = torch.full((2, 5000), -torch.inf, device=case.device, dtype=case.dtype)
    late[:, 4500:] = case.random(2, 500)
    losses = cross_entropy.CrossEntropy.apply(
        late, torch.tensor([4600, 4999], device=case.device), cross_entropy.OwnWords(0, 5000, None)
    )
    assert losses.isfinite().all(), losses
    _check_divided_cross_entropy(case, 3 * case.random(6, 20))


def _check_divided_cross_entropy(case: Case, logits: torch.Tensor) -> None:
    """Ranks of 12 words each, of which the second's last four are padding."""
    labels = torch.tensor([0, 11, 12, 19, 5, 13], device=case.device)
    gradient = torch.rand(6, device=case.device)
    whole = logits.double().requires_grad_()
    losses = F.cross_entropy(whole, labels, reduction="none")
    losses.backward(gradient.double())
    own = [logits[:, :12].contiguous(), F.pad(logits[:, 12:], (0, 4), value=9.0)]
    places = [(0, 12), (12, 8)]
    parts = [
        cross_entropy._partial(mine, labels, *place)
        for mine, place in zip(own, places, strict=True)
    ]
    largest = torch.maximum(parts[0][0], parts[1][0])
    exponentials = sum(sums[0] * torch.exp(top - largest) for top, sums in parts)
    normalizer = largest + exponentials.log()
    found = normalizer - parts[0][1][1] - parts[1][1][1]
    torch.testing.assert_close(found.double(), losses.detach(), rtol=1e-5, atol=1e-5)
    tolerance = 1e-5 if case.dtype == torch.float32 else 2 * BF16_ROUNDING
    backs = [
        cross_entropy._backward(gradient, mine, labels, normalizer, *place)
        for mine, place in zip(own, places, strict=True)
    ]
    assert not backs[1][:, 8:].any()
    back = torch.cat([backs[0], backs[1][:, :8]], 1).double()
    torch.testing.assert_close(back, whole.grad, rtol=tolerance, atol=tolerance)
    promised(cross_entropy._backward, gradient, own[0], labels, normalizer, 0, 12)


def sum_in_few_parts() -> None:
    """Have kernels add up rows in so few parts that each of them takes several, if rows are few."""
    for name, limit in SUMMED_IN_PARTS.items():
        module = importlib.import_module(f"megatron.vlm.model.kernels.{name}")
        assert vars(module)[limit] > 2
        setattr(module, limit, 2)


CHECKS = (
    *(check_activations, check_residual, check_head_norms, check_rotary),
    *(check_normed_rotary, check_cross_entropy),
)


if __name__ == "__main__":
    device, *names = sys.argv[1:]
    if device == "cpu":
        sum_in_few_parts()
    for name in names:
        for dtype in DTYPES:
            {check.__name__.removeprefix("check_"): check for check in CHECKS}[name](
                Case(device, dtype)
            )
        print("checked", name)
