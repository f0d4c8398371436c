"""1F1B pipeline schedules with every micro-batch's own duration, and what a plan's steps will take.

One-forward-one-backward (Narayanan et al. 2021, arXiv 2104.04473, section 2.2): stage s of p runs
min(p - 1 - s, m) warm-up forwards, then one forward and one backward in turn, then the remaining
backwards. A forward starts when the stage is free and the previous stage's output has arrived, a
backward when the next stage's gradient has. Sends do not occupy the sender.

Axes: m micro-batches, p stages. All steps (and data-parallel ranks) are simulated side by side.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from omnibal.cost.model import CostModel
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.stage_cost import StageTimes, once_a_step_ms, stage_times
from omnibal.pipeline.workload import Workload

_CHUNK_ENTRIES = 2_000_000
"""Of [rows, m, p] simulated at a time: bounds memory to a few hundred MB."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """When everything ran, in ms from the step's start; a leading steps axis when batched."""

    forward_start_ms: np.ndarray
    """[m, p]."""
    forward_end_ms: np.ndarray
    """[m, p]."""
    backward_start_ms: np.ndarray
    """[m, p]."""
    backward_end_ms: np.ndarray
    """[m, p]."""
    finish_ms: np.ndarray
    """[p]; end of the stage's last backward."""
    busy_ms: np.ndarray
    """[p]."""
    wait_ms: np.ndarray
    """[p]; the rest of the step."""
    step_ms: np.ndarray
    """Scalar; when the last stage to finish has finished."""


def simulate_1f1b(
    forward_ms: np.ndarray,
    backward_ms: np.ndarray,
    forward_link_ms: np.ndarray,
    backward_link_ms: np.ndarray,
) -> Timeline:
    """One step of one pipeline.

    Args:
        forward_ms: [m, p], and `backward_ms` likewise.
        forward_link_ms: [m, p - 1]; entry s is from stage s to s + 1.
        backward_link_ms: [m, p - 1]; entry s is from stage s + 1 to s.

    Example:
        >>> ones, links = np.ones((4, 2)), np.zeros((4, 1))
        >>> float(simulate_1f1b(ones, 2 * ones, links, links).step_ms)
        15.0
    """
    batched = simulate_steps(
        forward_ms[None],
        backward_ms[None],
        forward_link_ms[None],
        backward_link_ms[None],
        np.array([len(forward_ms)]),
    )
    return Timeline(**{field.name: getattr(batched, field.name)[0] for field in fields(Timeline)})


def simulate_steps(
    forward_ms: np.ndarray,
    backward_ms: np.ndarray,
    forward_link_ms: np.ndarray,
    backward_link_ms: np.ndarray,
    counts: np.ndarray,
) -> Timeline:
    """Many steps side by side, each with its own number of micro-batches.

    Args:
        forward_ms: [steps, m, p], and `backward_ms` likewise.
        forward_link_ms: [steps, m, p - 1], and `backward_link_ms` likewise.
        counts: [steps]; micro-batches from `counts` on do not exist. They take no time and wait
            for nothing, which is exact: 1F1B of fewer micro-batches runs in the same order.
    """
    steps, micro_batches, stages = forward_ms.shape
    real = np.arange(micro_batches)[:, None] < counts  # [m, steps]
    padded = not real.all()
    # Steps last, so that every operation below is on one contiguous vector of them.
    duration = np.stack([_steps_last(forward_ms, real), _steps_last(backward_ms, real)])
    link = np.stack([_steps_last(forward_link_ms, real), _steps_last(backward_link_ms, real)])
    end = np.empty_like(duration)  # [2, m, p, steps]
    free = np.zeros((stages, steps))
    for stage, backward, micro_batch in dependency_order(stages, micro_batches):
        sender = stage + 1 if backward else stage - 1
        start = free[stage]
        if 0 <= sender < stages:
            arrival = (
                end[backward, micro_batch, sender] + link[backward, micro_batch, min(stage, sender)]
            )
            start = np.maximum(start, arrival * real[micro_batch] if padded else arrival)
        free[stage] = start + duration[backward, micro_batch, stage]
        end[backward, micro_batch, stage] = free[stage]
    begin = end - duration
    busy = duration.sum(axis=(0, 1))
    step_ms = free.max(axis=0)
    return Timeline(
        forward_start_ms=np.moveaxis(begin[0], -1, 0),
        forward_end_ms=np.moveaxis(end[0], -1, 0),
        backward_start_ms=np.moveaxis(begin[1], -1, 0),
        backward_end_ms=np.moveaxis(end[1], -1, 0),
        finish_ms=free.T,
        busy_ms=busy.T,
        wait_ms=(step_ms - busy).T,
        step_ms=step_ms,
    )


