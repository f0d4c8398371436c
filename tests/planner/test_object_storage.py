"""Data by URL, from fsspec's memory and moto's S3: lengths, storage errors and cached blocks."""

import errno
import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import fsspec
import pytest
from cli_cases import failure
from fsspec.implementations.memory import MemoryFileSystem
from jsonl_cases import DIGITS, open_meta, scan
from s3_cases import needs_s3, started_s3
from shard_cases import make_samples, write_lines, write_shards

from omnibal.base.block_cache import BlockCache
from omnibal.base.errors import StorageError, UserError
from omnibal.base.remote_path import RemotePath, location, named_from, versions_of
from omnibal.base.worker_pool import LocalPool
from omnibal.data.annotations import Annotations
from omnibal.data.data_index import DataIndex
from omnibal.data.scan import scan_key, scan_lengths
from omnibal.data.scan_journal import ScanJournal

ROOT = Path(__file__).parents[2]


class Watched(MemoryFileSystem):
    """Files in memory, with denied paths and a log of reads."""

    protocol = "watched"
    store = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    denied: set[str] = set()  # noqa: RUF012
    read: list[str] = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("watched://", "memory://"))

    def cat_file(self, path, start=None, end=None, **options):
        if path in self.denied:
            raise PermissionError("Forbidden")
        self.read.append(path)
        return super().cat_file(path, start, end, **options)


@pytest.fixture(scope="module")
def local_metas(tmp_path_factory) -> tuple[Path, Path]:
    """Return a meta of JSON lines and a meta of shards of equal samples, in one folder."""
    folder = tmp_path_factory.mktemp("made")
    records = make_samples(folder)
    write_shards(folder, records, per_shard=4)
    (folder / "shards.json").write_text('{"a": {"shards": "train-{000..005}.tar"}}')
    return write_lines(folder, records), folder / "shards.json"


@pytest.fixture
def bucket(local_metas, tmp_path) -> str:
    """Return the URL of these files in a storage that no other test has read."""
    fsspec.register_implementation("watched", Watched, clobber=True)
    Watched.store.clear()
    Watched.denied.clear()
    for path in local_metas[0].parent.rglob("*"):
        if path.is_file():
            put_file(tmp_path, str(path.relative_to(local_metas[0].parent)), path.read_bytes())
    Watched.read.clear()
    return f"watched://{tmp_path.name}"


def put_file(folder: Path, name: str, content: bytes) -> None:
    """Write a file of the test's storage."""
    Watched().pipe(f"/{folder.name}/{name}", content)


def list_tars() -> set[str]:
    """Return names of the shards that were read."""
    return {path.rpartition("/")[2] for path in Watched.read if path.endswith(".tar")}


@pytest.mark.parametrize("which", [0, 1])
def test_urls_are_read_as_files_are(local_metas, bucket, tokenizer, which):
    """Prevents other counts, samples or pixels by URL than from a disk."""
    local = Annotations.open(local_metas[which])
    remote = Annotations.open(location(f"{bucket}/{local_metas[which].name}"))
    assert remote.sha256 == local.sha256
    remote_lengths, local_lengths = (scan(each, tokenizer).lengths for each in (remote, local))
    assert remote_lengths.sha256 == local_lengths.sha256
    for sample, other in zip(remote, local, strict=True):
        assert (sample.identity, sample.turns) == (other.identity, other.turns)
        pairs = zip(sample.files, other.files, strict=True)
        assert all(one.open().read() == two.open().read() for one, two in pairs)


def test_what_was_read_is_kept(bucket, tmp_path):
    """Prevents downloading the data again in every epoch."""
    content = bytes(range(256)) * (90 << 10)  # exceeds the in-process cache
    put_file(tmp_path, "large", content)
    cache = BlockCache.open(tmp_path / "cache", 1)
    assert location(f"{bucket}/large", cache).read_bytes() == content
    Watched.denied.add(f"/{tmp_path.name}/large")
    assert (location(bucket, cache) / "large").read_bytes() == content
    with pytest.raises(StorageError, match="may not be read"):
        location(f"{bucket}/large").read_bytes()


def test_names_of_files():
    """Prevents a URL that loses a slash, and a name resolved in the wrong place."""
    folder = location("s3://bucket/data/meta.json").parent
    assert str(folder) == "s3://bucket/data" and isinstance(folder, RemotePath)
    assert str(named_from(folder, "../images/a.png")) == "s3://bucket/images/a.png"
    assert str(named_from(folder, "gs://other/a.tar")) == "gs://other/a.tar"
    assert named_from(folder, "/disk/a") == location("file:///disk/a") == Path("/disk/a")
    assert named_from(Path("here"), "a") == Path("here/a")


def open_indexed(meta: Path, folder: Path) -> Annotations:
    return Annotations.open(meta, DataIndex.resume(folder / "index", LocalPool()))


