"""Row selection in dataclasses of arrays."""

from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def expand_ranges(first: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return row and value of every integer of `number` [rows] integers from `first` [rows] on."""
    row, before = np.repeat(np.arange(len(number)), number), np.cumsum(number) - number
    return row, np.arange(len(row)) + np.repeat(first - before, number)


def rows_of(table: T, rows: Any, *without: str) -> T:
    """Return a dataclass with `rows` (mask, indices or slice) of its array fields.

    Fields in `without` keep all rows.
    """
    source: Any = table
    arrays = {
        field.name: value[rows]
        for field in fields(source)
        if isinstance(value := getattr(source, field.name), np.ndarray)
        and field.name not in without
    }
    return replace(source, **arrays)  # type: ignore[no-any-return]
