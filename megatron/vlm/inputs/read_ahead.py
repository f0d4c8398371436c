"""Ordered read-ahead of a dataset with worker processes that never outlive the rank.

Torch's DataLoader runs in its own thread: it installs no SIGCHLD handler there, which would raise
in the main thread if a worker dies; workers inherit blocked signals, so none arrives between fork
and start. And the next item is always fetched and prepared ahead.
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
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from omnibal.base.errors import UserError

_PREFETCH = 4
"""Items prefetched per worker."""
_POLL_S = 0.5  # between checks for dead workers
_RETRY_S = 0.005  # between tries of a full queue
_MAX_PIPED = 1 << 20
"""Maximum bytes of an item in the pipe; larger items use shared memory."""
_ALIGNMENT = 64
_NICE = 10
"""Niceness of workers: they use idle cores, as of a stage that waits, and yield at once."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals to the process group that only the trainer obeys; it ends the workers."""


def read_ahead(
    dataset: torch.utils.data.Dataset, num_workers: int, prepare: Callable[[Any], Any]
) -> Generator[Any, None, None]:
    """Yield every item in order; close the iterator to end the workers.

    Args:
        num_workers: loader processes. 0 uses a thread.
        prepare: function applied to each item in the reading thread.
    """
    reading = _Reading(dataset, num_workers, prepare)
    reading.start()
    try:
        while True:
            event = reading.next_event()
            if not isinstance(event, _End):
                yield event
            elif event.error is not None:
                raise event.error
            else:
                return
    finally:
        reading.closed.set()


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


class _Reading:
    def __init__(
        self, dataset: torch.utils.data.Dataset, num_workers: int, prepare: Callable[[Any], Any]
    ) -> None:
        self.closed = threading.Event()
        self._loader = torch.utils.data.DataLoader(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            prefetch_factor=_PREFETCH if num_workers else None,
            collate_fn=parcel if num_workers else _unchanged,
            worker_init_fn=functools.partial(_begin_worker, os.getpid()),
        )
        self._prepare = prepare
        self._unpack = unpacked if num_workers else _unchanged
        self._workers: list[BaseProcess] = []
        self._started = threading.Event()
        self._ready: queue.Queue[Any] = queue.Queue(maxsize=1)

    def start(self) -> None:
        """Start the thread; return once all workers are forked from an idle process."""
        threading.Thread(target=self._read).start()
        self._started.wait()

    def next_event(self) -> Any:
        while True:
            try:
                return self._ready.get(timeout=_POLL_S)
            except queue.Empty:
                lost = self._lost_worker(patience_s=0)
                if lost is not None:
                    raise _ended_from_outside(lost) from None

    def _read(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self._read_all()
            self._put(_End(None))
        except BaseException as error:
            self._started.set()
            frames = error.__traceback__
            # A lost worker first shows as a partly sent item.
            lost = self._lost_worker(patience_s=_POLL_S)
            self._put(_End(error if lost is None else _ended_from_outside(lost)))
            # The frames hold the loader, which ends its workers when freed.
            traceback.clear_frames(frames)
        for worker in self._workers:
            worker.kill()  # if it did not end: a program waits for its children at exit

    def _read_all(self) -> None:
        others = set(multiprocessing.active_children())
        items = iter(self._loader)
        self._workers += set(multiprocessing.active_children()) - others
        self._started.set()
        for item in items:
            self._put(self._prepare(self._unpack(item)))
            if self._abandoned():
                return

    def _lost_worker(self, patience_s: float) -> BaseProcess | None:
        """Return a worker killed from outside, now or within `patience_s`, or None."""
        sentinels = wait([worker.sentinel for worker in self._workers], patience_s)
        for worker in self._workers:
            if worker.sentinel in sentinels and _exit_code(worker):
                return worker
        return None

    def _put(self, event: Any) -> None:
        while not self._abandoned():
            try:
                self._ready.put(event, timeout=_POLL_S)
                return
            except queue.Full:
                pass

    def _abandoned(self) -> bool:
        # The interpreter waits for this thread after an exception: end while workers can be
        # stopped.
        return self.closed.is_set() or not threading.main_thread().is_alive()


def _unchanged(item: Any) -> Any:
    return item


def _begin_worker(trainer: int, worker: int) -> None:
    os.nice(_NICE)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(trainer,), daemon=True).start()


def _end_with(trainer: int) -> None:
    """End this worker with the trainer; torch's watch misses a trainer killed before its start."""
    while os.getppid() == trainer:
        time.sleep(_POLL_S)
    os._exit(1)


def _exit_code(worker: BaseProcess) -> int | None:
    """Return a worker's exit code, or None if not reported in time.

    Loader threads wait for it too. The system reports it to one thread only.
    """
    deadline = time.monotonic() + _POLL_S
    while worker.exitcode is None and time.monotonic() < deadline:
        time.sleep(_RETRY_S)
    return worker.exitcode


def _ended_from_outside(worker: BaseProcess) -> UserError:
    code = worker.exitcode or 0
    cause = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    return UserError(
        f"loader process {worker.pid} was ended from outside ({cause}), as the system does where "
        "memory (SIGKILL) or shared memory (SIGBUS) is short; resume from the last checkpoint with "
        "fewer --num-workers, or with more memory"
    )


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """An item of a loader process with all tensors in one buffer.

    Torch opens an authenticated connection for each tensor: half a millisecond each.
    """

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
    if starts[-1] > _MAX_PIPED:
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
    return list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))


def _bytes_of(content: bytearray | torch.Tensor) -> memoryview:
    return memoryview(content if isinstance(content, bytearray) else content.numpy())
