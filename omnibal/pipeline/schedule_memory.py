"""Stage memory in any schedule, with several chunks and split backwards.

Same formula as `omnibal.pipeline.stage_memory` (1F1B, used by the search), written as linear forms
of micro-batch features per pass and chunk. A chunk keeps a micro-batch's activations from forward
to the end of (input) backward, then, with split backwards, linear inputs and output gradients until
the weight backward (`omnibal.cost.deferred`). P2P buffers hold one tensor each way per peer
stage throughout, sized for the largest chunk.

Axes: passes, chunks of a stage, F features of all levels.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from omnibal.base.arrays import rows_of
from omnibal.cost.model import CostModel
from omnibal.pipeline.level_costs import features_of
from omnibal.pipeline.operation_graph import (
    OperationGraph,
    held_in_passes,
    listed_micro_batches,
    schedule_graph,
)
from omnibal.pipeline.prediction import StageMemory
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, Pass, PipelineSchedule
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.stage_memory import (
    LINKS,
    RunningPasses,
    bytes_in_passes,
    cut_bytes,
    encoder_memory_of,
    memory_of_stage,
    memory_table,
    running_passes,
    running_sums,
    stage_memories,
    tied_gradient_bytes,
    unkept_input,
)
from omnibal.pipeline.unit_runs import UnitRun, counts_of_runs, holds_both_ends, unit_runs
from omnibal.pipeline.workload import Workload

_PASSES_AT_ONCE = 50_000
"""Passes per chunk of computation: limits memory to a few hundred MB."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkPasses:
    """Passes of one kind and chunk, with the stage's micro-batches in flight."""

    kind: Pass
    chunk: int
    row: np.ndarray
    """Workload row of the running micro-batch, [passes]."""
    own: np.ndarray
    """Features of the running micro-batch, [passes, F]."""
    kept: np.ndarray
    """Summed features of other micro-batches kept for backward, [passes, chunks, F]."""
    late: np.ndarray
    """Summed features of micro-batches awaiting weight gradients, [passes, chunks, F]."""

    def take(self, chosen: np.ndarray) -> "ChunkPasses":
        """Select passes."""
        return rows_of(self, chosen)


