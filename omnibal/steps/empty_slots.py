"""Empty micro-batches of ranks with fewer packs than their lockstep neighbours.

With expert parallelism, ranks exchange tokens in every pass and must run equal numbers of
micro-batches. Ranks with fewer packs run empty ones last. Plans do not list them: planner and
trainer derive them.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EmptySlots:
    """Empty micro-batches by step, rank and slot, [empty slots], int32 except `step` (int64)."""

    step: np.ndarray
    dp_rank: np.ndarray
    slot: np.ndarray
    """Position among that rank's micro-batches of the step, int32."""

    def __len__(self) -> int:
        return len(self.step)


def empty_slots(
    step: np.ndarray, dp_rank: np.ndarray, ranks: int, lockstep_ranks: int
) -> EmptySlots:
    """Find the empty micro-batches of a schedule, from its micro-batches' steps and ranks.

    >>> empty = empty_slots(np.array([0, 0, 0]), np.array([0, 0, 1]), ranks=4, lockstep_ranks=2)
    >>> empty.dp_rank.tolist(), empty.slot.tolist()
    ([1], [1])
    """
    numbers, index = np.unique(step, return_inverse=True)
    counts = np.bincount(index * ranks + dp_rank, minlength=len(numbers) * ranks)
    blocks = counts.reshape(-1, lockstep_ranks)
    missing = (blocks.max(axis=1, keepdims=True, initial=0) - blocks).ravel()
    place = np.repeat(np.arange(len(counts)), missing)
    within = np.arange(len(place)) - np.repeat(np.cumsum(missing) - missing, missing)
    return EmptySlots(
        step=numbers[place // ranks],
        dp_rank=(place % ranks).astype(np.int32),
        slot=(counts[place] + within).astype(np.int32),
    )
