"""Messages that stages exchange in a step: their order, and when a receive may be posted.

Both sides of a message know it from the lists of operations. A *channel* is an ordered pair of
stages and what goes from the one to the other, activations or gradients; its messages go in the
order of the sender's operations, and those that come before they are needed wait at the receiver.

No stage waits for ever, by gloo's rules or by NCCL's:

- A stage waits for a message, which its sender sends when its list comes to it. What is sent before
  it on the channel has been sent by then too, so that a channel's order never holds it up. That the
  lists do not wait for each other in a ring, `OperationGraph` has checked.
- A stage that sends may wait until the message before it on the channel has left, that is, until
  its receiver has asked for it, at the latest where its list takes it. `StepMessages.sends_wait`
  says whether it may: whether there is still no ring with these waits. All planned schedules allow
  it, and it keeps no more than one message of a channel in memory; with other lists, what is sent
  waits for nothing.
- Under NCCL a receive is a kernel that spins until its message comes, and whatever waits for the
  whole device waits for it too: a kernel that is loaded at its first launch, memory that is given
  back to the driver. First launches are those of the first forward and the first backward of every
  chunk. What is on its way then must not depend on that launch. So each message has the operation
  after whose launch it may be asked for: the last first launch before it is needed that it depends
  on. Nor is any asked for at the first launch of the operation that took the one before it. Later,
  only two neighbours that both wait for their devices could block each other; the launchers'
  settings (scripts/job.sh) keep them from it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from omnibal.pipeline.operation_graph import OperationGraph
from omnibal.pipeline.schedules import Pass, StageOperations

_KEPT_STEPS = 8
"""Number of steps' messages cached, as a run's steps have a few numbers of micro-batches."""


class Content(StrEnum):
    """What goes from one stage to another."""

    ACTIVATIONS = "activations"
    GRADIENTS = "gradients"


@dataclass(frozen=True, slots=True)
class Channel:
    """An ordered pair of stages, and what goes from the one to the other."""

    source: int
    target: int
    content: Content


@dataclass(frozen=True, slots=True)
class Message:
    """What a receiver knows of a message."""

    cut: int
    """Cut that it crosses, between the parts of the model `cut` and `cut` + 1."""
    micro_batch: int
    after: int | None
    """Position in the receiver's list of the operation after whose launch it may be asked for, once
    the message before it has come; -1: before any. None of a channel's first message, which is
    asked for when it is needed."""


@dataclass(frozen=True, slots=True, eq=False)
class StepMessages:
    """The messages of a step between all stages."""

    channels: Mapping[Channel, tuple[Message, ...]]
    """Messages of every channel that has any, in the order in which they are sent."""
    sends_wait: bool
    """Whether a stage that sends waits until the message before it on the channel has left."""


@lru_cache(maxsize=_KEPT_STEPS)
def step_messages(graph: OperationGraph, trained_cuts: frozenset[int]) -> StepMessages:
    """Find the messages of a step, whose gradients come back over `trained_cuts`, and when each may
    be asked for."""
    flows = _Flows(graph, trained_cuts)
    waits, with_sends = flows.waits(), [*flows.waits(), *flows.waits_of_sends()]
    sends_wait = flows.order(with_sends) is not None
    asked = flows.asked(with_sends if sends_wait else waits)
    channels = {
        channel: tuple(
            Message(
                cut=transfer.cut,
                micro_batch=transfer.micro_batch,
                after=None if after is None else after - flows.first[channel.target],
            )
            for transfer, after in zip(transfers, asked[channel], strict=True)
        )
        for channel, transfers in flows.channels.items()
    }
    return StepMessages(channels=channels, sends_wait=sends_wait)


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A message, with the numbers of the operations that send it and that need it."""

    cut: int
    micro_batch: int
    sender: int
    receiver: int


_Waits = Iterable[tuple[int, int]]
"""Numbers of an operation, and of one that waits until it is done."""


