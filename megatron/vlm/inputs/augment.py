"""Random augmentation of tiles, a function of (seed, epoch, sample, tile) alone.

Shapes: T tiles, C channels, P pixels per side.
"""

import io
from enum import IntEnum

import numpy as np
from PIL import Image

_MIN_QUALITY, _MAX_QUALITY = 75, 100  # InternVL's range of JPEG qualities


class Purpose(IntEnum):
    """Purpose of random numbers. Streams of different purposes are independent."""

    JPEG_QUALITY = 0
    DROP_PATH = 1


def tile_keys(purpose: Purpose, seed: int, epoch: int, sample: int, tiles: int) -> np.ndarray:
    """Return a random 64-bit number per tile, uint64 [T]. `sample` is the annotation index."""
    # NumPy guarantees a seed sequence's words across versions and machines.
    sequence = np.random.SeedSequence(seed, spawn_key=(purpose, epoch, sample))
    return sequence.generate_state(tiles, np.uint64)


def jpeg_qualities(keys_T: np.ndarray) -> list[int]:
    """Return a JPEG quality per tile, uniform over InternVL's range."""
    return (_MIN_QUALITY + keys_T % np.uint64(_MAX_QUALITY - _MIN_QUALITY + 1)).tolist()


def compress_as_jpeg(tile_PPC: np.ndarray, quality: int) -> np.ndarray:
    """Return the uint8 tile after JPEG compression, InternVL's augmentation."""
    stored = io.BytesIO()
    Image.fromarray(tile_PPC).save(stored, format="JPEG", quality=quality)
    with Image.open(stored) as image:
        return np.asarray(image)
