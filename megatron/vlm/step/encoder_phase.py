"""One step of data-parallel encoders.

Every rank encodes its share of the items before the first micro-batch; one exchange sends features
to the ranks that embed tokens, which wait only in their first micro-batch. A second exchange
returns gradients after the last backward. All ranks of an encoding group join both, even without
items.

Shapes: R rows of a pipeline's step (one per image or audio token and deepstack feature), P rows
received by this rank, Q rows of trained encoders, S rows made by this rank, E language hidden size.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import custom_backward
from megatron.core.utils import make_viewless_tensor

from megatron.vlm.backend import current_device
from megatron.vlm.inputs.batch import MicroBatch, MicroBatchStream
from megatron.vlm.inputs.encoder_share import EncoderPass, StepShares
from megatron.vlm.model.stage import VLMStage
from megatron.vlm.step.clock import Phase, PhaseClock
from megatron.vlm.step.data_parallel import DataParallel
from megatron.vlm.step.sharded import ShardedStage


class BegunExchange:
    """An all-to-all of rows in progress, without autograd.

    Args:
        sent: rows to every rank.
        received: rows from every rank.
    """

    def __init__(
        self, rows_SE: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> None:
        self._arriving = rows_SE.new_empty((sum(received), *rows_SE.shape[1:]))
        self._leaving: torch.Tensor | None = rows_SE.contiguous()  # held until sent
        self._work: dist.Work | None = dist.all_to_all_single(
            self._arriving, self._leaving, received, sent, group=group, async_op=True
        )

    def wait(self) -> torch.Tensor:
        """Wait and return the received rows, in rank order."""
        if self._work is not None:
            self._work.wait()
        self._work, self._leaving = None, None
        return self._arriving


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoders:
    stage: VLMStage  # with all units of all encoders
    data_parallel: DataParallel | None  # None if replicated and frozen
    group: dist.ProcessGroup
    trained: frozenset[str]  # encoders with trained weights, so that their features need a gradient
    outputs: Mapping[str, tuple[str, ...]]  # names by encoder: features, then deepstack features
    trained_features: frozenset[str]  # towers and outputs with gradients over the first cut
    items_per_pass: Mapping[str, int]  # maximum items per pass of each encoder

    @property
    def sharded_stage(self) -> ShardedStage | None:
        model = None if self.data_parallel is None else self.data_parallel.models[0]
        return model if isinstance(model, ShardedStage) else None

    def gather_weights(self, encodes: bool) -> AbstractContextManager[None]:
        """Gather sharded weights, kept on ranks that encode in validation; collective."""
        # Once, as ranks have different numbers of passes.
        stage = self.sharded_stage
        return nullcontext() if stage is None else stage.gather_weights(stays=encodes)

    @torch.no_grad()
    def encode(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Return features [K, E] of all items by output name; passes are sized as in training."""
        features = {}
        for name, encoder in self.stage.model_config.encoders.items():
            parts = batch.split_items(encoder.feature, self.items_per_pass[name])
            passes = [self.stage.encode(part, only=name) for part in parts]
            for output in self.outputs[name]:
                tensors = [outputs[output] for outputs in passes]
                features[output] = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        return features


@dataclass(frozen=True, slots=True)
class _FinishedPass:
    """A forward pass of a trained encoder; without rows if only other ranks have items for it."""

    encoder: str
    is_kept: bool
    rows: int = 0
    batch: MicroBatch | None = None  # micro-batch that backward runs again, unless kept
    output: torch.Tensor | None = None  # output without data, if kept


