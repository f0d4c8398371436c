"""Remote files by URL, such as s3://bucket/key, read like local files in cached blocks.

fsspec's backends know schemes and credentials (S3: AWS environment, files or roles).
"""

import errno
import io
import posixpath
import re
import stat
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PosixPath
from typing import IO, TYPE_CHECKING, Any, cast

from omnibal.base.block_cache import BlockCache
from omnibal.base.errors import StorageError, UserError, refuse_if

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_URL_START = re.compile(r"[a-z][a-z0-9+.-]+://")
_URL_AS_PATH = re.compile(r"([a-z][a-z0-9+.-]+):/(.*)")  # PosixPath drops a slash
_SECRET = re.compile(r"(?<=://)(?:[^/@]+|[^/:]*:.+)(?=@)|(?<=[?#;]).+")
_BLOCK_BYTES = 1 << 21  # latency equals transfer at 100 MB/s and 20 ms
_BLOCKS_IN_MEMORY = 8  # per process: reads are mostly sequential
_MAX_REMEMBERED, _REMEMBERED_S = 4096, 60  # file infos per process, and for how long
_MIN_LISTED = 8  # minimum files of a folder for one listing, not a query per file
_VERSION_FIELDS = ("ETag", "etag", "mtime", "LastModified", "created")  # of fsspec, best first


class RemotePath(PosixPath):
    """Read-only path of a remote file or folder."""

    cache: BlockCache | None = None  # of read blocks

    def __new__(cls, *parts: Any, cache: BlockCache | None = None) -> "RemotePath":
        path = super().__new__(cls, *parts)
        path.cache = cache
        return path

    def __init__(self, *parts: Any, cache: BlockCache | None = None) -> None:
        if sys.version_info >= (3, 12):
            super().__init__(*parts)

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)  # PosixPath drops a slash

    def __reduce__(self) -> Any:
        return location, (str(self), self.cache)  # PosixPath's would lose the cache

    def __truediv__(self, key: Any) -> "RemotePath":
        return self._with_cache(super().__truediv__(key))

    @property
    def parent(self) -> "RemotePath":
        return self._with_cache(super().parent)

    def _with_cache(self, path: Path) -> "RemotePath":
        return type(self)(path, cache=self.cache)

    def absolute(self) -> "RemotePath":
        return self

    def is_file(self, **_: Any) -> bool:
        """Return whether the file exists. Raise StorageError if unreachable."""
        return self._kind() == "file"

    def is_dir(self, **_: Any) -> bool:
        return self._kind() == "directory"

    def exists(self, **_: Any) -> bool:
        return self._kind() is not None

    def _kind(self) -> str | None:
        try:
            return str(_query_info(self)["type"])
        except FileNotFoundError:
            return None

    def iterdir(self) -> Generator["RemotePath", None, None]:
        with _open_storage(self) as (files, name):
            names = files.ls(name, detail=False)
        yield from (self / name.rstrip("/").rpartition("/")[2] for name in names)

    def open(  # type: ignore[override]
        self, mode: str = "r", buffering: int = -1
    ) -> IO[Any]:
        """Open with mode "rb" only. Raise FileNotFoundError, IsADirectoryError, StorageError."""
        if mode != "rb":
            raise StorageError(f"{self}: is remote, and can only be read; name a local file")
        file = _RemoteFile(self, _recent_info(self))
        return cast(IO[Any], file if buffering == 0 else io.BufferedReader(file))

    def check_version(self, version: str) -> None:
        """Raise StorageError if the version changed. An equal version is queried once a minute."""
        if _recent_info(self).version != version and version_of(self) != version:
            raise change_error(self)

    def read_bytes(self) -> bytes:
        with self.open("rb") as file:
            return file.read()

    def read_text(self, encoding: str | None = None, *_: Any, **__: Any) -> str:
        return self.read_bytes().decode(encoding or "utf-8")


def location(text: str, cache: BlockCache | None = None) -> Path:
    """Return a RemotePath of a URL, or a local path of a name or `file://` URL.

    Example:
        >>> location("s3://bucket/a") / "b.jpg"
        RemotePath('s3://bucket/a/b.jpg')
    """
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    return RemotePath(text, cache=cache) if _URL_START.match(text) else Path(text)


def named_from(folder: Path, name: str, cache: BlockCache | None = None) -> Path:
    """Return the path of `name` in a file of `folder`: URL, absolute (local), or relative to it."""
    if _URL_START.match(name):
        return location(name, cache)
    if not isinstance(folder, RemotePath):
        return folder / name
    if name.startswith("/"):
        return Path(name)
    scheme, _, place = str(folder / name).partition("://")
    return location(f"{scheme}://{posixpath.normpath(place)}", cache)  # storages know no ".."


def kept_below(path: Path, folder: Path | None) -> Path:
    """Return `path`. Raise UserError if it is outside `folder` (if any) with links resolved."""
    if folder is None:
        return path
    real, root = (Path(posixpath.normpath(str(place))) for place in (path, folder))
    if not isinstance(path, RemotePath):
        real, root = real.resolve(), folder.resolve()
    is_outside = not real.is_relative_to(root)
    refuse_if(is_outside, f"{path}: is outside --data-root {folder}; name files below it")
    return path


def check_local(options: Mapping[str, Any]) -> None:
    """Raise UserError if a Path of these options (or in a list) is a URL, not a RemotePath."""
    # As a local path, a URL would make a folder "s3:".
    for name, value in options.items():
        for path in value if isinstance(value, list) else [value]:
            is_local = isinstance(path, Path) and not isinstance(path, RemotePath)
            if is_local and (url := _URL_AS_PATH.fullmatch(str(path))):
                given = f"{name.replace('_', '-')} {url[1]}://{url[2]}"
                raise UserError(f"{given}: only data may be a URL; give a local path")


