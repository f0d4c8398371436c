"""Micro-batches of remote data equal those of local files. Storage errors skip no sample."""

import shutil

import fsspec
import pytest
from data_cases import SKIP, Data, assert_same

from megatron.vlm.inputs.reader import SampleReader
from omnibal.base.block_cache import BlockCache
from omnibal.base.errors import StorageError
from omnibal.base.remote_path import location
from omnibal.data.annotations import Annotations


def test_remote_samples_train_as_local_ones(digits, tokenizer, tmp_path):
    """Prevents pixels or tokens that differ from local files, and network failures treated as
    skipped samples."""
    shutil.copytree(digits / "train", tmp_path / "data")
    files = fsspec.filesystem("memory")
    files.put(str(tmp_path / "data"), "/training", recursive=True)
    local = Data(tmp_path / "data/meta.json", tokenizer)
    remote = Data(location("memory://training/meta.json"), tokenizer)
    cache = BlockCache.open(tmp_path / "cache", 1)
    annotations = Annotations.open(location("memory://training/meta.json"), cache=cache)
    remote.reader = SampleReader(annotations, tokenizer, local.reader.model)
    packs = [[0, 3, 5], [60, 1], [79]]
    for got, expected in zip(remote.dataset(packs), local.dataset(packs), strict=True):
        assert_same(got, expected)
    assert len(list((tmp_path / "cache").glob("??/*"))) > 3

    def raise_error(path: str, **options: object) -> bytes:
        raise ConnectionError("no route to host")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(files), "cat_file", lambda self, path, **options: raise_error(path))
        with pytest.raises(StorageError, match="no route to host"):
            remote.dataset([[20, 21, 22, 23]], options=SKIP)[0]
