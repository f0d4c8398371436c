"""What is seen of every source by a step of the run."""

from collections.abc import Sequence

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.packing.packs import ScheduledPacks

_MILESTONES = 10  # parts of a run that a plan says it of: enough for a line of text each


def milestones(steps: int) -> tuple[int, ...]:
    """Numbers of steps after which it is said what was seen, the last of them all `steps`."""
    return tuple(sorted({-(-steps * part // _MILESTONES) for part in range(1, _MILESTONES + 1)}))


def seen_by_step(packs: ScheduledPacks, lengths: Lengths, by_step: Sequence[int]) -> np.ndarray:
    """Samples of every source that were trained after so many steps, repeats counted each time.

    Args:
        packs: of the run or of a portion of it, with steps counted through the run.
        by_step: numbers of steps, ascending, each from the start of the run.

    Returns:
        int64 [numbers of steps, sources]
    """
    sources = len(lengths.source_names)
    step = np.repeat(packs.step, np.diff(packs.packs.offsets))
    place = np.searchsorted(by_step, step, side="right")
    cells = place * sources + lengths.source[packs.packs.samples]
    counts = np.bincount(cells, minlength=(len(by_step) + 1) * sources)
    return counts.reshape(-1, sources)[: len(by_step)].cumsum(axis=0)
