"""Row selection in dataclasses of arrays."""

from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


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
