"""Execution of a stage's planned operations, for one or several chunks.

A stage runs the list of `omnibal.pipeline.schedules` that the planner simulates. Megatron-core's
`variable_seq_lengths` sends each shape first, synchronises the device and reads the shape on the
host. Here the plan gives every stage all shapes: receives are posted while the stage computes, and
a send waits only for the previous send. `stage_messages.py` has the proof that no stage deadlocks.

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
from megatron.vlm.step.stage_messages import Content, StageMessage, step_messages
from omnibal.job.plan import Plan
from omnibal.model.units import HEAD
from omnibal.pipeline.operation_graph import operation_graph
from omnibal.pipeline.schedules import FORWARD_ONLY, ChunkPass, Pass, ScheduleRule
from omnibal.pipeline.stage_units import Stage

Encode = Callable[[MicroBatch], dict[str, torch.Tensor]]  # returns features by name
# Called with the next pass (forward, backward, or both of one micro-batch) and its chunk.
BeginPass = Callable[[Literal["forward", "backward", "both"], int], None]


class _HeldBatches:
    """Micro-batches of a step, read once and held until all chunks took them."""

    def __init__(self, batches: MicroBatchStream, units: Sequence[Stage]) -> None:
        self._batches, self._read = batches, 0
        # By chunk, units of all later chunks: they still need their fields of a micro-batch.
        self._later = [
            Stage(units=tuple(span for stage in units[chunk + 1 :] for span in stage.units))
            for chunk in range(len(units))
        ]
        self._held: dict[int, MicroBatch] = {}

    def take(self, micro_batch: int, chunk: int) -> MicroBatch:
        """Return a micro-batch for its next chunk, reading earlier micro-batches first."""
        while self._read <= micro_batch:
            self._held[self._read] = self._batches.take(self._read)
            self._read += 1
        batch, later = self._held.pop(micro_batch), self._later[chunk]
        if later.units:
            self._held[micro_batch] = batch.for_units(later)
        return batch


class _Mail:
    """Messages of one step, between stages and between this stage's chunks."""

    def __init__(
        self, plan: Plan, rule: ScheduleRule, links: PipelineLinks, batches: MicroBatchStream
    ) -> None:
        graph = operation_graph(rule, links.size, links.schedule.chunks, len(batches))
        self.links, self.operations = links, graph.schedule.operations[links.rank]
        self._plan, self._shapes = plan, batches.shapes
        # Towers with gradients over each cut; cuts without any are absent.
        cuts = range(links.last_part)
        self.trained = {cut: towers for cut in cuts if (towers := plan.trained_towers(cut))}
        step = step_messages(graph, frozenset(self.trained))
        # Messages between chunks of this stage, by content, cut and micro-batch.
        self._local: dict[tuple[Content, int, int], dict[str, torch.Tensor]] = {}
        self._inboxes: dict[tuple[int, Content], Inbox] = {}
        self._outboxes: dict[tuple[int, Content], Outbox] = {}
        dtype = parameter_dtype(plan.precision)
        for channel, messages in step.channels.items():
            source, target, group = channel.source, channel.target, links.group(channel)
            if target == links.rank:
                shapes = [self._find_shapes(channel.content, message) for message in messages]
                inbox = links.make_inbox(messages, shapes, dtype, links.ranks[source], group)
                self._inboxes[source, channel.content] = inbox
            if source == links.rank:
                outbox = Outbox(links.ranks[target], group, waits=step.sends_wait)
                self._outboxes[target, channel.content] = outbox

    def _find_shapes(self, content: Content, message: StageMessage) -> MessageShapes:
        shapes = boundary_shapes(self._plan, message.cut, self._shapes[message.micro_batch])
        if content is Content.ACTIVATIONS:
            return shapes
        trained = self.trained[message.cut]
        return {name: shape for name, shape in shapes.items() if name in trained}

    def take(
        self, content: Content, cut: int, micro_batch: int, position: int
    ) -> dict[str, torch.Tensor]:
        """Return a message over a cut, for the operation at `position`; waits for it."""
        source = self.links.stage_of(cut if content is Content.ACTIVATIONS else cut + 1)
        if source == self.links.rank:
            return self._local.pop((content, cut, micro_batch))
        return self._inboxes[source, content].take(cut, micro_batch, position)

    def send(
        self, content: Content, cut: int, micro_batch: int, message: dict[str, torch.Tensor]
    ) -> None:
        target = self.links.stage_of(cut + 1 if content is Content.ACTIVATIONS else cut)
        if target == self.links.rank:
            self._local[content, cut, micro_batch] = message
        else:
            self._outboxes[target, content].send(message)

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
        # Positions of every chunk's last input gradients and last weight gradients. Both are empty
        # in validation.
        self.last_backwards = self._find_last(Pass.BACKWARD, Pass.BACKWARD_INPUT)
        self.last_weights = self._find_last(Pass.BACKWARD, Pass.BACKWARD_WEIGHT)
        self.batches = _HeldBatches(batches, [plan.stages[part] for part in self.links.parts])
        self.encoders = encoders
        # By chunk, towers of its inputs that need a gradient.
        trains_features = frozenset() if encoders is None else encoders.trained_outputs
        self.trained_inputs = [
            (mail.trained.get(part - 1, frozenset()) if part else trains_features)
            if self.last_backwards
            else frozenset()
            for part in self.links.parts
        ]
        # By chunk and micro-batch: inputs with gradients to send back, and outputs with a graph.
        self.kept: dict[tuple[int, int], tuple[ByTower, ByTower]] = {}
        self.late: dict[tuple[int, int], list[LateProduct]] = {}
        self.results: dict[int, torch.Tensor] = {}

    def _find_last(self, *kinds: Pass) -> dict[int, int]:
        """Return the position of every chunk's last operation of some kinds."""
        operations = enumerate(self.operations)
        return {op.chunk: place for place, op in operations if op.kind in kinds}

    def run(self, before_last_backward: Callable[[int], None] | None = None) -> list[torch.Tensor]:
        """Run the operations; return head outputs per micro-batch, empty without the last part."""
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
                # After a forward of the same micro-batch, one pass of both has begun already.
                if not _follows_directly(before, operation):
                    self.begin_pass("backward", operation.chunk)
                self._backward(operation, position)
                if operation.kind is Pass.BACKWARD:
                    self._backward_weight(operation, position)
            else:
                is_both = _follows_directly(operation, after)
                self.begin_pass("both" if is_both else "forward", operation.chunk)
                self._forward(operation, position)
            before = operation
        assert not self.late, "the second part of a backward is missing"
        self.clock.switch(Phase.WAIT)
        self.mail.flush()
        return [self.results[micro_batch] for micro_batch in sorted(self.results)]

    def _forward(self, operation: ChunkPass, position: int) -> None:
        """Run a micro-batch through a chunk and start sending its output."""
        part, micro_batch = self.links.parts[operation.chunk], operation.micro_batch
        if part == 0:
            received = {} if self.encoders is None else self.encoders.take(micro_batch)
        else:
            self.clock.switch(Phase.WAIT)
            received = self.mail.take(Content.ACTIVATIONS, part - 1, micro_batch, position)
            if self.encoders is not None:
                # An input of a later part: the first part has all ranks' features by now.
                self.encoders.free_sent()
        for name in self.trained_inputs[operation.chunk] & received.keys():
            received[name].requires_grad_()
        self.clock.switch(Phase.DATA)
        batch = self.batches.take(micro_batch, operation.chunk)
        self.clock.switch(Phase.FORWARD)
        if self.encode is not None and part == 0:
            received = self.encode(batch)
        model, trains = self.models[operation.chunk], bool(self.last_backwards)
        model.module.set_input_tensor(received)
        output = model(batch)
        self.clock.switch(Phase.WAIT)
        # After the launch: a pending NCCL receive may block the loading of a kernel.
        self.mail.post_receives(position)
        wanted = self.trained_inputs[operation.chunk]
        if part == self.links.last_part:
            self.results[micro_batch] = output.detach().clone() if trains else output
            outputs = {HEAD: output}
        else:
            # Tensors that this part only forwards are not in its graph.
            passed_on = {name for name, tensor in output.items() if received.get(name) is tensor}
            outputs = {name: tensor for name, tensor in output.items() if name not in passed_on}
            wanted = wanted - passed_on
            message = {name: tensor.detach() for name, tensor in output.items()}
            self.mail.send(Content.ACTIVATIONS, part, micro_batch, message)
            # Backward needs the outputs' graph only; their memory is freed after the send.
            for tensor in outputs.values():
                tensor.data = tensor.new_empty(1)
        if trains:
            # Other inputs are freed, unless layers keep them.
            inputs = {name: tensor for name, tensor in received.items() if name in wanted}
            if part == 0:
                # The graph needs only the shape of inserted features.
                for feature in inputs.values():
                    feature.data = feature.new_empty(1).expand(feature.shape)
            self.kept[operation.chunk, micro_batch] = inputs, outputs

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
        # Inputs of a pack without items have no gradient, but the previous stage waits for one.
        sent = {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in received.items()
        }
        passed_on = gradients.keys() - outputs.keys()
        sent |= {name: gradients[name] for name in passed_on}
        # In the order that the receiver expects.
        message = {name: sent[name] for name in tensor_names(self.plan.model, sent)}
        if part:
            self.mail.send(Content.GRADIENTS, part - 1, micro_batch, message)
        elif self.encoders is not None:
            self.encoders.store_gradients(micro_batch, message)

    def _backward_weight(self, operation: ChunkPass, position: int) -> None:
        deferred = self.models[operation.chunk].module.deferred
        if deferred is not None:
            self.clock.switch(Phase.BACKWARD_WEIGHT)
            late = self.late.pop((operation.chunk, operation.micro_batch))
            deferred.add(late, is_last=self.last_weights[operation.chunk] == position)
            self.clock.switch(Phase.WAIT)