def waits_before(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """How long every stage stands idle before each forward and each backward of one step, in ms.

    Both [m, p].
    """
    micro_batches, stages = timeline.forward_start_ms.shape
    start = np.stack([timeline.forward_start_ms, timeline.backward_start_ms])
    end = np.stack([timeline.forward_end_ms, timeline.backward_end_ms])
    waits = np.zeros_like(start)
    for stage in range(stages):
        passes, indices = np.array(_stage_order(stage, stages, micro_batches)).T
        ended = np.append(0.0, end[passes, indices, stage][:-1])
        waits[passes, indices, stage] = start[passes, indices, stage] - ended
    # Differences of equal times may be a rounding error below 0.
    return tuple(np.maximum(waits, 0.0))


def _steps_last(values: np.ndarray, real: np.ndarray) -> np.ndarray:
    """[steps, m, k] to [m, k, steps], with 0 for micro-batches that do not exist."""
    return np.where(real[:, None], np.moveaxis(values, 0, -1), 0.0)


def _stage_order(stage: int, stages: int, micro_batches: int) -> list[tuple[int, int]]:
    """What one stage runs, in order: (0 forward or 1 backward, micro-batch)."""
    warm_up = min(stages - 1 - stage, micro_batches)
    order = [(0, i) for i in range(warm_up)]
    for i in range(micro_batches - warm_up):
        order += [(0, warm_up + i), (1, i)]
    return order + [(1, i) for i in range(micro_batches - warm_up, micro_batches)]


def dependency_order(stages: int, micro_batches: int) -> list[tuple[int, int, int]]:
    """Everything that runs, as (stage, direction, micro-batch), each after what it needs."""
    queues = [deque(_stage_order(stage, stages, micro_batches)) for stage in range(stages)]
    order: list[tuple[int, int, int]] = []
    done: set[tuple[int, int, int]] = set()
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                backward, micro_batch = queue[0]
                sender = stage + 1 if backward else stage - 1
                if 0 <= sender < stages and (sender, backward, micro_batch) not in done:
                    break
                queue.popleft()
                done.add((stage, backward, micro_batch))
                order.append((stage, backward, micro_batch))
    return order


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTimes:
    """Simulated steps of all data-parallel ranks together."""

    step_ms: np.ndarray
    """[steps]; from the first forward to the end of the weight update."""
    busy_ms: np.ndarray
    """[steps, p]; compute, reduction and update, mean over the data-parallel ranks."""

    @property
    def wait_fractions(self) -> np.ndarray:
        """Share of the steps in which each stage neither computes nor updates weights. [p]"""
        return np.maximum(1 - self.busy_ms.sum(axis=0) / self.step_ms.sum(), 0)


def predict_steps(
    times: StageTimes, workload: Workload, reduction_ms: np.ndarray, optimizer_ms: np.ndarray
) -> StepTimes:
    """Simulate the steps of a workload; numbers between them that do not occur are left out.

    A stage's gradients are reduced when its slowest data-parallel rank has finished. The gradient
    norm then needs all stages, so the update starts everywhere at once.

    Args:
        times: of every pack of the workload.
        reduction_ms, optimizer_ms: [p], once a step.
    """
    dp_rank, slot = workload.dp_rank, workload.slot
    _, step_index = np.unique(workload.step, return_inverse=True)
    steps, ranks, stages = int(step_index[-1]) + 1, workload.data_parallel_size, len(optimizer_ms)
    micro_batches = int(slot.max()) + 1
    at_once = max(_CHUNK_ENTRIES // (ranks * micro_batches * stages), 1)
    finish_ms, busy_ms = np.empty((2, steps, stages))
    for first in range(0, steps, at_once):
        chunk = slice(first, min(first + at_once, steps))
        packs = slice(*np.searchsorted(step_index, [chunk.start, chunk.stop]))
        row = (step_index[packs] - first) * ranks + dp_rank[packs]
        rows = (chunk.stop - chunk.start) * ranks
        forward_ms, backward_ms, forward_link_ms, backward_link_ms = (
            _padded(values[packs], row, slot[packs], (rows, micro_batches))
            for values in (
                times.forward_ms,
                times.backward_ms,
                times.forward_link_ms,
                times.backward_link_ms,
            )
        )
        counts = np.bincount(row, minlength=rows)
        timeline = simulate_steps(
            forward_ms, backward_ms, forward_link_ms, backward_link_ms, counts
        )
        finish_ms[chunk] = timeline.finish_ms.reshape(-1, ranks, stages).max(axis=1)
        busy_ms[chunk] = timeline.busy_ms.reshape(-1, ranks, stages).mean(axis=1)
    return StepTimes(
        step_ms=(finish_ms + reduction_ms).max(axis=1) + optimizer_ms.max(),
        busy_ms=busy_ms + reduction_ms + optimizer_ms,
    )


def _padded(
    values: np.ndarray, row: np.ndarray, slot: np.ndarray, shape: tuple[int, int]
) -> np.ndarray:
    """[packs, k] to [rows, m, k], with 0 where a row has no such micro-batch."""
    table = np.zeros((*shape, values.shape[1]))
    table[row, slot] = values
    return table


def simulate_run(cost: CostModel, stages: Sequence[Stage], workload: Workload) -> StepTimes:
    """Every step of the workload on the given stages."""
    times = stage_times(cost, stages, workload.features)
    return predict_steps(times, workload, *once_a_step_ms(cost, stages))
