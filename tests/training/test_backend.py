"""What pointing Megatron-core's CUDA calls at the CPU leaves as it was."""

import pytest
import torch

pytestmark = pytest.mark.quick


def test_device_contexts_work():
    """Prevents: models that are built on the meta device taking memory, or losing their buffers."""
    with torch.device("meta"):
        assert torch.empty(2).is_meta
        assert torch.nn.Linear(2, 3).weight.is_meta
    if not torch.cuda.is_available():
        assert torch.empty(2, device="cuda").device.type == "cpu"
