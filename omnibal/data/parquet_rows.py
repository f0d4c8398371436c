"""Samples in Parquet rows, as in Hugging Face datasets.

Images and recordings are named as in any record, or stored in the columns `image(s)` and `audio(s)`
as bytes or `{"bytes", "path"}`, alone or in a list. To read a row, its row group is read.
"""

import hashlib
import io
import json
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omnibal.base.errors import UserError
from omnibal.base.remote_path import version_of
from omnibal.data.messages import InvalidRecordError, Medium
from omnibal.data.record_files import RecordIndex
from omnibal.data.records import RecordMedia
from omnibal.data.stored_files import AudioFile, ImageFile, StoredFile

# File type, and columns that may store bytes, by medium.
_STORED_COLUMNS: dict[Medium, tuple[type[StoredFile], tuple[str, ...]]] = {
    "image": (ImageFile, ("image", "images")),
    "audio": (AudioFile, ("audio", "audios")),
}
_CACHED_GROUPS = 2  # row groups: ordered reads pass from a group to the next
_CACHED_FILES = 256  # files whose row-group offsets are cached


@dataclass(frozen=True, slots=True)
class RowPlace:  # a row of a file
    path: Path
    version: str  # changes with the file
    number: int  # row in the file, from 0

    def values(self) -> dict[str, Any]:
        """Return the row's non-null values by column; raises OSError and UserError."""
        try:
            first = _read_first_rows(self.path, self.version)
            group = int(np.searchsorted(first, self.number, side="right")) - 1
            rows = _read_group(self.path, self.version, group)
            (row,) = rows.slice(self.number - int(first[group]), 1).to_pylist()
        except (pa.ArrowException, ValueError, IndexError) as error:
            raise _unreadable_error(self.path, error) from error
        return {name: value for name, value in row.items() if value is not None}


@dataclass(frozen=True, slots=True)
class ParquetRow(RecordMedia):
    """Record of a row, whose media are stored in it or named."""

    place: RowPlace
    values: dict[str, Any]
    folder: RecordMedia  # resolves named media

    @property
    def holds_files(self) -> bool:
        return any(_stores_files(name, value) for name, value in self.values.items())

    def record(self) -> bytes:
        """Return the columns that store no files, as JSON; raises InvalidRecordError."""
        columns = {
            name: _simplify(value)
            for name, value in self.values.items()
            if not _stores_files(name, value)
        }
        try:
            return json.dumps(columns, default=str).encode()
        except (TypeError, ValueError) as error:
            raise InvalidRecordError(f"cannot be a record ({error})") from error

    def find(self, medium: Medium, name: str) -> Any:
        return self.folder.find(medium, name)

    def list_unnamed(self, medium: Medium) -> tuple[Any, ...]:
        kind, columns = _STORED_COLUMNS.get(medium, (ImageFile, ()))
        count = len(_list_contents(self.values, columns))
        row, name = self.place, f"row {self.place.number + 1}, {medium}"
        return tuple(
            kind(row.path, f"{name} {at + 1}", opener=partial(_open_content, row, columns, at))
            for at in range(count)
        )


def is_rows(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def index_rows(path: Path) -> RecordIndex:
    """Return a file's hash and rows: `start` is the row number, `size` 1; raises UserError."""
    if not path.is_file():
        raise UserError(f"{path}: no such Parquet file; correct the path in the meta")
    version = version_of(path)
    try:
        rows = int(_read_first_rows(path, version)[-1])
    except (pa.ArrowException, ValueError) as error:
        raise _unreadable_error(path, error) from error
    if not rows:
        raise UserError(f"{path}: has no row; it must hold at least one sample")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    ones = np.ones(rows, np.int64)
    return RecordIndex(path, version, np.arange(rows), ones, digest.digest())


@lru_cache(maxsize=_CACHED_FILES)
def _read_first_rows(path: Path, version: str) -> np.ndarray:
    """Return the first row of each row group, then the number of rows, int64 [groups + 1]."""
    with path.open("rb") as file:
        metadata = pq.ParquetFile(file).metadata
    rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    return np.cumsum([0, *rows], dtype=np.int64)


@lru_cache(maxsize=_CACHED_GROUPS)
def _read_group(path: Path, version: str, group: int) -> pa.Table:
    # Single-threaded: there are many reader processes, and a fork has no pool threads.
    with path.open("rb") as file:
        return pq.ParquetFile(file).read_row_group(group, use_threads=False)


def _open_content(row: RowPlace, columns: tuple[str, ...], index: int) -> BinaryIO:
    """Read a row again, and open a file stored in `columns`; raises OSError and UserError."""
    return io.BytesIO(_list_contents(row.values(), columns)[index])


def _list_contents(values: dict[str, Any], columns: tuple[str, ...]) -> list[bytes]:
    stored = [value for name, value in values.items() if name in columns]
    return [content for value in stored for content in _split_contents(value)]


def _split_contents(value: Any) -> list[bytes]:
    """Return the files' bytes in a column's value, which is a single file or a list."""
    parts = value if isinstance(value, list) else [value]
    contents = (part.get("bytes") if isinstance(part, dict) else part for part in parts)
    return [content for content in contents if isinstance(content, bytes)]


def _stores_files(column: str, value: Any) -> bool:
    """Return whether a value stores files; raises InvalidRecordError if it also names files."""
    if not any(column in columns for _, columns in _STORED_COLUMNS.values()):
        return False
    count = len(_split_contents(value))
    if count and count != len(value if isinstance(value, list) else [value]):
        raise InvalidRecordError("has some of its files inside, and names others; it must do one")
    return bool(count)


def _simplify(value: Any) -> Any:
    """Return a value for JSON: `{"bytes", "path"}` as the path, bytes as their length."""
    # Arrow gives every struct of a list the keys of all, so nulls are dropped.
    if isinstance(value, list):
        return [_simplify(item) for item in value]
    if not isinstance(value, dict):
        return {"bytes": len(value)} if isinstance(value, bytes) else value
    fields = {name: _simplify(item) for name, item in value.items() if item is not None}
    return fields["path"] if value.keys() == {"bytes", "path"} and "path" in fields else fields


def _unreadable_error(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: cannot be read as Parquet ({error}); restore the file")
