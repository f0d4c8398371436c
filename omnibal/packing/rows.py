"""Rows: packs of one context-parallel size that all data-parallel ranks run at the same time.

A row is a slot of a step. With context size c, an aligned block of c ranks shares a pack, so a full
row over n ranks has `n / c` packs, of one level and similar predicted time. Rows are shuffled into
steps; in HBP (arXiv 2503.07680, section 4, balance batching) lengths depend on the step instead.
Incomplete rows come last in their step, widest first and on its first ranks: shared packs require
that no rank has a gap between micro-batches.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnibal.base.errors import UserError
from omnibal.packing.fit import Seed

_WINDOW_PACKS = 1 << 14  # Packs per window. Larger windows match better and mix less.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowRequest:
    """Sizes for forming rows from packs, and steps from rows."""

    contexts: Sequence[int]  # context-parallel sizes by level, divisors of `ranks`
    ranks: int
    rows_per_step: int
    curriculum_steps: int = 0  # first steps with rows of the first level only
    samples_per_step: int | None = None  # mean samples per step, instead of `rows_per_step`


def match_rows(
    level: np.ndarray,
    items: np.ndarray,
    load: np.ndarray,
    samples: np.ndarray,
    request: RowRequest,
    seed: Seed,
) -> np.ndarray:
    """Return the step of every pack of an epoch, int64 [packs], counted from 0.

    All steps have equally many rows but one, at a random position, which gets the incomplete rows
    (with the lightest packs of each level) and the lightest full rows. With `samples_per_step`,
    steps have similar numbers of samples instead. `load` is per rank, other arrays per pack.
    """
    rng = np.random.default_rng(seed)
    shuffled, parts = rng.permutation(len(level)), []
    for index in range(len(request.contexts)):
        packs = shuffled[level[shuffled] == index]
        for window in np.array_split(packs, max(round(len(packs) / _WINDOW_PACKS), 1)):
            parts.append(window[_by_items_then_load(items[window], load[window])])
    row, rows = _form_rows(level, np.concatenate(parts), load, request)
    if request.samples_per_step is not None:
        of_row = np.bincount(row, weights=samples)
        return _match_even_samples(of_row, rows, request, rng)[row]
    count, partial = len(rows.load), np.flatnonzero(~rows.full)
    steps = max(int(count / request.rows_per_step + 0.5), 1)
    # All incomplete rows must fit the irregular step.
    while steps > 1 and count - (steps - 1) * request.rows_per_step < len(partial):
        steps -= 1
    over = count - (steps - 1) * request.rows_per_step
    by_load = np.lexsort((rows.load, rows.full))
    step_of_row = np.empty(count, np.int64)
    # Step numbers: the curriculum's first, and the irregular step's as last element.
    ordered = min(request.curriculum_steps, steps - 1)
    number = np.append(np.arange(ordered), ordered + rng.permutation(steps - ordered))
    step_of_row[by_load[:over]] = number[-1]
    regular = np.sort(by_load[over:])
    first = _draw_curriculum(regular[rows.level[regular] == 0], request, steps, rng)
    later = rng.permutation(np.setdiff1d(regular, first))
    step_of_row[np.concatenate([first, later])] = np.repeat(number[:-1], request.rows_per_step)
    return step_of_row[row]


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    level: np.ndarray  # index of the level of the row's packs, [rows]
    load: np.ndarray  # mean load of the row's packs, [rows]
    full: np.ndarray  # whether the row has packs for all ranks, bool [rows]


def _form_rows(
    level: np.ndarray, order: np.ndarray, load: np.ndarray, request: RowRequest
) -> tuple[np.ndarray, _Rows]:
    """Return the row of every pack, and the rows. Incomplete rows get a level's lightest packs."""
    row = np.empty(len(level), np.int64)
    levels: list[int] = []
    full: list[bool] = []
    for index, context in enumerate(request.contexts):
        width = request.ranks // context
        packs = order[level[order] == index]
        over = len(packs) % width
        lightest = np.argsort(load[packs], kind="stable")[:over]
        matched = np.delete(packs, lightest)
        rows = len(matched) // width
        row[matched] = len(levels) + np.arange(len(matched)) // width
        row[packs[lightest]] = len(levels) + rows
        levels += [index] * (rows + (over > 0))
        full += [True] * rows + [False] * (over > 0)
    number = np.bincount(row, minlength=len(levels))
    mean = np.bincount(row, weights=load, minlength=len(levels)) / number
    return row, _Rows(np.array(levels), mean, np.array(full))


