"""The planner runs where neither torch nor Megatron is installed."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
import omnibal, omnibal.cli, omnibal.data.scan

slow = {name.partition(".")[0] for name in sys.modules} & {"matplotlib", "scipy"}
assert not slow, slow
modules = [m.name for m in pkgutil.walk_packages(omnibal.__path__, "omnibal.")]
for name in modules:
    if name != "omnibal.__main__":
        importlib.import_module(name)
assert "omnibal.cli" in modules and len(modules) > 20, modules
heavy = {name.partition(".")[0] for name in sys.modules} & {"torch", "megatron"}
assert not heavy, heavy
"""

PLAN_WITH_THEM_BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "megatron"):
            raise ImportError(f"{name} must not be imported")

sys.meta_path.insert(0, Blocked())
from omnibal.cli import main
main(sys.argv[1:])
"""


def python(program: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_no_module_imports_torch_or_megatron_and_few_import_scipy_or_matplotlib():
    """Prevents a planner that needs gigabytes of packages, or a GPU machine, to start, and half a
    second more, for SciPy or Matplotlib, before every command and in each process that scans."""
    finished = python(IMPORT_EVERYTHING)
    assert finished.returncode == 0, finished.stderr


def test_planning_works_without_torch_and_megatron(tmp_path):
    """Prevents an import inside a function from escaping the test above."""
    options = "--model internvl-digits --cluster laptop-cpu --pp 2 --max-tiles 8 --max-tokens 512"
    finished = python(
        PLAN_WITH_THEM_BLOCKED, "plan", *options.split(), "-o", str(tmp_path / "plan")
    )
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "plan/plan.json").is_file()
