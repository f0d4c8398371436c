"""Read image sizes from headers; pixels are decoded only if a file's end looks wrong."""

from typing import BinaryIO

from PIL import ExifTags, Image

from omnibal.base.errors import StorageError
from omnibal.data.stored_files import HeldFile, ImageFile, why_unreadable

_END_MARKERS = {"PNG": b"IEND\xaeB`\x82", "JPEG": b"\xff\xd9", "MPO": b"\xff\xd9"}
_TAIL_BYTES = 1024  # file tail with the end marker
_WEBP_HEADER_BYTES = 30  # up to the size in extended files
_WEBP_METADATA = 0x0C  # EXIF and XMP flags of extended files
_TURNED = (5, 6, 7, 8)  # EXIF orientations that swap width and height
_LATE_BYTES = 2**17  # PNG tail with EXIF after the pixels


def webp_size(file: BinaryIO) -> tuple[int, int] | None:
    """Width and height of a complete WebP (RFC 9649, section 2), otherwise None.

    Pillow is the fallback, as it reads a whole WebP for its size.
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


class BadImage(ValueError):
    """Unusable image, with a remedy. The caller adds the sample."""


def upright_size(file: BinaryIO) -> tuple[int, int]:
    """Width and height in pixels after EXIF rotation; raises Pillow's errors."""
    webp = webp_size(file)
    if webp is not None and not _has_metadata(file):
        return webp
    with Image.open(file) as header:
        width, height = header.size
        return (height, width) if _is_turned(header, file) else (width, height)


def _has_metadata(file: BinaryIO) -> bool:
    head = file.read(_WEBP_HEADER_BYTES)
    file.seek(0)
    return head[12:16] == b"VP8X" and bool(head[20] & _WEBP_METADATA)


def _is_turned(header: Image.Image, file: BinaryIO) -> bool:
    """Whether EXIF swaps rows and columns."""
    if header.format == "TIFF":
        return False  # Pillow already rotated its size
    if header.format != "PNG" or "exif" in header.info or _has_late_exif(file):
        exif = header.getexif()
    else:
        exif = Image.Image.getexif(header)  # PNG's own getexif decodes the image
    return exif.get(ExifTags.Base.Orientation) in _TURNED


def _has_late_exif(file: BinaryIO) -> bool:
    """Whether EXIF or XMP may follow a PNG's pixels, which is rare."""
    place = file.tell()
    file.seek(max(0, file.seek(0, 2) - _LATE_BYTES))
    end = file.read()
    file.seek(place)
    return b"eXIf" in end or b"adobe.xmp" in end


def image_size(image: ImageFile | HeldFile) -> tuple[int, int]:
    """Stored width and height in pixels of a complete image.

    Raises:
        BadImage: missing, broken or truncated.
        IsADirectoryError: a folder.
    """
    try:
        with image.open() as file:
            webp = webp_size(file)
            if webp is not None:
                return webp
            with Image.open(file) as header:
                size, image_format = header.size, header.format
            truncated = _is_truncated(file, _END_MARKERS.get(image_format or "", b""))
    except FileNotFoundError as error:
        raise BadImage(
            f"image {image} does not exist; correct the path, or root in the meta"
        ) from error
    except (IsADirectoryError, StorageError):
        raise
    except Exception as error:  # Pillow's errors have no common type
        raise BadImage(
            f"image {image} cannot be read ({why_unreadable(error)}); replace the file or remove "
            "the sample"
        ) from error
    if truncated:
        raise BadImage(f"image {image} is truncated; fetch the file again or remove the sample")
    return size


def _is_truncated(file: BinaryIO, end_marker: bytes) -> bool:
    """Whether an image lacks its format's end marker.

    A marker further in may belong to an embedded preview, so the image is decoded.
    """
    size = file.seek(0, 2)
    file.seek(max(0, size - _TAIL_BYTES))
    if end_marker in file.read(_TAIL_BYTES):
        return False
    file.seek(0)
    if end_marker not in file.read():
        return True
    file.seek(0)
    try:
        with Image.open(file) as image:
            image.load()
    except Exception:
        return True
    return False
