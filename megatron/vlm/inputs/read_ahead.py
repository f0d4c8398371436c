"""Ordered read-ahead of a dataset by worker processes that never outlive the rank.

Torch's DataLoader runs in a thread: there it installs no SIGCHLD handler, which would raise in the
main thread when a worker dies. The thread blocks signals, which workers inherit, so none arrives
between fork and start. It always fetches and prepares the next item ahead.
"""

import functools
import io
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch

from omnibal.base.errors import UserError

_PREFETCH = 4  # items per worker
_WORKER_POLL_S = 0.5  # between checks for dead workers
_EXIT_POLL_S = 0.005  # between checks for a dead worker's exit code
_MAX_PIPED_BYTES = 1 << 20  # larger items go through shared memory instead of the pipe
_TENSOR_ALIGNMENT = 64  # bytes; as torch's CPU allocator
_END = object()  # after the last item
_NICE = 10  # niceness of workers, to compute only on cores that the ranks leave idle
# Signals that schedulers send to all processes. Only the trainer obeys, and ends its workers.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class Dataset(Protocol):
    """Items by key."""

    def keys(self) -> Iterable[Any]:
        """Return the keys of all items, in order; taken in the reading thread."""

    def __getitem__(self, key: Any) -> Any:
        """Return an item. Its UserError is raised when the item is due."""


def read_ahead(
    dataset: Dataset, num_workers: int, prepare: Callable[[Any], Any]
) -> Generator[Any, None, None]:
    """Yield every prepared item in order, or raise; close the iterator to end the workers.

    Args:
        num_workers: number of loader processes; 0 reads in a thread.
        prepare: function applied to each item in the reading thread.
    """
    reader = _ReadAhead(dataset, num_workers, prepare)
    reader.start()
    try:
        while (event := reader.next_event()) is not _END:
            if isinstance(event, BaseException):
                raise event
            yield event
    finally:
        reader.closed.set()


class _ReadAhead:
    """Thread that owns the DataLoader and hands over its items through a queue of one.

    After the items it hands over `_END`, or an error.
    """

    def __init__(self, dataset: Dataset, num_workers: int, prepare: Callable[[Any], Any]) -> None:
        self.closed = threading.Event()
        self._loader = torch.utils.data.DataLoader(
            _LoadedItems(dataset, pack_parcel if num_workers else lambda item: item),
            batch_size=None,
            sampler=dataset.keys(),
            num_workers=num_workers,
            prefetch_factor=_PREFETCH if num_workers else None,
            collate_fn=lambda item: item,
            worker_init_fn=functools.partial(_begin_worker, os.getpid()),
        )
        self._prepare = prepare
        self._unpack = unpack_parcel if num_workers else lambda item: item
        self._workers: list[BaseProcess] = []
        self._started = threading.Event()
        self._ready: queue.Queue[Any] = queue.Queue(maxsize=1)

    def start(self) -> None:
        """Start the thread; return when it has forked all workers."""
        threading.Thread(target=self._run).start()
        # A fork copies locks: no other thread of this process may hold one meanwhile.
        self._started.wait()

    def next_event(self) -> Any:
        while True:
            try:
                return self._ready.get(timeout=_WORKER_POLL_S)
            except queue.Empty:
                killed = self._find_killed_worker(patience_s=0)
                if killed is not None:
                    raise _worker_error(killed) from None

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self._put_all()  # a frame of its own, as its iterator ends the workers when freed
            self._hand_over(_END)
        except BaseException as error:
            self._started.set()
            frames = error.__traceback__
            # A killed worker first shows as a partly sent item.
            killed = self._find_killed_worker(patience_s=_WORKER_POLL_S)
            self._hand_over(error if killed is None else _worker_error(killed))
            traceback.clear_frames(frames)  # frees the iterator
        for worker in self._workers:
            worker.kill()  # if it still runs: a program waits for its children at exit

    def _put_all(self) -> None:
        others = set(multiprocessing.active_children())
        items = iter(self._loader)
        self._workers += set(multiprocessing.active_children()) - others
        self._started.set()
        for item in items:
            failed = isinstance(item, UserError)
            self._hand_over(item if failed else self._prepare(self._unpack(item)))
            if failed or self._is_abandoned():
                return

    def _find_killed_worker(self, patience_s: float) -> BaseProcess | None:
        """Return a worker that ended with an error, now or within `patience_s`, or None."""
        sentinels = wait([worker.sentinel for worker in self._workers], patience_s)
        for worker in self._workers:
            if worker.sentinel in sentinels and _wait_for_exit_code(worker):
                return worker
        return None

    def _hand_over(self, event: Any) -> None:
        while not self._is_abandoned():
            try:
                self._ready.put(event, timeout=_WORKER_POLL_S)
                return
            except queue.Full:
                pass

    def _is_abandoned(self) -> bool:
        # After an exception the interpreter waits for this thread before it ends: stop then, while
        # workers can still be stopped.
        return self.closed.is_set() or not threading.main_thread().is_alive()


