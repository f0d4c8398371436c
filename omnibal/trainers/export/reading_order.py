"""Reading order of a plan's packs: by step, slot, rank; rank r of R reads packs r, r + R, ..."""

import numpy as np

from omnibal.job.plan import DataPlan
from omnibal.packing.packs import ScheduledPacks
from omnibal.steps.full_steps import size_of_step


def reading_order(packs: ScheduledPacks) -> ScheduledPacks:
    """Sort packs by step, then slot, then rank."""
    return packs.take(np.lexsort((packs.dp_rank, packs.slot, packs.step)))


def packs_per_step(data: DataPlan, ranks: int) -> int:
    """Return the global batch in packs. Short epochs are one step with equally loaded ranks."""
    packs = data.packs // data.epochs
    return size_of_step(packs, data.packs_per_step, ranks) or data.packs_per_step
