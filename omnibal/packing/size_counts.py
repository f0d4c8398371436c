"""Sizes of samples with how many samples have each: all that a bound needs to know of them.

However many samples there are, distinct sizes are at most some hundred thousand, so that data that
is packed in parts is counted part by part and proven together.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from omnibal.packing.fit import size_keys


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SizeCounts:
    """Distinct sizes, sorted by the first feature, then by the next, and the samples of each."""

    amounts: np.ndarray
    """Amount of every feature in every size, int64 [features, sizes]."""
    counts: np.ndarray
    """Samples of every size, int64 [sizes]."""

    def __len__(self) -> int:
        return len(self.counts)

    @classmethod
    def of(cls, sizes: np.ndarray) -> "SizeCounts":
        """Count samples of sizes int64 [features, samples]."""
        _, first, counts = np.unique(size_keys(sizes), return_index=True, return_counts=True)
        return cls(amounts=sizes[:, first], counts=counts)

    @classmethod
    def joined(cls, parts: Iterable["SizeCounts"]) -> "SizeCounts":
        """Count the samples of all parts, of which there must be one at least."""
        every = list(parts)
        amounts = np.concatenate([part.amounts for part in every], axis=1)
        counts = np.concatenate([part.counts for part in every])
        _, first, place = np.unique(size_keys(amounts), return_index=True, return_inverse=True)
        totals = np.bincount(place, weights=counts).astype(np.int64)  # exact below 2**53
        return cls(amounts=amounts[:, first], counts=totals)

    @property
    def sums(self) -> np.ndarray:
        """Sum of every feature over all samples, int64 [features]."""
        return self.amounts @ self.counts

    def of_features(self, rows: list[int]) -> "SizeCounts":
        """Count the samples by some of the features alone."""
        return SizeCounts.joined([SizeCounts(amounts=self.amounts[rows], counts=self.counts)])

    def in_common_units(self, caps: np.ndarray) -> tuple["SizeCounts", np.ndarray]:
        """Sizes and caps [features], each feature in its greatest common divisor."""
        units = np.maximum(np.gcd.reduce(self.amounts, axis=1), 1)
        alike = SizeCounts(amounts=self.amounts // units[:, None], counts=self.counts)
        return alike, np.maximum(caps // units, 1)

    def thinned(self, most: int) -> np.ndarray:
        """Sizes [features, samples] of about `most` samples in proportion, and one of each size at
        least."""
        copies = -(-self.counts * most // max(int(self.counts.sum()), most))
        return np.repeat(self.amounts, copies, axis=1)
