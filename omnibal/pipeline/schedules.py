"""Pipeline schedules as data: every stage's operations in execution order.

A schedule is a function of (stages, chunks, micro-batches), read by simulator, memory count, bounds
and trainer (`omnibal.pipeline.operation_graph` checks it). The model is cut into stages x chunks
*parts* (Narayanan et al. 2021, arXiv 2104.04473, section 2.2), assigned to stages by a placement. A
backward is one operation, or split into input and weight gradients (Qi et al. 2023, arXiv
2401.10241).
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from omnibal.base.frozen import Frozen, written_unless


class Pass(IntEnum):
    FORWARD = 0
    BACKWARD = 1  # gradients of input and weights
    BACKWARD_INPUT = 2  # input gradient, needed by the previous stage
    BACKWARD_WEIGHT = 3  # weight gradients, needed by no other stage

    @property
    def label(self) -> str:
        """`forward`, `backward`, `backward input` or `backward weight`."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class ChunkPass:
    """One pass of a micro-batch through a chunk."""

    kind: Pass
    micro_batch: int
    chunk: int = 0


StageOperations = tuple[ChunkPass, ...]  # operations of one stage in a step, in order


class Placement(StrEnum):
    """Assignment of the model's parts to stages. A stage's chunks are in model order."""

    LOOP = "loop"  # part k is on stage k % stages
    V = "v"  # every second chunk goes from the last stage to the first

    def part(self, stage: int, chunk: int, stages: int) -> int:
        """Return the part of the model in a stage's chunk."""
        turns = self is Placement.V and chunk % 2
        return chunk * stages + (stages - 1 - stage if turns else stage)

    def stage_of(self, part: int, stages: int) -> int:
        """Return the stage of a part."""
        chunk, place = divmod(part, stages)
        return stages - 1 - place if self is Placement.V and chunk % 2 else place


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepSchedule:
    """Operations of every stage in a step. Ranks with fewer packs share it if prefix-closed."""

    name: str
    chunks: int
    micro_batches: int
    operations: tuple[StageOperations, ...]
    is_prefix_closed: bool = True  # without the last micro-batches: the schedule of the others
    placement: Placement = Placement.LOOP

    @property
    def stages(self) -> int:
        return len(self.operations)

    @property
    def parts(self) -> int:
        """Number of parts of the model, stages * chunks."""
        return self.stages * self.chunks

    def part(self, stage: int, chunk: int) -> int:
        return self.placement.part(stage, chunk, self.stages)

    def stage_of(self, part: int) -> int:
        return self.placement.stage_of(part, self.stages)


ScheduleRule = Callable[[int, int, int], StepSchedule]  # of (stages, chunks, micro-batches)


def one_forward_one_backward(stages: int, chunks: int, micro_batches: int) -> StepSchedule:
    """Return 1F1B: min(p - 1 - s, m) warm-up forwards on stage s, then one forward and one backward
    in turn, then the remaining backwards (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

    Example:
        >>> first, last = one_forward_one_backward(2, 1, 2).operations
        >>> [f"{operation.kind.name[0]}{operation.micro_batch}" for operation in first]
        ['F0', 'F1', 'B0', 'B1']
        >>> [f"{operation.kind.name[0]}{operation.micro_batch}" for operation in last]
        ['F0', 'B0', 'F1', 'B1']
    """
    forwards = [ChunkPass(Pass.FORWARD, i) for i in range(micro_batches)]
    backwards = [ChunkPass(Pass.BACKWARD, i) for i in range(micro_batches)]
    operations = []
    for stage in range(stages):
        warm_up = min(stages - 1 - stage, micro_batches)
        steady = micro_batches - warm_up
        order = forwards[:warm_up]
        for pair in zip(forwards[warm_up:], backwards[:steady], strict=True):
            order += pair
        operations.append((*order, *backwards[steady:]))
    return StepSchedule(
        name="1F1B", chunks=1, micro_batches=micro_batches, operations=tuple(operations)
    )


