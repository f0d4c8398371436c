"""Dependency graph of a schedule's operations, as checked arrays.

An operation waits for the stage's previous one. A forward also waits for the activation of the
part before (`omnibal.pipeline.schedules` says what a part is), a backward for the gradient of the
part after.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from omnibal.pipeline.schedules import (
    Pass,
    PipelineSchedule,
    Schedule,
    ScheduleRule,
    one_forward_one_backward,
)

_KINDS = len(Pass)
_KEPT_GRAPHS = 64
"""Number of operation graphs cached, as one job uses the same schedules repeatedly: one for every
number of micro-batches that a rank may have in a step."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OperationGraph:
    """The operations of a schedule, sorted by depth in their dependencies and then by stage.

    All operations of one depth can run at the same time; each stage has at most one of them.
    """

    schedule: Schedule
    kind: np.ndarray
    """Kind of every operation (`Pass`); all arrays but `levels` are [operations]."""
    stage: np.ndarray
    part: np.ndarray
    """Part of the model that the operation is computed with."""
    micro_batch: np.ndarray
    before: np.ndarray
    """The stage's previous operation; the number of operations where there is none."""
    source: np.ndarray
    """The operation whose output this one waits for; the number of operations if none."""
    levels: np.ndarray
    """First operation of every depth, then the number of operations, [depths + 1]."""
    in_turn: np.ndarray
    """All operations, each after what it needs, and as many of one stage in a row as there can be:
    an order in which what was just computed is soon needed again."""
    in_order: bool
    """Whether a stage has one chunk, and runs its forwards and its whole backwards each in
    micro-batch order."""

    @classmethod
    def of(cls, schedule: Schedule) -> "OperationGraph":
        """Check a schedule and find what its operations wait for."""
        table = _Table.of(schedule)
        place = _checked_places(schedule, table)
        source = _sources(schedule, table, place)
        depth, in_turn = _depths(schedule, table, source)
        order = np.lexsort((table.stage, depth))
        count = len(order)
        rank = np.empty(count + 1, np.int64)
        rank[order] = np.arange(count)
        rank[count] = count  # of what waits for nothing
        return cls(
            schedule=schedule,
            kind=table.kind[order],
            stage=table.stage[order],
            part=table.part[order],
            micro_batch=table.micro_batch[order],
            before=rank[table.before[order]],
            source=rank[source[order]],
            levels=np.searchsorted(depth[order], np.arange(depth.max(initial=-1) + 2)),
            in_turn=rank[in_turn],
            in_order=_in_order(schedule, table),
        )

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def depths(self) -> int:
        """Operations of the longest chain in which each waits for the one before."""
        return len(self.levels) - 1

    @property
    def kinds(self) -> tuple[Pass, ...]:
        """The kinds of operations that occur."""
        return tuple(Pass(kind) for kind in np.unique(self.kind).tolist())

    def last_of_stages(self) -> np.ndarray:
        """Every stage's last operation. [stages]"""
        last = np.empty(self.schedule.stages, np.int64)
        last[self.stage] = np.arange(len(self))  # of equal indices the last one is kept
        return last

    def of_stage(self, stage: int) -> np.ndarray:
        """A stage's operations, in the order in which it runs them."""
        return np.flatnonzero(self.stage == stage)


@lru_cache(maxsize=_KEPT_GRAPHS)
def operation_graph(
    rule: ScheduleRule, stages: int, chunks: int, micro_batches: int
) -> OperationGraph:
    """The checked operations of a schedule; the one way in for all that reads a schedule."""
    return OperationGraph.of(rule(stages, chunks, micro_batches))


def schedule_graph(schedule: PipelineSchedule, stages: int, micro_batches: int) -> OperationGraph:
    """The operations of a plan's schedule."""
    return operation_graph(schedule.rule, stages, schedule.chunks, micro_batches)


def planned_graph(stages: int, micro_batches: int) -> OperationGraph:
    """The operations of 1F1B, which plans have that name no other schedule."""
    return operation_graph(one_forward_one_backward, stages, 1, micro_batches)


