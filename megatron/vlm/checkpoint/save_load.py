"""Checkpoints through Megatron-core's dist_checkpointing, independent of the pipeline split.

Saves run in the background. Core's own async save forks a writer per rank, which survives a killed
rank, hangs if a child is killed, and blocks other ranks if common.pt or the metadata cannot be
written. So core only plans a save, and threads of the rank write the files.
"""

import io
import json
import logging
import os
import shutil
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import (
    FileSystemWriterAsync,
    WriteBucket,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from megatron.vlm.backend import COLLECTIVE_TIMEOUT, has_cuda
from megatron.vlm.checkpoint.identity import (
    CHECKPOINT_BACKEND,
    CheckpointIdentity,
    adapter_differences,
    architecture_differences,
    differences,
    identity_state,
    one_error,
    open_newest,
    reason,
)
from megatron.vlm.checkpoint.run_folders import (
    begin_checkpoint,
    force_to_disk,
    part_path,
    prune_checkpoints,
    publish_checkpoint,
    remove_checkpoint,
)
from megatron.vlm.checkpoint.state import Optimizer, join_settings, state_of
from megatron.vlm.checkpoint.stored_blocks import StoredTensors
from megatron.vlm.model.stage import VLMStage
from omnibal.base.errors import UserError
from omnibal.job.plan import Plan
from omnibal.job.runlog import RATES, checkpoint_path, latest_step

T = TypeVar("T")
_log = logging.getLogger(__name__)
_GIB = 2**30
_FILES_PER_RANK = 2  # one thread per file
_TENSOR_OVERHEAD_BYTES = 4096
"""Overhead of a tensor in its file and in the metadata."""
_TURN_S = 0.02  # between two polls for the end of writing


class CheckpointWriter:
    """Saves one run's state in its directory, one save at a time.

    All methods are collective. A failed save is logged and counted, not raised: existing
    checkpoints stay, and the next save tries again. `stages` are this rank's chunks of the model,
    and data-parallel encoders. If `asynchronous`, `save` returns as soon as the state is copied.
    """

    def __init__(
        self,
        directory: Path,
        plan: Plan,
        stages: Sequence[VLMStage],
        optimizers: Sequence[Optimizer | None],
        scheduler: OptimizerParamScheduler,
        options: Mapping[str, float | str],
        keep_last: int | None,
        asynchronous: bool,
    ) -> None:
        self._directory = directory
        self._state = state_of(stages, optimizers)
        self._scheduler = scheduler
        self._identity = identity_state(plan.model, plan.data, _copy_plain(options), plan.adapters)
        self._keep_last = keep_last
        self._asynchronous = asynchronous
        # A host group: polling for completion must not wait for the devices.
        self._group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self._threads = ThreadPoolExecutor(_FILES_PER_RANK, thread_name_prefix="checkpoint")
        self._copies: dict[Any, torch.Tensor] = {}
        self._pending: _PendingSave | None = None
        self._removal: Future[None] | None = None
        self._is_validated = False
        step = _agree_or_refuse(lambda: latest_step(directory), self._group)
        self.newest_step: int | None = _gather(step, self._group)[0]
        self.failures: list[str] = []
        """Reasons of the latest consecutive failed saves. Empty after a success."""

    def save(self, step: int, training_state: Mapping[str, Any]) -> None:
        """Save the state after `step` steps, after any pending save; weights may change on return.

        Weights must be gathered (`Trainer.wait_for_weights`). Does nothing if `step` is saved
        already. A load returns `training_state`, which is JSON-serializable and equal on all ranks.
        """
        self.finish()
        if step == self.newest_step:
            return
        try:
            self._pending = self._start(step, _copy_plain(training_state))
        except _RankError as error:
            self._give_up(step, error)
        if not self._asynchronous:
            self.finish()

    def poll(self) -> None:
        """Complete the pending save if all ranks have written their files; called every step."""
        if self._pending is not None and self._is_written(self._pending):
            self._complete(self._pending)

    def finish(self) -> None:
        """Wait for the pending save and for the removal of old checkpoints."""
        if self._pending is not None:
            wait(self._pending.files)
            # Polled: one long wait for a slow rank could exceed the timeout of collectives.
            while not self._is_written(self._pending):
                time.sleep(_TURN_S)
            self._complete(self._pending)
        if self._removal is not None:
            error, self._removal = self._removal.exception(), None
            if error is not None:
                _log.info(f"old checkpoints are not removed: {reason(error)}")

    def _start(self, step: int, training_state: dict[str, Any]) -> "_PendingSave":
        """Plan the save, copy the state and start writing."""
        path = part_path(self._directory, step)
        _agree(partial(_on_first_rank, begin_checkpoint, self._directory, step), self._group)
        _agree(partial(_check_shared, path), self._group)
        sharded, common = save_preprocess(
            self._state.described()
            | {
                "scheduler": self._scheduler.state_dict(),
                "step": step,
                "training_state": training_state,
                "omnibal": self._identity,
            },
            validate_access_integrity=not self._is_validated,
            preprocess_common_before_consistancy_check=_select_common,
        )
        self._is_validated = True  # the checked layout is constant over saves
        common = _select_common(common) | {"optimizer": common.get("optimizer")}
        # Core stores rank 0's settings for all, but frozen stages have none, and stages without
        # language layers have none for experts.
        gathered = filter(None, _gather(common["optimizer"], self._group))
        common["optimizer"] = join_settings(list(gathered))
        planner = _Planner(*CHECKPOINT_BACKEND, thread_count=_FILES_PER_RANK)
        writer, metadata = planner.async_save(sharded, str(path))
        self._check_space(writer.write_buckets or [])
        writes = _agree(lambda: self._copied_writes(writer, path, common), self._group)
        files = [self._threads.submit(write) for write in writes]
        return _PendingSave(step, writer, metadata, files)

    def _check_space(self, buckets: Sequence[WriteBucket]) -> None:
        """Raise _RankError if the ranks' files exceed the free disk space."""
        tensors = [tensor for _, _, (_, written) in buckets for _, tensor in written]
        size = sum(_TENSOR_OVERHEAD_BYTES + tensor.nbytes for tensor in tensors)
        free = _agree(lambda: shutil.disk_usage(self._directory).free, self._group)
        ranks = _gather((size, free), self._group)
        needed, free = sum(size for size, _ in ranks), min(free for _, free in ranks)
        if needed > free:
            raise _RankError(
                0,
                f"{self._directory}: a checkpoint takes {needed / _GIB:.3g} GiB, and only "
                f"{free / _GIB:.3g} GiB are free",
            )

    def _copied_writes(
        self, writer: FileSystemWriterAsync, path: Path, common: dict[str, Any]
    ) -> "list[Callable[[], _WrittenFile]]":
        """Return functions that write this rank's files from data that training cannot change."""
        changing = set()
        if self._asynchronous:
            changing = {tensor.untyped_storage().data_ptr() for tensor in self._state.changing()}
        writes: list[Callable[[], _WrittenFile]] = [
            partial(_write_bucket, writer, bucket)
            for bucket in _on_host(writer.write_buckets or [], changing, self._copies)
        ]
        if dist.get_rank() == 0:
            copied = io.BytesIO()
            torch.save(common, copied)
            writes.append(partial(_write_common, path / COMMON_STATE_FNAME, copied))
        return writes

    def _is_written(self, save: "_PendingSave") -> bool:
        running = torch.tensor(sum(not file.done() for file in save.files), device="cpu")
        dist.all_reduce(running, group=self._group)
        return running.item() == 0

    def _complete(self, save: "_PendingSave") -> None:
        """Publish the files of all ranks as the newest checkpoint."""
        self._pending = None
        try:
            written = _agree(lambda: [file.result() for file in save.files], self._group)
            all_written = _gather(written, self._group)
            _agree(partial(_on_first_rank, self._publish, save, all_written), self._group)
        except _RankError as error:
            self._give_up(save.step, error)
            return
        self.newest_step = save.step
        self.failures = []
        if self._keep_last is not None and dist.get_rank() == 0:
            self._removal = self._threads.submit(
                prune_checkpoints, self._directory, self._keep_last
            )
        _log.info(f"saved {checkpoint_path(self._directory, save.step)}")

    def _publish(self, save: "_PendingSave", written: "list[list[_WrittenFile]]") -> None:
        path = part_path(self._directory, save.step)
        files = [file for own in written for file in own]
        save.writer.finish(save.metadata, [file.results for file in files])
        save_config(CheckpointingConfig(*CHECKPOINT_BACKEND), str(path))
        force_to_disk(path / CONFIG_FNAME)
        checksums = {file.name: file.checksum for file in files}
        publish_checkpoint(self._directory, save.step, checksums)

    def _give_up(self, step: int, error: "_RankError") -> None:
        """Remove the files of a failed save. No rank is writing."""
        line = f"step {step} is not saved: {error}; "
        if self.newest_step is None:
            line += "there is no checkpoint yet"
        else:
            line += f"{checkpoint_path(self._directory, self.newest_step)} stays the newest one"
        try:
            _on_first_rank(remove_checkpoint, self._directory, step)
        except (OSError, UserError) as rest:
            line += f"; what was written stays: {reason(rest)}"
        self.failures.append(line)
        _log.info(line)


class _Planner(TorchDistSaveShardedStrategy):
    """Save strategy that stops after planning: core's next steps may fail on one rank alone.

    Returns the writer, with this rank's files, and on rank 0 the whole checkpoint's metadata.
    """

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, save_state_dict_ret: tuple
    ) -> tuple[FileSystemWriterAsync, Metadata | None]:
        return writer, save_state_dict_ret[1]


