"""Simulate pipeline schedules with per-micro-batch times, and step times.

A stage runs operations in schedule order. A forward waits for the previous part's activation, a
backward for the next part's gradient; sends do not block. Context-parallel ranks start every pass
of a shared micro-batch together and take the slowest rank's time, as do expert-parallel ranks in
stages with experts, and ranks that shard weights in all stages.

Axes: m micro-batches, p stages, k parts of the model, p * chunks (`omnibal.pipeline.schedules`).
All steps and data-parallel ranks are simulated as one batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from omnibal.cost.model import CostModel
from omnibal.pipeline.operation_graph import OperationGraph, listed_micro_batches, schedule_graph
from omnibal.pipeline.schedules import (
    ONE_FORWARD_ONE_BACKWARD,
    Pass,
    PipelineSchedule,
    StepSchedule,
)
from omnibal.pipeline.stage_cost import PerStepCosts, StageTimes, per_step_costs, workload_times
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.workload import Workload

_MAX_PASS_TIMES = 2_000_000  # entries of [rows, m, p] per batch: a few hundred MB


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """Start and end of every operation, in ms from the step's start; batched: [rows, ...]."""

    schedule: StepSchedule
    start_ms: Mapping[Pass, np.ndarray]  # start of every operation, [m, k] per kind of pass
    end_ms: Mapping[Pass, np.ndarray]  # end of every operation, [m, k] per kind of pass
    finish_ms: np.ndarray  # end of the stage's last operation, [p]
    busy_ms: np.ndarray  # compute time of the stage without waits for other rows, [p]
    step_ms: np.ndarray  # end of the last stage, a scalar

    def of_step(self, step: int) -> "Timeline":
        """Return one row (a step, or a rank of a step) of a batched timeline."""
        return replace(
            self,
            start_ms={kind: values[step] for kind, values in self.start_ms.items()},
            end_ms={kind: values[step] for kind, values in self.end_ms.items()},
            finish_ms=self.finish_ms[step],
            busy_ms=self.busy_ms[step],
            step_ms=self.step_ms[step],
        )


_PassIndex = tuple[int, int, int]  # pass: (row of its kind, micro-batch, part)


class OrderedPass(NamedTuple):
    """A pass in execution order, with the passes that it waits for."""

    stage: int
    place: _PassIndex
    before: _PassIndex | None  # the stage's previous pass, or None if it is the first
    source: _PassIndex | None  # producer of the input, or None if no other part has it
    link: _PassIndex  # index in `link_ms`: (0 forward or 1 backward, micro-batch, lower part)


@lru_cache(maxsize=64)
def order_passes(
    graph: OperationGraph, *, to_first_forwards: bool = False
) -> tuple[OrderedPass, ...]:
    """Return a topological order of all operations, or if `to_first_forwards` of the operations
    that the first micro-batch's forwards need, with long runs of one stage for cache locality."""
    needed = np.full(len(graph) + 1, not to_first_forwards)
    if to_first_forwards:
        needed[:-1] = (graph.kind == Pass.FORWARD) & (graph.micro_batch == 0)
        for index in graph.in_turn[::-1].tolist():
            if needed[index]:
                needed[graph.before[index]] = needed[graph.source[index]] = True
    columns = np.searchsorted(graph.kinds, graph.kind), graph.micro_batch, graph.part
    # The last place, None, is for absent passes, which the graph numbers len(graph).
    places = [*zip(*(column.tolist() for column in columns), strict=True), None]
    # Lists of Python ints, since indexing numpy arrays one by one is slow.
    backward = (graph.kind != Pass.FORWARD).astype(np.int64).tolist()
    stages, before, sources = graph.stage.tolist(), graph.before.tolist(), graph.source.tolist()
    turns = []
    for index in graph.in_turn[needed[graph.in_turn]].tolist():
        place, source = places[index], places[sources[index]]
        cut = place[2] if source is None else min(place[2], source[2])
        link = backward[index], place[1], cut
        turns.append(OrderedPass(stages[index], place, places[before[index]], source, link))
    return tuple(turns)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Blocks of neighbouring rows that begin and end a pass together."""

    first: np.ndarray  # first row of each block, [blocks]
    size: np.ndarray  # rows of each block, [blocks]

    def maximum(self, values: np.ndarray) -> np.ndarray:
        """Return the block's maximum in each of its rows. [..., rows]"""
        return np.repeat(np.maximum.reduceat(values, self.first, axis=-1), self.size, axis=-1)

    def argmax(self, values: np.ndarray) -> np.ndarray:
        """Return the index of the largest of `values` [rows] in each row's block. [rows]"""
        rows = np.arange(len(values))
        largest = np.where(values == self.maximum(values), rows, len(rows))
        return np.repeat(np.minimum.reduceat(largest, self.first), self.size)


