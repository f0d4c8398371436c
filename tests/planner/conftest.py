"""What tests of several modules ask for by name."""

from pathlib import Path

import pytest
from plan_cases import example_lengths

from omnibal.data.lengths import write_lengths


@pytest.fixture
def lengths_file(tmp_path: Path) -> Path:
    """The example's lengths, as `omnibal lengths` writes them."""
    write_lengths(example_lengths(), tmp_path / "lengths.parquet")
    return tmp_path / "lengths.parquet"
