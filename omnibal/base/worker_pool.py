"""Pool of workers that exit with their parent and are noticed if killed, unlike the stdlib's."""

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

# Forks of a thread-free server without the workers' pipes: forking this process would copy held
# locks, and a fresh interpreter would start a BLAS thread per core.
_CONTEXT = multiprocessing.get_context("forkserver")


def usable_cores() -> int:
    """Cores available to this process."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Pool(Protocol):
    """Runs tasks on local processes or a cluster."""

    def map_unordered(
        self, work: Callable[[Task], Result], tasks: Iterable[Task], count: int
    ) -> Generator[Result, None, None]:
        """Yield results of at most `count` tasks as they finish; raises any error of `work`.

        All are picklable. Tasks are consumed lazily.
        """


@dataclass(frozen=True, slots=True)
class LocalPool:
    """Local processes; with 1, the calling process."""

    processes: int = 1

    def map_unordered(
        self, work: Callable[[Task], Result], tasks: Iterable[Task], count: int
    ) -> Generator[Result, None, None]:
        return map_unordered(work, tasks, max(1, min(self.processes, count)))


def map_unordered(
    work: Callable[[Task], Result], tasks: Iterable[Task], processes: int
) -> Generator[Result, None, None]:
    """Yield results as tasks finish. Close the iterator to end the processes.

    Tasks are consumed lazily. Runs in-process if `processes` is 1 or children are forbidden.
    """
    if processes == 1 or multiprocessing.current_process().daemon:
        yield from map(work, tasks)
        return
    workers: list[_Worker] = []
    try:
        function = work.func if isinstance(work, partial) else work
        _CONTEXT.set_forkserver_preload([function.__module__])
        with _interrupt_held():
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
    """Error raised by the work."""

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
        if code > 0:
            return UserError(
                f"worker process {self.process.pid} could not start ({cause}, with the reason "
                'above); a script that plans must do so under `if __name__ == "__main__":`, as '
                "its processes read it again"
            )
        return UserError(
            f"worker process {self.process.pid} was ended from outside ({cause}), as the system "
            "does where memory is short; run the command again, with fewer --processes if need be"
        )


def _results(
    work: Callable[[Task], Result], tasks: Iterator[Task], workers: list[_Worker]
) -> Iterator[Result]:
    busy = {}
    for worker in workers:
        # Sent later: as a process argument it would delay the next start.
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
            for task in tasks:
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
    """Result of a task, or its error."""
    try:
        return work(task)
    except Exception as error:
        error.add_note(f"In a worker process:\n{traceback.format_exc()}")
        return Failure(error)


@contextmanager
def _interrupt_held() -> Iterator[None]:
    """Keep SIGINT from children. The parent handles it once they are started."""
    resource_tracker.ensure_running()  # its start would unblock Ctrl-C
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
