"""A step of data-parallel encoders.

Before the first micro-batch every rank encodes its share of the step's items, and one exchange
brings the features to the ranks that embed tokens. After the last backward another exchange brings
their gradients back. Sizes are those of the plan. All ranks of an encoding group join in both
exchanges, those with nothing to encode too. Beginning the first one waits for nothing: ranks that
embed tokens wait when their first micro-batch needs it.

Shapes: R rows of a pipeline's step (one an image or audio token, and one for each of its deepstack
features), P of them that this rank receives, Q of encoders that are trained, S rows that this rank
makes, E language hidden size.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from megatron.vlm.model.exchange import BegunExchange, exchange_without_gradient
from megatron.vlm.model.stage import VLMStage
from megatron.vlm.step.clock import Phase, PhaseClock
from megatron.vlm.step.data_parallel import DataParallel
from megatron.vlm.step.sharded import ShardedStage


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoders:
    """The encoders of a rank, and the ranks that it encodes with."""

    stage: VLMStage
    data_parallel: DataParallel | None
    """How ranks hold them; None where all have them whole and nothing of them is trained."""
    group: dist.ProcessGroup
    trained: frozenset[str]
    """Encoders of which anything is trained: their features need a gradient."""
    made: Mapping[str, tuple[str, ...]]
    """Names of what each encoder makes of an item: its own features, and deepstack features."""
    trained_features: frozenset[str]
    """Names of those that need a gradient."""
    items_per_pass: Mapping[str, int]
    """Items that run through each encoder at once, at most."""

    @property
    def sharded(self) -> ShardedStage | None:
        """Their exchanges, where ranks divide their weights."""
        model = None if self.data_parallel is None else self.data_parallel.models[0]
        return model if isinstance(model, ShardedStage) else None

    @contextmanager
    def whole(self, encodes: bool) -> Iterator[None]:
        """Have all weights whole meanwhile where this rank encodes, as for held-out data, of which
        ranks encode different numbers of items; collective over the ranks that divide them."""
        if self.sharded is None:
            yield
            return
        with self.sharded.whole(stays=encodes):
            yield

    @torch.no_grad()
    def encode(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Features of all items of a micro-batch by encoder, without an exchange.

        They run in passes as those of training, which is what there is memory for.
        """
        features = {}
        for name, encoder in self.stage.model_config.encoders.items():
            parts = batch.split_items(encoder.feature, self.items_per_pass[name])
            passes = [self.stage.encode(part, only=name) for part in parts]
            for made in self.made[name]:
                of_passes = [one[made] for one in passes]
                features[made] = torch.cat(of_passes) if len(passes) > 1 else of_passes[0]
        return features


@dataclass(frozen=True, slots=True)
class _Made:
    """A pass of a trained encoder that has run; of one that is kept, its output without data."""

    planned: EncoderPass
    rows: int
    batch: MicroBatch | None = None
    output: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Joined:
    """A pass of a trained encoder that other ranks have made."""

    encoder: str
    is_kept: bool


class _Features:
    """Features of a pipeline's step, and their gradients, on a rank that embeds tokens.

    Args:
        trained: shares of encoders that are trained; their gradients have rows of their own.
        made: names of what each encoder makes.
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
        # On a fake device there are slices of micro-batches that do not run, whose rows stay.
        self._left = len(self._slices)

    def take(self, micro_batch: int) -> dict[str, torch.Tensor]:
        """A micro-batch's features by encoder, and its deepstack features by name; they share the
        rows' memory, which has no other name when all micro-batches have theirs."""
        rows_RE = self._arrived()
        found = dict[str, torch.Tensor]()
        for name, own in self._slices[micro_batch].items():
            names = self._made[name]
            parts = _parts(rows_RE[own], len(names))
            found |= {each: part.detach() for each, part in zip(names, parts, strict=True)}
        self._left -= 1
        if not self._left:
            self._rows_RE = None
        return found

    def _arrived(self) -> torch.Tensor:
        if self._rows_RE is None:
            assert self._coming is not None, "features come once"
            # What the plan counts is alive at once (`memory_of_encoders`): nothing has a name for
            # longer than it is needed.
            coming, self._coming = self._coming, None
            arrived_PE = coming.arrived()
            del coming
            part_PE = _sliced(arrived_PE, self._route.received_slices)
            del arrived_PE
            self._rows_RE = _gathered(part_PE, self._route.parts)
            self._gradients_QE = self._no_gradients(self._rows_RE)
        return self._rows_RE

    def put(self, micro_batch: int, message: Mapping[str, torch.Tensor]) -> None:
        """Take a micro-batch's gradients; those of features without any stay 0."""
        assert self._gradients_QE is not None, "after the micro-batch's forward"
        for name, own in self._gradient_slices[micro_batch].items():
            names = self._made[name]
            parts = _parts(self._gradients_QE[own], len(names))
            for each, part in zip(names, parts, strict=True):
                if each in message:
                    part.copy_(message[each])

    def take_gradients(self, like: torch.Tensor) -> torch.Tensor:
        """Gradients of the features of trained encoders, [Q, E], of the type and width of `like`;
        nothing is left here, so that the exchange of gradients has the memory."""
        gradients_QE, self._gradients_QE, self._rows_RE = self._gradients_QE, None, None
        return self._no_gradients(like) if gradients_QE is None else gradients_QE

    def _no_gradients(self, like: torch.Tensor) -> torch.Tensor:
        rows = sum(own.stop - own.start for one in self._gradient_slices for own in one.values())
        return like.new_zeros((rows, like.shape[1]))

    def finish(self) -> None:
        """Wait for what comes to a pipeline that runs no micro-batch."""
        self._rows_RE = None
        if self._coming is not None:
            self._coming.arrived()
            self._coming = None


