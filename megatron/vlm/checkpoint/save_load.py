"""Checkpoints through Megatron-core's dist_checkpointing, independent of the pipeline split.

Saves run in the background. Core's own async save forks a writer per rank, which survives a killed
rank, hangs if a child is killed, and blocks other ranks if common.pt or the metadata cannot be
written. Here core only plans a save, and threads of the rank write its files.
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
    checkpoint_errors,
    differences,
    identity_state,
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
from megatron.vlm.checkpoint.state import Optimizer, State, join_settings
from megatron.vlm.checkpoint.stored_blocks import StoredTensors
from megatron.vlm.model.stage import VLMStage
from omnibal.base.errors import UserError
from omnibal.job.plan import Plan
from omnibal.job.runlog import RATES, checkpoint_path, latest_step
from omnibal.model.units import LANGUAGE

T = TypeVar("T")
_log = logging.getLogger(__name__)
_FILES_PER_RANK = 2  # one thread per file
_TENSOR_OVERHEAD_BYTES = 4096  # of a tensor in its file and in the metadata
_WRITE_POLL_S = 0.02  # between polls for the end of writing


class CheckpointWriter:
    """Saves one run's state in its directory, one save at a time; all methods are collective.

    A failed save is logged and counted, not raised: earlier checkpoints remain, and the next save
    tries again.

    Args:
        stages: this rank's chunks of the model, and data-parallel encoders.
        keep_last: number of newest checkpoints to keep, None for all.
        asynchronous: whether `save` returns as soon as the state is copied.
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
        self._state = State(stages, optimizers)
        self._scheduler = scheduler
        self._identity = identity_state(plan.model, plan.data, _copy_plain(options), plan.adapters)
        self._keep_last = keep_last
        self._asynchronous = asynchronous
        # A gloo group: polling for completion must not wait for the devices.
        self._group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self._threads = ThreadPoolExecutor(_FILES_PER_RANK, thread_name_prefix="checkpoint")
        self._copies: dict[Any, torch.Tensor] = {}
        self._pending: _PendingSave | None = None
        self._removal: Future[None] | None = None
        self._is_validated = False
        step = _agree(lambda: latest_step(directory), self._group)
        self.newest_step: int | None = _gather(step, self._group)[0]
        self.failures: list[str] = []
        """Reasons of the consecutive failed saves up to now. Empty after a success."""

    def save(self, step: int, training_state: Mapping[str, Any]) -> None:
        """Save the state after `step` steps, if it is not saved yet; first finishes a pending save.

        Weights must be gathered (`Trainer.wait_for_weights`), and may change on return.

        Args:
            training_state: plain JSON, equal on all ranks.
        """
        self.finish()
        if step == self.newest_step:
            return
        try:
            self._pending = self._start(step, _copy_plain(training_state))
        except _RankError as error:
            self._drop_save(step, error)
        if not self._asynchronous:
            self.finish()

    def poll(self) -> None:
        """Complete the pending save if all ranks have written their files; call every step."""
        if self._pending is not None and self._is_written(self._pending):
            self._complete(self._pending)

    def finish(self) -> None:
        """Complete the pending save, and wait for the removal of old checkpoints."""
        if self._pending is not None:
            wait(self._pending.files)
            # Poll: one long wait for a slow rank could exceed the collectives' timeout.
            while not self._is_written(self._pending):
                time.sleep(_WRITE_POLL_S)
            self._complete(self._pending)
        if self._removal is not None:
            error, self._removal = self._removal.exception(), None
            if error is not None:
                _log.info(f"old checkpoints are not removed: {reason(error)}")

    def _start(self, step: int, training_state: dict[str, Any]) -> "_PendingSave":
        """Plan the save, copy the state and start writing. _RankError if any rank fails."""
        path = part_path(self._directory, step)
        _agree(partial(_on_first_rank, begin_checkpoint, self._directory, step), self._group)
        _agree(partial(_check_shared, path), self._group)
        sharded, common = save_preprocess(
            self._state.sharded_state_dict()
            | {
                "scheduler": self._scheduler.state_dict(),
                "step": step,
                "training_state": training_state,
                "omnibal": self._identity,
            },
            validate_access_integrity=not self._is_validated,
            preprocess_common_before_consistancy_check=_select_common,
        )
        self._is_validated = True  # the layout does not change between saves
        common = _select_common(common) | {"optimizer": common.get("optimizer")}
        # Core stores only rank 0's optimizer settings, but frozen stages have none, and stages
        # without language layers have none for experts.
        gathered = filter(None, _gather(common["optimizer"], self._group))
        common["optimizer"] = join_settings(list(gathered))
        planner = _Planner(*CHECKPOINT_BACKEND, thread_count=_FILES_PER_RANK)
        writer, metadata = planner.async_save(sharded, str(path))
        buckets = writer.write_buckets or []
        tensors = [tensor for _, _, (_, items) in buckets for _, tensor in items]
        size = sum(_TENSOR_OVERHEAD_BYTES + tensor.nbytes for tensor in tensors)
        free = _agree(lambda: shutil.disk_usage(self._directory).free, self._group)
        ranks = _gather((size, free), self._group)
        needed, free = sum(size for size, _ in ranks), min(free for _, free in ranks)
        if needed > free:
            raise _RankError(
                0,
                f"{self._directory}: a checkpoint takes {needed / 2**30:.3g} GiB, and only "
                f"{free / 2**30:.3g} GiB are free",
            )
        writes = _agree(lambda: self._prepare_writes(writer, path, common), self._group)
        files = [self._threads.submit(write) for write in writes]
        return _PendingSave(step, writer, metadata, files)

    def _prepare_writes(
        self, writer: FileSystemWriterAsync, path: Path, common: dict[str, Any]
    ) -> "list[Callable[[], _WrittenFile]]":
        """Copy tensors that may change, and return functions that write this rank's files."""
        changing = set()
        if self._asynchronous:
            tensors = self._state.changing_tensors()
            changing = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        writes: list[Callable[[], _WrittenFile]] = [
            partial(_write_bucket, writer, bucket)
            for bucket in _copy_to_host(writer.write_buckets or [], changing, self._copies)
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
        """Publish all ranks' files as the newest checkpoint, or drop the save if one failed."""
        self._pending = None
        try:
            written = _agree(lambda: [file.result() for file in save.files], self._group)
            all_written = _gather(written, self._group)
            _agree(partial(_on_first_rank, self._publish, save, all_written), self._group)
        except _RankError as error:
            self._drop_save(save.step, error)
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

    def _drop_save(self, step: int, error: "_RankError") -> None:
        """Log and count a failed save, and remove its files; no rank is writing them."""
        line = f"step {step} is not saved: rank {error.rank}: {error}; "
        if self.newest_step is None:
            line += "there is no checkpoint yet"
        else:
            line += f"{checkpoint_path(self._directory, self.newest_step)} stays the newest one"
        try:
            _on_first_rank(remove_checkpoint, self._directory, step)
        except (OSError, UserError) as removal_error:
            line += f"; its files are not removed: {reason(removal_error)}"
        self.failures.append(line)
        _log.info(line)


class _Planner(TorchDistSaveShardedStrategy):
    """Save strategy that stops after planning, as core's next steps may fail on one rank alone.

    Returns the writer with this rank's files and, on rank 0, the checkpoint's metadata.
    """

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, save_state_dict_ret: tuple
    ) -> tuple[FileSystemWriterAsync, Metadata | None]:
        return writer, save_state_dict_ret[1]


