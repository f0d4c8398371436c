"""Samples that are Parquet rows, as in Hugging Face datasets.

Images and recordings are named as in any record, or stored as bytes or `{"bytes", "path"}`, alone
or in a list, in the columns `image(s)` and `audio(s)`. Random access reads a whole row group.
"""

import hashlib
import io
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omnibal.base.errors import UserError
from omnibal.base.remote_path import version_of
from omnibal.data.messages import InvalidRecordError, Medium
from omnibal.data.record_files import RecordIndex
from omnibal.data.records import Media
from omnibal.data.stored_files import AudioFile, ImageFile, StoredFile

_INSIDE: dict[Medium, tuple[type[StoredFile], tuple[str, ...]]] = {
    "image": (ImageFile, ("image", "images")),
    "audio": (AudioFile, ("audio", "audios")),
}
"""File types and columns with stored bytes, by medium."""
_GROUPS = 2  # cached row groups: ordered reads cross from a group to the next
_FILES = 256  # with cached row-group offsets


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Row of a file at a version."""

    path: Path
    version: str
    """Changes with the file."""
    number: int
    """Row number, from 0."""

    def values(self) -> dict[str, Any]:
        """Columns with a value."""
        try:
            first = _first_rows(self.path, self.version)
            group = int(np.searchsorted(first, self.number, side="right")) - 1
            rows = _group(self.path, self.version, group)
            (row,) = rows.slice(self.number - int(first[group]), 1).to_pylist()
        except (pa.ArrowException, ValueError, IndexError) as error:
            raise _broken(self.path, error) from error
        return {name: value for name, value in row.items() if value is not None}


@dataclass(frozen=True, slots=True)
class HeldContent:
    """File stored in a row."""

    place: RowPlace
    columns: tuple[str, ...]
    index: int

    def __str__(self) -> str:
        return f"row {self.place.number + 1}, {self.columns[0]} {self.index + 1}"

    def __call__(self) -> BinaryIO:
        """Read the row and open its bytes; raises OSError and UserError."""
        return io.BytesIO(_contents(self.place.values(), self.columns)[self.index])


@dataclass(frozen=True, slots=True)
class Row(Media):
    """Record of a row, with stored or named media."""

    place: RowPlace
    values: dict[str, Any]
    folder: Media
    """Resolves named media."""

    @property
    def holds_files(self) -> bool:
        """Whether media are stored in the row."""
        return any(
            _stores_files(value) for name, value in self.values.items() if _is_of_files(name)
        )

    def record(self) -> bytes:
        """JSON of all columns without stored files; unknown bytes are a key "bytes"."""
        shown = {
            name: _plain(value)
            for name, value in self.values.items()
            if not (_is_of_files(name) and _stores_files(value))
        }
        try:
            return json.dumps(shown, default=str).encode()
        except (TypeError, ValueError) as error:
            raise InvalidRecordError(f"cannot be a record ({error})") from error

    def find(self, medium: Medium, name: str) -> Any:
        """Return a file of the folder."""
        return self.folder.find(medium, name)

    def list_unnamed(self, medium: Medium) -> tuple[Any, ...]:
        """Return the files that are stored in the row."""
        kind, columns = _INSIDE.get(medium, (ImageFile, ()))
        held = [
            HeldContent(self.place, columns, index)
            for index in range(len(_contents(self.values, columns)))
        ]
        return tuple(kind(self.place.path, str(content), opener=content) for content in held)


def is_rows(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def index_rows(path: Path) -> RecordIndex:
    """Number the rows and hash the file; `start` is the row number, `size` 1."""
    if not path.is_file():
        raise UserError(f"{path}: no such Parquet file; correct the path in the meta")
    version = version_of(path)
    try:
        rows = int(_first_rows(path, version)[-1])
    except (pa.ArrowException, ValueError) as error:
        raise _broken(path, error) from error
    if not rows:
        raise UserError(f"{path}: has no row; it must hold at least one sample")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    ones = np.ones(rows, np.int64)
    return RecordIndex(path, version, np.arange(rows), ones, digest.digest())


@lru_cache(maxsize=_FILES)
def _first_rows(path: Path, version: str) -> np.ndarray:
    """First row of each row group and the total, int64."""
    with path.open("rb") as file:
        found = pq.ParquetFile(file).metadata
    rows = [found.row_group(group).num_rows for group in range(found.num_row_groups)]
    return np.cumsum([0, *rows], dtype=np.int64)


@lru_cache(maxsize=_GROUPS)
def _group(path: Path, version: str, group: int) -> pa.Table:
    # Single-threaded: there are many reader processes, and forks lose threads.
    with path.open("rb") as file:
        return pq.ParquetFile(file).read_row_group(group, use_threads=False)


def _is_of_files(column: str) -> bool:
    return any(column in columns for _, columns in _INSIDE.values())


def _contents(values: dict[str, Any], columns: tuple[str, ...]) -> list[bytes]:
    return [
        held
        for name, value in values.items()
        if name in columns
        for held in _stored_contents(value)
    ]


def _stored_contents(value: Any) -> list[bytes]:
    """Stored file contents in a value: a single file or a list."""
    parts = value if isinstance(value, list) else [value]
    contents = (part.get("bytes") if isinstance(part, dict) else part for part in parts)
    return [content for content in contents if isinstance(content, bytes)]


def _stores_files(value: Any) -> bool:
    """Whether a value stores files; raises InvalidRecordError if it also names files."""
    held = len(_stored_contents(value))
    if held and held != len(value if isinstance(value, list) else [value]):
        raise InvalidRecordError("has some of its files inside, and names others; it must do one")
    return bool(held)


def _plain(value: Any) -> Any:
    """Value without the null keys Arrow adds to lists of structs. A named file becomes its path."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return {"bytes": len(value)} if isinstance(value, bytes) else value
    given = {name: _plain(each) for name, each in value.items() if each is not None}
    return given["path"] if value.keys() == {"bytes", "path"} and "path" in given else given


def _broken(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: cannot be read as Parquet ({error}); restore the file")