def listed_micro_batches(
    graph: OperationGraph, counts: np.ndarray, step: np.ndarray, *, together: bool
) -> np.ndarray:
    """Micro-batches of the list that each rank goes by in each step, at least 1. [ranks]

    Ranks that run together go by one list, that of the rank of their step that has most, and leave
    out what they do not have; others by that of their own micro-batches, which where a schedule is
    prefix-closed is the list of any more.

    Args:
        graph: of the most micro-batches that any has.
        counts: every rank's micro-batches in every step, [ranks]; `step` likewise.
        together: whether ranks share micro-batches or run in lockstep.
    """
    if graph.schedule.is_prefix_closed:
        return np.full(len(counts), graph.schedule.micro_batches)
    listed = np.maximum(counts, 1)
    if together:
        _, index = np.unique(step, return_inverse=True)
        most = np.zeros(index.max() + 1, np.int64)
        np.maximum.at(most, index, listed)
        listed = most[index]
    return listed


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldInPasses:
    """Micro-batches that a stage holds during each of its operations."""

    kind: np.ndarray
    """Kind of each (`Pass`), [passes]."""
    chunk: np.ndarray
    """Chunk that runs, [passes]."""
    micro_batch: np.ndarray
    """Micro-batch that runs, [passes]."""
    held: np.ndarray
    """The first micro-batch of each chunk of which its backward's needs are kept, the running one
    included, and the first after it of which they are not, [passes, chunks, 2]."""
    late: np.ndarray
    """First micro-batch, and first after it, of which only a backward's first part has run."""

    @property
    def is_forward(self) -> np.ndarray:
        """Whether each is a forward, bool [passes]."""
        return np.asarray(self.kind == Pass.FORWARD)


def held_in_passes(graph: OperationGraph, stage: int) -> HeldInPasses:
    """What a stage holds operation by operation, in the order in which it runs them.

    A micro-batch is held from its forward to the end of its backward, of both parts if it has two.
    """
    schedule, own = graph.schedule, graph.of_stage(stage)
    kind, micro_batch = graph.kind[own], graph.micro_batch[own]
    chunk = graph.part[own] // schedule.stages
    begins, every = kind == Pass.FORWARD, np.arange(len(own))
    freed = (kind == Pass.BACKWARD) | (kind == Pass.BACKWARD_INPUT)
    ends = (kind == Pass.BACKWARD) | (kind == Pass.BACKWARD_WEIGHT)
    held, late = np.empty((2, len(own), schedule.chunks, 2), np.int64)
    for number in range(schedule.chunks):
        begun, let_go, ended = (
            np.flatnonzero(each & (chunk == number)) for each in (begins, freed, ends)
        )
        for own_passes in (begun, let_go, ended):
            if not np.array_equal(micro_batch[own_passes], np.arange(schedule.micro_batches)):
                raise ValueError(
                    f"{schedule.name}: stage {stage} runs passes of chunk {number} out of order, "
                    "or has no backward; memory is counted for schedules that hold consecutive "
                    "micro-batches"
                )
        held[:, number, 0] = late[:, number, 1] = np.searchsorted(let_go, every)
        held[:, number, 1] = np.searchsorted(begun, every, side="right")
        late[:, number, 0] = np.searchsorted(ended, every)
    return HeldInPasses(kind=kind, chunk=chunk, micro_batch=micro_batch, held=held, late=late)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageOrder:
    """Positions of every micro-batch's forward and backward in a stage's list of operations."""

    forward: np.ndarray
    """Position of every forward in the stage's list, [m], ascending."""
    backward: np.ndarray
    """Position of every backward in the stage's list, [m], ascending."""

    @classmethod
    def of_stages(cls, graph: OperationGraph) -> list["StageOrder"]:
        """Orders of all stages of a schedule that has one chunk and runs its passes in order."""
        require_in_order(graph)
        kinds = [graph.kind[graph.of_stage(stage)] for stage in range(graph.schedule.stages)]
        return [
            cls(
                forward=np.flatnonzero(kind == Pass.FORWARD),
                backward=np.flatnonzero(kind == Pass.BACKWARD),
            )
            for kind in kinds
        ]

    def forwards_before_first_backward(self, count: np.ndarray) -> np.ndarray:
        """Number of them in a step of only the first `count` [...] micro-batches. [...]"""
        return np.minimum(np.searchsorted(self.forward, self.backward[0]), count)

    def backwards_after_last_forward(self, count: np.ndarray) -> np.ndarray:
        """Number of them in a step of only the first `count` [...] micro-batches. [...]"""
        last = self.forward[np.maximum(count - 1, 0)]
        return np.maximum(count - np.searchsorted(self.backward, last), 0)


