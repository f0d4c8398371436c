"""Execution of a stage's planned operations, for one or several chunks.

A stage runs the list of `omnibal.pipeline.schedules` that the planner simulates. Megatron-core's
`variable_seq_lengths` sends each shape first, synchronises the device and reads the shape on the
host. Here the plan gives every stage all counts: receives are posted while the stage computes, and
a send waits only for the one before it. `messages.py` has the proof that no stage deadlocks.

A message carries one micro-batch over one cut: a tensor per encoder before the language embed, or
one after it, and deepstack features (`boundary_shapes`). Tensors that a stage only forwards are not
in its graph. Empty tensors are not sent; tensors between two chunks of a stage stay local.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch.autograd import Variable

from megatron.vlm.inputs.batch import MicroBatch, MicroBatchStream
from megatron.vlm.model.configs import parameter_dtype
from megatron.vlm.model.deferred_weights import LateProduct
from megatron.vlm.model.stage import ByTower, boundary_shapes, tensor_names
from megatron.vlm.step.clock import Phase, PhaseClock
from megatron.vlm.step.encoder_phase import EncoderStep
from megatron.vlm.step.links import Inbox, MessageShapes, Outbox, PipelineLinks
from megatron.vlm.step.stage_messages import Content, Message, step_messages
from omnibal.job.plan import Plan
from omnibal.model.units import HEAD
from omnibal.pipeline.operation_graph import operation_graph
from omnibal.pipeline.schedules import FORWARD_ONLY, ChunkPass, Pass, ScheduleRule
from omnibal.pipeline.stage_units import Stage

Encode = Callable[[MicroBatch], dict[str, torch.Tensor]]


BeginPass = Callable[[Literal["forward", "backward", "both"], int], None]
"""Callback with the next pass (forward, backward, or both of one micro-batch) and its chunk."""


def _whole_stage(_: str, __: int) -> None:
    """Do nothing: a replicated stage is ready for any pass."""


class _HeldBatches:
    """Micro-batches of a step, read once and held until all chunks took them."""

    def __init__(self, batches: MicroBatchStream, units: Sequence[Stage]) -> None:
        self._batches, self._read = batches, 0
        later = [units[chunk + 1 :] for chunk in range(len(units))]
        self._left = [
            Stage(units=tuple(span for stage in stages for span in stage.units)) for stages in later
        ]
        self._held: dict[int, MicroBatch] = {}

    def take(self, micro_batch: int, chunk: int) -> MicroBatch:
        """Return a micro-batch for its next chunk, reading earlier micro-batches first."""
        while self._read <= micro_batch:
            self._held[self._read] = self._batches.take(self._read)
            self._read += 1
        batch, left = self._held.pop(micro_batch), self._left[chunk]
        if left.units:
            self._held[micro_batch] = batch.for_units(left)
        return batch


class _Mail:
    """Messages of one step, between stages and between this stage's chunks."""

    def __init__(
        self, plan: Plan, rule: ScheduleRule, links: PipelineLinks, batches: MicroBatchStream
    ) -> None:
        graph = operation_graph(rule, links.size, links.schedule.chunks, len(batches))
        self.links, self.operations = links, graph.schedule.operations[links.rank]
        self._plan, self._shapes = plan, batches.shapes
        cuts = range(links.last_part)
        self.trained = {cut: towers for cut in cuts if (towers := plan.trained_towers(cut))}
        """Towers with gradients over each cut; only cuts that have any."""
        step = step_messages(graph, frozenset(self.trained))
        self._staying: dict[tuple[Content, int, int], dict[str, torch.Tensor]] = {}
        self._inboxes: dict[tuple[int, Content], Inbox] = {}
        self._outboxes: dict[tuple[int, Content], Outbox] = {}
        dtype = parameter_dtype(plan.precision)
        for channel, messages in step.channels.items():
            if channel.target == links.rank:
                shapes = [self._shapes_of(channel.content, message) for message in messages]
                inbox = links.inbox(channel, messages, shapes, dtype)
                self._inboxes[channel.source, channel.content] = inbox
            if channel.source == links.rank:
                outbox = links.outbox(channel, waits=step.sends_wait)
                self._outboxes[channel.target, channel.content] = outbox

    def _shapes_of(self, content: Content, message: Message) -> MessageShapes:
        shapes = boundary_shapes(self._plan, message.cut, self._shapes[message.micro_batch])
        if content is Content.ACTIVATIONS:
            return shapes
        trained = self.trained[message.cut]
        return {name: shape for name, shape in shapes.items() if name in trained}

    def take(
        self, content: Content, cut: int, micro_batch: int, position: int
    ) -> dict[str, torch.Tensor]:
        """Wait for a message over a cut, needed by the operation at `position`."""
        source = self.links.stage_of(cut if content is Content.ACTIVATIONS else cut + 1)
        if source == self.links.rank:
            return self._staying.pop((content, cut, micro_batch))
        return self._inboxes[source, content].take(cut, micro_batch, position)

    def put(
        self, content: Content, cut: int, micro_batch: int, message: dict[str, torch.Tensor]
    ) -> None:
        target = self.links.stage_of(cut + 1 if content is Content.ACTIVATIONS else cut)
        if target == self.links.rank:
            self._staying[content, cut, micro_batch] = message
        else:
            self._outboxes[target, content].put(message)

    def post_receives(self, position: int) -> None:
        """Post receives allowed after the launch of the operation at `position`."""
        for inbox in self._inboxes.values():
            inbox.post_receives(position)

    def flush(self) -> None:
        for outbox in self._outboxes.values():
            outbox.flush()


