"""Distinct sizes (at most some 100,000) with sample counts, the input of the pack bound."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from omnibal.packing.fit import size_keys


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SizeCounts:
    """Distinct sizes in lexicographic order, with counts."""

    amounts: np.ndarray
    """int64 [features, sizes]."""
    counts: np.ndarray
    """int64 [sizes]."""

    def __len__(self) -> int:
        return len(self.counts)

    @classmethod
    def of(cls, sizes: np.ndarray) -> "SizeCounts":
        """Count samples of sizes int64 [features, samples]."""
        _, first, counts = np.unique(size_keys(sizes), return_index=True, return_counts=True)
        return cls(amounts=sizes[:, first], counts=counts)

    @classmethod
    def joined(cls, parts: Iterable["SizeCounts"]) -> "SizeCounts":
        """Join the counts of at least 1 part."""
        every = list(parts)
        amounts = np.concatenate([part.amounts for part in every], axis=1)
        counts = np.concatenate([part.counts for part in every])
        _, first, place = np.unique(size_keys(amounts), return_index=True, return_inverse=True)
        totals = np.bincount(place, weights=counts).astype(np.int64)  # exact below 2**53
        return cls(amounts=amounts[:, first], counts=totals)

    @property
    def sums(self) -> np.ndarray:
        """Feature sums over all samples, int64 [features]."""
        return self.amounts @ self.counts

    def of_features(self, rows: list[int]) -> "SizeCounts":
        """Counts by some of the features."""
        return SizeCounts.joined([SizeCounts(amounts=self.amounts[rows], counts=self.counts)])

    def in_common_units(self, caps: np.ndarray) -> tuple["SizeCounts", np.ndarray]:
        """Sizes and caps [features], divided by each feature's GCD."""
        units = np.maximum(np.gcd.reduce(self.amounts, axis=1), 1)
        alike = SizeCounts(amounts=self.amounts // units[:, None], counts=self.counts)
        return alike, np.maximum(caps // units, 1)

    def thinned(self, most: int) -> np.ndarray:
        """Sizes [features, samples] of about `most` samples in proportion, at least 1 per size."""
        copies = -(-self.counts * most // max(int(self.counts.sum()), most))
        return np.repeat(self.amounts, copies, axis=1)
