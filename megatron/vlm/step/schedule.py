"""Runs a pipeline schedule whose tensor shapes every stage knows, so only hidden states are sent.

A stage walks its list of operations (`omnibal.pipeline.schedules`), the one that the planner
simulates.

Stock Megatron-core with `variable_seq_lengths` sends each shape ahead of its tensor, synchronises
the device and reads the shape on the host, for every transfer. Here the plan gives each
micro-batch's tile and token counts to all stages, so a receive is posted while the stage still
computes, and a send is waited for only when the next one in its direction begins.

Not so the first receives of a step. Under NCCL a receive is a kernel that spins until its tensor
comes, and whatever waits for the whole device waits for it too: a kernel that is loaded at its
first launch, memory that is given back to the driver. A stage that waits so before its first
forward, for a gradient that this very forward leads to, waits for ever. So each inbox runs ahead
only once the first forward, or the first backward, that it feeds is launched; before, a receive is
posted right before its wait. Until then nothing that is on its way depends on what a stage is about
to launch: the activations of its warm-up and of the forward after it come without a gradient, and
the first gradient is asked for after that forward. Later, only two neighbours that both wait for
their devices could block each other; the launchers' settings (scripts/job.sh) keep them from it.

A boundary that carries nothing (no tile in the pack, cut before the language embed) is not sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import custom_backward

from megatron.vlm.backend import COLLECTIVE_TIMEOUT, current_device
from megatron.vlm.inputs.batch import MicroBatch, MicroBatchStream
from megatron.vlm.model.configs import parameter_dtype
from megatron.vlm.model.stage import boundary_shape
from megatron.vlm.step.clock import Phase, PhaseClock
from megatron.vlm.step.encoders import FeatureInbox, FeatureOutbox, StepFeatures
from omnibal.pipeline.operation_graph import (
    OperationGraph,
    operation_graph,
    planned_graph,
    require_in_order,
)
from omnibal.pipeline.schedules import Pass, StageOperations, forward_only
from omnibal.plan import Plan

Encode = Callable[[MicroBatch], torch.Tensor]
"""Function that gives a micro-batch's features."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineLinks:
    """This stage's place in the pipeline and its neighbours.

    Activations and gradients use separate process groups. Within one, every pair of neighbours
    sends in one direction only and in micro-batch order, so once connected no order of posting can
    deadlock where hosts do not wait for their devices.
    """

    rank: int
    size: int
    previous_rank: int
    """Global rank of the previous stage's neighbour; meaningless on the first stage."""
    next_rank: int
    """Global rank of the next stage's neighbour; meaningless on the last stage."""
    activations: dist.ProcessGroup
    gradients: dist.ProcessGroup

    def inbox(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        source_rank: int,
        group: dist.ProcessGroup,
    ) -> "Inbox":
        """Make an inbox for the tensors that a neighbour sends during a step."""
        return Inbox(shapes, dtype, source_rank, group)

    @property
    def is_first(self) -> bool:
        """Whether this is the first stage."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage."""
        return self.rank == self.size - 1


def all_pipelines() -> list[list[int]]:
    """The ranks of every pipeline, in stage order; Megatron numbers ranks stage by stage."""
    size = parallel_state.get_pipeline_model_parallel_world_size()
    pipelines = dist.get_world_size() // size
    return [list(range(first, pipelines * size, pipelines)) for first in range(pipelines)]


def create_pipeline_links(kind: type[PipelineLinks] = PipelineLinks) -> PipelineLinks:
    """Create this stage's links, after `initialize_model_parallel`; collective over all ranks."""
    links = None
    for ranks in all_pipelines():
        # Every rank takes part in creating every group, in the same order.
        groups = [dist.new_group(ranks, timeout=COLLECTIVE_TIMEOUT) for _ in range(2)]
        if dist.get_rank() in ranks:
            links = kind(
                rank=parallel_state.get_pipeline_model_parallel_rank(),
                size=len(ranks),
                previous_rank=parallel_state.get_pipeline_model_parallel_prev_rank(),
                next_rank=parallel_state.get_pipeline_model_parallel_next_rank(),
                activations=groups[0],
                gradients=groups[1],
            )
    assert links is not None, "this rank is in no pipeline"
    _connect(links)
    return links


