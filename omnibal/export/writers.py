"""Writers of the kinds of files that exports have."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from omnibal.export.exported import Writer


def text_file(text: str) -> Writer:
    """Writes text as UTF-8."""
    return lambda path: _write(path, text)


def json_file(value: Any) -> Writer:
    """Writes a value as JSON."""
    return text_file(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def array_file(array: np.ndarray) -> Writer:
    """Writes an array as NumPy's `.npy`."""
    return lambda path: np.save(path, array, allow_pickle=False)


def script_file(name: str) -> Writer:
    """Copies a script of this package, which runs beside the trainer and imports nothing of it."""
    return text_file(files("omnibal.export").joinpath("scripts", name).read_text(encoding="utf-8"))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
