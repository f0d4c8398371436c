"""Conflicts listed in docs/planning.md are the conflicts in the code."""

import re
from pathlib import Path

import pytest

from omnibal.search.conflicts import CONFLICTS, NEEDS

pytestmark = pytest.mark.quick

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
_SECTION = re.compile(r"^## What does not go together$(.*?)^## ", re.MULTILINE | re.DOTALL)


def rows() -> list[tuple[list[str], list[str], str]]:
    """Return options of the first and second column and the reason, of every row of the tables."""
    found = _SECTION.search(PAGE.read_text())
    assert found is not None
    lines = [line for line in found[1].splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(*(re.findall(r"`([^`]+)`", each) for each in (a, b)), why) for a, b, why in cells]


def test_tables_are_the_codes():
    """Prevents a page that lacks a refused pair, or gives another reason."""
    written = [(one, other, why) for (one,), others, why in rows() for other in others]
    in_code = [(each.one.value, each.other.value, each.why) for each in CONFLICTS]
    in_code += [(one.value, other.value, why) for one, other, why in NEEDS]
    assert sorted(written) == sorted(in_code)