def _connect(links: PipelineLinks) -> None:
    """Send one number over every connection, along the chain.

    NCCL builds a pair's communicator inside its first transfer and holds the host until the peer
    enters the same one. In training, neighbours begin with different connections: the one posts a
    receive of gradients, the other of activations, and each would wait for the other.
    """
    token = torch.zeros(1, device=current_device())
    if not links.is_first:
        dist.recv(token, links.previous_rank, group=links.activations)
        dist.send(token, links.previous_rank, group=links.gradients)
    if not links.is_last:
        dist.send(token, links.next_rank, group=links.activations)
        dist.recv(token, links.next_rank, group=links.gradients)


class Inbox:
    """Tensors of known shapes from one neighbour, in order.

    Each is asked for when it is taken; after `run_ahead`, when the one before it is.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        source_rank: int,
        group: dist.ProcessGroup,
    ) -> None:
        self._shapes = iter(shapes)
        self._dtype = dtype
        self._source_rank = source_rank
        self._group = group
        self._coming: tuple[torch.Tensor, dist.Work | None] | None = None
        self._runs_ahead = False

    def _post(self) -> None:
        shape = next(self._shapes, None)
        if shape is None:
            self._coming = None
            return
        tensor = torch.empty(shape, dtype=self._dtype, device=current_device())
        self._coming = (tensor, self._begin(tensor) if tensor.numel() else None)

    def run_ahead(self) -> None:
        """Post receives one ahead from now on; call it once the work on the first is launched."""
        if not self._runs_ahead:
            self._runs_ahead = True
            self._post()

    def _begin(self, tensor: torch.Tensor) -> dist.Work | None:
        return dist.irecv(tensor, self._source_rank, group=self._group)

    def take(self) -> torch.Tensor:
        """Wait for the next tensor."""
        if not self._runs_ahead:
            self._post()
        assert self._coming is not None, "more is taken than was announced"
        tensor, work = self._coming
        if work is not None:
            work.wait()
        if self._runs_ahead:
            self._post()
        return tensor


class Outbox:
    """Tensors to one neighbour; each is kept until it has left."""

    def __init__(self, target_rank: int, group: dist.ProcessGroup) -> None:
        self._target_rank = target_rank
        self._group = group
        self._leaving: tuple[torch.Tensor, dist.Work] | None = None

    def put(self, tensor: torch.Tensor) -> None:
        """Start sending; waits only for the tensor before it."""
        self.flush()
        if tensor.numel():
            tensor = tensor.contiguous()
            self._leaving = (tensor, dist.isend(tensor, self._target_rank, group=self._group))

    def flush(self) -> None:
        """Wait until everything has left."""
        if self._leaving is not None:
            self._leaving[1].wait()
            self._leaving = None


class _StageRun:
    """One step of one stage: its neighbours' tensors, and the graphs kept for backward."""

    def __init__(
        self,
        plan: Plan,
        model: torch.nn.Module,
        links: PipelineLinks,
        batches: MicroBatchStream,
        clock: PhaseClock,
        features: StepFeatures | None = None,
        encode: Encode | None = None,
    ) -> None:
        self.features, self.encode = features, encode
        self.plan, self.model, self.links, self.clock = plan, model, links, clock
        self.batches = batches
        self.dtype = parameter_dtype(plan.precision)
        self.kept: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}
        self.results: list[torch.Tensor] = []
        self.inputs: Inbox | FeatureInbox | None = None
        self.outputs: Outbox | None = None
        self.output_gradients: Inbox | None = None
        self.input_gradients: Outbox | FeatureOutbox | None = None
        if not links.is_first:
            self.inputs = self._inbox(links.rank - 1, links.previous_rank, links.activations)
        elif features is not None:
            self.inputs = features.inbox()
        if not links.is_last:
            self.outputs = Outbox(links.next_rank, links.activations)

    def _inbox(self, cut: int, source_rank: int, group: dist.ProcessGroup) -> Inbox:
        """Make the inbox of the tensors sent over a cut, in micro-batch order."""
        shapes = [boundary_shape(self.plan, cut, shape) for shape in self.batches.shapes]
        return self.links.inbox(shapes, self.dtype, source_rank, group)

    def _open_gradients(self) -> None:
        """Open the inbox and outbox of gradients, in training and where units up to here train."""
        links = self.links
        if not links.is_last and self.plan.gradient_crosses(links.rank):
            self.output_gradients = self._inbox(links.rank, links.next_rank, links.gradients)
        if not links.is_first and self.plan.gradient_crosses(links.rank - 1):
            self.input_gradients = Outbox(links.previous_rank, links.gradients)
        if self.features is not None:
            self.input_gradients = self.features.outbox()

    def run(
        self, operations: StageOperations, before_last_backward: Callable[[], None] | None = None
    ) -> list[torch.Tensor]:
        """Run the stage's list; returns the last stage's output of every micro-batch."""
        backwards = sum(operation.kind is Pass.BACKWARD for operation in operations)
        trains = backwards > 0
        if trains:
            self._open_gradients()
        for operation in operations:
            if operation.kind is Pass.BACKWARD:
                backwards -= 1
                if backwards == 0 and before_last_backward is not None:
                    before_last_backward()
                self._backward(operation.micro_batch)
            else:
                self._forward(operation.micro_batch, trains)
        self.clock.switch(Phase.WAIT)
        for box in (self.outputs, self.input_gradients):
            if box is not None:
                box.flush()
        return self.results

    def _forward(self, micro_batch: int, trains: bool) -> None:
        """Run the next micro-batch and start sending its output."""
        received = None
        if self.inputs is not None:
            self.clock.switch(Phase.WAIT)
            received = self.inputs.take()
            if self.input_gradients is not None:
                received.requires_grad_()
        self.clock.switch(Phase.DATA)
        batch = self.batches.take(micro_batch)
        self.clock.switch(Phase.FORWARD)
        if self.encode is not None:
            received = self.encode(batch)
        self.model.module.set_input_tensor(received)
        output = self.model(batch)
        self.clock.switch(Phase.WAIT)
        if self.inputs is not None:
            self.inputs.run_ahead()
        if self.outputs is not None:
            self.outputs.put(output.detach())
            # Only the output's graph is needed from now on; its memory is freed after the send.
            output.data = output.new_empty(1)
        if self.links.is_last:
            self.results.append(output.detach().clone() if trains else output)
        if trains:
            if self.input_gradients is None:
                received = None  # whose memory is free, but for what layers keep of it
            self.kept[micro_batch] = (received, output)

    def _backward(self, micro_batch: int) -> None:
        """Backward of a kept micro-batch, and start sending its input's gradient."""
        received, output = self.kept.pop(micro_batch)
        gradient = None
        if self.output_gradients is not None:
            self.clock.switch(Phase.WAIT)
            gradient = self.output_gradients.take()
        if output.requires_grad:
            self.clock.switch(Phase.BACKWARD)
            custom_backward(output, gradient)
        self.clock.switch(Phase.WAIT)
        if self.output_gradients is not None:
            self.output_gradients.run_ahead()
        if self.input_gradients is not None and received is not None:
            has_gradient = received.grad is not None
            self.input_gradients.put(received.grad if has_gradient else torch.zeros_like(received))