class EncoderStep:
    """One step of the encoders on a rank: features there, gradients back.

    A stage encodes before its operations, and takes features and puts their gradients where a later
    stage has messages of its neighbours.
    """

    def __init__(self, encoders: Encoders, batches: MicroBatchStream, clock: PhaseClock) -> None:
        assert batches.encoding is not None, "the step's shares are with its micro-batches"
        self._encoders, self._batches, self._clock = encoders, batches, clock
        self._shares = batches.encoding
        self._trained = self._shares.only(encoders.trained)
        self._made: list[_Made | _Joined] = []
        # On a rank that embeds tokens, when it has encoded; on others the exchange alone.
        self._features: _Features | None = None
        self._leaving: BegunExchange | None = None

    @property
    def trained(self) -> frozenset[str]:
        """Names of features that need a gradient."""
        made = (each for name in self._trained.items for each in self._encoders.made[name])
        return frozenset(made) & self._encoders.trained_features

    def encode(self) -> None:
        """Encode this rank's share, and begin to send it; waits for nothing."""
        ranks, route = self._shares.ranks, self._shares.route
        leaving_SE = _sliced(self._encode_all(), route.sent_slices)
        exchange = BegunExchange(leaving_SE, route.sent, route.received, self._encoders.group)
        if ranks.number in ranks.embedding_numbers:
            self._features = _Features(
                self._shares, self._trained, self._encoders.made, len(self._batches), exchange
            )
        else:
            self._leaving = exchange
        self._clock.switch(Phase.WAIT)

    def take(self, micro_batch: int) -> dict[str, torch.Tensor]:
        """Take a micro-batch's features; waits for all of the step."""
        self._clock.switch(Phase.EXCHANGE)
        assert self._features is not None, "where tokens are embedded"
        return self._features.take(micro_batch)

    def let_go(self) -> None:
        """Let go of features that have left, once a later part has an input."""
        if self._leaving is not None:
            self._leaving.arrived()
            self._leaving = None

    def put(self, micro_batch: int, message: Mapping[str, torch.Tensor]) -> None:
        """Put the gradients of a micro-batch's features."""
        if message:
            assert self._features is not None, "where tokens are embedded"
            self._features.put(micro_batch, message)

    def finish(self) -> None:
        """Bring gradients back and run this rank's backward, after the stage's last operation."""
        if self._encoders.trained:
            self._backward()
        self._clock.switch(Phase.EXCHANGE)
        self.let_go()
        if self._features is not None:
            self._features.finish()

    def _exchange_gradients(self) -> torch.Tensor:
        """Wait for gradients of the features that this rank has made, [S, E]."""
        route, back_PE = self._trained.route, self._no_rows()
        self._clock.switch(Phase.EXCHANGE)
        if self._features is not None:
            gradients_QE = self._features.take_gradients(like=back_PE)
            # This rank's part of all rows; other tensor-parallel ranks have the same gradients.
            shard = parallel_state.get_tensor_model_parallel_rank()
            own_PE = gradients_QE.split(route.parts)[shard]
            back_PE = _restored(own_PE, route.received_slices)
            del gradients_QE, own_PE
        group = self._encoders.group
        returned_SE = exchange_without_gradient(back_PE, route.received, route.sent, group)
        del back_PE
        return _restored(returned_SE, route.sent_slices)

    def _backward(self) -> None:
        """Run this rank's backward on the gradients of the features that it has made."""
        gradients_SE = self._exchange_gradients()
        start = 0
        self._made.reverse()
        while self._made:
            made = self._made.pop()
            if isinstance(made, _Joined):
                self._begin(made.encoder, made.is_kept, backward=True)
                continue
            self._differentiate(made, gradients_SE[start : start + made.rows])
            start += made.rows
        self._finish()
        self._clock.switch(Phase.WAIT)

    def _encode_all(self) -> torch.Tensor:
        """Rows of all passes of this rank, in their order, [S, E]."""
        rows, shares = [self._no_rows()], self._shares
        for name in shares.items:
            for is_kept in (True, False):
                own = shares.passes_of(name, is_kept)
                rows += [self._encode(planned) for planned in own]
                # Join in the exchanges of passes that others make.
                for _ in range(shares.lockstep_passes(name, is_kept) - len(own)):
                    self._begin(name, is_kept, backward=False)
                    if name in self._encoders.trained:
                        self._made.append(_Joined(name, is_kept))
        self._finish()
        self._clock.switch(Phase.EXCHANGE)
        return torch.cat(rows)

    def _begin(self, encoder: str, is_kept: bool, *, backward: bool) -> None:
        """Begin the exchanges of a pass, where ranks divide weights; one that others make and this
        rank does not is begun and no more."""
        if self._encoders.sharded is not None:
            self._encoders.sharded.begin_pass(
                encoder, forward=not (backward and is_kept), backward=backward
            )

    def _finish(self) -> None:
        if self._encoders.sharded is not None:
            self._encoders.sharded.finish_pass()

    def _encode(self, planned: EncoderPass) -> torch.Tensor:
        """Run a pass; returns its features, without a graph."""
        self._clock.switch(Phase.DATA)
        batch = self._batches.take_pass(planned)
        self._clock.switch(Phase.ENCODER)
        is_trained = planned.encoder in self._encoders.trained
        self._begin(planned.encoder, planned.is_kept, backward=False)
        with torch.set_grad_enabled(is_trained and planned.is_kept):
            output = self._run(planned, batch)
        rows_SE = output.detach()
        if is_trained and planned.is_kept:
            output.data = output.new_empty(1)  # only its graph is needed
            self._made.append(_Made(planned, len(rows_SE), output=output))
        elif is_trained:
            self._made.append(_Made(planned, len(rows_SE), batch=batch))
        return rows_SE

    def _differentiate(self, made: _Made, gradients_SE: torch.Tensor) -> None:
        self._clock.switch(Phase.ENCODER)
        self._begin(made.planned.encoder, made.planned.is_kept, backward=True)
        if made.output is not None:
            custom_backward(made.output, gradients_SE)
            return
        assert made.batch is not None, "what is not kept runs again"
        torch.autograd.backward(self._run(made.planned, made.batch), gradients_SE)

    def _run(self, planned: EncoderPass, batch: MicroBatch) -> torch.Tensor:
        made = self._encoders.stage.encode(batch, only=planned.encoder)
        features = [made[name] for name in self._encoders.made[planned.encoder]]
        if len(features) == 1:
            return features[0]
        # An item's rows stand together, so that rows of any items are a run; they are no view, as
        # its memory would stay with the graph of a pass that is kept.
        rows_SE = torch.stack(features, 1).flatten(0, 1)
        return make_viewless_tensor(rows_SE, requires_grad=rows_SE.requires_grad, keep_graph=True)

    def _no_rows(self) -> torch.Tensor:
        stage = self._encoders.stage
        width = stage.model_config.language.hidden_size
        return torch.empty((0, width), dtype=stage.config.params_dtype, device=current_device())


def _parts(rows_RE: torch.Tensor, features: int) -> Sequence[torch.Tensor]:
    """Rows of items with so many features each, by feature; they share the rows' memory."""
    sizes = len(rows_RE) // features, features
    return rows_RE.unflatten(0, sizes).unbind(1) if features > 1 else [rows_RE]


def _sliced(rows_RE: torch.Tensor, slices: Sequence[slice]) -> torch.Tensor:
    """The rows of these slices, one after the other; they are all rows in another order."""
    return rows_RE if len(slices) < 2 else torch.cat([rows_RE[one] for one in slices])


def _restored(rows_RE: torch.Tensor, slices: Sequence[slice]) -> torch.Tensor:
    """The rows that `_sliced` gave these from."""
    if len(slices) < 2:
        return rows_RE
    restored_RE = torch.empty_like(rows_RE)
    sizes = [one.stop - one.start for one in slices]
    for one, part_RE in zip(slices, rows_RE.split(sizes), strict=True):
        restored_RE[one] = part_RE
    return restored_RE


def _gathered(part_PE: torch.Tensor, parts: Sequence[int]) -> torch.Tensor:
    """All rows of a pipeline from the parts of its tensor-parallel ranks, [R, E]."""
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