def _match_even_samples(
    samples: np.ndarray, rows: _Rows, request: RowRequest, rng: np.random.Generator
) -> np.ndarray:
    """Return the step of every row, for steps of about `samples_per_step` samples."""
    assert request.samples_per_step is not None
    full, curriculum = int(rows.full.sum()), request.curriculum_steps
    steps = max(min(round(float(samples.sum()) / request.samples_per_step), full), 1)
    step, later = np.empty(len(samples), np.int64), np.arange(len(samples))
    if curriculum:
        short = np.flatnonzero(rows.full & (rows.level == 0))
        per_step = max(round(request.samples_per_step / max(float(samples[short].mean()), 1)), 1)
        request = replace(request, rows_per_step=per_step)
        first = _draw_curriculum(short, request, steps, rng)
        step[first] = even_steps(samples[first], rows.full[first], curriculum, rng)
        later = np.setdiff1d(later, first)
        full = curriculum + int(rows.full[later].sum())
    if len(later):
        # Every step needs a full row.
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
    heap = [(0.0, 0, number) for number in rng.permutation(steps).tolist()]
    for row in order.tolist():
        total, count, number = heapq.heappop(heap)
        step[row] = number
        if count + 1 < max_rows:
            heapq.heappush(heap, (total + samples[row], count + 1, number))
    return step


def _draw_curriculum(
    rows: np.ndarray, request: RowRequest, steps: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw the curriculum's rows from full `rows` of the first level. Raise if they are too few."""
    wanted = request.curriculum_steps * request.rows_per_step
    if wanted > len(rows) or request.curriculum_steps > steps - 1:
        raise UserError(
            f"a curriculum of {request.curriculum_steps:,} steps needs {wanted:,} rows of packs of "
            f"the shortest level, and an epoch has {len(rows):,} full rows in {steps:,} steps; "
            f"give --curriculum-steps {min(len(rows) // request.rows_per_step, steps - 1)} or fewer"
        )
    return rng.permutation(rows)[:wanted]


def match_packs(
    items: np.ndarray,
    load: np.ndarray,
    packs_per_step: int,
    packs_per_row: int,
    seed: Seed,
    *,
    rest_last: bool = False,
    samples: np.ndarray | None = None,
) -> np.ndarray:
    """Return the step of every pack of an epoch, int64 [packs], counted from 0.

    All steps have `packs_per_step` packs, in rows of `packs_per_row` of equal items and similar
    load, but one, at a random position: it gets the lightest packs, which the packing could not
    fill, 0.5 to 1.5 times `packs_per_step`.

    Args:
        rest_last: the irregular step is the last, with at most `packs_per_step` packs.
        samples: of every pack, for steps with similar numbers of samples.
    """
    rng = np.random.default_rng(seed)
    of_a_step = len(load) / packs_per_step
    steps = int(np.ceil(of_a_step)) if rest_last else max(int(of_a_step + 0.5), 1)
    left_over = len(load) - (steps - 1) * packs_per_step
    lightest_first = np.argsort(load, kind="stable")
    number = rng.permutation(steps)
    if rest_last and left_over < packs_per_step:
        number = np.append(rng.permutation(steps - 1), steps - 1)
    step = np.empty(len(load), np.int64)
    step[lightest_first[:left_over]] = number[-1]
    shuffled = rng.permutation(np.sort(lightest_first[left_over:]))  # packs of regular steps
    rows = (steps - 1) * packs_per_step // packs_per_row
    row = np.empty(len(load), np.int64)
    step_of_row = rng.permutation(rows) * packs_per_row // packs_per_step
    windows = max(round(rows * packs_per_row / _WINDOW_PACKS), 1)
    for window in np.array_split(np.arange(rows), windows):
        if len(window):
            packs = shuffled[window[0] * packs_per_row : (window[-1] + 1) * packs_per_row]
            packs = packs[_by_items_then_load(items[packs], load[packs])]
            row[packs] = np.repeat(window, packs_per_row)
    if samples is not None and rows:
        of_row = np.bincount(row[shuffled], weights=samples[shuffled], minlength=rows)
        step_of_row = even_steps(of_row, np.ones(rows, bool), steps - 1, rng, rows // (steps - 1))
    step[shuffled] = number[step_of_row[row[shuffled]]]
    return step


def _by_items_then_load(items: np.ndarray, load: np.ndarray) -> np.ndarray:
    """Return the order by items, then load."""
    # Load ascends and descends in turn, so that rows with two item counts have similar loads.
    _, turn = np.unique(items, return_inverse=True)
    return np.lexsort((np.where(turn % 2, -load, load), items))
