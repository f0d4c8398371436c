"""Where the programs that tests start import from."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def import_path(*more: Path) -> str:
    """PYTHONPATH of the repository and of more folders, before what the tests have of it: packages
    may be there that the Python itself lacks."""
    own = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(filter(None, [str(REPOSITORY), *map(str, more), own]))
