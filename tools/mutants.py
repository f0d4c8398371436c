"""Change operators and numbers of modules at random, and see whether their tests notice.

    make mutants
    python tools/mutants.py omnibal/cost 'omnibal/pipeline/stage_*.py' --count 60 --seed 1

Each mutant is one change of one expression of a function (tools/mutations.py). Its tests are those
that run the function, first those of files that run few modules, up to the first that fails. Which
those are is recorded once a file of tests, which takes longer than the tests. What is killed is
kept too: a run that was stopped goes on where it was, and after more tests were written only
survivors are tried again.

Equivalent mutants, which change no result, stand in tools/mutants_equivalent.toml with a reason, by
the text of their line and of the change; none of them is drawn.
"""

import hashlib
import io
import json
import multiprocessing
import os
import random
import resource
import sys
import time
import tomllib
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib.machinery import SourceFileLoader
from itertools import accumulate
from pathlib import Path
from types import CodeType
from unittest.mock import patch

import coverage
import pytest

from omnibal.base.errors import UserError
from omnibal.base.program import ArgumentParser, check_arguments, one_line_errors

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.mutations import Mutant, functions_by_line, mutants_by_place

_EQUIVALENT = Path(__file__).with_name("mutants_equivalent.toml")
_ROOMS = ("cost", "dispatch", "packing", "pipeline", "search", "steps")
_PYTEST = ("-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-o", "pythonpath=.")
_MOST_SECONDS = 15
"""CPU seconds that a test of a mutant may take, beside thrice those that it takes unchanged."""


def modules_of(patterns: Iterable[str]) -> list[str]:
    """Paths of the modules that the patterns name: files, folders or globs.

    Raises:
        UserError: a pattern names no module.
    """
    found: set[str] = set()
    for pattern in patterns:
        paths = [path for place in Path().glob(pattern) for path in (place, *place.rglob("*.py"))]
        names = {path.as_posix() for path in paths if path.suffix == ".py"}
        if not names:
            raise UserError(f"{pattern}: names no module; give files, folders or globs of them")
        found |= names
    return sorted(found)


def drawn_mutants(modules: Iterable[str], count: int, seed: int) -> list[Mutant]:
    """Mutants of so many expressions, each of which is as likely as any other."""
    equivalent = {
        (entry["line"], entry["change"])
        for entry in tomllib.loads(_EQUIVALENT.read_text()).get("equivalent", ())
    }
    places = []
    for name in modules:
        lines = (source := Path(name).read_text()).splitlines()
        for place in mutants_by_place(name, source):
            text = lines[place[0].line - 1].strip()
            places += [[mutant for mutant in place if (text, mutant.change) not in equivalent]]
    places = list(filter(None, places))
    rng = random.Random(seed)
    return [rng.choice(place) for place in rng.sample(places, min(count, len(places)))]


def recorded(folder: Path, tests: Sequence[str], modules: Sequence[str]) -> list[dict]:
    """The record of each file of tests, made where there is none or it is of other files.

    A record has CPU seconds by test, and by module and function the tests that run it: the name of
    the file where its fixtures do.
    """
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for place, name in enumerate(tests, start=1):
        kept = folder / f"{name.replace('/', '.')}.json"
        record = json.loads(kept.read_text()) if kept.exists() else {}
        sha256 = _sha256(Path(name).read_text(), *modules)
        if record.get("sha256") != sha256:
            print(f"[{place}/{len(tests)}] recording what {name} runs", flush=True)
            recorder = _Recorder(modules, {"file": name, "sha256": sha256}, kept)
            _in_fork(partial(pytest.main, [*_PYTEST, name], [recorder]))
            record = json.loads(kept.read_text()) if kept.exists() else {}
        if record.get("sha256") != sha256:
            raise UserError(f"{name}: pytest does not come to its end; see what it says alone")
        if record["failed"]:
            print(f"{name}: {len(record['failed'])} tests that fail unchanged are left out")
        records.append(record)
    return sorted(records, key=lambda record: len(record["functions"]))


