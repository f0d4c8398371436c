"""Remote files by URL, such as s3://bucket/key, read like local files, in cached blocks.

fsspec and its backends handle schemes and credentials (S3: AWS environment, files or roles).
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
from omnibal.base.errors import StorageError, UserError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_URL = re.compile(r"[a-z][a-z0-9+.-]+://")
_URL_AS_PATH = re.compile(r"([a-z][a-z0-9+.-]+):/(.*)")  # PosixPath drops a slash
_SECRET = re.compile(r"(?<=://)(?:[^/@]+|[^/:]*:.+)(?=@)|(?<=[?#;]).+")
_BLOCK_BYTES = 1 << 21  # latency equals transfer at 100 MB/s and 20 ms
_BLOCKS_IN_MEMORY = 8  # per process: reads are mostly sequential
_KNOWN_FILES, _REMEMBERED_S = 4096, 60  # max remembered files per process, and for how many seconds
_ASKED_TOGETHER = 8  # min files of a folder for a listing to be quicker
_VERSIONS = ("ETag", "etag", "mtime", "LastModified", "created")
"""Version fields in fsspec's file info, best first."""


class RemotePath(PosixPath):
    """Path of a remote file or folder, with the methods needed for reading."""

    cache: BlockCache | None = None  # cache of read blocks

    def __new__(cls, *parts: Any, cache: BlockCache | None = None) -> "RemotePath":
        path = super().__new__(cls, *parts)
        path.cache = cache
        return path

    def __init__(self, *parts: Any, cache: BlockCache | None = None) -> None:
        if sys.version_info >= (3, 12):
            super().__init__(*parts)

    def __str__(self) -> str:
        """URL with both slashes after its scheme."""
        return super().__str__().replace(":/", "://", 1)

    def __reduce__(self) -> Any:
        """Keep the cache when pickled."""
        return location, (str(self), self.cache)

    def __truediv__(self, key: Any) -> "RemotePath":
        return self._beside(super().__truediv__(key))

    @property
    def parent(self) -> "RemotePath":
        return self._beside(super().parent)

    def _beside(self, path: Path) -> "RemotePath":
        return type(self)(path, cache=self.cache)

    def absolute(self) -> "RemotePath":
        return self

    def is_file(self, **_: Any) -> bool:
        """Whether the file exists; raises StorageError if unreachable."""
        return self._kind() == "file"

    def is_dir(self, **_: Any) -> bool:
        return self._kind() == "directory"

    def exists(self, **_: Any) -> bool:
        return self._kind() is not None

    def _kind(self) -> str | None:
        try:
            return str(_info(self)["type"])
        except FileNotFoundError:
            return None

    def iterdir(self) -> Generator["RemotePath", None, None]:
        with _answering(self) as (files, name):
            found = files.ls(name, detail=False)
        yield from (self / name.rstrip("/").rpartition("/")[2] for name in found)

    def open(  # type: ignore[override]
        self, mode: str = "r", buffering: int = -1
    ) -> IO[Any]:
        """Open the file to read bytes; raises FileNotFoundError, IsADirectoryError, StorageError"""
        if mode != "rb":
            raise StorageError(f"{self}: is remote, and can only be read; name a local file")
        file = _RemoteFile(self, _known_now(self))
        return cast(IO[Any], file if buffering == 0 else io.BufferedReader(file))

    def check_version(self, version: str) -> None:
        """Raise if the version changed; queried at most once a minute."""
        if _known_now(self).version != version and version_of(self) != version:
            raise change_error(self)

    def read_bytes(self) -> bytes:
        with self.open("rb") as file:
            return file.read()

    def read_text(self, encoding: str | None = None, *_: Any, **__: Any) -> str:
        return self.read_bytes().decode(encoding or "utf-8")


def location(text: str, cache: BlockCache | None = None) -> Path:
    """Path of a local name or URL.

    Example:
        >>> location("s3://bucket/a") / "b.jpg"
        RemotePath('s3://bucket/a/b.jpg')
    """
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    return RemotePath(text, cache=cache) if _URL.match(text) else Path(text)


def named_from(folder: Path, name: str, cache: BlockCache | None = None) -> Path:
    """Resolve a name found in another file: a URL, or relative to `folder`."""
    if _URL.match(name):
        return location(name, cache)
    if not isinstance(folder, RemotePath):
        return folder / name
    if name.startswith("/"):
        return Path(name)
    scheme, _, place = str(folder / name).partition("://")  # keeps .. in URLs
    return location(f"{scheme}://{posixpath.normpath(place)}", cache)


def kept_below(path: Path, folder: Path | None) -> Path:
    """Return a path of the data. Raise if it is, links followed, outside a folder or URL."""
    if folder is None:
        return path
    at = [Path(posixpath.normpath(str(place))) for place in (path, folder)]
    if not isinstance(path, RemotePath):
        at = [at[0].resolve(), folder.resolve()]
    if not at[0].is_relative_to(at[1]):
        raise UserError(
            f"{path}: is outside --data-root {folder}; name files below it, or give another"
        )
    return path


def check_local(options: Mapping[str, Any]) -> None:
    """Raise if an option (name without dashes) is a URL, which would become a folder "s3:"."""
    for name, value in options.items():
        for path in value if isinstance(value, list) else [value]:
            if not isinstance(path, Path) or isinstance(path, RemotePath):
                continue
            if url := _URL_AS_PATH.fullmatch(str(path)):
                raise UserError(
                    f"{name.replace('_', '-')} {url[1]}://{url[2]}: is a URL, by which only data "
                    "is read (DATA of `omnibal lengths`, --data and --eval-data of "
                    "pretrain_vlm.py); give a local path, or copy it to one"
                )


