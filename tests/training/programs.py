"""Programs that tests start in a new Python process, and their import path."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def import_path(*more: Path) -> str:
    """Return a PYTHONPATH of the repository, the folders, and the current PYTHONPATH."""
    own = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(filter(None, [str(REPOSITORY), *map(str, more), own]))


def run_program(
    *command: object, imports: tuple[Path, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `python COMMAND` in the repository, with extra import folders."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": import_path(*imports), **environment},
        text=True,
        capture_output=True,
        timeout=600,
    )
