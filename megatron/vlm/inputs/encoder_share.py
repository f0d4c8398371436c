"""Assignment of a step's items to data-parallel encoder ranks, and routing of their features.

Every rank derives all ranks' assignment from the plan, so no sizes are exchanged. A row is the
feature of one image or audio token; an item's deepstack rows follow its own. Rows of a pipeline are
ordered by encoder, pack and item. A pipeline with a share of a pack has the share's items.

Shapes: G runs of items of all encoders, D ranks that embed tokens.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np

from omnibal.base.arrays import expand_ranges
from omnibal.data.lengths import Lengths
from omnibal.model.config import ModelConfig
from omnibal.model.data_parallel_encoders import DataParallelEncoders, nodes_of_groups
from omnibal.model.encoders import Encoder
from omnibal.model.levels import Level
from omnibal.model.parallel import Parallel
from omnibal.packing.cut import first_item
from omnibal.packing.items import ItemRuns, share_items, unit_of_time
from omnibal.packing.packs import ScheduledPacks
from omnibal.packing.shares import Shares, shares_of
from omnibal.packing.whole_samples import (
    DealtSamples,
    SampleItems,
    deal_whole_samples,
    passes_of_samples,
    samples_of_shares,
)
from omnibal.pipeline.encoder_waits import ItemShares


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodingRanks:
    """Ranks of an encoding group, numbered by pipeline, then stage, then tensor-parallel rank."""

    pipelines: int  # pipelines of an encoding group
    parallel: Parallel
    rank: int  # global rank of this process

    @property
    def ranks_of_pipeline(self) -> int:
        return self.parallel.pipeline * self.parallel.tensor

    @property
    def block(self) -> int:
        """Return the index of this rank's encoding group."""
        return self.parallel.place(self.rank)["data"] // self.pipelines

    @property
    def pipeline(self) -> int:
        """Return the index of this rank's pipeline within the group."""
        return self.parallel.place(self.rank)["data"] % self.pipelines

    @property
    def number(self) -> int:
        """Return this rank's number within the group."""
        return self.global_ranks(self.block).index(self.rank)

    @property
    def data_ranks(self) -> range:
        """Return the data-parallel ranks of the group, a pipeline each."""
        return range(self.block * self.pipelines, (self.block + 1) * self.pipelines)

    @property
    def embedding_numbers(self) -> np.ndarray:
        """Return the numbers of first-stage ranks, which embed tokens; int64 [D]."""
        first = np.arange(self.pipelines) * self.ranks_of_pipeline
        # [pipelines, 1] + [tensor] -> [D]
        return (first[:, None] + np.arange(self.parallel.tensor)).ravel()

    def global_ranks(self, block: int) -> list[int]:
        """Return the global ranks of group `block`, by number in the group."""
        sizes = self.parallel
        # Megatron numbers ranks by stage, then data-parallel rank, then tensor-parallel rank.
        return [
            (stage * sizes.data + block * self.pipelines + pipeline) * sizes.tensor + shard
            for pipeline in range(self.pipelines)
            for stage in range(sizes.pipeline)
            for shard in range(sizes.tensor)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemRun:
    """A run of a pack's items of one encoder."""

    row: int  # row of the pack in the schedule
    items: range  # item numbers within the pack


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderPass:
    """Items that a rank runs through an encoder in one pass."""

    encoder: str
    feature: str  # encoder input: tiles, clips or image_tokens
    runs: tuple[ItemRun, ...]
    is_kept: bool  # whether activations are kept for backward

    @property
    def items(self) -> int:
        return sum(len(run.items) for run in self.runs)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FeatureRoute:
    """A rank's part in the all-to-all of features."""

    sent_slices: Sequence[slice]  # slices of own rows, in sending order
    sent: list[int]  # rows sent to every rank, in process-group order
    received_slices: Sequence[slice]  # slices of received rows, in the order of the pipeline's rows
    received: list[int]  # rows received from every rank, in process-group order
    parts: tuple[int, ...]  # rows received by each tensor-parallel rank of the first stage


@dataclass(frozen=True, kw_only=True)
class StepShares:
    """Assignment of a step's items within this rank's encoding group."""

    ranks: EncodingRanks
    settings: DataParallelEncoders
    # By pack of the group's pipelines, or share of a pack: [packs].
    rows: np.ndarray  # row of the pack in the schedule, int64
    pipeline: np.ndarray  # pipeline within the group, int64
    items: Mapping[str, np.ndarray]  # number of items, by encoder
    first_item: Mapping[str, np.ndarray]  # number of the first item in the full pack, by encoder
    encoders: Mapping[str, Encoder]
    runs: Mapping[str, ItemRuns]
    # (first item, end item, kept) of this rank's passes, by encoder that never splits a sample.
    sample_passes: Mapping[str, Sequence[tuple[int, int, bool]]]
    # By (encoder, kept): maximum passes over ranks that shard weights together. Empty if none do.
    max_passes: Mapping[tuple[str, bool], int]

    @property
    def embeds_tokens(self) -> bool:
        """Return whether this rank embeds tokens, so that it receives features."""
        return self.ranks.number in self.ranks.embedding_numbers

    def passes_of(self, name: str, is_kept: bool) -> list[EncoderPass]:
        """Return this rank's kept or recomputed passes of an encoder."""
        return [own for own in self.passes if (own.encoder, own.is_kept) == (name, is_kept)]

    def select_encoders(self, names: Collection[str]) -> Self:
        return replace(
            self,
            items={name: items for name, items in self.items.items() if name in names},
            runs={name: runs for name, runs in self.runs.items() if name in names},
        )

    @cached_property
    def passes(self) -> tuple[EncoderPass, ...]:
        """Return this rank's passes by encoder, kept passes first."""
        return tuple(planned for name in self.items for planned in self._passes_of(name))

    def _passes_of(self, name: str) -> Iterator[EncoderPass]:
        runs = self.runs[name]
        own = np.flatnonzero(runs.rank == self.ranks.number)
        stops = np.cumsum(runs.count[own])  # ends of own runs among this rank's items
        bounds = self.sample_passes.get(name)
        if bounds is None:
            encoded = int(runs.count[own].sum())
            per_pass, kept = self.settings.items_per_pass[name], self.settings.kept_items[name]
            bounds = pass_bounds(encoded, per_pass, kept)
        for begin, end, is_kept in bounds:
            pass_runs = []
            for run, stop in zip(own, stops, strict=True):
                # Intersect the run with the pass, as item numbers of the full pack.
                start = self.first_item[name][runs.pack[run]] + runs.first[run]
                first = start + max(begin - (stop - runs.count[run]), 0)
                last = start + runs.count[run] - max(stop - end, 0)
                if first < last:
                    row = int(self.rows[runs.pack[run]])
                    pass_runs.append(ItemRun(row=row, items=range(int(first), int(last))))
            feature = self.encoders[name].feature
            yield EncoderPass(encoder=name, feature=feature, runs=tuple(pass_runs), is_kept=is_kept)

    def slices(self, micro_batches: int = 0) -> list[dict[str, slice]]:
        """Return row slices by encoder of each pack of this pipeline, from its first row, padded
        with empty slices to `micro_batches` entries."""
        own = np.flatnonzero(self.pipeline == self.ranks.pipeline)
        starts, sizes = self._starts[:, own], self._sizes[:, own]  # [encoders, own packs]
        starts = starts - (starts.min() if starts.size else 0)
        slices_of_packs = [
            {
                name: slice(start, start + size)
                for name, start, size in zip(self.items, pack_starts, pack_sizes, strict=True)
            }
            for pack_starts, pack_sizes in zip(starts.T.tolist(), sizes.T.tolist(), strict=True)
        ]
        empty = dict.fromkeys(self.items, slice(0, 0))
        return slices_of_packs + [empty] * (micro_batches - len(own))

    @cached_property
    def route(self) -> FeatureRoute:
        (row_start, row_stop, row_source, row_made), borders = self._run_rows, self._part_borders
        # Cut every run at the borders of embedding ranks' parts: [G] runs -> [pieces].
        first = np.searchsorted(borders, row_start, "right") - 1
        pieces = np.searchsorted(borders, row_stop, "left") - first
        run, part = expand_ranges(first, pieces)
        start = np.maximum(row_start[run], borders[part])
        size = np.minimum(row_stop[run], borders[part + 1]) - start
        # Process groups sort ranks by global rank, encoding groups by pipeline: number -> place.
        place = np.argsort(np.argsort(self.ranks.global_ranks(self.ranks.block)))
        source = place[row_source[run]]
        target = place[self.ranks.embedding_numbers[part]]
        made = row_made[run] + start - row_start[run]
        own, everyone = place[self.ranks.number], len(place)
        # Both sides order an exchange's rows by start, so no indices are sent with them.
        sent = np.flatnonzero((source == own) & (size > 0))
        sent = sent[np.lexsort((start[sent], target[sent]))]
        received = np.flatnonzero((target == own) & (size > 0))
        received = received[np.lexsort((start[received], source[received]))]
        arrived = np.cumsum(size[received]) - size[received]
        by_row = np.argsort(start[received])
        parts = np.diff(borders).reshape(self.ranks.pipelines, -1)[self.ranks.pipeline]  # [tensor]
        return FeatureRoute(
            sent_slices=_merge_slices(made[sent], size[sent]),
            sent=np.bincount(target[sent], size[sent], everyone).astype(int).tolist(),
            received_slices=_merge_slices(arrived[by_row], size[received][by_row]),
            received=np.bincount(source[received], size[received], everyone).astype(int).tolist(),
            parts=tuple(parts.tolist()),
        )

    @cached_property
    def _sizes(self) -> np.ndarray:
        """Return the number of rows of every encoder in every pack, int64 [encoders, packs]."""
        sizes = [items * rows_of_item(self.encoders[name]) for name, items in self.items.items()]
        return np.array(sizes, np.int64).reshape(len(self.items), len(self.rows))

    @cached_property
    def _starts(self) -> np.ndarray:
        """Return the first row of every encoder in every pack, int64 [encoders, packs]."""
        encoder, pack = np.indices(self._sizes.shape).reshape(2, -1)
        # By pipeline, then encoder, then pack: lexsort is stable and takes the major key last.
        order = np.lexsort((encoder, self.pipeline[pack]))
        sizes, starts = self._sizes.ravel()[order], np.zeros(self._sizes.size, np.int64)
        starts[order] = np.cumsum(sizes) - sizes
        return starts.reshape(self._sizes.shape)

    @property
    def _part_borders(self) -> np.ndarray:
        """Return the first row of every embedding rank's part, and the end; int64 [D + 1]."""
        tensor = self.ranks.parallel.tensor
        sums = np.bincount(self.pipeline, self._sizes.sum(0), self.ranks.pipelines).astype(np.int64)
        # Tensor-parallel ranks receive equal parts and gather them, so a row is sent once.
        inside = sums[:, None] * np.arange(tensor) // tensor  # [pipelines, tensor]
        return np.append((np.cumsum(sums) - sums)[:, None] + inside, sums.sum())

    @property
    def _run_rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return first row, end row, encoding rank, and first row among that rank's rows, int64 [G]
        each. First and end row count over all pipelines of the group."""
        start, size, source = [], [], []
        for starts, (name, runs) in zip(self._starts, self.runs.items(), strict=True):
            per_item = rows_of_item(self.encoders[name])
            start.append(starts[runs.pack] + runs.first * per_item)
            size.append(runs.count * per_item)
            source.append(runs.rank)
        first, sizes, sources = map(np.concatenate, (start, size, source))
        # A rank encodes encoder by encoder, the order of these arrays.
        order = np.argsort(sources, kind="stable")
        made = np.zeros(len(sizes), np.int64)
        made[order] = np.cumsum(sizes[order]) - sizes[order]
        of_rank = np.bincount(sources, sizes).astype(np.int64)
        made -= (np.cumsum(of_rank) - of_rank)[sources]
        return first, first + sizes, sources, made


def rows_of_item(encoder: Encoder) -> int:
    """Return an item's rows: its tokens and their deepstack features."""
    return encoder.tokens_per_item * (1 + encoder.deepstack_features)


@dataclass(frozen=True, kw_only=True, eq=False)
class EncoderShares:
    """Assignment of items within this rank's encoding group, for every step."""

    model: ModelConfig
    settings: DataParallelEncoders
    ranks: EncodingRanks
    gpus_per_node: int
    packs: ScheduledPacks
    levels: Sequence[Level]  # levels of the packs, with their context-parallel sizes
    lengths: Lengths  # of samples, for encoders that never split a sample

    @cached_property
    def _pack_shares(self) -> Shares:
        return shares_of(self.packs, self.levels)

    @cached_property
    def _samples(self) -> dict[str, SampleItems]:
        """Return samples of all shares, by feature of encoders that never split a sample."""
        if not self.settings.square_ms:
            return {}
        shares = self._pack_shares
        return samples_of_shares(self.model, self.packs, self.lengths, self.levels, shares)

    @cached_property
    def _items(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return first item and number of items of every share by encoder, int64 [shares] each."""
        shares, items_of_shares = self._pack_shares, {}
        for name, encoder in self.model.encoders.items():
            if name in self.settings.square_ms:
                # First item = items of earlier shares of the pack, as shares take whole samples.
                count = self._samples[encoder.feature].of_rows
                order = np.lexsort((shares.part, shares.pack))
                in_order, pack = count[order], shares.pack[order]
                before = np.cumsum(in_order) - in_order
                first = np.empty_like(before)
                first[order] = before - before[np.searchsorted(pack, pack)]
                items_of_shares[name] = first, count
                continue
            items = self.packs.column(encoder.feature).astype(np.int64)[shares.pack]
            first = first_item(items, shares.part, shares.context)
            end = first_item(items, shares.part + 1, shares.context)
            items_of_shares[name] = first, end - first
        return items_of_shares

    def step(self, step: int) -> StepShares:
        ranks, shares, rows = self.ranks, self._pack_shares, self._rows_of(step)
        rows = rows[np.isin(shares.dp_rank[rows], ranks.data_ranks)]
        pipeline = (shares.dp_rank[rows] - ranks.data_ranks.start).astype(np.int64)
        items = {name: count[rows] for name, (_, count) in self._items.items()}
        samples = self._samples_of(rows)
        dealt, load = deal_whole_samples(
            samples, pipeline, self.settings, ranks_of_pipeline=ranks.ranks_of_pipeline, groups=1
        )
        nodes = nodes_of_groups(ranks.parallel, ranks.pipelines, self.gpus_per_node)
        runs = share_items(
            {name: counts for name, counts in items.items() if name not in samples},
            pipeline,
            pipelines=ranks.pipelines,
            ranks_of_pipeline=ranks.ranks_of_pipeline,
            item_ms=self.settings.item_ms,
            load=load,
            unit_ms=unit_of_time(self.settings.item_ms, self.settings.square_ms),
            node=nodes[ranks.block],
        )
        runs |= {name: _runs_of_samples(samples[name], parts) for name, parts in dealt.items()}
        return StepShares(
            ranks=ranks,
            settings=self.settings,
            rows=shares.pack[rows],
            pipeline=pipeline,
            items=items,
            first_item={name: first[rows] for name, (first, _) in self._items.items()},
            encoders=self.model.encoders,
            sample_passes={name: self._sample_passes(name, part) for name, part in dealt.items()},
            max_passes=self._max_passes(step) if self.settings.sharded > 1 else {},
            runs={name: runs[name] for name in items},
        )

    def _rows_of(self, step: int) -> np.ndarray:
        """Return the shares of all pipelines in a step."""
        return np.arange(*np.searchsorted(self._pack_shares.step, [step, step + 1]))

    def _max_passes(self, step: int) -> dict[tuple[str, bool], int]:
        """Return the maximum passes over ranks that shard weights with this rank."""
        own, settings, rows = self.ranks, self.settings, self._rows_of(step)
        pipeline, blocks = self._pack_shares.dp_rank[rows], own.parallel.data // own.pipelines
        items = {
            name: np.bincount(pipeline, count[rows], own.parallel.data)
            .astype(np.int64)
            .reshape(blocks, own.pipelines)
            for name, (_, count) in self._items.items()
        }
        samples, per_pipeline = self._samples_of(rows), own.ranks_of_pipeline
        shares = ItemShares.deal_items(
            np.arange(blocks), items, samples, pipeline.astype(np.int64), settings, per_pipeline
        )
        ranks = np.concatenate([own.global_ranks(block) for block in range(blocks)])
        # Sharding groups are `sharded` neighbouring global ranks and may span encoding groups.
        together = ranks // settings.sharded == own.rank // settings.sharded
        return {
            (name, is_kept): int(passes.work(is_kept=is_kept)[..., 0].ravel()[together].max())
            for name in items
            for passes in [shares.passes(name, settings)]
            for is_kept in (True, False)
        }

    def _samples_of(self, rows: np.ndarray) -> dict[str, SampleItems]:
        """Return samples in these rows, by encoder that never splits a sample."""
        return {
            name: self._samples[self.model.encoders[name].feature].take(rows)
            for name in self.settings.square_ms
        }

    def _sample_passes(self, name: str, dealt: DealtSamples) -> list[tuple[int, int, bool]]:
        """Return (first item, end item, kept) of this rank's passes of whole samples."""
        per_pass, kept = self.settings.items_per_pass[name], self.settings.kept_items[name]
        passes = passes_of_samples(dealt, per_pass, kept)
        own = np.flatnonzero(passes.rank == self.ranks.number)
        stops = np.cumsum(passes.items[own])
        bounds = np.stack([stops - passes.items[own], stops, passes.is_kept[own]], axis=1)
        return [(begin, end, bool(is_kept)) for begin, end, is_kept in bounds.tolist()]


def _runs_of_samples(samples: SampleItems, dealt: DealtSamples) -> ItemRuns:
    """Return one run of items per assigned sample."""
    items, row = samples.items[samples.rows.samples], samples.row
    starts = np.cumsum(items) - items
    first = starts - np.append(starts, items.sum())[samples.rows.offsets[row]]
    return ItemRuns(
        pack=row[dealt.place], first=first[dealt.place], count=dealt.items, rank=dealt.rank
    )


def pass_bounds(items: int, items_per_pass: int, kept: int) -> list[tuple[int, int, bool]]:
    """Return (first item, end item, kept) of passes: kept items first, in passes of their own."""
    kept = min(kept, items)
    return [
        (begin, min(begin + items_per_pass, stop), stop <= kept)
        for first, stop in ((0, kept), (kept, items))
        for begin in range(first, stop, items_per_pass)
    ]


def _merge_slices(starts: np.ndarray, sizes: np.ndarray) -> list[slice]:
    """Return slices of these starts and sizes in order, with adjacent slices merged."""
    slices: list[slice] = []
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        if slices and slices[-1].stop == start:
            slices[-1] = slice(slices[-1].start, start + size)
        else:
            slices.append(slice(start, start + size))
    return slices
