"""Messages between stages in a step: their order, and when receives may be posted.

A *channel* is an ordered pair of stages with a content, activations or gradients. Messages go in
the order of the sender's operations; early messages wait at the receiver. No stage deadlocks, under
gloo or NCCL:

- A stage waits for a message until its sender reaches it. Earlier messages of the channel were sent
  before. `OperationGraph` has checked that the operation lists have no cycle of waits.
- A send may wait until the channel's previous message has left, at the latest when its receiver
  takes it. `StepMessages.sends_wait` is set if these waits add no cycle, as in all planned
  schedules; then a channel keeps one message in memory. Otherwise sends never wait.
- Under NCCL a pending receive is a spinning kernel, which blocks device-wide waits: loading a
  kernel at its first launch, and returning memory to the driver. First launches are in every
  chunk's first forward and backward. Pending messages must not depend on such a launch, so each is
  requested only after `after`: the last first launch before its use that it depends on. It is never
  requested at the first launch of the operation that took the previous message. Later, only two
  neighbours that both wait for their devices could deadlock; scripts/job.sh's settings prevent it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter

from omnibal.pipeline.operation_graph import OperationGraph
from omnibal.pipeline.schedules import Pass

_KEPT_STEPS = 8  # cached steps: a run's steps have few different numbers of micro-batches


class Content(StrEnum):
    ACTIVATIONS = "activations"
    GRADIENTS = "gradients"


@dataclass(frozen=True, slots=True)
class Channel:
    source: int
    target: int
    content: Content


@dataclass(frozen=True, slots=True)
class StageMessage:
    cut: int  # between parts `cut` and `cut` + 1
    micro_batch: int
    # Position in the receiver's list of the operation to launch before the receive, or -1 if none.
    # None for a channel's first message, which is requested on use.
    after: int | None


@dataclass(frozen=True, slots=True, eq=False)
class StepMessages:
    channels: Mapping[Channel, tuple[StageMessage, ...]]  # of used channels, in sending order
    sends_wait: bool  # whether a send waits until the channel's previous message has left


@lru_cache(maxsize=_KEPT_STEPS)
def step_messages(graph: OperationGraph, trained_cuts: frozenset[int]) -> StepMessages:
    """Return a step's messages. Gradients cross only `trained_cuts`."""
    flows = _Flows(graph, trained_cuts)
    waits, with_sends = flows.waits(), [*flows.waits(), *flows.waits_of_sends()]
    sends_wait = flows.order(with_sends) is not None
    positions = flows.list_receive_positions(with_sends if sends_wait else waits)
    channels = {
        channel: tuple(
            StageMessage(
                cut=transfer.cut,
                micro_batch=transfer.micro_batch,
                after=None if after is None else after - flows.first[channel.target],
            )
            for transfer, after in zip(transfers, positions[channel], strict=True)
        )
        for channel, transfers in flows.channels.items()
    }
    return StepMessages(channels=channels, sends_wait=sends_wait)


@dataclass(frozen=True, slots=True)
class _Transfer:
    cut: int
    micro_batch: int
    # Operations, numbered as in `_Flows`.
    sender: int
    receiver: int


_Waits = Iterable[tuple[int, int]]  # pairs of an operation and an operation that waits for it


class _Flows:
    """Transfers by channel. Operations are numbered through the lists of all stages in turn."""

    def __init__(self, graph: OperationGraph, trained_cuts: frozenset[int]) -> None:
        schedule = graph.schedule
        self.first = [0]  # number of every stage's first operation, then the total
        for operations in schedule.operations:
            self.first.append(self.first[-1] + len(operations))
        # Operations that send or need messages, by direction, part and micro-batch.
        place = {
            (op.kind is Pass.FORWARD, schedule.part(stage, op.chunk), op.micro_batch): number
            for stage, operations in enumerate(schedule.operations)
            for number, op in enumerate(operations, start=self.first[stage])
            if op.kind is not Pass.BACKWARD_WEIGHT
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
        self._takers = {channel: _list_takers(sent) for channel, sent in self.channels.items()}
        # By stage, first operations of each kind and chunk: they load kernels.
        self._launches: list[list[int]] = []
        for operations, first in zip(schedule.operations, self.first, strict=False):
            seen = dict[tuple[Pass, int], int]()
            for number, operation in enumerate(operations, start=first):
                seen.setdefault((operation.kind, operation.chunk), number)
            self._launches.append(list(seen.values()))

    def waits(self) -> list[tuple[int, int]]:
        """Return waits for the previous operation of a stage and for messages."""
        stages = zip(self.first, self.first[1:], strict=False)
        by_list = [(op, op + 1) for first, end in stages for op in range(first, end - 1)]
        sent = (transfer for transfers in self.channels.values() for transfer in transfers)
        return by_list + [(transfer.sender, transfer.receiver) for transfer in sent]

    def waits_of_sends(self) -> Iterator[tuple[int, int]]:
        """Yield waits of sends until the receiver can take the channel's previous message."""
        for channel, sent in self.channels.items():
            for taker, following in zip(self._takers[channel], sent[1:], strict=False):
                # A receive is posted at the latest after the operation before its taker.
                if taker > self.first[channel.target]:
                    yield taker - 1, following.sender

    def list_receive_positions(self, waits: _Waits) -> dict[Channel, list[int | None]]:
        """Return the operation to launch before each receive, or None for first messages.

        It is the last first launch since the previous message was taken that this message depends
        on, at least the taker if a first launch; if none, the number before the stage's first.
        """
        # By operation, a bit mask of the first launches that it is or depends on.
        launches = {launch for of_stage in self._launches for launch in of_stage}
        before, order = self._before(waits), self.order(waits)
        assert order is not None, "waits have a cycle"
        needs = [0] * len(before)
        for number in order:
            needs[number] = 1 << number if number in launches else 0
            for earlier in before[number]:
                needs[number] |= needs[earlier]

        def after(channel: Channel, number: int) -> int:
            sender = self.channels[channel][number].sender
            start, end = self._takers[channel][number - 1 : number + 1]
            # First launches between request and arrival, if requested after the previous message.
            between = [launch for launch in self._launches[channel.target] if start <= launch < end]
            late = [launch for launch in between if launch == start or needs[sender] >> launch & 1]
            return max(late, default=self.first[channel.target] - 1)

        return {
            channel: [None, *(after(channel, number) for number in range(1, len(sent)))]
            for channel, sent in self.channels.items()
        }

    def _before(self, waits: _Waits) -> list[list[int]]:
        before: list[list[int]] = [[] for _ in range(self.first[-1])]
        for earlier, waiting in waits:
            before[waiting].append(earlier)
        return before

    def order(self, waits: _Waits) -> list[int] | None:
        """Return a topological order of the operations, or None if waits have a cycle."""
        try:
            return list(TopologicalSorter(dict(enumerate(self._before(waits)))).static_order())
        except CycleError:
            return None


def _list_takers(sent: Sequence[_Transfer]) -> list[int]:
    """Return the number of the operation that takes each message from the channel."""
    # Its user, or an earlier user of a later message, which takes all messages before its own.
    takers = [transfer.receiver for transfer in sent]
    for number in reversed(range(len(takers) - 1)):
        takers[number] = min(takers[number : number + 2])
    return takers
