"""Image sizes from headers. Pixels are decoded only if the end of the file proves nothing."""

import math
import warnings
from typing import BinaryIO

from PIL import ExifTags, Image

from omnibal.base.errors import StorageError
from omnibal.data.stored_files import (
    REPLACE_REMEDY,
    BadFile,
    ImageFile,
    bad_file_errors,
    why_unreadable,
)

# Pillow warns about files that are read nevertheless, or refused with an error.
warnings.filterwarnings("ignore", module=r"PIL\.")

_END_MARKERS = {"PNG": b"IEND\xaeB`\x82", "JPEG": b"\xff\xd9", "MPO": b"\xff\xd9"}
_TAIL_BYTES = 1024  # file tail with the end marker
_DEEP_MODES = ("I", "F")  # prefixes of modes above 8 bits, which Pillow clips to white
_WEBP_HEADER_BYTES = 30  # up to the size in extended files
_WEBP_METADATA = 0x0C  # EXIF and XMP flags of extended files
_TURNED_ORIENTATIONS = (5, 6, 7, 8)  # EXIF orientations that swap width and height
_LATE_BYTES = 2**17  # PNG tail with EXIF after the pixels


def webp_size(file: BinaryIO) -> tuple[int, int] | None:
    """Return width and height of a complete WebP (RFC 9649, 2) in Pillow's limit, else None."""
    # Callers fall back to Pillow, which reads the whole file and refuses sizes above its limit.
    head = file.read(_WEBP_HEADER_BYTES)
    file.seek(0)
    is_webp = head[:4] == b"RIFF" and head[8:12] == b"WEBP"
    if not is_webp or len(head) < _WEBP_HEADER_BYTES:
        return None
    file_bytes = file.seek(0, 2)
    file.seek(0)
    if file_bytes < int.from_bytes(head[4:8], "little") + 8:
        return None
    match head[12:16]:
        case b"VP8X":  # extended: both sides less one, in 24 bits each
            width, height = (int.from_bytes(head[at : at + 3], "little") + 1 for at in (24, 27))
        case b"VP8L" if head[20] == 0x2F:  # lossless: both sides less one, in 14 bits each
            bits = int.from_bytes(head[21:25], "little")
            width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 " if head[23:26] == b"\x9d\x01\x2a":  # lossy: 14 bits each, and scales
            sides = (int.from_bytes(head[at : at + 2], "little") & 0x3FFF for at in (26, 28))
            width, height = sides
        case _:
            return None
    return None if width * height > (Image.MAX_IMAGE_PIXELS or math.inf) else (width, height)


def upright_size(file: BinaryIO) -> tuple[int, int]:
    """Return width and height in pixels after EXIF rotation; raises Pillow's errors."""
    head = file.read(_WEBP_HEADER_BYTES)
    file.seek(0)
    has_metadata = head[12:16] == b"VP8X" and head[20] & _WEBP_METADATA
    webp = webp_size(file)
    if webp is not None and not has_metadata:
        return webp
    with Image.open(file) as header:
        width, height = header.size
        if header.format == "TIFF":
            return width, height  # already rotated by Pillow
        may_have_exif = header.format != "PNG" or "exif" in header.info
        if not may_have_exif:
            # EXIF or XMP rarely follow a PNG's pixels.
            place = file.tell()
            file.seek(max(0, file.seek(0, 2) - _LATE_BYTES))
            end = file.read()
            file.seek(place)
            may_have_exif = b"eXIf" in end or b"adobe.xmp" in end
        # PNG's own getexif decodes the image.
        exif = header.getexif() if may_have_exif else Image.Image.getexif(header)
        is_turned = exif.get(ExifTags.Base.Orientation) in _TURNED_ORIENTATIONS
        return (height, width) if is_turned else (width, height)


def image_size(image: ImageFile) -> tuple[int, int]:
    """Return stored width and height; raises BadFile or StorageError."""
    try:
        with bad_file_errors(), image.open() as file:
            webp = webp_size(file)
            if webp is not None:
                return webp
            with Image.open(file) as header:
                size = header.size
                _check_depth(header)
                if not ends_as_whole(header, file):
                    as_rgb(header)
                return size
    except (BadFile, StorageError):
        raise
    except Exception as error:  # Pillow's errors have no common type
        raise BadFile(f"cannot be read ({why_unreadable(error)}); {REPLACE_REMEDY}") from error


def as_rgb(image: Image.Image) -> Image.Image:
    """Decode an image to 8-bit RGB; raises ValueError and Pillow's errors."""
    if image.format == "EPS":
        raise ValueError("PostScript is a program, which is not run")
    image.load()  # the mode of an ICNS is known then
    _check_depth(image)
    return image.convert("RGB")


def _check_depth(image: Image.Image) -> None:
    if image.mode.startswith(_DEEP_MODES):
        raise ValueError(f"grey above 8 bits (mode {image.mode}) becomes white: scale it to 8 bits")


def ends_as_whole(header: Image.Image, file: BinaryIO) -> bool:
    """Return whether a known end marker is at the end; raises ValueError if it is nowhere."""
    # A marker further in may belong to an embedded preview, so the caller decodes the image.
    marker, place = _END_MARKERS.get(header.format or ""), file.tell()
    if marker is None:
        return False
    file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
    is_at_end = marker in file.read()
    file.seek(0)
    if not is_at_end and marker not in file.read():
        raise ValueError("is truncated")
    file.seek(place)
    return is_at_end