def _operations(graph: OperationGraph, links: PipelineLinks) -> StageOperations:
    """Operations of this stage, whose passes must be in micro-batch order, as neighbours send.

    Raises:
        ValueError: they are not, or the schedule has chunks or backwards in two parts.
    """
    require_in_order(graph)
    return graph.schedule.operations[links.rank]


def run_forward_backward(
    plan: Plan,
    model: torch.nn.Module,
    links: PipelineLinks,
    batches: MicroBatchStream,
    clock: PhaseClock,
    before_last_backward: Callable[[], None] | None = None,
    features: StepFeatures | None = None,
) -> list[torch.Tensor]:
    """Run forward and backward of one step's micro-batches in the planned schedule.

    Args:
        model: the stage inside Megatron-core's DistributedDataParallel.
        batches: this stage's micro-batches, in slot order.
        before_last_backward: called once, if there is a micro-batch.
        features: of encoders beside the pipeline, on the first stage; gradients go back into it.

    Returns:
        The summed loss of each micro-batch on the last stage, else an empty list. Gradients are
        those of the sum over micro-batches, in core's gradient buffers.
    """
    operations = _operations(planned_graph(links.size, len(batches)), links)
    run = _StageRun(plan, model, links, batches, clock, features)
    return run.run(operations, before_last_backward)


@torch.no_grad()
def run_forward(
    plan: Plan,
    model: torch.nn.Module,
    links: PipelineLinks,
    batches: MicroBatchStream,
    encode: Encode | None = None,
) -> list[torch.Tensor]:
    """Run forwards only; returns the head's outputs on the last stage, else an empty list.

    Args:
        encode: gives the first stage its micro-batches' features, where encoders stand beside the
            pipeline.
    """
    operations = _operations(operation_graph(forward_only, links.size, 1, len(batches)), links)
    own_encode = encode if links.is_first else None
    return _StageRun(plan, model, links, batches, PhaseClock(), encode=own_encode).run(operations)
