"""A small digits dataset, made once, for the tests that read data."""

from pathlib import Path

import pytest

from omnibal.data.tokenizer import Tokenizer
from tools.make_digits_dataset import make_dataset


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a dataset of 60 training and 20 held-out samples; not to be written to."""
    folder = tmp_path_factory.mktemp("digits") / "dataset"
    make_dataset(folder, samples=60, heldout_samples=20, seed=0)
    return folder


@pytest.fixture(scope="session")
def tokenizer(digits: Path) -> Tokenizer:
    return Tokenizer(digits / "tokenizer.model")
