"""Samples in tar shards (webdataset, Megatron-Energon): a sample is all files of a key.

    000017.json   the record, as in JSONL
    000017.jpg    or 000017.0.jpg, 000017.1.jpg, ...: images
    000017.wav    or 000017.0.wav, 000017.1.wav, ..., or FLAC: recordings
    000017.mp4    or 000017.0.mp4, ...: videos, if there is no image

Shards are indexed by the libraries' own rules, then read by seek. Both libraries import torch, so
they are imported only if shards are used. `energon prepare` writes an index, which is used if it
has files (read in Energon 7.4.1, flavors/webdataset: itar.py, indexing.py, prepare.py):

    NAME.tar.idx            uint64: first byte of every sample, then the end of the last
    .nv-meta/index.sqlite   key of every sample; name, offset and size of its files
"""

import hashlib
import json
import re
import sqlite3
import tarfile
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import numpy as np

from omnibal.base.block_cache import BlockCache
from omnibal.base.errors import UserError
from omnibal.base.remote_path import RemotePath, named_from, version_of
from omnibal.data import stored_files
from omnibal.data.messages import InvalidRecordError, Medium
from omnibal.data.record_files import RecordIndex
from omnibal.data.records import RecordMedia
from omnibal.data.sample import Video

_RECORD = "json"
# Members and folders named __like_this__, which both libraries skip.
_SKIPPED_MEMBER = re.compile(r"__[^/]*__($|/)")
_CHECK_BYTES = 1 << 20
_MAX_SHARDS = 1_000_000  # of a source
_INNERMOST_BRACES = re.compile(r"\{([^{}]*)\}")
_NUMBER_RANGE = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)(?:\.\.-?[0-9]+)?")
_LETTER_RANGE = 58  # from A to z
_MAX_DIGITS = 18  # digits of a range's limits that are read: enough to see that it is too large
_ENERGON_FILES = (".info.json", ".info.yaml", "split.yaml", "split.json")
_META_FOLDER = ".nv-meta"
_INFO, _DATABASE = ".info.json", "index.sqlite"
_FILES_OF_SHARD = (
    "SELECT s.sample_key, s.byte_offset, p.part_name, p.content_byte_offset, p.content_byte_size "
    "FROM samples s JOIN sample_parts p USING (tar_file_id, sample_index) WHERE tar_file_id = ? "
    "ORDER BY sample_index, p.content_byte_offset"
)
_TAR_BLOCK = 512  # tar block size in bytes

# Type and suffixes of each medium's files.
_FILE_KINDS: dict[Medium, tuple[type[stored_files.StoredFile], frozenset[str]]] = {
    "image": (stored_files.ImageFile, stored_files.IMAGE_SUFFIXES),
    "video": (stored_files.VideoFile, stored_files.VIDEO_SUFFIXES),
    "audio": (stored_files.AudioFile, stored_files.AUDIO_SUFFIXES),
}