@dataclass(frozen=True, slots=True)
class _PendingSave:
    step: int
    writer: FileSystemWriterAsync
    metadata: Metadata | None
    """Metadata of the whole checkpoint, on rank 0. None on others."""
    files: "list[Future[_WrittenFile]]"


class _RankError(Exception):
    """A failure of one rank, raised on all."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.reason = reason


def _agree(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Return this rank's `work()`; collective."""
    result: Any = None
    failure = None
    try:
        result = work()
    except (Exception, CheckpointException) as error:
        failure = reason(error)
    for rank, other in enumerate(_gather(failure, group)):
        if other is not None:
            raise _RankError(rank, other)
    return result


def _agree_or_refuse(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Return this rank's `work()`; collective. Any rank's failure is a UserError on all."""
    try:
        return _agree(work, group)
    except _RankError as error:
        raise UserError(error.reason) from error


def _gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def _on_first_rank(work: Callable[..., Any], *arguments: Any) -> None:
    if dist.get_rank() == 0:
        work(*arguments)


def _check_shared(path: Path) -> None:
    if not path.is_dir():
        raise UserError(
            f"{path}: rank 0 made this folder, and this rank does not see it; --save must be in a "
            "file system that all nodes share"
        )


def _on_host(
    buckets: Sequence[WriteBucket], changing: set[int], copies: dict[Any, torch.Tensor]
) -> list[WriteBucket]:
    """Copy buckets to the host, without sharing storages in `changing`.

    `copies` are page-locked, by place in the save, and overwritten by the next save.
    """
    copied, number = [], count()
    for path, name, (objects, tensors) in buckets:
        own = [
            (item, _host_copy(tensor, changing, copies, next(number))) for item, tensor in tensors
        ]
        copied.append((path, name, (objects, own)))
    # On the current stream the copies run after this update and before the next, but the writer
    # threads do not synchronize with a stream.
    if has_cuda():
        torch.cuda.current_stream().synchronize()
    return copied


def _host_copy(
    tensor: torch.Tensor, changing: set[int], copies: dict[Any, torch.Tensor], number: int
) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor.clone() if tensor.untyped_storage().data_ptr() in changing else tensor
    key = number, tensor.shape, tensor.dtype
    if key not in copies:
        copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if has_cuda() and tensor.nbytes:
            _lock_pages(copies[key])
    return copies[key].copy_(tensor, non_blocking=True)


def _lock_pages(copied: torch.Tensor) -> None:
    """Lock the pages of host memory; torch would round its size up to a power of two."""
    cuda, address = torch.cuda.cudart(), copied.data_ptr()
    torch.cuda.check_error(cuda.cudaHostRegister(address, copied.nbytes, 1))  # for all contexts
    weakref.finalize(copied, cuda.cudaHostUnregister, address)


class _ChecksummedFile(io.FileIO):
    """A new file that computes the CRC-32 of its bytes."""

    checksum = 0

    def write(self, content: Any) -> int:
        """Write bytes (Python's name)."""
        count = super().write(content)
        self.checksum = zlib.crc32(memoryview(content)[:count], self.checksum)
        return count


@contextmanager
def _writing(path: Path) -> "Iterator[io.BufferedWriter[_ChecksummedFile]]":
    """Open a new file and sync it to disk at the end."""
    try:
        with io.BufferedWriter(_ChecksummedFile(path, "w")) as stream:
            yield stream
            # Core's writer syncs before it flushes, and may lose the end of a file.
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    except RuntimeError as error:
        # torch.save hides the write error behind another.
        cause = error.__context__
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        raise


@dataclass(frozen=True, slots=True)
class _WrittenFile:
    name: str
    checksum: int
    results: list[WriteResult]


def _write_bucket(writer: FileSystemWriterAsync, bucket: WriteBucket) -> _WrittenFile:
    path, name, (objects, tensors) = bucket
    with _writing(Path(path)) as stream:
        results = [
            _write_item(writer.transforms, stream, data, item, name, SerializationFormat.TORCH_SAVE)
            for item, data in (*objects, *tensors)
        ]
    return _WrittenFile(name, stream.raw.checksum, results)


def _write_common(path: Path, content: io.BytesIO) -> _WrittenFile:
    with _writing(path) as stream:
        stream.write(content.getbuffer())
    return _WrittenFile(path.name, stream.raw.checksum, [])


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedCheckpoint:
    """State to resume from."""

    step: int
    training_state: dict[str, Any]
    """Training state as given to `CheckpointWriter.save`."""


def load_checkpoint(
    directory: Path,
    plan: Plan,
    stages: Sequence[VLMStage],
    optimizers: Sequence[Optimizer | None],
    scheduler: OptimizerParamScheduler,
    options: Mapping[str, float | str],
    hash_steps: Callable[[int], str | None] = lambda steps: None,
) -> LoadedCheckpoint:
    """Restore weights, optimizer and position from the newest checkpoint; collective.

    `hash_steps` returns `steps_sha256` of the plan's first `n` steps: a longer plan of the same
    data goes on with the run of a shorter one.
    """
    identity = _open_checked(directory, plan)
    path = identity.path
    if identity.options is None:
        raise UserError(
            f"{path}: holds weights alone, as an import does; start from them with --finetune"
        )
    stored, given = dict(identity.options), dict(options)
    before, now = (
        {name: settings.pop(name, None) for name in RATES} for settings in (stored, given)
    )
    different = differences(stored, given, "given")
    if different:
        raise UserError(
            f"{path}: was trained with other settings: {'; '.join(different)}; resume with the same"
        )
    data = plan.data
    if data is not None and identity.steps_sha256 not in (
        data.steps_sha256,
        None if identity.steps is None else hash_steps(identity.steps),
    ):
        raise UserError(
            f"{path}: was trained on other steps than the plan's, so its step count does not say "
            "which samples were seen; resume with the plan it was trained with or with one made "
            "by `omnibal plan --steps-of` it, or start anew without --load"
        )
    for line in differences(before, now, "given"):
        _log.info(f"{path}: {line}, which the run goes on with")
    state, loaded = state_of(stages, optimizers), identity.common

    def load() -> None:
        with one_error(path):
            stored = StoredTensors(path)
            state.load_weights(stored)
            state.load_optimizer(stored, loaded["optimizer"])
            scheduler.load_state_dict(loaded["scheduler"])

    _agree_or_refuse(load)
    return LoadedCheckpoint(step=loaded["step"], training_state=loaded["training_state"])


def load_weights(directory: Path, plan: Plan, stages: Sequence[VLMStage]) -> int:
    """Restore the newest weights, and adapters if stored; collective. Returns the step."""
    identity = _open_checked(directory, plan)
    load_opened_weights(identity, plan, stages)
    return identity.step


def load_opened_weights(
    identity: CheckpointIdentity, plan: Plan, stages: Sequence[VLMStage]
) -> None:
    """Restore a checkpoint's weights, and adapters if stored; collective."""
    state = state_of(stages, [None] * len(stages))
    has_adapters = plan.adapters is None or identity.adapters is not None

    def load() -> None:
        with one_error(identity.path):
            state.load_weights(StoredTensors(identity.path), adapters=has_adapters)

    _agree_or_refuse(load)


def _select_common(common: Mapping[str, Any]) -> dict[str, Any]:
    """Common state without optimizer settings and empty entries, which stages have or lack."""
    return {name: common[name] for name in ("scheduler", "step", "training_state", "omnibal")}


def _copy_plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Copy settings without enums and the like, which a load would refuse to unpickle."""
    return json.loads(json.dumps(dict(settings)))


def _open_checked(directory: Path, plan: Plan) -> CheckpointIdentity:
    """Open the newest whole checkpoint and check that its model is the plan's; collective."""
    model = plan.model
    identity = open_newest(directory, _agree_or_refuse, dist.get_rank(), dist.get_world_size())
    different = architecture_differences(identity.model, model)
    if different:
        raise UserError(
            f"{identity.path}: is a checkpoint of another model: {'; '.join(different)}; load one "
            f"of {model.name}, or plan for the model of the checkpoint"
        )
    if identity.adapters is not None:
        others = adapter_differences(model, identity.adapters, plan.adapters)
        if others:
            raise UserError(
                f"{identity.path}: is of other adapters: {'; '.join(others)}; plan with those of "
                "the checkpoint, or load an export that has them in its weights"
            )
    return identity
