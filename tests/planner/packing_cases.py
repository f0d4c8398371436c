"""Packs checked against the caps and against the minimum number of packs."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import LinearConstraint, milp

from omnibal.data.lengths import Lengths
from omnibal.model.limits import Caps
from omnibal.packing.packs import Packs, ScheduledPacks

REAL_LENGTHS = Path(__file__).parents[3] / "shared" / "data" / "lengths"


def assert_valid(packs: Packs, lengths: Lengths, caps: Caps) -> None:
    assert sorted(packs.samples.tolist()) == list(range(len(lengths)))
    assert (np.diff(packs.offsets) > 0).all()
    for name in caps.names:
        assert packs.sums(lengths.column(name)).max() <= caps[name]


def all_patterns(sizes: np.ndarray, caps: np.ndarray) -> np.ndarray:
    """Return every pack that fits, [patterns, sizes]: its number of samples per size."""
    patterns: list[np.ndarray] = []

    def extend(pattern: np.ndarray, first: int) -> None:
        patterns.append(pattern)
        for size in range(first, len(pattern)):
            more = pattern + (np.arange(len(pattern)) == size)
            if (sizes @ more <= caps).all():
                extend(more, size)

    extend(np.zeros(sizes.shape[1], int), 0)
    return np.array(patterns)


def fewest_packs(sizes: np.ndarray, caps: np.ndarray) -> int:
    """Return the minimum number of packs, by an integer program over placements and used packs."""
    samples = sizes.shape[1]
    alone = np.eye(samples)
    inside = np.kron(alone, np.ones(samples))
    each_once = LinearConstraint(np.hstack([inside, np.zeros((samples, samples))]), 1, 1)
    both = zip(sizes, caps, strict=True)
    held = [np.hstack([np.kron(row, alone), -cap * alone]) for row, cap in both]
    # Sample i may only be in packs 0..i, so packs are not interchangeable.
    pack_of = np.tile(np.arange(samples), samples)
    allowed = (pack_of <= np.repeat(np.arange(samples), samples)).astype(float)
    solution = milp(
        np.append(np.zeros(samples**2), np.ones(samples)),
        integrality=np.ones(samples**2 + samples),
        bounds=(0, np.append(allowed, np.ones(samples))),
        constraints=[each_once, LinearConstraint(np.vstack(held), -np.inf, 0)],
    )
    assert solution.success
    return round(solution.fun)


def sequential_packs(tokens: Sequence[int], packing_length: int) -> list[list[int]]:
    """Return packs by `calculate_matched_group` of ms-swift 4.6.0 with `sequential`, restated: a
    row that does not fit ends the open pack, and so does its last token."""
    packs: list[list[int]] = []
    pack, total = list[int](), 0
    for row, count in enumerate(tokens):
        if pack and total + count > packing_length:
            packs.append(pack)
            pack, total = [], 0
        pack, total = [*pack, row], total + count
        if total >= packing_length:
            packs.append(pack)
            pack, total = [], 0
    return [*packs, pack] if pack else packs


def scheduled_packs(
    packs: Packs | Sequence[Sequence[int]], step: Sequence[int] | np.ndarray, **columns
) -> ScheduledPacks:
    """Return packs of these steps. Missing columns are zeros, and so are tiles."""
    listed = packs if isinstance(packs, Packs) else Packs.from_lists(packs)
    items = {"tiles": np.zeros(len(listed), np.int32), **columns.pop("items", {})}
    zeros = dict.fromkeys(("dp_rank", "slot", "epoch", "tokens", "level"), np.zeros(len(listed)))
    given = {name: np.asarray(column, np.int32) for name, column in (zeros | columns).items()}
    return ScheduledPacks(packs=listed, step=np.asarray(step), items=items, **given)
