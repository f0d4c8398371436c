"""Change operators and numbers of modules at random, and see whether their tests notice.

    make mutants
    python tools/mutants.py omnibal/cost 'omnibal/pipeline/stage_*.py' --count 60 --seed 1

Each mutant is one change of one expression of a function (tools/mutations.py). They are tried in
forks of one process, which imports a copy of the working tree and all tests once. A mutant's tests
are those that run its function, first those of files that run few modules, up to the first that
fails. Which those are is recorded once a file of tests, which the first time takes as long as the
tests, and again when the file changes or a module is new to the record. Verdicts are kept too: what
was stopped goes on where it was, and after more tests were written only survivors are tried again.

Equivalent mutants, which change no result, stand in tools/mutants_equivalent.toml with a reason, by
the text of their line and of the change; none of them is drawn.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from omnibal.base.errors import UserError
from omnibal.base.program import ArgumentParser, check_arguments, one_line_errors

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.mutations import Mutant, functions_by_line, mutants_by_place

_HOME = Path(__file__).parents[1]
_EQUIVALENT = Path(__file__).with_name("mutants_equivalent.toml")
_PACKAGES = ("cost", "dispatch", "packing", "pipeline", "search", "steps")
_PYTEST = (
    *("-m", "pytest", "-q", "--rootdir", ".", "-p", "no:xdist", "-p", "no:cacheprovider"),
    *("-p", "tools.mutants_tests"),
)
_MOST_SECONDS = 10
"""CPU seconds that tests of a mutant may take, beside those that they take unchanged."""
_SLOWER = 3
"""Times that tests of a mutant may take what they take unchanged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the tests said of a mutant."""

    outcome: str
    """"killed", "survived", "timed out", or "not tried"."""
    by: str
    """Test that failed; of a survivor, how many passed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Which tests of one file run which functions."""

    file: str
    sha256: str
    """Of the file."""
    modules: frozenset[str]
    """Those that were there when it was made."""
    seconds: dict[str, list[float]]
    """CPU seconds of each test that passes: of its set-up and its own."""
    failed: list[str]
    functions: dict[str, dict[str, list[str]]]
    """Tests by module and function; the name of the file where its fixtures run the function."""

    def tests_of(self, mutant: Mutant) -> list[tuple[float, str]]:
        """Tests that run the mutant's function with their CPU seconds, the quickest first."""
        names = set(self.functions.get(mutant.path, {}).get(mutant.function, ()))
        tests = set(self.seconds) if self.file in names else names
        return sorted((sum(self.seconds[test]), test) for test in tests if test in self.seconds)


