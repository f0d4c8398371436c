"""Samples seen of every source by step."""

from collections.abc import Sequence

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.packing.packs import ScheduledPacks

_MILESTONES = 10  # parts of a run to report, one line each


def milestones(steps: int) -> tuple[int, ...]:
    """Steps to report samples seen at, ending with `steps`."""
    return tuple(sorted({-(-steps * part // _MILESTONES) for part in range(1, _MILESTONES + 1)}))


def seen_by_step(packs: ScheduledPacks, lengths: Lengths, by_step: Sequence[int]) -> np.ndarray:
    """Count samples of every source trained after each number of steps, with repeats.

    Steps of packs and `by_step`, ascending, count from the start of the run.
    int64 [len(by_step), sources].
    """
    sources = len(lengths.source_names)
    step = np.repeat(packs.step, np.diff(packs.packs.offsets))
    place = np.searchsorted(by_step, step, side="right")
    cells = place * sources + lengths.source[packs.packs.samples]
    counts = np.bincount(cells, minlength=(len(by_step) + 1) * sources)
    return counts.reshape(-1, sources)[: len(by_step)].cumsum(axis=0)
