"""Whole samples dealt: which rank of an encoding group encodes all images of which sample.

Positions of an image attend to each other, so that a rank encodes images whole; and lengths count
them by sample, so that all images of a sample are one rank's. Samples are dealt by predicted time.

A pipeline's ranks take its own samples, longest first, up to what the busiest rank has at least;
what is over goes to the rank with the least load of all, and exchanges lower the busiest one.

Weights are whole numbers, and nothing depends on how a library orders what is equal, so that all
machines agree.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omnibal.dispatch.even_out import evened_out
from omnibal.dispatch.load_bounds import load_bound
from omnibal.dispatch.near_home import Homes

_NEAR = 1e-3
"""Share by which the busiest rank may be above the bound: a pipeline's own samples are worth as
much, as the features of a cell take so much of its encoding's time to send."""
HEAVIEST = 1 << 40
"""Most units that a sample or an item weighs, so that sums of them are whole numbers of 64 bits."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DealtSamples:
    """Samples that ranks encode, by rank and as they were given; arrays are int64 [samples]."""

    rank: np.ndarray
    """Place of the rank among those of all groups."""
    place: np.ndarray
    """Place of the sample among those given."""
    items: np.ndarray
    squares: np.ndarray
    weight: np.ndarray
    """Units of time."""
    pipeline: np.ndarray
    """Place of the pipeline that holds the sample among those of all groups."""

    def of_ranks(self, of_sample: np.ndarray, ranks: int) -> np.ndarray:
        """Sum over samples of every rank, int64 [ranks]."""
        # Of whole numbers, in order: no sum is rounded below 2^53.
        return np.bincount(self.rank, of_sample, ranks).astype(np.int64)

    def at_home(self, homes: Homes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Items on the node of the first stage that needs them: of every rank, those of its own
        pipeline and all of them; all of every pipeline."""
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

    A function of its arguments alone, so that planner and all ranks agree without a word. A group's
    samples are dealt alike beside whatever others.

    Args:
        pipeline: that holds the sample, among those of all groups, int64 [samples].
        weight: of every sample, whole and at least 1, int64 [samples].
        pipelines: L, of a group.
        ranks_of_pipeline: R; rank r of all is of pipeline r // R.
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
    """Times of samples in such units, at least 1, int64 [...]."""
    return np.clip(np.rint(sample_ms / unit_ms), 1, HEAVIEST).astype(np.int64)


def deal_group(
    weight: np.ndarray, pipeline: np.ndarray, pipelines: int, ranks_of_pipeline: int
) -> np.ndarray:
    """The rank of every sample of one group, from 0, by its weight and the pipeline that holds it.
    int64 [samples]"""
    ranks, sizes = pipelines * ranks_of_pipeline, (pipelines, ranks_of_pipeline)
    if ranks == 1:
        return np.zeros(len(weight), np.int64)
    enough = load_bound(weight, ranks) * (1 + _NEAR)
    own = _own_first(weight.tolist(), pipeline.tolist(), sizes, enough)
    return evened_out(weight.astype(np.float64), own, ranks, enough)


def _own_first(
    weight: Sequence[int], pipeline: Sequence[int], sizes: tuple[int, int], enough: float
) -> np.ndarray:
    """Every sample to the rank of its pipeline with the least load if that stays within `enough`,
    else to the one with the least of all; longest samples first. int64 [samples]"""
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
