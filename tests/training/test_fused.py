"""What fused operations compute and keep, and how a fake device counts bytes: quick ones."""

import pytest
import torch
import torch.nn.functional as F
from fused_checks import CHECKS, Case

from megatron.vlm.measure.fake_device.memory import BLOCK_BYTES, Label, MemoryTracker
from megatron.vlm.model.fused.activations import Gelu, bias_gelu, swiglu
from megatron.vlm.model.fused.cross_entropy import OwnWords, cross_entropy
from megatron.vlm.model.fused.residual import Branch, NormWeights, add_and_norm

pytestmark = pytest.mark.quick


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.in_own_process
@pytest.mark.parametrize("check", CHECKS)
def test_bodies_are_their_formulas(check):
    """Prevents: a body that gives other numbers or gradients than its textbook formula, or keeps
    more for backward than plans count."""
    check(Case("cpu", torch.float32))


def test_activations_are_their_formulas():
    """Prevents: gate and value that are taken for each other, and an approximate GELU."""
    inner, bias = random(3, 2, 8), random(8)
    gate, value = inner[..., :4], inner[..., 4:]
    torch.testing.assert_close(swiglu(inner), gate / (1 + (-gate).exp()) * value)
    biased = inner + bias
    expected = biased * 0.5 * (1 + torch.erf(biased / 2**0.5))
    torch.testing.assert_close(bias_gelu(inner, bias), expected)
    cubed = (8 / torch.pi) ** 0.5 * (biased + 0.044715 * biased**3)
    for form, exponent in ((Gelu.TANH, cubed), (Gelu.QUICK, 1.702 * biased)):
        torch.testing.assert_close(bias_gelu(inner, bias, form), biased / (1 + (-exponent).exp()))
    gate, value = biased[..., :4], biased[..., 4:]
    torch.testing.assert_close(swiglu(inner, bias), gate / (1 + (-gate).exp()) * value)


def test_residual_is_added_before_the_norm():
    """Prevents: a norm of the branch alone, and a layer scale that leaves out the bias."""
    shortcut, output, bias, scale = random(5, 2, 6), random(5, 2, 6), random(6), random(6)
    normed, summed = add_and_norm(
        shortcut, Branch(output, bias, scale), NormWeights(random(6), None, 1e-6)
    )
    torch.testing.assert_close(summed, shortcut + scale * (output + bias))
    rms = summed.square().mean(-1, keepdim=True).add(1e-6).sqrt()
    torch.testing.assert_close(normed, summed / rms * random(6))


@pytest.mark.in_own_process
def test_padded_words_are_in_no_softmax():
    """Prevents: a loss that counts words which do not exist, or gives them a gradient."""
    logits = random(4, 7).requires_grad_()
    labels = torch.tensor([0, 4, 2, 1])
    losses = cross_entropy(logits * 1.0, labels, OwnWords(0, 5, None))
    expected = F.cross_entropy(logits[:, :5], labels, reduction="none")
    torch.testing.assert_close(losses, expected)
    losses.sum().backward()
    assert not logits.grad[:, 5:].any() and logits.grad[:, :5].all()


def test_storages_are_counted_from_birth_to_end():
    """Prevents: a view that counts twice, and memory that is counted when it is gone."""
    tracker, label = MemoryTracker(), Label("layer", "made", "forward")
    one = torch.empty(100)
    tracker.hold(one.untyped_storage(), label)
    tracker.hold(one[10:].untyped_storage(), label)
    assert tracker.now_bytes == BLOCK_BYTES and tracker.live() == {label: (1, BLOCK_BYTES)}
    tracker.settle(label)
    del one
    assert tracker.now_bytes == 0 and tracker.peak_bytes == BLOCK_BYTES
    assert tracker.contents() == {label: (1, BLOCK_BYTES)}
