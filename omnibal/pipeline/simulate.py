"""Simulate pipeline schedules with per-micro-batch times, and step times.

A stage runs operations in schedule order. A forward waits for the previous part's activation, a
backward for the next part's gradient; sends do not block. Context-parallel ranks start every pass
of a shared micro-batch together and take the slowest rank's time, as do expert-parallel ranks in
stages with experts.

Axes: m micro-batches, p stages, k parts of the model, p * chunks (`omnibal.pipeline.schedules`).
All steps and data-parallel ranks are simulated as one batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnibal.cost.model import CostModel
from omnibal.pipeline.operation_graph import OperationGraph, listed_micro_batches, schedule_graph
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, Pass, PipelineSchedule, Schedule
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.stage_cost import PerStepCosts, StageTimes, per_step_costs, workload_times
from omnibal.pipeline.workload import Workload

_CHUNK_ENTRIES = 2_000_000
"""Entries of [rows, m, p] simulated per chunk: limits memory to a few hundred MB."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """Start and end of every operation, in ms from the step's start; batched: [steps, ...]."""

    schedule: Schedule
    start_ms: Mapping[Pass, np.ndarray]
    """Start of every operation, [m, k] per kind of pass."""
    end_ms: Mapping[Pass, np.ndarray]
    """End of every operation, [m, k] per kind of pass."""
    finish_ms: np.ndarray
    """End of the stage's last operation, [p]."""
    busy_ms: np.ndarray
    """Compute time of the stage, [p]."""
    step_ms: np.ndarray
    """End of the last stage, a scalar."""

    @property
    def wait_ms(self) -> np.ndarray:
        """Idle time of the stage, [p]."""
        return self.step_ms[..., None] - self.busy_ms

    def of_step(self, step: int) -> "Timeline":
        """Select one step of a batched timeline."""
        return Timeline(
            schedule=self.schedule,
            start_ms={kind: values[step] for kind, values in self.start_ms.items()},
            end_ms={kind: values[step] for kind, values in self.end_ms.items()},
            finish_ms=self.finish_ms[step],
            busy_ms=self.busy_ms[step],
            step_ms=self.step_ms[step],
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lockstep:
    """Expert-parallel ranks that run in lockstep."""

    ranks: int
    """Size of their aligned blocks, a divisor or multiple of every context-parallel size."""
    parts: np.ndarray
    """Parts of the model with experts, bool [k]."""


def simulate_schedule(
    graph: OperationGraph,
    duration_ms: Mapping[Pass, np.ndarray],
    forward_link_ms: np.ndarray,
    backward_link_ms: np.ndarray,
    counts: np.ndarray,
    ready_ms: np.ndarray | None = None,
    context: np.ndarray | None = None,
    lockstep: Lockstep | None = None,
) -> Timeline:
    """Simulate a batch of steps in any schedule.

    Args:
        duration_ms: [steps, m, k] per kind of pass.
        forward_link_ms: [steps, m, k - 1]; entry i is from part i to i + 1.
        backward_link_ms: [steps, m, k - 1]; entry i is from part i + 1 to i.
        counts: [steps]; micro-batches from `counts` on are skipped, which equals the schedule of
            fewer micro-batches only if it is prefix-closed.
        ready_ms: earliest start of each stage, [steps, p], or None for 0.
        context: context-parallel size of every micro-batch, [steps, m], equal within an aligned
            block of rows, or None for 1.
        lockstep: rows with equal counts that run some parts in lockstep, or None if absent.
    """
    schedule, kinds = graph.schedule, graph.kinds
    steps, micro_batches = len(counts), schedule.micro_batches
    real = np.arange(micro_batches)[:, None] < counts  # [m, steps]
    padded = not real.all()
    # Steps last, so that every operation below runs on contiguous vectors.
    duration = np.stack([_steps_last(duration_ms[kind], real) for kind in kinds])
    link = np.stack([_steps_last(forward_link_ms, real), _steps_last(backward_link_ms, real)])
    blocks = _blocks_of_parts(context, lockstep, duration.shape[1:])
    took = _taken(duration, blocks)
    end = np.zeros_like(duration)  # [kinds, m, k, steps]
    free = np.zeros((schedule.stages, steps)) if ready_ms is None else ready_ms.T.copy()
    for stage, place, sender, over in _orders(graph):
        start = free[stage]
        if sender is not None:
            arrival = end[sender] + link[over]
            start = np.maximum(start, arrival * real[place[1]] if padded else arrival)
        if place[1:] in blocks:
            start = blocks[place[1:]].most(start)
        free[stage] = start + took[place]
        end[place] = free[stage]
    begin = end - took
    busy = np.zeros((schedule.stages, steps))
    np.add.at(
        busy, [schedule.stage_of(part) for part in range(schedule.parts)], duration.sum((0, 1))
    )
    return Timeline(
        schedule=schedule,
        start_ms={kind: np.moveaxis(begin[row], -1, 0) for row, kind in enumerate(kinds)},
        end_ms={kind: np.moveaxis(end[row], -1, 0) for row, kind in enumerate(kinds)},
        finish_ms=free.T,
        busy_ms=busy.T,
        step_ms=free.max(axis=0),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """Rows that compute a micro-batch together."""

    first: np.ndarray
    size: np.ndarray

    def most(self, values: np.ndarray) -> np.ndarray:
        """Return the block maximum in all of its rows. [..., rows]"""
        return np.repeat(np.maximum.reduceat(values, self.first, axis=-1), self.size, axis=-1)


def _taken(duration: np.ndarray, blocks: Mapping[tuple[int, int], _Blocks]) -> np.ndarray:
    """Return pass times with blocks at their slowest row. [..., m, k, rows]"""
    if not blocks:
        return duration
    took = duration.copy()
    for (micro_batch, part), block in blocks.items():
        took[..., micro_batch, part, :] = block.most(duration[..., micro_batch, part, :])
    return took


def _blocks_of_parts(
    context: np.ndarray | None, lockstep: Lockstep | None, shape: tuple[int, int, int]
) -> dict[tuple[int, int], _Blocks]:
    """Return row blocks of every micro-batch and part; `shape` is (micro-batches, parts, rows)."""
    micro_batches, parts, rows = shape
    plain = grouped = _blocks(context)
    if lockstep is not None:
        alone = np.ones((rows, micro_batches), np.int64) if context is None else context
        grouped = _blocks(np.maximum(alone, lockstep.ranks))
    return {
        (micro_batch, part): block
        for part in range(parts)
        for micro_batch, block in (
            grouped if lockstep is not None and lockstep.parts[part] else plain
        ).items()
    }


def _blocks(context: np.ndarray | None) -> dict[int, _Blocks]:
    """Return row blocks of every shared micro-batch, from context sizes [rows, m]."""
    if context is None:
        return {}
    rows = np.arange(len(context))
    blocks = {}
    for micro_batch in np.flatnonzero((context > 1).any(axis=0)).tolist():
        first = np.flatnonzero(rows % context[:, micro_batch] == 0)
        blocks[micro_batch] = _Blocks(first, context[first, micro_batch])
    return blocks


_Place = tuple[int, int, int]
"""Operation: (kind's row, micro-batch, part)."""


def _orders(graph: OperationGraph) -> Iterator[tuple[int, _Place, _Place | None, _Place]]:
    """Yield stage, operation, source and link of every operation. A link is (0 forward or 1
    backward, micro-batch, first part)."""
    columns = np.searchsorted(graph.kinds, graph.kind), graph.micro_batch, graph.part
    places = list(zip(*(column.tolist() for column in columns), strict=True))
    backward = (graph.kind != Pass.FORWARD).astype(np.int64).tolist()
    stages, sources = graph.stage.tolist(), graph.source.tolist()
    for index in graph.in_turn.tolist():
        place, source = places[index], sources[index]
        if source == len(places):
            yield stages[index], place, None, place
        else:
            cut = min(place[2], places[source][2])
            yield stages[index], place, places[source], (backward[index], place[1], cut)


def waits_before(timeline: Timeline) -> dict[Pass, np.ndarray]:
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


def _steps_last(values: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Move the steps axis last, [steps, m, k] to [m, k, steps]; 0 for missing micro-batches."""
    return np.where(real[:, None], np.moveaxis(values, 0, -1), 0.0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTimes:
    """Simulated steps over all data-parallel ranks."""

    step_ms: np.ndarray
    """Time from the first forward to the end of the weight update, [steps]."""
    busy_ms: np.ndarray
    """Compute, exposed exchange and update, mean over the data-parallel ranks, [steps, p]."""

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
    """Simulate the steps of a workload, without unused step numbers.

    Gradients are reduced after the slowest data-parallel rank. The gradient norm needs all stages,
    so all updates start together.
    """
    _, step_index = np.unique(workload.step, return_inverse=True)
    steps, ranks, stages = int(step_index[-1]) + 1, workload.data_parallel_size, len(once.update_ms)
    entries = ranks * (int(workload.slot.max()) + 1) * stages * schedule.chunks
    at_once = max(_CHUNK_ENTRIES // entries, 1)
    finish_ms, busy_ms = np.empty((2, steps, stages))
    for first in range(0, steps, at_once):
        chunk = slice(first, min(first + at_once, steps))
        packs = slice(*np.searchsorted(step_index, [chunk.start, chunk.stop]))
        rows = SimulatedRows.of(times, workload, packs, step_index[packs] - first, schedule)
        ready_ms = rows.first_waits_ms(once)
        timeline = rows.simulated(ready_ms)
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
            # All ranks of a pipeline encode. The first stage already includes it.
            used_ms[:, 1:] += rows.waits_ms.sum(axis=1, keepdims=True)
        finish_ms[chunk] = reduced_ms.reshape(-1, ranks, stages).max(axis=1)
        busy_ms[chunk] = used_ms.reshape(-1, ranks, stages).mean(axis=1)
    return StepTimes(
        step_ms=finish_ms.max(axis=1) + once.update_ms.max(), busy_ms=busy_ms + once.update_ms
    )


def simulate_ranks(
    times: StageTimes, workload: Workload, schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD
) -> Timeline:
    """Simulate one step of all data-parallel ranks, without exchanges of weights and gradients.
    [ranks, ...]

    Missing micro-batches take no time. Encoders run before the first forward; their backward is
    left out.

    Args:
        workload: a single step.
    """
    alone, one_step = replace(times, waits_ms=None), np.zeros(len(workload), np.int64)
    rows = SimulatedRows.of(alone, workload, slice(None), one_step, schedule)
    if times.waits_ms is None:
        return rows.simulated()
    before_ms = np.zeros((len(rows.counts), 1))
    np.add.at(before_ms[:, 0], workload.dp_rank, times.waits_ms[:, 0])
    return rows.simulated(np.repeat(before_ms, rows.stages, axis=1))


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderBlock:
    """Time of data-parallel encoders on all stages of a rank, with exchanges and waits."""

    rank: int
    is_back: bool
    start_ms: float
    end_ms: float

    @property
    def label(self) -> str:
        """Label for a drawing."""
        return f"encoders {'backward' if self.is_back else 'forward'}"


def encoder_blocks(
    timeline: Timeline, times: StageTimes, workload: Workload
) -> Iterator[EncoderBlock]:
    """Yield encoder times before the first forward and after the last backward; `timeline` is from
    `simulate_ranks`."""
    if times.waits_ms is None:
        return
    for rank, finish_ms in enumerate(timeline.finish_ms):
        before_ms, after_ms = times.waits_ms[workload.dp_rank == rank].sum(axis=0).tolist()
        last_ms = float(finish_ms.max())
        if before_ms > 0:
            yield EncoderBlock(rank=rank, is_back=False, start_ms=0.0, end_ms=before_ms)
        if after_ms > 0:
            end_ms = last_ms + after_ms
            yield EncoderBlock(rank=rank, is_back=True, start_ms=last_ms, end_ms=end_ms)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SimulatedRows:
    """Rows of a batch: every rank of a step, then the next step's ranks."""

    schedule: PipelineSchedule
    pass_ms: Mapping[Pass, np.ndarray]
    """Time per kind of pass, [rows, m, k]."""
    forward_link_ms: np.ndarray
    """P2P times; this and the next are [rows, m, k - 1]."""
    backward_link_ms: np.ndarray
    counts: np.ndarray
    """Micro-batches per row."""
    ranks: int = 1
    """Rows per step."""
    together: bool = False
    """Whether all rows of a step use one operation list."""
    context: np.ndarray | None = None
    """Context-parallel size of each micro-batch, [rows, m], or None if all are 1."""
    lockstep: Lockstep | None = None
    """Rows in lockstep, or None if absent."""
    waits_ms: np.ndarray | None = None
    """Wait for data-parallel encoders in the first stage's forwards and backwards, [rows, 2], or
    None without such encoders."""

    @classmethod
    def of(
        cls,
        times: StageTimes,
        workload: Workload,
        chosen: slice,
        step: np.ndarray,
        schedule: PipelineSchedule,
    ) -> "SimulatedRows":
        """Arrange `chosen` micro-batches, to the end of a step, in rows; `step` is from 0."""
        ranks, slot = workload.data_parallel_size, workload.slot[chosen]
        row = step * ranks + workload.dp_rank[chosen]
        shape = (int(step[-1]) + 1) * ranks, int(workload.slot.max()) + 1
        pass_ms = {kind: times.pass_ms(kind)[chosen] for kind in schedule.passes}
        waits_ms = None
        if times.waits_ms is not None:
            before_ms, after_ms = times.waits_ms[chosen].T
            waits_ms = np.stack(
                [np.bincount(row, each, shape[0]) for each in (before_ms, after_ms)], axis=1
            )
            first = np.arange(times.forward_ms.shape[1]) == 0
            pass_ms[Pass.FORWARD] = pass_ms[Pass.FORWARD] + before_ms[:, None] * first
            last = schedule.last_pass
            pass_ms[last] = pass_ms[last] + after_ms[:, None] * first
        context = np.maximum(_padded(workload.context[chosen], row, slot, shape), 1)
        lockstep = None
        if workload.lockstep_ranks > 1 and times.has_experts is not None:
            lockstep = Lockstep(ranks=workload.lockstep_ranks, parts=times.has_experts)
        return cls(
            schedule=schedule,
            pass_ms={kind: _padded(ms, row, slot, shape) for kind, ms in pass_ms.items()},
            forward_link_ms=_padded(times.forward_link_ms[chosen], row, slot, shape),
            backward_link_ms=_padded(times.backward_link_ms[chosen], row, slot, shape),
            counts=np.bincount(row, minlength=shape[0]),
            ranks=ranks,
            together=workload.runs_together,
            context=context if (context > 1).any() else None,
            lockstep=lockstep,
            waits_ms=waits_ms,
        )

    @property
    def stages(self) -> int:
        return self.pass_ms[Pass.FORWARD].shape[2] // self.schedule.chunks

    def reordered(self, chosen: np.ndarray, order: np.ndarray) -> "SimulatedRows":
        """Return rows `chosen` as independent steps with micro-batches in `order`, [chosen, m]."""
        taken = chosen[:, None], order
        return SimulatedRows(
            schedule=self.schedule,
            pass_ms={kind: ms[taken] for kind, ms in self.pass_ms.items()},
            forward_link_ms=self.forward_link_ms[taken],
            backward_link_ms=self.backward_link_ms[taken],
            counts=self.counts[chosen],
        )

    def first_waits_ms(self, once: PerStepCosts) -> np.ndarray:
        """Return every stage's wait for updated weights before its first forward. [rows, p]"""
        if self.schedule.chunks == 1:
            return once.first_wait_ms(self._taken(Pass.FORWARD)[:, 0])
        first_ms = np.zeros((len(self.counts), self.stages * self.schedule.chunks))
        if once.overlaps and once.gather_ms.any():
            first_ms = self.simulated(to_first_forwards=True).start_ms[Pass.FORWARD][:, 0]
            first_ms = first_ms * (self.counts[:, None] > 0)
        return once.first_waits_ms(first_ms[:, self._chunks])

    def exposed_ms(self, once: PerStepCosts, timeline: Timeline) -> np.ndarray:
        """Return exposed gradient-reduction time of every stage. [rows, p]"""
        last = self.schedule.last_pass
        if self.schedule.chunks == 1:
            slot = np.maximum(self.counts - 1, 0)
            return once.exposed_ms(self._taken(last)[np.arange(len(slot)), slot])
        # Missing micro-batches may have the times of ranks that run together with theirs.
        is_real = np.arange(self.forward_link_ms.shape[1]) < self.counts[:, None]
        end_ms = np.where(is_real[..., None], timeline.end_ms[last], 0).max(axis=1)
        return once.chunks_exposed_ms(end_ms[:, self._chunks])

    @property
    def _chunks(self) -> np.ndarray:
        """Part of the model in each chunk of each stage, [chunks, p]."""
        return np.array(self.schedule.parts_of(self.stages * self.schedule.chunks)).T

    def _taken(self, kind: Pass) -> np.ndarray:
        """Return pass times including ranks that run them together. [rows, m, k]"""
        duration = np.moveaxis(self.pass_ms[kind], 0, -1)
        blocks = _blocks_of_parts(self.context, self.lockstep, duration.shape)
        return np.moveaxis(_taken(duration, blocks), -1, 0)

    def simulated(
        self, ready_ms: np.ndarray | None = None, *, to_first_forwards: bool = False
    ) -> Timeline:
        """Simulate all rows; missing micro-batches are at 0.

        Operation lists are from `omnibal.pipeline.operation_graph.listed_micro_batches`.

        Args:
            ready_ms: earliest start of each stage, [rows, p].
            to_first_forwards: whether only times of the first micro-batch's forwards are needed;
                the others are then 0 or too early.
        """
        most = self.forward_link_ms.shape[1]
        graph = schedule_graph(self.schedule, self.stages, most)
        step = np.arange(len(self.counts)) // self.ranks
        listed = listed_micro_batches(graph, self.counts, step, together=self.together)
        if (listed == most).all():
            return self._by_list(graph, np.arange(len(listed)), ready_ms, to_first_forwards)
        kinds, shape = self.schedule.passes, (len(listed), most, graph.schedule.parts)
        whole = Timeline(
            schedule=graph.schedule,
            start_ms={kind: np.zeros(shape) for kind in kinds},
            end_ms={kind: np.zeros(shape) for kind in kinds},
            finish_ms=np.zeros((len(listed), self.stages)),
            busy_ms=np.zeros((len(listed), self.stages)),
            step_ms=np.zeros(len(listed)),
        )
        for count in np.unique(listed).tolist():
            rows = np.flatnonzero(listed == count)
            shorter = schedule_graph(self.schedule, self.stages, count)
            timeline = self._by_list(shorter, rows, ready_ms, to_first_forwards)
            for kind in timeline.start_ms:
                whole.start_ms[kind][rows, :count] = timeline.start_ms[kind]
                whole.end_ms[kind][rows, :count] = timeline.end_ms[kind]
            whole.finish_ms[rows], whole.busy_ms[rows] = timeline.finish_ms, timeline.busy_ms
            whole.step_ms[rows] = timeline.step_ms
        return whole

    def _by_list(
        self, graph: OperationGraph, rows: np.ndarray, ready_ms: np.ndarray | None, to_first: bool
    ) -> Timeline:
        """Simulate rows with an operation list of exactly their micro-batches."""
        listed = np.s_[rows, : graph.schedule.micro_batches]
        return simulate_schedule(
            graph.until_first_forwards() if to_first else graph,
            {kind: ms[listed] for kind, ms in self.pass_ms.items()},
            self.forward_link_ms[listed],
            self.backward_link_ms[listed],
            self.counts[rows],
            None if ready_ms is None else ready_ms[rows],
            None if self.context is None else self.context[listed],
            self.lockstep,
        )


def _padded(
    values: np.ndarray, row: np.ndarray, slot: np.ndarray, shape: tuple[int, int]
) -> np.ndarray:
    """Arrange values [packs, ...] as [rows, m, ...], zeros if missing."""
    table = np.zeros((*shape, *values.shape[1:]), values.dtype)
    table[row, slot] = values
    return table


def simulate_levels(
    cost: CostModel,
    stages_at: Sequence[Sequence[Stage]],
    workload: Workload,
    schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD,
) -> StepTimes:
    """Simulate every step of a workload with costs and stages of all its levels."""
    times = workload_times(cost, stages_at, workload)
    once = per_step_costs(cost, stages_at[0], schedule)
    return predict_steps(times, workload, once, schedule)
