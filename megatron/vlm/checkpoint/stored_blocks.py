"""Blocks of a checkpoint's tensors, saved and loaded by the rank that has them, and no more.

Data-parallel ranks divide what lies one after another in memory, wherever that cuts a parameter:
core's distributed optimizer its state, ranks that divide weights all of it. Such a run of a
parameter's values is a few blocks of the tensors that a checkpoint has of it. Core's own load makes
room on every rank for whole tensors, and torch's reader reads whole ones of a file.
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
        CheckpointException: files are missing, cut short or of another model.
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
    """The blocks that a run of a parameter's values is of what a checkpoint has of the parameter.

    Args:
        entry: of the parameter in the sharded state of its stage.
        key: of what is stored, as of the parameter itself or of a moment.
        first: of the run, in the flat parameter.
        end: of the run.
        values: of the run, one axis; the blocks have its memory.
        copy: number of this rank among those that have the same run.
    """
    offset = 0
    for part in _stored_parts(entry, key, values.dtype):
        size = math.prod(part.local_shape)
        low, high = max(first - offset, 0), min(end - offset, size)
        # The axis of a tower's layers becomes one like others: core takes it from regular grids
        # alone.
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
    """Cut a run of a tensor's values, which lie one after another, into boxes, in their order.

    Returns:
        Place and lengths of each on every axis. Of a matrix there are three at most: the end of a
        row, whole rows, the begin of a row.

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
    """The row that a run begins in, all whole rows, and the row that it ends in, if it is in them:
    the first row of each, and the run within it."""
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
    """The tensors that a parameter is stored as, one after another along its first axis.

    A gated layer's first linear is two: the rows of the gate, and of what is gated.
    """
    if isinstance(entry, ShardedTensor):
        return [replace(entry, key=key, data=None, dtype=dtype)]
    shape_alone = torch.empty(entry.data.shape, dtype=dtype, device="meta")
    return [replace(part, data=None) for part in replace(entry, key=key, data=shape_alone).build()]


class _BlockReader(FileSystemReader):
    """Reads of a stored tensor what is asked for, where torch's reads all of it."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Fill what the plan asks for (torch's name)."""
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
        # A buffer would read ahead at each of the many places where the archive is looked at.
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
    while left:  # Linux reads 2 GiB at most at a time
        count = stream.readinto(left)
        if not count:
            raise EOFError(f"{path}: is cut short")
        left = left[count:]
