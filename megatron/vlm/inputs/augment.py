"""Random augmentation of tiles, drawn only from (seed, epoch, sample, tile).

Shapes: T tiles, C channels, P pixels per side.
"""

import io
from enum import IntEnum

import numpy as np
from PIL import Image

_MIN_QUALITY, _MAX_QUALITY = 75, 100  # InternVL's range


class Purpose(IntEnum):
    """Purpose of random numbers; purposes are independent."""

    JPEG_QUALITY = 0
    DROP_PATH = 1


def tile_keys(purpose: Purpose, seed: int, epoch: int, sample: int, tiles: int) -> np.ndarray:
    """Return a random 64-bit number per tile of a sample, by its annotation index, uint64 [T]."""
    # NumPy guarantees the same words for a seed sequence in every version and machine.
    sequence = np.random.SeedSequence(seed, spawn_key=(purpose, epoch, sample))
    return sequence.generate_state(tiles, np.uint64)


def jpeg_qualities(keys_T: np.ndarray) -> list[int]:
    """Draw uniform integers from 75 to 100, as InternVL."""
    return (_MIN_QUALITY + keys_T % np.uint64(_MAX_QUALITY - _MIN_QUALITY + 1)).tolist()


def compress_as_jpeg(tile_PPC: np.ndarray, quality: int) -> np.ndarray:
    """Compress and decompress the uint8 tile as JPEG, as InternVL in training."""
    stored = io.BytesIO()
    Image.fromarray(tile_PPC).save(stored, format="JPEG", quality=quality)
    with Image.open(stored) as image:
        return np.asarray(image)
