"""Task pool on a Ray cluster (extra `ray`) that survives the loss of nodes and workers."""

import logging
import socket
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any

from omnibal.base.errors import UserError
from omnibal.base.version import VERSION
from omnibal.base.worker_pool import Failure, Pool, Result, Task, outcome

_PER_CORE = 2  # tasks: one runs while the next is sent
_RETRIES = 20  # if workers die. A task that always kills its worker must end
_POLL_S = 1.0  # between core counts, as nodes come and go
_CONNECT_S = 10.0  # for a port to answer; Ray tries for minutes
_HEAD_S = 20.0  # for a head to restart; Ray silently kills its processes after 60 s
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""gRPC's HTTP/2 preface with empty settings, for Ray's ports."""


@contextmanager
def ray_pool(address: str | None) -> Iterator[Pool]:
    """Join a Ray cluster, or start a local one without address, and leave it at the end."""
    if address is not None:
        _check_reachable(address)
    try:
        import ray
    except ImportError as error:
        raise UserError(
            f'--engine ray needs Ray, which is not there ({error}); pip install "omnibal[ray]", '
            "here and on all nodes"
        ) from error
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    # Ray exits the process if it gives up.
    except (Exception, SystemExit) as error:
        raise _unreachable(address, str(error) or type(error).__name__) from error
    try:
        # A client cannot see the head, but notices the end of its server.
        through_client = (address or "").startswith("ray://")
        yield _RayPool(ray, None if through_client else ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise if host and port do not answer as Ray."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdecimal():
        return  # a keyword such as auto
    try:
        with _connect(host, port) as answering:
            answering.sendall(_GREETING)
            answering.settimeout(_CONNECT_S)
            is_text = answering.recv(1) > b" "  # such as a dashboard, not HTTP/2 or TLS
    except (OSError, OverflowError, UnicodeError) as error:  # of a name that is too long
        raise _unreachable(address, str(error)) from error
    if is_text:
        raise _unreachable(address, "what answers there is a dashboard, or not Ray")


def _connect(host: str, port: str) -> socket.socket:
    return socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S)


def _wait_for_head(address: str) -> None:
    """Wait for the cluster's head to answer."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _HEAD_S
    while True:
        try:
            _connect(host, port).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"the head of the Ray cluster, {address}, is gone ({error}); start the cluster "
                    "again, then run the same command with its address to resume"
                ) from error
        time.sleep(_POLL_S)


def _unreachable(address: str | None, why: str) -> UserError:
    where = "a Ray cluster" if address is None else f"--address {address}: the Ray cluster"
    return UserError(
        f"{where} cannot be reached ({why}); start one with `ray start --head`, give the address "
        "that it prints, and have the token that it asks for in RAY_AUTH_TOKEN or ~/.ray/auth_token"
    )


@dataclass(frozen=True, slots=True)
class _RayPool:
    ray: Any  # ray module of a process that joined a cluster
    head: str | None  # host and port of the head, None without a connection

    def map_unordered(
        self, work: Callable[[Task], Result], tasks: Iterable[Task], count: int
    ) -> Generator[Result, None, None]:
        ray, left = self.ray, iter(tasks)
        # Stored once and read once per worker: may hold a whole tokenizer.
        handed = ray.put(work)
        run = ray.remote(max_retries=_RETRIES, num_cpus=1)(_work_on)
        room, under_way = _Room(ray, self.head), set[Any]()
        try:
            while True:
                for task in islice(left, max(0, room.tasks() - len(under_way))):
                    under_way.add(run.remote([handed], VERSION, task))
                if not under_way:
                    return
                done, _ = ray.wait(list(under_way), timeout=_POLL_S)
                under_way.difference_update(done)
                for task_id in done:
                    yield self._receive_result(task_id)
        finally:
            for task_id in under_way:
                ray.cancel(task_id, force=False)

    def _receive_result(self, done: Any) -> Any:
        try:
            found = self.ray.get(done)
        except self.ray.exceptions.RayError as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UserError(
                f"Ray could not work on a task, having tried {_RETRIES + 1} times ({reason}); see "
                "that all nodes have this version of omnibal and memory enough, then run the same "
                "command again to resume"
            ) from error
        if isinstance(found, Failure):
            raise found.error
        return found


@dataclass(slots=True)
class _Room:
    """Max concurrent tasks of a cluster."""

    ray: Any
    head: str | None
    counted: float = -_POLL_S  # time of the last core count, in seconds
    cores: int = field(default=1)

    def tasks(self) -> int:
        if time.monotonic() - self.counted >= _POLL_S:
            if self.head is not None:
                _wait_for_head(self.head)
            self.counted = time.monotonic()
            self.cores = max(1, int(self.ray.cluster_resources().get("CPU", 0)))
        return _PER_CORE * self.cores


def _work_on(handed: list[Any], version: str, task: Any) -> Any:
    """Run a task on a worker; `handed` wraps a reference so that Ray loads it only once."""
    if version == VERSION:
        return outcome(_work_of(handed[0]), task)
    other = UserError(
        f"node {socket.gethostname()} has omnibal {VERSION}, and the scan was started with "
        f"{version}; install one version on all nodes"
    )
    return Failure(other)


@lru_cache(maxsize=1)
def _work_of(handed: Any) -> Callable[[Any], Any]:
    import ray

    return ray.get(handed)
