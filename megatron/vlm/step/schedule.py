"""Runs a pipeline schedule whose tensor shapes every stage knows, so only their values are sent.

A stage walks its list of operations (`omnibal.pipeline.schedules`), the one that the planner
simulates.

Stock Megatron-core with `variable_seq_lengths` sends each shape ahead of its tensor, synchronises
the device and reads the shape on the host, for every transfer. Here the plan gives each
micro-batch's item and token counts to all stages, so a receive is posted while the stage still
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

A message is of one micro-batch over one cut: a tensor for every encoder before the language embed,
one after it, and deepstack features (`boundary_shapes`), sent one after the other. What a stage
only passes on is no part of its graph. A tensor that carries nothing (of an encoder, no item in the
pack) is not sent.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.autograd import Variable

from megatron.vlm.backend import COLLECTIVE_TIMEOUT, current_device
from megatron.vlm.inputs.batch import MicroBatch, MicroBatchStream
from megatron.vlm.model.configs import parameter_dtype
from megatron.vlm.model.deferred_weights import LateProduct
from megatron.vlm.model.stage import ByTower, boundary_shapes, tensor_names
from megatron.vlm.step.clock import Phase, PhaseClock
from megatron.vlm.step.encoder_phase import FeatureInbox, FeatureOutbox, StepFeatures
from omnibal.job.plan import Plan
from omnibal.model.units import HEAD
from omnibal.pipeline.operation_graph import (
    OperationGraph,
    operation_graph,
)
from omnibal.pipeline.schedules import Operation, Pass, StageOperations, forward_only

MessageShapes = Mapping[str, tuple[int, ...]]
"""Shapes of a message's tensors by tower, in the order in which they are sent."""

Encode = Callable[[MicroBatch], dict[str, torch.Tensor]]
"""Function that gives a micro-batch's features by encoder."""


_OF_INPUTS = (Pass.BACKWARD, Pass.BACKWARD_INPUT)
"""Passes that give gradients to the stage before."""


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
        shapes: Sequence[MessageShapes],
        dtype: torch.dtype,
        source_rank: int,
        group: dist.ProcessGroup,
    ) -> "Inbox":
        """Make an inbox for the messages that a neighbour sends during a step."""
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
    """Messages of known shapes from one neighbour, in order.

    Each is asked for when it is taken; after `run_ahead`, when the one before it is.
    """

    def __init__(
        self,
        shapes: Sequence[MessageShapes],
        dtype: torch.dtype,
        source_rank: int,
        group: dist.ProcessGroup,
    ) -> None:
        self._shapes = iter(shapes)
        self._dtype = dtype
        self._source_rank = source_rank
        self._group = group
        self._coming: tuple[dict[str, torch.Tensor], list[dist.Work | None]] | None = None
        self._runs_ahead = False

    def _post(self) -> None:
        shapes = next(self._shapes, None)
        if shapes is None:
            self._coming = None
            return
        tensors = {
            name: torch.empty(shape, dtype=self._dtype, device=current_device())
            for name, shape in shapes.items()
        }
        self._coming = (tensors, [self._begin(t) for t in tensors.values() if t.numel()])

    def run_ahead(self) -> None:
        """Post receives one ahead from now on; call it once the work on the first is launched."""
        if not self._runs_ahead:
            self._runs_ahead = True
            self._post()

    def _begin(self, tensor: torch.Tensor) -> dist.Work | None:
        return dist.irecv(tensor, self._source_rank, group=self._group)

    def take(self) -> dict[str, torch.Tensor]:
        """Wait for the next message; returns its tensors by tower."""
        if not self._runs_ahead:
            self._post()
        assert self._coming is not None, "more is taken than was announced"
        tensors, works = self._coming
        for work in works:
            if work is not None:
                work.wait()
        if self._runs_ahead:
            self._post()
        return tensors


