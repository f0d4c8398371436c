"""Images, videos and recordings of samples: files of their own, or byte ranges of a tar shard."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, BinaryIO

from PIL import UnidentifiedImageError

from omnibal.base.remote_path import RemotePath, SeekableBytes

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_DIGITS = re.compile(r"(\d+)")

IMAGE_SUFFIXES = frozenset(
    (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
)
"""File suffixes that mark an image where no record names it."""
AUDIO_SUFFIXES = frozenset((".flac", ".wav"))
"""File suffixes that mark a recording where no record names it."""
VIDEO_SUFFIXES = frozenset((".avi", ".flv", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".webm"))
"""File suffixes that mark a video."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that is opened when it is needed."""

    path: Path
    """The file, or the shard that holds it."""
    name: str | None = None
    """Name of the shard's member; None for a file of its own."""
    offset: int = 0
    """Offset of the member's first byte in the shard."""
    size: int = 0
    """Size of the member in bytes; 0 for a file of its own."""
    opener: Callable[[], BinaryIO] | None = None
    """Opens a file inside a row; None for all others."""

    def __str__(self) -> str:
        return str(self.path) if self.name is None else f"{self.path}: {self.name}"

    def open(self) -> BinaryIO:
        """Open the bytes as a file; raises OSError."""
        if self.opener is not None:
            return self.opener()
        if self.name is None:
            return self.path.open("rb")
        return open_range(self.path, self.offset, self.size)


@dataclass(frozen=True, slots=True)
class HeldFile:
    """A file whose bytes a record holds."""

    content: bytes

    def __str__(self) -> str:
        return f"of {len(self.content):,} bytes"

    def open(self) -> BinaryIO:
        """Open the bytes as a file."""
        return io.BytesIO(self.content)


def is_video_file(name: str) -> bool:
    """Whether a file name is that of a video."""
    return PurePath(name).suffix.lower() in VIDEO_SUFFIXES


def open_range(path: Path, offset: int, size: int) -> BinaryIO:
    """Open `size` bytes of a file as a file, shorter where the file ends early."""
    return io.BufferedReader(_ByteRange(path.open("rb", buffering=0), offset, size))


def natural_order(name: str) -> tuple[list[str | int], str]:
    """Sorting key by which frame2 comes before frame10."""
    parts: list[str | int] = list(_DIGITS.split(name))
    parts[1::2] = map(int, parts[1::2])
    return parts, name


class _ByteRange(SeekableBytes):
    """Closes the file that it reads when it is closed."""

    def __init__(self, file: io.FileIO, offset: int, size: int) -> None:
        super().__init__(size)
        self._file, self._offset = file, offset

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        whole = memoryview(buffer)
        wanted = max(0, min(len(whole), self.size - self.place))
        self._file.seek(self._offset + self.place)
        read = self._file.readinto(whole[:wanted])
        self.place += read
        return read

    def close(self) -> None:
        self._file.close()
        super().close()


@dataclass(frozen=True, slots=True)
class ImageFile(StoredFile):
    """An image that is opened when it is needed."""


@dataclass(frozen=True, slots=True)
class AudioFile(StoredFile):
    """A recording that is opened when it is needed."""

    def open(self) -> BinaryIO:
        """Open the bytes as a file; raises OSError."""
        file = StoredFile.open(self)
        if not isinstance(self.path, RemotePath):
            return file
        with file:  # libsndfile takes any error of a storage for a broken recording
            return io.BytesIO(file.read())


@dataclass(frozen=True, slots=True)
class VideoFile(StoredFile):
    """A video in one file, that is opened when it is needed."""


def why_unreadable(error: Exception) -> str:
    """An error of reading an image, without the address of the object that was read."""
    return "no known image format" if isinstance(error, UnidentifiedImageError) else str(error)
