"""Atomic writes, and reads that fail with one-line errors."""

import errno
import json
import os
import secrets
import shutil
import stat
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from omnibal.base.errors import UserError
from omnibal.base.remote_path import RemotePath

T = TypeVar("T")
_STANDARD_OUTPUT = 1  # file descriptor
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TELLING = ("json_invalid", "missing", "value_error")
"""Pydantic error types to report without the input, which adds nothing."""


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Raise UserError with the file's name if a write finds the disk or the quota full."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        reason = os.strerror(error.errno)
        raise UserError(
            f"{path}: cannot be written ({reason}); make room, or write elsewhere"
        ) from error


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` on success and is removed on error.

    Follows links; writes through to devices and pipes.

    Example:
        >>> with atomic(Path("plan.json")) as temporary:
        ...     temporary.write_text("{}")
    """
    if path.is_dir():
        raise UserError(f"{path}: is a directory; give the path of a file")
    if is_stream(path):
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "output"
            yield written
            _pour(written, path)
        return
    target = real_path(path)
    # A unique name, to spare the user's files.
    temporary = target.with_name(f"{target.name[:200]}.{secrets.token_hex(8)}.part")
    try:
        with naming_file(path):
            yield temporary
        temporary.replace(target)
    except BaseException:
        if temporary.is_file():
            temporary.unlink()
        raise


def real_path(path: Path) -> Path:
    """Path without links and dots; need not exist."""
    if "\0" in str(path):
        raise UserError(
            f"{path}: has a NUL character, which no path can have; correct the file that names it"
        )
    if isinstance(path, RemotePath):
        return path
    return Path(os.path.realpath(path))


def check_new_folder(path: Path) -> None:
    """Raise if `atomic_directory` would fail."""
    if path.exists() or path.is_symlink():
        raise UserError(f"{path}: exists already; give a directory to be made, or remove it")


def check_room(target: Path, size: int) -> None:
    """Raise UserError unless `size` bytes fit on the file system of `target`."""
    there = next(folder for folder in target.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(there).free
    if size > free:
        raise UserError(
            f"{target}: {size:,} bytes are to be written, but only {free:,} are free there; make "
            "room, or write elsewhere"
        )


def is_stream(path: Path) -> bool:
    """Whether a path is a pipe, a character device, or this process's stdout (even a file)."""
    if isinstance(path, RemotePath):
        return False
    try:
        found = path.stat()
    except (OSError, ValueError):  # a NUL in the path
        return False
    kind = found.st_mode
    return stat.S_ISFIFO(kind) or stat.S_ISCHR(kind) or _is_standard_output(found)


def check_ends(path: Path, remedy: str) -> None:
    """Raise UserError for a pipe or device, which may never end."""
    if is_stream(path):
        raise UserError(f"{path}: is a pipe or a device, which may never end; {remedy}")


def _is_standard_output(found: os.stat_result) -> bool:
    try:
        return os.path.samestat(found, os.fstat(_STANDARD_OUTPUT))
    except OSError:  # it is closed
        return False


def _pour(written: Path, stream: Path) -> None:
    """Copy a file into a pipe or device; stdout continues at its position."""
    if _is_standard_output(stream.stat()):
        sys.stdout.flush()
        descriptor = os.dup(_STANDARD_OUTPUT)
    else:
        descriptor = os.open(stream, os.O_WRONLY)
    try:
        with written.open("rb") as source, os.fdopen(descriptor, "wb") as sink:
            shutil.copyfileobj(source, sink)
    except OSError as error:
        if error.filename is None and not isinstance(error, BrokenPipeError):
            raise UserError(f"{stream}: cannot be written ({error.strerror})") from error
        raise


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a new folder that is renamed to `path` on success and removed on error."""
    check_new_folder(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    holder = Path(tempfile.mkdtemp(prefix=f"{path.name}.", suffix=".part", dir=path.parent))
    try:
        # mkdtemp restricts access to the owner. The subfolder has default permissions.
        part = holder / path.name
        with naming_file(path):
            part.mkdir()
            yield part
        part.rename(path)
    finally:
        shutil.rmtree(holder, ignore_errors=True)


def write_json_model(model: BaseModel, path: Path) -> None:
    """Write JSON atomically and deterministically, keys in field order."""
    text = json.dumps(model.model_dump(mode="json"), indent=2) + "\n"
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json_model(kind: type[T], path: Path, remedy: str) -> T:
    """Read a JSON file as a pydantic model or collection; `remedy` ends the error message."""
    return parse_json_model(kind, read_text(path, remedy), str(path), remedy)


def parse_json_model(kind: type[T], text: str | bytes, where: str, remedy: str) -> T:
    """Parse JSON as `kind`; `where` (such as file and line) begins error messages."""
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        raise _invalid(error, where, remedy) from error


def read_toml_model(kind: type[T], path: Path, remedy: str) -> T:
    """Read TOML as a `kind`; raises like `read_json_model`."""
    try:
        return TypeAdapter(kind).validate_python(tomllib.loads(read_text(path, remedy)))
    except ValidationError as error:
        raise _invalid(error, str(path), remedy) from error
    except (ValueError, RecursionError) as error:  # including huge numbers and deep nesting
        raise UserError(f"{path}: not TOML: {error}; {remedy}") from error


def read_text(path: Path, remedy: str) -> str:
    """Read a UTF-8 file; raises UserError if absent."""
    check_ends(path, remedy)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; {remedy}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error}); {remedy}") from error
    except ValueError as error:  # a NUL in the path
        raise UserError(f"{str(path)!r}: cannot be read ({error}); {remedy}") from error


def _invalid(error: ValidationError, where: str, remedy: str) -> UserError:
    """Convert pydantic's first error to a one-line UserError."""
    first = error.errors()[0]
    place = ": " + ": ".join(map(str, first["loc"])) if first["loc"] else ""
    given = f" (given: {first['input']!r:.80})" if first["type"] not in _TELLING else ""
    return UserError(f"{where}{place}: {complaint(first)}{given}; {remedy}")


def complaint(of: ErrorDetails) -> str:
    """Pydantic error message, without pydantic's prefix for validators."""
    return str(of["ctx"]["error"]) if of["type"] == "value_error" else of["msg"]
