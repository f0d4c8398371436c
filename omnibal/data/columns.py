"""Typed reading of Parquet files, a column at a time."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnibal.base.errors import UserError
from omnibal.base.files import check_ends


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Columns of a Parquet file, read on access; errors name the file and the remedy."""

    schema: pa.Schema
    path: Path
    remedy: str

    @classmethod
    def open(cls, path: Path, names: Sequence[str], remedy: str) -> "Columns":
        """Return a file's columns. Raise UserError unless it has each of `names` once."""
        check_ends(path, remedy)
        with _convert_read_errors(path, remedy), pq.ParquetFile(path) as file:
            schema = file.schema_arrow
        columns = cls(schema, path, remedy)
        columns.require(names)
        return columns

    def _column(self, name: str) -> pa.ChunkedArray:
        with _convert_read_errors(self.path, self.remedy), pq.ParquetFile(self.path) as file:
            return file.read(columns=[name]).column(name)

    def require(self, names: Iterable[str]) -> None:
        """Raise if a column is missing or duplicate."""
        wrong = [name for name in names if self.schema.names.count(name) != 1]
        if wrong:
            raise UserError(
                f"{self.path}: must have the column(s) {', '.join(wrong)} once; {self.remedy}"
            )

    def once(self, names: Sequence[str]) -> list[str]:
        """Return the `names` that the file has. Raise UserError if one is duplicate."""
        present = [name for name in names if name in self.schema.names]
        self.require(present)
        return present

    def integers(self, name: str, kind: pa.DataType) -> np.ndarray:
        """Read an integer column as `kind`, [rows]. Raise on nulls and values that do not fit."""
        column = self._column(name)
        self._require(name, pa.types.is_integer(column.type), "integers", column.null_count)
        return self._cast(name, column, kind).to_numpy()

    def integer_lists(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Read a column of integer lists: concatenated entries and list sizes, both int64."""
        column = self._column(name)
        kind = column.type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        fits = is_list and pa.types.is_integer(kind.value_type)
        nulls = column.null_count + (pc.list_flatten(column).null_count if fits else 0)
        self._require(name, fits, "lists of integers", nulls)
        lists = self._cast(name, column, pa.large_list(pa.int64()))
        return pc.list_flatten(lists).to_numpy(), pc.list_value_length(lists).to_numpy()

    def categories(self, name: str) -> tuple[np.ndarray, tuple[str, ...]]:
        """Read a string column: codes, int32 [rows], and the distinct strings they index."""
        column = self._column(name).combine_chunks()
        if not pa.types.is_dictionary(column.type):
            column = column.dictionary_encode()
        kind = column.type.value_type
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        nulls = column.null_count + column.dictionary.null_count
        self._require(name, is_text, "strings", nulls)
        return column.indices.to_numpy().astype(np.int32), tuple(column.dictionary.to_pylist())

    def _cast(self, name: str, column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
        try:
            return column.cast(kind)
        except pa.ArrowInvalid as error:
            raise UserError(f"{self.path}: column {name}: {error}; {self.remedy}") from error

    def _require(self, name: str, fits: bool, wanted: str, nulls: int) -> None:
        if not fits or nulls:
            given = f"{self.schema.field(name).type}{' with nulls' if nulls else ''}"
            raise UserError(
                f"{self.path}: column {name} holds {given}, not non-null {wanted}; {self.remedy}"
            )


@contextmanager
def _convert_read_errors(path: Path, remedy: str) -> Iterator[None]:
    """Raise read errors as user errors of one line."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; {remedy}") from error
    except (pa.ArrowException, OSError, UnicodeError) as error:
        raise UserError(f"{path}: not a Parquet file ({error}); {remedy}") from error


def no_items(count: int) -> np.ndarray:
    """Return read-only zeros, int32 [count], for an item feature without a column."""
    return np.broadcast_to(np.int32(0), count)
