"""Media files of samples: separate files or byte ranges of tar shards."""

import errno
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, BinaryIO

from PIL import UnidentifiedImageError

from omnibal.base.files import is_stream
from omnibal.base.remote_path import RemotePath, SeekableBytes

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

REPLACE_REMEDY = "replace the file or remove the sample"
_DIGIT_RUNS = re.compile(r"(\d+)")

# Suffixes of images not named in a record.
IMAGE_SUFFIXES = frozenset(
    ".avif .bmp .gif .jfif .jp2 .jpeg .jpg .png .ppm .tga .tif .tiff .webp".split()
)
AUDIO_SUFFIXES = frozenset((".flac", ".wav"))  # suffixes of recordings not named in a record
VIDEO_SUFFIXES = frozenset(".avi .flv .m4v .mkv .mov .mp4 .mpeg .mpg .webm .wmv".split())


class BadFile(ValueError):
    """Unusable image, video or recording, with a remedy. The caller adds its name."""


@contextmanager
def bad_file_errors() -> Iterator[None]:
    """Raise errors of a missing or unreadable file, and of a folder, as BadFile."""
    try:
        yield
    except FileNotFoundError as error:
        raise BadFile("does not exist; correct the path, or root in the meta") from error
    except IsADirectoryError as error:
        raise BadFile("is a folder; name a file in it, or fill it with frames") from error
    except OSError as error:
        raise BadFile(f"cannot be read ({why_unreadable(error)}); {REPLACE_REMEDY}") from error


@dataclass(frozen=True, slots=True)
class StoredFile:
    """File opened on demand."""

    path: Path  # file, or the shard that contains it
    name: str | None = None  # member name in the shard, None for a separate file
    offset: int = 0  # byte offset in the shard
    size: int = 0  # bytes in the shard, 0 for a separate file
    # Opens a file stored in a row, with its place in `name`.
    opener: Callable[[], BinaryIO] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return str(self.path) if self.name is None else f"{self.path}: {self.name}"

    def open(self) -> BinaryIO:
        """Open the bytes as a file; raises OSError."""
        if self.opener is not None:
            return self.opener()
        if self.name is None:
            if is_stream(self.path):
                raise OSError(errno.EINVAL, "Is a pipe or a device", str(self.path))
            return self.path.open("rb")
        return open_range(self.path, self.offset, self.size)


def is_video_file(name: str) -> bool:
    return PurePath(name).suffix.lower() in VIDEO_SUFFIXES


def open_range(path: Path, offset: int, size: int) -> BinaryIO:
    """Open `size` bytes from `offset` as a file, fewer at the file's end."""
    return io.BufferedReader(_ByteRange(path.open("rb", buffering=0), offset, size))


def natural_order(name: str) -> tuple[list[str | int], str]:
    """Return a sort key that puts frame2 before frame10."""
    parts: list[str | int] = list(_DIGIT_RUNS.split(name))
    parts[1::2] = map(int, parts[1::2])
    return parts, name


class _ByteRange(SeekableBytes):
    """Byte range of a file, as a file. Closing it closes both."""

    def __init__(self, file: io.FileIO, offset: int, size: int) -> None:
        super().__init__(size)
        self._file, self._offset = file, offset

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        view = memoryview(buffer)
        wanted = max(0, min(len(view), self.size - self.place))
        self._file.seek(self._offset + self.place)
        read = self._file.readinto(view[:wanted])
        self.place += read
        return read

    def close(self) -> None:
        self._file.close()
        super().close()


@dataclass(frozen=True, slots=True)
class ImageFile(StoredFile):
    """Image opened on demand."""


@dataclass(frozen=True, slots=True)
class AudioFile(StoredFile):
    """Recording opened on demand."""

    def open(self) -> BinaryIO:
        """Open the bytes as a file; raises OSError."""
        file = StoredFile.open(self)
        if not isinstance(self.path, RemotePath):
            return file
        with file:  # libsndfile reports storage errors as broken recordings
            return io.BytesIO(file.read())


@dataclass(frozen=True, slots=True)
class VideoFile(StoredFile):
    """Video file opened on demand."""


def why_unreadable(error: Exception) -> str:
    """Return an error's message without path and number; Pillow's may hold an object's address."""
    if isinstance(error, UnidentifiedImageError):
        return "no known image format"
    return (isinstance(error, OSError) and error.strerror) or str(error)