def _follows_directly(before: ChunkPass | None, after: ChunkPass | None) -> bool:
    """Return whether `before` is a forward and `after` is its backward."""
    if before is None or after is None or before.kind is not Pass.FORWARD:
        return False
    return after == ChunkPass(Pass.BACKWARD, before.micro_batch, before.chunk)


def run_backward(outputs: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Run backward of a stage's outputs, which may share parts of their graphs.

    Args:
        outputs: (output, gradient) pairs, a loss with None.
    """
    # As core's `custom_backward`, call the engine directly: `torch.autograd.backward` refuses
    # outputs with freed data. Last forward nodes run first, so the last tower's weight gradients
    # come first.
    Variable._execution_engine.run_backward(
        tensors=tuple(tensor for tensor, _ in outputs),
        grad_tensors=tuple(
            torch.ones_like(tensor) if gradient is None else gradient
            for tensor, gradient in outputs
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
    begin_pass: BeginPass,
    before_last_backward: Callable[[int], None] | None = None,
    encoders: EncoderStep | None = None,
) -> list[torch.Tensor]:
    """Run a step's forwards and backwards in the planned schedule.

    Args:
        models: the stage's chunks, wrapped for data parallelism.
        before_last_backward: called with each chunk's number before its last backward.
        encoders: a step of data-parallel encoders, which the caller must finish.

    Returns:
        Summed loss per micro-batch on the stage with the last part, else empty. Gradient buffers
        have the sum over micro-batches.
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
    begin_pass: BeginPass,
    encode: Encode | None = None,
) -> list[torch.Tensor]:
    """Run forwards only; return head outputs per micro-batch, empty without the last part."""
    mail = _Mail(plan, FORWARD_ONLY[links.schedule.placement], links, batches)
    run = _StageRun(plan, models, mail, batches, PhaseClock(), begin_pass, encode=encode)
    return run.run()
