"""Random augmentation of a sample's tiles, drawn from (seed, epoch, sample, tile) alone.

No draw depends on process, worker, pack or split, nor on how many were made before it.

Shapes: T tiles, C channels, P pixels per side.
"""

import io
from enum import IntEnum

import numpy as np
from PIL import Image

_MIN_QUALITY, _MAX_QUALITY = 75, 100  # InternVL's range


class Purpose(IntEnum):
    """Purpose of random numbers; numbers of different purposes are independent."""

    JPEG_QUALITY = 0
    DROP_PATH = 1


def tile_keys(purpose: Purpose, seed: int, epoch: int, sample: int, tiles: int) -> np.ndarray:
    """A random 64-bit number for each tile of a sample, by its place in the annotations.
    uint64 [T]"""
    # Numpy promises that a seed sequence gives the same words in every version on every machine.
    sequence = np.random.SeedSequence(seed, spawn_key=(purpose, epoch, sample))
    return sequence.generate_state(tiles, np.uint64)


def jpeg_qualities(keys_T: np.ndarray) -> list[int]:
    """InternVL's draw: a whole number from 75 to 100, all equally likely."""
    return (_MIN_QUALITY + keys_T % np.uint64(_MAX_QUALITY - _MIN_QUALITY + 1)).tolist()


def degraded(tile_PPC: np.ndarray, quality: int) -> np.ndarray:
    """The uint8 tile after it was stored as JPEG, as InternVL augments in training."""
    stored = io.BytesIO()
    Image.fromarray(tile_PPC).save(stored, format="JPEG", quality=quality)
    with Image.open(stored) as image:
        return np.asarray(image)