def interleaved_1f1b(stages: int, chunks: int, micro_batches: int) -> StepSchedule:
    """Return interleaved 1F1B in Megatron-core's order (arXiv 2104.04473, section 2.2).

    Stage s of p runs 2 (p - 1 - s) + (chunks - 1) p warm-up forwards of a chunk, in groups of p
    micro-batches. A smaller last group, which Megatron-core rejects, is a full group without its
    missing micro-batches.
    """
    total = -(-micro_batches // stages) * stages * chunks

    def forward(index: int) -> ChunkPass:
        group, within = divmod(index, stages * chunks)
        return ChunkPass(Pass.FORWARD, group * stages + within % stages, within // stages)

    def backward(index: int) -> ChunkPass:
        mirrored = forward(index)  # backwards visit the chunks in reverse
        return ChunkPass(Pass.BACKWARD, mirrored.micro_batch, chunks - 1 - mirrored.chunk)

    operations = []
    for stage in range(stages):
        warm_up = min((stages - 1 - stage) * 2 + (chunks - 1) * stages, total)
        order = [forward(index) for index in range(warm_up)]
        for index in range(total - warm_up):
            order += [forward(warm_up + index), backward(index)]
        order += [backward(index) for index in range(total - warm_up, total)]
        operations.append(tuple(op for op in order if op.micro_batch < micro_batches))
    return StepSchedule(
        name="interleaved 1F1B",
        chunks=chunks,
        micro_batches=micro_batches,
        operations=tuple(operations),
    )


def zero_bubble_h1(stages: int, chunks: int, micro_batches: int) -> StepSchedule:
    """Return ZB-H1: 1F1B with deferred weight gradients (arXiv 2401.10241, section 2.2).

    Stage s defers s of them: no stage holds more micro-batches than the first does in 1F1B, and the
    last fill 1F1B's bubble at the end.

    Example:
        >>> _, last = zero_bubble_h1(2, 1, 2).operations
        >>> [f"{operation.kind.label} {operation.micro_batch}" for operation in last][:4]
        ['forward 0', 'backward input 0', 'forward 1', 'backward input 1']
        >>> [f"{operation.kind.label} {operation.micro_batch}" for operation in last][4:]
        ['backward weight 0', 'backward weight 1']
    """
    operations = []
    for stage, order_1f1b in enumerate(
        one_forward_one_backward(stages, chunks, micro_batches).operations
    ):
        order: list[ChunkPass] = []
        for operation in order_1f1b:
            if operation.kind is Pass.FORWARD:
                order.append(operation)
                continue
            order.append(ChunkPass(Pass.BACKWARD_INPUT, operation.micro_batch))
            if operation.micro_batch >= stage:
                order.append(ChunkPass(Pass.BACKWARD_WEIGHT, operation.micro_batch - stage))
        late = range(max(micro_batches - stage, 0), micro_batches)
        operations.append((*order, *(ChunkPass(Pass.BACKWARD_WEIGHT, i) for i in late)))
    return StepSchedule(
        name="ZB-H1", chunks=1, micro_batches=micro_batches, operations=tuple(operations)
    )


def zero_bubble_v(stages: int, chunks: int, micro_batches: int) -> StepSchedule:
    """Return ZB-V with two chunks per stage (arXiv 2401.10241, section 6; V-ZB of arXiv
    2405.15362).

    A stage holds at most 2 p chunks of micro-batches. There is no bubble if forward, input and
    weight gradients take equal time. In warm-up stage s of p runs 2 (p - s) - 1 forwards of chunk
    0, then s of both in turn, then p - s of chunk 1, each followed by its whole backward.
    """
    # With fewer the pipeline is never full; missing micro-batches are left out.
    full = max(micro_batches, 2 * stages - 1)
    operations = (_zero_bubble_v_stage(stages, stage, full) for stage in range(stages))
    return StepSchedule(
        name="ZB-V",
        chunks=2,
        micro_batches=micro_batches,
        operations=tuple(
            tuple(op for op in order if op.micro_batch < micro_batches) for order in operations
        ),
        is_prefix_closed=False,
        placement=Placement.V,
    )


def _zero_bubble_v_stage(stages: int, stage: int, micro_batches: int) -> Iterator[ChunkPass]:
    """Yield a stage's operations in ZB-V for at least 2 p - 1 micro-batches."""
    left = stages - stage
    numbers = {(kind, chunk): itertools.count() for kind in Pass for chunk in (0, 1)}

    def repeat(times: int, *passes: tuple[Pass, int]) -> Iterator[ChunkPass]:
        for _ in range(times):
            for kind, chunk in passes:
                yield ChunkPass(kind, next(numbers[kind, chunk]), chunk)

    f0, f1 = (Pass.FORWARD, 0), (Pass.FORWARD, 1)
    input0, input1 = (Pass.BACKWARD_INPUT, 0), (Pass.BACKWARD_INPUT, 1)
    weight0, weight1 = (Pass.BACKWARD_WEIGHT, 0), (Pass.BACKWARD_WEIGHT, 1)
    # Warm-up.
    yield from repeat(2 * left - 1, f0)
    yield from repeat(stage, f1, f0)
    yield from repeat(left, f1, input1, weight1)
    # Steady: as many chunks of micro-batches begin as end, so activations stay constant.
    begun = 2 * left - 1 + stage
    yield from repeat(micro_batches - begun, f0, input0, weight0, f1, input1, weight1)
    # Drain: deferred weight gradients fill the bubble at the end.
    yield from repeat(begun - stages, input0, weight0, f1, input1, weight1)
    yield from repeat(stage, input0, input1)
    yield from repeat(left, input0, weight0)
    yield from repeat(stage, weight1)
    yield from repeat(stage, weight0)


def forward_only(stages: int, chunks: int, micro_batches: int) -> StepSchedule:
    """Return the evaluation schedule: forwards only, in groups of p micro-batches per chunk, so
    that a stage stays busy while a micro-batch is between two of its chunks."""
    order = [
        ChunkPass(Pass.FORWARD, i, chunk)
        for first in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for i in range(first, min(first + stages, micro_batches))
    ]
    return StepSchedule(
        name="forward only",
        chunks=chunks,
        micro_batches=micro_batches,
        operations=(tuple(order),) * stages,
    )


FORWARD_ONLY: Mapping[Placement, ScheduleRule] = {
    Placement.LOOP: forward_only,
    Placement.V: lambda *sizes: replace(forward_only(*sizes), placement=Placement.V),
}
"""Evaluation schedule by placement."""


ScheduleName = Literal["1f1b", "interleaved", "zb-h1", "zb-v"]  # that plans support

MAX_CHUNKS: Final = 64  # per stage


@dataclass(frozen=True, kw_only=True, slots=True)
class _ScheduleType:
    rule: ScheduleRule
    placement: Placement = Placement.LOOP
    chunks: range = range(1, 2)  # allowed chunks per stage
    max_tried: int = 4  # max chunks that a search tries: more send more, for a smaller bubble
    passes: tuple[Pass, ...] = (Pass.FORWARD, Pass.BACKWARD)  # passes of a micro-batch, in order


_TWO_PARTS = Pass.FORWARD, Pass.BACKWARD_INPUT, Pass.BACKWARD_WEIGHT

_SCHEDULES: Mapping[ScheduleName, _ScheduleType] = {
    "1f1b": _ScheduleType(rule=one_forward_one_backward),
    "interleaved": _ScheduleType(rule=interleaved_1f1b, chunks=range(2, MAX_CHUNKS + 1)),
    "zb-h1": _ScheduleType(rule=zero_bubble_h1, passes=_TWO_PARTS),
    "zb-v": _ScheduleType(
        rule=zero_bubble_v, placement=Placement.V, chunks=range(2, 3), passes=_TWO_PARTS
    ),
}


class PipelineSchedule(Frozen):
    """The schedule of a plan."""

    name: ScheduleName = "1f1b"
    chunks: Annotated[int, Field(ge=1, le=MAX_CHUNKS)] = written_unless(1)  # chunks per stage

    @model_validator(mode="after")
    def _has_such_chunks(self) -> "PipelineSchedule":
        allowed = _SCHEDULES[self.name].chunks
        if self.chunks not in allowed:
            wanted = f"{allowed[0]}" if len(allowed) == 1 else f"{allowed[0]} to {allowed[-1]}"
            raise ValueError(
                f"schedule {self.name} of {self.chunks} chunks a stage; it has {wanted}"
            )
        return self

    @classmethod
    def candidates(cls, names: Collection[str]) -> list["PipelineSchedule"]:
        """Return the schedules that a search tries, by name and chunks up to `max_tried`."""
        return [
            cls(name=name, chunks=chunks)
            for name, of_name in _SCHEDULES.items()
            for chunks in of_name.chunks
            if name in names and chunks <= of_name.max_tried
        ]

    @property
    def rule(self) -> ScheduleRule:
        return _SCHEDULES[self.name].rule

    @property
    def placement(self) -> Placement:
        return _SCHEDULES[self.name].placement

    @property
    def passes(self) -> tuple[Pass, ...]:
        return _SCHEDULES[self.name].passes

    @property
    def in_two(self) -> bool:
        """Whether backwards are split into input and weight gradients."""
        return self.last_pass is Pass.BACKWARD_WEIGHT

    @property
    def last_pass(self) -> Pass:
        """Kind of a micro-batch's last pass on a stage: backward, or weight gradients if split."""
        return self.passes[-1]

    def parts_of(self, parts: int) -> list[list[int]]:
        """Return the part in every chunk of every stage, of `parts` in all. [stages][chunks]"""
        stages, place = parts // self.chunks, self.placement
        return [
            [place.part(stage, chunk, stages) for chunk in range(self.chunks)]
            for stage in range(stages)
        ]


ONE_FORWARD_ONE_BACKWARD: Final = PipelineSchedule()  # the default schedule
