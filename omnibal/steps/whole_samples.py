"""Whole samples dealt: the rank of an encoding group that encodes each sample's images.

Attention within an image keeps it on one rank, and lengths count images per sample, so samples are
dealt whole by predicted time. A pipeline's ranks first take its own samples, longest first, up to
the lower bound of the max load. The remainder goes to the ranks with minimal load, and exchanges
then lower the maximum. Integer weights and stable sorts make all machines agree.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omnibal.steps.even_out import evened_out
from omnibal.steps.load_bounds import load_bound
from omnibal.steps.near_home import Homes

_NEAR = 1e-3
"""Max excess of the busiest rank over the bound, worth it to keep samples in their pipeline."""
HEAVIEST = 1 << 40
"""Max units of a sample or item, so that sums fit 64-bit integers."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DealtSamples:
    """Samples by rank, int64 [samples]."""

    rank: np.ndarray
    """Index of the rank among all groups."""
    place: np.ndarray
    """Index of the input sample."""
    items: np.ndarray
    squares: np.ndarray
    weight: np.ndarray
    pipeline: np.ndarray
    """Index of the sample's pipeline among all groups."""

    def of_ranks(self, of_sample: np.ndarray, ranks: int) -> np.ndarray:
        """Sum over samples of every rank, int64 [ranks]."""
        # Integer sums are exact below 2^53.
        return np.bincount(self.rank, of_sample, ranks).astype(np.int64)

    def at_home(self, homes: Homes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Items at home: per rank for its own pipeline, per rank in total, and per pipeline."""
        near = self.items * (homes.node[self.rank] == homes.home[self.pipeline])
        own = near * (homes.pipeline[self.rank] == self.pipeline)
        ranks = len(homes.node)
        of_pipeline = np.bincount(self.pipeline, near, len(homes.home)).astype(np.int64)
        return self.of_ranks(own, ranks), self.of_ranks(near, ranks), of_pipeline


def deal_samples(
    pipeline: np.ndarray,
    items: np.ndarray,
    squares: np.ndarray,
    weight: np.ndarray,
    *,
    pipelines: int,
    ranks_of_pipeline: int,
) -> DealtSamples:
    """Deal samples of many groups to their groups' ranks.

    Deterministic, so planner and ranks agree without communication. Groups are independent.

    Args:
        pipeline: of the sample, among all groups, int64 [samples].
        weight: of every sample, at least 1, int64 [samples].
        pipelines: L, of a group.
        ranks_of_pipeline: R. Rank r of all belongs to pipeline r // R.
    """
    group, rank = pipeline // pipelines, np.zeros(len(items), np.int64)
    by_group = np.argsort(group, kind="stable")
    bounds = np.flatnonzero(np.diff(group[by_group])) + 1
    for own in np.split(by_group, bounds) if len(items) else ():
        first = group[own[0]] * pipelines
        dealt = deal_group(weight[own], pipeline[own] - first, pipelines, ranks_of_pipeline)
        rank[own] = first * ranks_of_pipeline + dealt
    place = np.argsort(rank, kind="stable")
    return DealtSamples(
        rank=rank[place],
        place=place,
        items=items[place],
        squares=squares[place],
        weight=weight[place],
        pipeline=pipeline[place],
    )


def weights_of(sample_ms: np.ndarray, unit_ms: float) -> np.ndarray:
    """Convert times to units, at least 1, int64 [...]."""
    return np.clip(np.rint(sample_ms / unit_ms), 1, HEAVIEST).astype(np.int64)


def deal_group(
    weight: np.ndarray, pipeline: np.ndarray, pipelines: int, ranks_of_pipeline: int
) -> np.ndarray:
    """Rank of every sample of one group, from 0, int64 [samples]."""
    ranks, sizes = pipelines * ranks_of_pipeline, (pipelines, ranks_of_pipeline)
    if ranks == 1:
        return np.zeros(len(weight), np.int64)
    enough = load_bound(weight, ranks) * (1 + _NEAR)
    own = _own_first(weight.tolist(), pipeline.tolist(), sizes, enough)
    return evened_out(weight.astype(np.float64), own, ranks, enough)


def _own_first(
    weight: Sequence[int], pipeline: Sequence[int], sizes: tuple[int, int], enough: float
) -> np.ndarray:
    """Deal samples to their pipeline's least loaded rank within `enough`, else to the group's."""
    pipelines, of_pipeline = sizes
    heaps = [[(0, rank) for rank in range(home * of_pipeline, (home + 1) * of_pipeline)]
             for home in range(pipelines)]  # fmt: skip
    rank = np.empty(len(weight), np.int64)
    over = []
    for sample in sorted(range(len(weight)), key=lambda sample: -weight[sample]):
        heap = heaps[pipeline[sample]]
        load, first = heap[0]
        if load + weight[sample] > enough:
            over.append(sample)
            continue
        heapq.heapreplace(heap, (load + weight[sample], first))
        rank[sample] = first
    everyone = [entry for heap in heaps for entry in heap]
    heapq.heapify(everyone)
    for sample in over:
        load, first = everyone[0]
        heapq.heapreplace(everyone, (load + weight[sample], first))
        rank[sample] = first
    return rank