class Workspace:
    """A copy of the working tree, which stays as it is while files are written."""

    def __init__(self, root: Path, copy: Path) -> None:
        self.root, self.copy = root, copy
        # The plugin of pytest is this repository's, whatever the root.
        self._environment = {**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{_HOME}"}
        if added := os.environ.get("PYTHONPATH"):
            self._environment["PYTHONPATH"] += os.pathsep + added
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (root / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, copy / name)

    @contextmanager
    def tests(self, arguments: Sequence[str]) -> Iterator[subprocess.Popen]:
        """Run pytest there, which ends with the block."""
        process = subprocess.Popen(
            [sys.executable, *_PYTEST, *arguments],
            cwd=self.copy,
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def modules_of(root: Path, patterns: Sequence[str]) -> list[str]:
    """Paths from the root of the modules that the patterns name: files, folders or globs.

    Raises:
        UserError: a pattern names no module.
    """
    found: set[str] = set()
    for pattern in patterns:
        paths = [path for place in root.glob(pattern) for path in (place, *place.rglob("*.py"))]
        names = {path.relative_to(root).as_posix() for path in paths if path.suffix == ".py"}
        if not names:
            raise UserError(f"{pattern}: names no module; give files, folders or globs of them")
        found |= names
    return sorted(found)


def drawn_mutants(root: Path, modules: Iterable[str], count: int, seed: int) -> list[Mutant]:
    """Mutants of so many expressions, each of which is as likely as any other."""
    rng = random.Random(seed)
    lines = {name: (root / name).read_text().splitlines() for name in modules}
    equivalent = {
        (entry["line"], entry["change"])
        for entry in tomllib.loads(_EQUIVALENT.read_text()).get("equivalent", ())
    }
    places = []
    for name in lines:
        for place in mutants_by_place(name, (root / name).read_text()):
            text = lines[name][place[0].line - 1].strip()
            if left := [mutant for mutant in place if (text, mutant.change) not in equivalent]:
                places.append(left)
    drawn = rng.sample(places, min(count, len(places)))
    return [rng.choice(place) for place in drawn]


def recorded(
    work: Workspace, folder: Path, tests: Iterable[str], modules: list[str]
) -> list[Record]:
    """The record of each file of tests, made where there is none or it is of other files."""
    folder.mkdir(parents=True, exist_ok=True)
    files, records = sorted(tests), []
    for place, name in enumerate(files, start=1):
        kept = folder / f"{name.replace('/', '.')}.json"
        sha256 = hashlib.sha256((work.root / name).read_bytes()).hexdigest()
        record = _read_record(kept)
        if record is None or record.sha256 != sha256 or not record.modules.issuperset(modules):
            print(f"[{place}/{len(files)}] recording what {name} runs", flush=True)
            kept.write_text(json.dumps(_new_record(work, name, sha256, modules)))
            record = _read_record(kept)
        if record is not None:
            if record.failed:
                print(f"{name}: {len(record.failed)} tests that fail unchanged are left out")
            records.append(record)
    return sorted(records, key=lambda record: len(record.functions))


def _read_record(path: Path) -> Record | None:
    if not path.exists():
        return None
    read = json.loads(path.read_text())
    return Record(**{**read, "modules": frozenset(read["modules"])})


def _new_record(work: Workspace, name: str, sha256: str, modules: list[str]) -> dict:
    tops = {path.partition("/")[0] for path in modules}
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary) / "lines.json"
        include = [str(work.copy / top / "*") for top in sorted(tops)]
        options = ["--record-lines", str(made), "--record-modules", *include]
        with work.tests([name, *options]) as process:
            process.wait()
        if not made.exists():
            raise UserError(f"{name}: pytest did not come to its end; see what it says alone")
        lines = json.loads(made.read_text())
    return {
        "file": name,
        "sha256": sha256,
        "modules": modules_of(work.copy, sorted(tops)),
        "seconds": lines["seconds"],
        "failed": lines["failed"],
        "functions": {
            path: _by_function((work.copy / path).read_text(), contexts)
            for path, contexts in lines["lines"].items()
            if path.endswith(".py")  # and not a template
        },
    }


def _by_function(source: str, contexts: dict[str, list[str]]) -> dict[str, list[str]]:
    """Names of contexts by function, of those by line; "" is the time of imports."""
    names = functions_by_line(source)
    found: dict[str, set[str]] = {}
    for line, seen in contexts.items():
        if int(line) in names:
            found.setdefault(names[int(line)], set()).update(filter(None, seen))
    return {function: sorted(seen) for function, seen in found.items() if seen}


def chosen_tests(
    records: Iterable[Record], mutant: Mutant, seconds: float
) -> tuple[dict[str, dict[str, float]], int]:
    """Tests to run on a mutant and their CPU seconds, by file, and how many more there are.

    They take `seconds` in all, or are one that takes more.
    """
    chosen: dict[str, dict[str, float]] = {}
    left_out = 0
    for record in records:
        for taken, test in record.tests_of(mutant):
            if chosen and taken > seconds:
                left_out += 1
            else:
                seconds -= taken
                chosen.setdefault(record.file, {})[test] = taken
    return chosen, left_out


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A mutant with the tests to run on it."""

    mutant: Mutant
    chosen: dict[str, dict[str, float]]
    """Tests and their CPU seconds, by file."""
    left_out: int
    """Tests besides that take too long."""
    source: str
    """Of the module as it is."""

    @property
    def tests(self) -> list[str]:
        """All tests, file by file."""
        return [test for tests in self.chosen.values() for test in tests]

    @property
    def cpu_seconds(self) -> float:
        """Most that they may take."""
        taken = sum(sum(tests.values()) for tests in self.chosen.values())
        return _MOST_SECONDS + _SLOWER * taken


def tried(work: Workspace, trials: Sequence[Trial]) -> Iterator[tuple[Trial, Verdict]]:
    """Run the tests of every mutant until one fails.

    Raises:
        UserError: the tests cannot be imported together.
    """
    yield from (
        (trial, Verdict(outcome="survived", by="no test runs it"))
        for trial in trials
        if not trial.chosen
    )
    trials = [trial for trial in trials if trial.chosen]
    files = sorted({file for trial in trials for file in trial.chosen})
    mutants = [
        {
            "tests": trial.tests,
            "cpu_seconds": trial.cpu_seconds,
            "place": {
                "path": trial.mutant.path,
                "function": trial.mutant.function,
                "source": trial.mutant.applied(trial.source),
            },
        }
        for trial in trials
    ]
    with tempfile.TemporaryDirectory() as temporary:
        listed, verdicts = Path(temporary) / "mutants.json", Path(temporary) / "verdicts"
        listed.write_text(json.dumps(mutants))
        verdicts.touch()
        options = ["--mutants", str(listed), "--verdicts", str(verdicts)]
        done = 0
        with work.tests([*options, *files]) as process, verdicts.open() as file:
            while done < len(trials):
                has_ended = process.poll() is not None
                line = file.readline()
                if line.endswith("\n"):
                    number, outcome, by = json.loads(line)
                    yield trials[number], Verdict(outcome=outcome, by=by)
                    done += 1
                elif has_ended:
                    raise UserError(f"{' '.join(files)}: cannot be imported together by pytest")
                else:
                    time.sleep(0.1)


class Verdicts:
    """Verdicts of earlier runs, in a file to which new ones are added."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else ()
        self._kept = {entry["mutant"]: entry for entry in map(json.loads, lines)}

    def get(self, mutant: str, tests: str) -> Verdict | None:
        """The verdict of a mutant: of a survivor, only if it was of the same tests."""
        entry = self._kept.get(mutant)
        if entry is None or (entry["outcome"] == "survived" and entry["tests"] != tests):
            return None
        return Verdict(outcome=entry["outcome"], by=entry["by"])

    def add(self, mutant: str, tests: str, verdict: Verdict) -> None:
        """Keep a verdict."""
        entry = {"mutant": mutant, "tests": tests, "outcome": verdict.outcome, "by": verdict.by}
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def summary(verdicts: Sequence[tuple[Mutant, Verdict]]) -> tuple[str, float]:
    """Survivors and counts by package, and the share of all tried that is killed, 0 of none."""
    lines = []
    packages: dict[str, list[str]] = {}
    for mutant, verdict in sorted(verdicts, key=lambda pair: (pair[0].path, pair[0].line)):
        packages.setdefault(str(Path(mutant.path).parent), []).append(verdict.outcome)
        if verdict.outcome != "killed":
            lines.append(_line(mutant, verdict))
    packages["all"] = [verdict.outcome for _, verdict in verdicts]
    for package, outcomes in packages.items():
        number = Counter(outcomes)
        killed = number["killed"] + number["timed out"]
        all_tried = killed + number["survived"]
        besides = [f", {number[one]} {one}" for one in ("timed out", "not tried") if number[one]]
        lines.append(f"{package}: {killed} of {all_tried} killed{''.join(besides)}")
    return "\n".join(lines), killed / max(all_tried, 1)


def _line(mutant: Mutant, verdict: Verdict) -> str:
    return f"{verdict.outcome}: {mutant.path}:{mutant.line}: {mutant.change}"


def _parsed(arguments: Sequence[str] | None) -> Namespace:
    packages = ", ".join(_PACKAGES)
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    option = parser.add_argument
    option("modules", nargs="*", help=f"files, folders or globs ({packages} of omnibal)")
    option("--count", type=int, default=60, help="mutants to draw (%(default)s)")
    option("--seed", type=int, default=0, help="of the draw (%(default)s)")
    option("--least", type=float, default=0.9, help="share to kill, else status 1 (%(default)s)")
    option("--tests", nargs="+", default=["tests/planner"], help="files or folders (%(default)s)")
    option("--seconds", type=float, default=60, help="of tests for each mutant (%(default)s)")
    option("--root", type=Path, default=Path(), help="of the repository (%(default)s)")
    option("--folder", type=Path, default=Path("work/mutants"), help="of records (%(default)s)")
    check_arguments(sys.argv[1:] if arguments is None else arguments)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a verdict for each mutant. Returns: exit status."""
    with one_line_errors():
        options = _parsed(arguments)
        root = options.root.resolve()
        packages = [f"omnibal/{name}" for name in _PACKAGES]
        there = [package for package in packages if (root / package).is_dir()]
        modules = modules_of(root, options.modules or there)
        mutants = drawn_mutants(root, modules, options.count, options.seed)
        tests = [name for name in modules_of(root, options.tests) if Path(name).match("test_*.py")]
        with tempfile.TemporaryDirectory() as temporary:
            work = Workspace(root, Path(temporary).resolve())
            records = recorded(work, root / options.folder / "records", tests, modules)
            kept = Verdicts(root / options.folder / "verdicts.jsonl")
            trials = [_trial(root, records, mutant, options.seconds) for mutant in mutants]
            verdicts = []
            for mutant, verdict in _verdicts(work, kept, trials):
                verdicts.append((mutant, verdict))
                line = f"{_line(mutant, verdict)} ({verdict.by})"
                print(f"[{len(verdicts)}/{len(mutants)}] {line}", flush=True)
        text, share = summary(verdicts)
        print(text)
    return 0 if share >= options.least else 1


def _trial(root: Path, records: Sequence[Record], mutant: Mutant, seconds: float) -> Trial:
    chosen, left_out = chosen_tests(records, mutant, seconds)
    source = (root / mutant.path).read_text()
    return Trial(mutant=mutant, chosen=chosen, left_out=left_out, source=source)


def _verdicts(
    work: Workspace, kept: Verdicts, trials: Sequence[Trial]
) -> Iterator[tuple[Mutant, Verdict]]:
    """Verdicts, first those of earlier runs."""
    new = []
    for trial in trials:
        if verdict := kept.get(*_keys(work, trial)):
            yield trial.mutant, verdict
        else:
            new.append(trial)
    for trial, verdict in tried(work, new):
        if verdict.outcome == "survived" and trial.left_out:
            verdict = replace(verdict, by=f"{verdict.by}, {trial.left_out} not run")
        kept.add(*_keys(work, trial), verdict)
        yield trial.mutant, verdict


def _keys(work: Workspace, trial: Trial) -> tuple[str, str]:
    """What a mutant's verdict is of, and which tests."""
    files = ((work.copy / file).read_text() for file in trial.chosen)
    return _sha256(trial.mutant, trial.source), _sha256(trial.tests, *files)


def _sha256(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
