"""Order of a rank's micro-batches within a step, to reduce waits between unequal ones.

While a pipeline fills and drains, stages wait for single micro-batches, and a long one delays
others. Order affects neither the trained data nor other ranks, so it is searched last, on the
planned stages, by local changes that shorten the simulated step. A rank stops once it is as fast as
some rank's bound, since ranks wait for the slowest at the step's end.

Axes: r pairs of step and rank, m micro-batches of each, p stages, k parts (chunks) of the model.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.pipeline.simulate import SimulatedRows
from omnibal.pipeline.split_task import SplitTask
from omnibal.pipeline.stage_cost import StageTimes, workload_times
from omnibal.pipeline.stage_memory import GIB, fits_cap, stage_memories
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.workload import Workload

# Simulated operations: about ten seconds of a core. With many steps each rank tries fewer changes.
_MAX_ORDER_OPERATIONS = 6e8
_MAX_CHANGES_PER_RANK = 2_000  # max changes tried per rank
_PATIENCE = 120  # changes without gain before a restart from the best, per eight micro-batches
_MAX_RESTARTS = 4  # max restarts in a row without gain
_ROWS_AT_ONCE = 4_096  # rows per batch; their times fit a cache
_MIN_ORDER_GAIN = 1e-9  # relative gain required of a better order


def order_slots(
    task: SplitTask, stages_at: Sequence[Sequence[Stage]], *, effort: float = 1.0
) -> np.ndarray:
    """Return new slots of all micro-batches, for shorter steps. int32 [rows of the workload]

    Steps whose new order would exceed the memory cap keep their slots.

    Args:
        task: its ranks only wait for each other at a step's end (not `runs_together`), and current
            slots meet its memory cap.
    """
    cost, workload, schedule = task.cost, task.workload, task.schedule
    times = workload_times(cost, stages_at, workload)
    slot = search_slots(times, workload, schedule, effort=effort)

    def too_full(steps: np.ndarray) -> list[int]:
        """Return the `steps` whose new order has a stage above the cap."""
        chosen = np.isin(workload.step, steps)
        changed, new = workload.rows(chosen), slot[chosen]
        order = np.lexsort((new, changed.dp_rank, changed.step))
        changed = replace(changed.rows(order), slot=new[order])
        peaks = stage_memories(cost, stages_at, changed, schedule)
        if fits_cap(max(peak.peak_gib for peak in peaks) * GIB, task.memory_cap_bytes):
            return []
        if len(steps) == 1:
            return [int(steps[0])]
        # A peak is over all steps given: halve them.
        return [step for half in np.array_split(steps, 2) for step in too_full(half)]

    full = too_full(np.unique(workload.step))
    return np.where(np.isin(workload.step, full), workload.slot, slot)


def apply_slots(packs: ScheduledPacks, slot: np.ndarray) -> ScheduledPacks:
    """Return the packs with new `slot` [packs], sorted by step, rank and slot again."""
    order = np.lexsort((slot, packs.dp_rank, packs.step))
    return replace(packs.take(order), slot=slot[order].astype(np.int32))


def search_slots(
    times: StageTimes,
    workload: Workload,
    schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD,
    *,
    effort: float = 1.0,
) -> np.ndarray:
    """Return new slots of all micro-batches, as `order_slots` with these times but without a memory
    cap. int32 [rows of `workload`]"""
    ranks, slot = workload.data_parallel_size, workload.slot.copy()
    _, step = np.unique(workload.step, return_inverse=True)
    operations = len(schedule.passes) * times.forward_ms.size
    changes = int(min(effort * _MAX_ORDER_OPERATIONS // max(operations, 1), _MAX_CHANGES_PER_RANK))
    # Encoder waits do not depend on the order.
    times, at_once = replace(times, waits_ms=None), max(_ROWS_AT_ONCE // ranks, 1)
    for begin in range(0, int(step[-1]) + 1, at_once):
        held = slice(*np.searchsorted(step, [begin, begin + at_once]))
        rows = SimulatedRows.build(times, workload, held, step[held] - begin, schedule)
        order = _improve_orders(rows, changes)
        # The micro-batch in slot i was in slot order[row, i].
        place = np.argsort(order, axis=1)
        row = (step[held] - begin) * ranks + workload.dp_rank[held]
        slot[held] = place[row, slot[held]]
    return slot


def _bound_ms(rows: SimulatedRows) -> np.ndarray:
    """Return a lower bound on the step time of any order, in ms [r]: max over stages of work + min
    fill + min drain (no drain if stages end with a weight-gradient pass)."""
    exists = np.arange(rows.pass_ms.shape[1])[:, None, None] < rows.counts  # [m, 1, r]

    def quickest(direction: int) -> np.ndarray:
        """Return the min time of a micro-batch to reach every part from part 0, or back. [k, r]"""
        to_part = np.cumsum(rows.pass_ms[direction, :, :-1] + rows.link_ms[direction], axis=1)
        quickest_ms = np.where(exists, to_part, np.inf).min(axis=0)
        return np.concatenate([np.zeros((1, quickest_ms.shape[1])), quickest_ms])

    parts = rows.parts_of_stages
    # Per stage, [p, r].
    work = rows.pass_ms.sum(axis=(0, 1))[parts].sum(axis=1)
    work += quickest(0)[parts.min(axis=1)]
    if not rows.schedule.in_two:
        work += quickest(1)[parts.min(axis=1)]
    return np.where(rows.counts > 0, work.max(axis=0), 0.0)


def _improve_orders(rows: SimulatedRows, changes: int) -> np.ndarray:
    """Return the best orders found (old slot by new slot) in at most `changes` tries. [r, m]"""
    r, m = len(rows.counts), rows.pass_ms.shape[1]
    best = np.arange(m)[None].repeat(r, axis=0)
    best_ms = rows.simulate().step_ms
    order, order_ms = best.copy(), best_ms.copy()
    # Ranks wait for the slowest, so no rank needs to be faster than the highest bound of its step.
    of_step = _bound_ms(rows).reshape(-1, rows.ranks).max(axis=1)
    goal_ms = np.repeat(of_step, rows.ranks) * (1 + _MIN_ORDER_GAIN)
    in_vain, starts = np.zeros((2, r), np.int64)
    patience = np.ceil(_PATIENCE * rows.counts / 8)
    rng = np.random.default_rng(0)
    for number in range(changes):
        active = np.flatnonzero((best_ms > goal_ms) & (starts <= _MAX_RESTARTS) & (rows.counts > 1))
        if not len(active):
            break
        # A restart takes the best order after three random changes and this one, even if longer.
        restarts = in_vain[active] > patience[active]
        base = np.where(restarts[:, None], best[active], order[active])
        for change in (_swap_slots, _move_slot, _swap_slots) if restarts.any() else ():
            changed = change(base, *rng.integers(0, rows.counts[active], (2, len(active))))
            base = np.where(restarts[:, None], changed, base)
        first, second = rng.integers(0, rows.counts[active], (2, len(active)))
        changed = (_swap_slots if number % 2 else _move_slot)(base, first, second)
        changed_ms = rows.reorder_slots(active, changed).simulate().step_ms
        is_shorter = changed_ms < order_ms[active] * (1 - _MIN_ORDER_GAIN)
        taken = active[is_shorter | restarts]
        order[taken] = changed[is_shorter | restarts]
        order_ms[taken] = changed_ms[is_shorter | restarts]
        is_best = order_ms[active] < best_ms[active] * (1 - _MIN_ORDER_GAIN)
        better = active[is_best]
        best[better], best_ms[better] = order[better], order_ms[better]
        in_vain[active] = np.where(is_shorter | restarts, 0, in_vain[active] + 1)
        starts[active] = np.where(is_best, 0, starts[active] + restarts)
    return best


def _swap_slots(order: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return orders [r, m] with the micro-batches at `first` and `second` [r] swapped."""
    rows, changed = np.arange(len(order)), order.copy()
    changed[rows, first], changed[rows, second] = order[rows, second], order[rows, first]
    return changed


def _move_slot(order: np.ndarray, start: np.ndarray, to: np.ndarray) -> np.ndarray:
    """Return orders [r, m] with the micro-batch at place `start` [r] moved to `to` [r]."""
    rows, place = np.arange(len(order)), np.arange(order.shape[1], dtype=float)
    key = place[None].repeat(len(order), axis=0)
    key[rows, start] = to + np.where(to > start, 0.5, -0.5)  # sorts just after or before `to`
    return np.take_along_axis(order, np.argsort(key, axis=1, kind="stable"), axis=1)
