"""Files by their URLs, such as s3://bucket/key, read as local ones are.

What a URL's scheme stands for is fsspec's to know, and who may read is its backends' (of S3: what
the AWS command line takes, environment, files or roles). A remote file is read in blocks; where it
has a cache, these are kept on disk.
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
_URL_AS_PATH = re.compile(r"([a-z][a-z0-9+.-]+):/(.*)")  # in which one slash is lost
_BLOCK_BYTES = 1 << 21  # time to ask and time to receive are about the same at 100 MB/s and 20 ms
_BLOCKS_IN_MEMORY = 8  # of a process: what is read next mostly stands where the last was
_KNOWN_FILES, _REMEMBERED_S = 4096, 60
"""Files of which a process remembers sizes and versions, and for how many seconds."""
_ASKED_TOGETHER = 8  # files of one folder, from which on listing it is quicker than asking for each
_VERSIONS = ("ETag", "etag", "mtime", "LastModified", "created")
"""What tells of a change in what fsspec's backends say of a file, the best first."""


class RemotePath(PosixPath):
    """The path of a remote file or folder: a URL that does all of a path that reading needs."""

    cache: BlockCache | None = None
    """Where blocks that are read are kept."""

    def __new__(cls, *parts: Any, cache: BlockCache | None = None) -> "RemotePath":
        """Make a path of a URL."""
        path = super().__new__(cls, *parts)
        path.cache = cache
        return path

    def __init__(self, *parts: Any, cache: BlockCache | None = None) -> None:
        """Take what `__new__` has taken."""
        if sys.version_info >= (3, 12):
            super().__init__(*parts)

    def __str__(self) -> str:
        """The URL, with both slashes behind its scheme."""
        return super().__str__().replace(":/", "://", 1)

    def __reduce__(self) -> Any:
        """Keep the cache where the path goes to another process."""
        return location, (str(self), self.cache)

    def __truediv__(self, key: Any) -> "RemotePath":
        """A path below this one."""
        return self._beside(super().__truediv__(key))

    @property
    def parent(self) -> "RemotePath":
        """The folder."""
        return self._beside(super().parent)

    def _beside(self, path: Path) -> "RemotePath":
        return type(self)(path, cache=self.cache)

    def absolute(self) -> "RemotePath":
        """The path itself."""
        return self

    def is_file(self, **_: Any) -> bool:
        """Whether there is such a file; raises StorageError where nobody says."""
        return self._kind() == "file"

    def is_dir(self, **_: Any) -> bool:
        """Whether there is such a folder."""
        return self._kind() == "directory"

    def exists(self, **_: Any) -> bool:
        """Whether there is such a file or folder."""
        return self._kind() is not None

    def _kind(self) -> str | None:
        try:
            return str(_info(self)["type"])
        except FileNotFoundError:
            return None

    def iterdir(self) -> Generator["RemotePath", None, None]:
        """What is in the folder."""
        with _answering(self) as (files, name):
            found = files.ls(name, detail=False)
        yield from (self / each.rstrip("/").rpartition("/")[2] for each in found)

    def open(  # type: ignore[override]
        self, mode: str = "r", buffering: int = -1
    ) -> IO[Any]:
        """Open the file to read bytes; raises FileNotFoundError, IsADirectoryError, StorageError"""
        if mode != "rb":
            raise StorageError(f"{self}: is remote, and can only be read; name a local file")
        file = _RemoteFile(self, _known_now(self))
        return cast(IO[Any], file if buffering == 0 else io.BufferedReader(file))

    def check_version(self, version: str) -> None:
        """Refuse a file that is of another version; it is asked once a minute."""
        if _known_now(self).version != version and version_of(self) != version:
            raise changed(self)

    def read_bytes(self) -> bytes:
        """Read the whole file."""
        with self.open("rb") as file:
            return file.read()

    def read_text(self, encoding: str | None = None, *_: Any, **__: Any) -> str:
        """Read the whole file as text, UTF-8 if nothing else is said."""
        return self.read_bytes().decode(encoding or "utf-8")


def location(text: str, cache: BlockCache | None = None) -> Path:
    """A path, or that of a URL.

    Example:
        >>> location("s3://bucket/a") / "b.jpg"
        RemotePath('s3://bucket/a/b.jpg')
    """
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    return RemotePath(text, cache=cache) if _URL.match(text) else Path(text)


def named_from(folder: Path, name: str, cache: BlockCache | None = None) -> Path:
    """The path of a file by its name in another one: a URL, or from that one's folder."""
    if _URL.match(name):
        return location(name, cache)
    if not isinstance(folder, RemotePath):
        return folder / name
    if name.startswith("/"):
        return Path(name)
    scheme, _, place = str(folder / name).partition("://")  # where .. is no folder's name
    return location(f"{scheme}://{posixpath.normpath(place)}", cache)


