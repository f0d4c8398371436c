"""Reading order of a plan's packs: by step, slot, rank; rank r of R reads packs r, r + R, ..."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.job.plan import DataPlan
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.steps.full_steps import size_of_step


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReadingOrder:
    """All packs of a run in reading order, with an array entry per pack."""

    packs: Packs
    """Indices into the lengths."""
    step: np.ndarray
    """int64, counted through all epochs."""
    rank: np.ndarray
    """Data-parallel rank, int32."""
    slot: np.ndarray
    """Index of the rank's micro-batch in the step, int32."""

    @classmethod
    def of(cls, scheduled: ScheduledPacks) -> Self:
        """Sort a plan's packs by step, then slot, then rank."""
        step, rank, slot = scheduled.step, scheduled.dp_rank, scheduled.slot
        packs = cls(packs=scheduled.packs, step=step, rank=rank, slot=slot)
        return packs.take(np.lexsort((rank, slot, step)))

    def __len__(self) -> int:
        return len(self.packs)

    @property
    def pack_of_rows(self) -> np.ndarray:
        """Pack of every sample in reading order, int64 [rows]."""
        return np.repeat(np.arange(len(self)), np.diff(self.packs.offsets))

    def take(self, packs: np.ndarray) -> Self:
        return replace(
            self,
            packs=self.packs.take(packs),
            step=self.step[packs],
            rank=self.rank[packs],
            slot=self.slot[packs],
        )

    def largest_first(self, lengths: Lengths) -> Self:
        """Sort samples within packs by falling tokens, which any next-fit packer splits alike."""
        tokens = lengths.tokens[self.packs.samples]
        rows = np.lexsort((-tokens, self.pack_of_rows))
        samples = self.packs.samples[rows]
        return replace(self, packs=replace(self.packs, samples=samples))


def packs_per_step(data: DataPlan, ranks: int) -> int:
    """Return the global batch in packs. Short epochs are one step with equally loaded ranks."""
    packs = data.packs // data.epochs
    return size_of_step(packs, data.packs_per_step, ranks) or data.packs_per_step
