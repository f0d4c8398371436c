"""Sizes of images: tokens of every image and video of every sample, one sample after the other.

What attends together is an image, or one time of a video, so that these are what may be divided.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

IMAGE = np.dtype([("times", "<i4"), ("tokens", "<i4")])
"""An image or a video: patches of frames in time, 1 of an image, and the tokens of each."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageSizes:
    """Images and videos of samples, at their native resolution, in the order of their tokens."""

    images: np.ndarray
    """IMAGE [images]."""
    counts: np.ndarray
    """Images and videos of every sample, int64 [samples]."""

    @classmethod
    def joined(cls, parts: Sequence["ImageSizes"]) -> "ImageSizes":
        """Join the samples of several, in order."""
        return cls(
            images=np.concatenate([np.empty(0, IMAGE), *(part.images for part in parts)]),
            counts=np.concatenate([np.empty(0, np.int64), *(part.counts for part in parts)]),
        )

    @classmethod
    def none(cls, samples: int) -> "ImageSizes":
        """Samples that show nothing."""
        return cls(images=np.empty(0, IMAGE), counts=np.zeros(samples, np.int64))

    def __len__(self) -> int:
        return len(self.counts)

    def take(self, rows: np.ndarray) -> "ImageSizes":
        """Select the samples of these rows."""
        counts, ends = self.counts[rows], np.cumsum(self.counts)
        return ImageSizes(
            images=self.images[numbers_of_runs(ends[rows] - counts, counts)], counts=counts
        )

    def pieces(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of every image and of every time of a video of some samples, one after the other,
        and how many of these each sample has; both int64."""
        own = self.take(rows)
        times = own.images["times"].astype(np.int64)
        return np.repeat(own.images["tokens"].astype(np.int64), times), own._sums(times)

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of all of a sample's, int64 [samples]."""
        return self._sums(self.images["times"] * self.images["tokens"].astype(np.int64))

    @property
    def squares(self) -> np.ndarray:
        """Sum over its images and times of the square of each one's tokens, int64 [samples]."""
        return self._sums(self.images["times"] * self.images["tokens"].astype(np.int64) ** 2)

    def _sums(self, of_images: np.ndarray) -> np.ndarray:
        sums, ends = np.append(0, np.cumsum(of_images)), np.cumsum(self.counts)
        return sums[ends] - sums[ends - self.counts]


def numbers_of_runs(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Numbers of runs of so many from each start on, one run after the other.

    Example:
        >>> numbers_of_runs(np.array([4, 0]), np.array([2, 3])).tolist()
        [4, 5, 0, 1, 2]
    """
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)
