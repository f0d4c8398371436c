"""Rules of launch lines: each on a line that breaks it and on one that does not."""

from pathlib import Path

import pytest

from omnibal.lint.rules import rules_table

pytestmark = pytest.mark.quick

PAGE = Path(__file__).parents[2] / "docs" / "lint.md"


def test_the_page_has_the_rules_of_the_code():
    """Prevents: a rule that the documentation does not know, or one that is gone."""
    assert PAGE.read_text().endswith(f"\n\n{rules_table()}\n")
