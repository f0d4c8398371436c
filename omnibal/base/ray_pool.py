"""Task pool on a Ray cluster (extra `ray`), which survives the loss of nodes and workers."""

import logging
import socket
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from omnibal.base.errors import UserError
from omnibal.base.version import VERSION
from omnibal.base.worker_pool import Failure, Pool, Result, Task, outcome

_TASKS_PER_CORE = 2  # one runs while the next is sent
_RETRIES = 20  # of a task whose worker died, which it may have killed
_RESOURCE_POLL_S = 1.0  # nodes come and go
_CONNECT_S = 10.0  # for a port to answer; Ray tries for minutes
_HEAD_S = 20.0  # for a head to restart; Ray silently kills its processes after 60 s
_AGAIN = "run the same command again to resume"
# gRPC's HTTP/2 preface with empty settings, to which Ray's ports answer.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


@contextmanager
def ray_pool(address: str | None) -> Iterator[Pool]:
    """Join a Ray cluster (without address: found or started by Ray), and leave it at the end."""
    if address is not None:
        _check_reachable(address)
    try:
        import ray
    except ImportError as error:
        remedy = 'pip install "omnibal[ray]", here and on all nodes'
        raise UserError(f"--engine ray needs Ray ({error}); {remedy}") from error
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    # Ray exits the process when it gives up.
    except (Exception, SystemExit) as error:
        raise _unreachable_error(address, str(error) or type(error).__name__) from error
    try:
        # A client cannot see the head, but notices the end of its server.
        through_client = (address or "").startswith("ray://")
        yield _RayPool(ray, None if through_client else ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise UserError unless host and port answer as Ray."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdecimal():
        return  # a keyword such as auto
    try:
        with _open_socket(host, port) as connection:
            connection.sendall(_GREETING)
            connection.settimeout(_CONNECT_S)
            is_text = connection.recv(1) > b" "  # HTTP/1 of a dashboard, not HTTP/2 or TLS
    except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: too long a name
        raise _unreachable_error(address, str(error)) from error
    if is_text:
        raise _unreachable_error(address, "the port is a dashboard's, or not Ray's")


def _open_socket(host: str, port: str) -> socket.socket:
    return socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S)


def _wait_for_head(address: str) -> None:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _HEAD_S
    while True:
        try:
            _open_socket(host, port).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                gone = f"the Ray cluster's head, {address}, is gone ({error})"
                raise UserError(f"{gone}; start the cluster again, then {_AGAIN}") from error
        time.sleep(_RESOURCE_POLL_S)


def _unreachable_error(address: str | None, reason: str) -> UserError:
    where = "a Ray cluster" if address is None else f"--address {address}: the Ray cluster"
    return UserError(
        f"{where} cannot be reached ({reason}); start it with `ray start --head`, and give its "
        "address, and its token, if any, in RAY_AUTH_TOKEN"
    )


@dataclass(frozen=True, slots=True)
class _RayPool:
    ray: Any  # the module
    head: str | None  # host and port, None through a client

    def map_unordered(
        self, work: Callable[[Task], Result], tasks: Iterable[Task], count: int
    ) -> Generator[Result, None, None]:
        ray, remaining = self.ray, iter(tasks)
        # Stored once and loaded once per worker: `work` may hold a whole tokenizer.
        stored_work = ray.put(work)
        run = ray.remote(max_retries=_RETRIES, num_cpus=1)(_run_task)
        running = set[Any]()
        try:
            while True:
                most = _max_tasks(self, int(time.monotonic() // _RESOURCE_POLL_S))
                for task in islice(remaining, max(0, most - len(running))):
                    running.add(run.remote([stored_work], VERSION, task))
                if not running:
                    return
                done, _ = ray.wait(list(running), timeout=_RESOURCE_POLL_S)
                running.difference_update(done)
                for task_id in done:
                    yield self._receive_result(task_id)
        finally:
            for task_id in running:
                ray.cancel(task_id, force=False)

    def _receive_result(self, task_id: Any) -> Any:
        try:
            result = self.ray.get(task_id)
        except self.ray.exceptions.RayError as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            message = (
                f"a Ray task failed {_RETRIES + 1} times ({reason}); check the nodes; {_AGAIN}"
            )
            raise UserError(message) from error
        if isinstance(result, Failure):
            raise result.error
        return result


@lru_cache(maxsize=1)
def _max_tasks(pool: _RayPool, poll: int) -> int:  # `poll` only keys the cache
    if pool.head is not None:
        _wait_for_head(pool.head)
    return _TASKS_PER_CORE * max(1, int(pool.ray.cluster_resources().get("CPU", 0)))


def _run_task(stored_work: list[Any], version: str, task: Any) -> Any:
    # Ray would load a bare reference for every task, but not one in a list.
    if version == VERSION:
        return outcome(_load_work(stored_work[0]), task)
    node = f"node {socket.gethostname()} has omnibal {VERSION}"
    return Failure(UserError(f"{node}, and this one {version}; install one version on all nodes"))


@lru_cache(maxsize=1)
def _load_work(reference: Any) -> Callable[[Any], Any]:
    import ray

    return ray.get(reference)
