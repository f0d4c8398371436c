"""Row selection in dataclasses of arrays."""

from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def expand_ranges(first: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the row and the value of every integer of ranges of `number` integers [rows] from
    `first` [rows] on.

    Example:
        >>> [found.tolist() for found in expand_ranges(np.array([4, 0]), np.array([2, 3]))]
        [[0, 0, 1, 1, 1], [4, 5, 0, 1, 2]]
    """
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