class Outbox:
    """Messages to one neighbour; each is kept until it has left."""

    def __init__(self, target_rank: int, group: dist.ProcessGroup) -> None:
        self._target_rank = target_rank
        self._group = group
        self._leaving: list[tuple[torch.Tensor, dist.Work]] = []

    def put(self, message: ByTower) -> None:
        """Start sending tensors in their order; waits only for the message before them."""
        self.flush()
        for tensor in message.values():
            if tensor.numel():
                tensor = tensor.contiguous()
                work = dist.isend(tensor, self._target_rank, group=self._group)
                self._leaving.append((tensor, work))

    def flush(self) -> None:
        """Wait until everything has left."""
        for _, work in self._leaving:
            work.wait()
        self._leaving.clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """What a stage keeps of a micro-batch for its backward, by tower."""

    received: ByTower
    """Inputs whose gradients are sent back."""
    outputs: ByTower
    """Outputs of this stage's graph, in model order."""


BeginPass = Callable[[Literal["forward", "backward", "both"]], None]
"""Function that is told what comes: a forward, a backward, or both of a micro-batch at once."""


def _whole_stage(_: str) -> None:
    """Nothing: a stage that is whole is ready for any pass."""


class _StageRun:
    """One step of one stage: its neighbours' tensors, and the graphs kept for backward."""

    def __init__(
        self,
        plan: Plan,
        model: torch.nn.Module,
        links: PipelineLinks,
        batches: MicroBatchStream,
        clock: PhaseClock,
        begin_pass: BeginPass,
        features: StepFeatures | None = None,
        encode: Encode | None = None,
    ) -> None:
        self.features, self.encode, self.begin_pass = features, encode, begin_pass
        self.plan, self.model, self.links, self.clock = plan, model, links, clock
        self.batches = batches
        self.dtype = parameter_dtype(plan.precision)
        self.kept: dict[int, _Kept] = {}
        self.late: dict[int, list[LateProduct]] = {}
        """Of every micro-batch between the two parts of its backward, products for weights."""
        self.results: list[torch.Tensor] = []
        self.inputs: Inbox | FeatureInbox | None = None
        self.outputs: Outbox | None = None
        self.output_gradients: Inbox | None = None
        self.input_gradients: Outbox | FeatureOutbox | None = None
        self.trained_inputs: frozenset[str] = frozenset()
        """Towers of which a gradient of what comes in is wanted where it came from."""
        if not links.is_first:
            shapes = self._shapes(links.rank - 1)
            self.inputs = self._inbox(shapes, links.previous_rank, links.activations)
        elif features is not None:
            self.inputs = features.inbox()
        if not links.is_last:
            self.outputs = Outbox(links.next_rank, links.activations)

    def _shapes(self, cut: int) -> list[MessageShapes]:
        """Shapes of the messages sent over a cut, in micro-batch order."""
        return [boundary_shapes(self.plan, cut, shape) for shape in self.batches.shapes]

    def _inbox(
        self, shapes: Sequence[MessageShapes], source_rank: int, group: dist.ProcessGroup
    ) -> Inbox:
        return self.links.inbox(shapes, self.dtype, source_rank, group)

    def _open_gradients(self) -> None:
        """Open the inbox and outbox of gradients, in training and where units up to here train."""
        links = self.links
        trained = frozenset() if links.is_last else self.plan.trained_towers(links.rank)
        if trained:
            shapes = [
                {name: shape for name, shape in message.items() if name in trained}
                for message in self._shapes(links.rank)
            ]
            self.output_gradients = self._inbox(shapes, links.next_rank, links.gradients)
        if not links.is_first:
            self.trained_inputs = self.plan.trained_towers(links.rank - 1)
        if self.trained_inputs:
            self.input_gradients = Outbox(links.previous_rank, links.gradients)
        if self.features is not None:
            self.trained_inputs = self.features.trained
            self.input_gradients = self.features.outbox()

    def run(
        self, operations: StageOperations, before_last_backward: Callable[[], None] | None = None
    ) -> list[torch.Tensor]:
        """Run the stage's list; returns the last stage's output of every micro-batch."""
        backwards = sum(operation.kind in _OF_INPUTS for operation in operations)
        trains = backwards > 0
        if trains:
            self._open_gradients()
        before: Operation | None = None
        for operation, after in zip_longest(operations, operations[1:]):
            if operation.kind is Pass.BACKWARD_WEIGHT:
                self._backward_weight(operation.micro_batch, is_last=after is None)
            elif operation.kind in _OF_INPUTS:
                backwards -= 1
                if backwards == 0 and before_last_backward is not None:
                    before_last_backward()
                if not _is_at_once(before, operation):
                    self.begin_pass("backward")
                self._backward(operation.micro_batch)
            else:
                self.begin_pass("both" if _is_at_once(operation, after) else "forward")
                self._forward(operation.micro_batch, trains)
            before = operation
        assert not self.late, "a backward has no second part"
        self.clock.switch(Phase.WAIT)
        for box in (self.outputs, self.input_gradients):
            if box is not None:
                box.flush()
        return self.results

    def _forward(self, micro_batch: int, trains: bool) -> None:
        """Run the next micro-batch and start sending its output."""
        received = self._receive()
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
        if self.links.is_last:
            self.results.append(output.detach().clone() if trains else output)
            made, wanted = {HEAD: output}, self.trained_inputs
        else:
            passed_on = {name for name, tensor in output.items() if received.get(name) is tensor}
            made = {name: tensor for name, tensor in output.items() if name not in passed_on}
            wanted = self.trained_inputs - passed_on
            self._send(output, made)
        if trains:
            # The memory of other inputs is free, but for what layers keep of it.
            inputs = {name: tensor for name, tensor in received.items() if name in wanted}
            self.kept[micro_batch] = _Kept(received=inputs, outputs=made)

    def _receive(self) -> dict[str, torch.Tensor]:
        """Wait for the next micro-batch's inputs, if there is a stage before this one."""
        if self.inputs is None:
            return {}
        self.clock.switch(Phase.WAIT)
        received = self.inputs.take()
        for name in self.trained_inputs & received.keys():
            received[name].requires_grad_()
        return received

    def _send(self, output: ByTower, made: ByTower) -> None:
        """Start sending what the stage made and what it passes on."""
        assert self.outputs is not None
        self.outputs.put({name: tensor.detach() for name, tensor in output.items()})
        # Only the outputs' graph is needed from now on; their memory is freed after the send.
        for tensor in made.values():
            tensor.data = tensor.new_empty(1)

    def _backward(self, micro_batch: int) -> None:
        """Backward of a kept micro-batch, and start sending its inputs' gradients."""
        kept = self.kept.pop(micro_batch)
        gradients: ByTower = {}
        if self.output_gradients is not None:
            self.clock.switch(Phase.WAIT)
            gradients = self.output_gradients.take()
        trained = [name for name, output in kept.outputs.items() if output.requires_grad]
        if trained:
            self.clock.switch(Phase.BACKWARD)
            run_backward([(kept.outputs[name], gradients.get(name)) for name in trained])
        self.clock.switch(Phase.WAIT)
        if self.output_gradients is not None:
            self.output_gradients.run_ahead()
        if self.input_gradients is not None:
            sent = {name: _gradient_of(tensor) for name, tensor in kept.received.items()}
            passed_on = gradients.keys() - kept.outputs.keys()
            sent |= {name: gradients[name] for name in passed_on}
            # In the order in which they were sent.
            names = tensor_names(self.plan.model, sent)
            self.input_gradients.put({name: sent[name] for name in names})
        deferred = self.model.module.deferred
        if deferred is not None:
            self.late[micro_batch] = deferred.take()

    def _backward_weight(self, micro_batch: int, *, is_last: bool) -> None:
        """Run the products that the first part of a micro-batch's backward has left."""
        self.clock.switch(Phase.BACKWARD_WEIGHT)
        self.model.module.deferred.add(self.late.pop(micro_batch), is_last=is_last)


