"""Packs of samples, with the step, rank and slot of each micro-batch, and `packs.parquet`."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omnibal.base.arrays import expand_ranges, rows_of
from omnibal.base.errors import UserError
from omnibal.base.files import atomic
from omnibal.data.columns import Columns, no_items
from omnibal.data.lengths import Lengths
from omnibal.model.encoders import ITEM_FEATURES

_PLACE_COLUMNS = {
    "step": pa.int64(),
    "dp_rank": pa.int32(),
    "slot": pa.int32(),
    "epoch": pa.int32(),
}
_LEVEL, _SAMPLES = "level", "samples"
_COLUMNS = _PLACE_COLUMNS | {_LEVEL: pa.int32()}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packs:
    """Ragged lists of sample indices: pack i holds `samples[offsets[i]:offsets[i + 1]]`."""

    samples: np.ndarray  # indices into the lengths, int64
    offsets: np.ndarray  # int64 [packs + 1], from 0 to len(samples)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, pack: int) -> np.ndarray:
        return self.samples[self.offsets[pack] : self.offsets[pack + 1]]

    def sums(self, per_sample: np.ndarray) -> np.ndarray:
        """Sum `per_sample` by pack, int64 [packs]. Wrong (reduceat) if a pack is empty."""
        return np.add.reduceat(per_sample.astype(np.int64)[self.samples], self.offsets[:-1])

    @staticmethod
    def from_counts(samples: np.ndarray, counts: np.ndarray) -> "Packs":
        """Build packs from concatenated samples and the count per pack."""
        return Packs(samples=samples, offsets=np.concatenate([[0], np.cumsum(counts)]))

    def of_rows(self, rows: np.ndarray) -> "Packs":
        """Return the packs with every sample index i replaced by `rows[i]`."""
        return Packs(samples=rows[self.samples], offsets=self.offsets)

    @property
    def pack_of_sample(self) -> np.ndarray:
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def take(self, order: np.ndarray) -> "Packs":
        counts = np.diff(self.offsets)[order]
        _, place = expand_ranges(self.offsets[order], counts)
        return Packs.from_counts(self.samples[place], counts)

    @staticmethod
    def join(parts: Sequence["Packs"]) -> "Packs":
        sizes = np.concatenate([np.diff(part.offsets) for part in parts])
        return Packs.from_counts(np.concatenate([part.samples for part in parts]), sizes)

    @staticmethod
    def from_lists(lists: list) -> "Packs":
        counts = np.array([len(members) for members in lists], np.int64)
        return Packs.from_counts(
            (np.concatenate(lists) if lists else counts).astype(np.int64), counts
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScheduledPacks:
    """Micro-batches of a run, sorted by (step, dp_rank, slot); arrays are [packs].

    A pack shared by several ranks has one entry, for its first rank, and the same slot on all.
    """

    packs: Packs
    step: np.ndarray  # int64, counted over all epochs
    dp_rank: np.ndarray  # int32
    slot: np.ndarray  # position among the rank's micro-batches of a step, int32, without gaps
    epoch: np.ndarray  # int32
    items: dict[str, np.ndarray]  # items per pack, int32, by name such as `tiles`
    tokens: np.ndarray  # language tokens, int32
    level: np.ndarray  # index into the plan's levels, int32

    def __len__(self) -> int:
        return len(self.packs)

    @classmethod
    def from_packs(
        cls,
        packs: Packs,
        lengths: Lengths,
        step: np.ndarray,
        dp_rank: np.ndarray | int = 0,
        slot: np.ndarray | int = 0,
        epoch: np.ndarray | int = 0,
        level: np.ndarray | int = 0,
    ) -> "ScheduledPacks":
        """Sort packs by step, rank and slot, and count their items and tokens."""
        places = np.broadcast_arrays(step, dp_rank, slot, epoch, level)
        order = np.lexsort((places[2], places[1], places[0]))
        columns = {
            name: column[order].astype(kind.to_pandas_dtype(), copy=False)
            for (name, kind), column in zip(_COLUMNS.items(), places, strict=True)
        }
        packs = packs.take(order)
        counts = {
            name: packs.sums(lengths.column(name)).astype(np.int32)
            for name in (*lengths.item_names, "tokens")
        }
        return cls(packs=packs, tokens=counts.pop("tokens"), items=counts, **columns)

    @classmethod
    def join(cls, parts: Sequence["ScheduledPacks"]) -> "ScheduledPacks":
        """Append schedules with the same items."""
        names = (*_COLUMNS, "tokens")
        columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        items = {
            name: np.concatenate([part.items[name] for part in parts]) for name in parts[0].items
        }
        return cls(packs=Packs.join([part.packs for part in parts]), items=items, **columns)

    def column(self, name: str) -> np.ndarray:
        """Return `tokens` or items per pack, int32 [packs], 0 if not counted."""
        columns = {**self.items, "tokens": self.tokens}
        return columns[name] if name in columns else no_items(len(self))

    def take(self, rows: np.ndarray) -> "ScheduledPacks":
        items = {name: items[rows] for name, items in self.items.items()}
        return replace(rows_of(self, rows), packs=self.packs.take(rows), items=items)

    @property
    def steps(self) -> int:
        """Last step's number + 1, or 0 without packs."""
        return int(self.step[-1]) + 1 if len(self) else 0

    @property
    def sha256(self) -> str:
        """Hash of samples and schedule; items and tokens follow from the samples."""
        # Plans without levels keep the hash that they had before levels.
        level = [(self.level, "<i4")] if self.level.any() else []
        return sha256_of_columns(
            (self.step, "<i8"),
            (self.dp_rank, "<i4"),
            (self.slot, "<i4"),
            (self.epoch, "<i4"),
            *level,
            (self.packs.offsets, "<i8"),
            (self.packs.samples, "<i8"),
        )