class _Features:
    """Features and gradients of a pipeline's step, on a rank that embeds tokens.

    Args:
        trained: shares of trained encoders; their gradients are numbered separately.
        outputs: names of each encoder's outputs.
    """

    def __init__(
        self,
        shares: StepShares,
        trained: StepShares,
        outputs: Mapping[str, tuple[str, ...]],
        micro_batches: int,
    ) -> None:
        self._route, self._outputs = shares.route, outputs
        # By micro-batch, rows of every encoder: in R, and in Q.
        self._slices = shares.slices(micro_batches)
        self._gradient_slices = trained.slices(micro_batches)
        self._rows_RE: torch.Tensor | None = None
        self._gradients_QE: torch.Tensor | None = None
        # Micro-batches left to take. Fake devices skip some: their rows stay to the end.
        self._remaining = len(self._slices)

    def receive(self, exchange: BegunExchange) -> None:
        """Wait for the features; called once."""
        # Every reference is dropped early, as `memory_of_encoders` counts these tensors.
        arrived_PE = exchange.wait()
        del exchange
        part_PE = _take_slices(arrived_PE, self._route.received_slices)
        del arrived_PE
        self._rows_RE = _gather_rows(part_PE, self._route.parts)
        self._gradients_QE = self._zero_gradients(self._rows_RE)

    def take(self, micro_batch: int) -> dict[str, torch.Tensor]:
        """Return a micro-batch's features by name, as views; the last call drops the rows."""
        assert self._rows_RE is not None, "features come once"
        views = self._views(self._rows_RE, self._slices[micro_batch])
        self._remaining -= 1
        if not self._remaining:
            self._rows_RE = None
        return {feature: view.detach() for feature, view in views.items()}

    def _views(self, rows_RE: torch.Tensor, slices: Mapping[str, slice]) -> dict[str, torch.Tensor]:
        """Return views [K, E] of the rows by output name."""
        views = dict[str, torch.Tensor]()
        for name, own in slices.items():
            names = self._outputs[name]
            # A token's deepstack rows follow its feature: [K, outputs, E].
            rows = rows_RE[own].unflatten(0, ((own.stop - own.start) // len(names), len(names)))
            views |= dict(zip(names, rows.unbind(1), strict=True))
        return views

    def store_gradients(self, micro_batch: int, message: Mapping[str, torch.Tensor]) -> None:
        """Store a micro-batch's gradients; features without any stay 0."""
        assert self._gradients_QE is not None, "after the micro-batch's forward"
        views = self._views(self._gradients_QE, self._gradient_slices[micro_batch])
        for feature in views.keys() & message.keys():
            views[feature].copy_(message[feature])

    def take_gradients(self, like: torch.Tensor) -> torch.Tensor:
        """Return gradients of trained features, [Q, E], and free them here."""
        gradients_QE, self._gradients_QE, self._rows_RE = self._gradients_QE, None, None
        return self._zero_gradients(like) if gradients_QE is None else gradients_QE

    def _zero_gradients(self, like: torch.Tensor) -> torch.Tensor:
        slices = [own for by_name in self._gradient_slices for own in by_name.values()]
        rows = sum(own.stop - own.start for own in slices)
        return like.new_zeros((rows, like.shape[1]))


class EncoderStep:
    """One step of a rank's encoders: features forward, gradients back."""

    def __init__(self, encoders: Encoders, batches: MicroBatchStream, clock: PhaseClock) -> None:
        assert batches.encoding is not None, "the step's shares are with its micro-batches"
        self._encoders, self._batches, self._clock = encoders, batches, clock
        self._shares = batches.encoding
        self._trained = self._shares.select_encoders(encoders.trained)
        self._finished: list[_FinishedPass] = []
        self._begun: list[BegunExchange] = []  # the exchange of features, until its end
        # On ranks that embed tokens; other ranks only send.
        self._features: _Features | None = None
        if self._shares.embeds_tokens:
            outputs = encoders.outputs
            self._features = _Features(self._shares, self._trained, outputs, len(batches))

    @property
    def trained_outputs(self) -> frozenset[str]:
        outputs = self._encoders.outputs
        names = (output for name in self._trained.items for output in outputs[name])
        return frozenset(names) & self._encoders.trained_features

    def encode(self) -> None:
        """Encode this rank's share and begin sending it, without waiting."""
        route = self._shares.route
        rows, shares = [self._no_rows()], self._shares
        for name in shares.items:
            for is_kept in (True, False):
                own = shares.passes_of(name, is_kept)
                rows += [self._encode(planned) for planned in own]
                # Join the weight exchanges of other ranks' further passes.
                for _ in range(shares.max_passes.get((name, is_kept), 0) - len(own)):
                    self._begin_pass(name, is_kept, backward=False)
                    if name in self._encoders.trained:
                        self._finished.append(_FinishedPass(name, is_kept))
        self._finish_pass()
        self._clock.switch(Phase.EXCHANGE)
        rows_SE = torch.cat(rows)
        rows.clear()  # freed before slices are copied
        leaving_SE = _take_slices(rows_SE, route.sent_slices)
        del rows_SE
        exchange = BegunExchange(leaving_SE, route.sent, route.received, self._encoders.group)
        self._begun.append(exchange)
        self._clock.switch(Phase.WAIT)

    def take(self, micro_batch: int) -> dict[str, torch.Tensor]:
        """Return a micro-batch's features; waits for the step's exchange."""
        self._clock.switch(Phase.EXCHANGE)
        assert self._features is not None, "tokens are embedded here"
        if self._begun:
            self._features.receive(self._begun.pop())
        return self._features.take(micro_batch)

    def free_sent(self) -> None:
        """Free sent features; waits for their exchange, done once a later part has an input."""
        if self._begun:
            self._begun.pop().wait()

    def store_gradients(self, micro_batch: int, message: Mapping[str, torch.Tensor]) -> None:
        if message:
            assert self._features is not None, "tokens are embedded here"
            self._features.store_gradients(micro_batch, message)

    def finish(self) -> None:
        """Send gradients back and run this rank's backward, after the stage's last operation."""
        if self._encoders.trained:
            self._backward()
        self._clock.switch(Phase.EXCHANGE)
        self.free_sent()
        self._features = None

    def _exchange_gradients(self) -> torch.Tensor:
        """Send gradients to their encoders; return the gradients of this rank's rows, [S, E]."""
        # A function of its own, so that its tensors are freed before the encoders' backward.
        route, back_PE = self._trained.route, self._no_rows()
        self._clock.switch(Phase.EXCHANGE)
        if self._features is not None:
            gradients_QE = self._features.take_gradients(like=back_PE)
            # This rank's part of the rows; tensor-parallel ranks have equal gradients.
            shard = parallel_state.get_tensor_model_parallel_rank()
            own_PE = gradients_QE.split(route.parts)[shard]
            back_PE = _restore_order(own_PE, route.received_slices)
            del gradients_QE, own_PE
        exchange = BegunExchange(back_PE, route.received, route.sent, self._encoders.group)
        del back_PE
        return _restore_order(exchange.wait(), route.sent_slices)

    def _backward(self) -> None:
        gradients_SE = self._exchange_gradients()
        start = 0
        self._finished.reverse()
        while self._finished:  # popped, so that every pass's graph is freed after its backward
            finished = self._finished.pop()
            own_SE = gradients_SE[start : start + finished.rows]
            start += finished.rows
            if finished.rows:
                self._clock.switch(Phase.ENCODER)
            self._begin_pass(finished.encoder, finished.is_kept, backward=True)
            if finished.output is not None:
                custom_backward(finished.output, own_SE)  # accepts an output with freed data
            elif finished.batch is not None:
                torch.autograd.backward(self._run(finished.encoder, finished.batch), own_SE)
        self._finish_pass()
        self._clock.switch(Phase.WAIT)

    def _begin_pass(self, encoder: str, is_kept: bool, *, backward: bool) -> None:
        """Begin a pass's weight exchanges, if sharded; a rank without items does only this."""
        if self._encoders.sharded_stage is not None:
            # A pass that is not kept runs its forward again in backward.
            self._encoders.sharded_stage.begin_pass(
                encoder, forward=not (backward and is_kept), backward=backward
            )

    def _finish_pass(self) -> None:
        if self._encoders.sharded_stage is not None:
            self._encoders.sharded_stage.finish_pass()

    def _encode(self, planned: EncoderPass) -> torch.Tensor:
        """Run a pass's forward and record it for backward; return its features without a graph."""
        self._clock.switch(Phase.DATA)
        batch = self._batches.take_pass(planned)
        self._clock.switch(Phase.ENCODER)
        name, is_kept = planned.encoder, planned.is_kept
        is_trained = name in self._encoders.trained
        self._begin_pass(name, is_kept, backward=False)
        with torch.set_grad_enabled(is_trained and is_kept):
            output = self._run(name, batch)
        rows_SE = output.detach()
        if is_trained and is_kept:
            output.data = output.new_empty(1)  # only its graph is needed
            self._finished.append(_FinishedPass(name, is_kept, len(rows_SE), output=output))
        elif is_trained:
            self._finished.append(_FinishedPass(name, is_kept, len(rows_SE), batch=batch))
        return rows_SE

    def _run(self, encoder: str, batch: MicroBatch) -> torch.Tensor:
        """Run an encoder; return the rows of all outputs, the rows of a token together."""
        outputs = self._encoders.stage.encode(batch, only=encoder)
        features = [outputs[name] for name in self._encoders.outputs[encoder]]
        if len(features) == 1:
            return features[0]
        # Not a view of the stacked tensor, which would keep its memory in a kept graph.
        rows_SE = torch.stack(features, 1).flatten(0, 1)
        return make_viewless_tensor(rows_SE, requires_grad=rows_SE.requires_grad, keep_graph=True)

    def _no_rows(self) -> torch.Tensor:
        stage = self._encoders.stage
        width = stage.model_config.language.hidden_size
        return torch.empty((0, width), dtype=stage.config.params_dtype, device=current_device())


def _take_slices(rows_RE: torch.Tensor, slices: Sequence[slice]) -> torch.Tensor:
    """Return all rows in the order of these slices."""
    return rows_RE if len(slices) < 2 else torch.cat([rows_RE[place] for place in slices])


def _restore_order(rows_RE: torch.Tensor, slices: Sequence[slice]) -> torch.Tensor:
    """Return the rows in the order before `_take_slices`."""
    if len(slices) < 2:
        return rows_RE
    restored_RE = torch.empty_like(rows_RE)
    sizes = [place.stop - place.start for place in slices]
    for place, part_RE in zip(slices, rows_RE.split(sizes), strict=True):
        restored_RE[place] = part_RE
    return restored_RE


def _gather_rows(part_PE: torch.Tensor, parts: Sequence[int]) -> torch.Tensor:
    """All-gather rows over tensor-parallel ranks with `parts` rows each; return [R, E]."""
    size = max(parts)
    if len(parts) == 1 or not size:
        return part_PE
    all_rows = part_PE.new_empty((len(parts) * size, part_PE.shape[1]))
    # NCCL's all-gather takes equal parts only.
    is_even = min(parts) == size
    padded = part_PE if is_even else F.pad(part_PE, (0, 0, 0, size - len(part_PE)))
    group = parallel_state.get_tensor_model_parallel_group()
    dist.all_gather_into_tensor(all_rows, padded, group=group)
    if is_even:
        return all_rows
    del padded
    return torch.cat([all_rows[i * size :][:rows] for i, rows in enumerate(parts)])
