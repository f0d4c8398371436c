"""Data-parallel encoders that run in rounds while pipelines would wait, simulated.

A round's features leave when all ranks of the group have encoded their shares, and the first
micro-batch of the round begins its forward when they have arrived. Its gradients leave when the
first part of the model has run the backward of all its micro-batches, and all rounds are encoded;
each rank runs its backward when they are there and its stage has come to it. Exchanges of a group
follow each other.
`omnibal.model.data_parallel_encoders.EncoderRound` says where each stage runs what.

The rest of the model's costs know encoders as a time before a pipeline and one after it. So what is
simulated here ends as these two: what the first forward is later for encoders, and what the step is
longer for them besides.

Shapes: S steps, B groups of a step, L pipelines of a group, G groups of all steps, W rounds, m
micro-batches, p stages, k parts of the model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from omnibal.base.errors import UserError
from omnibal.cost.model import CostModel
from omnibal.model.data_parallel_encoders import DataParallelEncoders, EncoderRound
from omnibal.model.units import ENCODER_WAITS_MS
from omnibal.pipeline.encoding import EncoderWaits, RoundWork
from omnibal.pipeline.operation_graph import OperationGraph, schedule_graph
from omnibal.pipeline.round_places import exchange_waits
from omnibal.pipeline.schedules import Pass, PipelineSchedule
from omnibal.pipeline.simulate import (
    SimulatedRows,
    StepTimes,
    Timeline,
    simulate_levels,
    simulate_ranks,
)
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.stage_cost import StageTimes, workload_times
from omnibal.pipeline.workload import Workload


class _Encodes(NamedTuple):
    """A round on a stage, forward or back."""

    number: int
    stage: int
    is_back: bool


class _Runs(NamedTuple):
    """An operation of the schedule, by its place in the graph."""

    operation: int
    stage: int
    begins: int | None
    """Round that the first part of the model takes features of."""
    ends: int | None
    """Round whose last backward it is on the first part."""


@lru_cache(maxsize=64)
def order_of(
    schedule: PipelineSchedule, stages: int, rounds: tuple[EncoderRound, ...]
) -> tuple[_Encodes | _Runs, ...]:
    """Operations of all stages with encoders among them, each after what it waits for.

    Raises:
        ValueError: stages wait for each other for ever.
    """
    micro_batches = sum(one.micro_batches for one in rounds)
    graph = schedule_graph(schedule, stages, micro_batches)
    sizes = tuple(one.micro_batches for one in rounds)
    lists = [
        _with_rounds(own, rounds, stage)
        for stage, own in enumerate(_operations(schedule, stages, sizes))
    ]
    done, order, places = _Done(graph, stages, len(rounds)), list[_Encodes | _Runs](), [0] * stages
    is_moving = True
    while is_moving:
        is_moving = False
        for stage, own in enumerate(lists):
            while places[stage] < len(own) and done.allows(one := own[places[stage]]):
                done.add(one)
                order.append(one)
                places[stage], is_moving = places[stage] + 1, True
    for place, own in zip(places, lists, strict=True):
        if place < len(own):
            raise ValueError(f"{_words(own[place], graph)}, and stages wait for ever")
    return tuple(order)


@lru_cache(maxsize=64)
def _operations(
    schedule: PipelineSchedule, stages: int, sizes: tuple[int, ...]
) -> list[list[_Runs]]:
    """Every stage's operations, without encoders.

    Args:
        sizes: micro-batches of every round.
    """
    graph = schedule_graph(schedule, stages, sum(sizes))
    number = np.repeat(np.arange(len(sizes)), sizes)
    is_last = np.diff(number, append=len(sizes)) > 0
    backs = Pass.BACKWARD, Pass.BACKWARD_INPUT
    lists = []
    for stage in range(stages):
        own = list[_Runs]()
        for operation in graph.of_stage(stage).tolist():
            kind, micro_batch = Pass(int(graph.kind[operation])), int(graph.micro_batch[operation])
            embeds = graph.part[operation] == 0
            begins = int(number[micro_batch]) if embeds and kind is Pass.FORWARD else None
            is_end = embeds and kind in backs and is_last[micro_batch]
            own.append(
                _Runs(operation, stage, begins, int(number[micro_batch]) if is_end else None)
            )
        lists.append(own)
    return lists


def _with_rounds(
    own: Sequence[_Runs], rounds: Sequence[EncoderRound], stage: int
) -> list[_Encodes | _Runs]:
    """A stage's operations with the rounds at their places."""
    found, begin = list[_Encodes | _Runs](), 0
    stands = [(one.forward_after[stage], False, number) for number, one in enumerate(rounds)]
    stands += [(one.backward_after[stage], True, number) for number, one in enumerate(rounds)]
    for place, is_back, number in sorted(stands):
        found += own[begin:place]
        found.append(_Encodes(number, stage, is_back))
        begin = max(begin, place)
    return found + list(own[begin:])