def sha256_of_columns(*columns: tuple[np.ndarray, str]) -> str:
    """Hash arrays, each converted to its type such as "<i8"."""
    digest = hashlib.sha256()
    for column, kind in columns:
        digest.update(np.ascontiguousarray(column, dtype=kind).tobytes())
    return digest.hexdigest()


def write_packs(scheduled: ScheduledPacks, path: Path) -> None:
    """Write `packs.parquet` deterministically, with a level column if any level is not 0."""
    kinds = _COLUMNS if scheduled.level.any() else _PLACE_COLUMNS
    columns = {name: pa.array(getattr(scheduled, name), kind) for name, kind in kinds.items()}
    for name in (*sorted(scheduled.items), "tokens"):
        columns[name] = pa.array(scheduled.column(name), pa.int32())
    packs = scheduled.packs
    columns[_SAMPLES] = pa.LargeListArray.from_arrays(packs.offsets, packs.samples)
    with atomic(path) as temporary:
        pq.write_table(pa.table(columns), temporary)


def read_packs(path: Path) -> ScheduledPacks:
    """Read `packs.parquet`. Raise UserError if a column is missing or a pack is empty."""
    remedy = "rebuild it with `omnibal plan` or `omnibal pack`"
    columns = Columns.open(path, [*_PLACE_COLUMNS, "tokens", _SAMPLES], remedy)
    samples, sizes = columns.integer_lists(_SAMPLES)
    if not sizes.all():
        raise UserError(
            f"{path}: row {int(sizes.argmin())} has no samples; every pack needs one; {remedy}"
        )
    has_levels = _LEVEL in columns.schema.names
    level = columns.integers(_LEVEL, pa.int32()) if has_levels else no_items(len(sizes))
    return ScheduledPacks(
        packs=Packs.from_counts(samples, sizes),
        **{name: columns.integers(name, kind) for name, kind in _PLACE_COLUMNS.items()},
        items={name: columns.integers(name, pa.int32()) for name in columns.once(ITEM_FEATURES)},
        tokens=columns.integers("tokens", pa.int32()),
        level=level,
    )
