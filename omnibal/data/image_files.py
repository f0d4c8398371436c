"""Images: which files are some, and where one is."""

from dataclasses import dataclass
from typing import BinaryIO

from PIL import UnidentifiedImageError

from omnibal.data.stored_files import StoredFile

IMAGE_SUFFIXES = frozenset(
    (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
)
"""File suffixes that mark an image where no record names it."""


@dataclass(frozen=True, slots=True)
class ImageFile(StoredFile):
    """An image that is opened when it is needed."""


def why_unreadable(error: Exception) -> str:
    """An error of reading an image, without the address of the object that was read."""
    return "no known image format" if isinstance(error, UnidentifiedImageError) else str(error)


_WEBP_HEADER_BYTES = 30


def webp_size(file: BinaryIO) -> tuple[int, int] | None:
    """Width and height of a whole WebP file by its first bytes; None of any other file.

    Pillow reads all of a WebP file to say its size. Where the first bytes are not as the format's
    specification has them (RFC 9649, section 2), or the file is shorter than they say, it is asked.
    """
    head = file.read(_WEBP_HEADER_BYTES)
    file.seek(0)
    is_webp = head[:4] == b"RIFF" and head[8:12] == b"WEBP"
    if not is_webp or len(head) < _WEBP_HEADER_BYTES:
        return None
    whole = file.seek(0, 2)
    file.seek(0)
    if whole < int.from_bytes(head[4:8], "little") + 8:
        return None
    match head[12:16]:
        case b"VP8X":  # extended: both sides less one, in 24 bits each
            sides = head[24:27], head[27:30]
            return int.from_bytes(sides[0], "little") + 1, int.from_bytes(sides[1], "little") + 1
        case b"VP8L" if head[20] == 0x2F:  # lossless: both sides less one, in 14 bits each
            bits = int.from_bytes(head[21:25], "little")
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 " if head[23:26] == b"\x9d\x01\x2a":  # lossy: 14 bits each, and scales
            sides = head[26:28], head[28:30]
            width, height = (int.from_bytes(side, "little") & 0x3FFF for side in sides)
            return width, height
    return None