@dataclass(frozen=True, slots=True)
class Member:
    """File in a shard."""

    name: str
    header: int  # byte offset of its tar header; in Energon's index, of its sample
    offset: int
    size: int

    @property
    def end(self) -> int:
        """Byte offset after its last tar block."""
        return self.offset + -(-self.size // _TAR_BLOCK) * _TAR_BLOCK

    @property
    def suffix(self) -> str:
        """Name after the key and its dot, such as json or 0.jpg, empty without a key."""
        stem, _, suffix = self.name.rpartition("/")[2].partition(".")
        return suffix.lower() if stem else ""


@dataclass(frozen=True, slots=True)
class EnergonIndex:
    database: Path
    number: int  # shard number in the dataset

    def read_samples(self, shard: Path) -> tuple[list[tuple[str, list[Member]]], int]:
        """Return key and members of each sample, not compared with the tar, and their end."""
        offsets = shard.with_suffix(".tar.idx")
        try:
            borders = np.frombuffer(offsets.read_bytes(), "<u8").tolist()
            with _open_database(self.database) as database:
                rows = database.execute(_FILES_OF_SHARD, (self.number,))
                samples = [
                    (key, [Member(f"{key}.{suffix}", start, *at) for _, _, suffix, *at in files])
                    for (key, start), files in groupby(rows, key=lambda row: row[:2])
                ]
        except (OSError, ValueError, sqlite3.Error) as error:
            raise UserError(
                f"{offsets}, {self.database}: cannot be read ({error}); run `energon prepare` again"
            ) from error
        if not borders or borders[:-1] != [members[0].header for _, members in samples]:
            raise stale_error(shard, "its .tar.idx has samples at other places than index.sqlite")
        return samples, borders[-1]


def _open_database(database: Path) -> closing[sqlite3.Connection]:
    # Read-only and immutable: locks are slow or missing on network file systems.
    name = f"{database.absolute().as_uri()}?mode=ro&immutable=1"
    return closing(sqlite3.connect(name, uri=True))


@dataclass(frozen=True, slots=True)
class Shard:
    """Tar file, and what Energon's metadata say of it."""

    path: Path
    samples: int | None = None  # number that Energon counted, or None
    excluded: frozenset[str] = frozenset()  # keys of excluded samples
    listed: EnergonIndex | None = None  # Energon's index of its samples, if any


@dataclass(frozen=True, slots=True)
class ShardSample(RecordMedia):
    """Members of a sample, at least 1."""

    shard: Path
    members: tuple[Member, ...]

    @property
    def key(self) -> str:
        """Common prefix of the member names."""
        name = self.members[0].name
        return name[: len(name) - len(self.members[0].suffix) - 1]

    def record(self) -> bytes:
        """Read the JSON record; raises InvalidRecordError if absent."""
        record = next((member for member in self.members if member.suffix == _RECORD), None)
        if record is None:
            raise InvalidRecordError(f"has no {self.key}.{_RECORD}, its conversations; add it")
        with stored_files.open_range(self.shard, record.offset, record.size) as file:
            return file.read()

    def find(self, medium: Medium, name: str) -> Any:
        """Return a file by full name, base name or suffix; raises InvalidRecordError."""
        if medium == "video" and not stored_files.is_video_file(name):
            raise InvalidRecordError(
                f'has the "video" {name!r}; it must be a member with a video, or a list of frames'
            )
        for member in self.members:
            if name in (member.name, PurePath(member.name).name, member.suffix):
                return self._file(medium, member)
        members = ", ".join(member.name for member in self.members)
        raise InvalidRecordError(
            f"names {name!r}, but the members of its key are {members}; name these, or none for all"
        )

    def list_unnamed(self, medium: Medium) -> tuple[Any, ...]:
        """Return the members of a medium, 2.jpg before 10.jpg; no videos if there is an image."""
        if medium == "video" and self.list_unnamed("image"):
            return ()
        suffixes = _FILE_KINDS[medium][1]
        members = [m for m in self.members if PurePath(m.name).suffix.lower() in suffixes]
        members.sort(key=lambda member: stored_files.natural_order(PurePath(member.suffix).stem))
        return tuple(self._file(medium, member) for member in members)

    def _file(self, medium: Medium, member: Member) -> Any:
        file = _FILE_KINDS[medium][0](self.shard, member.name, member.offset, member.size)
        return Video(file=file) if isinstance(file, stored_files.VideoFile) else file


def webdataset_shards(notation: str, folder: Path, cache: BlockCache | None = None) -> list[Shard]:
    """Return the shards of a notation such as train-{000..003}.tar, relative to `folder`."""
    expand_urls = _import_library("webdataset.shardlists", "webdataset").expand_urls
    if (count := _bound_shards(notation)) > _MAX_SHARDS:
        raise UserError(
            f'"shards": {notation!r} expands to {count:,} names, above {_MAX_SHARDS:,}; name fewer'
        )
    try:
        names = expand_urls(notation)
    except (ValueError, AssertionError) as error:  # including unset environment variables
        raise UserError(f'"shards": {notation!r} cannot be expanded ({error})') from error
    return [Shard(named_from(folder, name, cache)) for name in names]


def _bound_shards(notation: str) -> int:
    """Return an upper bound on the names that braces, innermost first, expand to."""
    count = 1
    while (braces := _INNERMOST_BRACES.search(notation)) is not None:
        limits = _NUMBER_RANGE.fullmatch(braces[1])
        if limits is not None:
            count *= abs(int(limits[1][:_MAX_DIGITS]) - int(limits[2][:_MAX_DIGITS])) + 1
        else:
            count *= _LETTER_RANGE if ".." in braces[1] else braces[1].count(",") + 1
        notation = notation[: braces.start()] + notation[braces.end() :]
    return count


def energon_shards(folder: Path, split: str) -> list[Shard]:
    """Return the shards of a split that `energon prepare` prepared."""
    paths = _import_library("megatron.energon.epathlib", "energon")
    metadata = _import_library("megatron.energon.flavors.webdataset.metadata", "energon")
    try:
        with _copy_energon_meta(folder) as local:
            meta = metadata.WebdatasetMeta.from_config(paths.EPath(local), split_part=split)
    except UserError:
        raise
    except Exception as error:  # JSON and YAML errors have no common type
        raise UserError(
            f"{folder}: Energon finds no split {split!r} there ({type(error).__name__}: {error}); "
            "prepare the dataset with `energon prepare`, or correct the path or the split"
        ) from error
    indexes = energon_indexes(folder, [shard.name for shard in meta.shards])
    return [
        Shard(
            folder / shard.name,
            shard.count,
            # Energon names a sample "shard/key".
            frozenset(
                name.removeprefix(f"{shard.name}/")
                for name in meta.sample_excludes
                if name.startswith(f"{shard.name}/")
            ),
            listed,
        )
        for shard, listed in zip(meta.shards, indexes, strict=True)
    ]


def energon_indexes(folder: Path, shards: Sequence[str]) -> list[EnergonIndex | None]:
    """Return Energon's index of each shard, None if it lists no files or `folder` is remote."""
    nothing: list[EnergonIndex | None] = [None] * len(shards)
    database = folder / _META_FOLDER / _DATABASE
    if isinstance(folder, RemotePath) or not database.is_file():
        return nothing
    try:
        counts = json.loads((folder / _META_FOLDER / _INFO).read_text())["shard_counts"]
        with _open_database(database) as opened:
            opened.execute(f"{_FILES_OF_SHARD} LIMIT 1", (0,))
    except (OSError, ValueError, KeyError, sqlite3.Error):  # earlier versions
        return nothing
    numbers = {name: number for number, name in enumerate(counts)}
    return [
        EnergonIndex(database, numbers[name])
        if name in numbers and (folder / name).with_suffix(".tar.idx").is_file()
        else None
        for name in shards
    ]


def stale_error(shard: Path, why: str) -> UserError:
    return UserError(f"{shard}: differs from Energon's index ({why}); run `energon prepare` again")


@contextmanager
def _copy_energon_meta(folder: Path) -> Iterator[Path]:
    """Yield a local folder with Energon's shard and split metadata, copied if remote."""
    if not isinstance(folder, RemotePath):
        yield folder.absolute()
        return
    with tempfile.TemporaryDirectory() as name:
        local = Path(name) / _META_FOLDER
        local.mkdir()
        for file in _ENERGON_FILES:
            if (folder / _META_FOLDER / file).is_file():
                (local / file).write_bytes((folder / _META_FOLDER / file).read_bytes())
        yield Path(name)


def index_shard(shard: Shard) -> RecordIndex:
    """Return place and SHA-256 (of record, and other members' names and sizes) per sample."""
    start, size, digests = array("q"), array("q"), bytearray()
    path, keys = shard.path, set[str]()
    try:
        if not path.is_file():
            raise UserError(f"{path}: no such shard; correct the path in the meta, or fetch it")
        version = version_of(path)
        with path.open("rb") as file:
            for key, members in _iterate_samples(shard, file):
                if key in keys:
                    raise tarfile.ReadError(f"files of {key} are apart")
                keys.add(key)
                if key in shard.excluded:
                    continue
                start.append(members[0].header)
                size.append(members[-1].end - members[0].header)
                digest = hashlib.sha256()
                for member in members:
                    head = f"{member.name}\0{member.size}\0"
                    digest.update(head.encode(errors="surrogateescape"))
                    if member.suffix == _RECORD:
                        file.seek(member.offset)
                        digest.update(file.read(member.size))
                digests += digest.digest()
    except UserError:
        raise
    except (OSError, ValueError, tarfile.TarError) as error:
        # webdataset appends to the arguments of exceptions that pass through it.
        problem = error if isinstance(error, OSError) else error.args[0]
        raise UserError(
            f"{path}: cannot be read as a shard ({problem}); it must be a complete, plain tar"
        ) from error
    if shard.samples not in (None, len(keys)):
        raise UserError(f"{path}: {len(keys)} samples, not {shard.samples}; run `energon prepare`")
    return RecordIndex(
        path, version, np.array(start, np.int64), np.array(size, np.int64), bytes(digests)
    )


def _iterate_samples(shard: Shard, file: BinaryIO) -> Iterator[tuple[str, list[Member]]]:
    """Yield key and members of each sample, by Energon's index or grouped by webdataset."""
    if shard.listed is not None:
        yield from _list_samples(file, shard.path, shard.listed)
        return
    group_by_keys = _import_library("webdataset.tariterators", "webdataset").group_by_keys
    files = (
        {"fname": member.name, "data": member, "__url__": str(shard.path)}
        for member in _iterate_whole_tar(file)
    )
    for sample in group_by_keys(files):
        yield sample["__key__"], [part for part in sample.values() if isinstance(part, Member)]


def read_shard_sample(shard: Path, start: int, size: int) -> ShardSample:
    try:
        with stored_files.open_range(shard, start, size) as file:
            members = tuple(
                Member(member.name, start + member.header, start + member.offset, member.size)
                for member in _iterate_members(file)
                if member.suffix
            )
        if not members:
            raise tarfile.ReadError("no file of a sample there")
    except (OSError, tarfile.TarError) as error:
        raise UserError(f"{shard}: cannot be read at byte {start} ({error}); restore it") from error
    return ShardSample(shard, members)


def _list_samples(
    file: BinaryIO, path: Path, listed: EnergonIndex
) -> Iterator[tuple[str, list[Member]]]:
    """Yield key and members of each sample from Energon's index.

    Raise UserError if first or last sample, a record's header or the shard's end differ.
    """
    samples, end = listed.read_samples(path)
    for number, (key, members) in enumerate(samples):
        if number in (0, len(samples) - 1):
            start = members[0].header
            stored = read_shard_sample(path, start, members[-1].end - start).members
            if [(m.name, m.offset, m.size) for m in stored] != [
                (m.name, m.offset, m.size) for m in members
            ]:
                raise stale_error(path, f"it has no {members[0].name} at byte {start}")
        for member in members:
            if member.suffix == _RECORD:
                _check_tar_header(file, path, member)
        yield key, members
    file.seek(end)
    if _is_cut_off(file):
        raise stale_error(path, f"it does not end at byte {end}")


def _check_tar_header(file: BinaryIO, shard: Path, member: Member) -> None:
    """Raise UserError unless the tar header before a member is valid and has its size."""
    file.seek(member.offset - _TAR_BLOCK)
    # Parsed by hand: tarfile's parser takes a third of the total time.
    header = file.read(_TAR_BLOCK)
    size, checksum = (field.rstrip(b"\0 ") for field in (header[124:136], header[148:156]))
    is_header = size.isdigit() and checksum.strip().isdigit()
    total = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    if not is_header or int(checksum, 8) != total or int(size, 8) != member.size:
        raise stale_error(
            shard, f"it has no {member.name} of {member.size} bytes at {member.offset}"
        )


def _iterate_members(file: BinaryIO) -> Iterator[Member]:
    """Yield the members that both libraries read, and leave the file at their end."""
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for entry in tar:
            if not entry.isreg() or _SKIPPED_MEMBER.match(entry.name):
                continue
            if entry.issparse():
                raise tarfile.ReadError(f"{entry.name} is stored as a sparse file")
            yield Member(entry.name, entry.offset, entry.offset_data, entry.size)
        file.seek(tar.offset)


def _iterate_whole_tar(file: BinaryIO) -> Iterator[Member]:
    """Yield all members; raises tarfile.ReadError if truncated or followed by another tar."""
    yield from _iterate_members(file)
    place = file.tell()
    if _is_cut_off(file):
        raise tarfile.ReadError(f"cut off or damaged at byte {place}")


def _is_cut_off(file: BinaryIO) -> bool:
    """Return whether no block of zeros is next. Raise if anything but zeros follows it."""
    if file.read(_TAR_BLOCK) != bytes(_TAR_BLOCK):
        return True
    end = file.tell()
    while content := file.read(_CHECK_BYTES):
        if any(content):
            raise tarfile.ReadError(
                f"it goes on behind its end at byte {end}; use `tar --concatenate`, or name both"
            )
    return False


def _import_library(module: str, extra: str) -> Any:
    """Return a module of an optional library. Raise UserError if it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            f'shards are read with {extra} ({error}); install it: pip install "omnibal[{extra}]"'
        ) from error
