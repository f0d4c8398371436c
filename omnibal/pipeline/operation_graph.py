"""Dependency graph of a schedule's operations, as checked arrays.

An operation waits for its stage's previous operation, a forward also for the previous part's
activation, a backward for the next part's gradient (parts: `omnibal.pipeline.schedules`).
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from omnibal.pipeline.schedules import (
    ONE_FORWARD_ONE_BACKWARD,
    Pass,
    PipelineSchedule,
    ScheduleRule,
    StepSchedule,
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OperationGraph:
    """A schedule's operations, stage by stage in execution order."""

    schedule: StepSchedule
    kind: np.ndarray  # kind of every operation (`Pass`). All arrays are [operations].
    stage: np.ndarray
    part: np.ndarray  # part of the model
    micro_batch: np.ndarray
    before: np.ndarray  # the stage's previous operation, or the number of operations if none
    source: np.ndarray  # producer of the operation's input, or the number of operations if none
    in_turn: np.ndarray  # a topological order with long runs of one stage, for cache locality

    @classmethod
    def build(cls, schedule: StepSchedule) -> "OperationGraph":
        """Return the checked graph; raise ValueError if the schedule is invalid or deadlocks."""
        columns = [
            (op.kind, stage, schedule.part(stage, op.chunk), op.micro_batch)
            for stage, operations in enumerate(schedule.operations)
            for op in operations
        ]
        kind, stages, part, micro_batch = np.array(columns, np.int64).reshape(-1, 4).T
        before = np.arange(len(columns)) - 1
        before[np.diff(stages, prepend=-1) > 0] = len(columns)
        place = _check_and_index(schedule, kind, part, micro_batch)
        source = np.full(len(kind), len(kind), np.int64)
        forward = (kind == Pass.FORWARD) & (part > 0)
        source[forward] = place[Pass.FORWARD, micro_batch[forward], part[forward] - 1]
        backward = (kind == Pass.BACKWARD) | (kind == Pass.BACKWARD_INPUT)
        backward &= part < schedule.parts - 1
        gradient = np.maximum(place[Pass.BACKWARD], place[Pass.BACKWARD_INPUT])
        source[backward] = gradient[micro_batch[backward], part[backward] + 1]
        return cls(
            schedule=schedule,
            kind=kind,
            stage=stages,
            part=part,
            micro_batch=micro_batch,
            before=before,
            source=source,
            in_turn=_sort_topologically(schedule, source),
        )

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def kinds(self) -> tuple[Pass, ...]:
        return tuple(Pass(kind) for kind in np.unique(self.kind).tolist())

    def of_stage(self, stage: int) -> np.ndarray:
        """Return the indices of a stage's operations in execution order."""
        return np.flatnonzero(self.stage == stage)


@lru_cache(maxsize=64)  # by micro-batches of a rank in a step
def operation_graph(
    rule: ScheduleRule, stages: int, chunks: int, micro_batches: int
) -> OperationGraph:
    """Return a schedule's operations; raise ValueError if it is invalid or deadlocks."""
    return OperationGraph.build(rule(stages, chunks, micro_batches))


def schedule_graph(schedule: PipelineSchedule, stages: int, micro_batches: int) -> OperationGraph:
    """Return a schedule's operations with `micro_batches` of a rank in a step."""
    return operation_graph(schedule.rule, stages, schedule.chunks, micro_batches)


def listed_micro_batches(
    graph: OperationGraph, counts: np.ndarray, step: np.ndarray, *, together: bool
) -> np.ndarray:
    """Return the micro-batches in each rank's operation list, at least 1. [ranks]

    If the schedule is prefix-closed, all ranks use the longest list and skip what they lack. Else
    ranks that run together use the list of their step's longest rank, and others their own.

    Args:
        graph: of the max micro-batches of any rank.
        counts: every rank's micro-batches in every step, [ranks]; `step` likewise.
        together: whether ranks share micro-batches or run in lockstep.
    """
    if graph.schedule.is_prefix_closed:
        return np.full(len(counts), graph.schedule.micro_batches)
    listed = np.maximum(counts, 1)
    if together:
        _, index = np.unique(step, return_inverse=True)
        longest = np.zeros(index.max() + 1, np.int64)
        np.maximum.at(longest, index, listed)
        listed = longest[index]
    return listed


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldInPasses:
    """Micro-batches that a stage holds during each of its operations."""

    kind: np.ndarray  # `Pass` of each operation, [passes]
    chunk: np.ndarray
    micro_batch: np.ndarray
    # First micro-batch and end (exclusive) by chunk, the running micro-batch included.
    # [passes, chunks, 2]
    held: np.ndarray  # with activations kept for backward
    late: np.ndarray  # awaiting only weight gradients


