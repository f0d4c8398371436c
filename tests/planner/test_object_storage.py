"""Data by URLs: the same lengths as of local files, and one clear error where a storage fails.

Storages that fail are fsspec's memory, made to; S3 is moto's server, asked by the command itself.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import fsspec
import pytest
from cli_cases import failure
from fsspec.implementations.memory import MemoryFileSystem
from s3_cases import Server, needs_s3, started_s3
from shard_cases import make_samples, write_lines, write_shards

from omnibal.base.block_cache import BlockCache
from omnibal.base.errors import StorageError, UserError
from omnibal.base.remote_path import RemotePath, location, named_from, versions_of
from omnibal.base.worker_pool import LocalPool
from omnibal.data.annotations import Annotations
from omnibal.data.data_index import DataIndex
from omnibal.data.lengths import Lengths
from omnibal.data.scan import scan_key, scan_lengths
from omnibal.data.scan_journal import ScanJournal
from omnibal.model.config import load_model

ROOT = Path(__file__).parents[2]
MODEL = load_model("internvl-digits")
SHARDS = 6


class Watched(MemoryFileSystem):
    """Files in memory, of which some may not be read, and all that are read are noted."""

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
def made(tmp_path_factory) -> tuple[Path, Path]:
    """A folder with a meta of lines and one of shards, both named, of the same samples."""
    folder = tmp_path_factory.mktemp("made")
    records = make_samples(folder)
    write_shards(folder, records, per_shard=4)
    (folder / "shards.json").write_text(
        f'{{"a": {{"shards": "train-{{000..00{SHARDS - 1}}}.tar"}}}}'
    )
    return write_lines(folder, records), folder / "shards.json"


@pytest.fixture
def bucket(made, tmp_path) -> str:
    """URL of the same files in a storage of their own, which no other test has read."""
    fsspec.register_implementation("watched", Watched, clobber=True)
    Watched.store.clear()
    Watched.denied.clear()
    files = Watched()
    for path in made[0].parent.rglob("*"):
        if path.is_file():
            files.pipe(f"/{tmp_path.name}/{path.relative_to(made[0].parent)}", path.read_bytes())
    Watched.read.clear()
    return f"watched://{tmp_path.name}"


def scan(annotations: Annotations, tokenizer, **options) -> Lengths:
    return scan_lengths(annotations, MODEL, tokenizer, lambda _: None, **options).lengths


@pytest.mark.parametrize("which", [0, 1])
def test_urls_are_read_as_files_are(made, bucket, tokenizer, which):
    """Prevents other counts, samples or pixels than those of the same data on a disk."""
    local = Annotations.open(made[which])
    remote = Annotations.open(location(f"{bucket}/{made[which].name}"))
    assert remote.sha256 == local.sha256
    assert scan(remote, tokenizer).sha256 == scan(local, tokenizer).sha256
    for sample, other in zip(remote, local, strict=True):
        assert (sample.identity, sample.turns) == (other.identity, other.turns)
        pairs = zip(sample.files, other.files, strict=True)
        assert all(one.open().read() == two.open().read() for one, two in pairs)


def test_what_was_read_is_kept(bucket, tmp_path):
    """Prevents every epoch from being paid for and waited for again."""
    content = bytes(range(256)) * (90 << 10)  # more than a process remembers
    Watched().pipe(f"/{tmp_path.name}/large", content)
    cache = BlockCache.open(tmp_path / "cache", 1)
    path = location(f"{bucket}/large", cache)
    assert path.read_bytes() == content
    Watched.denied.add(f"/{tmp_path.name}/large")
    assert (location(bucket, cache) / "large").read_bytes() == content
    with pytest.raises(StorageError, match="may not be read"):
        location(f"{bucket}/large").read_bytes()


def test_names_of_files():
    """Prevents a URL from losing a slash, or a name from being looked for in the wrong place."""
    folder = location("s3://bucket/data/meta.json").parent
    assert str(folder) == "s3://bucket/data" and isinstance(folder, RemotePath)
    assert str(named_from(folder, "../images/a.png")) == "s3://bucket/images/a.png"
    assert str(named_from(folder, "gs://other/a.tar")) == "gs://other/a.tar"
    assert named_from(folder, "/disk/a") == location("file:///disk/a") == Path("/disk/a")
    assert named_from(Path("here"), "a") == Path("here/a")


def open_indexed(meta: Path, folder: Path) -> Annotations:
    return Annotations.open(meta, DataIndex.resumed(folder / "index", LocalPool()))


def test_a_denied_shard_loses_nothing(made, bucket, tmp_path):
    """Prevents hours of reading shards from being done again for one that may not be read."""
    meta = location(f"{bucket}/shards.json")
    Watched.denied.add(f"/{tmp_path.name}/train-003.tar")
    with pytest.raises(StorageError, match=r"train-003\.tar: may not be read \(Forbidden\)"):
        open_indexed(meta, tmp_path)
    Watched.denied.clear()
    Watched.read.clear()
    annotations = open_indexed(meta, tmp_path)
    assert annotations.sha256 == Annotations.open(made[1]).sha256
    tars = {path for path in Watched.read if path.endswith(".tar")}
    assert tars == {f"/{tmp_path.name}/train-00{number}.tar" for number in (3, 4, 5)}


def test_a_whole_index_reads_no_file(made, bucket, tmp_path):
    """Prevents every process of a job from reading all data before its first step, and the places
    of an older file from being read in a newer one."""
    meta = location(f"{bucket}/shards.json")
    whole = open_indexed(meta, tmp_path)
    Watched.read.clear()
    again = Annotations.open(meta, DataIndex.read(tmp_path / "index"))
    assert again.sha256 == whole.sha256
    assert not [path for path in Watched.read if path.endswith(".tar")]
    assert [each.identity for each in again] == [each.identity for each in whole]
    Watched().pipe(
        f"/{tmp_path.name}/train-001.tar", (made[1].parent / "train-001.tar").read_bytes()
    )
    with pytest.raises(UserError, match=r"knows nothing of .*train-001\.tar as it is now"):
        Annotations.open(meta, DataIndex.read(tmp_path / "index"))
    with pytest.raises(StorageError, match=r"train-001\.tar: has changed"):
        again.check_unchanged()
    (tmp_path / "index").write_text("my notes")
    with pytest.raises(UserError, match="is not an index of `omnibal lengths`"):
        DataIndex.read(tmp_path / "index")
    with pytest.raises(UserError, match="no such index"):
        DataIndex.read(tmp_path / "none")


def test_indexed_samples_are_opened_without_reading_them(tmp_path):
    """Prevents minutes in every process of a job before its first step."""
    lines, path = b'{"conversations": []}\n' * 1000, tmp_path / "a.jsonl"
    path.write_bytes(lines)
    written = path.stat()
    open_indexed(path, tmp_path)
    path.write_bytes(b"x" * len(lines))
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
    again = Annotations.open(path, DataIndex.read(tmp_path / "index"))
    path.write_bytes(lines)
    assert len(again) == 1000 and again.stored(999).content == lines[:22]


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_shard_that_changes_ends_the_scan(made, bucket, tokenizer, tmp_path, is_remote):
    """Prevents lengths of two versions of a shard, and the loss of what was scanned of others."""
    local = tmp_path / "data"
    local.mkdir()
    for path in made[1].parent.glob("*.tar"):
        (local / path.name).write_bytes(path.read_bytes())
    (local / "shards.json").write_text(
        json.dumps({"a": {"shards": "train-{000..005}.tar", "repeat_time": 30}})
    )
    Watched().pipe(f"/{tmp_path.name}/shards.json", (local / "shards.json").read_bytes())
    meta = location(f"{bucket}/shards.json") if is_remote else local / "shards.json"
    annotations = Annotations.open(meta)
    key = scan_key(MODEL, tokenizer)
    journal = ScanJournal.open(tmp_path / "journal", key, annotations)
    calls = []

    def change(done: int) -> None:
        calls.append(done)
        if len(calls) != 2:  # the first is before any task
            return
        if is_remote:  # the same bytes under another time
            content = (local / "train-005.tar").read_bytes()
            Watched().pipe(f"/{tmp_path.name}/train-005.tar", content)
        else:
            shutil.copyfile(local / "train-001.tar", local / "train-005.tar")

    with pytest.raises(StorageError, match=r"train-005\.tar: has changed while it was read"):
        scan_lengths(annotations, MODEL, tokenizer, change, journal=journal, on_error="skip")
    again = Annotations.open(meta)
    journal = ScanJournal.open(tmp_path / "journal", key, again)
    assert len(journal.finished) == 30 * 4 * (6 if is_remote else 5)
    assert scan(again, tokenizer, journal=journal).sha256 == scan(again, tokenizer).sha256


def command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """`omnibal lengths` with nothing of S3 in the environment but what is given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    words = [sys.executable, "-m", "omnibal", "lengths", "--model", MODEL.name]
    return subprocess.run(
        [*words, *map(str, arguments)],
        env=kept | environment, cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with started_s3(tmp_path_factory.mktemp("moto")) as server:
        yield server


@needs_s3
def test_a_bucket_is_scanned_as_a_folder(made, digits, server, tmp_path):
    """Prevents what fsspec's memory does not show of a real storage, such as names of buckets, and
    other lengths of lines and shards by URLs that a Ray cluster reads."""
    folder = made[0].parent
    server.put_folder(folder)
    metas = {}
    for where in (str(folder), "s3://data"):
        sources = {
            "lines": {"root": f"{where}/pictures", "annotation": f"{where}/a.jsonl"},
            "shards": {"shards": f"{where}/train-{{000..005}}.tar"},
        }
        metas[where] = tmp_path / f"{len(metas)}.json"
        metas[where].write_text(json.dumps(sources))
    outputs = []
    engine = ("--engine", "ray") if find_spec("ray") else ("--processes", 1)
    for meta, where in zip(metas.values(), (("--processes", 1), engine), strict=True):
        outputs.append(meta.with_suffix(".parquet"))
        done = command(
            meta, "--tokenizer-model", digits / "tokenizer.model", "-o", outputs[-1],
            *where, **server.environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert outputs[0].read_bytes() == outputs[1].read_bytes()


@needs_s3
def test_a_bucket_without_credentials(digits, tmp_path):
    """Prevents a traceback of forty frames, or a wait for the metadata of a cloud's machine."""
    nothing = {"AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path)}
    done = command(
        "s3://private/meta.json", "--tokenizer-model", digits / "tokenizer.model",
        "-o", tmp_path / "L.parquet", **nothing,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "s3://private/meta.json: cannot be read (Unable to locate credentials)" in done.stderr


def test_versions_follow_content_and_time(tmp_path):
    """Prevents a changed file from being read by the places of the old one."""
    path = tmp_path / "a"
    path.write_bytes(b"1")
    [before] = versions_of([path])
    os.utime(path, (1, 1))
    [touched] = versions_of([path])
    path.write_bytes(b"12")
    os.utime(path, (1, 1))
    assert len({before, touched, *versions_of([path])}) == 3


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
    assert f"error: {option}: is a URL, by which only data is read" in failure(capsys, command)
    assert not list(tmp_path.iterdir())