def check_rounds(beside: DataParallelEncoders, schedule: PipelineSchedule, stages: int) -> None:
    """Refuse rounds that are of other stages, or of which stages wait for each other for ever.

    Raises:
        UserError: one of them is so.
    """
    for each in beside.rounds:
        listed = schedule.rule(stages, schedule.chunks, each.micro_batches)
        exchange_waits(listed, each.rounds, trained=True)
        try:
            order_of(schedule, stages, each.rounds)
        except ValueError as error:
            raise UserError(
                f"rounds of steps of {each.micro_batches} micro-batches: {error}; encode rounds "
                "before the forwards that need them, or leave beside.rounds out"
            ) from error


class _Done:
    """What has run of a step."""

    def __init__(self, graph: OperationGraph, stages: int, rounds: int) -> None:
        self._source, self._stages = graph.source.tolist(), stages
        self._operations = [False] * len(graph) + [True]  # what waits for nothing
        self._encoded, self._returned = [0] * rounds, [False] * rounds

    def allows(self, one: _Encodes | _Runs) -> bool:
        """Whether what it waits for has run."""
        if isinstance(one, _Encodes):
            has_all = self._encoded[-1] == self._stages
            return not one.is_back or (has_all and self._returned[one.number])
        are_there = one.begins is None or self._encoded[one.begins] == self._stages
        return are_there and self._operations[self._source[one.operation]]

    def add(self, one: _Encodes | _Runs) -> None:
        """Say that it has run."""
        if isinstance(one, _Encodes):
            self._encoded[one.number] += not one.is_back
            return
        self._operations[one.operation] = True
        if one.ends is not None:
            self._returned[one.ends] = True


def _words(one: _Encodes | _Runs, graph: OperationGraph) -> str:
    """Where a stage waits, in words."""
    if isinstance(one, _Runs):
        kind = Pass(int(graph.kind[one.operation])).label
        micro_batch = graph.micro_batch[one.operation]
        return f"stage {one.stage} comes to the {kind} of micro-batch {micro_batch}"
    what = "the backward of round" if one.is_back else "round"
    return f"stage {one.stage} comes to {what} {one.number} of the encoders"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedTimeline:
    """Steps with encoders among their operations; all are [rows, ...], in ms."""

    start_ms: Mapping[Pass, np.ndarray]
    """Start of every operation of the schedule, [rows, m, k] by kind."""
    end_ms: Mapping[Pass, np.ndarray]
    """End of every operation of the schedule, [rows, m, k] by kind."""
    encoder_start_ms: np.ndarray
    """Start of every round on every stage, forward and back, [2, rows, W, p]."""
    encoder_end_ms: np.ndarray
    """End of every round on every stage, [2, rows, W, p]."""
    arrived_ms: np.ndarray
    """When features of every round are there, [rows, W]."""
    step_ms: np.ndarray
    """End of the last stage to finish, [rows]."""


def simulate_rounds(
    schedule: PipelineSchedule, rows: SimulatedRows, work: RoundWork
) -> EncodedTimeline:
    """Simulate the pipelines of groups with their encoders in rounds.

    Args:
        rows: of every pipeline, group by group.
        work: of the groups.
    """
    run = _Run(schedule, rows, work)
    for one in order_of(schedule, rows.stages, work.rounds):
        if isinstance(one, _Encodes):
            run.encode(one)
        else:
            run.operation(one)
    return EncodedTimeline(
        start_ms={kind: np.moveaxis(run.end[kind] - ms, -1, 0) for kind, ms in run.took.items()},
        end_ms={kind: np.moveaxis(ms, -1, 0) for kind, ms in run.end.items()},
        encoder_start_ms=np.moveaxis(run.encoder_end - run.encoder_took, -1, 1),
        encoder_end_ms=np.moveaxis(run.encoder_end, -1, 1),
        arrived_ms=run.arrived.T,
        step_ms=run.free.max(axis=0),
    )


