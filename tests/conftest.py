"""The sample dataset, made once for all tests that need real images and text."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    """A small dataset of the quickstart's kind: train/, heldout/ and tokenizer.model."""
    folder = tmp_path_factory.mktemp("data") / "digits"
    command = [sys.executable, "tools/make_digits_dataset.py", "--output", folder]
    options = ["--samples", "80", "--heldout-samples", "16"]
    subprocess.run([*command, *options], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    return folder
