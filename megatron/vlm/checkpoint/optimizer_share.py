"""Optimizer state read from a checkpoint: of every parameter what this rank updates, no more.

Core's distributed optimizer divides the buffers of a stage evenly over data-parallel ranks,
wherever that cuts a parameter, and its own load makes room on every rank for the state of the whole
stage. Here a rank asks for the rows that its range of a parameter touches, and reads of a file
those alone.
"""

import io
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    mcore_to_pyt_state_dict,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.utils import _create_file_view

_KINDS = ("param", "exp_avg", "exp_avg_sq")
"""What is stored of every parameter in float32: the weights and Adam's moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """A run of a stored tensor that this rank updates."""

    rows: ShardedTensor
    """The rows of it that the run touches; they have data once they are read."""
    skipped: int
    """Values of the first row before the run."""
    target: torch.Tensor
    """Where the run goes in the optimizer's state, one axis."""

    def copy(self) -> None:
        """Give the optimizer its values."""
        run = self.rows.data.flatten()[self.skipped : self.skipped + len(self.target)]
        self.target.copy_(run)


@torch.no_grad()
def load_share(
    optimizers: Sequence[tuple[DistributedOptimizer, dict[str, Any]]], path: Path
) -> None:
    """Read this rank's share of the weights in float32 and of Adam's moments; collective.

    Args:
        optimizers: each with state for all of its parameters, which is overwritten, and the sharded
            state of what it trains, which says where the parameters are in a checkpoint; none on a
            rank of which everything is frozen.
        path: of the checkpoint, of any parallel sizes.

    Raises:
        CheckpointException: files are missing, cut short or of another model.
    """
    pieces = [piece for each in optimizers for piece in _pieces(*each)]
    stored: dict[str, list[ShardedTensor]] = defaultdict(list)
    for piece in pieces:
        stored[piece.rows.key].append(piece.rows)
    shards = [piece.rows for piece in pieces]
    torch_checkpoint.load(
        mcore_to_pyt_state_dict(stored, is_loading=True),
        storage_reader=_RowReader(path),
        planner=MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[s for s in shards if not s.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={
                shard.key: shard for shard in shards if shard.allow_shape_mismatch
            },
        ),
    )
    for piece in pieces:
        piece.copy()


def _pieces(optimizer: DistributedOptimizer, model_state: dict[str, Any]) -> Iterator[_Piece]:
    described = {
        entry.data: entry
        for entry in model_state.values()
        if isinstance(entry, ShardedTensor | ShardedTensorFactory)
    }
    for ranges in optimizer.gbuf_ranges:
        [buckets] = ranges.values()
        for parameter, own in (item for bucket in buckets for item in bucket["param_map"].items()):
            state = optimizer._get_main_param_and_optimizer_states(parameter)
            for kind in _KINDS:
                yield from _pieces_of(described[parameter], kind, own["param"], state[kind])


def _pieces_of(
    entry: ShardedTensor | ShardedTensorFactory, kind: str, own: Any, target: torch.Tensor
) -> Iterator[_Piece]:
    """The pieces of one kind of state of one parameter.

    Args:
        own: core's range of the flat parameter, with start and end.
        target: the values of the range, one axis.
    """
    offset = 0
    for part in _stored_parts(entry, f"optimizer.state.{kind}.{entry.key}"):
        values = math.prod(part.local_shape)
        first, end = max(own.start - offset, 0), min(own.end - offset, values)
        if first < end:
            rows, skipped = _rows(part, first, end)
            begin = offset + first - own.start
            yield _Piece(rows=rows, skipped=skipped, target=target[begin : begin + end - first])
        offset += values


def _stored_parts(entry: ShardedTensor | ShardedTensorFactory, key: str) -> list[ShardedTensor]:
    """The tensors that a parameter's state is stored as, one after another along its first axis.

    A gated layer's first linear is two: the rows of the gate, and of what is gated.
    """
    if isinstance(entry, ShardedTensor):
        return [replace(entry, key=key, data=None, dtype=torch.float32)]
    shape_alone = torch.empty(entry.data.shape, dtype=torch.float32, device="meta")
    return [replace(part, data=None) for part in replace(entry, key=key, data=shape_alone).build()]


def _rows(part: ShardedTensor, first: int, end: int) -> tuple[ShardedTensor, int]:
    """The rows that values `first` to `end` of a tensor are in, and how many come before `first`.

    Rows are along the first axis that has more than one of them.
    """
    # The axis of a tower's layers becomes one like others: core takes it from regular grids alone.
    shape = (1,) * part.prepend_axis_num + tuple(part.local_shape)
    axis = next((axis for axis, size in enumerate(shape) if size > 1), len(shape) - 1)
    width = math.prod(shape[axis + 1 :])
    top, bottom = first // width, -(-end // width)
    offset = list(part.global_offset)
    offset[axis] += top
    rows = replace(
        part,
        local_shape=(*shape[:axis], bottom - top, *shape[axis + 1 :]),
        global_offset=tuple(offset),
        axis_fragmentations=None,
        prepend_axis_num=0,
    )
    return rows, first - top * width


class _RowReader(FileSystemReader):
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