class _Run:
    """Steps of the pipelines of groups as far as they are simulated; arrays have rows last."""

    def __init__(self, schedule: PipelineSchedule, rows: SimulatedRows, work: RoundWork) -> None:
        self._groups, self._pipelines, rounds, self._stages = work.forward_ms.shape
        self._work, count = work, self._groups * self._pipelines
        self._graph = schedule_graph(schedule, self._stages, rows.forward_link_ms.shape[1])
        columns = (self._graph.kind, self._graph.micro_batch, self._graph.part)
        places = zip(*(column.tolist() for column in columns), strict=True)
        self._places = [(Pass(kind), micro_batch, part) for kind, micro_batch, part in places]
        self._source = self._graph.source.tolist()
        took = np.stack([work.forward_ms, work.backward_ms])
        self.encoder_took = np.moveaxis(took.reshape(2, count, rounds, self._stages), 1, -1)
        self.encoder_end = np.zeros(self.encoder_took.shape)
        self.took = {kind: np.moveaxis(ms, 0, -1) for kind, ms in rows.pass_ms.items()}
        self.end = {kind: np.zeros(ms.shape) for kind, ms in self.took.items()}
        links = rows.forward_link_ms, rows.backward_link_ms
        self._links = [np.moveaxis(each, 0, -1) for each in links]
        self.free = np.zeros((self._stages, count))
        self.arrived, self._sent, self._given, self._returned = np.zeros((4, rounds, count))
        self._there = 0
        self._left = np.full(rounds, self._stages)

    def encode(self, one: _Encodes) -> None:
        """Run a round on a stage, forward or back."""
        number, stage = one.number, one.stage
        if one.is_back:
            self.free[stage] = np.maximum(self.free[stage], self._back(number))
        self.free[stage] = self.free[stage] + self.encoder_took[int(one.is_back), number, stage]
        self.encoder_end[int(one.is_back), number, stage] = self.free[stage]
        if one.is_back:
            return
        self._sent[number] = np.maximum(self._sent[number], self.free[stage])
        self._left[number] -= 1
        if not self._left[number]:
            of_group = self._work.exchange_ms[:, number]
            self.arrived[number] = self._exchanged(self.arrived, number, self._sent, of_group)

    def operation(self, one: _Runs) -> None:
        """Run an operation of the schedule."""
        stage, source = one.stage, self._source[one.operation]
        kind, micro_batch, part = self._places[one.operation]
        start = self.free[stage]
        if source < len(self._places):
            of_kind, _, other = self._places[source]
            link = self._links[int(kind is not Pass.FORWARD)][micro_batch, min(part, other)]
            start = np.maximum(start, self.end[of_kind][micro_batch, other] + link)
        if one.begins is not None:
            start = np.maximum(start, self.arrived[one.begins])
        self.free[stage] = start + self.took[kind][micro_batch, part]
        self.end[kind][micro_batch, part] = self.free[stage]
        if one.ends is not None:
            self._given[one.ends] = self.free[stage]

    def _back(self, number: int) -> np.ndarray:
        """When a round's gradients are there: all ranks begin their exchange after they have
        encoded all rounds. [rows]"""
        for each in range(self._there, number + 1):
            leaves = np.maximum(self._given, self._sent[-1])
            of_group = self._work.exchange_back_ms[:, each]
            self._returned[each] = self._exchanged(self._returned, each, leaves, of_group)
        self._there = max(self._there, number + 1)
        return self._returned[number]

    def _exchanged(
        self, there: np.ndarray, number: int, leaves: np.ndarray, of_group_ms: np.ndarray
    ) -> np.ndarray:
        """When an exchange has ended, that begins with the last of its group and after the one
        before it. [rows]"""
        most = leaves[number].reshape(self._groups, self._pipelines).max(axis=1)
        begins = np.repeat(most, self._pipelines)
        if number:
            begins = np.maximum(begins, there[number - 1])
        return begins + np.repeat(of_group_ms, self._pipelines)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderBlock:
    """A time in which the ranks of a stage run data-parallel encoders."""

    rank: int
    """Data-parallel rank."""
    stage: int
    is_back: bool
    number: int | None
    """Number of the round; None of everything before or after all micro-batches, exchanges and
    waits included."""
    start_ms: float
    end_ms: float

    @property
    def label(self) -> str:
        """Words for a drawing."""
        which = "" if self.number is None else f" of round {self.number}"
        return f"encoders {'backward' if self.is_back else 'forward'}{which}"