class _LoadedItems(torch.utils.data.Dataset):
    """Packed items by key, or the UserErrors of loading them."""

    def __init__(self, dataset: Dataset, pack: Callable[[Any], Any]) -> None:
        self._dataset, self._pack = dataset, pack

    def __getitem__(self, key: Any) -> Any:
        try:
            return self._pack(self._dataset[key])
        except UserError as error:
            return error  # torch would hide its message in a traceback


def _begin_worker(trainer: int, worker: int) -> None:
    def end_with_trainer() -> None:
        # Torch's own watch misses a trainer killed before the watch starts.
        while os.getppid() == trainer:
            time.sleep(_WORKER_POLL_S)
        os._exit(1)

    os.nice(_NICE)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with_trainer, daemon=True).start()


def _wait_for_exit_code(worker: BaseProcess) -> int | None:
    """Return a worker's exit code, or None if it is not known in time."""
    deadline = time.monotonic() + _WORKER_POLL_S
    # Loader threads wait for it too, and the system reports it to one thread only.
    while worker.exitcode is None and time.monotonic() < deadline:
        time.sleep(_EXIT_POLL_S)
    return worker.exitcode


def _worker_error(worker: BaseProcess) -> UserError:
    code = worker.exitcode or 0
    cause = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    return UserError(
        f"loader process {worker.pid} was ended from outside ({cause}), as the system does if "
        "memory (SIGKILL) or shared memory (SIGBUS) is short; resume from the last checkpoint with "
        "fewer --num-workers, or with more memory"
    )


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """An item of a loader process, with all its tensors in one buffer.

    Torch would open an authenticated connection for each tensor: half a millisecond each.
    """

    pickled: bytes  # the pickled item without tensor contents
    sizes: tuple[int, ...]  # bytes of each tensor
    content: bytearray | torch.Tensor  # padded bytes of all tensors; a tensor if in shared memory


def pack_parcel(item: Any) -> Parcel:
    """Return an item of the loader process as a parcel."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(item)
    parts = [buffer.raw() for buffer in buffers]
    sizes = tuple(part.nbytes for part in parts)
    starts = _starts(sizes)
    content: bytearray | torch.Tensor = bytearray(starts[-1])
    if starts[-1] > _MAX_PIPED_BYTES:
        content = torch.empty(starts[-1], dtype=torch.uint8)
    view = _bytes_of(content)
    for part, start, size in zip(parts, starts, sizes, strict=False):
        view[start : start + size] = part
    return Parcel(stream.getvalue(), sizes, content)


def unpack_parcel(parcel: Parcel) -> Any:
    """Return the item of a parcel. Its tensors are views of the parcel's memory."""
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
    """Return the offset of each tensor in a parcel, and the parcel's bytes."""
    padded = (-(-size // _TENSOR_ALIGNMENT) * _TENSOR_ALIGNMENT for size in sizes)
    return list(accumulate(padded, initial=0))


def _bytes_of(content: bytearray | torch.Tensor) -> memoryview:
    return memoryview(content if isinstance(content, bytearray) else content.numpy())
