"""The cache of remote blocks: bounded, never half written, whoever shares it and is killed."""

import errno
import fcntl
import hashlib
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from omnibal.base.block_cache import BlockCache
from omnibal.base.errors import UserError

BLOCK = 4096
NAMES = [f"s3://bucket/{number}" for number in range(60)]


def content_of(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest() * (BLOCK // 32)


def held_bytes(folder: Path) -> int:
    """Bytes of all blocks, while nobody writes."""
    with (folder / "bytes").open("r+b") as ledger:
        fcntl.flock(ledger, fcntl.LOCK_EX)
        return sum(path.stat().st_size for path in folder.glob("??/*"))


def read_at_random(cache: BlockCache, seed: int, reads: int) -> int:
    """Read blocks in another process; its number."""
    child = os.fork()
    if child:
        return child
    drawn = random.Random(seed)
    for _ in range(reads):
        name = drawn.choice(NAMES)
        if cache.block(name, BLOCK, lambda name=name: content_of(name)) != content_of(name):
            os._exit(1)
    os._exit(0)


def test_processes_share_it(tmp_path):
    """Prevents a full disk, and blocks that one process reads while another writes or removes
    them or is killed while it does."""
    cache = BlockCache.open(tmp_path, 20 * BLOCK / 2**30)
    for killed in (True, False):
        children = [read_at_random(cache, seed, 100_000 if killed else 300) for seed in range(3)]
        deadline = time.monotonic() + (0.3 if killed else 600)
        left = set(children)
        while left and time.monotonic() < deadline:
            assert held_bytes(tmp_path) <= cache.most_bytes
            for child in set(left):
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    assert os.waitstatus_to_exitcode(status) == 0
                    left.remove(child)
        for child in left:
            assert killed
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    kept = [path for path in tmp_path.glob("??/*") if path.suffix != ".part"]
    assert 5 < len(kept) <= 20
    assert {path.read_bytes() for path in kept} <= set(map(content_of, NAMES))


def test_the_least_recently_used_goes_first(tmp_path):
    """Prevents a cache that removes just what is read again and again."""
    cache = BlockCache.open(tmp_path, 10 * BLOCK / 2**30)
    fetched = []

    def read(name: str) -> None:
        cache.block(name, BLOCK, lambda: fetched.append(name) or content_of(name))
        time.sleep(0.005)  # a clock's tick, by which uses are told apart

    for number, name in enumerate(NAMES[:30]):
        read(name)
        if number > 2:
            read(NAMES[0])
    assert fetched == NAMES[:30]
    read(NAMES[5])
    assert fetched[-1] == NAMES[5]


def test_what_is_damaged_is_fetched_again(tmp_path):
    """Prevents half a block, of a machine that went down, from being read as a sample."""
    cache = BlockCache.open(tmp_path / "new", 1)
    cache.block("a", BLOCK, lambda: content_of("a"))
    [path] = (tmp_path / "new").glob("??/*")
    path.write_bytes(b"half")
    assert cache.block("a", BLOCK, lambda: content_of("a")) == content_of("a") == path.read_bytes()
    assert BlockCache.open(tmp_path / "new", 1) == cache


def test_a_disk_that_fails_costs_time_alone(tmp_path, monkeypatch):
    """Prevents a full disk, or a folder that somebody removes, from ending a run, and half a block
    from being read later."""
    cache = BlockCache.open(tmp_path / "cache", 1)
    assert cache.block("a", BLOCK, lambda: content_of("a")) == content_of("a")
    with monkeypatch.context() as full:

        def fill(path: Path, content: bytes) -> None:
            with path.open("wb") as file:
                file.write(content[:100])
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(Path, "write_bytes", fill)
        assert cache.block("b", BLOCK, lambda: content_of("b")) == content_of("b")
    assert len(list((tmp_path / "cache").glob("??/*"))) == 1
    shutil.rmtree(tmp_path / "cache")
    for name in ("a", "b"):
        assert cache.block(name, BLOCK, lambda name=name: content_of(name)) == content_of(name)


def test_a_folder_of_other_files_is_refused(tmp_path):
    """Prevents a user's own files from being removed to make room."""
    (tmp_path / "mine").write_text("notes")
    with pytest.raises(UserError, match="holds other files"):
        BlockCache.open(tmp_path, 1)
    with pytest.raises(UserError, match="cannot be a cache"):
        BlockCache.open(tmp_path / "mine" / "below", 1)
