"""Transfer of an item from a loader process with all tensors in one buffer.

Torch opens an authenticated connection for each tensor: half a millisecond each.
"""

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

_MOST_PIPED = 1 << 20
"""Maximum bytes of an item in the pipe; larger items use shared memory."""
_ALIGNED = 64


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    pickled: bytes
    """The pickled item without tensor contents."""
    sizes: tuple[int, ...]
    content: bytearray | torch.Tensor
    """Padded bytes of all tensors. A tensor if in shared memory."""


def parcel(item: Any) -> Parcel:
    """Pack an item, in the loader process."""
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
    """Unpack an item. Its tensors share the parcel's memory."""
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
    """Return the offset of each tensor, then the end of the last."""
    return list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))


def _bytes_of(content: bytearray | torch.Tensor) -> memoryview:
    return memoryview(content if isinstance(content, bytearray) else content.numpy())
