"""A small dataset of the quickstart's kind, made once, for all tests that read real data."""

import os
from pathlib import Path

# Before torch is imported: the forked ranks of these tests share no GPU.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Its CUDA build warns of what is hidden here, before anything that a started command says.
os.environ["TORCH_LOGS"] = "-torch.utils.cpp_extension"

import pytest

from omnibal.data.tokenizer import Tokenizer, open_tokenizer
from tools.make_digits_dataset import make_dataset


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with train/ (80 samples), heldout/ (20) and tokenizer.model; not to be written to."""
    folder = tmp_path_factory.mktemp("digits") / "dataset"
    make_dataset(folder, samples=80, heldout_samples=20, seed=0)
    return folder


@pytest.fixture(scope="session")
def tokenizer(digits: Path) -> Tokenizer:
    return open_tokenizer(digits / "tokenizer.model")