def simulate_with_encoders(
    times: StageTimes, workload: Workload, schedule: PipelineSchedule
) -> tuple[Timeline, list[EncoderBlock]]:
    """Simulate one step of all data-parallel ranks, without what they exchange of weights, and when
    their stages run encoders. [ranks, ...]

    Args:
        times: of every row of the workload, on every part of the model.
        workload: a single step, of which `encoding.rounds` says what goes by rounds.
    """
    timeline, blocks = simulate_ranks(times, workload, schedule), list[EncoderBlock]()
    rounds = () if workload.encoding is None else workload.encoding.rounds
    done = set[int]()
    for work in (each.chosen(workload.step) for each in rounds):
        if not len(work.step):
            continue
        found = simulate_rounds(schedule, rows_of_groups(times, workload, work, schedule), work)
        ranks = work.ranks
        _put(timeline, ranks, found, work.micro_batches)
        done |= set(ranks.tolist())
        for direction, row, number, stage in np.ndindex(found.encoder_end_ms.shape):
            at = direction, row, number, stage
            if found.encoder_end_ms[at] > found.encoder_start_ms[at]:
                blocks.append(
                    EncoderBlock(
                        rank=int(ranks[row]),
                        stage=stage,
                        is_back=bool(direction),
                        number=number,
                        start_ms=float(found.encoder_start_ms[at]),
                        end_ms=float(found.encoder_end_ms[at]),
                    )
                )
    others = [rank for rank in range(workload.data_parallel_size) if rank not in done]
    return timeline, blocks + list(_at_ends(timeline, times, workload, others))


def _put(timeline: Timeline, ranks: np.ndarray, found: EncodedTimeline, listed: int) -> None:
    """Put what is simulated of some ranks into the timeline of all."""
    for kind in timeline.start_ms:
        timeline.start_ms[kind][ranks, :listed] = found.start_ms[kind]
        timeline.end_ms[kind][ranks, :listed] = found.end_ms[kind]
    last_ms = np.maximum.reduce([ms.max(axis=(1, 2)) for ms in found.end_ms.values()])
    timeline.finish_ms[ranks] = last_ms[:, None]
    timeline.step_ms[ranks] = found.step_ms


def _at_ends(
    timeline: Timeline, times: StageTimes, workload: Workload, ranks: Sequence[int]
) -> Iterator[EncoderBlock]:
    """Encoders before the first forward and after the last backward, on all stages of ranks."""
    if times.waits_ms is None:
        return
    for rank in ranks:
        before_ms, after_ms = times.waits_ms[workload.dp_rank == rank].sum(axis=0).tolist()
        last_ms = float(timeline.finish_ms[rank].max())
        spans = (False, 0.0, before_ms), (True, last_ms, last_ms + after_ms)
        for is_back, start_ms, end_ms in spans:
            for stage in range(timeline.finish_ms.shape[1]):
                if end_ms > start_ms:
                    yield EncoderBlock(
                        rank=rank, stage=stage, is_back=is_back, number=None,
                        start_ms=start_ms, end_ms=end_ms,
                    )  # fmt: skip


