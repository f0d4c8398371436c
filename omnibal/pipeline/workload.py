"""Workload: the micro-batches that simulator, search and split methods are given."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omnibal.data.packs import ScheduledPacks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Workload:
    """Micro-batches of a run, sorted by step, data-parallel rank and slot."""

    features: np.ndarray
    """Features of every pack, [packs, features], as `cost.model.pack_features` gives them."""
    step: np.ndarray
    """Step of every pack; this and the next two are [packs]. A rank may have fewer micro-batches
    than others, or none."""
    dp_rank: np.ndarray
    slot: np.ndarray
    data_parallel_size: int

    @classmethod
    def of(cls, packs: ScheduledPacks, features: np.ndarray, data_parallel_size: int) -> "Workload":
        """Build the workload of a schedule, with the features [packs, features] of its packs."""
        return cls(
            features=features,
            step=packs.step,
            dp_rank=packs.dp_rank,
            slot=packs.slot,
            data_parallel_size=data_parallel_size,
        )

    def some_steps(self, most: int) -> "Workload":
        """Select at most `most` steps, spread evenly over the run; step numbers are unchanged."""
        steps = np.unique(self.step)
        if len(steps) <= most:
            return self
        return self.of_steps(steps[np.linspace(0, len(steps) - 1, most).round().astype(np.int64)])

    def of_steps(self, steps: Sequence[int] | np.ndarray) -> "Workload":
        """Select these steps; their numbers are unchanged."""
        picked = np.isin(self.step, steps)
        return Workload(
            features=self.features[picked],
            step=self.step[picked],
            dp_rank=self.dp_rank[picked],
            slot=self.slot[picked],
            data_parallel_size=self.data_parallel_size,
        )

    def each_rank_alone(self) -> "Workload":
        """Make each data-parallel rank's part of a step a separate step."""
        return Workload(
            features=self.features,
            step=self.step * self.data_parallel_size + self.dp_rank,
            dp_rank=np.zeros_like(self.dp_rank),
            slot=self.slot,
            data_parallel_size=1,
        )