def test_a_denied_shard_loses_nothing(local_metas, bucket, tmp_path):
    """Prevents reading all shards again after a single denied shard."""
    meta = location(f"{bucket}/shards.json")
    Watched.denied.add(f"/{tmp_path.name}/train-003.tar")
    with pytest.raises(StorageError, match=r"train-003\.tar: may not be read \(Forbidden\)"):
        open_indexed(meta, tmp_path)
    Watched.denied.clear()
    Watched.read.clear()
    assert open_indexed(meta, tmp_path).sha256 == Annotations.open(local_metas[1]).sha256
    assert list_tars() == {f"train-00{number}.tar" for number in (3, 4, 5)}


def test_a_whole_index_reads_no_file(local_metas, bucket, tmp_path):
    """Prevents reading all data in each process before its first step, and outdated offsets."""
    meta, index = location(f"{bucket}/shards.json"), tmp_path / "index"
    whole = open_indexed(meta, tmp_path)
    Watched.read.clear()
    again = Annotations.open(meta, DataIndex.open_complete(index))
    assert again.sha256 == whole.sha256
    assert not list_tars()
    assert [each.identity for each in again] == [each.identity for each in whole]
    put_file(tmp_path, "train-001.tar", (local_metas[1].parent / "train-001.tar").read_bytes())
    with pytest.raises(UserError, match=r"knows nothing of .*train-001\.tar as it is now"):
        Annotations.open(meta, DataIndex.open_complete(index))
    with pytest.raises(StorageError, match=r"train-001\.tar: has changed"):
        again.check_unchanged()
    index.write_text("my notes")
    with pytest.raises(UserError, match="is not an index of `omnibal lengths`"):
        DataIndex.open_complete(index)
    with pytest.raises(UserError, match="no such index"):
        DataIndex.open_complete(tmp_path / "none")


def test_indexed_samples_are_opened_without_reading_them(tmp_path):
    """Prevents minutes of reading in every process of a job before its first step."""
    lines, path = b'{"conversations": []}\n' * 1000, tmp_path / "a.jsonl"
    path.write_bytes(lines)
    written = path.stat()
    open_indexed(path, tmp_path)
    path.write_bytes(b"x" * len(lines))
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
    again = Annotations.open(path, DataIndex.open_complete(tmp_path / "index"))
    path.write_bytes(lines)
    assert len(again) == 1000 and again.read_stored(999).content == lines[:22]


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_shard_that_changes_ends_the_scan(local_metas, bucket, tokenizer, tmp_path, is_remote):
    """Prevents lengths of two versions of a shard, and losing other shards' lengths."""
    for path in local_metas[1].parent.glob("*.tar"):
        shutil.copyfile(path, tmp_path / path.name)
    annotations = open_meta(tmp_path, a={"shards": "train-{000..005}.tar", "repeat_time": 30})
    meta = tmp_path / "meta.json"
    if is_remote:
        put_file(tmp_path, "meta.json", meta.read_bytes())
        meta = location(f"{bucket}/meta.json")
        annotations = Annotations.open(meta)
    key, calls = scan_key(DIGITS, tokenizer), []
    journal = ScanJournal.open(tmp_path / "journal", key, annotations)

    def change(done: int) -> None:
        calls.append(done)
        if len(calls) != 2:  # the first is before any task
            return
        if is_remote:  # equal bytes with another time
            put_file(tmp_path, "train-005.tar", (tmp_path / "train-005.tar").read_bytes())
        else:
            shutil.copyfile(tmp_path / "train-001.tar", tmp_path / "train-005.tar")

    with pytest.raises(StorageError, match=r"train-005\.tar: has changed while it was read"):
        scan_lengths(annotations, DIGITS, tokenizer, change, journal=journal, on_error="skip")
    again = Annotations.open(meta)
    journal = ScanJournal.open(tmp_path / "journal", key, again)
    assert len(journal.finished) == 30 * 4 * (6 if is_remote else 5)
    resumed, fresh = scan(again, tokenizer, journal=journal), scan(again, tokenizer)
    assert resumed.lengths.sha256 == fresh.lengths.sha256


def command(digits: Path, meta: object, *arguments: object, **environment: str):
    """Run `omnibal lengths` with only the given S3 settings in the environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    words = [sys.executable, "-m", "omnibal", "lengths", meta, "--model", DIGITS.name]
    words += ["--tokenizer-model", digits / "tokenizer.model", *arguments]
    return subprocess.run(
        list(map(str, words)),
        env=kept | environment, cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


@needs_s3
def test_a_bucket_is_scanned_as_a_folder(local_metas, digits, tmp_path):
    """Prevents storage failures that fsspec's memory does not show, and other lengths with Ray."""
    folder, written = local_metas[0].parent, []
    ray = ("--engine", "ray") if find_spec("ray") else ("--processes", 1)
    with started_s3(tmp_path) as server:
        server.put_folder(folder)
        for where, engine in ((folder, ("--processes", 1)), ("s3://data", ray)):
            sources = {
                "lines": {"root": f"{where}/pictures", "annotation": f"{where}/a.jsonl"},
                "shards": {"shards": f"{where}/train-{{000..005}}.tar"},
            }
            (tmp_path / "meta.json").write_text(json.dumps(sources))
            output = tmp_path / f"{len(written)}.parquet"
            given = (tmp_path / "meta.json", "-o", output, *engine)
            done = command(digits, *given, **server.environment)
            assert done.returncode == 0, done.stderr
            written.append(output.read_bytes())
    assert written[0] == written[1]


