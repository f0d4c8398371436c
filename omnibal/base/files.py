"""Atomic writes, and typed reads with one-line errors."""

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

from omnibal.base.errors import UserError, refuse_if
from omnibal.base.remote_path import RemotePath

T = TypeVar("T")
_STANDARD_OUTPUT = 1  # file descriptor
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Pydantic error types whose message needs no input.
_WITHOUT_INPUT = ("json_invalid", "missing", "value_error")


@contextmanager
def full_disk_errors(path: Path) -> Iterator[None]:
    """Raise UserError with the file's name if a write finds the disk or the quota full."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        message = f"{path}: cannot be written ({os.strerror(error.errno)}); make room there"
        raise UserError(message) from error


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` on success and is removed on error.

    Links are followed; devices and pipes get the content at the end.

    Example:
        >>> with atomic(Path("plan.json")) as temporary:
        ...     temporary.write_text("{}")
    """
    refuse_if(path.is_dir(), f"{path}: is a directory; give the path of a file")
    if is_stream(path):
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "output"
            yield written
            _copy_to_stream(written, path)
        return
    target = real_path(path)
    # Unique, as `target.part` may be a user's file; 200 leaves room under the limit of 255 bytes.
    temporary = target.with_name(f"{target.name[:200]}.{secrets.token_hex(8)}.part")
    try:
        with full_disk_errors(path):
            yield temporary
        temporary.replace(target)
    except BaseException:
        if temporary.is_file():
            temporary.unlink()
        raise


def real_path(path: Path) -> Path:
    """Return a path without links and dots, existing or not. Raise UserError for a NUL in it."""
    refuse_if("\0" in str(path), f"{path}: has a NUL character; correct the file that names it")
    return path if isinstance(path, RemotePath) else Path(os.path.realpath(path))


def check_new_folder(path: Path) -> None:
    """Raise UserError if `path` exists, also as a broken link."""
    if path.exists() or path.is_symlink():
        raise UserError(f"{path}: exists already; give a new directory, or remove it")


def check_room(target: Path, size: int) -> None:
    """Raise UserError unless `size` bytes fit on the file system of `target`."""
    nearest = next(folder for folder in target.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(nearest).free
    room = "make room, or write elsewhere"
    refuse_if(size > free, f"{target}: needs {size:,} bytes, and {free:,} are free; {room}")


def is_stream(path: Path) -> bool:
    """Return whether a path is a pipe, a character device, or this process's stdout."""
    if isinstance(path, RemotePath):
        return False
    try:
        state = path.stat()
    except (OSError, ValueError):  # a NUL in the path
        return False
    kind = state.st_mode
    # Stdout may be a regular file, as in `-o /dev/stdout > file`.
    return stat.S_ISFIFO(kind) or stat.S_ISCHR(kind) or _is_standard_output(state)


def check_ends(path: Path, remedy: str) -> None:
    """Raise UserError for a pipe or device, which may never end."""
    refuse_if(is_stream(path), f"{path}: is a pipe or a device, which may never end; {remedy}")


def _is_standard_output(state: os.stat_result) -> bool:
    try:
        return os.path.samestat(state, os.fstat(_STANDARD_OUTPUT))
    except OSError:  # it is closed
        return False


def _copy_to_stream(written: Path, stream: Path) -> None:
    if _is_standard_output(stream.stat()):
        # A second open of a file would begin at its start and overwrite earlier output.
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
    """Yield a new folder that is renamed to `path`, which must be new; removed on error."""
    check_new_folder(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    holder = Path(tempfile.mkdtemp(prefix=f"{path.name}.", suffix=".part", dir=path.parent))
    try:
        # mkdtemp allows only the owner; a subfolder has default permissions.
        part = holder / path.name
        with full_disk_errors(path):
            part.mkdir()
            yield part
        part.rename(path)
    finally:
        shutil.rmtree(holder, ignore_errors=True)


def write_json_model(model: BaseModel, path: Path) -> None:
    """Write a model as JSON, atomically, with keys in field order."""
    text = json.dumps(model.model_dump(mode="json"), indent=2) + "\n"
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json_model(kind: type[T], path: Path, remedy: str) -> T:
    """Return a JSON file as a pydantic model or collection.

    Raises:
        UserError: if it is absent or invalid; `remedy` ends the message.
    """
    return parse_json_model(kind, read_text(path, remedy), str(path), remedy)


def parse_json_model(kind: type[T], text: str | bytes, where: str, remedy: str) -> T:
    """Return JSON text as `kind`, or raise UserError; `where` (file, line) begins its message."""
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        raise one_line_error(error, where, remedy) from error


def read_toml_model(kind: type[T], path: Path, remedy: str) -> T:
    """Return a TOML file as `kind`. Raise UserError as `read_json_model` does."""
    try:
        return TypeAdapter(kind).validate_python(tomllib.loads(read_text(path, remedy)))
    except ValidationError as error:
        raise one_line_error(error, str(path), remedy) from error
    except (ValueError, RecursionError) as error:  # huge numbers and deep nesting too
        raise UserError(f"{path}: not TOML: {error}; {remedy}") from error


def read_text(path: Path, remedy: str) -> str:
    """Return the content of a UTF-8 file. Raise UserError if it cannot be read."""
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


def one_line_error(error: ValidationError, where: str, remedy: str) -> UserError:
    """Return a UserError of the first mistake that pydantic found; `where` begins its message."""
    first = error.errors()[0]
    place = ": " + ": ".join(map(str, first["loc"])) if first["loc"] else ""
    given = "" if first["type"] in _WITHOUT_INPUT else f" (given: {first['input']!r:.80})"
    return UserError(f"{where}{place}: {complaint(first)}{given}; {remedy}")


def complaint(error: ErrorDetails) -> str:
    """Return pydantic's error message, without its prefix "Value error"."""
    return str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]
