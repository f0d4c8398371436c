"""The planner runs without torch and Megatron."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]

PROGRAM = """
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

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "megatron"):
            raise ImportError(f"{name} must not be imported")

sys.meta_path.insert(0, Blocked())
omnibal.cli.main(sys.argv[1:])
"""


def test_planning_imports_no_torch_or_megatron_and_begins_without_scipy_or_matplotlib(tmp_path):
    """Prevents planning that needs torch or Megatron, and slow imports at every start."""
    options = "--model internvl-digits --cluster laptop-cpu --pp 2 --max-tiles 8 --max-tokens 512"
    command = [sys.executable, "-c", PROGRAM, "plan", *options.split(), "-o", tmp_path / "plan"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "plan/plan.json").is_file()
