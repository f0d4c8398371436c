"""One name, one idea: no two modules of a program share a name."""

from collections import defaultdict
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
COMMANDS = "omnibal/cli"
"""Where a module may have the name of what its command calls: `cli/check.py` is `omnibal check`,
and `job/check.py` what it does."""
SHOWN_BY = {"cap", "check", "length", "pack", "plan", "profile", "simulate"}
"""Those that do, each without its plural."""


def modules_by_name(program: str) -> dict[str, set[Path]]:
    """Modules by their names, of which one and several are the same: `level` and `levels`."""
    found: dict[str, set[Path]] = defaultdict(set)
    for path in (ROOT / program).rglob("*.py"):
        if not path.stem.startswith("__"):
            found[path.stem.removesuffix("s")].add(path.relative_to(ROOT))
    return found


def is_one_idea(paths: set[Path]) -> bool:
    """Whether modules of one name are a command and what it calls."""
    folders = {path.parent.as_posix() for path in paths}
    if len(paths) == 1:
        return True
    names = {path.stem.removesuffix("s") for path in paths}
    return len(paths) == 2 and COMMANDS in folders and names <= SHOWN_BY


@pytest.mark.parametrize("program", ["omnibal", "megatron/vlm"])
def test_a_name_is_one_module(program: str):
    """Prevents: `levels.py` in four folders, of which a reader opens the wrong three first."""
    shared = [paths for paths in modules_by_name(program).values() if not is_one_idea(paths)]
    assert shared == []


def test_two_modules_of_a_name_are_found():
    """Prevents: a test that passes whatever modules are called, and outlived exceptions."""
    pairs = {name for name, paths in modules_by_name("omnibal").items() if len(paths) > 1}
    assert pairs == SHOWN_BY
    assert not is_one_idea({Path("omnibal/a/levels.py"), Path("omnibal/b/level.py")})
    assert not is_one_idea({Path("omnibal/cli/levels.py"), Path("omnibal/search/levels.py")})
    assert is_one_idea({Path("omnibal/cli/plan.py"), Path("omnibal/job/plan.py")})
