"""Whole samples dealt: the rank of an encoding group that encodes each sample's images.

Attention within an image keeps it on one rank, and lengths count images per sample, so samples are
dealt whole by predicted time. A pipeline's ranks first take its own samples, longest first, up to
the lower bound of the max load. The remainder goes to the ranks with minimal load, and exchanges
then lower the maximum. Integer weights and stable sorts make all machines agree.

A share of a shared pack has the parts of samples that it encodes (`omnibal.steps.item_shares`), so
its items are a run of the pack's.

A pass has consecutive samples within an item limit, or one larger sample. Activations of a rank's
first samples are kept within another limit, and no pass mixes kept and other samples.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.model.config import ModelConfig
from omnibal.model.data_parallel_encoders import (
    DataParallelEncoders,
    SampleTimes,
    takes_whole_samples,
)
from omnibal.model.encoders import squares_of
from omnibal.model.levels import Level
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.steps.balance import even_out, load_bound
from omnibal.steps.item_shares import ImagePieces
from omnibal.steps.items import HEAVIEST, NO_LOAD, Homes, unit_of_time
from omnibal.steps.shares import Shares, shares_of

_NEAR = 1e-3
"""Max excess of the busiest rank over the bound, worth it to keep samples in their pipeline."""


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
    """Deal samples of many independent groups to their groups' ranks, all int64 [samples].

    `pipeline` counts through all groups of L = `pipelines`, `weight` is at least 1, and rank r of
    all belongs to pipeline r // R, R = `ranks_of_pipeline`. Deterministic, so planner and ranks
    agree without communication.
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
    ranks, rank = pipelines * ranks_of_pipeline, np.zeros(len(weight), np.int64)
    if ranks == 1:
        return rank
    enough = load_bound(weight, ranks) * (1 + _NEAR)
    entries = [(0, number) for number in range(ranks)]
    heaps = [entries[first : first + ranks_of_pipeline]
             for first in range(0, ranks, ranks_of_pipeline)]  # fmt: skip
    weights, homes, over = weight.tolist(), pipeline.tolist(), []
    for sample in sorted(range(len(weight)), key=lambda sample: -weights[sample]):
        heap = heaps[homes[sample]]
        load, rank[sample] = heap[0]
        if load + weights[sample] > enough:
            over.append(sample)
        else:
            heapq.heapreplace(heap, (load + weights[sample], heap[0][1]))
    all_ranks = [entry for heap in heaps for entry in heap]
    heapq.heapify(all_ranks)
    for sample in over:
        load, rank[sample] = all_ranks[0]
        heapq.heapreplace(all_ranks, (load + weights[sample], all_ranks[0][1]))
    return even_out(weight.astype(np.float64), rank, ranks, enough)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleItems:
    """Samples with items, or their parts, by row. A row is a share, in the order of `shares_of`."""

    rows: Packs
    """Samples of every row, as indices into `items` and `squares`. Rows may be empty."""
    items: np.ndarray
    """Items of every sample, and of every part of a divided sample, int64."""
    squares: np.ndarray
    """Sum of squared items per image and frame, int64."""
    _dealt: dict[object, DealtSamples] = field(default_factory=dict, repr=False)
    """Cache of dealt samples, for repeated queries of a search."""

    @classmethod
    def of(
        cls,
        packs: ScheduledPacks,
        lengths: Lengths,
        levels: Sequence[Level],
        feature: str,
        shares: Shares | None = None,
    ) -> Self:
        """Samples with items of a feature in every share."""
        shares = shares_of(packs, levels) if shares is None else shares
        context = np.array([level.context for level in levels])[packs.level]
        first = np.cumsum(context) - context
        row_of_part = np.empty(int(context.sum()), np.int64)
        row_of_part[first[shares.pack] + shares.part] = np.arange(len(shares))
        whole = [lengths.column(name).astype(np.int64) for name in (feature, squares_of(feature))]
        held, parts = [], [np.stack(whole)]
        for number, level in enumerate(levels):
            chosen = np.flatnonzero(packs.level == number)
            some = packs.packs.take(chosen)
            if level.context == 1:
                place = some.pack_of_sample
                held.append(np.stack([chosen[place], 0 * place, some.samples]))
            else:
                place, part, *sums = _parts(ImagePieces.of(some, lengths), level)
                numbers = sum(each.shape[1] for each in parts) + np.arange(len(place))
                held.append(np.stack([chosen[place], part, numbers]))
                parts.append(np.stack(sums))
        items, squares = np.concatenate(parts, axis=1)
        pack, part, sample = np.concatenate(held, axis=1)
        has_any = items[sample] > 0
        pack, part, sample = pack[has_any], part[has_any], sample[has_any]
        row = row_of_part[first[pack] + part]
        sizes = np.bincount(row, minlength=len(shares))
        order = np.argsort(row, kind="stable")
        rows = Packs(samples=sample[order], offsets=np.append(0, np.cumsum(sizes)))
        return cls(rows=rows, items=items, squares=squares)

    def take(self, rows: np.ndarray) -> Self:
        """Select rows by mask or indices."""
        indices = np.flatnonzero(rows) if rows.dtype == bool else rows
        return replace(self, rows=self.rows.take(indices), _dealt={})

    def with_empty(self, rows: int) -> Self:
        offsets = np.append(self.rows.offsets, np.full(rows, self.rows.offsets[-1]))
        return replace(self, rows=replace(self.rows, offsets=offsets), _dealt={})

    @property
    def row(self) -> np.ndarray:
        """Row of every sample of `rows`."""
        return np.repeat(np.arange(len(self.rows)), np.diff(self.rows.offsets))

    @property
    def of_rows(self) -> np.ndarray:
        """Items of every row, int64 [rows]."""
        return np.diff(np.append(0, np.cumsum(self.items[self.rows.samples]))[self.rows.offsets])

    def deal(
        self,
        pipeline: np.ndarray,
        *,
        pipelines: int,
        ranks_of_pipeline: int,
        times: SampleTimes,
        unit_ms: float,
    ) -> DealtSamples:
        """Deal samples to their groups' ranks. `pipeline`, int64 [rows], is equal in all calls."""
        sizes = pipelines, ranks_of_pipeline, times, unit_ms
        if sizes not in self._dealt:
            items, squares = (each[self.rows.samples] for each in (self.items, self.squares))
            self._dealt[sizes] = deal_samples(
                pipeline[self.row],
                items,
                squares,
                weights_of(times.ms(items, squares), unit_ms) if unit_ms else items,
                pipelines=pipelines,
                ranks_of_pipeline=ranks_of_pipeline,
            )
        return self._dealt[sizes]


