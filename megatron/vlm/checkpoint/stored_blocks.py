"""Blocks of a checkpoint's tensors, saved and loaded only by their rank.

Data-parallel shards are flat ranges that cut parameters anywhere: of optimizer state in core's
distributed optimizer, of everything with sharded weights. A range is a few blocks of stored
tensors. Core's load would allocate whole tensors, and torch's reader reads them whole.
"""

import io
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    mcore_to_pyt_state_dict,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.utils import _create_file_view


@torch.no_grad()
def load_blocks(blocks: Iterable[ShardedTensor], path: Path) -> None:
    """Read blocks of a checkpoint's tensors into their data; collective.

    Raises:
        CheckpointException: files are missing, truncated or of another model.
    """
    stored: dict[str, list[ShardedTensor]] = defaultdict(list)
    for block in blocks:
        stored[block.key].append(block)
    every = [block for same in stored.values() for block in same]
    torch_checkpoint.load(
        mcore_to_pyt_state_dict(stored, is_loading=True),
        storage_reader=_BlockReader(path),
        planner=MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[s for s in every if not s.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={
                block.key: block for block in every if block.allow_shape_mismatch
            },
        ),
    )


def blocks_of(
    entry: ShardedTensor | ShardedTensorFactory,
    key: str,
    first: int,
    end: int,
    values: torch.Tensor,
    copy: int = 0,
) -> Iterator[ShardedTensor]:
    """Split a flat range of a parameter into blocks of its stored tensors.

    Args:
        entry: the parameter's entry in its stage's sharded state.
        key: stored name, of the parameter or of a moment.
        first: start of the range in the flat parameter.
        end: end of the range.
        values: the range, one axis; blocks are views of it.
        copy: replica index among ranks with this range.
    """
    offset = 0
    for part in _stored_parts(entry, key, values.dtype):
        size = math.prod(part.local_shape)
        low, high = max(first - offset, 0), min(end - offset, size)
        # The axis of a tower's layers becomes an ordinary axis: core takes it only from regular
        # grids.
        shape = (1,) * part.prepend_axis_num + tuple(part.local_shape)
        begin = offset + low - first
        for place, lengths in boxes(shape, low, high):
            count = math.prod(lengths)
            yield replace(
                part,
                data=values[begin : begin + count].view(lengths),
                local_shape=lengths,
                global_offset=tuple(map(sum, zip(part.global_offset, place, strict=True))),
                replica_id=(*_axes(part.replica_id)[:-1], copy),
                axis_fragmentations=None,
                prepend_axis_num=0,
            )
            begin += count
        offset += size


def boxes(
    shape: tuple[int, ...], first: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split a flat range of a tensor into boxes, in order.

    Returns:
        Offset and lengths per axis. A matrix gives at most three boxes: tail of a row, whole rows,
        head of a row.

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
    for row, low, high in _row_runs(width, first, end):
        if high - low < width:
            for place, lengths in boxes(inner, low, high):
                yield (row, *place), (1, *lengths)
        else:
            rows = (high - low) // width
            yield (row, *(0 for _ in inner)), (rows, *inner)


def _row_runs(width: int, first: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Split a flat range into head row, full rows and tail row: first row, range from there."""
    top, bottom = -(-first // width), end // width
    if top > bottom:
        yield bottom, first - bottom * width, end - bottom * width
        return
    if first < top * width:
        yield top - 1, first - (top - 1) * width, width
    if top < bottom:
        yield top, 0, (bottom - top) * width
    if bottom * width < end:
        yield bottom, 0, end - bottom * width


def _axes(replica_id: int | tuple[int, ...]) -> tuple[int, ...]:
    return replica_id if isinstance(replica_id, tuple) else (replica_id,)


def _stored_parts(
    entry: ShardedTensor | ShardedTensorFactory, key: str, dtype: torch.dtype
) -> list[ShardedTensor]:
    """Stored tensors of a parameter along its first axis: gate and up of a gated linear_fc1."""
    if isinstance(entry, ShardedTensor):
        return [replace(entry, key=key, data=None, dtype=dtype)]
    shape_alone = torch.empty(entry.data.shape, dtype=dtype, device="meta")
    return [replace(part, data=None) for part in replace(entry, key=key, data=shape_alone).build()]


class _BlockReader(FileSystemReader):
    """Reads only the requested blocks of a stored tensor; torch's reads all of it."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Fill the requested tensors (torch's name)."""
        without_data = FakeTensorMode()
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._read(item, without_data))
            planner.commit_tensor(item, target)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem, without_data: FakeTensorMode) -> torch.Tensor:
        place = self.storage_data[item.storage_index]
        # Unbuffered: a buffer would read ahead at each seek in the archive.
        with Path(self.path, place.relative_path).open("rb", buffering=0) as stream:
            archive = _create_file_view(stream, place.offset, place.length)
            with without_data:
                stored = torch.load(archive, map_location="cpu", weights_only=True)
            strides = stored.stride()
            first = _place(item.storage_offsets, strides)
            last = first + _place([size - 1 for size in item.lengths], strides)
            values = torch.empty(last + 1 - first, dtype=stored.dtype, device="cpu")
            begin = place.offset + stored.untyped_storage()._checkpoint_offset
            stream.seek(begin + first * stored.itemsize)
            _fill(values, stream, stream.name)
        return values.as_strided(tuple(item.lengths), strides)


def _place(index: Sequence[int], strides: Sequence[int]) -> int:
    return sum(at * stride for at, stride in zip(index, strides, strict=True))


def _fill(values: torch.Tensor, stream: io.RawIOBase, path: str) -> None:
    left = memoryview(values.view(torch.uint8).numpy())
    while left:  # Linux reads at most 2 GiB at once
        count = stream.readinto(left)
        if not count:
            raise EOFError(f"{path}: is cut short")
        left = left[count:]
