"""Tokens of images and videos by sample. Attention is within an image or frame group."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omnibal.base.arrays import expand_ranges

# Image or video: frame groups (1 for an image), and tokens per group.
IMAGE = np.dtype([("times", "<i4"), ("tokens", "<i4")])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageSizes:
    """Native-resolution images and videos of samples, in token order."""

    images: np.ndarray  # IMAGE [images]
    counts: np.ndarray  # images and videos per sample, int64 [samples]

    @classmethod
    def join(cls, parts: Sequence["ImageSizes"]) -> "ImageSizes":
        return cls(
            images=np.concatenate([np.empty(0, IMAGE), *(part.images for part in parts)]),
            counts=np.concatenate([np.empty(0, np.int64), *(part.counts for part in parts)]),
        )

    @classmethod
    def none(cls, samples: int) -> "ImageSizes":
        """Return the sizes of `samples` samples without images."""
        return cls(images=np.empty(0, IMAGE), counts=np.zeros(samples, np.int64))

    def __len__(self) -> int:
        return len(self.counts)

    def take(self, rows: np.ndarray) -> "ImageSizes":
        counts, ends = self.counts[rows], np.cumsum(self.counts)
        _, chosen = expand_ranges(ends[rows] - counts, counts)
        return ImageSizes(images=self.images[chosen], counts=counts)

    def pieces(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens of samples' images and frame groups, and their number per sample, int64."""
        chosen = self.take(rows)
        times = chosen.images["times"].astype(np.int64)
        return np.repeat(chosen.images["tokens"].astype(np.int64), times), chosen._sums(times)

    @property
    def tokens(self) -> np.ndarray:
        """Tokens per sample, int64 [samples]."""
        return self._sums(self.images["times"] * self.images["tokens"].astype(np.int64))

    @property
    def squares(self) -> np.ndarray:
        """Sum of squared tokens of images and frame groups, int64 [samples]."""
        return self._sums(self.images["times"] * self.images["tokens"].astype(np.int64) ** 2)

    def _sums(self, of_images: np.ndarray) -> np.ndarray:
        sums, ends = np.append(0, np.cumsum(of_images)), np.cumsum(self.counts)
        return sums[ends] - sums[ends - self.counts]
