"""`make quick` covers every package."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

REPOSITORY = Path(__file__).parent.parent
NOT_IMPORTED = {"omnibal.presets", "omnibal.export.scripts"}
"""Data alone, and scripts that are copied into what is exported."""


def quick_modules() -> list[Path]:
    mark = "pytestmark = pytest.mark.quick\n"
    return [path for path in (REPOSITORY / "tests").rglob("test_*.py") if mark in path.read_text()]


def packages() -> Iterator[str]:
    """Of the project, by where their code lies."""
    for top in ("omnibal", "megatron/vlm", "tools"):
        for folder in {path.parent for path in (REPOSITORY / top).rglob("*.py")}:
            name = folder.relative_to(REPOSITORY).as_posix().replace("/", ".")
            if name not in NOT_IMPORTED:
                yield name


def imported(path: Path) -> Iterator[str]:
    """The modules that a file names in its imports, and what is taken from them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{name.name}" for name in node.names)


def test_every_package_has_a_quick_test():
    """Prevents: a package that is added, and that `make quick` then knows nothing of."""
    names = {name for path in quick_modules() for name in imported(path)}
    lacking = [
        package
        for package in packages()
        if not any(name == package or name.startswith(f"{package}.") for name in names)
    ]
    assert not lacking, f"mark a module of tests as quick that imports from {lacking}"


def test_launchers_are_quick():
    """Prevents: scripts, which nothing imports, left out."""
    assert REPOSITORY / "tests" / "test_launchers.py" in quick_modules()
