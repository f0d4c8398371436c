"""Shares: each data-parallel rank's part of the packs of a schedule.

An unshared pack is one share. A context-parallel pack has a share on each rank of its block. Times,
memory and the simulation are of shares.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omnibal.base.arrays import expand_ranges
from omnibal.data.lengths import Lengths
from omnibal.model.levels import Level
from omnibal.packing.cut import Pieces, cut_packs
from omnibal.packing.packs import ScheduledPacks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shares:
    """Shares sorted by step, rank and slot, [shares], int32 except `pack` and `step` (int64)."""

    pack: np.ndarray  # row of the pack in the schedule
    part: np.ndarray  # rank within the pack's block, from 0
    context: np.ndarray  # context-parallel size of the pack
    step: np.ndarray
    dp_rank: np.ndarray
    slot: np.ndarray  # position among that rank's micro-batches of the step
    level: np.ndarray  # index of the pack's level

    def __len__(self) -> int:
        return len(self.pack)


def shares_of(packs: ScheduledPacks, levels: Sequence[Level]) -> Shares:
    """List the shares of all packs: in the order of packs if no pack is shared."""
    context = np.array([level.context for level in levels], np.int32)[packs.level]
    pack, part = expand_ranges(0 * context, context)
    dp_rank = packs.dp_rank[pack] + part
    order = np.lexsort((packs.slot[pack], dp_rank, packs.step[pack]))
    pack, part = pack[order], part[order]
    return Shares(
        pack=pack,
        part=part.astype(np.int32),
        context=context[pack],
        step=packs.step[pack],
        dp_rank=dp_rank[order].astype(np.int32),
        slot=packs.slot[pack],
        level=packs.level[pack],
    )


def pieces_of(packs: ScheduledPacks, lengths: Lengths, rows: np.ndarray, level: Level) -> Pieces:
    """Return the pieces of these rows' packs, all of one level. `Pieces.pack` indexes `rows`."""
    chosen = packs.packs.take(rows)
    return cut_packs(lengths.tokens[chosen.samples], chosen.offsets, level)


def empty_slots(
    step: np.ndarray, dp_rank: np.ndarray, ranks: int, lockstep_ranks: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return step (int64), rank and slot (int32) of the slots that a rank has less than its
    lockstep group, [slots], given every micro-batch's step and rank.

    >>> empty_slots(np.array([0, 0, 0]), np.array([0, 0, 1]), ranks=4, lockstep_ranks=2)[1:]
    (array([1], dtype=int32), array([1], dtype=int32))
    """
    numbers, index = np.unique(step, return_inverse=True)
    counts = np.bincount(index * ranks + dp_rank, minlength=len(numbers) * ranks)  # [steps x ranks]
    blocks = counts.reshape(-1, lockstep_ranks)
    missing = (blocks.max(axis=1, keepdims=True, initial=0) - blocks).ravel()
    place, slot = expand_ranges(counts, missing)
    return numbers[place // ranks], (place % ranks).astype(np.int32), slot.astype(np.int32)
