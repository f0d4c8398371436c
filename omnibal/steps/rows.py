"""Rows: packs of one context size that all data-parallel ranks run at the same time.

A row is a slot of a step. With context size c, an aligned block of c ranks shares a pack, so a full
row over n ranks has n / c packs, of one level and similar predicted time. Rows are shuffled into
steps, unlike in HBP (arXiv 2503.07680, section 4, balance batching), where lengths depend on the
step. Incomplete rows come last in their step, widest first and on its first ranks, so that no rank
has a gap between micro-batches, which shared packs require.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnibal.base.errors import UserError
from omnibal.steps.deal import lightest_at_the_ends


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowRequest:
    """Sizes for forming rows from packs, and steps from rows."""

    contexts: Sequence[int]
    """Context size by level, a divisor of `ranks`."""
    ranks: int
    rows_per_step: int
    curriculum_steps: int = 0
    """First steps with rows of the first level only."""
    samples_per_step: int | None = None
    """Mean samples per step, instead of `rows_per_step`."""


def match_rows(
    level: np.ndarray,
    order: np.ndarray,
    load: np.ndarray,
    samples: np.ndarray,
    request: RowRequest,
    rng: np.random.Generator,
) -> np.ndarray:
    """Step of every pack of an epoch, int64 [packs], counted from 0.

    All steps but one have the same number of rows. The exception, at a random position, gets the
    incomplete rows, with the lightest packs of each level, and the lightest rows. If
    `samples_per_step` is given, steps have similar numbers of samples instead. `order` is a
    permutation of packs with similar packs of a level adjacent. Load is per rank.
    """
    row, rows = _rows(level, order, load, request)
    if request.samples_per_step is not None:
        of_row = np.bincount(row, weights=samples)
        return _steps_of_even_samples(of_row, rows, request, rng)[row]
    count, partial = len(rows.load), np.flatnonzero(~rows.full)
    steps = max(int(count / request.rows_per_step + 0.5), 1)
    while steps > 1 and count - (steps - 1) * request.rows_per_step < len(partial):
        steps -= 1
    over = count - (steps - 1) * request.rows_per_step
    by_load = np.lexsort((rows.load, rows.full))
    step_of_row = np.empty(count, np.int64)
    # Numbers of regular steps, the curriculum's first, and last of the irregular step.
    ordered = min(request.curriculum_steps, steps - 1)
    number = np.append(np.arange(ordered), ordered + rng.permutation(steps - ordered))
    step_of_row[by_load[:over]] = number[-1]
    usual = np.sort(by_load[over:])
    first = _curriculum_rows(usual[rows.level[usual] == 0], request, steps, rng)
    usual = rng.permutation(np.setdiff1d(usual, first))
    filled = np.concatenate([first, usual])
    step_of_row[filled] = np.repeat(number[:-1], request.rows_per_step)
    return step_of_row[row]


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    level: np.ndarray
    load: np.ndarray
    """Mean load of the row's packs, [rows]."""
    full: np.ndarray
    """Whether the row has packs for all ranks, bool [rows]."""


def _rows(
    level: np.ndarray, order: np.ndarray, load: np.ndarray, request: RowRequest
) -> tuple[np.ndarray, _Rows]:
    """Row of every pack, and the rows. The lightest packs of a level form its incomplete row."""
    row = np.empty(len(level), np.int64)
    levels: list[int] = []
    full: list[bool] = []
    for index, context in enumerate(request.contexts):
        width = request.ranks // context
        packs = order[level[order] == index]
        over = len(packs) % width
        lightest = np.argsort(load[packs], kind="stable")[:over]
        usual = np.delete(packs, lightest)
        rows = len(usual) // width
        row[usual] = len(levels) + np.arange(len(usual)) // width
        row[packs[lightest]] = len(levels) + rows
        levels += [index] * (rows + (over > 0))
        full += [True] * rows + [False] * (over > 0)
    number = np.bincount(row, minlength=len(levels))
    mean = np.bincount(row, weights=load, minlength=len(levels)) / number
    return row, _Rows(np.array(levels), mean, np.array(full))


def _steps_of_even_samples(
    samples: np.ndarray, rows: _Rows, request: RowRequest, rng: np.random.Generator
) -> np.ndarray:
    """Step of every row, in samples / `samples_per_step` steps if there are enough rows."""
    assert request.samples_per_step is not None
    full, curriculum = int(rows.full.sum()), request.curriculum_steps
    steps = max(min(round(float(samples.sum()) / request.samples_per_step), full), 1)
    step, later = np.empty(len(samples), np.int64), np.arange(len(samples))
    if curriculum:
        short = np.flatnonzero(rows.full & (rows.level == 0))
        per_step = max(round(request.samples_per_step / max(float(samples[short].mean()), 1)), 1)
        request = replace(request, rows_per_step=per_step)
        first = _curriculum_rows(short, request, steps, rng)
        step[first] = even_steps(samples[first], rows.full[first], curriculum, rng)
        later = np.setdiff1d(later, first)
        full = curriculum + int(rows.full[later].sum())
    if len(later):
        steps = max(min(steps, full) - curriculum, 1)
        step[later] = curriculum + even_steps(samples[later], rows.full[later], steps, rng)
    return step


