"""Checks of output paths before work starts: they are writable, of the right kind, and no input."""

import os
from collections.abc import Iterable, Mapping
from itertools import combinations, product
from pathlib import Path

from omnibal.base.errors import UserError, refuse_if
from omnibal.base.files import is_stream, real_path


def check_files(outputs: Mapping[str, Path | None], inputs: Iterable[Path]) -> None:
    """Raise UserError if an output file, by option, is not writable, an input, or given twice."""
    given = {option: path for option, path in outputs.items() if path is not None}
    for option, path in given.items():
        _check_place(option, path)
        _check_parent(option, path)
    files = {option: path for option, path in given.items() if not is_stream(path)}
    for read, (option, path) in product(inputs, files.items()):
        is_read = is_same_file(path, read)
        refuse_if(is_read, f"{option} {path}: is {read}, an input of this command: choose another")
    # A device accepts several outputs. A pipe would mix them.
    files |= {option: path for option, path in given.items() if path.is_fifo()}
    for (option, path), (other, second) in combinations(files.items(), 2):
        names = f"{option} {path} and {other} {second}"
        refuse_if(is_same_file(path, second), f"{names}: are the same file: choose different paths")


def check_folder(option: str, folder: Path, inputs: Iterable[Path]) -> None:
    """Raise UserError if an output folder is not writable, or is or contains an input."""
    _check_name(option, folder)
    name, is_there = f"{option} {folder}", folder.exists()
    is_broken = folder.is_symlink() and not is_there
    refuse_if(is_broken, f"{name}: is a link that leads nowhere; remove it or choose another")
    is_other = is_there and not folder.is_dir()
    refuse_if(is_other, f"{name}: is a file or device, and must be a folder; choose another")
    _check_parent(option, folder)
    for read in inputs:
        holds = real_path(read).is_relative_to(real_path(folder))
        refuse_if(holds, f"{name}: is or holds {read}, an input of this command: choose another")


def check_outside(option: str, folder: Path, read: Path) -> None:
    """Raise UserError if an output folder is the input `read` or inside it."""
    is_inside, name = real_path(folder).is_relative_to(real_path(read)), f"{option} {folder}"
    refuse_if(is_inside, f"{name}: is inside {read}, an input of this command: choose another")


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
    refuse_if(path.is_dir(), f"{path}: is a directory; {option} must name a file in it")
    name, is_device = f"{option} {path}", is_stream(path)
    is_closed = is_device and not os.access(path, os.W_OK)
    refuse_if(is_closed, f"{name}: cannot be written to; choose another")
    is_odd = path.exists() and not (is_device or path.is_file())
    refuse_if(is_odd, f"{name}: is neither a regular file, a pipe nor a device; choose another")


def _check_parent(option: str, path: Path) -> None:
    parents = real_path(path).parents  # for a link, of its target
    if is_stream(path):
        return
    nearest = next(parent for parent in parents if parent.exists())
    is_file = not nearest.is_dir()
    refuse_if(is_file, f"{path}: {nearest} exists and is not a directory; choose another {option}")
    is_closed = not os.access(nearest, os.W_OK | os.X_OK)
    refuse_if(is_closed, f"{path}: {nearest} cannot be written to; choose another {option}")
