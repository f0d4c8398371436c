"""Workload: micro-batches for simulation, search and split methods.

A shared pack is a row on each of its ranks, with the features of the rank's share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from omnibal.base.arrays import rows_of
from omnibal.pipeline.encoder_loads import Encoding
from omnibal.steps.shares import Shares, empty_slots
from omnibal.steps.whole_samples import SampleItems


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Workload:
    """Micro-batches of a run, sorted by step, data-parallel rank and slot."""

    features: np.ndarray  # from `pack_features` or `share_features`, [rows, features]
    step: np.ndarray  # this and the next two are [rows]; ranks may differ in micro-batches
    dp_rank: np.ndarray
    slot: np.ndarray
    data_parallel_size: int
    level: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # of the row's pack
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
    # Data-parallel encoders, or None if stages hold encoders, or not chosen yet.
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
        """Build the workload of shares with `features` and `unpadded` [shares, features]."""
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
        """Whether any pack is shared."""
        return bool((self.context > 1).any())

    def in_groups_of(self, lockstep_ranks: int) -> "Workload":
        """Run `lockstep_ranks` neighbours in lockstep, padding with empty micro-batches."""
        if lockstep_ranks == 1:
            return self
        empty = empty_slots(self.step, self.dp_rank, self.data_parallel_size, lockstep_ranks)
        step = np.concatenate([self.step, empty.step])
        dp_rank = np.concatenate([self.dp_rank, empty.dp_rank])
        slot = np.concatenate([self.slot, empty.slot])
        padded = Workload(
            features=_with_empty(self.features, len(empty)),
            unpadded=None if self.unpadded is None else _with_empty(self.unpadded, len(empty)),
            step=step,
            dp_rank=dp_rank,
            slot=slot,
            data_parallel_size=self.data_parallel_size,
            level=np.concatenate([self.level, np.zeros(len(empty), self.level.dtype)]),
            context=np.concatenate([self.context, np.ones(len(empty), self.context.dtype)]),
            lockstep_ranks=lockstep_ranks,
            samples={name: items.with_empty(len(empty)) for name, items in self.samples.items()},
            is_empty=np.arange(len(step)) >= len(self),
        )
        return padded.rows(np.lexsort((slot, dp_rank, step)))

    @property
    def runs_together(self) -> bool:
        """Whether ranks share packs or run in lockstep, so that they use one operation list."""
        return self.has_shared or self.lockstep_ranks > 1

    @property
    def is_needed(self) -> np.ndarray:
        """Whether the row is needed without expert parallelism, [rows]: empty micro-batches are
        not, unless they carry encoder waits."""
        return ~self.is_empty if self.encoding is None else np.ones(len(self), bool)

    def some_steps(self, max_steps: int) -> "Workload":
        """Select at most `max_steps` steps, spread evenly over the run, with their numbers."""
        steps = np.unique(self.step)
        if len(steps) <= max_steps:
            return self
        return self.of_steps(
            steps[np.linspace(0, len(steps) - 1, max_steps).round().astype(np.int64)]
        )

    def of_steps(self, steps: Sequence[int] | np.ndarray) -> "Workload":
        """Select these steps; their numbers are unchanged."""
        return self.rows(np.isin(self.step, steps))

    def rows(self, picked: np.ndarray) -> "Workload":
        """Select rows by mask or indices."""
        return replace(
            rows_of(self, picked),
            samples={name: items.take(picked) for name, items in self.samples.items()},
            encoding=None if self.encoding is None else self.encoding.rows(picked),
        )

    def each_rank_alone(self) -> "Workload":
        """Make each data-parallel rank's part of a step an independent step."""
        return replace(
            self,
            step=self.step * self.data_parallel_size + self.dp_rank,
            dp_rank=np.zeros_like(self.dp_rank),
            data_parallel_size=1,
            context=np.ones_like(self.context),
            samples={},
            lockstep_ranks=1,
        )


def _with_empty(features: np.ndarray, count: int) -> np.ndarray:
    """Append features of `count` empty micro-batches."""
    empty = np.zeros((count, features.shape[1]))
    empty[:, 0] = 1  # cost of every micro-batch
    return np.concatenate([features, empty])
