"""Fused operations beside plain autograd: PYTHONPATH=. python tests/training/fused_checks.py DEVICE

On the device `cuda` their bodies are compiled one by one, as in training; on `cpu`, all in one.
test_fused.py has them as written.

Shapes: S sequence, B batch, H hidden size, N heads, D head size, T tokens.
"""

import sys

import torch
import torch.nn.functional as F

from megatron.vlm.model.fused import activations, cross_entropy, head_norms, residual, rotary
from megatron.vlm.model.fused.activations import Gelu

ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2.0**-6}
"""Most that numbers may be off, of the largest: some last digits."""
Tensors = list[torch.Tensor | None]


class Case:
    """Random tensors of a type on a device, and what is computed of them in two ways."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(0)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def compare(self, fused, formula, inputs: Tensors, fixed=(), kept: Tensors | None = None):
        """Outputs and all inputs' gradients of an autograd function are the formula's in float64.

        Args:
            kept: what it keeps for backward of what is given, in order; moments come besides.
        """
        own = [None if one is None else one.detach().requires_grad_() for one in inputs]
        outputs = _listed(fused.apply(*own, *fixed))
        if kept is not None:
            saved = [one.shape for one in outputs[0].grad_fn.saved_tensors if one is not None]
            assert saved == [one.shape for one in kept], (fused, saved)
        exact = [None if one is None else one.detach().double().requires_grad_() for one in inputs]
        expected = _listed(formula(*exact, *fixed))
        gradients = [self._gradient_of(output) for output in outputs]
        torch.autograd.backward(outputs, gradients)
        torch.autograd.backward(expected, [one.double() for one in gradients])
        found = [*outputs, *(one.grad for one in own if one is not None)]
        expected += [one.grad for one in exact if one is not None]
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            self.same(one, other, (fused, number))

    def same(self, found: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
        assert found.shape == expected.shape, what
        if found.numel():
            rounding, largest = ROUNDING[self.dtype], expected.abs().max().item()
            torch.testing.assert_close(
                found.double(), expected, rtol=rounding, atol=rounding * max(largest, 1e-3),
                msg=lambda text: f"{what}: {text}",
            )  # fmt: skip

    def _gradient_of(self, output: torch.Tensor) -> torch.Tensor:
        """A gradient that is not contiguous, as they may come."""
        return self.random(*output.shape[::-1]).permute(*range(output.dim())[::-1]).to(output.dtype)


def _listed(outputs) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def _gelu(inner, bias, form):
    x = inner + bias
    if form == Gelu.EXACT:
        return x * 0.5 * (1 + torch.erf(x / 2**0.5))
    if form == Gelu.QUICK:
        return x / (1 + torch.exp(-1.702 * x))
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def _swiglu(inner, bias):
    gate, value = (inner if bias is None else inner + bias).chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * value


def check_activations(case: Case) -> None:
    """SwiGLU and GELU, of rows that lie apart and of none too."""
    strided = case.random(6, 2, 20)[:, 1:, :14]
    for inner in (case.random(5, 2, 14), strided, case.random(0, 1, 8)):
        bias = case.random(inner.shape[-1])
        case.compare(activations.Swiglu, _swiglu, [inner, None], kept=[inner])
        case.compare(activations.Swiglu, _swiglu, [inner, bias], kept=[inner, bias])
        for form in Gelu:
            case.compare(activations.BiasGelu, _gelu, [inner, bias], [form], [inner, bias])


def _norm(hidden, weight, bias, eps):
    mean = 0 if bias is None else hidden.mean(-1, keepdim=True)
    unit = (hidden - mean) / ((hidden - mean).square().mean(-1, keepdim=True) + eps).sqrt()
    return unit * weight + (0 if bias is None else bias), hidden * 1


def _add(shortcut, output, bias, scale, tile_scale):
    tiles = 1 if tile_scale is None else tile_scale.to(shortcut.dtype)[:, None]
    biased = output if bias is None else output + bias
    return shortcut + tiles * (1 if scale is None else scale) * biased


class _ScaledAddAndNorm(residual.ScaledAddAndNorm):
    """The same, with what has no gradient at the end."""

    @staticmethod
    def apply(shortcut, output, bias, scale, weight, norm_bias, tile_scale, eps):
        return residual.ScaledAddAndNorm.apply(
            shortcut, output, bias, scale, tile_scale, weight, norm_bias, eps
        )


def _add_and_norm(shortcut, output, bias, scale, weight, norm_bias, tile_scale, eps):
    return _norm(_add(shortcut, output, bias, scale, tile_scale), weight, norm_bias, eps)


def check_residual(case: Case) -> None:
    """Norms and residual adds, with and without each of their parts."""
    for tokens, tiles, width in ((7, 3, 20), (0, 2, 8)):
        hidden, output = case.random(tokens, tiles, width), case.random(tokens, tiles, width)
        bias, scale, weight, norm_bias = (case.random(width) for _ in range(4))
        drop = case.random(tiles)
        for shift in (None, norm_bias):
            moments = hidden.new_empty(1 if shift is None else 2, tokens, tiles)
            kept = [hidden, moments, weight]
            norm = residual.NormAndResidual
            case.compare(norm, _norm, [hidden, weight, shift], [1e-6], kept)
        parts = ((bias, scale, drop), (bias, None, None), (None, scale, None), (None, None, drop))
        for some_bias, some_scale, some_drop in parts:
            kept = [output if some_scale is not None else None, some_bias, some_scale, some_drop]
            case.compare(
                residual.ScaledAdd, _add, [hidden, output, some_bias, some_scale], [some_drop],
                [one for one in kept if one is not None],
            )  # fmt: skip
        for shift, (some_bias, some_scale, some_drop) in (
            (None, parts[0]),
            (norm_bias, (None,) * 3),
        ):
            case.compare(
                _ScaledAddAndNorm, _add_and_norm,
                [hidden, output, some_bias, some_scale, weight, shift], [some_drop, 1e-5],
            )  # fmt: skip


def _heads(qkv, query_weight, key_weight, width, eps, group):
    query, key, value = qkv.chunk(3, -1)
    query, key = (
        x / (x.square().sum((2, 3), keepdim=True) / width + eps).sqrt() * weight.view(x.shape[2:])
        for x, weight in ((query, query_weight), (key, key_weight))
    )
    return query, key, value


def check_head_norms(case: Case) -> None:
    """Norms of q and k on one rank, and as two ranks compute them with sums from each other."""
    for tokens in (5, 0):
        qkv, width = case.random(tokens, 2, 3, 12), 12
        weights = [case.random(width) for _ in range(2)]
        kept = [qkv, *weights, qkv.new_empty(2, tokens, 2)]
        case.compare(head_norms.HeadNorms, _heads, [qkv, *weights], [width, 1e-6, None], kept)
    qkv, width = case.random(7, 2, 4, 18), 24
    weights, gradients = [case.random(width) for _ in range(2)], case.random(3, 7, 2, 4, 6)
    exact = [tensor.double().requires_grad_() for tensor in (qkv, *weights)]
    outputs = _heads(*exact, width, 1e-6, None)
    torch.autograd.backward(outputs, list(gradients.double()))
    halves = (slice(0, 2), slice(2, 4))
    qkvs = [qkv[:, :, own].contiguous() for own in halves]
    owns = [[weight.view(4, 6)[own].flatten() for weight in weights] for own in halves]
    grads = [list(gradients[:, :, :, own].contiguous()) for own in halves]
    sums = sum(head_norms._squares(one) for one in qkvs)
    pairs = list(zip(qkvs, owns, strict=True))
    normed = [head_norms._norms(one, own, sums, width, 1e-6) for one, own in pairs]
    given = [
        (one, grad, own, normed[0][2]) for one, grad, own in zip(qkvs, grads, owns, strict=True)
    ]
    along = sum(head_norms._along(*each) for each in given)
    backs = [head_norms._backward(*each, along, width) for each in given]
    case.same(torch.cat([part[0] for part in normed], 2), outputs[0].detach())
    case.same(torch.cat([part[1] for part in normed], 2), outputs[1].detach())
    case.same(torch.cat([part[0] for part in backs], 2), exact[0].grad)
    of_weights = torch.stack([weight.grad for weight in exact[1:]])
    case.same(torch.cat([part[1] for part in backs], 1), of_weights)


def _turn(heads, cosines, sines):
    """Every pair of numbers as a complex one times that of its angle."""
    pairs = torch.complex(*heads.chunk(2, -1)) * torch.complex(cosines, sines)[:, None]
    return torch.cat((pairs.real, pairs.imag), -1)


def _rotary(qkv, per_group, cosines, sines):
    size = 2 * cosines.shape[1]
    query, key, value = qkv.unflatten(-1, (-1, size)).split([per_group, 1, 1], 2)
    tables = (cosines.double(), sines.double())
    query, key = (_turn(heads.flatten(1, 2), *tables) for heads in (query, key))
    return query, key, value.squeeze(2)


def _normed_rotary(qkv, query_weight, key_weight, per_group, cosines, sines, eps):
    heads = qkv.unflatten(-1, (-1, len(query_weight)))
    unit = heads / (heads.square().mean(-1, keepdim=True) + eps).sqrt()
    parts = (unit[:, :, :per_group] * query_weight, unit[:, :, [-2]] * key_weight, heads[:, :, -1:])
    return _rotary(torch.cat(parts, 2).flatten(2), per_group, cosines, sines)


class _NormAndRotate(rotary.NormAndRotate):
    """The same, with what has no gradient at the end."""

    @staticmethod
    def apply(qkv, query_weight, key_weight, per_group, cosines, sines, eps):
        return rotary.NormAndRotate.apply(
            qkv, per_group, cosines, sines, query_weight, key_weight, eps
        )


def check_rotary(case: Case) -> None:
    """Rotation of q and k of groups of heads, with a norm of each before it and without."""
    for samples, groups, per_group, size in (
        ((3, 1, 6), 2, 3, 8),
        ((1,), 1, 1, 2),
        ((0,), 1, 2, 4),
    ):
        borders = torch.tensor([0, *samples], device=case.device).cumsum(0).to(torch.int32)
        frequencies = 0.1 ** torch.arange(size // 2, device=case.device)
        tables = rotary.rotation(borders, sum(samples), frequencies)
        qkv = case.random(sum(samples), groups, (per_group + 2) * size)
        case.compare(rotary.SplitAndRotate, _rotary, [qkv], [per_group, *tables], [*tables])
        weights = [case.random(size) for _ in range(2)]
        kept = [qkv, *tables, *weights, qkv.new_empty(sum(samples), groups, per_group + 1)]
        fixed = [per_group, *tables, 1e-3]
        case.compare(_NormAndRotate, _normed_rotary, [qkv, *weights], fixed, kept)


def check_cross_entropy(case: Case) -> None:
    """The loss with and without padded words, on one rank and as two ranks share the words."""
    for positions, width, count in ((5, 130, 130), (3, 601, 599), (0, 8, 7), (1, 2, 1)):
        logits = 4 * case.random(positions, width)
        labels = torch.arange(positions, device=case.device) * 7 % count
        words = cross_entropy.OwnWords(0, count, None)
        case.compare(
            cross_entropy.CrossEntropy,
            lambda logits, labels, words: (
                logits[:, : words.count].logsumexp(1) - logits[range(len(labels)), labels]
            ),
            [logits], [labels, words], [logits, labels, logits[:, 0]],
        )  # fmt: skip
    # Words that cannot be, but for one.
    late = torch.full((2, 50), -torch.inf, device=case.device, dtype=case.dtype)
    late[:, 40] = 1.0
    labels = torch.tensor([40, 40], device=case.device)
    losses = cross_entropy.CrossEntropy.apply(late, labels, cross_entropy.OwnWords(0, 50, None))
    assert not losses.any(), losses
    _check_divided_cross_entropy(case, 3 * case.random(6, 20))


def _check_divided_cross_entropy(case: Case, logits: torch.Tensor) -> None:
    """Ranks of 12 words each, of which the second's last four are padding, and one of padding."""
    labels = torch.tensor([0, 11, 12, 19, 5, 13], device=case.device)
    gradient = torch.rand(6, device=case.device)
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact, labels, reduction="none")
    losses.backward(gradient.double())
    own = [logits[:, :12].contiguous(), F.pad(logits[:, 12:], (0, 4), value=9.0), logits]
    places = [(0, 12), (12, 8), (20, 0)]
    ranks = list(zip(own, places, strict=True))
    parts = [cross_entropy._partial(mine, labels, *place) for mine, place in ranks]
    largest = torch.stack([top for top, _ in parts]).amax(0)
    exponentials = sum(sums[0] * torch.exp(top - largest) for top, sums in parts)
    normalizer = largest + exponentials.log()
    found = normalizer - sum(sums[1] for _, sums in parts)
    torch.testing.assert_close(found.double(), losses.detach(), rtol=1e-5, atol=1e-5)
    backs = [
        cross_entropy._backward(gradient, mine, labels, normalizer, *place) for mine, place in ranks
    ]
    assert not backs[1][:, 8:].any() and not backs[2].any()
    case.same(torch.cat([backs[0], backs[1][:, :8]], 1), exact.grad)


