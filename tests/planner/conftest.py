"""Fixtures shared by several test modules."""

from pathlib import Path

import pytest
from plan_cases import example_lengths

from omnibal.data.lengths import write_lengths


@pytest.fixture(scope="session")
def lengths_file(tmp_path_factory) -> Path:
    """Return a read-only file of the example's lengths, as written by `omnibal lengths`."""
    path = tmp_path_factory.mktemp("lengths") / "lengths.parquet"
    write_lengths(example_lengths(), path)
    return path
