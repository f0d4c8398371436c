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

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import numpy as np

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


class _Transfer(NamedTuple):
    sender: int  # operation of the graph
    receiver: int
    cut: int
    micro_batch: int


@lru_cache(maxsize=_KEPT_STEPS)
def step_messages(graph: OperationGraph, trained_cuts: frozenset[int]) -> StepMessages:
    """Return a step's messages. Gradients cross only `trained_cuts`."""
    channels, previous = _list_transfers(graph, trained_cuts), graph.before.tolist()
    # Operations that each operation waits for; after the last, an operation that waits for none.
    waits = {operation: [before] for operation, before in enumerate(previous)}
    with_sends = {operation: [before] for operation, before in enumerate(previous)}
    for transfers in channels.values():
        for transfer in transfers:
            waits[transfer.receiver].append(transfer.sender)
            with_sends[transfer.receiver].append(transfer.sender)
        # A send waits until the receiver can take the channel's previous message. Its receive is
        # posted at the latest after the operation before the taker.
        for taker, following in zip(_list_takers(transfers), transfers[1:], strict=False):
            with_sends[following.sender].append(previous[taker])
    try:
        order, sends_wait = [*TopologicalSorter(with_sends).static_order()], True
    except CycleError:
        with_sends, sends_wait = waits, False
        order = [*TopologicalSorter(waits).static_order()]
    # First operations of each kind and part load kernels. By operation, a bit mask of those that it
    # is or depends on.
    _, places = np.unique([graph.kind, graph.part], axis=1, return_index=True)
    launches, needs = places.tolist(), dict[int, int]()
    for operation in order:
        needs[operation] = 1 << operation if operation in launches else 0
        for earlier in with_sends.get(operation, ()):
            needs[operation] |= needs[earlier]
    return StepMessages(
        channels={
            channel: tuple(_list_messages(graph, channel, transfers, launches, needs))
            for channel, transfers in channels.items()
        },
        sends_wait=sends_wait,
    )


def _list_transfers(
    graph: OperationGraph, trained_cuts: frozenset[int]
) -> dict[Channel, list[_Transfer]]:
    """Return transfers between stages by channel, in sending order."""
    channels: dict[Channel, list[_Transfer]] = defaultdict(list)
    sources, stages, parts = graph.source.tolist(), graph.stage.tolist(), graph.part.tolist()
    for receiver in np.argsort(graph.source)[: np.sum(graph.source < len(graph))].tolist():
        sender, is_forward = sources[receiver], graph.kind[receiver] == Pass.FORWARD
        cut = min(parts[sender], parts[receiver])
        if stages[sender] != stages[receiver] and (is_forward or cut in trained_cuts):
            content = Content.ACTIVATIONS if is_forward else Content.GRADIENTS
            channel = Channel(stages[sender], stages[receiver], content)
            micro_batch = int(graph.micro_batch[receiver])
            channels[channel].append(_Transfer(sender, receiver, cut, micro_batch))
    return channels


def _list_messages(
    graph: OperationGraph,
    channel: Channel,
    transfers: Sequence[_Transfer],
    launches: Sequence[int],
    needs: Mapping[int, int],
) -> Iterator[StageMessage]:
    """Yield a channel's messages in sending order.

    Each is requested after the last first launch since the previous message was taken that it
    depends on, at least the taker if a first launch; if none, before the stage's first operation.
    """
    first, takers = int(graph.of_stage(channel.target)[0]), _list_takers(transfers)
    for number, (transfer, taker) in enumerate(zip(transfers, takers, strict=True)):
        start = takers[number - 1]
        between = [launch for launch in launches if start <= launch < taker]
        late = [n for n in between if n == start or needs[transfer.sender] >> n & 1]
        after = max(late, default=first - 1) - first if number else None
        yield StageMessage(transfer.cut, transfer.micro_batch, after)


def _list_takers(sent: Sequence[_Transfer]) -> list[int]:
    """Return the number of the operation that takes each message from the channel."""
    # Its user, or an earlier user of a later message, which takes all messages before its own.
    takers = [transfer.receiver for transfer in sent]
    for number in reversed(range(len(takers) - 1)):
        takers[number] = min(takers[number : number + 2])
    return takers