CHECKS = (check_activations, check_residual, check_head_norms, check_rotary, check_cross_entropy)


def compare_compiled_for_cpu() -> None:
    """Run all bodies as written and compiled, on the first arguments of each of their variants."""
    calls, bodies = {}, []

    def recorded(body):
        def run(*arguments):
            variant = [one if isinstance(one, Gelu) else one is None for one in arguments]
            if arguments[0].numel() > 1:
                calls.setdefault((body, *variant), arguments)
            return body(*arguments)

        bodies.append(body)
        return run

    for module in (activations, cross_entropy, head_norms, residual, rotary):
        for name, value in list(vars(module).items()):
            if hasattr(value, "__wrapped__"):
                setattr(module, name, recorded(value))
    for check in CHECKS:
        check(Case("cpu", torch.float32))
    recorded_bodies = [body for body, *_ in calls]
    assert set(recorded_bodies) == set(bodies)

    def run_all(arguments):
        return [body(*own) for body, own in zip(recorded_bodies, arguments, strict=True)]

    given = list(calls.values())
    with torch.no_grad():
        compiled = torch.compile(run_all, fullgraph=True, options={"cpp.simdlen": 1})(given)
    torch.testing.assert_close(compiled, run_all(given))
    print(f"compiled {len(bodies)} bodies")


if __name__ == "__main__":
    if sys.argv[1] == "cpu":
        compare_compiled_for_cpu()
    else:
        for check in CHECKS:
            check(Case(sys.argv[1], torch.bfloat16))
