"""Pytest plugin of tools/mutants.py: which test runs which lines; some tests only."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

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


class _Chosen:
    """Runs only the tests of a list, in its order."""

    def __init__(self, tests: list[str]) -> None:
        self._places = {test: place for place, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._places),
            key=lambda item: self._places[item.nodeid],
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-lines", type=Path, help="JSON file to write")
    parser.addoption("--record-modules", nargs="*", default=[], help="patterns of paths")
    parser.addoption("--chosen-tests", type=Path, help="JSON file with a list of tests")


def pytest_configure(config: pytest.Config) -> None:
    if output := config.getoption("--record-lines"):
        modules = config.getoption("--record-modules")
        config.pluginmanager.register(_Recorder(output, config.rootpath, modules))
    if chosen := config.getoption("--chosen-tests"):
        config.pluginmanager.register(_Chosen(json.loads(chosen.read_text())))
