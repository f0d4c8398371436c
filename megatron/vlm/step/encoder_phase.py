"""One step of data-parallel encoders.

Every rank encodes its share of the items before the first micro-batch; one exchange sends features
to the ranks that embed tokens, which wait only in their first micro-batch. A second exchange
returns gradients after the last backward. All ranks of an encoding group join both, even without
items.

Shapes: R rows of a pipeline's step (one per image or audio token and deepstack feature), P rows
received by this rank, Q rows of trained encoders, S rows made by this rank, E language hidden size.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
    """An all-to-all of rows in progress, `sent` to and `received` from each rank; no autograd.

    Ranks of the group begin exchanges in the same order. Each ends once all ranks began it.
    """

    def __init__(
        self, rows_SE: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> None:
        self._arriving = rows_SE.new_empty((sum(received), *rows_SE.shape[1:]))
        # Held until sent.
        self._leaving: torch.Tensor | None = rows_SE.contiguous()
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
    """A rank's encoders and their process group."""

    stage: VLMStage
    data_parallel: DataParallel | None
    """Data-parallel wrapper, or None if replicated and frozen."""
    group: dist.ProcessGroup
    trained: frozenset[str]
    """Encoders with trained weights, so that their features need a gradient."""
    made: Mapping[str, tuple[str, ...]]
    """Names of each encoder's outputs: its features, then deepstack features."""
    trained_features: frozenset[str]
    items_per_pass: Mapping[str, int]
    """Maximum items per pass of each encoder."""

    @property
    def sharded(self) -> ShardedStage | None:
        """Return the sharded stage if encoder weights are sharded."""
        model = None if self.data_parallel is None else self.data_parallel.models[0]
        return model if isinstance(model, ShardedStage) else None

    @contextmanager
    def gather_weights(self, encodes: bool) -> Iterator[None]:
        """Gather all weights if this rank encodes, as item counts differ in validation;
        collective."""
        with nullcontext() if self.sharded is None else self.sharded.gather_weights(stays=encodes):
            yield

    @torch.no_grad()
    def encode(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Return features of all items by encoder, without an exchange, in passes as in
        training."""
        features = {}
        for name, encoder in self.stage.model_config.encoders.items():
            parts = batch.split_items(encoder.feature, self.items_per_pass[name])
            passes = [self.stage.encode(part, only=name) for part in parts]
            for made in self.made[name]:
                of_passes = [outputs[made] for outputs in passes]
                features[made] = torch.cat(of_passes) if len(passes) > 1 else of_passes[0]
        return features


@dataclass(frozen=True, slots=True)
class _Made:
    """A finished pass of a trained encoder; without rows if only other ranks run it."""

    encoder: str
    is_kept: bool
    rows: int = 0
    batch: MicroBatch | None = None
    """Micro-batch that backward runs again, unless kept."""
    output: torch.Tensor | None = None
    """Output without data, if kept."""


class _Features:
    """Features and gradients of a pipeline's step, on a rank that embeds tokens.

    Args:
        trained: shares of trained encoders; their gradients are numbered separately.
        made: names of each encoder's outputs.
        coming: exchange that brings the features.
    """

    def __init__(
        self,
        shares: StepShares,
        trained: StepShares,
        made: Mapping[str, tuple[str, ...]],
        micro_batches: int,
        coming: BegunExchange,
    ) -> None:
        self._route, self._made = shares.route, made
        self._slices = shares.slices(micro_batches)
        self._gradient_slices = trained.slices(micro_batches)
        self._coming: BegunExchange | None = coming
        self._rows_RE: torch.Tensor | None = None
        self._gradients_QE: torch.Tensor | None = None
        # Fake devices skip micro-batches; their rows stay.
        self._left = len(self._slices)

    def take(self, micro_batch: int) -> dict[str, torch.Tensor]:
        """Return a micro-batch's features by name, as views. The last call drops the rows."""
        views = self._views(self._wait_rows(), self._slices[micro_batch])
        self._left -= 1
        if not self._left:
            self._rows_RE = None
        return {feature: view.detach() for feature, view in views.items()}

    def _views(self, rows_RE: torch.Tensor, slices: Mapping[str, slice]) -> dict[str, torch.Tensor]:
        """Return views of the rows by feature; an item's deepstack rows follow its own."""
        views = dict[str, torch.Tensor]()
        for name, own in slices.items():
            names = self._made[name]
            rows = rows_RE[own].unflatten(0, ((own.stop - own.start) // len(names), len(names)))
            views |= dict(zip(names, rows.unbind(1), strict=True))
        return views

    def _wait_rows(self) -> torch.Tensor:
        if self._rows_RE is None:
            assert self._coming is not None, "features come once"
            # `memory_of_encoders` counts these tensors: drop references early.
            coming, self._coming = self._coming, None
            arrived_PE = coming.wait()
            del coming
            part_PE = _take_slices(arrived_PE, self._route.received_slices)
            del arrived_PE
            self._rows_RE = _gather_rows(part_PE, self._route.parts)
            self._gradients_QE = self._no_gradients(self._rows_RE)
        return self._rows_RE

    def put(self, micro_batch: int, message: Mapping[str, torch.Tensor]) -> None:
        """Store a micro-batch's gradients; features without any stay 0."""
        assert self._gradients_QE is not None, "after the micro-batch's forward"
        views = self._views(self._gradients_QE, self._gradient_slices[micro_batch])
        for feature in views.keys() & message.keys():
            views[feature].copy_(message[feature])

    def take_gradients(self, like: torch.Tensor) -> torch.Tensor:
        """Return gradients of trained features, [Q, E], like `like`, and free them here."""
        gradients_QE, self._gradients_QE, self._rows_RE = self._gradients_QE, None, None
        return self._no_gradients(like) if gradients_QE is None else gradients_QE

    def _no_gradients(self, like: torch.Tensor) -> torch.Tensor:
        slices = [own for of_pack in self._gradient_slices for own in of_pack.values()]
        rows = sum(own.stop - own.start for own in slices)
        return like.new_zeros((rows, like.shape[1]))

    def finish(self) -> None:
        """Wait for the features of a pipeline without micro-batches."""
        self._rows_RE = None
        if self._coming is not None:
            self._coming.wait()
            self._coming = None


class EncoderStep:
    """One step of a rank's encoders: features forward, gradients back."""

    def __init__(self, encoders: Encoders, batches: MicroBatchStream, clock: PhaseClock) -> None:
        assert batches.encoding is not None, "the step's shares are with its micro-batches"
        self._encoders, self._batches, self._clock = encoders, batches, clock
        self._shares = batches.encoding
        self._trained = self._shares.select_encoders(encoders.trained)
        self._made: list[_Made] = []
        # Set after encoding on ranks that embed tokens; other ranks only send.
        self._features: _Features | None = None
        self._leaving: BegunExchange | None = None

    @property
    def trained(self) -> frozenset[str]:
        made = (feature for name in self._trained.items for feature in self._encoders.made[name])
        return frozenset(made) & self._encoders.trained_features

    def encode(self) -> None:
        """Encode this rank's share and begin sending it, without waiting."""
        route = self._shares.route
        leaving_SE = _take_slices(self._encode_all(), route.sent_slices)
        exchange = BegunExchange(leaving_SE, route.sent, route.received, self._encoders.group)
        if self._shares.embeds_tokens:
            self._features = _Features(
                self._shares, self._trained, self._encoders.made, len(self._batches), exchange
            )
        else:
            self._leaving = exchange
        self._clock.switch(Phase.WAIT)

    def take(self, micro_batch: int) -> dict[str, torch.Tensor]:
        """Return a micro-batch's features; waits for the step's exchange."""
        self._clock.switch(Phase.EXCHANGE)
        assert self._features is not None, "where tokens are embedded"
        return self._features.take(micro_batch)

    def free_sent(self) -> None:
        """Free sent features, once a later part has an input."""
        if self._leaving is not None:
            self._leaving.wait()
            self._leaving = None

    def put(self, micro_batch: int, message: Mapping[str, torch.Tensor]) -> None:
        if message:
            assert self._features is not None, "where tokens are embedded"
            self._features.put(micro_batch, message)

    def finish(self) -> None:
        """Send gradients back and run this rank's backward, after the stage's last operation."""
        if self._encoders.trained:
            self._backward()
        self._clock.switch(Phase.EXCHANGE)
        self.free_sent()
        if self._features is not None:
            self._features.finish()

    def _exchange_gradients(self) -> torch.Tensor:
        """Exchange gradients; return the gradients of this rank's features, [S, E]."""
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
        self._made.reverse()
        while self._made:
            made = self._made.pop()
            self._differentiate(made, gradients_SE[start : start + made.rows])
            start += made.rows
        self._finish()
        self._clock.switch(Phase.WAIT)

    def _encode_all(self) -> torch.Tensor:
        """Run all passes; return their rows in order, [S, E]."""
        rows, shares = [self._no_rows()], self._shares
        for name in shares.items:
            for is_kept in (True, False):
                own = shares.passes_of(name, is_kept)
                rows += [self._encode(planned) for planned in own]
                # Join exchanges of other ranks' extra passes.
                for _ in range(shares.max_passes.get((name, is_kept), 0) - len(own)):
                    self._begin(name, is_kept, backward=False)
                    if name in self._encoders.trained:
                        self._made.append(_Made(name, is_kept))
        self._finish()
        self._clock.switch(Phase.EXCHANGE)
        return torch.cat(rows)

    def _begin(self, encoder: str, is_kept: bool, *, backward: bool) -> None:
        """Begin the weight exchanges of a pass, if sharded; other ranks' passes need no more."""
        if self._encoders.sharded is not None:
            self._encoders.sharded.begin_pass(
                encoder, forward=not (backward and is_kept), backward=backward
            )

    def _finish(self) -> None:
        if self._encoders.sharded is not None:
            self._encoders.sharded.finish_pass()

    def _encode(self, planned: EncoderPass) -> torch.Tensor:
        """Run a pass; return its features without a graph."""
        self._clock.switch(Phase.DATA)
        batch = self._batches.take_pass(planned)
        self._clock.switch(Phase.ENCODER)
        name, is_kept = planned.encoder, planned.is_kept
        is_trained = name in self._encoders.trained
        self._begin(name, is_kept, backward=False)
        with torch.set_grad_enabled(is_trained and is_kept):
            output = self._run(name, batch)
        rows_SE = output.detach()
        if is_trained and is_kept:
            output.data = output.new_empty(1)  # only its graph is needed
            self._made.append(_Made(name, is_kept, len(rows_SE), output=output))
        elif is_trained:
            self._made.append(_Made(name, is_kept, len(rows_SE), batch=batch))
        return rows_SE

    def _differentiate(self, made: _Made, gradients_SE: torch.Tensor) -> None:
        if made.rows:
            self._clock.switch(Phase.ENCODER)
        self._begin(made.encoder, made.is_kept, backward=True)
        if made.output is not None:
            custom_backward(made.output, gradients_SE)
        elif made.batch is not None:
            torch.autograd.backward(self._run(made.encoder, made.batch), gradients_SE)

    def _run(self, encoder: str, batch: MicroBatch) -> torch.Tensor:
        made = self._encoders.stage.encode(batch, only=encoder)
        features = [made[name] for name in self._encoders.made[encoder]]
        if len(features) == 1:
            return features[0]
        # Rows of an item are adjacent. Not a view, which would keep memory in a kept graph.
        rows_SE = torch.stack(features, 1).flatten(0, 1)
        return make_viewless_tensor(rows_SE, requires_grad=rows_SE.requires_grad, keep_graph=True)

    def _no_rows(self) -> torch.Tensor:
        stage = self._encoders.stage
        width = stage.model_config.language.hidden_size
        return torch.empty((0, width), dtype=stage.config.params_dtype, device=current_device())


def _take_slices(rows_RE: torch.Tensor, slices: Sequence[slice]) -> torch.Tensor:
    """Return the rows of these slices, concatenated: all rows in another order."""
    return rows_RE if len(slices) < 2 else torch.cat([rows_RE[place] for place in slices])


def _restore_order(rows_RE: torch.Tensor, slices: Sequence[slice]) -> torch.Tensor:
    if len(slices) < 2:
        return rows_RE
    restored_RE = torch.empty_like(rows_RE)
    sizes = [place.stop - place.start for place in slices]
    for place, part_RE in zip(slices, rows_RE.split(sizes), strict=True):
        restored_RE[place] = part_RE
    return restored_RE


def _gather_rows(part_PE: torch.Tensor, parts: Sequence[int]) -> torch.Tensor:
    """All-gather a pipeline's rows over tensor-parallel ranks, [R, E]."""
    most = max(parts)
    if len(parts) == 1 or not most:
        return part_PE
    every = part_PE.new_empty((len(parts) * most, part_PE.shape[1]))
    is_even = min(parts) == most
    padded = part_PE if is_even else F.pad(part_PE, (0, 0, 0, most - len(part_PE)))
    group = parallel_state.get_tensor_model_parallel_group()
    dist.all_gather_into_tensor(every, padded, group=group)
    if is_even:
        return every
    del padded
    return torch.cat([every[i * most :][:rows] for i, rows in enumerate(parts)])
