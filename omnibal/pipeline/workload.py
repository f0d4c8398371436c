"""Workload: micro-batches for simulation, search and split methods.

A row is a rank's micro-batch: a shared pack has a row, with its share, on each of its CP ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from omnibal.base.arrays import rows_of
from omnibal.cost.model import CostModel
from omnibal.packing.shares import Shares, empty_slots
from omnibal.packing.whole_samples import SampleItems
from omnibal.pipeline.encoder_loads import NO_ENCODERS, EncoderMemory, Encoding


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Workload:
    """Micro-batches of a run, sorted by step, data-parallel rank and slot."""

    features: np.ndarray  # [rows, features], named by `feature_names_at`
    step: np.ndarray  # [rows], as dp_rank and slot; ranks may differ in micro-batches per step
    dp_rank: np.ndarray
    slot: np.ndarray
    data_parallel_size: int
    level: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # of the pack
    # Context-parallel size of the row's pack, [rows], default 1. Its ranks are an aligned block,
    # hold the pack in the same slot, and start each pass together.
    context: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    # Neighbouring expert-parallel ranks that start each pass together in stages with experts;
    # divides the ranks, and divides or is a multiple of every context-parallel size.
    lockstep_ranks: int = 1
    is_empty: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))  # for lockstep only
    unpadded: np.ndarray | None = None  # features without padding to the longest pack
    # Samples of every row, by feature of whole-sample data-parallel encoders.
    samples: Mapping[str, SampleItems] = field(default_factory=dict)
    # Waits for data-parallel encoders. None if stages hold all encoders, or before placement.
    encoding: Encoding | None = None

    def __post_init__(self) -> None:
        if not len(self.level):
            object.__setattr__(self, "level", np.zeros(len(self.step), np.int32))
        if not len(self.context):
            object.__setattr__(self, "context", np.ones(len(self.step), np.int32))
        if not len(self.is_empty):
            object.__setattr__(self, "is_empty", np.zeros(len(self.step), bool))

    @classmethod
    def build(
        cls,
        shares: Shares,
        features: np.ndarray,
        data_parallel_size: int,
        unpadded: np.ndarray | None = None,
    ) -> "Workload":
        """Return a workload of a row per share; `features`, `unpadded` are [shares, features]."""
        return cls(
            features=features,
            unpadded=unpadded,
            step=shares.step,
            dp_rank=shares.dp_rank,
            slot=shares.slot,
            data_parallel_size=data_parallel_size,
            level=shares.level,
            context=shares.context,
        )

    def __len__(self) -> int:
        return len(self.step)

    @property
    def has_shared(self) -> bool:
        """Whether context-parallel ranks share any pack."""
        return bool((self.context > 1).any())

    @property
    def encoder_memory(self) -> EncoderMemory:
        """Memory of data-parallel encoders per device."""
        return NO_ENCODERS if self.encoding is None else self.encoding.encoder_memory

    def in_groups_of(self, lockstep_ranks: int) -> "Workload":
        """Pad `lockstep_ranks` neighbours to equal slots with empty rows; drops `encoding`."""
        if lockstep_ranks == 1:
            return self
        empty = empty_slots(self.step, self.dp_rank, self.data_parallel_size, lockstep_ranks)
        added: dict[str, Any] = dict(zip(("step", "dp_rank", "slot"), empty, strict=True))
        count = len(added["step"])
        features = np.zeros((count, self.features.shape[1]))
        features[:, 0] = 1  # feature 0: fixed cost per micro-batch
        added |= {"features": features} | ({} if self.unpadded is None else {"unpadded": features})
        added |= {"level": np.zeros(count, np.int32), "context": np.ones(count, np.int32)}
        added = {name: np.concatenate([getattr(self, name), rows]) for name, rows in added.items()}
        padded = replace(
            self,
            **added,
            lockstep_ranks=lockstep_ranks,
            samples={name: items.with_empty(count) for name, items in self.samples.items()},
            is_empty=np.arange(len(self) + count) >= len(self),
            encoding=None,
        )
        return padded.rows(np.lexsort((padded.slot, padded.dp_rank, padded.step)))

    def features_of(self, cost: CostModel, *, without_padding: bool = False) -> np.ndarray:
        """Return each row's features in its level's block, 0 elsewhere, with or without padding to
        the longest pack. [rows, levels * features]"""
        features = self.features
        if without_padding and self.unpadded is not None:
            features = self.unpadded
        if cost.levels == 1:
            return features
        rows, count = features.shape
        blocks = np.zeros((rows, cost.levels, count))
        blocks[np.arange(rows), self.level] = features
        return blocks.reshape(rows, -1)

    @property
    def runs_together(self) -> bool:
        """Whether ranks share packs or run in lockstep, so all follow one order of passes."""
        return self.has_shared or self.lockstep_ranks > 1

    def some_steps(self, max_steps: int) -> "Workload":
        """Select at most `max_steps` steps, spread evenly over the run; step numbers are kept."""
        steps = np.unique(self.step)
        if len(steps) <= max_steps:
            return self
        return self.of_steps(
            steps[np.linspace(0, len(steps) - 1, max_steps).round().astype(np.int64)]
        )

    def of_steps(self, steps: Sequence[int] | np.ndarray) -> "Workload":
        """Select these steps; step numbers are kept."""
        return self.rows(np.isin(self.step, steps))

    def rows(self, picked: np.ndarray) -> "Workload":
        """Select rows by boolean mask or by indices; encoders' memory and means stay the run's."""
        encoding = self.encoding
        if encoding is not None:
            encoding = replace(encoding, waits=rows_of(encoding.waits, picked))
        samples = {name: items.take(picked) for name, items in self.samples.items()}
        return replace(rows_of(self, picked), samples=samples, encoding=encoding)

    def each_rank_alone(self) -> "Workload":
        """Make each data-parallel rank's part of a step a step of DP 1, CP 1 and no lockstep."""
        return replace(
            self,
            step=self.step * self.data_parallel_size + self.dp_rank,
            dp_rank=np.zeros_like(self.dp_rank),
            data_parallel_size=1,
            context=np.ones_like(self.context),
            samples={},
            lockstep_ranks=1,
        )