@dataclass(frozen=True, slots=True, eq=False)
class Joins:
    """Blocks of rows that run passes together."""

    blocks: Mapping[tuple[int, int], Block]  # by micro-batch and part % `parts`; absent: alone
    parts: int  # number of parts k, or 1 if all parts have the same blocks

    @classmethod
    def build(cls, together: np.ndarray | None) -> "Joins":
        """Return the blocks of aligned rows, given their sizes [m, 1 or k, rows] or None."""
        if together is None:
            return cls({}, 1)
        blocks, rows = {}, np.arange(together.shape[2])
        for micro_batch, part in np.argwhere((together > 1).any(axis=2)).tolist():
            size = together[micro_batch, part]  # [rows]
            first = np.flatnonzero(rows % size == 0)  # blocks are aligned
            blocks[micro_batch, part] = Block(first, size[first])
        return cls(blocks, together.shape[1])

    def at(self, place: _PassIndex) -> Block | None:
        """Return the blocks of a pass, or None if every row runs it alone."""
        return self.blocks.get((place[1], place[2] % self.parts))

    def slowest(self, pass_ms: np.ndarray) -> np.ndarray:
        """Return pass times, each the max over the row's block. [kinds, m, k, rows]"""
        if not self.blocks:
            return pass_ms
        took_ms = pass_ms.copy()
        for micro_batch, part in np.ndindex(pass_ms.shape[1:3]):
            block = self.at((0, micro_batch, part))
            if block is not None:
                took_ms[:, micro_batch, part] = block.maximum(pass_ms[:, micro_batch, part])
        return took_ms