class _Flows:
    """Messages between operations, which are numbered in the order of the lists of all stages."""

    def __init__(self, graph: OperationGraph, trained_cuts: frozenset[int]) -> None:
        schedule = graph.schedule
        self.first = [0]
        """Number of every stage's first operation, and last how many there are."""
        for operations in schedule.operations:
            self.first.append(self.first[-1] + len(operations))
        place = {
            (one.kind is Pass.FORWARD, schedule.part(stage, one.chunk), one.micro_batch): number
            for stage, operations in enumerate(schedule.operations)
            for number, one in enumerate(operations, start=self.first[stage])
            if one.kind is not Pass.BACKWARD_WEIGHT
        }
        self.channels: dict[Channel, list[_Transfer]] = {}
        for (is_forward, part, micro_batch), sender in place.items():
            to, cut = (part + 1, part) if is_forward else (part - 1, part - 1)
            if not 0 <= to < schedule.parts or not (is_forward or cut in trained_cuts):
                continue
            content = Content.ACTIVATIONS if is_forward else Content.GRADIENTS
            channel = Channel(schedule.stage_of(part), schedule.stage_of(to), content)
            if channel.source != channel.target:
                receiver = place[is_forward, to, micro_batch]
                transfer = _Transfer(cut, micro_batch, sender, receiver)
                self.channels.setdefault(channel, []).append(transfer)
        self._taken = {channel: _taken(sent) for channel, sent in self.channels.items()}
        self._launches = [
            _first_launches(operations, first)
            for operations, first in zip(schedule.operations, self.first, strict=False)
        ]

    def waits(self) -> list[tuple[int, int]]:
        """Waits by the lists, and for what operations need."""
        stages = zip(self.first, self.first[1:], strict=False)
        by_list = [(one, one + 1) for first, end in stages for one in range(first, end - 1)]
        sent = (one for transfers in self.channels.values() for one in transfers)
        return by_list + [(one.sender, one.receiver) for one in sent]

    def waits_of_sends(self) -> Iterator[tuple[int, int]]:
        """Waits, in an operation that sends, until the receiver comes to where it takes the message
        before at the latest."""
        for channel, sent in self.channels.items():
            for taken, following in zip(self._taken[channel], sent[1:], strict=False):
                if taken > self.first[channel.target]:
                    yield taken - 1, following.sender

    def asked(self, waits: _Waits) -> dict[Channel, list[int | None]]:
        """Number of the operation after whose launch each message may be asked for, maybe the one
        before the stage's first; None of a channel's first message.

        It is before the first launches that the message does not depend on, but for that of the
        operation which took the one before it.
        """
        needs = self._launches_needed(waits)

        def after(channel: Channel, number: int) -> int:
            sender = self.channels[channel][number].sender
            start, end = self._taken[channel][number - 1 : number + 1]
            # First launches while the message is on its way, asked for when the one before it came.
            between = [one for one in self._launches[channel.target] if start <= one < end]
            late = [one for one in between if one == start or needs[sender] >> one & 1]
            return max(late, default=self.first[channel.target] - 1)

        return {
            channel: [None, *(after(channel, number) for number in range(1, len(sent)))]
            for channel, sent in self.channels.items()
        }

    def _launches_needed(self, waits: _Waits) -> list[int]:
        """First launches that every operation depends on, its own included, as bits by number."""
        launches = {one for of_stage in self._launches for one in of_stage}
        before, order = self._before(waits), self.order(waits)
        assert order is not None, "the lists have no ring"
        needed = [0] * len(before)
        for number in order:
            needed[number] = 1 << number if number in launches else 0
            for one in before[number]:
                needed[number] |= needed[one]
        return needed

    def _before(self, waits: _Waits) -> list[list[int]]:
        before: list[list[int]] = [[] for _ in range(self.first[-1])]
        for one, waiting in waits:
            before[waiting].append(one)
        return before

    def order(self, waits: _Waits) -> list[int] | None:
        """All operations, each after those that it waits for; None where some wait in a ring."""
        before = self._before(waits)
        missing = [len(one) for one in before]
        after: list[list[int]] = [[] for _ in before]
        for waiting, ones in enumerate(before):
            for one in ones:
                after[one].append(waiting)
        order = [number for number, count in enumerate(missing) if not count]
        for number in order:  # which grows meanwhile
            for waiting in after[number]:
                missing[waiting] -= 1
                if not missing[waiting]:
                    order.append(waiting)
        return order if len(order) == len(before) else None


def _taken(sent: Sequence[_Transfer]) -> list[int]:
    """Number of the receiver's operation that takes each message: the one that needs it, or before
    that one that needs a later message."""
    taken = [one.receiver for one in sent]
    for number in reversed(range(len(taken) - 1)):
        taken[number] = min(taken[number : number + 2])
    return taken


def _first_launches(operations: StageOperations, first: int) -> list[int]:
    """Numbers of a stage's operations that are the first of their kind and chunk, in order."""
    seen = dict[tuple[Pass, int], int]()
    for number, one in enumerate(operations, start=first):
        seen.setdefault((one.kind, one.chunk), number)
    return list(seen.values())
