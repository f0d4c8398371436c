"""Run user commands in processes forked from a server that has imported torch and Megatron-core.

A fresh Python imports them for ten seconds. The script's own file runs as `__main__`, with its own
arguments, environment, output and exit status. Only a missing import goes unnoticed: for each
script, some test also starts a fresh Python.
"""

import atexit
import fcntl
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, cached_property
from itertools import cycle, islice
from pathlib import Path
from typing import IO, Any, NoReturn

REPOSITORY = Path(__file__).parent.parent
_IMPORTED = (
    "megatron.vlm.run.pretrain",
    "megatron.vlm.measure.replay_job",
    "megatron.vlm.run.generate",
    "megatron.vlm.conversion.exporting",
    "megatron.vlm.conversion.importing",
    "omnibal.cli",
)
_ENDS = (".out", ".err")
TIMEOUT_S = 600

Completed = subprocess.CompletedProcess[str]


class Started:
    """Processes of one command. Their ids stay reserved until `ended` is read."""

    def __init__(self, pids: list[int], finish: Callable[[], list[Completed]]) -> None:
        self.pids = pids
        self._finish = finish

    @cached_property
    def ended(self) -> list[Completed]:
        """Output and exit status by process; waits until all have exited."""
        return self._finish()

    def kill(self) -> None:
        """Kill the processes unless they were waited for."""
        if "ended" not in vars(self):
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)


class Launcher:
    """The server process that forks commands; it exits with this process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *command: object, **environment: str) -> Completed:
        """Run `python COMMAND` in the repository with this environment added."""
        with self.start(command, [environment]) as started:
            [completed] = started.ended
        return completed

    @contextmanager
    def start(
        self, command: tuple[object, ...], environments: list[Mapping[str, str]]
    ) -> Iterator[Started]:
        """Run one process per environment, as ranks of a job, during the body of the `with`.

        Leaving the body waits for them, an exception kills them. No other command runs meanwhile.
        """
        words = [str(word) for word in command]
        with tempfile.TemporaryDirectory() as folder:
            outputs = [str(Path(folder) / str(number)) for number in range(len(environments))]
            starts = [
                {"words": words, "environment": dict(environment), "output": output}
                for environment, output in zip(environments, outputs, strict=True)
            ]

            def finish() -> list[Completed]:
                return [
                    Completed(
                        words,
                        code,
                        Path(f"{output}.out").read_text(),
                        Path(f"{output}.err").read_text(),
                    )
                    for code, output in zip(self._read_integers(), outputs, strict=True)
                ]

            assert self._process.stdin is not None
            print(json.dumps(starts), file=self._process.stdin, flush=True)
            started = Started(self._read_integers(), finish)
            try:
                yield started
            except BaseException:
                started.kill()
                raise
            finally:
                assert started.ended

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read_integers(self) -> list[int]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@cache
def _reserve_ports() -> tuple[Iterator[int], IO[str]]:
    """Return a cycle of 100 ports reserved for this process, and the locked file for them."""
    for first in range(20_000, 30_000, 100):
        held = (Path(tempfile.gettempdir()) / f"omnibal-tests-ports-{first}").open("w")
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return cycle(range(first, first + 100)), held
        except OSError:
            held.close()
    raise AssertionError("all ports of tests are held")


def reserve_port() -> int:
    """Return a different free port on each call, below the system's ephemeral ports.

    Children of a killed rank may still listen on the last port.
    """
    for port in islice(_reserve_ports()[0], 100):
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("", port))
            except OSError:
                continue
        return port
    raise AssertionError("another program listens on all ports of tests")


@cache
def launcher() -> Launcher:
    """Return the launcher of this test process."""
    return Launcher()


def _serve() -> None:
    """Fork the commands of each input line; print their ids, then their exit statuses."""
    sys.path.insert(0, str(REPOSITORY))
    for module in _IMPORTED:
        __import__(module)
    # At exit, a garbage collection would copy all of this memory in every child.
    gc.collect()
    gc.freeze()
    while line := sys.stdin.readline():
        children = []
        for start in json.loads(line):
            child = os.fork()
            if child == 0:
                _run_child(**start)
            children.append(child)
        print(json.dumps(children), flush=True)
        for child in children:
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        print(json.dumps([os.waitstatus_to_exitcode(status) for status in statuses]), flush=True)


def _run_child(words: list[str], environment: dict[str, Any], output: str) -> NoReturn:
    """Run the command and exit without the interpreter's teardown, which takes most of a second."""
    os.environ.update(environment)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for descriptor, end in enumerate(_ENDS, start=1):
        file = os.open(output + end, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
    signal.alarm(TIMEOUT_S)  # SIGALRM kills the process after the limit
    status = _run_command(words)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run_command(words: list[str]) -> int:
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path[0] = str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _serve()