def check_local(options: Mapping[str, Any]) -> None:
    """Refuse options that were given a URL and take a path, which would be one of a folder s3:.

    Args:
        options: their values, of any kind, by their names without dashes.
    """
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
    """What changes whenever a file does, for each of these: its size with its ETag or its time.

    Raises:
        OSError: a file is missing, or not to be read.
        StorageError: nobody says.
    """
    folders: dict[RemotePath, list[RemotePath]] = defaultdict(list)
    for path in paths:
        if isinstance(path, RemotePath):
            folders[path.parent].append(path)
    listed: dict[Path, str] = {}
    for folder, files in folders.items():
        if len(files) >= _ASKED_TOGETHER:
            listed |= _versions_in(folder)
    return [listed.get(path) or version_of(path) for path in paths]


def version_of(path: Path) -> str:
    """What changes whenever the file does; raises as `versions_of` does."""
    if isinstance(path, RemotePath):
        return _Known.of(_info(path)).version
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    return f"{found.st_size}:{found.st_mtime_ns}"


def _versions_in(folder: RemotePath) -> dict[Path, str]:
    with _answering(folder) as (files, name):
        found = files.ls(name, detail=True)
    return {
        folder / each["name"].rpartition("/")[2]: _Known.of(each).version
        for each in found
        if each["type"] == "file"
    }


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a remote file."""

    size: int
    version: str

    @classmethod
    def of(cls, info: dict[str, Any]) -> "_Known":
        size = info.get("size")
        if size is None:
            raise StorageError(
                f"{info.get('name')}: its server does not say how large it is, and samples are "
                "read by their places; use another storage"
            )
        changes = next((info[name] for name in _VERSIONS if info.get(name)), "")
        return cls(int(size), f"{size}:{changes}")


def _known_now(path: RemotePath) -> _Known:
    return _known(path, int(time.monotonic() // _REMEMBERED_S))


@lru_cache(maxsize=_KNOWN_FILES)
def _known(path: RemotePath, when: int) -> _Known:
    """What is known of a file, asked again at another time."""
    info = _info(path)
    if info["type"] == "directory":
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    return _Known.of(info)


def _info(path: RemotePath) -> dict[str, Any]:
    with _answering(path) as (files, name):
        return files.info(name)


@contextmanager
def _answering(path: RemotePath) -> Iterator[tuple[Any, str]]:
    """The file system of a path and the path's name there; its errors as this module's."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise UserError(
            f"{path}: URLs are read with fsspec, which is not there ({error}); install it: "
            'pip install "omnibal[s3]"'
        ) from error
    try:
        # Asked for each time: file systems do not outlive a fork. Lists of files would be kept.
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
            f"{path}: may not be read ({_why(error)}); give these credentials the right to read "
            "it, then run the same command again"
        ) from error
    except Exception as error:  # backends have errors of their own
        raise StorageError(
            f"{path}: cannot be read ({_why(error)}); see to the URL, the network and the "
            "credentials (of S3 as for the AWS command line), then run the same command again"
        ) from error


def _why(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class SeekableBytes(io.RawIOBase):
    """A file of a known size that is read; a subclass says how."""

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
        self._path, self._known = path, known

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        whole = memoryview(buffer)
        if not len(whole) or self.place >= self.size:
            return 0
        number, start = divmod(self.place, _BLOCK_BYTES)
        found = _block(self._path, self._known, number)[start : start + len(whole)]
        whole[: len(found)] = found
        self.place += len(found)
        return len(found)


@lru_cache(maxsize=_BLOCKS_IN_MEMORY)
def _block(path: RemotePath, known: _Known, number: int) -> bytes:
    """A block of a file, from the cache if it has it."""
    if path.cache is None:
        return _fetched(path, known, number)
    name = f"{path}\0{known.version}\0{number}"
    size = min(_BLOCK_BYTES, known.size - number * _BLOCK_BYTES)
    return path.cache.block(name, size, lambda: _fetched(path, known, number))


def _fetched(path: RemotePath, known: _Known, number: int) -> bytes:
    """A block of a file as its storage has it.

    Raises:
        StorageError: the file is no longer what is known of it, or cannot be read.
    """
    start = number * _BLOCK_BYTES
    stop = min(start + _BLOCK_BYTES, known.size)
    try:
        with _answering(path) as (files, name):
            content = files.cat_file(name, start=start, end=stop)
        # What is more than one block could be of two versions.
        same = known.size <= _BLOCK_BYTES or version_of(path) == known.version
    except FileNotFoundError:
        content, same = b"", False
    if not same or len(content) != stop - start:
        raise changed(path)
    return content


def changed(path: Path) -> StorageError:
    """The error of a file that is not what it was when its samples were found."""
    return StorageError(
        f"{path}: has changed while it was read, or since its samples were found; restore it, or "
        "leave it as it is and run `omnibal lengths` again (and `omnibal plan`, before training)"
    )