@dataclass(frozen=True, slots=True)
class _PendingSave:
    step: int
    writer: FileSystemWriterAsync
    metadata: Metadata | None  # None except on rank 0
    files: "list[Future[_WrittenFile]]"


class _RankError(UserError):
    """A failure of one rank, raised on all ranks."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank


def _agree(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Return this rank's `work()`; collective. Any rank's failure is a _RankError on all."""
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


def _copy_to_host(
    buckets: Sequence[WriteBucket], changing: set[int], copies: dict[Any, torch.Tensor]
) -> list[WriteBucket]:
    """Return the buckets on the host. Host tensors are cloned if their storage is in `changing`.

    `copies`: page-locked copies of device tensors by place in the save; later saves reuse them.
    """
    numbers = count()

    def copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
        key = next(numbers), tensor.shape, tensor.dtype
        if tensor.device.type == "cpu":
            return tensor.clone() if tensor.untyped_storage().data_ptr() in changing else tensor
        if key not in copies:
            copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            if has_cuda() and tensor.nbytes:
                _lock_pages(copies[key])
        return copies[key].copy_(tensor, non_blocking=True)

    copied = [
        (path, name, (objects, [(item, copy_tensor(tensor)) for item, tensor in tensors]))
        for path, name, (objects, tensors) in buckets
    ]
    # On the current stream the copies run after this update and before the next, but the writer
    # threads do not synchronize with a stream.
    if has_cuda():
        torch.cuda.current_stream().synchronize()
    return copied


def _lock_pages(copied: torch.Tensor) -> None:
    # Not `pin_memory`: torch rounds page-locked sizes up to a power of two.
    cuda, address = torch.cuda.cudart(), copied.data_ptr()
    torch.cuda.check_error(cuda.cudaHostRegister(address, copied.nbytes, 1))  # 1: for all contexts
    weakref.finalize(copied, cuda.cudaHostUnregister, address)


