"""Pipeline schedules as data: the operations of every stage, in the order in which it runs them.

A schedule is a function of (stages, chunks, micro-batches). Simulator, memory count, bounds and
trainer read the lists that it returns (`omnibal.pipeline.operation_graph` checks them), so another
schedule is one more function here.

A stage holds one or several *chunks* of the model (Narayanan et al. 2021, arXiv 2104.04473, section
2.2): the model is cut into stages x chunks *parts* in model order, and a schedule's placement says
which stage holds each of them. A backward pass is one operation, or two: of its input, which the
stage before waits for, and later of its weights (Qi et al. 2023, arXiv 2401.10241).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from omnibal.base.frozen import Frozen


class Pass(IntEnum):
    """Kind of operation on one micro-batch and chunk."""

    FORWARD = 0
    BACKWARD = 1
    """Gradients of the input and of the weights."""
    BACKWARD_INPUT = 2
    """The first part of a backward: the gradient that the stage before waits for."""
    BACKWARD_WEIGHT = 3
    """The second part: gradients of the weights, which no stage waits for."""

    @property
    def label(self) -> str:
        """Name in words: `forward`, `backward`, `backward input`, `backward weight`."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class Operation:
    """One pass of one micro-batch through one chunk of a stage."""

    kind: Pass
    micro_batch: int
    chunk: int = 0


StageOperations = tuple[Operation, ...]
"""Operations of one stage in a step, in order."""


class Placement(StrEnum):
    """Rule by which stages hold the parts of the model; chunk i of a stage is among its parts the
    i-th in model order."""

    LOOP = "loop"
    """Part k is on stage k % stages: from the last stage the model goes on at the first."""
    V = "v"
    """Chunks go through the stages back and forth: the second from the last stage to the first."""

    def part(self, stage: int, chunk: int, stages: int) -> int:
        """The part of the model that is a stage's chunk."""
        turns = self is Placement.V and chunk % 2
        return chunk * stages + (stages - 1 - stage if turns else stage)

    def stage_of(self, part: int, stages: int) -> int:
        """The stage that holds a part of the model."""
        chunk, place = divmod(part, stages)
        return stages - 1 - place if self is Placement.V and chunk % 2 else place


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Schedule:
    """The operations of one step on every stage of a pipeline."""

    name: str
    chunks: int
    """Chunks per stage."""
    micro_batches: int
    operations: tuple[StageOperations, ...]
    """Operations of every stage."""
    is_prefix_closed: bool
    """Whether leaving out the last micro-batches gives the schedule of the remaining ones. Ranks
    with different numbers of micro-batches can then be simulated side by side by one list."""
    placement: Placement = Placement.LOOP

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.operations)

    @property
    def parts(self) -> int:
        """Runs of units that the model is cut into: one for every chunk of every stage."""
        return self.stages * self.chunks

    def part(self, stage: int, chunk: int) -> int:
        """The part of the model that is a stage's chunk."""
        return self.placement.part(stage, chunk, self.stages)

    def stage_of(self, part: int) -> int:
        """The stage that holds a part of the model."""
        return self.placement.stage_of(part, self.stages)


ScheduleRule = Callable[[int, int, int], Schedule]
"""A schedule for any (stages, chunks, micro-batches)."""


def one_forward_one_backward(stages: int, chunks: int, micro_batches: int) -> Schedule:
    """1F1B, the schedule that keeps at most as many micro-batches as stages are left.

    Stage s of p runs min(p - 1 - s, m) warm-up forwards, then one forward and one backward in turn,
    then the remaining backwards (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

    Example:
        >>> first, last = one_forward_one_backward(2, 1, 2).operations
        >>> [f"{operation.kind.name[0]}{operation.micro_batch}" for operation in first]
        ['F0', 'F1', 'B0', 'B1']
        >>> [f"{operation.kind.name[0]}{operation.micro_batch}" for operation in last]
        ['F0', 'B0', 'F1', 'B1']
    """
    if chunks != 1:
        raise ValueError(f"1F1B has 1 chunk a stage, not {chunks}; interleaved 1F1B has several")
    forwards = [Operation(Pass.FORWARD, i) for i in range(micro_batches)]
    backwards = [Operation(Pass.BACKWARD, i) for i in range(micro_batches)]
    operations = []
    for stage in range(stages):
        warm_up = min(stages - 1 - stage, micro_batches)
        steady = micro_batches - warm_up
        order = forwards[:warm_up]
        for pair in zip(forwards[warm_up:], backwards[:steady], strict=True):
            order += pair
        operations.append((*order, *backwards[steady:]))
    return Schedule(
        name="1F1B",
        chunks=1,
        micro_batches=micro_batches,
        operations=tuple(operations),
        is_prefix_closed=True,
    )


