"""Blocks of a checkpoint's tensors, each saved and loaded by its rank alone.

Data-parallel shards are flat ranges that cut parameters anywhere: of optimizer state in core's
distributed optimizer, and of weights too if these are sharded. A range is a few blocks of stored
tensors. Core's load would allocate full tensors, torch's reader would read them, and both unpickle
arbitrary classes.
"""

import math
import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint import planner as planned
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import _create_file_view

_METADATA_FILE = ".metadata"
# All classes in a `.metadata` of torch_dist; others are refused.
_METADATA_CLASSES = (
    *(described.Metadata, described.MetadataIndex, described.StorageMeta),
    *(described.TensorStorageMetadata, described.BytesStorageMetadata, _StorageInfo),
    *(described.TensorProperties, described.ChunkStorageMetadata, described._MEM_FORMAT_ENCODING),
    *(planned.SavePlan, planned.WriteItem, planned.WriteItemType, planned.TensorWriteData),
)


class StoredTensors:
    """Tensors in a checkpoint's folder, read a block at a time. Runs no code from its files."""

    def __init__(self, path: Path) -> None:
        self._path, self._without_data = path, FakeTensorMode()
        with (path / _METADATA_FILE).open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        self._storage: dict[described.MetadataIndex, _StorageInfo] = metadata.storage_data
        self._tensors: dict[str, described.TensorStorageMetadata] = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, described.TensorStorageMetadata)
        }

    def dtype(self, key: str) -> torch.dtype:
        return self._tensor(key).properties.dtype

    def _tensor(self, key: str) -> described.TensorStorageMetadata:
        if key not in self._tensors:
            raise ValueError(f"has no tensor {key}")
        return self._tensors[key]

    @torch.no_grad()
    def read_blocks(self, blocks: Iterable[ShardedTensor]) -> None:
        """Read blocks into their data. ValueError if missing, incomplete or of another shape."""
        by_key: dict[str, list[ShardedTensor]] = defaultdict(list)
        for block in blocks:
            by_key[block.key].append(block)
        for key, wanted in by_key.items():
            self._read_tensor(key, wanted)

    def _read_tensor(self, key: str, blocks: Sequence[ShardedTensor]) -> None:
        stored = self._tensor(key)
        missing, targets, chunks = 0, [], []
        for block in blocks:
            if not block.allow_shape_mismatch and tuple(stored.size) != tuple(block.global_shape):
                raise ValueError(
                    f"{key} is {list(stored.size)} there, not {list(block.global_shape)}"
                )
            assert block.data is not None
            # A tower's layers are an axis of stored tensors, but not of the blocks' data.
            shape = (1,) * block.prepend_axis_num + tuple(block.local_shape)
            targets.append(block.data.detach().view(shape))
            if block.allow_shape_mismatch:
                targets[-1].zero_()  # padding of vocabularies and heads is not stored
            chunks.append(
                described.ChunkStorageMetadata(torch.Size(block.global_offset), torch.Size(shape))
            )
            # Elements of the block inside the stored shape.
            axes = zip(block.global_offset, shape, stored.size, strict=True)
            missing += math.prod(
                max(0, min(begin + length, size) - begin) for begin, length, size in axes
            )
        for item in create_read_items_for_chunk_list(key, stored, chunks):
            target = targets[item.dest_index.index]  # type: ignore[index]
            for axis, (begin, length) in enumerate(
                zip(item.dest_offsets, item.lengths, strict=True)
            ):
                target = target.narrow(axis, begin, length)
            chunk = stored.chunks[item.storage_index.index]  # type: ignore[index]
            target.copy_(self._read_item(item, chunk))
            missing -= target.numel()
        if missing:
            raise ValueError(f"{key} is incomplete")

    def _read_item(
        self, item: planned.ReadItem, chunk: described.ChunkStorageMetadata
    ) -> torch.Tensor:
        place, is_whole = self._storage[item.storage_index], item.lengths == chunk.sizes
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"{place.relative_path} is outside the folder")
        # Unbuffered: a buffer reads ahead at each seek in the archive.
        with (self._path / place.relative_path).open("rb", buffering=0) as stream:
            archive = _create_file_view(stream, place.offset, place.length)
            with nullcontext() if is_whole else self._without_data:
                stored = torch.load(archive, map_location="cpu", weights_only=True)
            if is_whole:
                return stored.reshape(tuple(item.lengths))
            # A fake tensor, which gives the position of its bytes: read only the block's range.
            strides = stored.stride()
            first = _flat_index(item.storage_offsets, strides)
            last = first + _flat_index([size - 1 for size in item.lengths], strides)
            values = torch.empty(last + 1 - first, dtype=stored.dtype, device="cpu")
            begin = place.offset + stored.untyped_storage()._checkpoint_offset
            stream.seek(begin + first * stored.itemsize)
            unread = memoryview(values.view(torch.uint8).numpy())
            while unread:  # Linux reads at most 2 GiB at once
                count = stream.readinto(unread)
                if not count:
                    raise EOFError(f"{stream.name}: is truncated")
                unread = unread[count:]
        return values.as_strided(tuple(item.lengths), strides)