class _StageRun:
    """One step of one stage, with the graphs kept for backward."""

    def __init__(
        self,
        plan: Plan,
        models: Sequence[Any],
        mail: _Mail,
        batches: MicroBatchStream,
        clock: PhaseClock,
        begin_pass: BeginPass,
        encoders: EncoderStep | None = None,
        encode: Encode | None = None,
    ) -> None:
        self.plan, self.models, self.mail, self.clock = plan, models, mail, clock
        self.begin_pass, self.encode = begin_pass, encode
        self.links, self.operations = mail.links, mail.operations
        self.last_backwards = self._last(Pass.BACKWARD, Pass.BACKWARD_INPUT)
        """Position of every chunk's last (first-part) backward, empty in validation."""
        self.last_weights = self._last(Pass.BACKWARD, Pass.BACKWARD_WEIGHT)
        self.batches = _HeldBatches(batches, [plan.stages[part] for part in self.links.parts])
        self.encoders = encoders
        trains_features = frozenset() if encoders is None else encoders.trained
        self.trained_inputs = [
            (mail.trained.get(part - 1, frozenset()) if part else trains_features)
            if self.last_backwards
            else frozenset()
            for part in self.links.parts
        ]
        """Towers of each chunk's inputs that need a gradient."""
        self.kept: dict[tuple[int, int], tuple[ByTower, ByTower]] = {}
        """A micro-batch's inputs with gradients to send back, and outputs of a chunk's graph."""
        self.late: dict[tuple[int, int], list[LateProduct]] = {}
        self.results: dict[int, torch.Tensor] = {}

    def _last(self, *kinds: Pass) -> dict[int, int]:
        """Return the position of every chunk's last operation of some kinds."""
        operations = enumerate(self.operations)
        return {op.chunk: place for place, op in operations if op.kind in kinds}

    def run(self, before_last_backward: Callable[[int], None] | None = None) -> list[torch.Tensor]:
        """Run the operations; return the last part's output of every micro-batch."""
        before: ChunkPass | None = None
        if self.encoders is not None:
            self.encoders.encode()
        following = zip_longest(self.operations, self.operations[1:])
        for position, (operation, after) in enumerate(following):
            if operation.kind is Pass.BACKWARD_WEIGHT:
                self._backward_weight(operation, position)
                self.mail.post_receives(position)
            elif operation.kind is not Pass.FORWARD:
                is_last = self.last_backwards[operation.chunk] == position
                if is_last and before_last_backward is not None:
                    before_last_backward(operation.chunk)
                if not _is_at_once(before, operation):
                    self.begin_pass("backward", operation.chunk)
                self._backward(operation, position)
                if operation.kind is Pass.BACKWARD:
                    self._backward_weight(operation, position)
            else:
                at_once = _is_at_once(operation, after)
                self.begin_pass("both" if at_once else "forward", operation.chunk)
                self._forward(operation, position)
            before = operation
        assert not self.late, "the second part of a backward is missing"
        self.clock.switch(Phase.WAIT)
        self.mail.flush()
        return [self.results[micro_batch] for micro_batch in sorted(self.results)]

    def _forward(self, operation: ChunkPass, position: int) -> None:
        """Run a micro-batch through a chunk and start sending its output."""
        part, micro_batch = self.links.parts[operation.chunk], operation.micro_batch
        received = self._receive(part, operation, position)
        self.clock.switch(Phase.DATA)
        batch = self.batches.take(micro_batch, operation.chunk)
        self.clock.switch(Phase.FORWARD)
        if self.encode is not None and part == 0:
            received = self.encode(batch)
        model, trains = self.models[operation.chunk], bool(self.last_backwards)
        model.module.set_input_tensor(received)
        output = model(batch)
        self.clock.switch(Phase.WAIT)
        self.mail.post_receives(position)
        wanted = self.trained_inputs[operation.chunk]
        if part == self.links.last_part:
            self.results[micro_batch] = output.detach().clone() if trains else output
            made = {HEAD: output}
        else:
            passed_on = {name for name, tensor in output.items() if received.get(name) is tensor}
            made = {name: tensor for name, tensor in output.items() if name not in passed_on}
            wanted = wanted - passed_on
            message = {name: tensor.detach() for name, tensor in output.items()}
            self.mail.put(Content.ACTIVATIONS, part, micro_batch, message)
            # Backward needs the outputs' graph only; their memory is freed after the send.
            for tensor in made.values():
                tensor.data = tensor.new_empty(1)
        if trains:
            # Other inputs are freed, unless layers keep them.
            inputs = {name: tensor for name, tensor in received.items() if name in wanted}
            if part == 0:
                # The graph needs only the shape of inserted features.
                for feature in inputs.values():
                    feature.data = feature.new_empty(1).expand(feature.shape)
            self.kept[operation.chunk, micro_batch] = inputs, made

    def _receive(self, part: int, operation: ChunkPass, position: int) -> dict[str, torch.Tensor]:
        """Receive a micro-batch's inputs if there is a previous part."""
        micro_batch = operation.micro_batch
        if part == 0:
            received = {} if self.encoders is None else self.encoders.take(micro_batch)
        else:
            self.clock.switch(Phase.WAIT)
            received = self.mail.take(Content.ACTIVATIONS, part - 1, micro_batch, position)
            if self.encoders is not None:
                self.encoders.free_sent()
        for name in self.trained_inputs[operation.chunk] & received.keys():
            received[name].requires_grad_()
        return received

    def _backward(self, operation: ChunkPass, position: int) -> None:
        """Run a micro-batch's backward and start sending its input gradients."""
        part, micro_batch = self.links.parts[operation.chunk], operation.micro_batch
        received, outputs = self.kept.pop((operation.chunk, micro_batch))
        gradients: ByTower = {}
        if part in self.mail.trained:
            self.clock.switch(Phase.WAIT)
            gradients = self.mail.take(Content.GRADIENTS, part, micro_batch, position)
        trained = [name for name, output in outputs.items() if output.requires_grad]
        self.clock.switch(Phase.BACKWARD)
        if trained:
            run_backward([(outputs[name], gradients.get(name)) for name in trained])
        self.clock.switch(Phase.WAIT)
        self.mail.post_receives(position)
        deferred = self.models[operation.chunk].module.deferred
        if deferred is not None:
            self.late[operation.chunk, micro_batch] = deferred.take()
        if not self.trained_inputs[operation.chunk]:
            return
        # Inputs of an empty pack have no gradient.
        sent = {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in received.items()
        }
        passed_on = gradients.keys() - outputs.keys()
        sent |= {name: gradients[name] for name in passed_on}
        # In sending order.
        message = {name: sent[name] for name in tensor_names(self.plan.model, sent)}
        if part:
            self.mail.put(Content.GRADIENTS, part - 1, micro_batch, message)
        elif self.encoders is not None:
            self.encoders.put(micro_batch, message)

    def _backward_weight(self, operation: ChunkPass, position: int) -> None:
        deferred = self.models[operation.chunk].module.deferred
        if deferred is not None:
            self.clock.switch(Phase.BACKWARD_WEIGHT)
            late = self.late.pop((operation.chunk, operation.micro_batch))
            deferred.add(late, is_last=self.last_weights[operation.chunk] == position)
            self.clock.switch(Phase.WAIT)