def versions_of(paths: Sequence[Path]) -> list[str]:
    """Return a version per file: "size:change", by ETag or time of change.

    Raises:
        OSError: if a file is absent, or local and a folder.
        StorageError: if a storage is unreachable or does not tell a size.
    """
    folders: dict[RemotePath, list[RemotePath]] = defaultdict(list)
    for path in paths:
        if isinstance(path, RemotePath):
            folders[path.parent].append(path)
    listed: dict[Path, str] = {}
    for folder, files in folders.items():
        if len(files) >= _MIN_LISTED:
            with _open_storage(folder) as (storage, name):
                entries = storage.ls(name, detail=True)
            for entry in entries:
                if entry["type"] == "file":
                    file = folder / entry["name"].rpartition("/")[2]
                    listed[file] = _FileInfo.parse(entry).version
    return [listed.get(path) or version_of(path) for path in paths]


def version_of(path: Path) -> str:
    """Return the version of a file. Raise errors as `versions_of` does."""
    if isinstance(path, RemotePath):
        return _FileInfo.parse(_query_info(path)).version
    state = path.stat()
    if stat.S_ISDIR(state.st_mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    return f"{state.st_size}:{state.st_mtime_ns}"


@dataclass(frozen=True, slots=True)
class _FileInfo:
    size: int
    version: str

    @classmethod
    def parse(cls, info: dict[str, Any]) -> "_FileInfo":
        size = info.get("size")
        if size is None:
            raise StorageError(
                f"{info.get('name')}: its server reports no size, needed to read by position; "
                "use another storage"
            )
        changes = next((info[name] for name in _VERSION_FIELDS if info.get(name)), "")
        return cls(int(size), f"{size}:{changes}")


def _recent_info(path: RemotePath) -> _FileInfo:
    return _remembered_info(path, int(time.monotonic() // _REMEMBERED_S))


@lru_cache(maxsize=_MAX_REMEMBERED)
def _remembered_info(path: RemotePath, minute: int) -> _FileInfo:  # `minute` only keys the cache
    info = _query_info(path)
    if info["type"] == "directory":
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    return _FileInfo.parse(info)


def _query_info(path: RemotePath) -> dict[str, Any]:
    with _open_storage(path) as (files, name):
        return files.info(name)


@contextmanager
def _open_storage(path: RemotePath) -> Iterator[tuple[Any, str]]:
    """Yield fsspec's file system and the path in it; backends' errors become StorageErrors."""
    try:
        from fsspec.core import url_to_fs

        # Created each time: connections do not survive a fork, cached listings get stale.
        yield url_to_fs(str(path), use_listings_cache=False)
    except (FileNotFoundError, IsADirectoryError, UserError):
        raise
    except ImportError as error:
        remedy = 'for S3: pip install "omnibal[s3]"'
        raise UserError(f"{path}: its storage needs a library ({error}); {remedy}") from error
    except Exception as error:  # backends raise their own errors
        may_not = "may not" if isinstance(error, PermissionError) else "cannot"
        raise StorageError(
            f"{path}: {may_not} be read ({_safe_reason(error, path)}); check the URL, the network "
            "and the credentials (for S3 as for the AWS command line), then run again"
        ) from error


def _safe_reason(error: Exception, path: RemotePath) -> str:
    # A backend may print passwords and queries of the URL alone, where no pattern finds them.
    reason = " ".join(str(error).split()) or type(error).__name__
    for secret in _SECRET.findall(str(path)):
        reason = reason.replace(secret, "***")
    return reason


class SeekableBytes(io.RawIOBase):
    """Seekable stream of a known size; subclasses define `readinto`."""

    def __init__(self, size: int) -> None:
        self.size, self.place = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.size}[whence]
        self.place = max(0, base + offset)
        return self.place


class _RemoteFile(SeekableBytes):
    def __init__(self, path: RemotePath, info: _FileInfo) -> None:
        super().__init__(info.size)
        self._path, self._info = path, info

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        target = memoryview(buffer)
        if not len(target) or self.place >= self.size:
            return 0
        number, start = divmod(self.place, _BLOCK_BYTES)
        content = _read_block(self._path, self._info, number)[start : start + len(target)]
        target[: len(content)] = content
        self.place += len(content)
        return len(content)


@lru_cache(maxsize=_BLOCKS_IN_MEMORY)
def _read_block(path: RemotePath, info: _FileInfo, number: int) -> bytes:
    if path.cache is None:
        return _fetch_block(path, info, number)
    name = f"{path}\0{info.version}\0{number}"
    size = min(_BLOCK_BYTES, info.size - number * _BLOCK_BYTES)
    return path.cache.block(name, size, lambda: _fetch_block(path, info, number))


def _fetch_block(path: RemotePath, info: _FileInfo, number: int) -> bytes:
    """Return a block from storage. Raise StorageError if the file changed or is unreadable."""
    start = number * _BLOCK_BYTES
    stop = min(start + _BLOCK_BYTES, info.size)
    try:
        with _open_storage(path) as (files, name):
            content = files.cat_file(name, start=start, end=stop)
        # A file of several blocks could change between reads.
        is_same = info.size <= _BLOCK_BYTES or version_of(path) == info.version
    except FileNotFoundError:
        content, is_same = b"", False
    if not is_same or len(content) != stop - start:
        raise change_error(path)
    return content


def change_error(path: Path) -> StorageError:
    """Return the error for a file that changed since its samples were indexed, or while read."""
    return StorageError(
        f"{path}: has changed while it was read, or since its samples were found; restore it, or "
        "run `omnibal lengths` again (and `omnibal plan`, before training)"
    )
