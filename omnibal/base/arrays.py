"""Dataclasses of arrays with equal rows."""

from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def rows_of(table: T, picked: Any, *without: str) -> T:
    """Select rows of every array field except `without`, by mask, indices or slice."""
    whole: Any = table
    arrays = {
        field.name: value[picked]
        for field in fields(whole)
        if isinstance(value := getattr(whole, field.name), np.ndarray) and field.name not in without
    }
    return replace(whole, **arrays)  # type: ignore[no-any-return]
