"""Items of whole samples, for encoders that take whole samples.

A share of a shared pack has the parts of samples that it encodes (`omnibal.steps.item_shares`), so
its items are a run of the pack's.
"""

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
from omnibal.steps.item_shares import ImagePieces
from omnibal.steps.items import unit_of_time
from omnibal.steps.near_home import NO_LOAD
from omnibal.steps.shares import Shares, shares_of
from omnibal.steps.whole_samples import DealtSamples, deal_samples, weights_of


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
        """Find the samples with items of a feature in every share."""
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
    """Deal samples of every whole-sample encoder to the ranks of their groups.

    Args:
        samples: by encoder.
        pipeline: of each row, among the pipelines of all groups, int64 [rows].

    Returns:
        Dealt samples by encoder, and the load of every rank in units of `unit_of_time`, int64
        [groups, ranks of a group]. `NO_LOAD` without such encoders.
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
