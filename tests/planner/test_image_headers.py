"""Sizes of images as they stand, beside Pillow's own turning of decoded ones."""

import io
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image, ImageOps

from omnibal.data.image_headers import image_size, upright_size
from omnibal.data.stored_files import ImageFile

SIZE = (30, 20)


def upright_by_decoding(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).size


def upright(path: Path) -> tuple[int, int]:
    with path.open("rb") as file:
        return upright_size(file)


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
def test_sizes_as_exif_says_that_an_image_stands(tmp_path, suffix):
    """Prevents: rows that are taken for columns, where a telephone was held upright."""
    found = set()
    for orientation in range(1, 9):
        path = tmp_path / f"{orientation}.{suffix}"
        Image.new("RGB", SIZE, 7).save(path, exif=turned(orientation))
        size = upright(path)
        assert size == upright_by_decoding(path)
        found.add(size)
    assert found == {SIZE, SIZE[::-1]}
    plain = tmp_path / f"plain.{suffix}"
    Image.new("RGB", SIZE, 7).save(plain)
    assert upright(plain) == image_size(ImageFile(plain)) == SIZE


def chunk(name: bytes, content: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(name + content))
    return struct.pack(">I", len(content)) + name + content + check


def test_exif_behind_the_pixels_of_a_png_counts(tmp_path):
    """Prevents: a size that is other than the decoded image's, as its EXIF stands at the end."""
    stored = io.BytesIO()
    Image.new("RGB", SIZE, 7).save(stored, "PNG")
    end = chunk(b"IEND", b"")
    body = stored.getvalue().removesuffix(end)
    exif = turned(6).tobytes().removeprefix(b"Exif\0\0")
    xmp = b"XML:com.adobe.xmp\0\0\0\0\0<tiff:Orientation>8</tiff:Orientation>"
    for name, behind in (("exif", chunk(b"eXIf", exif)), ("xmp", chunk(b"iTXt", xmp))):
        path = tmp_path / f"{name}.png"
        path.write_bytes(body + behind + end)
        assert upright_by_decoding(path) == SIZE[::-1]
        assert upright(path) == SIZE[::-1]
        assert image_size(ImageFile(path)) == SIZE