def deal_whole_samples(
    samples: Mapping[str, SampleItems],
    pipeline: np.ndarray,
    beside: DataParallelEncoders,
    *,
    ranks_of_pipeline: int,
    groups: int,
) -> tuple[dict[str, DealtSamples], np.ndarray]:
    """Deal samples, by whole-sample encoder, to the ranks of their groups.

    `pipeline` of each row counts through all groups, int64 [rows]. Also returns the load of every
    rank in units of `unit_of_time`, int64 [groups, ranks of a group], or `NO_LOAD`.
    """
    dealt, load = dict[str, DealtSamples](), NO_LOAD
    size = beside.pipelines * ranks_of_pipeline
    for name, of_rows in samples.items():
        dealt[name] = of_rows.deal(
            pipeline,
            pipelines=beside.pipelines,
            ranks_of_pipeline=ranks_of_pipeline,
            times=beside.sample_times[name],
            unit_ms=unit_of_time(beside.item_ms, beside.square_ms),
        )
        weights = dealt[name].of_ranks(dealt[name].weight, groups * size)
        load = load + weights.reshape(groups, size)
    return dealt, load


def samples_of_shares(
    model: ModelConfig,
    packs: ScheduledPacks,
    lengths: Lengths,
    levels: Sequence[Level],
    shares: Shares,
) -> dict[str, SampleItems]:
    """Samples of every share, by feature of whole-sample encoders."""
    whole = {model.encoders[name].feature for name in takes_whole_samples(model)}
    return {name: SampleItems.of(packs, lengths, levels, name, shares) for name in whole}


def _parts(pieces: ImagePieces, level: Level) -> np.ndarray:
    """Parts of shared packs' samples: pack, rank in its block, items, squares, int64 [4, parts]."""
    bounds = pieces.bounds(level)
    pack, part = np.indices(np.diff(bounds).shape).reshape(2, -1)
    pack, part = (np.repeat(each, np.diff(bounds).ravel()) for each in (pack, part))
    share = pack * level.context + part
    is_first = (np.diff(pieces.sample, prepend=-1) != 0) | (np.diff(share, prepend=-1) != 0)
    first = np.flatnonzero(is_first)
    sums = [np.add.reduceat(each, first) if len(first) else each
            for each in (pieces.tokens, pieces.squares)]  # fmt: skip
    return np.stack([pack[first], part[first], *sums])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplePasses:
    """Passes of all ranks, by rank and in running order, [passes]."""

    rank: np.ndarray
    """Index of the rank as dealt, int64, like the next four."""
    first: np.ndarray
    """First dealt sample of the pass."""
    stop: np.ndarray
    """End (exclusive) of its samples."""
    items: np.ndarray
    squares: np.ndarray
    is_kept: np.ndarray
    """Whether activations are kept for the backward, bool."""

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def number(self) -> np.ndarray:
        """Index of every pass among its rank's kept or not kept passes."""
        begins = _begins(2 * self.rank + ~self.is_kept)
        return np.arange(len(self)) - _of_run(np.flatnonzero(begins), begins)


def passes_of_samples(dealt: DealtSamples, items_per_pass: int, kept_items: int) -> SamplePasses:
    """Passes of dealt samples. A rank keeps activations of at most `kept_items` items."""
    ends, items = np.cumsum(dealt.items), dealt.items
    begins = _begins(dealt.rank)
    before_rank = _of_run((ends - items)[begins], begins)
    is_kept = ends - before_rank <= kept_items
    begins_run = _begins(2 * dealt.rank + ~is_kept)
    run_firsts = np.flatnonzero(begins_run)
    run_stop = _of_run(np.append(run_firsts[1:], len(items)), begins_run)
    firsts, stops = [], []
    at = run_firsts
    # One more pass for every run with samples left.
    while len(at):
        stop = np.searchsorted(ends, (ends - items)[at] + items_per_pass, "right")
        stop = np.minimum(np.maximum(stop, at + 1), run_stop[at])
        firsts.append(at)
        stops.append(stop)
        at = stop[stop < run_stop[at]]
    first, stop = (np.sort(np.concatenate([run_firsts[:0], *each])) for each in (firsts, stops))
    sums = [np.append(0, np.cumsum(each)) for each in (items, dealt.squares)]
    return SamplePasses(
        rank=dealt.rank[first],
        first=first,
        stop=stop,
        items=sums[0][stop] - sums[0][first],
        squares=sums[1][stop] - sums[1][first],
        is_kept=is_kept[first],
    )


def _begins(key: np.ndarray) -> np.ndarray:
    """Whether a run of equal keys begins, bool."""
    return np.diff(key, prepend=-1) != 0


def _of_run(values: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Value of each element's run."""
    return values[np.cumsum(begins) - 1]
