"""A stage's channels to other stages; shapes are planned, so only values are sent."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.vlm.backend import current_device
from megatron.vlm.model.groups import create_own_group
from megatron.vlm.model.stage import ByTower
from megatron.vlm.step.stage_messages import Channel, Content, StageMessage
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule

MessageShapes = Mapping[str, tuple[int, ...]]  # shapes of tensors by tower, in sending order


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineLinks:
    """This stage's rank in its pipeline, its parts of the model, and its channels."""

    rank: int  # number of this stage
    ranks: Sequence[int]  # global ranks of the pipeline, by stage
    # Under NCCL a pair of ranks has one queue per group. With a group for each content and
    # direction no message waits for another channel.
    activations: dist.ProcessGroup
    gradients: dist.ProcessGroup
    schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD
    # Activations to earlier stages and gradients to later stages, if interleaved.
    other_way: Sequence[dist.ProcessGroup] = ()
    make_inbox: "Callable[..., Inbox]" = lambda *given: Inbox(*given)  # of `Inbox`'s arguments

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def parts(self) -> tuple[int, ...]:
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

    def for_schedule(self, schedule: PipelineSchedule) -> Self:
        """Return these links with the channels of a schedule; collective over all ranks."""
        if schedule.chunks == 1:
            return replace(self, schedule=schedule)
        links = replace(self, schedule=schedule, other_way=_create_group_pair())
        _connect_channels(links)
        return links


def all_pipelines() -> list[list[int]]:
    """Return every pipeline's ranks by stage; Megatron numbers ranks stage by stage."""
    size = parallel_state.get_pipeline_model_parallel_world_size()
    pipelines = dist.get_world_size() // size
    return [list(range(first, pipelines * size, pipelines)) for first in range(pipelines)]


def create_pipeline_links() -> PipelineLinks:
    """Create this stage's links, after `initialize_model_parallel`; collective over all ranks."""
    activations, gradients = _create_group_pair()
    links = PipelineLinks(
        rank=parallel_state.get_pipeline_model_parallel_rank(),
        ranks=dist.get_process_group_ranks(activations),
        activations=activations,
        gradients=gradients,
    )
    _connect_channels(links)
    return links


def _create_group_pair() -> list[dist.ProcessGroup]:
    return [create_own_group(all_pipelines()) for _ in range(2)]


def _connect_channels(links: PipelineLinks) -> None:
    """Send a number over every channel in turn, by cuts; collective over the pipeline."""
    # NCCL connects a pair in its first transfer, which blocks until both take part. In training,
    # neighbours would begin with different pairs and block each other.
    token = torch.zeros(1, device=current_device())
    stages = [links.stage_of(part) for part in range(links.last_part + 1)]
    for before, after in dict.fromkeys(pairwise(stages)):
        forth = Channel(before, after, Content.ACTIVATIONS)
        back = Channel(after, before, Content.GRADIENTS)
        for channel in (forth, back) if before != after else ():
            group = links.group(channel)
            if links.rank == channel.source:
                dist.send(token, links.ranks[channel.target], group=group)
            elif links.rank == channel.target:
                dist.recv(token, links.ranks[channel.source], group=group)


class Inbox:
    """Messages of known shapes on one channel, in sending order.

    A receive is posted in `take`, or after the previous message and operation `message.after`.
    """

    def __init__(
        self,
        messages: Sequence[StageMessage],
        shapes: Sequence[MessageShapes],
        dtype: torch.dtype,
        source_rank: int,
        group: dist.ProcessGroup,
    ) -> None:
        self._messages = list(zip(messages, shapes, strict=True))[::-1]  # the next is last
        self._dtype, self._source_rank, self._group = dtype, source_rank, group
        # At most one pending message, with its tensors and receives.
        self._pending: tuple[StageMessage, dict[str, torch.Tensor], list[Any]] | None = None
        # Messages that arrived before their operation, by cut and micro-batch.
        self._arrived: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

    def _post_next(self) -> None:
        message, shapes = self._messages.pop()
        tensors = {
            name: torch.empty(shape, dtype=self._dtype, device=current_device())
            for name, shape in shapes.items()
        }
        # Empty tensors are not sent.
        self._pending = message, tensors, [self._begin(t) for t in tensors.values() if t.numel()]

    def _begin(self, tensor: torch.Tensor) -> dist.Work | None:
        return dist.irecv(tensor, self._source_rank, group=self._group)

    def post_receives(self, position: int) -> None:
        """Post the next receive if allowed after the launch of operation `position`."""
        if self._pending is None and self._messages:
            after = self._messages[-1][0].after
            if after is not None and after <= position:
                self._post_next()

    def take(self, cut: int, micro_batch: int, position: int) -> dict[str, torch.Tensor]:
        """Wait for the message that operation `position` needs; return its tensors by tower."""
        while (cut, micro_batch) not in self._arrived:
            if self._pending is None:
                self._post_next()
            assert self._pending is not None
            message, tensors, works = self._pending
            for work in works:
                if work is not None:
                    work.wait()  # under NCCL the stream waits, not the host
            self._arrived[message.cut, message.micro_batch] = tensors
            self._pending = None
        self.post_receives(position - 1)  # this operation is not launched yet
        return self._arrived.pop((cut, micro_batch))


class Outbox:
    """Sends messages on one channel; with `waits`, at most one is in transit."""

    def __init__(self, target_rank: int, group: dist.ProcessGroup, *, waits: bool) -> None:
        self._target_rank, self._group, self._waits = target_rank, group, waits
        # Holds tensors until sent: the allocator must not reuse their memory before.
        self._leaving: list[tuple[torch.Tensor, dist.Work]] = []

    def send(self, message: ByTower) -> None:
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