def require_in_order(graph: OperationGraph) -> None:
    """Refuse several chunks, backwards in two parts, and passes out of micro-batch order."""
    if not graph.in_order:
        raise ValueError(
            f"{graph.schedule.name}: the search and the trainer need a schedule of one chunk a "
            "stage, whose forwards and whole backwards each run in micro-batch order; it has "
            f"{graph.schedule.chunks} chunk(s) of {', '.join(kind.label for kind in graph.kinds)}"
        )


def require_prefix_closed(schedule: Schedule) -> None:
    """Refuse a schedule whose list says nothing of fewer micro-batches."""
    if not schedule.is_prefix_closed:
        raise ValueError(
            f"{schedule.name}: steps of different numbers of micro-batches were given, and its "
            "list does not hold for fewer; simulate each number by a list of its own"
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Table:
    """Operations as they are listed, stage by stage. [operations] each"""

    kind: np.ndarray
    stage: np.ndarray
    chunk: np.ndarray
    part: np.ndarray
    micro_batch: np.ndarray
    before: np.ndarray
    """The stage's previous one; the number of operations where there is none."""
    first: np.ndarray
    """First operation of every stage, then the number of operations, [stages + 1]."""

    @classmethod
    def of(cls, schedule: Schedule) -> "_Table":
        lengths = [len(operations) for operations in schedule.operations]
        first = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        every = [operation for operations in schedule.operations for operation in operations]
        stage = np.repeat(np.arange(schedule.stages), lengths)
        chunk = np.array([operation.chunk for operation in every], np.int64)
        before = np.arange(len(every)) - 1
        before[first[:-1][np.array(lengths) > 0]] = len(every)
        return cls(
            kind=np.array([operation.kind for operation in every], np.int64),
            stage=stage,
            chunk=chunk,
            part=np.array(
                [
                    schedule.part(stage, operation.chunk)
                    for stage, operations in enumerate(schedule.operations)
                    for operation in operations
                ],
                np.int64,
            ),
            micro_batch=np.array([operation.micro_batch for operation in every], np.int64),
            before=before,
            first=first,
        )

    def named(self, index: int) -> str:
        """An operation in words."""
        kind = Pass(int(self.kind[index])).label
        return f"{kind} of micro-batch {self.micro_batch[index]}, chunk {self.chunk[index]}"


def _checked_places(schedule: Schedule, table: _Table) -> np.ndarray:
    """Index of each operation in the table; -1 where it has none. [kinds, m, parts]"""
    shape = _KINDS, schedule.micro_batches, schedule.parts
    known = (0 <= table.micro_batch) & (table.micro_batch < schedule.micro_batches)
    known &= (0 <= table.chunk) & (table.chunk < schedule.chunks)
    if not known.all():
        index = int(known.argmin())
        raise ValueError(
            f"{schedule.name}: stage {table.stage[index]} runs {table.named(index)}, of "
            f"{schedule.micro_batches} micro-batches and {schedule.chunks} chunks"
        )
    times = np.zeros(shape, np.int64)
    np.add.at(times, (table.kind, table.micro_batch, table.part), 1)
    forward, whole, of_input, of_weight = times
    # Every backward is whole or in two parts, or there is none anywhere.
    complete = (forward == 1) & (whole + of_input == 1) & (of_input == of_weight)
    has_backwards = bool(times[1:].any())
    if not (complete if has_backwards else forward == 1).all():
        wrong = ~complete if has_backwards else forward != 1
        micro_batch, part = np.unravel_index(int(wrong.argmax()), shape[1:])
        raise ValueError(
            f"{schedule.name}: stage {schedule.stage_of(int(part))} runs micro-batch {micro_batch} "
            f"of chunk {part // schedule.stages} forward {forward[micro_batch, part]} times and "
            f"backward {whole[micro_batch, part]} times whole, {of_input[micro_batch, part]} times "
            f"for the input and {of_weight[micro_batch, part]} times for the weights; each is to "
            "run forward once and backward once, whole or in both parts"
        )
    place = np.full(shape, -1, np.int64)
    place[table.kind, table.micro_batch, table.part] = np.arange(len(table.kind))
    begun = np.maximum(place[Pass.BACKWARD], place[Pass.BACKWARD_INPUT])
    ended = np.maximum(place[Pass.BACKWARD], place[Pass.BACKWARD_WEIGHT])
    for early, late in ((place[Pass.FORWARD], begun), (begun, ended)):
        wrong = late < early
        if has_backwards and wrong.any():
            first, second = int(late[wrong][0]), int(early[wrong][0])
            raise ValueError(
                f"{schedule.name}: stage {table.stage[first]} runs {table.named(first)} before "
                f"{table.named(second)}"
            )
    return place


def _in_order(schedule: Schedule, table: _Table) -> bool:
    whole = np.isin(table.kind, (Pass.FORWARD, Pass.BACKWARD)).all()
    if schedule.chunks != 1 or not whole:
        return False
    order = np.tile(np.arange(schedule.micro_batches), schedule.stages)
    # The table is sorted by stage.
    by_kind = (table.micro_batch[table.kind == kind] for kind in np.unique(table.kind))
    return all(np.array_equal(micro_batches, order) for micro_batches in by_kind)


def _sources(schedule: Schedule, table: _Table, place: np.ndarray) -> np.ndarray:
    """The operation whose output each one waits for, or their number. [operations]"""
    count, parts = len(table.kind), schedule.parts
    source = np.full(count, count, np.int64)
    forward = (table.kind == Pass.FORWARD) & (table.part > 0)
    source[forward] = place[Pass.FORWARD, table.micro_batch[forward], table.part[forward] - 1]
    backward = (table.kind == Pass.BACKWARD) | (table.kind == Pass.BACKWARD_INPUT)
    backward &= table.part < parts - 1
    gradient = np.maximum(place[Pass.BACKWARD], place[Pass.BACKWARD_INPUT])
    source[backward] = gradient[table.micro_batch[backward], table.part[backward] + 1]
    return source


def _depths(schedule: Schedule, table: _Table, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The length of the longest chain of operations that each one waits for, and all operations as
    stages that run on as long as they can get to them. [operations] each
    """
    count, sources = len(source), source.tolist()
    depth = [-1] * (count + 1)  # the last stands for nothing, which nobody waits for
    first: Sequence[int] = table.first.tolist()
    at, stop = list(first[:-1]), first[1:]
    order: list[int] = []
    before_round = -1
    while before_round < len(order) < count:
        before_round = len(order)
        for stage, index in enumerate(at):
            ended = depth[index - 1] if index > first[stage] else -1
            while index < stop[stage]:
                needed = sources[index]
                arrived = depth[needed]
                if arrived < 0 and needed < count:
                    break
                ended = max(ended, arrived) + 1
                depth[index] = ended
                index += 1
            order += range(at[stage], index)
            at[stage] = index
    if len(order) < count:
        # All of them, as those beside a stage that has ended have what they need.
        waiting = "; ".join(
            f"stage {table.stage[i]} at {table.named(i)} for stage {table.stage[sources[i]]}"
            for i in at
        )
        raise ValueError(f"{schedule.name}: stages wait for each other for ever: {waiting}")
    return np.array(depth[:count], np.int64), np.array(order, np.int64)
