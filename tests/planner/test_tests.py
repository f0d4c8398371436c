"""Tests about tests: packages covered by quick tests, and modules that can run alone."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

REPOSITORY = Path(__file__).parents[2]
TESTS = REPOSITORY / "tests"
NOT_IMPORTED = {"omnibal.presets", "omnibal.trainers.export.scripts"}
"""Data only, and scripts copied into exports."""


def quick_modules(folder: Path) -> list[Path]:
    mark = "pytestmark = pytest.mark.quick\n"
    return [path for path in folder.rglob("test_*.py") if mark in path.read_text()]


def packages(top: str) -> Iterator[str]:
    """Yield package names under a folder of the repository."""
    for folder in {path.parent for path in (REPOSITORY / top).rglob("*.py")}:
        name = folder.relative_to(REPOSITORY).as_posix().replace("/", ".")
        if name not in NOT_IMPORTED:
            yield name


def imported_names(path: Path) -> Iterator[str]:
    """Yield imported modules and the names imported from them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{name.name}" for name in node.names)


@pytest.mark.parametrize(
    ("folder", "top"),
    [("planner", "omnibal"), ("", "megatron/vlm"), ("", "tools")],
)
def test_every_package_has_a_quick_test(folder, top):
    """Prevents a new package that `make quick` or `make planner-quick` does not test."""
    names = {f"{name}." for path in quick_modules(TESTS / folder) for name in imported_names(path)}
    lacking = [each for each in packages(top) if not any(n.startswith(f"{each}.") for n in names)]
    assert not lacking, f"mark a module of tests/{folder} as quick that imports from {lacking}"


def test_launchers_are_quick():
    """Prevents launcher scripts, which no test imports, from being left out."""
    assert TESTS / "test_launchers.py" in quick_modules(TESTS)


def test_no_module_of_tests_is_imported():
    """Prevents tests that cannot be moved or run alone, or are loaded under two names."""
    found = [
        f"{path.relative_to(REPOSITORY)} imports {name}"
        for path in sorted(TESTS.rglob("*.py"))
        for name in imported_names(path)
        if any(part.startswith("test_") for part in name.split("."))
    ]
    assert not found, f"move what is shared into a module named *_cases.py: {found}"


def test_no_two_modules_have_one_name():
    """Prevents imports from the wrong folder: all test folders are on one path."""
    names = Counter(path.name for path in TESTS.glob("*.py"))
    for folder in ("planner", "training", "trainers", "tools"):
        names.update(path.name for path in (TESTS / folder).glob("*.py"))
    twice = [name for name, count in names.items() if count > 1 and name != "conftest.py"]
    assert not twice
