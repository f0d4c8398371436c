"""Mutants of a toy package: those that its tests notice, and those that they do not."""

import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from tools import mutants
from tools.mutations import Mutant, functions_by_line, mutants_by_place

SUMS = """
def doubled(number):
    return number * 2


def smaller(a, b):
    if a < b:
        return a
    return b


def unknown(number):
    return number - 7
"""
TESTS = """
from mutated.sums import doubled, smaller


def test_doubled():
    assert doubled(5) == 10


def test_smaller():
    assert smaller(1, 2) == 1 and smaller(4, 3) == 3
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A repository of one module and one file of tests."""
    for name, text in {"mutated/sums.py": SUMS, "tests/test_sums.py": TESTS}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    return tmp_path


def run(toy: Path, *options: str) -> tuple[list[str], int]:
    """Lines that the tool prints of the toy, and its status."""
    command = [sys.executable, mutants.__file__, "mutated", "--tests", "tests", *options]
    ended = subprocess.run(command, cwd=toy, capture_output=True, text=True)
    assert not ended.stderr, ended.stderr
    return ended.stdout.splitlines(), ended.returncode


def test_survivors_are_told_from_killed_mutants(toy):
    """Prevents: mutants that are never in what the tests import, or that all count as killed."""
    printed, status = run(toy, "--count", "100")
    verdicts = [line.partition("] ")[2] for line in printed if "->" in line]
    assert any(
        line.startswith("mutated/sums.py:3: number * 2 ->") and line.endswith(": killed")
        for line in verdicts
    )
    # No case has equal numbers, and nothing calls the last function.
    survived = {line for line in verdicts if "killed" not in line}
    of_unknown = {line for line in survived if "mutated/sums.py:13" in line}
    assert of_unknown and all("survived 0 tests" in line for line in of_unknown)
    assert survived - of_unknown <= {
        "mutated/sums.py:7: a < b -> (a <= b): survived 1 tests, 0 not run"
    }
    assert printed[-1] == f"mutated: {len(verdicts) - len(survived)} of {len(verdicts)} killed"
    assert status == 1 and (toy / "mutated/sums.py").read_text() == SUMS


def test_killed_mutants_are_kept_and_survivors_tried_again(toy):
    """Prevents: hours of work lost at Ctrl-C, and survivors that new tests cannot kill."""
    first, _ = run(toy, "--count", "100", "--least", "0.1")
    assert sum("recording" in line for line in first) == 1
    kept = toy / "work/mutants/killed"
    of_first = kept.read_text()
    again, status = run(toy, "--count", "100", "--least", "0.1")
    assert again == [line for line in first if "recording" not in line] and status == 0
    assert kept.read_text() == of_first
    more = "\nfrom mutated.sums import unknown\n\ndef test_unknown():\n    assert unknown(9) == 2\n"
    (toy / "tests/test_sums.py").write_text(TESTS + more)
    last, _ = run(toy, "--count", "100")
    assert not any("survived 0 tests" in line for line in last)
    assert kept.read_text().startswith(of_first)


def test_endless_mutants_are_stopped(toy, monkeypatch):
    """Prevents: a loop without an end that holds up all other mutants."""
    endless = "def count(most):\n    n = 0\n    while n < most:\n        n += 1\n    return n\n"
    (toy / "mutated/sums.py").write_text(endless)
    test = "from mutated.sums import count\n\n\ndef test_count():\n    assert count(3) == 3\n"
    (toy / "tests/test_sums.py").write_text(test)
    monkeypatch.chdir(toy)
    monkeypatch.setattr(mutants, "_MOST_SECONDS", 2)
    tests = {"tests/test_sums.py::test_count": 0.0}
    assert mutants.is_killed(mutant_of(endless, "n -= 1"), tests)
    assert not mutants.is_killed(mutant_of(endless, "(most > n)"), tests)


