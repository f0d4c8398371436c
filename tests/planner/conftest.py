"""What tests of several modules ask for by name."""

from pathlib import Path

import pytest
from plan_cases import example_lengths

from omnibal.data.lengths import write_lengths


@pytest.fixture(scope="session")
def lengths_file(tmp_path_factory) -> Path:
    """The example's lengths, as `omnibal lengths` writes them; not to be written to."""
    path = tmp_path_factory.mktemp("lengths") / "lengths.parquet"
    write_lengths(example_lengths(), path)
    return path