def interleaved(stages: int, chunks: int, micro_batches: int) -> Schedule:
    """Interleaved 1F1B in Megatron-core's order (arXiv 2104.04473, section 2.2).

    Micro-batches go through the chunks in groups of as many as there are stages, of which they must
    be a multiple. Stage s of p runs 2 (p - 1 - s) + (chunks - 1) p warm-up forwards of a chunk.

    Raises:
        ValueError: the micro-batches are no multiple of the stages.
    """
    if micro_batches % stages:
        raise ValueError(f"interleaved 1F1B of {micro_batches} micro-batches on {stages} stages")
    total = micro_batches * chunks

    def forward(index: int) -> Operation:
        group, within = divmod(index, stages * chunks)
        return Operation(Pass.FORWARD, group * stages + within % stages, within // stages)

    def backward(index: int) -> Operation:
        same = forward(index)
        return Operation(Pass.BACKWARD, same.micro_batch, chunks - 1 - same.chunk)

    operations = []
    for stage in range(stages):
        warm_up = min((stages - 1 - stage) * 2 + (chunks - 1) * stages, total)
        order = [forward(index) for index in range(warm_up)]
        for index in range(total - warm_up):
            order += [forward(warm_up + index), backward(index)]
        order += [backward(index) for index in range(total - warm_up, total)]
        operations.append(tuple(order))
    return Schedule(
        name="interleaved 1F1B",
        chunks=chunks,
        micro_batches=micro_batches,
        operations=tuple(operations),
        is_prefix_closed=False,
    )


def forward_only(stages: int, chunks: int, micro_batches: int) -> Schedule:
    """Evaluation: the forward passes of every micro-batch, and no backward.

    Micro-batches go through the chunks in groups of as many as there are stages, so that a stage
    has other ones to run while one is in the stages between two of its chunks.
    """
    order = [
        Operation(Pass.FORWARD, i, chunk)
        for first in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for i in range(first, min(first + stages, micro_batches))
    ]
    return Schedule(
        name="forward only",
        chunks=chunks,
        micro_batches=micro_batches,
        operations=(tuple(order),) * stages,
        is_prefix_closed=True,
    )


def _forward_only_back_and_forth(stages: int, chunks: int, micro_batches: int) -> Schedule:
    return replace(forward_only(stages, chunks, micro_batches), placement=Placement.V)


FORWARD_ONLY: Mapping[Placement, ScheduleRule] = {
    Placement.LOOP: forward_only,
    Placement.V: _forward_only_back_and_forth,
}
"""Evaluation with chunks on stages as the placement says."""


ScheduleName = Literal["1f1b", "interleaved"]
"""Name of a schedule that a plan may be made for."""

MAX_CHUNKS: Final = 64
"""Most chunks of a stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Named:
    """Rule, placement and numbers of chunks behind a schedule's name."""

    rule: ScheduleRule
    placement: Placement = Placement.LOOP
    chunks: range = range(1, 2)
    """Numbers of chunks that a stage may have."""


_NAMED: Mapping[ScheduleName, _Named] = {
    "1f1b": _Named(rule=one_forward_one_backward),
    "interleaved": _Named(rule=interleaved, chunks=range(2, MAX_CHUNKS + 1)),
}


class PipelineSchedule(Frozen):
    """The schedule that a plan is made for."""

    name: ScheduleName = "1f1b"
    chunks: Annotated[int, Field(ge=1, le=MAX_CHUNKS, exclude_if=lambda chunks: chunks == 1)] = 1
    """Chunks of the model that every stage holds."""

    @model_validator(mode="after")
    def _has_such_chunks(self) -> "PipelineSchedule":
        allowed = _NAMED[self.name].chunks
        if self.chunks not in allowed:
            wanted = f"{allowed[0]}" if len(allowed) == 1 else f"{allowed[0]} to {allowed[-1]}"
            raise ValueError(
                f"schedule {self.name} of {self.chunks} chunks a stage; it has {wanted}"
            )
        return self

    @property
    def rule(self) -> ScheduleRule:
        """The function that gives every stage's operations."""
        return _NAMED[self.name].rule

    @property
    def placement(self) -> Placement:
        """Rule by which stages hold the parts of the model."""
        return _NAMED[self.name].placement


ONE_FORWARD_ONE_BACKWARD: Final = PipelineSchedule()
"""The schedule of plans that name none."""
