"""A stage's channels to other stages; shapes are planned, so only values are sent."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.vlm.backend import current_device
from megatron.vlm.model.groups import create_own_group
from megatron.vlm.model.stage import ByTower
from megatron.vlm.step.stage_messages import Channel, Content, Message
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule

MessageShapes = Mapping[str, tuple[int, ...]]
"""Shapes of a message's tensors by tower, in sending order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineLinks:
    """This stage's rank in its pipeline, its parts of the model, and its channels.

    Activations and gradients use separate process groups, and interleaved stages use two more for
    the opposite directions. Under NCCL a pair has one queue per group: with one direction per group
    no message waits for another channel.
    """

    rank: int
    ranks: Sequence[int]
    activations: dist.ProcessGroup
    gradients: dist.ProcessGroup
    schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD
    other_way: Sequence[dist.ProcessGroup] = ()
    """Groups of activations to earlier stages and gradients to later stages, if interleaved."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def parts(self) -> tuple[int, ...]:
        """Return this stage's parts of the model, one per chunk."""
        chunks, placement = self.schedule.chunks, self.schedule.placement
        return tuple(placement.part(self.rank, chunk, self.size) for chunk in range(chunks))

    @property
    def last_part(self) -> int:
        return self.size * self.schedule.chunks - 1

    def stage_of(self, part: int) -> int:
        return self.schedule.placement.stage_of(part, self.size)

    @property
    def is_first(self) -> bool:
        return 0 in self.parts

    @property
    def is_last(self) -> bool:
        return self.last_part in self.parts

    def group(self, channel: Channel) -> dist.ProcessGroup:
        if channel.content is Content.ACTIVATIONS:
            return self.activations if channel.source < channel.target else self.other_way[0]
        return self.gradients if channel.source > channel.target else self.other_way[1]

    def inbox(
        self,
        channel: Channel,
        messages: Sequence[Message],
        shapes: Sequence[MessageShapes],
        dtype: torch.dtype,
    ) -> "Inbox":
        """Make an inbox for a step's messages on a channel to this stage."""
        return Inbox(messages, shapes, dtype, self.ranks[channel.source], self.group(channel))

    def outbox(self, channel: Channel, *, waits: bool) -> "Outbox":
        return Outbox(self.ranks[channel.target], self.group(channel), waits=waits)

    def for_schedule(self, schedule: PipelineSchedule) -> Self:
        """Return connected links for a schedule; collective over all ranks."""
        if schedule.chunks == 1:
            return replace(self, schedule=schedule)
        links = replace(self, schedule=schedule, other_way=_two_groups())
        connected = set(_channels(self))
        _connect(links, (channel for channel in _channels(links) if channel not in connected))
        return links


def all_pipelines() -> list[list[int]]:
    """Return every pipeline's ranks by stage; Megatron numbers ranks stage by stage."""
    size = parallel_state.get_pipeline_model_parallel_world_size()
    pipelines = dist.get_world_size() // size
    return [list(range(first, pipelines * size, pipelines)) for first in range(pipelines)]


def create_pipeline_links(kind: type[PipelineLinks] = PipelineLinks) -> PipelineLinks:
    """Create this stage's links, after `initialize_model_parallel`; collective over all ranks."""
    activations, gradients = _two_groups()
    links = kind(
        rank=parallel_state.get_pipeline_model_parallel_rank(),
        ranks=dist.get_process_group_ranks(activations),
        activations=activations,
        gradients=gradients,
    )
    _connect(links, _channels(links))
    return links


def _two_groups() -> list[dist.ProcessGroup]:
    return [create_own_group(all_pipelines()) for _ in range(2)]


def _channels(links: PipelineLinks) -> list[Channel]:
    """Return all channels of the pipeline, in the order of the cuts."""
    stages = [links.stage_of(part) for part in range(links.last_part + 1)]
    channels = [
        channel
        for before, after in pairwise(stages)
        for channel in (
            Channel(before, after, Content.ACTIVATIONS),
            Channel(after, before, Content.GRADIENTS),
        )
        if before != after
    ]
    return list(dict.fromkeys(channels))


def _connect(links: PipelineLinks, channels: Iterable[Channel]) -> None:
    """Send one number over every channel in turn, as NCCL connects a pair in its first transfer.

    In training, neighbours would begin with different connections and block each other.
    """
    token = torch.zeros(1, device=current_device())
    for channel in channels:
        group = links.group(channel)
        if links.rank == channel.source:
            dist.send(token, links.ranks[channel.target], group=group)
        elif links.rank == channel.target:
            dist.recv(token, links.ranks[channel.source], group=group)


class Inbox:
    """Messages of known shapes on one channel, in sending order.

    Receives are posted on use, or after the previous message and the launch of `after`.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        shapes: Sequence[MessageShapes],
        dtype: torch.dtype,
        source_rank: int,
        group: dist.ProcessGroup,
    ) -> None:
        self._messages = list(zip(messages, shapes, strict=True))[::-1]
        self._dtype, self._source_rank, self._group = dtype, source_rank, group
        self._coming: tuple[Message, dict[str, torch.Tensor], list[dist.Work | None]] | None = None
        self._here: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

    def _ask(self) -> None:
        message, shapes = self._messages.pop()
        tensors = {
            name: torch.empty(shape, dtype=self._dtype, device=current_device())
            for name, shape in shapes.items()
        }
        self._coming = message, tensors, [self._begin(t) for t in tensors.values() if t.numel()]

    def _begin(self, tensor: torch.Tensor) -> dist.Work | None:
        return dist.irecv(tensor, self._source_rank, group=self._group)

    def post_receives(self, position: int) -> None:
        """Post the next receive if allowed after the launch of operation `position`."""
        if self._coming is None and self._messages:
            after = self._messages[-1][0].after
            if after is not None and after <= position:
                self._ask()

    def take(self, cut: int, micro_batch: int, position: int) -> dict[str, torch.Tensor]:
        """Wait for the message that operation `position` needs; return its tensors by tower."""
        while (cut, micro_batch) not in self._here:
            if self._coming is None:
                self._ask()
            assert self._coming is not None
            message, tensors, works = self._coming
            for work in works:
                if work is not None:
                    work.wait()
            self._here[message.cut, message.micro_batch] = tensors
            self._coming = None
        self.post_receives(position - 1)
        return self._here.pop((cut, micro_batch))


class Outbox:
    """Messages on one channel, held until sent; with `waits`, one send at a time."""

    def __init__(self, target_rank: int, group: dist.ProcessGroup, *, waits: bool) -> None:
        self._target_rank, self._group, self._waits = target_rank, group, waits
        self._leaving: list[tuple[torch.Tensor, dist.Work]] = []

    def put(self, message: ByTower) -> None:
        if self._waits:
            self.flush()
        self._leaving = [sending for sending in self._leaving if not sending[1].is_completed()]
        for tensor in message.values():
            if tensor.numel():
                tensor = tensor.contiguous()
                work = dist.isend(tensor, self._target_rank, group=self._group)
                self._leaving.append((tensor, work))

    def flush(self) -> None:
        for _, work in self._leaving:
            work.wait()
        self._leaving.clear()
