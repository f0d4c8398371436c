"""Pool of worker processes. Unlike the stdlib's, workers exit with their parent, and the death of a
worker (such as by the OOM killer) is an error instead of a wait without end.
"""

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, Protocol, TypeVar

from omnibal.base.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")

# Fork of this process would copy held locks and the pipes of other workers; spawn would start a
# BLAS thread per core in every worker.
_CONTEXT = multiprocessing.get_context("forkserver")


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Pool(Protocol):
    """Tasks on local processes or on a cluster."""

    def map_unordered(
        self, work: Callable[[Task], Result], tasks: Iterable[Task], count: int
    ) -> Generator[Result, None, None]:
        """Yield results of at most `count` tasks as they finish, and raise any error of `work`.

        Work, tasks and results must be picklable. Tasks are consumed lazily.
        """


@dataclass(frozen=True, slots=True)
class LocalPool:
    """Local processes; 1 is the calling process."""

    processes: int = 1

    def map_unordered(
        self, work: Callable[[Task], Result], tasks: Iterable[Task], count: int
    ) -> Generator[Result, None, None]:
        return map_unordered(work, tasks, max(1, min(self.processes, count)))


def map_unordered(
    work: Callable[[Task], Result], tasks: Iterable[Task], processes: int
) -> Generator[Result, None, None]:
    """Yield results as tasks finish, in any order; closing the generator ends the processes."""
    if processes == 1 or multiprocessing.current_process().daemon:  # daemons have no children
        yield from map(work, tasks)
        return
    workers: list[_Worker] = []
    try:
        function = work.func if isinstance(work, partial) else work
        _CONTEXT.set_forkserver_preload([function.__module__])  # imported once for all workers
        with _block_interrupt():
            for _ in range(processes):
                workers.append(_Worker.start())
        yield from _results(work, iter(tasks), workers)
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join()
            worker.connection.close()


@dataclass(frozen=True, slots=True, eq=False)
class Failure:
    """Error raised by `work`, as a picklable result."""

    error: Exception


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    process: ForkServerProcess
    connection: Connection

    @classmethod
    def start(cls) -> "_Worker":
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours)

    def send(self, message: object) -> None:
        try:
            self.connection.send(message)
        except ConnectionError as error:
            raise self._exit_error() from error

    def receive(self) -> Any:
        try:
            message = self.connection.recv()
        except (EOFError, ConnectionError) as error:
            raise self._exit_error() from error
        if isinstance(message, Failure):
            raise message.error
        return message

    def _exit_error(self) -> UserError:
        self.process.join()
        code = self.process.exitcode or 0
        cause = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        remedy = "if memory was short, run again with fewer --processes"
        if code > 0:  # every worker imports the script
            remedy = 'a script must plan under `if __name__ == "__main__":`'
        return UserError(f"worker process {self.process.pid} ended ({cause}); {remedy}")


def _results(
    work: Callable[[Task], Result], tasks: Iterator[Task], workers: list[_Worker]
) -> Iterator[Result]:
    busy = {}  # workers by connection
    for worker in workers:
        # As an argument of the process, `work` would delay the next start.
        worker.send(work)
        for task in tasks:
            worker.send(task)
            busy[worker.connection] = worker
            break
    while busy:
        for connection in wait(list(busy)):
            assert isinstance(connection, Connection)
            worker = busy.pop(connection)
            result = worker.receive()
            for task in tasks:  # the next one, before the caller works on the result
                worker.send(task)
                busy[connection] = worker
                break
            yield result


def _serve(connection: Connection) -> None:
    """Serve tasks until the connection closes."""
    try:
        work = connection.recv()
        while True:
            connection.send(outcome(work, connection.recv()))
    except (EOFError, ConnectionError):
        return


def outcome(work: Callable[[Task], Result], task: Task) -> Result | Failure:
    """Return a task's result, or its error with the worker's traceback as a note."""
    try:
        return work(task)
    except Exception as error:
        error.add_note(f"In a worker process:\n{traceback.format_exc()}")
        return Failure(error)


@contextmanager
def _block_interrupt() -> Iterator[None]:
    """Block SIGINT while children start: they inherit the mask, and the parent ends them."""
    resource_tracker.ensure_running()  # its own start would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
