"""What one block of a language layer counts, between the norm before it and the sum after it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omnibal.cost.counts import Attended, Collectives, Device, Kept, Product, Working

FIRST_OUTPUT, SECOND_OUTPUT = "first norm's output", "second norm's output"
"""Lines of what a language layer keeps: inputs of its two blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Attention or feed-forward of a layer on one device; vectors are [features]."""

    products: tuple[Product, ...]
    attended: tuple[Attended, ...] = ()
    """Softmax attention."""
    other_attention_flops: np.ndarray | float = 0.0
    """Operations of attention that is not softmax's."""
    moved_bytes: np.ndarray
    """Bytes that element-wise kernels of forward read and write."""
    back_moved_bytes: np.ndarray
    collectives: Collectives
    kernels: int
    kept: tuple[Kept, ...]
    working: tuple[Working, ...] = ()
    """Moments of its backward, with nothing of what earlier blocks keep gone."""
    divided_parameters: int
    """Parameters that tensor-parallel ranks divide, before they do."""
    whole_parameters: int = 0
    """Parameters that every tensor-parallel rank has."""
    expert_parameters: int = 0
    """Parameters of experts, on this device."""


def whole_inputs(device: Device, block_bytes: np.ndarray) -> Collectives:
    """Collectives of a block whose input and output are of so many bytes when whole.

    Both are gathered and scattered either way, or all-reduced (Korthikanti et al. 2022, arXiv
    2205.05198, section 4.2.2). What is gathered for products in FP8 is sent in FP8.
    """
    sequence, sent_bytes = device.sequence_parallel, device.sent * block_bytes
    gathered_bytes = sent_bytes / 2 if sequence and device.fp8 is not None else sent_bytes
    return Collectives(
        forward_bytes=sent_bytes + gathered_bytes,
        backward_bytes=sent_bytes + gathered_bytes,
        again_bytes=gathered_bytes if sequence else 0.0,
        passes=2,
        back_passes=2,
        passes_again=1 if sequence else 0,
        gathered_bytes=block_bytes if sequence else 0.0,
    )


def names_of(kept: Sequence[Kept]) -> tuple[str, ...]:
    """What is kept, as moments name it that come when it is gone."""
    return tuple(dict.fromkeys(line.what for line in kept))