def _is_at_once(one: Operation | None, after: Operation | None) -> bool:
    """Whether one is a forward and the other its backward, right after it."""
    if one is None or after is None or one.micro_batch != after.micro_batch:
        return False
    return (one.kind, after.kind) == (Pass.FORWARD, Pass.BACKWARD)


def run_backward(outputs: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Backward of outputs of one stage, which may have parts of their graphs in common.

    As core's `custom_backward` for one output, it calls autograd's engine, which does not mind that
    the outputs' memory is gone. Of what is ready, the engine takes first what forward came to last:
    the last tower, of which weights' gradients are expected first.

    Args:
        outputs: each with its gradient; None for a loss.
    """
    tensors, gradients = zip(*outputs, strict=True)
    ones = (torch.ones_like(tensor) for tensor in tensors)
    Variable._execution_engine.run_backward(
        tensors=tensors,
        grad_tensors=tuple(
            one if gradient is None else gradient
            for one, gradient in zip(ones, gradients, strict=True)
        ),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _gradient_of(received: torch.Tensor) -> torch.Tensor:
    """Gradient of what was received: zeros where nothing came of it, as in an empty pack."""
    return torch.zeros_like(received) if received.grad is None else received.grad


def _operations(graph: OperationGraph, links: PipelineLinks) -> StageOperations:
    """Operations of this stage, whose passes must be in micro-batch order, as neighbours send.

    Raises:
        ValueError: they are not, or the stage has several chunks.
    """
    operations = graph.schedule.operations[links.rank]
    in_order = graph.schedule.chunks == 1
    for kinds in ((Pass.FORWARD,), _OF_INPUTS):
        numbers = [one.micro_batch for one in operations if one.kind in kinds]
        in_order = in_order and numbers == sorted(numbers)
    if not in_order:
        raise ValueError(
            f"{graph.schedule.name}: the trainer needs a schedule of one chunk a stage, whose "
            "forwards and backwards each run in micro-batch order"
        )
    return operations


def run_forward_backward(
    plan: Plan,
    model: torch.nn.Module,
    links: PipelineLinks,
    batches: MicroBatchStream,
    clock: PhaseClock,
    before_last_backward: Callable[[], None] | None = None,
    features: StepFeatures | None = None,
    begin_pass: BeginPass = _whole_stage,
) -> list[torch.Tensor]:
    """Run forward and backward of one step's micro-batches in the planned schedule.

    Args:
        model: the stage as what holds it with other data-parallel ranks runs it.
        batches: this stage's micro-batches, in slot order.
        before_last_backward: called once, if there is a micro-batch.
        features: of data-parallel encoders, on the first stage; gradients go back into it.
        begin_pass: called before every pass.

    Returns:
        The summed loss of each micro-batch on the last stage, else an empty list. Gradients are
        those of the sum over micro-batches, in core's gradient buffers.
    """
    schedule = plan.schedule
    graph = operation_graph(schedule.rule, links.size, schedule.chunks, len(batches))
    operations = _operations(graph, links)
    run = _StageRun(plan, model, links, batches, clock, begin_pass, features)
    return run.run(operations, before_last_backward)


@torch.no_grad()
def run_forward(
    plan: Plan,
    model: torch.nn.Module,
    links: PipelineLinks,
    batches: MicroBatchStream,
    encode: Encode | None = None,
    begin_pass: BeginPass = _whole_stage,
) -> list[torch.Tensor]:
    """Run forwards only; returns the head's outputs on the last stage, else an empty list.

    Args:
        encode: gives the first stage its micro-batches' features, where encoders are
            data-parallel.
        begin_pass: called before every pass.
    """
    operations = _operations(operation_graph(forward_only, links.size, 1, len(batches)), links)
    own_encode = encode if links.is_first else None
    run = _StageRun(plan, model, links, batches, PhaseClock(), begin_pass, encode=own_encode)
    return run.run(operations)
