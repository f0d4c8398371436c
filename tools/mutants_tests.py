"""Pytest plugin of tools/mutants.py: which test runs which lines, and tests of mutants.

Mutants of functions are tried in forks of one process that has imported everything: the function's
code is replaced there, which takes a hundredth of what starting pytest anew takes.
"""

import inspect
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import coverage
import pytest

_SETUP, _CALL = 0, 1


class _Recorder:
    """Lines that each test runs, and CPU seconds that its set-up and the test itself take."""

    def __init__(self, output: Path, folder: Path, include: list[str]) -> None:
        self._output, self._folder = output, folder
        self._coverage = coverage.Coverage(data_file=None, config_file=False, include=include)
        self._seconds: dict[str, list[float]] = {}
        self._failed: set[str] = set()

    def pytest_sessionstart(self) -> None:
        self._coverage.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        # What a fixture runs counts for every test of the file, any of which may share it.
        self._coverage.switch_context(item.nodeid.partition("::")[0])
        yield from self._timed(item, _SETUP)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        yield from self._timed(item, _CALL)

    def _timed(self, item: pytest.Item, part: int) -> Iterator[None]:
        before = sum(os.times()[:4])
        try:
            return (yield)
        finally:
            seconds = self._seconds.setdefault(item.nodeid, [0.0, 0.0])
            seconds[part] = sum(os.times()[:4]) - before

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        data = self._coverage.get_data()
        lines = {
            Path(path).relative_to(self._folder).as_posix(): data.contexts_by_lineno(path)
            for path in data.measured_files()
        }
        seconds = {test: it for test, it in self._seconds.items() if test not in self._failed}
        record = {"seconds": seconds, "failed": sorted(self._failed), "lines": lines}
        self._output.write_text(json.dumps(record))


class _Trials:
    """Runs the tests of mutants, each mutant in a fork, until one fails."""

    def __init__(self, mutants: Path, verdicts: Path) -> None:
        self._mutants = json.loads(mutants.read_text())
        self._verdicts = verdicts
        self._parent = os.getppid()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        for number, mutant in enumerate(self._mutants):
            if os.getppid() != self._parent:
                break  # nobody waits for the rest
            tests = [items[test] for test in mutant["tests"] if test in items]
            found = replacement(**mutant["place"])
            verdict = ("not tried", "its function is not found at run time")
            if found is not None:
                verdict = _tried(session, tests, *found, int(mutant["cpu_seconds"]) + 1)
            with self._verdicts.open("a") as file:
                file.write(json.dumps([number, *verdict]) + "\n")
        return True


def replacement(path: str, function: str, source: str) -> tuple[FunctionType, CodeType] | None:
    """The function of an imported module, and its code in another text of the module.

    None where it is not found there, or does not differ but in what surrounds it.
    """
    found: Any = sys.modules.get(path.removesuffix(".py").replace("/", "."))
    for name in function.split("."):
        found = vars(found).get(name) if hasattr(found, "__dict__") else None
    while not isinstance(found, FunctionType):
        # Properties, cached ones, class methods, and what functools and contextlib wrap.
        inner = (getattr(found, name, None) for name in ("fget", "func", "__func__", "__wrapped__"))
        found = next(filter(None, inner), None)
        if found is None:
            return None
    found = inspect.unwrap(found)
    if not isinstance(found, FunctionType):
        return None
    old = found.__code__
    codes = [compile(source, old.co_filename, "exec")]
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    for new in codes:
        if (new.co_qualname, new.co_firstlineno) == (old.co_qualname, old.co_firstlineno):
            return (found, new) if new != old and new.co_freevars == old.co_freevars else None
    return None


def _tried(
    session: pytest.Session,
    tests: list[pytest.Item],
    function: FunctionType,
    code: CodeType,
    cpu_seconds: int,
) -> tuple[str, str]:
    """What the tests say of a function with other code, and which one failed."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 5))
        function.__code__ = code
        by = ""
        try:
            by = _first_failure(session, tests)
        except BaseException as error:
            by = type(error).__name__
        os.write(write, by.encode())
        os._exit(0)
    os.close(write)
    ended = status = 0
    until = time.monotonic() + 10 * cpu_seconds
    while not ended:
        time.sleep(0.02)
        ended, status = os.waitpid(child, os.WNOHANG)
        if not ended and time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            ended, status = os.waitpid(child, 0)
    with os.fdopen(read, "rb") as file:
        by = file.read().decode()
    if status:
        return "timed out", f"{cpu_seconds} CPU seconds"
    return ("killed", by) if by else ("survived", f"{len(tests)} tests pass")


def _first_failure(session: pytest.Session, tests: list[pytest.Item]) -> str:
    for item, following in zip_longest(tests, tests[1:]):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return item.nodeid
    return ""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-lines", type=Path, help="JSON file to write")
    parser.addoption("--record-modules", nargs="*", default=[], help="patterns of paths")
    parser.addoption("--mutants", type=Path, help="JSON file of mutants and their tests")
    parser.addoption("--verdicts", type=Path, help="file to write a line a mutant to")


def pytest_configure(config: pytest.Config) -> None:
    if output := config.getoption("--record-lines"):
        modules = config.getoption("--record-modules")
        config.pluginmanager.register(_Recorder(output, config.rootpath, modules))
    if mutants := config.getoption("--mutants"):
        config.pluginmanager.register(_Trials(mutants, config.getoption("--verdicts")))