def run_passes(
    turns: Sequence[OrderedPass],
    took_ms: np.ndarray,
    link_ms: np.ndarray,
    ready_ms: np.ndarray,
    joins: Joins,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the end of every pass, [kinds, m, k, rows], and of every stage, [p, rows].

    Args:
        took_ms: pass times, equal in joined rows, [kinds, m, k, rows].
        link_ms: P2P times, -inf if the receiver waits for nothing, [2, m, k - 1, rows]; entry i is
            from part i to i + 1 forward, and from part i + 1 to i backward.
        ready_ms: earliest start of every stage, [p, rows].
    """
    end, free = np.zeros_like(took_ms), [*ready_ms]
    for stage, place, _, source, link in turns:
        start = free[stage]  # [rows]
        if source is not None:
            start = np.maximum(start, end[source] + link_ms[link])
        block = joins.at(place)
        if block is not None:
            start = block.maximum(start)
        free[stage] = np.add(start, took_ms[place], out=end[place])  # a view, not a copy
    return end, np.stack(free)


def idle_before_passes(timeline: Timeline) -> dict[Pass, np.ndarray]:
    """Return the stage's idle time before each operation of one step, in ms. [m, k] per kind"""
    schedule = timeline.schedule
    waits = {kind: np.zeros_like(start) for kind, start in timeline.start_ms.items()}
    for stage, operations in enumerate(schedule.operations):
        ended = 0.0
        for operation in operations:
            place = operation.micro_batch, schedule.part(stage, operation.chunk)
            # Differences of equal times may round below 0.
            waits[operation.kind][place] = max(timeline.start_ms[operation.kind][place] - ended, 0)
            ended = timeline.end_ms[operation.kind][place]
    return waits


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTimes:
    """Simulated steps over all data-parallel ranks."""

    step_ms: np.ndarray  # whole step: weight gather and encoding to weight update, [steps]
    busy_ms: np.ndarray  # compute, exposed exchange and update, mean over ranks, [steps, p]

    @property
    def wait_fractions(self) -> np.ndarray:
        """Idle share of every stage. [p]"""
        return np.maximum(1 - self.busy_ms.sum(axis=0) / self.step_ms.sum(), 0)


def predict_steps(
    times: StageTimes,
    workload: Workload,
    once: PerStepCosts,
    schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD,
) -> StepTimes:
    """Return times of the workload's steps that have packs, by increasing step number.

    Gradients are reduced after the slowest data-parallel rank. The gradient norm needs all stages,
    so all updates start together.
    """
    _, step_index = np.unique(workload.step, return_inverse=True)
    steps, ranks, stages = int(step_index[-1]) + 1, workload.data_parallel_size, len(once.update_ms)
    times_per_step = ranks * (int(workload.slot.max()) + 1) * stages * schedule.chunks
    at_once = max(_MAX_PASS_TIMES // times_per_step, 1)
    finish_ms, busy_ms = np.empty((2, steps, stages))
    for first in range(0, steps, at_once):
        chunk = slice(first, min(first + at_once, steps))
        packs = slice(*np.searchsorted(step_index, [chunk.start, chunk.stop]))
        rows = SimulatedRows.build(times, workload, packs, step_index[packs] - first, schedule)
        ready_ms = rows.first_waits_ms(once)  # [rows, p]
        timeline = rows.simulate(ready_ms)
        exposed_ms = rows.exposed_ms(once, timeline)
        reduced_ms = timeline.finish_ms + exposed_ms
        used_ms = timeline.busy_ms + ready_ms + exposed_ms
        if rows.waits_ms is not None:
            # Stage 0 waits for the encoders' backward, which begins after the last pass of all
            # stages; with deferred weight gradients any stage may be last.
            if stages > 1:
                after_ms = timeline.finish_ms[:, 1:].max(axis=1) + rows.waits_ms[:, 1]
                encoded_ms = np.maximum(timeline.finish_ms[:, 0], after_ms)
                reduced_ms[:, 0] = encoded_ms + exposed_ms[:, 0]
            # All stages of a pipeline encode. The first stage's passes already include it.
            used_ms[:, 1:] += rows.waits_ms.sum(axis=1, keepdims=True)
        # Gradient reduction waits for the slowest rank of each stage.
        finish_ms[chunk] = reduced_ms.reshape(-1, ranks, stages).max(axis=1)
        busy_ms[chunk] = used_ms.reshape(-1, ranks, stages).mean(axis=1)
    return StepTimes(
        step_ms=finish_ms.max(axis=1) + once.update_ms.max(), busy_ms=busy_ms + once.update_ms
    )


def simulate_ranks(
    times: StageTimes, workload: Workload, schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD
) -> Timeline:
    """Simulate the workload's single step on all data-parallel ranks, without exchanges of weights
    and gradients. [ranks, ...]

    Missing micro-batches take no time. Encoders run before the first forward; their backward is
    left out.
    """
    without_waits, step = replace(times, waits_ms=None), np.zeros(len(workload), np.int64)
    rows = SimulatedRows.build(without_waits, workload, slice(None), step, schedule)
    if times.waits_ms is None:
        return rows.simulate()
    before_ms = np.zeros((len(rows.counts), 1))  # [ranks, 1]
    np.add.at(before_ms[:, 0], workload.dp_rank, times.waits_ms[:, 0])
    return rows.simulate(np.repeat(before_ms, rows.stages, axis=1))


def encoder_blocks(
    timeline: Timeline, times: StageTimes, workload: Workload
) -> Iterator[tuple[int, str, float, float]]:
    """Yield rank, label, start and end in ms of data-parallel encoders on all stages of a rank,
    with exchanges and waits: before the first forward and after the last backward. `timeline` is
    from `simulate_ranks`."""
    if times.waits_ms is None:
        return
    for rank, finish_ms in enumerate(timeline.finish_ms):
        before_ms, after_ms = times.waits_ms[workload.dp_rank == rank].sum(axis=0).tolist()
        phases = ("forward", 0.0, before_ms), ("backward", float(finish_ms.max()), after_ms)
        for phase, start_ms, ms in phases:
            if ms > 0:
                yield rank, f"encoders {phase}", start_ms, start_ms + ms


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SimulatedRows:
    """Rows of a batch: every rank of a step, then the next step's ranks.

    Rows are the last axis, so that every operation runs on contiguous vectors. Missing
    micro-batches take no time, and have links of -inf.
    """

    schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD
    pass_ms: np.ndarray  # time of every pass, [kinds, m, k, rows], by the kinds of the schedule
    link_ms: np.ndarray  # P2P times forward and backward, [2, m, k - 1, rows], as in `run_passes`
    counts: np.ndarray  # micro-batches per row
    ranks: int = 1  # rows per step
    by_one_list: bool = False  # whether all rows of a step use one operation list
    # Size of the aligned block of rows that run a pass together, [m, 1 or k, rows], or None.
    together: np.ndarray | None = None
    # Data-parallel encoders' time in the first stage's forwards and backwards, [rows, 2].
    waits_ms: np.ndarray | None = None
    joins: Joins = field(init=False)
    took_ms: np.ndarray = field(init=False)  # `pass_ms` with joined rows at their slowest

    def __post_init__(self) -> None:
        joins = Joins.build(self.together)
        object.__setattr__(self, "joins", joins)
        object.__setattr__(self, "took_ms", joins.slowest(self.pass_ms))

    @classmethod
    def build(
        cls,
        times: StageTimes,
        workload: Workload,
        chosen: slice,
        step: np.ndarray,
        schedule: PipelineSchedule,
    ) -> "SimulatedRows":
        """Return rows of the `chosen` packs, whole steps only; `step` [chosen] counts from 0."""
        ranks, slot = workload.data_parallel_size, workload.slot[chosen]
        row = step * ranks + workload.dp_rank[chosen]
        shape = int(workload.slot.max()) + 1, (int(step[-1]) + 1) * ranks

        def to_table(values: np.ndarray, missing: float = 0) -> np.ndarray:
            """Arrange values [packs, k] as [m, k, rows]."""
            table = np.full((shape[0], values.shape[1], shape[1]), missing, values.dtype)
            table[slot, :, row] = values
            return table

        pass_ms = {kind: times.pass_ms(kind)[chosen] for kind in schedule.passes}
        waits_ms = None
        if times.waits_ms is not None:
            before_ms, after_ms = times.waits_ms[chosen].T
            waits_ms = np.stack(
                [np.bincount(row, ms, shape[1]) for ms in (before_ms, after_ms)], axis=1
            )
            # Encoding delays the first stage's passes: forwards before, the last pass after.
            first = np.arange(times.forward_ms.shape[1]) == 0
            pass_ms[Pass.FORWARD] = pass_ms[Pass.FORWARD] + before_ms[:, None] * first
            last = schedule.last_pass
            pass_ms[last] = pass_ms[last] + after_ms[:, None] * first
        links_ms = times.forward_link_ms[chosen], times.backward_link_ms[chosen]
        # Missing micro-batches have context 0 in the table, and run alone.
        context = np.maximum(to_table(workload.context[chosen, None]), 1)
        return cls(
            schedule=schedule,
            pass_ms=np.stack([to_table(ms) for ms in pass_ms.values()]),
            link_ms=np.stack([to_table(ms, -np.inf) for ms in links_ms]),
            counts=np.bincount(row, minlength=shape[1]),
            ranks=ranks,
            by_one_list=workload.runs_together,
            together=block_sizes(context, workload.lockstep_ranks, times.has_experts),
            waits_ms=waits_ms,
        )

    @property
    def stages(self) -> int:
        return self.pass_ms.shape[2] // self.schedule.chunks

    @property
    def parts_of_stages(self) -> np.ndarray:
        """Part of the model in each chunk of each stage, [p, chunks]."""
        return np.array(self.schedule.parts_of(self.pass_ms.shape[2]))

    def reorder_slots(self, chosen: np.ndarray, order: np.ndarray) -> "SimulatedRows":
        """Return rows `chosen` as independent steps with micro-batches in `order`, [chosen, m]."""
        place = order.T[None, :, None]
        return SimulatedRows(
            schedule=self.schedule,
            pass_ms=np.take_along_axis(self.pass_ms[..., chosen], place, axis=1),
            link_ms=np.take_along_axis(self.link_ms[..., chosen], place, axis=1),
            counts=self.counts[chosen],
        )

    def first_waits_ms(self, once: PerStepCosts) -> np.ndarray:
        """Return every stage's wait for updated weights before its first forward. [rows, p]"""
        if self.schedule.chunks == 1:
            return once.first_wait_ms(self.took_ms[0, 0].T)
        first_ms = np.zeros((len(self.counts), self.pass_ms.shape[2]))
        if once.overlaps and once.gather_ms.any():
            first_ms = self.simulate(to_first_forwards=True).start_ms[Pass.FORWARD][:, 0]
            first_ms = first_ms * (self.counts[:, None] > 0)
        return once.first_waits_ms(first_ms[:, self.parts_of_stages.T])

    def exposed_ms(self, once: PerStepCosts, timeline: Timeline) -> np.ndarray:
        """Return exposed gradient-reduction time of every stage. [rows, p]"""
        if self.schedule.chunks == 1:
            return once.exposed_ms(self.last_ms)
        # Missing micro-batches may have the times of ranks that run together with theirs.
        is_real = np.arange(self.pass_ms.shape[1]) < self.counts[:, None]
        last_ms = timeline.end_ms[self.schedule.last_pass]
        end_ms = np.where(is_real[..., None], last_ms, 0).max(axis=1)
        return once.chunks_exposed_ms(end_ms[:, self.parts_of_stages.T])

    @property
    def last_ms(self) -> np.ndarray:
        """Time of every part's last backward. [rows, k]"""
        return self.took_ms[-1, np.maximum(self.counts - 1, 0), :, np.arange(len(self.counts))]

    def simulate(
        self, ready_ms: np.ndarray | None = None, *, to_first_forwards: bool = False
    ) -> Timeline:
        """Return the timeline [rows, ...]; times of missing micro-batches have no meaning.

        Operation lists are from `omnibal.pipeline.operation_graph.listed_micro_batches`.

        Args:
            ready_ms: earliest start of each stage, [rows, p].
            to_first_forwards: whether only times of the first micro-batch's forwards are needed;
                other times then have no meaning.
        """
        slots, rows = self.pass_ms.shape[1], len(self.counts)
        longest = schedule_graph(self.schedule, self.stages, slots)
        listed = listed_micro_batches(
            longest, self.counts, np.arange(rows) // self.ranks, together=self.by_one_list
        )
        ready_ms = np.zeros((rows, self.stages)) if ready_ms is None else ready_ms
        end_ms, finish_ms = np.zeros(self.took_ms.shape), np.zeros((self.stages, rows))
        for count in np.unique(listed).tolist():
            of_list, part = np.flatnonzero(listed == count), self
            if len(of_list) < rows or count < slots:
                part = SimulatedRows(
                    schedule=self.schedule,
                    pass_ms=self.pass_ms[:, :count, :, of_list],
                    link_ms=self.link_ms[:, :count, :, of_list],
                    counts=self.counts[of_list],
                    together=None if self.together is None else self.together[:count, :, of_list],
                )
            graph = schedule_graph(self.schedule, self.stages, count)
            turns = order_passes(graph, to_first_forwards=to_first_forwards)
            ended = run_passes(turns, part.took_ms, part.link_ms, ready_ms[of_list].T, part.joins)
            if part is self:
                end_ms, finish_ms = ended
            else:
                end_ms[:, :count, :, of_list], finish_ms[:, of_list] = ended
        start_ms = end_ms - self.took_ms
        kinds = self.schedule.passes
        return Timeline(
            schedule=longest.schedule,
            start_ms={kind: np.moveaxis(start_ms[row], -1, 0) for row, kind in enumerate(kinds)},
            end_ms={kind: np.moveaxis(end_ms[row], -1, 0) for row, kind in enumerate(kinds)},
            finish_ms=finish_ms.T,
            busy_ms=self.pass_ms.sum(axis=(0, 1))[self.parts_of_stages].sum(axis=1).T,
            step_ms=finish_ms.max(axis=0),
        )


def block_sizes(
    context: np.ndarray, lockstep_ranks: int, has_experts: np.ndarray | None
) -> np.ndarray | None:
    """Return the size of the block of rows that run each pass together, [m, 1 or k, rows].

    Args:
        context: context-parallel size of every micro-batch, equal within an aligned block of rows,
            [m, 1, rows].
        lockstep_ranks: size of aligned blocks that run in lockstep, a divisor or multiple of every
            context-parallel size.
        has_experts: whether parts run in lockstep, due to experts or sharded weights, bool [k] or
            [k, rows], or None if no part does.

    Returns:
        None if every row runs alone.
    """
    if lockstep_ranks > 1 and has_experts is not None:
        has_experts = has_experts.reshape(len(has_experts), -1)
        return np.where(has_experts, np.maximum(context, lockstep_ranks), context)
    return context if (context > 1).any() else None


def simulate_levels(
    cost: CostModel,
    stages_at: Sequence[Sequence[Stage]],
    workload: Workload,
    schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD,
) -> StepTimes:
    """Return times of the workload's steps, from `cost` and the stages of every level."""
    times = workload_times(cost, stages_at, workload)
    once = per_step_costs(cost, stages_at[0], schedule)
    return predict_steps(times, workload, once, schedule)