class _ChecksummedFile(io.FileIO):
    """A new file that computes the CRC-32 of its bytes."""

    checksum = 0

    def write(self, content: Any) -> int:
        # `io.FileIO`'s method: may write fewer bytes than given.
        count = super().write(content)
        self.checksum = zlib.crc32(memoryview(content)[:count], self.checksum)
        return count


@contextmanager
def _open_new_file(path: Path) -> "Iterator[io.BufferedWriter[_ChecksummedFile]]":
    """Open a new file, and sync it to disk at the end. OSErrors name the path."""
    try:
        with io.BufferedWriter(_ChecksummedFile(path, "w")) as stream:
            yield stream
            # Core's writer syncs before the last flush, and may lose the end of a file.
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
    with _open_new_file(Path(path)) as stream:
        results = [
            _write_item(writer.transforms, stream, data, item, name, SerializationFormat.TORCH_SAVE)
            for item, data in (*objects, *tensors)
        ]
    return _WrittenFile(name, stream.raw.checksum, results)


def _write_common(path: Path, content: io.BytesIO) -> _WrittenFile:
    with _open_new_file(path) as stream:
        stream.write(content.getbuffer())
    return _WrittenFile(path.name, stream.raw.checksum, [])


def load_checkpoint(
    directory: Path,
    plan: Plan,
    stages: Sequence[VLMStage],
    optimizers: Sequence[Optimizer | None],
    scheduler: OptimizerParamScheduler,
    options: Mapping[str, float | str],
    hash_steps: Callable[[int], str | None] = lambda steps: None,
) -> CheckpointIdentity:
    """Restore weights, optimizer and LR schedule from the newest checkpoint; collective.

    Returns its identity. `common` has the "training_state" given to `CheckpointWriter.save`.

    Args:
        options: UserError if any but `RATES` differ from the checkpoint's.
        hash_steps: returns `steps_sha256` of the first n steps: a plan may continue a shorter one.
    """
    identity = _open_checked(directory, plan)
    path = identity.path
    if identity.options is None:
        raise UserError(
            f"{path}: holds only weights, as of an import; start from them with --finetune"
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
            "by `omnibal plan --steps-of` it, or start again without --load"
        )
    for line in differences(before, now, "given"):
        _log.info(f"{path}: {line}, which the run goes on with")
    state, loaded = State(stages, optimizers), identity.common

    def load() -> None:
        with checkpoint_errors(path):
            stored = StoredTensors(path)
            state.load_weights(stored)
            state.load_optimizer(stored, loaded["optimizer"])
            scheduler.load_state_dict(loaded["scheduler"])

    _agree(load)
    return identity


def load_weights(directory: Path, plan: Plan, stages: Sequence[VLMStage]) -> int:
    """Restore the newest weights, and adapters if stored; return their step. Collective."""
    identity = _open_checked(directory, plan)
    load_opened_weights(identity, plan, stages)
    return identity.step


def load_opened_weights(
    identity: CheckpointIdentity, plan: Plan, stages: Sequence[VLMStage]
) -> None:
    """Restore a checkpoint's weights, and adapters if stored; collective."""
    state = State(stages, [None] * len(stages))
    has_adapters = plan.adapters is None or identity.adapters is not None

    def load() -> None:
        with checkpoint_errors(identity.path):
            state.load_weights(StoredTensors(identity.path), adapters=has_adapters)

    _agree(load)


def _select_common(common: Mapping[str, Any]) -> dict[str, Any]:
    # Without optimizer settings and empty entries, which only some stages have: core compares the
    # common state of all ranks.
    return {name: common[name] for name in ("scheduler", "step", "training_state", "omnibal")}


def _copy_plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    # Enums become strings: a load refuses to unpickle other types.
    return json.loads(json.dumps(dict(settings)))


def _open_checked(directory: Path, plan: Plan) -> CheckpointIdentity:
    """Open the newest checkpoint; collective. UserError if it is of another model or adapters."""
    model = plan.model
    identity = open_newest(directory, _agree, dist.get_rank(), dist.get_world_size())
    there = identity.model
    if not model.language.prediction_layers:  # its tensors are not read
        there = there.with_tower(LANGUAGE, prediction_layers=0)
    different = architecture_differences(there, model)
    if different:
        raise UserError(
            f"{identity.path}: is a checkpoint of another model: {'; '.join(different)}; load a "
            f"checkpoint of {model.name}, or plan for the checkpoint's model"
        )
    if identity.adapters is not None:
        different = adapter_differences(model, identity.adapters, plan.adapters)
        if different:
            raise UserError(
                f"{identity.path}: is of other adapters: {'; '.join(different)}; plan with the "
                "checkpoint's adapters, or load an export that has them merged"
            )
    return identity
