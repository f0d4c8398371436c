"""Ordered read-ahead of a dataset by worker processes that never outlive the rank.

A thread requests items from the workers in turn, and always prepares the next item. Workers are
forked with signals blocked, so that none arrives between fork and start. If the trainer is killed,
the worker forked last, of which no other process holds the trainer's end of the connection, ends
first, and then the others.
"""

import io
import multiprocessing
import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from omnibal.base.errors import UserError
from omnibal.base.worker_pool import Failure, outcome

_PREFETCH = 4  # items per worker
_POLL_S = 0.5  # between checks for an iterator that is no longer read
_TENSOR_ALIGNMENT = 64  # bytes; as torch's CPU allocator
_NICE = 10  # niceness of workers, to compute only on cores that the ranks leave idle
# Signals that schedulers send to all processes. Only the trainer obeys, and ends its workers.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

Items = Generator[Any, None, None]


def read_ahead(dataset: Any, num_workers: int, prepare: Callable[[Any], Any]) -> Items:
    """Yield every prepared item in order, or raise; close the iterator to end the workers.

    Args:
        dataset: items by number, with a length.
        num_workers: number of loader processes; 0 reads in a thread.
        prepare: function applied to each item in the reading thread.
    """
    ready, closed = queue.Queue[Any](maxsize=1), threading.Event()
    allowed = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        workers = [_Worker.start(dataset) for _ in range(num_workers)]
        items = _receive_items(workers, len(dataset)) if workers else _read_items(dataset)
        threading.Thread(target=_hand_over, args=(items, prepare, ready, closed)).start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, allowed)
    try:
        while not isinstance(event := ready.get(), _End):
            yield event
        if event.error is not None:
            raise event.error
    finally:
        closed.set()


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


def _hand_over(
    items: Items, prepare: Callable[[Any], Any], ready: queue.Queue[Any], closed: threading.Event
) -> None:
    """Put prepared items in a queue of one, then an `_End`, until `closed` is set."""

    def put(event: Any) -> bool:
        # After an exception the interpreter waits for this thread before it ends: stop then, while
        # workers can still be stopped.
        while not closed.is_set() and threading.main_thread().is_alive():
            with suppress(queue.Full):
                ready.put(event, timeout=_POLL_S)
                return True
        return False

    end = _End(None)
    try:
        with closing(items):
            for item in items:
                if not put(prepare(item)):
                    return
    except BaseException as error:
        end = _End(error)
    put(end)


def _read_items(dataset: Any) -> Items:
    for number in range(len(dataset)):
        yield dataset[number]


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    """A process that sends the items whose numbers it receives."""

    process: BaseProcess
    connection: Connection

    @classmethod
    def start(cls, dataset: Any) -> "_Worker":
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=_send_items, args=(dataset, theirs, ours))
        process.start()
        theirs.close()
        return cls(process, ours)


def _send_items(dataset: Any, connection: Connection, trainers_end: Connection) -> None:
    trainers_end.close()
    os.nice(_NICE)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    with suppress(EOFError, ConnectionError):  # the trainer has ended
        while True:
            connection.send(outcome(lambda item: pack_parcel(dataset[item]), connection.recv()))


def _receive_items(workers: Sequence[_Worker], count: int) -> Items:
    """Yield items 0 to `count` - 1; the end of the iterator ends the workers."""
    ahead = _PREFETCH * len(workers)
    try:
        for number in range(-ahead, count):
            worker = workers[number % len(workers)]
            answer: Any = None
            try:
                if number >= 0:
                    answer = worker.connection.recv()
                if number + ahead < count:
                    worker.connection.send(number + ahead)
            except (EOFError, ConnectionError):
                raise _exit_error(worker.process) from None
            if isinstance(answer, Failure):
                raise answer.error
            if number >= 0:
                yield unpack_parcel(answer)
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()
            worker.connection.close()


def _exit_error(worker: BaseProcess) -> UserError:
    worker.join()
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
    content: torch.Tensor  # padded bytes of all tensors, in memory shared with the trainer


def pack_parcel(item: Any) -> Parcel:
    """Return an item of the loader process as a parcel."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(item)
    parts = [buffer.raw() for buffer in buffers]
    sizes = tuple(part.nbytes for part in parts)
    *starts, end = _list_starts(sizes)
    content = torch.empty(end, dtype=torch.uint8)
    view = memoryview(content.numpy())
    for part, start, size in zip(parts, starts, sizes, strict=True):
        view[start : start + size] = part
    return Parcel(stream.getvalue(), sizes, content)


def unpack_parcel(parcel: Parcel) -> Any:
    """Return the item of a parcel. Its tensors are views of the parcel's memory."""
    view = memoryview(parcel.content.numpy())
    pairs = zip(_list_starts(parcel.sizes), parcel.sizes, strict=False)
    return pickle.loads(
        parcel.pickled, buffers=[view[start : start + size] for start, size in pairs]
    )


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def _list_starts(sizes: Sequence[int]) -> list[int]:
    """Return the offset of each tensor in a parcel, and the parcel's bytes."""
    padded = (-(-size // _TENSOR_ALIGNMENT) * _TENSOR_ALIGNMENT for size in sizes)
    return list(accumulate(padded, initial=0))