def _is_at_once(before: ChunkPass | None, after: ChunkPass | None) -> bool:
    """Return whether the second operation is the first's backward, right after it."""
    if before is None or after is None or before.kind is not Pass.FORWARD:
        return False
    return after == ChunkPass(Pass.BACKWARD, before.micro_batch, before.chunk)


def run_backward(outputs: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Run backward of a stage's outputs, which may share parts of their graphs.

    As core's `custom_backward`, call autograd's engine directly, which accepts outputs with freed
    data. The engine runs the latest forward nodes first, so the last tower's weight gradients come
    first.

    Args:
        outputs: (output, gradient) pairs. A loss has None.
    """
    tensors, gradients = zip(*outputs, strict=True)
    defaults = (torch.ones_like(tensor) for tensor in tensors)
    Variable._execution_engine.run_backward(
        tensors=tensors,
        grad_tensors=tuple(
            ones_like if gradient is None else gradient
            for ones_like, gradient in zip(defaults, gradients, strict=True)
        ),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def run_forward_backward(
    plan: Plan,
    models: Sequence[Any],
    links: PipelineLinks,
    batches: MicroBatchStream,
    clock: PhaseClock,
    before_last_backward: Callable[[int], None] | None = None,
    encoders: EncoderStep | None = None,
    begin_pass: BeginPass = _whole_stage,
) -> list[torch.Tensor]:
    """Run a step's forwards and backwards in the planned schedule.

    Args:
        models: the stage's chunks, wrapped for data parallelism.
        before_last_backward: called with each chunk before its last backward.
        encoders: data-parallel encoders. The caller must finish their step.

    Returns:
        Summed loss per micro-batch on the last part, else empty. Core's gradient buffers have the
        sum over micro-batches.
    """
    mail = _Mail(plan, links.schedule.rule, links, batches)
    run = _StageRun(plan, models, mail, batches, clock, begin_pass, encoders)
    return run.run(before_last_backward)


@torch.no_grad()
def run_forward(
    plan: Plan,
    models: Sequence[Any],
    links: PipelineLinks,
    batches: MicroBatchStream,
    encode: Encode | None = None,
    begin_pass: BeginPass = _whole_stage,
) -> list[torch.Tensor]:
    """Run forwards only; return the head's outputs on the last part, else an empty list."""
    mail = _Mail(plan, FORWARD_ONLY[links.schedule.placement], links, batches)
    run = _StageRun(plan, models, mail, batches, PhaseClock(), begin_pass, encode=encode)
    return run.run()
