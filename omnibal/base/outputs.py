"""Checks of output paths before work starts: they are writable, of the right kind, and no input."""

import os
import stat
from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path

from omnibal.base.errors import UserError
from omnibal.base.files import is_stream, real_path


def check_files(outputs: Mapping[str, Path | None], inputs: Iterable[Path]) -> None:
    """Raise UserError if an output file, by option, is not writable, an input, or given twice."""
    given = {option: path for option, path in outputs.items() if path is not None}
    for option, path in given.items():
        _check_place(option, path)
        _check_parent(option, path)
    files = {option: path for option, path in given.items() if not is_stream(path)}
    for read in inputs:
        for option, path in files.items():
            if is_same_file(path, read):
                raise UserError(
                    f"{option} {path}: is {read}, an input of this command: choose another {option}"
                )
    # A device accepts several outputs. A pipe would mix them.
    files |= {option: path for option, path in given.items() if path.is_fifo()}
    for (option, path), (other, second) in combinations(files.items(), 2):
        if is_same_file(path, second):
            raise UserError(
                f"{option} {path} and {other} {second}: are the same file: choose different paths"
            )


def check_folder(option: str, folder: Path, inputs: Iterable[Path]) -> None:
    """Raise UserError if an output folder is not writable, or is or contains an input."""
    _check_name(option, folder)
    if folder.is_symlink() and not folder.exists():
        raise UserError(
            f"{option} {folder}: is a link that leads nowhere; remove it or choose another {option}"
        )
    if folder.exists() and not folder.is_dir():
        raise UserError(
            f"{option} {folder}: is a file or device, and must name a folder; choose another "
            f"{option}"
        )
    _check_parent(option, folder)
    real = real_path(folder)
    for read in inputs:
        if real_path(read).is_relative_to(real):
            raise UserError(
                f"{option} {folder}: is or holds {read}, an input of this command: choose another "
                f"{option}"
            )


def check_outside(option: str, folder: Path, inputs: Iterable[Path]) -> None:
    """Raise UserError if an output folder is an input or inside it."""
    real = real_path(folder)
    for read in inputs:
        if real.is_relative_to(real_path(read)):
            raise UserError(
                f"{option} {folder}: is inside {read}, an input of this command: choose another "
                f"{option}"
            )


def is_same_file(path: Path, other: Path) -> bool:
    """Return whether two paths resolve to the same file; neither needs to exist."""
    if real_path(path) == real_path(other):
        return True
    try:
        return path.samefile(other)
    except OSError:
        return False


def _check_name(option: str, path: Path) -> None:
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{option} {path}: is no Unicode text; choose another {option}") from error


def _check_place(option: str, path: Path) -> None:
    _check_name(option, path)
    if path.is_dir():
        raise UserError(f"{path}: is a directory; {option} must name a file in it")
    if is_stream(path):
        if not os.access(path, os.W_OK):
            raise UserError(f"{option} {path}: cannot be written to; choose another {option}")
    elif path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise UserError(
            f"{option} {path}: is neither a regular file, a pipe nor a character device; choose "
            f"another {option}"
        )


def _check_parent(option: str, path: Path) -> None:
    parents = real_path(path).parents  # for a link, of its target
    if is_stream(path):
        return
    nearest = next(parent for parent in parents if parent.exists())
    if not nearest.is_dir():
        raise UserError(f"{path}: {nearest} exists and is not a directory; choose another {option}")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{path}: {nearest} cannot be written to; choose another {option}")
