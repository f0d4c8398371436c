"""Results and kept tensors of fused operations, and the fake device's byte counts: quick checks."""

import pytest
import torch
from fused_checks import CHECKS, Case
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.vlm.measure.fake_device.memory import BLOCK_BYTES, Label, MemoryTracker
from megatron.vlm.model.fused.cross_entropy import OwnWords, _local_parts, cross_entropy

pytestmark = pytest.mark.quick


@pytest.mark.in_own_process
@pytest.mark.parametrize("check", CHECKS)
def test_bodies_are_their_formulas(check):
    """Prevents fused operations with wrong results or gradients, or that keep more for backward
    than plans count."""
    check(Case("cpu", torch.float32))


@pytest.mark.in_own_process
def test_padded_words_are_in_no_softmax():
    """Prevents a gradient for logits of padding words."""
    logits = torch.arange(28.0).view(4, 7).cos().requires_grad_()
    cross_entropy(logits * 1.0, torch.tensor([0, 4, 2, 1]), OwnWords(0, 5, None)).sum().backward()
    assert not logits.grad[:, 5:].any() and logits.grad[:, :5].all()


class RowLengths(TorchDispatchMode):
    """Records row lengths of all two-dimensional results."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if result.dim() == 2 and result.is_floating_point():
            self.seen.add(result.shape[1])
        return result


def test_words_are_read_in_whole_padded_rows():
    """Prevents a kernel that loads logits one by one because 16 does not divide the vocabulary."""
    with RowLengths() as rows:
        _local_parts(torch.randn(4, 128), torch.arange(4), 0, 51)
    assert 128 in rows.seen and not any(length % 16 for length in rows.seen - {1, 4})


def test_storages_are_counted_from_birth_to_end():
    """Prevents views counted twice, and memory counted after it is freed."""
    tracker, label = MemoryTracker(), Label("layer", "made", "forward")
    one = torch.empty(100)
    tracker.hold(one.untyped_storage(), label)
    tracker.hold(one[10:].untyped_storage(), label)
    tracker.settle(label)
    assert tracker.now_bytes == BLOCK_BYTES and tracker.contents() == {label: (1, BLOCK_BYTES)}
    del one
    assert tracker.now_bytes == 0 and tracker.peak_bytes == BLOCK_BYTES
    assert tracker.contents() == {label: (1, BLOCK_BYTES)}