def held_in_passes(graph: OperationGraph, stage: int) -> HeldInPasses:
    """Return a stage's held micro-batches per operation, until the end of their backward."""
    schedule, operations = graph.schedule, graph.of_stage(stage)
    kind, micro_batch = graph.kind[operations], graph.micro_batch[operations]
    chunk = graph.part[operations] // schedule.stages
    begins, indices = kind == Pass.FORWARD, np.arange(len(operations))
    freed = (kind == Pass.BACKWARD) | (kind == Pass.BACKWARD_INPUT)
    ends = (kind == Pass.BACKWARD) | (kind == Pass.BACKWARD_WEIGHT)
    held, late = np.empty((2, len(operations), schedule.chunks, 2), np.int64)
    for number in range(schedule.chunks):
        begun, let_go, ended = (
            np.flatnonzero(of_kind & (chunk == number)) for of_kind in (begins, freed, ends)
        )
        for own_passes in (begun, let_go, ended):
            if not np.array_equal(micro_batch[own_passes], np.arange(schedule.micro_batches)):
                raise ValueError(f"{schedule.name}: stage {stage} runs passes out of order")
        # Micro-batches run in order, so counts of passes are indices of micro-batches.
        held[:, number, 0] = late[:, number, 1] = np.searchsorted(let_go, indices)
        held[:, number, 1] = np.searchsorted(begun, indices, side="right")
        late[:, number, 0] = np.searchsorted(ended, indices)
    return HeldInPasses(kind=kind, chunk=chunk, micro_batch=micro_batch, held=held, late=late)


@lru_cache(maxsize=8)
def others_in_flight(pipeline_size: int, micro_batches: int) -> np.ndarray:
    """Return the number of other micro-batches that each stage holds in each forward and backward
    of 1F1B. [p, 2, m]"""
    graph = schedule_graph(ONE_FORWARD_ONE_BACKWARD, pipeline_size, micro_batches)
    others = np.empty((pipeline_size, 2, micro_batches), np.int64)
    for stage, of_stage in enumerate(others):
        passes = held_in_passes(graph, stage)
        first, stop = passes.held[:, 0].T
        for kind in (Pass.FORWARD, Pass.BACKWARD):
            of_stage[kind] = (stop - first - 1)[passes.kind == kind]
    return others


def _check_and_index(
    schedule: StepSchedule, kind: np.ndarray, part: np.ndarray, micro_batch: np.ndarray
) -> np.ndarray:
    """Return each operation's index, or -1 if absent, if every micro-batch runs each part forward
    once, then backward once, or never if the schedule has no backwards. [kinds, m, parts]"""
    index = np.full((len(Pass), schedule.micro_batches, schedule.parts), -1, np.int64)
    index[kind, micro_batch, part] = np.arange(len(kind))
    forward, whole, of_input, of_weight = index
    is_valid = forward >= 0
    if (index[1:] >= 0).any():
        # Every backward is whole or in two parts.
        is_valid &= ((whole < 0) != (of_input < 0)) & ((of_input < 0) == (of_weight < 0))
        begun, ended = np.maximum(whole, of_input), np.maximum(whole, of_weight)
        is_valid &= (forward < begun) & (begun <= ended)
    if not is_valid.all() or np.count_nonzero(index >= 0) < len(kind):
        number, place = np.unravel_index(int(is_valid.argmin()), is_valid.shape)
        raise ValueError(
            f"{schedule.name}: {len(kind)} operations do not run every micro-batch of every part "
            "once forward, then once backward, whole or in both parts; check micro-batch "
            f"{number} of part {place}"
        )
    return index


def _sort_topologically(schedule: StepSchedule, source: np.ndarray) -> np.ndarray:
    """Return a topological order with long runs of stages. [operations]"""
    count, sources = len(source), source.tolist()
    is_done = [False] * count + [True]  # sentinel for operations without dependencies
    stop = np.cumsum([len(operations) for operations in schedule.operations], dtype=int).tolist()
    first = [0, *stop[:-1]]
    at, order = first.copy(), list[int]()
    before_round = -1
    while before_round < len(order) < count:
        before_round = len(order)
        for stage, index in enumerate(at):
            while index < stop[stage] and is_done[sources[index]]:
                is_done[index] = True
                index += 1
            order += range(at[stage], index)
            at[stage] = index
    if len(order) < count:
        ends = zip(at, first, schedule.operations, strict=True)
        blocked = [(s, ops[i - begin]) for s, (i, begin, ops) in enumerate(ends)]
        raise ValueError(f"{schedule.name}: deadlock of stages and their operations: {blocked}")
    return np.array(order, np.int64)
