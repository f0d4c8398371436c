"""Assign samples to data-parallel encoder ranks, for encoders with attention across items.

Attention within an image keeps it on one rank, and lengths count images per sample, so samples are
dealt whole by predicted time. A pipeline's ranks first take its own samples, longest first, up to
the lower bound of the max load. The remainder goes to the ranks with minimal load, and swaps then
lower the maximum. Integer weights and stable sorts make all machines agree.

A context-parallel pack's samples are divided over its ranks beforehand (`steps/item_shares.py`).

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
from omnibal.model.data_parallel_encoders import DataParallelEncoders, takes_whole_samples
from omnibal.model.encoders import squares_of
from omnibal.model.levels import Level
from omnibal.packing.balance import load_bound, lower_max_load
from omnibal.packing.item_shares import ImagePieces
from omnibal.packing.items import MAX_UNITS, NO_LOAD, Homes, unit_of_time
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.packing.shares import Shares, shares_of

_HOME_SLACK = 1e-3  # max excess over the bound to keep samples on their pipeline's ranks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DealtSamples:
    """Samples in order of their ranks, int64 [samples]."""

    rank: np.ndarray  # index of the rank among all groups
    place: np.ndarray  # index of the input sample
    items: np.ndarray
    squares: np.ndarray  # sum of squared items per image and frame
    weight: np.ndarray  # load, as predicted time
    pipeline: np.ndarray  # index of the sample's pipeline among all groups

    def of_ranks(self, of_sample: np.ndarray, ranks: int) -> np.ndarray:
        """Return the sum of `of_sample` over every rank's samples, int64 [ranks]."""
        # bincount sums in float64, exact for integers below 2^53.
        return np.bincount(self.rank, of_sample, ranks).astype(np.int64)

    def at_home(self, homes: Homes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Count items on their pipeline's node: per rank (own pipeline; all), and per pipeline."""
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
    """Deal samples of many independent groups to their groups' ranks.

    Deterministic, so planner and ranks agree without communication. Arrays are int64 [samples].

    Args:
        pipeline: index of every sample's pipeline among all groups.
        weight: load of every sample, at least 1.
        pipelines: number in a group.
        ranks_of_pipeline: R. Rank r among all groups belongs to pipeline r // R.
    """
    group, rank = pipeline // pipelines, np.zeros(len(items), np.int64)
    by_group = np.argsort(group, kind="stable")
    bounds = np.flatnonzero(np.diff(group[by_group])) + 1
    for members in np.split(by_group, bounds) if len(items) else ():
        first = group[members[0]] * pipelines
        dealt = deal_group(weight[members], pipeline[members] - first, pipelines, ranks_of_pipeline)
        rank[members] = first * ranks_of_pipeline + dealt
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
    """Return times rounded to multiples of `unit_ms`, int64, at least 1."""
    return np.clip(np.rint(sample_ms / unit_ms), 1, MAX_UNITS).astype(np.int64)


def deal_group(
    weight: np.ndarray, pipeline: np.ndarray, pipelines: int, ranks_of_pipeline: int
) -> np.ndarray:
    """Deal one group's samples; return the rank of every sample in the group, int64."""
    ranks, rank = pipelines * ranks_of_pipeline, np.zeros(len(weight), np.int64)
    if ranks == 1:
        return rank
    home_limit = load_bound(weight, ranks) * (1 + _HOME_SLACK)
    entries = [(0, number) for number in range(ranks)]  # load and rank; sorted, so a heap
    heaps = [entries[first : first + ranks_of_pipeline]
             for first in range(0, ranks, ranks_of_pipeline)]  # fmt: skip
    weights, homes, over = weight.tolist(), pipeline.tolist(), []
    for sample in sorted(range(len(weight)), key=lambda sample: -weights[sample]):
        heap = heaps[homes[sample]]
        load, rank[sample] = heap[0]
        if load + weights[sample] > home_limit:
            over.append(sample)
        else:
            heapq.heapreplace(heap, (load + weights[sample], heap[0][1]))
    all_ranks = [entry for heap in heaps for entry in heap]
    heapq.heapify(all_ranks)
    for sample in over:
        load, rank[sample] = all_ranks[0]
        heapq.heapreplace(all_ranks, (load + weights[sample], all_ranks[0][1]))
    return lower_max_load(weight.astype(np.float64), rank, ranks, home_limit)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleItems:
    """Samples with items, or parts of samples, by row: a rank's share, in `shares_of` order."""

    rows: Packs  # indices into `items` and `squares`, by row; rows may be empty
    items: np.ndarray  # of every sample, then of every part of a divided sample, int64
    squares: np.ndarray  # sum of squared items per image and frame, int64
    _dealt: dict[object, DealtSamples] = field(default_factory=dict, repr=False)  # by arguments

    @classmethod
    def from_packs(
        cls,
        packs: ScheduledPacks,
        lengths: Lengths,
        levels: Sequence[Level],
        feature: str,
        shares: Shares | None = None,
    ) -> Self:
        """List the samples of every share with items of `feature`."""
        shares = shares_of(packs, levels) if shares is None else shares
        context = np.array([level.context for level in levels])[packs.level]
        first = np.cumsum(context) - context
        row_of_part = np.empty(int(context.sum()), np.int64)
        row_of_part[first[shares.pack] + shares.part] = np.arange(len(shares))
        whole = [lengths.column(name).astype(np.int64) for name in (feature, squares_of(feature))]
        # Places have rows pack, part and column of counts; counts have rows items and squares.
        places, counts = [], [np.stack(whole)]
        for number, level in enumerate(levels):
            chosen = np.flatnonzero(packs.level == number)
            level_packs = packs.packs.take(chosen)
            if level.context == 1:
                place = level_packs.pack_of_sample
                places.append(np.stack([chosen[place], 0 * place, level_packs.samples]))
            else:
                place, part, *sums = _divide(ImagePieces.from_packs(level_packs, lengths), level)
                entries = sum(part.shape[1] for part in counts) + np.arange(len(place))
                places.append(np.stack([chosen[place], part, entries]))
                counts.append(np.stack(sums))
        items, squares = np.concatenate(counts, axis=1)
        pack, part, sample = np.concatenate(places, axis=1)
        has_any = items[sample] > 0
        pack, part, sample = pack[has_any], part[has_any], sample[has_any]
        row = row_of_part[first[pack] + part]
        sizes = np.bincount(row, minlength=len(shares))
        order = np.argsort(row, kind="stable")
        rows = Packs(samples=sample[order], offsets=np.append(0, np.cumsum(sizes)))
        return cls(rows=rows, items=items, squares=squares)

    def take(self, rows: np.ndarray) -> Self:
        indices = np.flatnonzero(rows) if rows.dtype == bool else rows
        return replace(self, rows=self.rows.take(indices), _dealt={})

    def with_empty(self, rows: int) -> Self:
        offsets = np.append(self.rows.offsets, np.full(rows, self.rows.offsets[-1]))
        return replace(self, rows=replace(self.rows, offsets=offsets), _dealt={})

    @property
    def row(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.rows)), np.diff(self.rows.offsets))

    @property
    def of_rows(self) -> np.ndarray:
        """Sum of items of every row, int64 [rows]."""
        return np.diff(np.append(0, np.cumsum(self.items[self.rows.samples]))[self.rows.offsets])

    def deal(
        self,
        pipeline: np.ndarray,
        dp_encoders: DataParallelEncoders,
        name: str,
        *,
        pipelines: int,
        ranks_of_pipeline: int,
    ) -> DealtSamples:
        """Deal samples of encoder `name` to the ranks of groups of `pipelines`.

        Cached: `pipeline`, int64 [rows], must be the same.
        """
        # A search repeats a few sizes, always with the same `pipeline`.
        item_ms, square_ms = dp_encoders.item_ms[name], dp_encoders.square_ms[name]
        unit_ms = unit_of_time(dp_encoders.item_ms, dp_encoders.square_ms)
        sizes = pipelines, ranks_of_pipeline, item_ms, square_ms, unit_ms
        if sizes not in self._dealt:
            items, squares = self.items[self.rows.samples], self.squares[self.rows.samples]
            times_ms = item_ms * items + square_ms * squares
            self._dealt[sizes] = deal_samples(
                pipeline[self.row],
                items,
                squares,
                weights_of(times_ms, unit_ms) if unit_ms else items,
                pipelines=pipelines,
                ranks_of_pipeline=ranks_of_pipeline,
            )
        return self._dealt[sizes]


