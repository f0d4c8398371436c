"""Record positions of a dataset's files, in a resumable log keyed by path and version."""

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

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Starts a progress display (title, total) and yields its update function."""

_TITLE, _FORM = b"omnibal data index ", b"1"
_NAMED = "an index of `omnibal lengths`, which keeps there where samples are"
_SIZES = struct.Struct("<IQ")


Holds = Literal["lines", "array", "rows", "shard"]


@dataclass(frozen=True, slots=True)
class DataFile:
    """File with records and its format."""

    path: Path
    holds: Holds
    shard: Shard | None = None
    """Shard details."""

    def index(self) -> RecordIndex:
        """Read the file to find its records; raises UserError."""
        if self.shard is not None:
            return index_shard(self.shard)
        found = {"lines": index_lines, "array": index_array, "rows": index_rows}
        return found[self.holds](self.path)

    def key(self, version: str) -> bytes:
        """Hash of all inputs of the index."""
        known = () if self.shard is None else (self.shard.samples, sorted(self.shard.excluded))
        given = (str(self.path.absolute()), version, self.holds, *known)
        return hashlib.sha256(json.dumps(given).encode()).digest()


@contextmanager
def _silent(title: str, total: int) -> Iterator[Callable[[int], None]]:
    yield lambda done: None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DataIndex:
    """Finds the records of files."""

    log: RecordLog | None = None
    """Log to write to, if any."""
    known: dict[bytes, memoryview] = field(default_factory=dict)
    """Known indexes by file key."""
    complete: Path | None = None
    """Complete index that forbids reading files, if any."""
    pool: Pool = field(default_factory=LocalPool)
    """Pool that reads files."""
    progress: Progress = _silent

    @classmethod
    def resume(cls, path: Path, pool: Pool, progress: Progress = _silent) -> "DataIndex":
        """Open an index for writing and keep its records."""
        log = RecordLog(path, _TITLE, _FORM)
        records, _ = log.read(_NAMED)
        log.begin(records)
        return cls(log=log, known=_by_key(records), pool=pool, progress=progress)

    @classmethod
    def read(cls, path: Path) -> "DataIndex":
        """Open a complete index, to read no data files."""
        if not path.is_file():
            raise UserError(
                f"{path}: no such index; name the file that `omnibal lengths --data-index` wrote"
            )
        records, _ = RecordLog(path, _TITLE, _FORM).read(_NAMED)
        return cls(known=_by_key(records), complete=path)

    def find_records(self, files: Sequence[DataFile]) -> list[RecordIndex]:
        """Records of every file; raises OSError if unreadable."""
        found = self._known_indexes(files) if self.known else {}
        left = [number for number in range(len(files)) if number not in found]
        if left and self.complete is not None:
            raise UserError(
                f"{self.complete}: knows nothing of {files[left[0]].path} as it is now"
                f"{f', nor of {len(left) - 1} more files' if left[1:] else ''}; run `omnibal "
                "lengths` on this data with --data-index"
            )
        tasks = [(number, files[number]) for number in left]
        title = "finding samples, by files"
        with (
            (self.progress if len(left) > 1 else _silent)(title, len(left)) as advance,
            closing(self.pool.map_unordered(_index, tasks, len(left))) as results,
        ):
            for number, index in results:
                found[number] = index
                if self.log is not None:
                    key = files[number].key(index.version)
                    self.log.append(key + _encode(index))
                advance(1)
        return [found[number] for number in range(len(files))]

    def _known_indexes(self, files: Sequence[DataFile]) -> dict[int, RecordIndex]:
        """Known indexes of unchanged files, by file number."""
        try:
            versions = versions_of([file.path for file in files])
        except OSError:
            return {}  # reading the files reports the missing file
        keys = [file.key(version) for file, version in zip(files, versions, strict=True)]
        return {
            number: _decode(self.known[key], files[number].path, versions[number])
            for number, key in enumerate(keys)
            if key in self.known
        }


def _index(task: tuple[int, DataFile]) -> tuple[int, RecordIndex]:
    number, file = task
    return number, file.index()


def _by_key(records: Sequence[memoryview]) -> dict[bytes, memoryview]:
    size = hashlib.sha256().digest_size
    return {bytes(record[:size]): record[size:] for record in records}


def _encode(index: RecordIndex) -> bytes:
    digest = index.digest
    numbers = _SIZES.pack(len(digest), len(index))
    return numbers + digest + index.start.tobytes() + index.size.tobytes()


def _decode(record: memoryview, path: Path, version: str) -> RecordIndex:
    digest_bytes, records = _SIZES.unpack_from(record)
    digest = record[_SIZES.size :][:digest_bytes]
    start, size = np.frombuffer(record[_SIZES.size + digest_bytes :], np.int64).reshape(2, records)
    return RecordIndex(path, version, start, size, bytes(digest))
