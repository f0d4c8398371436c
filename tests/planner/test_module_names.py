"""Module names are unique in the planner and the trainer."""

from collections import defaultdict
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]


def test_a_name_is_one_module():
    """Prevents modules of equal names, such as `levels.py` in four folders."""
    paths_by_name = defaultdict(set)
    for program in ("omnibal", "megatron"):
        for path in (ROOT / program).rglob("*.py"):
            if not path.stem.startswith("__"):
                paths_by_name[path.stem].add(path.relative_to(ROOT).as_posix())
    assert [paths for paths in paths_by_name.values() if len(paths) > 1] == []