def mutant_of(source: str, after: str) -> Mutant:
    start = source.index("n < most") if after == "(most > n)" else source.index("n += 1")
    places = mutants_by_place("mutated/sums.py", source)
    place = next(place for place in places if place[0].start == start)
    return replace(place[0], after=after)


SOURCE = '''"""A module with 7 words."""
LIMIT = 48
UNITS = 2**10


class Sized:
    size: int = 4

    @property
    def area(self) -> float:
        """Area of 2 sides."""
        if self.size > 16 and LIMIT:
            raise ValueError(f"{self.size + 1} > {LIMIT - 1}")
        return max(self.size, 1) * sums(self.size, axis=0)[0] - 0.5 if self.size else -1
'''


def test_mutants_are_of_all_kinds_and_each_can_be_read():
    """Prevents: changes of words and messages, changes that do not parse, and places mistaken."""
    places = mutants_by_place("sized.py", SOURCE)
    changes = {each.change: each for place in places for each in place}
    assert {
        "self.size > 16 -> (self.size >= 16)",
        "self.size > 16 and LIMIT -> (self.size > 16 or LIMIT)",
        "self.size > 16 and LIMIT -> (LIMIT)",
        "16 -> (32)",
        "max(self.size, 1) -> (min(self.size, 1))",
        "sums(self.size, axis=0) -> (sums(self.size, axis=1))",
        "0.5 -> (0.25)",
        "self.size -> (not self.size)",
        "-1 -> (1)",
    } <= changes.keys()
    assert not any(word in change for change in changes for word in ("48", "10", "LIMIT - 1"))
    for change, each in changes.items():
        compile(each.applied(SOURCE), "sized.py", "exec")
        line = SOURCE.splitlines()[each.line - 1]
        assert change.partition(" -> ")[0] in line
        assert each.function == "Sized.area"
    assert set(functions_by_line(SOURCE).values()) == {"Sized.area"}


def test_equivalent_mutants_are_not_drawn(toy, tmp_path, monkeypatch):
    """Prevents: survivors that nobody can kill, shown again and again, or others hidden too."""
    listed = tmp_path / "equivalent.toml"
    listed.write_text(
        "[[equivalent]]\nline = 'return number * 2'\nchange = '2 -> (3)'\nreason = 'a test'\n"
    )
    monkeypatch.setattr(mutants, "_EQUIVALENT", listed)
    monkeypatch.chdir(toy)
    drawn = [
        each.change
        for seed in range(20)
        for each in mutants.drawn_mutants(["mutated/sums.py"], 100, seed)
    ]
    assert "2 -> (3)" not in drawn and "2 -> (1)" in drawn


def test_kept_equivalents_are_of_mutants_that_there_are(monkeypatch):
    """Prevents: a list of reasons for lines that were changed long ago."""
    monkeypatch.chdir(Path(__file__).parents[2])
    entries = tomllib.loads(mutants._EQUIVALENT.read_text()).get("equivalent", ())
    given = {(entry["line"], entry["change"]) for entry in entries}
    there = set()
    for name in mutants.modules_of(["omnibal"]):
        text = Path(name).read_text()
        lines = text.splitlines()
        for place in mutants_by_place(name, text) if any(a in text for a, _ in given) else ():
            there |= {(lines[each.line - 1].strip(), each.change) for each in place}
    assert given <= there


@pytest.mark.parametrize("wrong", [["absent"], ["mutated", "--tests", "absent"]])
def test_mistakes_are_one_line(toy, wrong, capfd, monkeypatch):
    """Prevents: tracebacks, and a sample of nothing that passes."""
    monkeypatch.chdir(toy)
    monkeypatch.setattr(sys, "argv", ["mutants.py", *wrong])
    with pytest.raises(SystemExit) as ended:
        mutants.main()
    assert ended.value.code == 2
    assert (
        capfd.readouterr().err
        == "error: absent: names no module; give files, folders or globs of them\n"
    )
