"""Positions of records in a dataset's files, in a resumable log keyed by path and version."""

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from omnibal.base.errors import UserError
from omnibal.base.record_log import RecordLog
from omnibal.base.remote_path import versions_of
from omnibal.base.worker_pool import LocalPool, Pool
from omnibal.data.parquet_rows import index_rows
from omnibal.data.record_files import RecordIndex, index_array, index_lines
from omnibal.data.tar_shards import Shard, index_shard

# Starts a progress display (title, total) and yields its update function.
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]

_TITLE, _FORM = b"omnibal data index ", b"1"
_INDEX_NOUN = "an index of `omnibal lengths`, which keeps there where samples are"
_ENTRY_HEAD = struct.Struct("<IQ")

Holds = Literal["lines", "array", "rows", "shard"]  # format of a file with records


@contextmanager
def _show_nothing(title: str, total: int) -> Iterator[Callable[[int], None]]:
    yield lambda done: None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DataIndex:
    """Positions of files' records, from an earlier run or by reading the files."""

    log: RecordLog | None = None  # appended to when a file is read, if any
    known: dict[bytes, memoryview] = field(default_factory=dict)  # known indexes by file key
    complete: Path | None = None  # index that must have all files, if none may be read
    pool: Pool = field(default_factory=LocalPool)  # workers that read files
    progress: Progress = _show_nothing

    @classmethod
    def resume(cls, path: Path, pool: Pool, progress: Progress = _show_nothing) -> "DataIndex":
        log = RecordLog(path, _TITLE, _FORM)
        records, _ = log.read(_INDEX_NOUN)
        log.begin(records)
        return cls(log=log, known=_split_keys(records), pool=pool, progress=progress)

    @classmethod
    def open_complete(cls, path: Path) -> "DataIndex":
        """Open an index that must have all files, so that none is read. Raises UserError."""
        if not path.is_file():
            raise UserError(f"{path}: no such index; name that of `omnibal lengths --data-index`")
        records, _ = RecordLog(path, _TITLE, _FORM).read(_INDEX_NOUN)
        return cls(known=_split_keys(records), complete=path)

    def find_records(self, files: Sequence[Shard], holds: Holds) -> list[RecordIndex]:
        """Return positions by file. Raises OSError or UserError, as if `complete` lacks a file."""
        indexes: dict[int, RecordIndex] = {}
        try:
            versions = versions_of([file.path for file in files]) if self.known else []
        except OSError:
            if self.complete is not None:
                raise
            versions = []  # reading reports it
        for number, version in enumerate(versions):
            key = _hash_file(files[number], holds, version)
            if key in self.known:
                indexes[number] = _decode_index(self.known[key], files[number].path, version)
        left = [(number, file, holds) for number, file in enumerate(files) if number not in indexes]
        if left and self.complete is not None:
            raise UserError(
                f"{self.complete}: knows nothing of {left[0][1].path} as it is now"
                f"{f', nor of {len(left) - 1} more files' if left[1:] else ''}; run `omnibal "
                "lengths` on this data with --data-index"
            )
        title = "finding samples, by files"
        with (
            (self.progress if len(left) > 1 else _show_nothing)(title, len(left)) as advance,
            closing(self.pool.map_unordered(_index_file, left, len(left))) as results,
        ):
            for number, index in results:
                indexes[number] = index
                if self.log is not None:
                    key = _hash_file(files[number], holds, index.version)
                    self.log.append(key + _encode_index(index))
                advance(1)
        return [indexes[number] for number in range(len(files))]


def _index_file(task: tuple[int, Shard, Holds]) -> tuple[int, RecordIndex]:
    """Return a file's number and the positions of its records, from reading it."""
    number, file, holds = task
    if holds == "shard":
        return number, index_shard(file)
    readers = {"lines": index_lines, "array": index_array, "rows": index_rows}
    return number, readers[holds](file.path)


def _hash_file(file: Shard, holds: Holds, version: str) -> bytes:
    """Return the SHA-256 of all inputs of a file's index: path, version, format and shard."""
    of_shard = (file.samples, sorted(file.excluded)) if holds == "shard" else ()
    inputs = (str(file.path.absolute()), version, holds, *of_shard)
    return hashlib.sha256(json.dumps(inputs).encode()).digest()


def _split_keys(records: Sequence[memoryview]) -> dict[bytes, memoryview]:
    size = hashlib.sha256().digest_size
    return {bytes(record[:size]): record[size:] for record in records}


def _encode_index(index: RecordIndex) -> bytes:
    head = _ENTRY_HEAD.pack(len(index.digest), len(index))
    return head + index.digest + index.start.tobytes() + index.size.tobytes()


def _decode_index(record: memoryview, path: Path, version: str) -> RecordIndex:
    digest_bytes, records = _ENTRY_HEAD.unpack_from(record)
    content = record[_ENTRY_HEAD.size :]
    start, size = np.frombuffer(content[digest_bytes:], np.int64).reshape(2, records)
    return RecordIndex(path, version, start, size, bytes(content[:digest_bytes]))