class _Sealed(type):
    """Metaclass of classes that a pickle can instantiate, but not change."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise ValueError(f"sets {cls.__name__}.{name}")


def _seal(kind: type) -> type:
    def make(_: type, *values: Any) -> object:
        return kind(*values) if values else object.__new__(kind)

    return _Sealed(kind.__name__, (), {"__new__": make})


_METADATA_NAMES: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__qualname__): _seal(kind) for kind in _METADATA_CLASSES},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _seal(str),
    ("pathlib", "PosixPath"): _seal(PurePosixPath),
    ("pathlib._local", "PosixPath"): _seal(PurePosixPath),
}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler of `.metadata` that makes only torch's descriptions of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the sealed class of a pickled name. ValueError for other names."""
        value = vars(torch).get(name) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        if (module, name) not in _METADATA_NAMES:
            raise ValueError(f"contains {module}.{name}, which no checkpoint does")
        return _METADATA_NAMES[module, name]


def blocks_of(
    entry: ShardedTensor | ShardedTensorFactory,
    key: str,
    first: int,
    end: int,
    values: torch.Tensor,
    copy: int = 0,
) -> Iterator[ShardedTensor]:
    """Yield the blocks of stored tensors that make up `first:end` of a flat parameter.

    Args:
        entry: the parameter's entry in its stage's sharded state dict.
        key: stored name of the parameter, or of its optimizer state.
        values: the range's values, one axis; blocks are views of it.
        copy: number of this rank among the ranks with this range.
    """
    offset = 0
    if isinstance(entry, ShardedTensor):
        parts = [replace(entry, key=key, data=None, dtype=values.dtype)]
    else:  # gate and up of a gated linear_fc1, along the first axis
        shape_alone = torch.empty(entry.data.shape, dtype=values.dtype, device="meta")
        built = replace(entry, key=key, data=shape_alone).build()
        parts = [replace(part, data=None) for part in built]
    for part in parts:
        size = math.prod(part.local_shape)
        replica = part.replica_id if isinstance(part.replica_id, tuple) else (part.replica_id,)
        low, high = max(first - offset, 0), min(end - offset, size)
        # The axis of a tower's layers becomes an ordinary axis: core prepends it to regular grids
        # only.
        shape = (1,) * part.prepend_axis_num + tuple(part.local_shape)
        begin = offset + low - first
        for place, lengths in boxes(shape, low, high):
            count = math.prod(lengths)
            yield replace(
                part,
                data=values[begin : begin + count].view(lengths),
                local_shape=lengths,
                global_offset=tuple(map(sum, zip(part.global_offset, place, strict=True))),
                replica_id=(*replica[:-1], copy),
                axis_fragmentations=None,
                prepend_axis_num=0,
            )
            begin += count
        offset += size


def boxes(
    shape: tuple[int, ...], first: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split a flat range into head row, full rows, tail row: (offsets, lengths) by axis, in order.

    Example:
        >>> list(boxes((3, 4), 2, 9))
        [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if first >= end:
        return
    if len(shape) == 1:
        yield (first,), (end - first,)
        return
    width, inner = math.prod(shape[1:]), shape[1:]
    while first < end:
        row, low = divmod(first, width)
        rows = 1
        if low or end - first < width:
            for place, lengths in boxes(inner, low, min(low + end - first, width)):
                yield (row, *place), (1, *lengths)
        else:
            rows = (end - first) // width
            yield (row, *(0 for _ in inner)), (rows, *inner)
        first = (row + rows) * width


def _flat_index(index: Sequence[int], strides: Sequence[int]) -> int:
    return sum(position * stride for position, stride in zip(index, strides, strict=True))
