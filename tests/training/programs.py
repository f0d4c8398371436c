"""Programs that tests start in a Python of their own, and where those import from."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def import_path(*more: Path) -> str:
    """PYTHONPATH of the repository and more folders, before what the tests have of it."""
    own = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(filter(None, [str(REPOSITORY), *map(str, more), own]))


def run_program(
    *command: object, imports: tuple[Path, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """`python COMMAND` in the repository, with more folders to import from."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": import_path(*imports), **environment},
        text=True,
        capture_output=True,
        timeout=600,
    )