def pipeline_rows(workload: Workload, work: RoundWork) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last row of a workload of every pipeline, group by group. [G * L] each"""
    # Rows are sorted by step, rank and slot: a pipeline's follow each other.
    ranks, pipelines = workload.data_parallel_size, work.forward_ms.shape[1]
    key = workload.step.astype(np.int64) * ranks + workload.dp_rank
    wanted = np.repeat(work.step.astype(np.int64), pipelines) * ranks + work.ranks
    return np.searchsorted(key, wanted), np.searchsorted(key, wanted, "right") - 1


def rows_of_groups(
    times: StageTimes, workload: Workload, work: RoundWork, schedule: PipelineSchedule
) -> SimulatedRows:
    """The pipelines of groups, group by group, without waits for encoders.

    Args:
        times: of every row of the workload, on every part of the model.
    """
    first, _ = pipeline_rows(workload, work)
    picked = (first[:, None] + np.arange(work.micro_batches)).ravel()
    alone = replace(times, waits_ms=None).rows(picked)
    pipeline = np.repeat(np.arange(len(first)), work.micro_batches)
    taken = replace(workload.rows(picked).each_rank_alone(), step=pipeline, encoding=None)
    return SimulatedRows.of(alone, taken, slice(None), pipeline, schedule)


def hide_encoders(
    workload: Workload,
    cost: CostModel,
    stages_at: Sequence[Sequence[Stage]],
    schedule: PipelineSchedule,
) -> Workload:
    """The workload with the waits that its rounds leave of those of encoders that run before and
    after all micro-batches; unchanged where no group goes by rounds.

    Args:
        workload: of which `encoding.rounds` says what its groups encode.
        stages_at: parts of the model, which the schedule places on stages, with what they recompute
            at each level.
    """
    encoding = workload.encoding
    if encoding is None or not encoding.rounds:
        return workload
    times = workload_times(cost, stages_at, workload)
    all_ms, hidden_ms = encoding.waits.all.copy(), np.zeros_like(encoding.waits.all)
    steps = np.unique(workload.step)
    for work in (one.chosen(steps) for one in encoding.rounds):
        if not len(work.step):
            continue
        rows = rows_of_groups(times, workload, work, schedule)
        before_ms, after_ms = exposed_ms(schedule, rows, work)
        first, last = pipeline_rows(workload, work)
        once_ms = encoding.once_ms
        for column, (at, left_ms) in enumerate(((first, before_ms), (last, after_ms))):
            hidden_ms[at, column] = all_ms[at, column] - once_ms[column] - left_ms
            all_ms[at, column] = once_ms[column] + left_ms
    less_ms = _longest_ms(workload, encoding.waits.all) - _longest_ms(workload, all_ms)
    predicted = encoding.predicted.model_copy(update={"hidden_ms": max(less_ms, 0.0)})
    values = workload.features.copy()
    for index, name in enumerate(ENCODER_WAITS_MS):
        columns = [column for column, feature in enumerate(cost.features) if feature == name]
        values[:, columns[0]] -= hidden_ms[:, index]
    return replace(
        workload,
        features=values,
        encoding=replace(
            encoding,
            waits=_without(encoding.waits, hidden_ms),
            rounds=(),
            predicted=predicted,
        ),
    )


def computing_ms(workload: Workload, hidden: Workload, stages: int) -> np.ndarray:
    """Time that stages encode in rounds while pipelines do not wait for it, and less what they wait
    for it, mean over ranks. [steps, stages]

    Args:
        workload: with what its groups encode.
        hidden: with the waits that are left (`hide_encoders`).
    """
    steps, step = np.unique(workload.step, return_inverse=True)
    found = np.zeros((len(steps), stages))
    if workload.encoding is None or hidden.encoding is None:
        return found
    ranks, once_ms = workload.data_parallel_size, sum(workload.encoding.once_ms)
    left_ms = hidden.encoding.waits.all.sum(axis=1)
    for work in (one.chosen(steps) for one in workload.encoding.rounds):
        at, pipelines = np.searchsorted(steps, work.step), work.forward_ms.shape[1]
        both_ms = (work.forward_ms + work.backward_ms).sum(axis=(1, 2))
        np.add.at(found, at, both_ms / ranks)
        goes = np.zeros((len(steps), ranks), bool)
        for pipeline in range(pipelines):
            goes[at, work.first_rank + pipeline] = True
        rows = goes[step, workload.dp_rank]
        waited_ms = np.bincount(step[rows], left_ms[rows], len(steps))
        waited_ms -= once_ms * goes.sum(axis=1)
        found -= waited_ms[:, None] / ranks
    return found


def _longest_ms(workload: Workload, waits_ms: np.ndarray) -> float:
    """Mean over steps of the longest waits of a rank, given those of every row, [rows, 2]."""
    _, step = np.unique(workload.step, return_inverse=True)
    shape = int(step.max()) + 1, workload.data_parallel_size
    of_rank = np.zeros(shape)
    np.add.at(of_rank, (step, workload.dp_rank), waits_ms.sum(axis=1))
    return float(of_rank.max(axis=1).mean())


def simulate_with_rounds(
    cost: CostModel,
    stages_at: Sequence[Sequence[Stage]],
    workload: Workload,
    schedule: PipelineSchedule,
) -> StepTimes:
    """Simulate every step of a workload, of which encoders may run in rounds
    (`omnibal.pipeline.simulate.simulate_levels`)."""
    hidden = hide_encoders(workload, cost, stages_at, schedule)
    steps = simulate_levels(cost, stages_at, hidden, schedule)
    encoding_ms = computing_ms(workload, hidden, steps.busy_ms.shape[1])
    return replace(steps, busy_ms=steps.busy_ms + encoding_ms)


def exposed_ms(
    schedule: PipelineSchedule, rows: SimulatedRows, work: RoundWork
) -> tuple[np.ndarray, np.ndarray]:
    """What the first forward of every pipeline is later for encoders in rounds, and what its step
    is longer besides. [rows] each"""
    alone_ms = rows.simulated().step_ms
    with_ms = simulate_rounds(schedule, rows, work)
    before_ms = with_ms.arrived_ms[:, 0]
    return before_ms, with_ms.step_ms - alone_ms - before_ms


def _without(waits: EncoderWaits, hidden_ms: np.ndarray) -> EncoderWaits:
    """Waits without what is hidden of them: of shorter ones no more than they are."""
    return EncoderWaits(
        all=waits.all - hidden_ms,
        unreduced=waits.unreduced - hidden_ms,
        work=waits.work,
        **{
            name: np.maximum(getattr(waits, name) - np.maximum(hidden_ms, 0), 0)
            for name in ("even", "silent", "needed")
        },
    )