def even_steps(
    samples: np.ndarray,
    full: np.ndarray,
    steps: int,
    rng: np.random.Generator,
    max_rows: int | None = None,
) -> np.ndarray:
    """Return the step of every row, with similar samples per step (longest processing time first).

    Incomplete rows come last, so that every step has a full one. No step has more than `max_rows`
    rows, by default 1.5 times the mean.
    """
    order = rng.permutation(len(samples))
    order = order[np.lexsort((-samples[order], ~full[order]))]
    max_rows = max_rows or -(-3 * len(samples) // (2 * steps))
    step = np.empty(len(samples), np.int64)
    held = [(0.0, 0, number) for number in rng.permutation(steps).tolist()]
    for row in order.tolist():
        total, count, number = heapq.heappop(held)
        step[row] = number
        if count + 1 < max_rows:
            heapq.heappush(held, (total + samples[row], count + 1, number))
    return step


def _curriculum_rows(
    rows: np.ndarray, request: RowRequest, steps: int, rng: np.random.Generator
) -> np.ndarray:
    """Rows of the first level for the first steps."""
    wanted = request.curriculum_steps * request.rows_per_step
    if wanted > len(rows) or request.curriculum_steps > steps - 1:
        raise UserError(
            f"a curriculum of {request.curriculum_steps:,} steps needs {wanted:,} rows of packs of "
            f"the shortest level, and an epoch has {len(rows):,} full ones in {steps:,} steps; "
            f"give --curriculum-steps {min(len(rows) // request.rows_per_step, steps - 1)} or fewer"
        )
    return rng.permutation(rows)[:wanted]


def deal_rows(
    context: np.ndarray, items: np.ndarray, load: np.ndarray, ranks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Deal the packs of steps with equal contexts to data-parallel ranks.

    Packs of one context size are dealt in rows by descending items and load, each row's heaviest
    pack to the block with minimal load so far. Rows with the widest context come first, so that no
    block waits for a rank's unshared pack. The first and last rows are light, as other stages idle
    during pipeline fill and drain.

    `context` is [packs], equal in all steps, and divides `ranks`. Items and load per rank are
    [steps, packs]. Returns the first rank of every pack's block, and its slot, [steps, packs].
    """
    rank, slot = np.empty_like(items), np.empty_like(items)
    rank_load = np.zeros((len(load), ranks))
    full: list[list[np.ndarray]] = []
    partial: list[tuple[int, np.ndarray]] = []
    for size in np.unique(context)[::-1].tolist():
        packs = np.flatnonzero(context == size)
        order = np.lexsort((-load[:, packs], -items[:, packs]), axis=1)
        packs, width = packs[order], ranks // size
        full.append([])
        for first in range(0, len(packs[0]), width):
            row = packs[:, first : first + width]
            block = _assign(row, load, rank_load, size)
            np.put_along_axis(rank, row, block * size, axis=1)
            if row.shape[1] == width:
                full[-1].append(row)
            else:
                partial.append((-row.shape[1] * size, row))
    widest_first = [row for _, row in sorted(partial, key=lambda pair: pair[0])]
    for number, row in enumerate([*_lightest_at_the_ends(full), *widest_first]):
        np.put_along_axis(slot, row, number, axis=1)
    return rank, slot


def _lightest_at_the_ends(groups: Sequence[list[np.ndarray]]) -> list[np.ndarray]:
    """Concatenate groups of rows sorted by descending load, with the first group reversed."""
    groups = [group for group in groups if group]
    if len(groups) == 1:
        return [groups[0][place] for place in lightest_at_the_ends(len(groups[0]))]
    if groups:
        groups[0] = groups[0][::-1]
    return [row for group in groups for row in group]


def _assign(row: np.ndarray, load: np.ndarray, rank_load: np.ndarray, context: int) -> np.ndarray:
    """Block of every pack of a row [steps, packs]. Adds the packs' load to `rank_load`."""
    steps, count = row.shape
    own = np.take_along_axis(load, row, axis=1)
    blocks = rank_load[:, : count * context].reshape(steps, count, context)
    heaviest_first = np.argsort(-own, axis=1, kind="stable")
    least_first = np.argsort(blocks.max(axis=2), axis=1, kind="stable")
    block = np.empty((steps, count), np.int64)
    np.put_along_axis(block, heaviest_first, least_first, axis=1)
    given = np.zeros((steps, count))
    np.put_along_axis(given, block, own, axis=1)
    # Ranks of a block advance together, with the slowest.
    together = blocks.max(axis=2, keepdims=True) + given[:, :, None]
    rank_load[:, : count * context] = np.broadcast_to(together, blocks.shape).reshape(steps, -1)
    return block
