"""Mutants of a toy package: those that its tests notice, and those that they do not."""

import subprocess
from pathlib import Path

import pytest

from tools import mutants
from tools.mutations import functions_by_line, mutants_by_place

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
from toy.sums import doubled, smaller


def test_doubled():
    assert doubled(5) == 10


def test_smaller():
    assert smaller(1, 2) == 1 and smaller(4, 3) == 3
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A repository of one module and one file of tests."""
    for name, text in {"toy/sums.py": SUMS, "tests/test_sums.py": TESTS}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path


def run(toy: Path, *options: str) -> int:
    return mutants.main(["toy", "--tests", "tests", "--root", str(toy), *options])


def test_survivors_are_told_from_killed_mutants(toy, capsys):
    """Prevents: mutants that are never in what the tests import, or that all count as killed."""
    assert run(toy, "--count", "100") == 1
    printed = capsys.readouterr().out.splitlines()
    verdicts = [
        line.partition("] ")[2] for line in printed if line.startswith("[") and "->" in line
    ]
    assert any(
        line.startswith("killed: toy/sums.py:3: number * 2")
        and line.endswith("(tests/test_sums.py::test_doubled)")
        for line in verdicts
    )
    # No case has equal numbers, and nothing calls the last function.
    survived = [line for line in verdicts if line.startswith("survived")]
    of_unknown = [line for line in survived if "toy/sums.py:13" in line]
    assert of_unknown and all(line.endswith("(no test runs it)") for line in of_unknown)
    assert {line.rpartition(" (")[0] for line in survived if line not in of_unknown} <= {
        "survived: toy/sums.py:7: a < b -> (a <= b)"
    }
    assert printed[-1] == f"all: {len(verdicts) - len(survived)} of {len(verdicts)} killed"
    assert (toy / "toy/sums.py").read_text() == SUMS
    assert run(toy, "--count", "100", "--least", "0.1") == 0


def test_verdicts_are_kept_until_their_reason_changes(toy, capsys, monkeypatch):
    """Prevents: hours of work lost at Ctrl-C, and survivors that new tests cannot kill."""
    run(toy, "--count", "100")
    first = capsys.readouterr().out.splitlines()
    assert sum("recording" in line for line in first) == 1
    tried: list[str] = []
    try_all = mutants.tried

    def counted(work, trials):
        tried.extend(trial.mutant.function for trial in trials)
        return try_all(work, trials)

    monkeypatch.setattr(mutants, "tried", counted)
    run(toy, "--count", "100")
    again = capsys.readouterr().out.splitlines()
    assert again == [line for line in first if "recording" not in line] and not tried
    more = "\nfrom toy.sums import unknown\n\ndef test_unknown():\n    assert unknown(9) == 2\n"
    (toy / "tests/test_sums.py").write_text(TESTS + more)
    run(toy, "--count", "100")
    assert "unknown" in tried and "doubled" not in tried
    assert "no test runs it" not in capsys.readouterr().out


def test_endless_mutants_are_stopped(toy, monkeypatch, capsys):
    """Prevents: a loop without an end that holds up all other mutants."""
    endless = "def count(most):\n    n = 0\n    while n < most:\n        n += 1\n    return n\n"
    (toy / "toy/sums.py").write_text(endless)
    test = "from toy.sums import count\n\n\ndef test_count():\n    assert count(3) == 3\n"
    (toy / "tests/test_sums.py").write_text(test)
    monkeypatch.setattr(mutants, "_MOST_SECONDS", 2)
    monkeypatch.setattr(mutants, "drawn_mutants", lambda *_: [mutant_of(endless, "n -= 1")])
    assert run(toy) == 0
    assert "timed out: toy/sums.py:4" in capsys.readouterr().out


def mutant_of(source: str, after: str) -> mutants.Mutant:
    places = mutants_by_place("toy/sums.py", source)
    return next(each for place in places for each in place if each.after == after)


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
    drawn = [
        each.change
        for seed in range(20)
        for each in mutants.drawn_mutants(toy, ["toy/sums.py"], 100, seed)
    ]
    assert "2 -> (3)" not in drawn and "2 -> (1)" in drawn


def test_kept_equivalents_are_of_mutants_that_there_are():
    """Prevents: a list of reasons for lines that were changed long ago."""
    root = Path(__file__).parents[2]
    given = {
        (entry["line"], entry["change"])
        for entry in mutants.tomllib.loads(mutants._EQUIVALENT.read_text()).get("equivalent", ())
    }
    there = set()
    for name in mutants.modules_of(root, ["omnibal"]):
        text = (root / name).read_text()
        lines = text.splitlines()
        for place in mutants_by_place(name, text) if any(a in text for a, _ in given) else ():
            there |= {(lines[each.line - 1].strip(), each.change) for each in place}
    assert given <= there


@pytest.mark.parametrize("wrong", [["absent"], ["toy", "--tests", "absent"]])
def test_mistakes_are_one_line(toy, wrong, capfd):
    """Prevents: tracebacks, and a sample of nothing that passes."""
    with pytest.raises(SystemExit) as ended:
        mutants.main([*wrong, "--root", str(toy)])
    assert ended.value.code == 2
    assert (
        capfd.readouterr().err
        == "error: absent: names no module; give files, folders or globs of them\n"
    )
