"""Tables: dataclasses whose fields are arrays with a row for each of something."""

from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def rows_of(table: T, picked: Any, *without: str) -> T:
    """Return a table with some rows of every array, but for fields `without` such rows.

    Args:
        picked: index of the first axis: a mask, indices or a slice.
    """
    whole: Any = table
    arrays = {
        field.name: value[picked]
        for field in fields(whole)
        if isinstance(value := getattr(whole, field.name), np.ndarray) and field.name not in without
    }
    return replace(whole, **arrays)  # type: ignore[no-any-return]