def deal_whole_samples(
    samples: Mapping[str, SampleItems],
    pipeline: np.ndarray,
    dp_encoders: DataParallelEncoders,
    *,
    ranks_of_pipeline: int,
    groups: int,
) -> tuple[dict[str, DealtSamples], np.ndarray]:
    """Deal samples of whole-sample encoders to the ranks of their groups.

    Args:
        pipeline: index of every row's pipeline among all groups, int64 [rows].

    Returns:
        Dealt samples by encoder, and every rank's load in multiples of `unit_of_time`, int64
        [groups, ranks of a group], `NO_LOAD` without samples.
    """
    dealt, load = dict[str, DealtSamples](), NO_LOAD
    size = dp_encoders.pipelines * ranks_of_pipeline
    for name, rows in samples.items():
        sizes = {"pipelines": dp_encoders.pipelines, "ranks_of_pipeline": ranks_of_pipeline}
        dealt[name] = rows.deal(pipeline, dp_encoders, name, **sizes)
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
    """Return the samples of every share, keyed by the encoders' features."""
    whole = {model.encoders[name].feature for name in takes_whole_samples(model)}
    return {name: SampleItems.from_packs(packs, lengths, levels, name, shares) for name in whole}


def _divide(pieces: ImagePieces, level: Level) -> np.ndarray:
    """Split samples by rank: rows pack, context rank, items and squares, int64 [4, parts]."""
    counts = np.diff(pieces.bounds(level))  # [packs, context]
    share = np.repeat(np.arange(counts.size), counts.ravel())  # of every piece
    first = np.flatnonzero(_begins(pieces.sample) | _begins(share))
    sums = [values[:0] if not len(first) else np.add.reduceat(values, first)
            for values in (pieces.tokens, pieces.squares)]  # fmt: skip
    return np.stack([*divmod(share[first], level.context), *sums])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplePasses:
    """Encoder passes of all ranks, sorted by rank, then in running order, [passes]."""

    rank: np.ndarray  # index of the rank among all groups, int64, like the next four
    first: np.ndarray  # first dealt sample of the pass
    stop: np.ndarray  # end (exclusive) of its samples
    items: np.ndarray
    squares: np.ndarray
    is_kept: np.ndarray  # whether activations are kept for the backward, bool

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def number(self) -> np.ndarray:
        """Index of every pass among its rank's kept or other passes."""
        begins = _begins(2 * self.rank + ~self.is_kept)
        return np.arange(len(self)) - _of_run(np.flatnonzero(begins), begins)