class _Recorder:
    """Plugin of pytest that writes the record of a file of tests."""

    def __init__(self, modules: Iterable[str], record: dict, output: Path) -> None:
        self._modules = {str(Path(name).absolute()): name for name in modules}
        self._record, self._output = record, output.absolute()
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()

    def pytest_sessionstart(self) -> None:
        include = list(self._modules)
        self._coverage = coverage.Coverage(data_file=None, config_file=False, include=include)
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = sum(os.times()[:4])
        outcome = yield
        self._seconds[item.nodeid] = sum(os.times()[:4]) - before
        return outcome

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        # What a fixture runs counts for every test of the file, any of which may share it.
        self._coverage.switch_context(item.nodeid.partition("::")[0])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._coverage.switch_context(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        seconds = {test: it for test, it in self._seconds.items() if test not in self._failed}
        found = {"seconds": seconds, "failed": sorted(self._failed), "functions": self._functions()}
        self._output.write_text(json.dumps({**self._record, **found}))

    def _functions(self) -> dict[str, dict[str, list[str]]]:
        data, functions = self._coverage.get_data(), {}
        for path in data.measured_files():
            names = functions_by_line(Path(path).read_text())
            found: dict[str, set[str]] = defaultdict(set)
            for line, tests in data.contexts_by_lineno(path).items():
                if line in names:
                    found[names[line]].update(filter(None, tests))  # "" is the time of imports
            functions[self._modules[path]] = {name: sorted(tests) for name, tests in found.items()}
        return functions


def tests_of(mutant: Mutant, records: Iterable[dict], seconds: float) -> tuple[dict, int]:
    """Tests of a mutant with their seconds, the quickest, and how many there are besides.

    They take so many seconds in all, or are one that takes more.
    """
    found: dict[str, float] = {}
    for record in records:
        names = record["functions"].get(mutant.path, {}).get(mutant.function, ())
        is_of_all = record["file"] in names
        found |= {test: it for test, it in record["seconds"].items() if is_of_all or test in names}
    quickest = sorted(found, key=found.__getitem__)
    until = accumulate(found[test] for test in quickest)
    chosen = {test for test, taken in zip(quickest, until, strict=True) if taken <= seconds}
    chosen.update(quickest[:1])
    return {test: found[test] for test in found if test in chosen}, len(found) - len(chosen)


def is_killed(mutant: Mutant, tests: dict[str, float]) -> bool:
    """Whether a test fails, or does not end in time, with the mutant in its module's place."""
    module = Path(mutant.path).resolve()
    source = mutant.applied(module.read_text())
    unchanged = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        if Path(loader.path).resolve() == module:
            return compile(source, loader.path, "exec")
        return unchanged(loader, name)

    def run() -> int:
        root, packages = Path.cwd().as_posix(), "site-packages"
        for name, loaded in list(sys.modules.items()):
            if (file := str(vars(loaded).get("__file__"))).startswith(
                root
            ) and packages not in file:
                del sys.modules[name]
        with patch.object(SourceFileLoader, "get_code", get_code):
            for file in dict.fromkeys(test.partition("::")[0] for test in tests):
                status = pytest.main([*_PYTEST, "--exitfirst", file], [_Chosen(tests)])
                if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                    return status
        return pytest.ExitCode.OK

    # What waits takes no CPU seconds, and on a machine with much to do all takes longer.
    return _in_fork(run, 10 * (_MOST_SECONDS + 3 * sum(tests.values()))) != pytest.ExitCode.OK


class _Chosen:
    """Plugin of pytest that runs some tests, in their order, each for so long at most."""

    def __init__(self, tests: dict[str, float]) -> None:
        self._tests = tests

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        there = {item.nodeid: item for item in items}
        items[:] = [there[test] for test in self._tests if test in there]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        most = time.process_time() + _MOST_SECONDS + 3 * self._tests[item.nodeid]
        resource.setrlimit(resource.RLIMIT_CPU, (int(most) + 1, resource.RLIM_INFINITY))


def _in_fork(run: Callable[[], int], seconds: float | None = None) -> int:
    """Status of a forked process that runs a function for so long at most, and prints nothing."""

    def silently() -> None:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        sys.exit(run())

    process = multiprocessing.get_context("fork").Process(target=silently)
    process.start()
    process.join(seconds)
    process.kill()
    process.join()
    return process.exitcode or 0


def verdicts(
    mutants: Sequence[Mutant], records: Sequence[dict], seconds: float, path: Path
) -> Iterator[tuple[Mutant, str]]:
    """Each mutant with "killed" or "survived: ..."; those that are killed are added to the file."""
    killed = set(path.read_text().split()) if path.exists() else set()
    for mutant in mutants:
        key = _sha256(mutant, Path(mutant.path).read_text())
        tests, left_out = tests_of(mutant, records, seconds)
        if key not in killed and not (tests and is_killed(mutant, tests)):
            yield mutant, f"survived {len(tests)} tests, {left_out} not run"
            continue
        if key not in killed:
            with path.open("a") as file:
                file.write(f"{key}\n")
        yield mutant, "killed"


def _sha256(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def _parsed(arguments: Sequence[str]) -> Namespace:
    rooms = [f"omnibal/{room}" for room in _ROOMS]
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    option = parser.add_argument
    option("modules", nargs="*", default=rooms, help="files, folders or globs (%(default)s)")
    option("--count", type=int, default=60, help="mutants to draw (%(default)s)")
    option("--seed", type=int, default=0, help="of the draw (%(default)s)")
    option("--least", type=float, default=0.9, help="share to kill, else status 1 (%(default)s)")
    option("--tests", nargs="+", default=["tests/planner"], help="files or folders (%(default)s)")
    option("--seconds", type=float, default=30, help="of tests for each mutant (%(default)s)")
    option("--folder", type=Path, default=Path("work/mutants"), help="of records (%(default)s)")
    check_arguments(arguments)
    return parser.parse_args(arguments)


def main() -> int:
    """Print a verdict for each mutant, and counts by package. Returns: exit status."""
    with one_line_errors():
        options = _parsed(sys.argv[1:])
        modules = modules_of(options.modules)
        tests = [name for name in modules_of(options.tests) if Path(name).match("test_*.py")]
        mutants = drawn_mutants(modules, options.count, options.seed)
        tops = {Path(name).parts[0] for name in modules}
        records = recorded(options.folder / "records", tests, modules_of(tops))
        with redirect_stdout(io.StringIO()):
            # Packages from elsewhere are imported here once, and not in every fork.
            pytest.main([*_PYTEST, "--collect-only", *tests])
        packages: dict[str, list[bool]] = defaultdict(list)
        path = options.folder / "killed"
        for number, (mutant, verdict) in enumerate(
            verdicts(mutants, records, options.seconds, path), start=1
        ):
            place = f"{mutant.path}:{mutant.line}: {mutant.change}"
            print(f"[{number}/{len(mutants)}] {place}: {verdict}", flush=True)
            for package in (str(Path(mutant.path).parent), "all"):
                packages[package].append(verdict == "killed")
        for package, killed in sorted(packages.items()):
            print(f"{package}: {sum(killed)} of {len(killed)} killed")
    return 0 if sum(packages["all"]) >= options.least * len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