def versions_of(paths: Sequence[Path]) -> list[str]:
    """Version per file, its size with ETag or time; raises OSError, StorageError if unreachable."""
    folders: dict[RemotePath, list[RemotePath]] = defaultdict(list)
    for path in paths:
        if isinstance(path, RemotePath):
            folders[path.parent].append(path)
    listed: dict[Path, str] = {}
    for folder, files in folders.items():
        if len(files) >= _ASKED_TOGETHER:
            with _answering(folder) as (storage, name):
                found = [
                    entry for entry in storage.ls(name, detail=True) if entry["type"] == "file"
                ]
            for entry in found:
                listed[folder / entry["name"].rpartition("/")[2]] = _Known.from_info(entry).version
    return [listed.get(path) or version_of(path) for path in paths]


def version_of(path: Path) -> str:
    """Version of a file; raises like `versions_of`."""
    if isinstance(path, RemotePath):
        return _Known.from_info(_info(path)).version
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    return f"{found.st_size}:{found.st_mtime_ns}"


@dataclass(frozen=True, slots=True)
class _Known:
    size: int
    version: str

    @classmethod
    def from_info(cls, info: dict[str, Any]) -> "_Known":
        size = info.get("size")
        if size is None:
            raise StorageError(
                f"{info.get('name')}: its server does not say how large it is, and samples are "
                "read by their places; use another storage"
            )
        changes = next((info[name] for name in _VERSIONS if info.get(name)), "")
        return cls(int(size), f"{size}:{changes}")


def _known_now(path: RemotePath) -> _Known:
    return _remembered_info(path, int(time.monotonic() // _REMEMBERED_S))


@lru_cache(maxsize=_KNOWN_FILES)
def _remembered_info(path: RemotePath, when: int) -> _Known:
    """File info, queried again if `when` differs."""
    info = _info(path)
    if info["type"] == "directory":
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    return _Known.from_info(info)


def _info(path: RemotePath) -> dict[str, Any]:
    with _answering(path) as (files, name):
        return files.info(name)


@contextmanager
def _answering(path: RemotePath) -> Iterator[tuple[Any, str]]:
    """File system and path within it; converts errors."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise UserError(
            f"{path}: URLs are read with fsspec, which is not there ({error}); install it: "
            'pip install "omnibal[s3]"'
        ) from error
    try:
        # Not cached, as file systems do not survive a fork; listings would be cached.
        yield url_to_fs(str(path), use_listings_cache=False)
    except (FileNotFoundError, IsADirectoryError, UserError):
        raise
    except ImportError as error:
        raise UserError(
            f"{path}: its storage is read with a library that is not there ({error}); of S3 "
            'install it by: pip install "omnibal[s3]"'
        ) from error
    except PermissionError as error:
        raise StorageError(
            f"{path}: may not be read ({_reason(error, path)}); give these credentials the right "
            "to read it, then run the same command again"
        ) from error
    except Exception as error:  # backends raise their own errors
        raise StorageError(
            f"{path}: cannot be read ({_reason(error, path)}); see to the URL, the network and the "
            "credentials (of S3 as for the AWS command line), then run the same command again"
        ) from error


def _reason(error: Exception, path: RemotePath) -> str:
    """Reason without passwords and queries of the URL, which a backend may print alone."""
    reason = " ".join(str(error).split()) or type(error).__name__
    for secret in _SECRET.findall(str(path)):
        reason = reason.replace(secret, "***")
    return reason


class SeekableBytes(io.RawIOBase):
    """Seekable stream of a known size; subclasses implement reading."""

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
    def __init__(self, path: RemotePath, known: _Known) -> None:
        super().__init__(known.size)
        self._path, self._remembered_info = path, known

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        whole = memoryview(buffer)
        if not len(whole) or self.place >= self.size:
            return 0
        number, start = divmod(self.place, _BLOCK_BYTES)
        found = _block(self._path, self._remembered_info, number)[start : start + len(whole)]
        whole[: len(found)] = found
        self.place += len(found)
        return len(found)


@lru_cache(maxsize=_BLOCKS_IN_MEMORY)
def _block(path: RemotePath, known: _Known, number: int) -> bytes:
    """Block of a file, from the cache if present."""
    if path.cache is None:
        return _fetch_block(path, known, number)
    name = f"{path}\0{known.version}\0{number}"
    size = min(_BLOCK_BYTES, known.size - number * _BLOCK_BYTES)
    return path.cache.block(name, size, lambda: _fetch_block(path, known, number))


def _fetch_block(path: RemotePath, known: _Known, number: int) -> bytes:
    """Block fetched from storage; raises StorageError if the file changed or is unreadable."""
    start = number * _BLOCK_BYTES
    stop = min(start + _BLOCK_BYTES, known.size)
    try:
        with _answering(path) as (files, name):
            content = files.cat_file(name, start=start, end=stop)
        # Several blocks could be of different versions.
        same = known.size <= _BLOCK_BYTES or version_of(path) == known.version
    except FileNotFoundError:
        content, same = b"", False
    if not same or len(content) != stop - start:
        raise change_error(path)
    return content


def change_error(path: Path) -> StorageError:
    """Error for a file that changed since its samples were indexed."""
    return StorageError(
        f"{path}: has changed while it was read, or since its samples were found; restore it, or "
        "leave it as it is and run `omnibal lengths` again (and `omnibal plan`, before training)"
    )
