"""Fused operations against autograd: PYTHONPATH=. python tests/training/fused_checks.py DEVICE

On `cuda`, bodies are compiled one by one, as in training; on `cpu`, in one graph. test_fused.py
runs them uncompiled.

Shapes: S sequence, B batch, H hidden size, N heads, D head size, T tokens.
"""

import sys
from functools import partial
from typing import get_args
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from megatron.vlm.model.fused import (
    activations,
    compiled,
    cross_entropy,
    head_norms,
    residual,
    rotary,
)
from omnibal.model.encoders import Gelu

ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2.0**-6}
"""Maximal error relative to the largest value: a few last digits."""


class Case:
    """Random tensors on a device, and comparisons of functions of them."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(0)

    def random(self, *shape: int) -> torch.Tensor:
        """Return random numbers with a gradient."""
        numbers = torch.randn(shape, generator=self.generator)
        return numbers.to(self.device, self.dtype).requires_grad_()

    def compare(self, function, formula, arguments, kept=None) -> None:
        """Compare outputs and gradients with the formula's in float64.

        Args: `kept`: tensors saved for backward, in order.
        """
        exact = [_leaf(one, torch.float64) for one in arguments]
        expected = _as_list(formula(*exact))
        # Non-contiguous gradients, as in training.
        gradients = [self.random(*one.shape[::-1]).detach() for one in expected]
        gradients = [one.permute(*range(one.dim())[::-1]) for one in gradients]
        torch.autograd.backward(expected, [one.double() for one in gradients])
        expected += _gradients(exact)
        own = [_leaf(one) for one in arguments]
        outputs = _as_list(function(*own))
        if kept is not None:
            saved = [one.shape for one in outputs[0].grad_fn.saved_tensors if one is not None]
            assert saved == [one.shape for one in kept if one is not None], (function, saved)
        given = [one.to(output.dtype) for one, output in zip(gradients, outputs, strict=True)]
        torch.autograd.backward(outputs, given)
        for found, other in zip(outputs + _gradients(own), expected, strict=True):
            self.assert_same(found, other, function)

    def assert_same(self, found: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
        assert found.shape == expected.shape, what
        if found.numel():
            rounding, largest = ROUNDING[self.dtype], expected.abs().max().item()
            torch.testing.assert_close(
                found.double(), expected, rtol=rounding, atol=rounding * max(largest, 1e-3),
                msg=lambda text: f"{what}: {text}",
            )  # fmt: skip


def _leaf(one, dtype: torch.dtype | None = None):
    """Return a copy of an argument as an own leaf, cast if it is floating point."""
    if not isinstance(one, torch.Tensor) or not one.is_floating_point():
        return one
    return one.detach().to(dtype or one.dtype).requires_grad_(one.requires_grad)


def _gradients(arguments) -> list[torch.Tensor]:
    return [one.grad for one in arguments if isinstance(one, torch.Tensor) and one.requires_grad]


def _as_list(outputs) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def _gelu(inner, bias, form):
    x = inner + bias
    if form == "gelu":
        return x * 0.5 * (1 + torch.erf(x / 2**0.5))
    if form == "quick_gelu":
        return x / (1 + torch.exp(-1.702 * x))
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def _swiglu(inner, bias):
    gate, value = (inner if bias is None else inner + bias).chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * value


def check_activations(case: Case) -> None:
    """SwiGLU and GELU, for strided and empty rows too."""
    strided = case.random(6, 2, 20)[:, 1:, :14]
    for inner in (case.random(5, 2, 14), strided, case.random(0, 1, 8)):
        bias = case.random(inner.shape[-1])
        for some_bias in (None, bias):
            case.compare(activations.swiglu, _swiglu, [inner, some_bias], [inner, some_bias])
        for form in get_args(Gelu):
            case.compare(activations.bias_gelu, _gelu, [inner, bias, form], [inner, bias])


def _norm(hidden, weight, bias, eps):
    mean = 0 if bias is None else hidden.mean(-1, keepdim=True)
    unit = (hidden - mean) / ((hidden - mean).square().mean(-1, keepdim=True) + eps).sqrt()
    return unit * weight + (0 if bias is None else bias), hidden * 1


def _add(shortcut, output, bias, scale, tile_scale):
    tiles = 1 if tile_scale is None else tile_scale[:, None]
    biased = output if bias is None else output + bias
    return shortcut + tiles * (1 if scale is None else scale) * biased


def _add_and_norm(shortcut, output, bias, scale, tile_scale, weight, norm_bias, eps):
    return _norm(_add(shortcut, output, bias, scale, tile_scale), weight, norm_bias, eps)


def check_residual(case: Case) -> None:
    """Norms and residual adds, with and without each part."""
    norm, add = residual.NormAndResidual.apply, residual.ScaledAdd.apply
    both = residual.ScaledAddAndNorm.apply
    for tokens, tiles, width in ((7, 3, 20), (0, 2, 8)):
        hidden, output = case.random(tokens, tiles, width), case.random(tokens, tiles, width)
        bias, scale, weight, norm_bias = (case.random(width) for _ in range(4))
        drop = case.random(tiles).detach()
        for shift in (None, norm_bias):
            moments = hidden.new_empty(1 if shift is None else 2, tokens, tiles)
            case.compare(norm, _norm, [hidden, weight, shift, 1e-6], [hidden, moments, weight])
        parts = ((bias, scale, drop), (bias, None, None), (None, scale, None), (None, None, drop))
        for some in parts:
            kept = [output if some[1] is not None else None, *some]
            case.compare(add, _add, [hidden, output, *some], kept)
        for shift, some in ((None, parts[0]), (norm_bias, (None,) * 3)):
            case.compare(both, _add_and_norm, [hidden, output, *some, weight, shift, 1e-5])


def _heads(qkv, query_weight, key_weight, width, eps, group):
    query, key, value = qkv.chunk(3, -1)
    query, key = (
        x / (x.square().sum((2, 3), keepdim=True) / width + eps).sqrt() * weight.view(x.shape[2:])
        for x, weight in ((query, query_weight), (key, key_weight))
    )
    return query, key, value


def check_head_norms(case: Case) -> None:
    """Norms of q and k on one rank, and on two ranks that exchange sums."""
    for tokens in (5, 0):
        qkv, width = case.random(tokens, 2, 3, 12), 12
        weights = [case.random(width) for _ in range(2)]
        kept = [qkv, *weights, qkv.new_empty(2, tokens, 2)]
        case.compare(head_norms.HeadNorms.apply, _heads, [qkv, *weights, width, 1e-6, None], kept)
    width, gradients = 24, case.random(3, 7, 2, 4, 6).detach()
    exact = [_leaf(one, torch.float64) for one in (case.random(7, 2, 4, 18), case.random(2, width))]
    outputs = _heads(exact[0], *exact[1], width, 1e-6, None)
    torch.autograd.backward(outputs, list(gradients.double()))
    qkv, weights = (one.detach().to(case.dtype) for one in exact)
    ranks = [
        (
            qkv[:, :, own].contiguous(),
            list(gradients[:, :, :, own].contiguous()),
            list(weights.view(2, 4, 6)[:, own].flatten(1)),
        )
        for own in (slice(0, 2), slice(2, 4))
    ]
    sums = sum(head_norms._squares(own) for own, *_ in ranks)
    normed = [head_norms._norms(own, *mine, sums, width, 1e-6) for own, _, mine in ranks]
    given = [(own, *mine, sums, width, 1e-6, back) for own, back, mine in ranks]
    along = sum(head_norms._along(*each) for each in given)
    backs = [head_norms._gradients(*each, along) for each in given]
    for place in range(2):
        case.assert_same(torch.cat([part[place] for part in normed], 2), outputs[place].detach())
    for axis, (parts, leaf) in enumerate(zip(zip(*backs, strict=True), exact, strict=True)):
        case.assert_same(torch.cat(parts, 2 - axis), leaf.grad)


def _turn(heads, cosines, sines):
    """Rotate each pair of numbers by a complex product with its angle."""
    pairs = torch.complex(*heads.chunk(2, -1)) * torch.complex(cosines, sines)[:, None]
    return torch.cat((pairs.real, pairs.imag), -1)


def _rotary(qkv, per_group, cosines, sines):
    size = 2 * cosines.shape[1]
    query, key, value = qkv.unflatten(-1, (-1, size)).split([per_group, 1, 1], 2)
    query, key = (_turn(heads.flatten(1, 2), cosines, sines) for heads in (query, key))
    return query, key, value.squeeze(2)


def _normed_rotary(qkv, per_group, cosines, sines, query_weight, key_weight, eps):
    heads = qkv.unflatten(-1, (-1, len(query_weight)))
    unit = heads / (heads.square().mean(-1, keepdim=True) + eps).sqrt()
    parts = (unit[:, :, :per_group] * query_weight, unit[:, :, [-2]] * key_weight, heads[:, :, -1:])
    return _rotary(torch.cat(parts, 2).flatten(2), per_group, cosines, sines)


def check_rotary(case: Case) -> None:
    """Rotation of grouped q and k, with and without norms before it."""
    plain, normed = rotary.SplitAndRotate.apply, rotary.NormAndRotate.apply
    for samples, groups, group, size in (((3, 1, 6), 2, 3, 8), ((1,), 1, 1, 2), ((0,), 1, 2, 4)):
        borders = torch.tensor([0, *samples], device=case.device).cumsum(0).to(torch.int32)
        frequencies = 0.1 ** torch.arange(size // 2, device=case.device)
        tables = rotary.rotation(borders, sum(samples), frequencies)
        qkv = case.random(sum(samples), groups, (group + 2) * size)
        case.compare(plain, _rotary, [qkv, group, *tables], [*tables])
        weights = [case.random(size) for _ in range(2)]
        kept = [qkv, *tables, *weights, qkv.new_empty(sum(samples), groups, group + 1)]
        case.compare(normed, _normed_rotary, [qkv, group, *tables, *weights, 1e-3], kept)


def _cross_entropy(logits, labels, words):
    own = logits[:, : words.count]
    return own.logsumexp(1) - own[range(len(labels)), labels]


def check_cross_entropy(case: Case) -> None:
    """Loss with and without vocabulary padding, on one rank and sharded over ranks."""
    for positions, width, count in ((5, 130, 130), (3, 601, 599), (0, 8, 7), (1, 2, 1)):
        logits = (4 * case.random(positions, width)).detach().requires_grad_()
        labels = torch.arange(positions, device=case.device) * 7 % count
        words = cross_entropy.OwnWords(0, count, None)
        kept = [logits, labels, logits[:, 0]]
        case.compare(cross_entropy.cross_entropy, _cross_entropy, [logits, labels, words], kept)
    # All but one logit is -inf.
    late = torch.full((2, 50), -torch.inf, device=case.device, dtype=case.dtype)
    late[:, 40] = 1.0
    labels = torch.tensor([40, 40], device=case.device)
    losses = cross_entropy.cross_entropy(late, labels, cross_entropy.OwnWords(0, 50, None))
    assert not losses.any(), losses
    # Ranks of 12 words: the second with four padded words, the third of padding only.
    labels = torch.tensor([0, 11, 12, 19, 5, 13], device=case.device)
    gradient = torch.rand(6, device=case.device)
    logits = (3 * case.random(6, 20)).detach()
    exact = _leaf(logits, torch.float64).requires_grad_()
    losses = F.cross_entropy(exact, labels, reduction="none")
    losses.backward(gradient.double())
    ranks = [
        (logits[:, :12].contiguous(), labels, 0, 12),
        (F.pad(logits[:, 12:], (0, 4), value=9.0), labels, 12, 8),
        (logits, labels, 20, 0),
    ]
    parts = [cross_entropy._local_parts(*rank) for rank in ranks]
    largest = torch.stack([top for top, _ in parts]).amax(0)
    normalizer = largest + sum(sums[0] * torch.exp(top - largest) for top, sums in parts).log()
    found = normalizer - sum(sums[1] for _, sums in parts)
    torch.testing.assert_close(found.double(), losses.detach(), rtol=1e-5, atol=1e-5)
    first, second, third = (
        cross_entropy._logit_gradient(gradient, own, labels, normalizer, *place)
        for own, _, *place in ranks
    )
    assert not second[:, 8:].any() and not third.any()
    case.assert_same(torch.cat([first, second[:, :8]], 1), exact.grad)


CHECKS = (check_activations, check_residual, check_head_norms, check_rotary, check_cross_entropy)


def compare_compiled_for_cpu() -> None:
    """Compare all bodies uncompiled and compiled, on the first arguments per variant."""
    calls, bodies = {}, set()

    def record_calls(name, body):
        def run(*arguments):
            leaves = tree_leaves(arguments)
            variant = [one if isinstance(one, str) else one is None for one in leaves]
            if arguments[0].numel() > 1:
                calls.setdefault((body, *variant), arguments)
            return body(*arguments)

        bodies.add(body)
        return run

    with (
        patch.object(compiled, "compile_body", record_calls),
        patch.object(compiled, "is_compiled", lambda first: True),
    ):
        for check in CHECKS:
            check(Case("cpu", torch.float32))
    recorded_bodies = [body for body, *_ in calls]

    def run_all(arguments):
        return [body(*own) for body, own in zip(recorded_bodies, arguments, strict=True)]

    given = list(calls.values())
    with torch.no_grad():
        results = torch.compile(run_all, fullgraph=True, options={"cpp.simdlen": 1})(given)
    torch.testing.assert_close(results, run_all(given))
    print(f"compiled {len(bodies)} bodies")


def check_recompilations() -> None:
    """Compile backwards of several operations and dtypes: none reaches another's limit, above which
    a device would run eager code with more memory than is counted."""
    compile_eagerly = partial(torch.compile, backend="eager")
    with (
        patch.object(torch, "compile", compile_eagerly),
        patch.object(compiled, "is_compiled", lambda first: True),
        torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True),
    ):
        for number, body in enumerate((lambda x: x.sin(), lambda x: x.cos(), lambda x: x.tanh())):
            run = compiled.differentiable(f"body{number}")(body)
            for dtype in ROUNDING:
                run(torch.ones(4, dtype=dtype, requires_grad=True)).sum().backward()


if __name__ == "__main__":
    if sys.argv[1] == "cpu":
        check_recompilations()
        compare_compiled_for_cpu()
    else:
        for check in CHECKS:
            check(Case(sys.argv[1], torch.bfloat16))
