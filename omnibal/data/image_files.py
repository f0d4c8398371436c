"""Images: which files are some, and where one is."""

from dataclasses import dataclass

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
