"""Handing an item over from a loader process: all of its tensors at once.

Torch hands each tensor over in shared memory of its own, for which both processes open a connection
that proves who they are: half a millisecond of each for a tensor of a few numbers.
"""

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

_MOST_PIPED = 1 << 20
"""Bytes of an item up to which they go through the pipe; more go through shared memory."""
_ALIGNED = 64
"""Bytes of which the start of each tensor is a multiple."""


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """An item whose tensors lie one behind the other."""

    pickled: bytes
    """The item without its tensors' content."""
    sizes: tuple[int, ...]
    """Bytes of each tensor."""
    content: bytearray | torch.Tensor
    """Bytes of all of them, each padded; a tensor where it goes through shared memory."""


def parcel(item: Any) -> Parcel:
    """Pack an item, in the process that hands it over."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(item)
    parts = [buffer.raw() for buffer in buffers]
    sizes = tuple(part.nbytes for part in parts)
    starts = _starts(sizes)
    content: bytearray | torch.Tensor = bytearray(starts[-1])
    if starts[-1] > _MOST_PIPED:
        content = torch.empty(starts[-1], dtype=torch.uint8)
    view = _bytes_of(content)
    for part, start, size in zip(parts, starts, sizes, strict=False):
        view[start : start + size] = part
    return Parcel(stream.getvalue(), sizes, content)


def unpacked(parcel: Parcel) -> Any:
    """Unpack an item, whose tensors share the memory of the parcel."""
    view = _bytes_of(parcel.content)
    pairs = zip(_starts(parcel.sizes), parcel.sizes, strict=False)
    return pickle.loads(
        parcel.pickled, buffers=[view[start : start + size] for start, size in pairs]
    )


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where the content of each tensor begins, and where the last one's ends."""
    return list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))


def _bytes_of(content: bytearray | torch.Tensor) -> memoryview:
    return memoryview(content if isinstance(content, bytearray) else content.numpy())