def schedule_passes(
    features: np.ndarray, workload: Workload, schedule: PipelineSchedule, stages: int, stage: int
) -> Iterator[ChunkPasses]:
    """Yield every pass of a stage in a run, in batches; `features` [rows, F] are sorted by step,
    rank and slot."""
    total = running_sums(features)
    first = np.flatnonzero(workload.slot == 0)
    counts = np.diff(np.append(first, len(features)))
    listed = listed_micro_batches(
        schedule_graph(schedule, stages, int(counts.max())),
        counts,
        workload.step[first],
        together=workload.runs_together,
    )
    for most in np.unique(listed).tolist():
        graph = schedule_graph(schedule, stages, most)
        chosen = np.flatnonzero(listed == most)
        at_once = max(_PASSES_AT_ONCE // most, 1)
        for begin in range(0, len(chosen), at_once):
            some = chosen[begin : begin + at_once]
            yield from _passes_of(features, total, first[some], counts[some], graph, stage)


def _passes_of(
    features: np.ndarray,
    total: np.ndarray,
    first: np.ndarray,
    counts: np.ndarray,
    graph: OperationGraph,
    stage: int,
) -> Iterator[ChunkPasses]:
    """Yield passes of a stage by kind and chunk, for runs of rows with one operation list.

    Args:
        total: prefix sums of the features.
        first: first row of every run, [runs]; `counts` are the runs' micro-batches.
    """
    passes = held_in_passes(graph, stage)
    for kind in graph.kinds:
        for chunk in range(graph.schedule.chunks):
            listed = np.flatnonzero((passes.kind == kind) & (passes.chunk == chunk))
            run, place = np.nonzero(passes.micro_batch[listed] < counts[:, None])
            place, base = listed[place], first[run]
            row = base + passes.micro_batch[place]
            own = features[row]

            def sums(runs: np.ndarray, at: np.ndarray = base, of: np.ndarray = run) -> np.ndarray:
                ends = at[:, None, None] + np.minimum(runs, counts[of, None, None])
                return total[ends[..., 1]] - total[ends[..., 0]]

            kept, late = sums(passes.held[place]), sums(passes.late[place])
            mine = late if kind is Pass.BACKWARD_WEIGHT else kept
            mine[:, chunk] -= own
            yield ChunkPasses(kind=kind, chunk=chunk, row=row, own=own, kept=kept, late=late)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkBytes:
    """Bytes of one chunk, as linear forms of micro-batch features."""

    kept: np.ndarray
    late: np.ndarray
    """Kept for weight gradients, [F]."""
    running: dict[Pass, np.ndarray]
    """Bytes of the running micro-batch per unit, [forms, F] per kind of pass; use their max."""

    @classmethod
    def of(cls, cost: CostModel, runs: Sequence[UnitRun], *, in_two: bool) -> "ChunkBytes":
        """Build for a chunk's units, in model order; `in_two` if backwards are split, since no pass
        then uses working memory for linear weight gradients."""
        units, nothing = [*cost.units.values()], np.zeros(len(cost.features))
        counts, _ = counts_of_runs(len(units), runs)
        last, entered = units[runs[-1].kind], unkept_input(cost)[runs[0].kind]
        one = np.arange(len(nothing)) % (len(nothing) // cost.levels) == 0  # of any micro-batch
        tied = int(holds_both_ends(cost.kinds, counts)) * tied_gradient_bytes(cost)
        late_of = [in_two * unit.late_bytes[:2].sum(axis=0) for unit in units]
        late = nothing + sum(run.number * late_of[run.kind] for run in runs)
        late_before, kept, passing = nothing, entered, nothing
        forward, backward, passed = [nothing], [nothing], set[int]()
        for run in runs:
            unit = units[run.kind]
            moments = unit.two_part_bytes if in_two else unit.transient_bytes
            dropped = np.repeat(run.recomputed, len(nothing) // cost.levels)
            of_unit = np.where(dropped, unit.boundary_bytes, unit.activation_bytes)
            of_late = late_of[run.kind]
            kept = kept + run.number * of_unit
            late_before = late_before + run.number * of_late
            gradient = last.output_gradient_bytes if run.kind != runs[-1].kind else nothing
            if not unit.has_backward:
                if run.kind not in passed:
                    passing = passing + unit.passing_bytes
                passed.add(run.kind)
                forward += [kept + passing + working for working in moments]
                continue
            again = unit.activation_bytes - of_unit
            # The last unit runs first. When the first runs, all later units are done.
            over = (run.number - 1) * (of_late - of_unit)
            for working in moments:
                form = kept + again + working + tied[run.kind] * one
                forward.append(form)
                form = form + gradient + late - late_before
                backward += [form, form + over]
        products = np.stack([units[run.kind].late_bytes[2] for run in runs])
        return cls(
            kept=kept,
            late=late,
            running={
                Pass.FORWARD: np.stack(forward),
                Pass.BACKWARD_INPUT if in_two else Pass.BACKWARD: np.stack(backward),
                Pass.BACKWARD_WEIGHT: late + products,
            },
        )


Rooms = tuple[tuple[tuple[int, int], ...], ...]
"""Groups of P2P tensors sharing one buffer: index in `stage_memory.cut_bytes`, and chunk."""


def link_rooms(schedule: PipelineSchedule, stages: int, stage: int) -> Rooms:
    """Return P2P buffer groups: one each way per peer stage, for outputs and gradients; chunks of
    the same stage share one."""
    place, last = schedule.placement, stages * schedule.chunks - 1
    rooms: defaultdict[tuple[int, int, bool], list[tuple[int, int]]] = defaultdict(list)
    for chunk in range(schedule.chunks):
        part = place.part(stage, chunk, stages)
        for tensor, other in enumerate((part - 1, part - 1, part + 1, part + 1)):
            if 0 <= other <= last:
                peer = place.stage_of(other, stages)
                comes = tensor in (0, 3) and peer != stage
                rooms[peer, tensor % 2, comes].append((tensor, chunk))
    return tuple(map(tuple, rooms.values()))


def link_bytes(
    cost: CostModel, largest: np.ndarray, counts: np.ndarray, rooms: Rooms
) -> np.ndarray:
    """Return P2P buffer bytes of stages with `counts` [..., chunks, kinds]; `largest` has the max
    of each feature over micro-batches, [F]. [...]"""
    tensors = cut_bytes(cost, largest, counts)
    return np.sum(
        [np.max([tensors[each][..., chunk] for each, chunk in room], axis=0) for room in rooms],
        axis=0,
    )


def schedule_memories(
    cost: CostModel,
    stages_at: Sequence[Sequence[Stage]],
    workload: Workload,
    schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD,
) -> list[StageMemory]:
    """Return the peak memory per device of every stage, over all passes of a run."""
    if schedule == ONE_FORWARD_ONE_BACKWARD:
        return stage_memories(cost, stages_at, workload)
    return counted_memories(cost, stages_at, workload, schedule)


def counted_memories(
    cost: CostModel,
    stages_at: Sequence[Sequence[Stage]],
    workload: Workload,
    schedule: PipelineSchedule,
) -> list[StageMemory]:
    """Return `schedule_memories` by this module's forms for any schedule."""
    features, stages = features_of(workload, cost), len(stages_at[0]) // schedule.chunks
    largest, memories = features.max(axis=0), []
    # One pass, for terms that do not depend on passes.
    alone = RunningPasses(
        own=largest[None],
        others=0 * largest[None],
        links=np.zeros((1, len(LINKS))),
        largest=largest,
    )
    table = memory_table(cost, alone, encoder_memory_of(workload))
    for stage in range(stages):
        runs_of, forms = _chunks_of(cost, stages_at, schedule, stage)
        passes = schedule_passes(features, workload, schedule, stages, stage)
        most = [[each.max(initial=0) for each in _bytes_in(forms, some)] for some in passes]
        held_bytes, passes_bytes = np.max(most, axis=0)
        of_chunks = np.stack([counts_of_runs(len(cost.kinds), runs)[0] for runs in runs_of])
        counts, rooms = of_chunks.sum(axis=0), link_rooms(schedule, stages, stage)
        links = link_bytes(cost, largest, of_chunks, rooms) + table.room_bytes(counts)
        pass_bytes = np.array([passes_bytes + float(links)])
        memories.append(
            memory_of_stage(
                cost, counts, table, held_bytes=float(held_bytes), pass_bytes=pass_bytes
            )
        )
    return memories


def _chunks_of(
    cost: CostModel, stages_at: Sequence[Sequence[Stage]], schedule: PipelineSchedule, stage: int
) -> tuple[list[tuple[UnitRun, ...]], list[ChunkBytes]]:
    """Return the units of every chunk of a stage, and their bytes."""
    parts = schedule.parts_of(len(stages_at[0]))[stage]
    runs_of = [unit_runs(cost.kinds, [stages[part] for stages in stages_at]) for part in parts]
    return runs_of, [ChunkBytes.of(cost, runs, in_two=schedule.in_two) for runs in runs_of]


def _bytes_in(chunks: Sequence[ChunkBytes], passes: ChunkPasses) -> tuple[np.ndarray, np.ndarray]:
    """Return activations kept and memory needed in each pass. [passes] each"""
    own, others = chunks[passes.chunk], np.zeros(len(passes.own))
    for chunk, each in enumerate(chunks):
        others = others + passes.kept[:, chunk] @ each.kept + passes.late[:, chunk] @ each.late
    held = others + passes.own @ (own.late if passes.kind is Pass.BACKWARD_WEIGHT else own.kept)
    return held, others + (passes.own @ own.running[passes.kind].T).max(axis=1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassBytes:
    """Stage memory without state in every pass of a run. [passes] each"""

    row: np.ndarray
    """Workload row of the running micro-batch."""
    kind: np.ndarray
    """`Pass` of each."""
    chunk: np.ndarray
    needed: np.ndarray
    """Total without state."""
    held: np.ndarray
    """Activations kept."""
    others: np.ndarray
    """Other micro-batches in flight, counted once per chunk."""


def bytes_of_passes(
    cost: CostModel,
    stages_at: Sequence[Sequence[Stage]],
    workload: Workload,
    schedule: PipelineSchedule,
    stage: int,
    features: np.ndarray,
) -> PassBytes:
    """Return one stage's memory in all passes of a run with `features` [rows, F], which may differ
    from the workload's own."""
    size = len(stages_at[0]) // schedule.chunks
    if schedule == ONE_FORWARD_ONE_BACKWARD:
        passes = running_passes(features, workload.slot, size, stage)
        runs = unit_runs(cost.kinds, [stages[stage] for stages in stages_at])
        held_units = counts_of_runs(len(cost.kinds), runs)
        needed, held = bytes_in_passes(cost, passes, *held_units, runs)
        kind, row = np.divmod(np.arange(len(needed)), len(features))  # forwards, then backwards
        others = micro_batches_in(cost, passes.others)
        return PassBytes(row=row, kind=kind, chunk=0 * row, needed=needed, held=held, others=others)
    _, chunks = _chunks_of(cost, stages_at, schedule, stage)
    found = []
    for each in schedule_passes(features, workload, schedule, size, stage):
        held, needed = _bytes_in(chunks, each)
        kind, chunk = (np.full(len(held), one) for one in (each.kind, each.chunk))
        others = micro_batches_in(cost, each.kept + each.late).sum(axis=1)
        found.append((each.row, kind, chunk, needed, held, others))
    row, kind, chunk, needed, held, others = map(np.concatenate, zip(*found, strict=True))
    return PassBytes(row=row, kind=kind, chunk=chunk, needed=needed, held=held, others=others)


def micro_batches_in(cost: CostModel, features: np.ndarray) -> np.ndarray:
    """Return the number of micro-batches in summed features [..., F], over all levels. [...]"""
    return features[..., :: len(cost.features) // cost.levels].sum(axis=-1)