@needs_s3
def test_a_bucket_without_credentials(digits, tmp_path):
    """Prevents a traceback of forty frames, or a wait for a cloud machine's metadata."""
    nothing = {"AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path)}
    done = command(digits, "s3://private/meta.json", "-o", tmp_path / "L.parquet", **nothing)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "s3://private/meta.json: cannot be read (Unable to locate credentials)" in done.stderr


def test_versions_follow_content_and_time(tmp_path):
    """Prevents reading a changed file by the offsets of the old file."""
    path, found = tmp_path / "a", []
    for content, times in ((b"1", None), (b"1", (1, 1)), (b"12", (1, 1))):
        path.write_bytes(content)
        os.utime(path, times)
        found += versions_of([path])
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("lengths a.json --model internvl-digits -o s3://b/l.parquet", "output s3://b/l.parquet"),
        ("pack s3://b/l.parquet --dp 1 --max-tokens 9", "lengths s3://b/l.parquet"),
        ("check s3://b/plan", "directory s3://b/plan"),
        ("export plan --to out --data s3://b/meta.json", "data s3://b/meta.json"),
    ],
)
def test_what_takes_no_url_says_so(capsys, tmp_path, monkeypatch, command, option):
    """Prevents results in a local folder named s3:, and errors about paths that nobody gave."""
    monkeypatch.chdir(tmp_path)
    assert f"error: {option}: only data may be a URL" in failure(capsys, command)
    assert not list(tmp_path.iterdir())


BLOCK = 4096
NAMES = [f"s3://bucket/{number}" for number in range(60)]


def content_of(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest() * (BLOCK // 32)


def read(cache: BlockCache, name: str) -> bytes:
    return cache.block(name, BLOCK, lambda: content_of(name))


def read_at_random(cache: BlockCache, seed: int, reads: int) -> int:
    """Read random blocks in a child process; return its number."""
    child = os.fork()
    if child:
        return child
    drawn = random.Random(seed)
    wrong = any(read(cache, name) != content_of(name) for name in drawn.choices(NAMES, k=reads))
    os._exit(wrong)


def test_processes_share_it(tmp_path):
    """Prevents a full disk, and partial blocks from concurrent or killed writers."""
    cache = BlockCache.open(tmp_path, 20 * BLOCK / 2**30)
    for killed in (True, False):
        children = [read_at_random(cache, seed, 100_000 if killed else 300) for seed in range(3)]
        deadline = time.monotonic() + (0.3 if killed else 600)
        left = set(children)
        while left and time.monotonic() < deadline:
            # While nobody writes.
            with (tmp_path / "bytes").open("r+b") as ledger:
                fcntl.flock(ledger, fcntl.LOCK_EX)
                held = sum(path.stat().st_size for path in tmp_path.glob("??/*"))
            assert held <= cache.max_bytes
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
    """Prevents evicting blocks that are read again and again."""
    cache, fetched = BlockCache.open(tmp_path, 10 * BLOCK / 2**30), []
    order = [each for name in NAMES[:30] for each in (name, NAMES[0])] + [NAMES[5]]
    for name in order:
        cache.block(name, BLOCK, lambda name=name: fetched.append(name) or content_of(name))
        time.sleep(0.005)  # one clock tick, to order the uses
    assert fetched == [*NAMES[:30], NAMES[5]]


def test_what_is_damaged_is_fetched_again(tmp_path):
    """Prevents reading a block that a crash left half written."""
    cache = BlockCache.open(tmp_path / "new", 1)
    read(cache, "a")
    [path] = (tmp_path / "new").glob("??/*")
    path.write_bytes(b"half")
    assert read(cache, "a") == content_of("a") == path.read_bytes()
    assert BlockCache.open(tmp_path / "new", 1) == cache


def test_a_disk_that_fails_costs_time_alone(tmp_path, monkeypatch):
    """Prevents a full disk or a removed folder from ending a run, and half a block read later."""
    cache = BlockCache.open(tmp_path / "cache", 1)
    assert read(cache, "a") == content_of("a")

    def fill(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", fill)
        assert read(cache, "b") == content_of("b")
    assert len(list((tmp_path / "cache").glob("??/*"))) == 1
    shutil.rmtree(tmp_path / "cache")
    assert [read(cache, name) for name in "ab"] == [content_of("a"), content_of("b")]


def test_a_folder_of_other_files_is_refused(tmp_path):
    """Prevents removing a user's own files to free cache space."""
    (tmp_path / "mine").write_text("notes")
    with pytest.raises(UserError, match="holds other files"):
        BlockCache.open(tmp_path, 1)
    with pytest.raises(UserError, match="cannot be a cache"):
        BlockCache.open(tmp_path / "mine" / "below", 1)
