"""Ways of resizing, as torchvision names them."""

from enum import Enum


class InterpolationMode(Enum):
    """Filters by which torchvision resizes."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