def passes_of_samples(dealt: DealtSamples, items_per_pass: int, kept_items: int) -> SamplePasses:
    """Group each rank's samples into passes, and keep activations of its first `kept_items`."""
    ends, items = np.cumsum(dealt.items), dealt.items
    begins = _begins(dealt.rank)
    before_rank = _of_run((ends - items)[begins], begins)
    is_kept = ends - before_rank <= kept_items
    begins_run = _begins(2 * dealt.rank + ~is_kept)
    run_firsts = np.flatnonzero(begins_run)  # runs of a rank's kept or other samples
    run_stop = _of_run(np.append(run_firsts[1:], len(items)), begins_run)
    firsts, stops = [], []
    at = run_firsts
    # Each round adds one pass to every run with samples left.
    while len(at):
        stop = np.searchsorted(ends, (ends - items)[at] + items_per_pass, "right")
        stop = np.minimum(np.maximum(stop, at + 1), run_stop[at])
        firsts.append(at)
        stops.append(stop)
        at = stop[stop < run_stop[at]]
    first, stop = (np.sort(np.concatenate([run_firsts[:0], *ats])) for ats in (firsts, stops))
    item_sums, square_sums = (np.append(0, np.cumsum(values)) for values in (items, dealt.squares))
    return SamplePasses(
        rank=dealt.rank[first],
        first=first,
        stop=stop,
        items=item_sums[stop] - item_sums[first],
        squares=square_sums[stop] - square_sums[first],
        is_kept=is_kept[first],
    )


def _begins(key: np.ndarray) -> np.ndarray:
    """Return whether a run of equal keys begins at each element."""
    return np.diff(key, prepend=-1) != 0


def _of_run(values: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Expand `values`, one per run, to the elements of the runs."""
    return values[np.cumsum(begins) - 1]
