"""Gathering and reduction of sharded weights while a stage computes (ZeRO-3).

All ranks run a pass's exchanges in one fixed order: a unit's weights are gathered before its
forward and again before its backward, one unit ahead, and its gradients are reduced afterwards.
Computation only triggers them. A rank without input for a unit, such as a pack without images,
joins that unit's exchanges at its next unit or at the end of the forward, before it waits for
another stage; in backward its parameters have zero gradients, which trigger them.

Gradients are summed over ranks and micro-batches in float32; replicas of a shard are summed once a
step. Data-parallel encoders run other passes between forward and backward: each is then a pass.

Shapes: P values of a unit with padding, Q values of this rank's shard.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.vlm.model.sharded_weights import FlatWeights, ShardedUnit, ShardedWeights
from megatron.vlm.model.stage import VLMStage


class FlatGradients:
    """Gradients of sharded parameters: full for a pass, this rank's shard for a step."""

    def __init__(self, weights: FlatWeights) -> None:
        self.weights = weights
        # This rank's shard of the sum over micro-batches and ranks.
        self.own_Q = torch.zeros_like(weights.own_Q, dtype=torch.float32)
        # Storage is resized on use under the same tensors, as core's products store a reference to
        # `main_grad` in the forward.
        size = weights.part_size * weights.groups.shards.size()
        self._whole_P = self.own_Q.new_empty(size)
        self._sum_Q: torch.Tensor | None = None
        self._is_open = False
        views = weights.views(self._whole_P)
        for parameter, view in zip(weights.parameters, views, strict=True):
            slots: Any = parameter
            slots.main_grad, slots.grad_added_to_main_grad = view, False
        self._close()

    def open(self) -> None:
        """Allocate zeroed full gradients for a pass, unless it has them already."""
        if self._is_open:
            return
        self._is_open = True
        self._whole_P.untyped_storage().resize_(self._whole_P.nbytes)
        self._whole_P.zero_()
        for parameter in self.weights.parameters:
            slots: Any = parameter
            slots.grad_added_to_main_grad = False

    def _close(self) -> None:
        self._is_open = False
        self._whole_P.untyped_storage().resize_(0)

    def take(self, parameter: Any) -> None:
        """Add autograd's gradient of a parameter, unless a fused product already did."""
        self.open()
        is_added = parameter.grad_added_to_main_grad
        # A tied matrix has two gradients, and only the head's product is fused.
        if not is_added or vars(parameter).get("zero_out_wgrad", False):
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    def begin_sum(self) -> dist.Work | None:
        """Begin a pass's gradient reduce-scatter and return it, None on one rank; collective."""
        self.open()
        if not self.weights.is_divided:
            return None
        self._sum_Q = torch.empty_like(self.own_Q)
        return dist.reduce_scatter_tensor(
            self._sum_Q, self._whole_P, group=self.weights.groups.shards, async_op=True
        )

    def add_sum(self) -> None:
        self.own_Q += self._whole_P if self._sum_Q is None else self._sum_Q
        self._sum_Q = None
        self._close()


class Exchange(NamedTuple):
    unit: int
    sums: bool  # True to reduce its gradients, False to gather its weights


class PassExchanges:
    """Exchanges of a pass, in the order of all ranks.

    Args:
        last: unit that runs backward right after its forward and keeps its weights.
        in_forward: number of exchanges in the forward.
    """

    def __init__(
        self, exchanges: Sequence[Exchange] = (), last: int | None = None, in_forward: int = 0
    ) -> None:
        self.exchanges, self.last, self.in_forward = exchanges, last, in_forward
        # Places of exchanges, by unit: first gathers are for forward, last gathers for backward.
        gathers = [(unit, place) for place, (unit, sums) in enumerate(exchanges) if not sums]
        self.first_gathers = dict(reversed(gathers))
        self.last_gathers = dict(gathers)
        self.sums = {unit: place for place, (unit, sums) in enumerate(exchanges) if sums}

    @classmethod
    def list_for(
        cls, units: Sequence[ShardedUnit], tower: str | None, *, forward: bool, backward: bool
    ) -> "PassExchanges":
        """Return the exchanges of a forward, a backward, or both, of one tower or all."""
        own = [number for number, unit in enumerate(units) if tower in (None, unit.tower)]
        exchanges = [Exchange(unit, sums=False) for unit in own if forward]
        if backward and not forward and units[own[-1]].gathers_again:
            exchanges.append(Exchange(own[-1], sums=False))
        for place in reversed(range(len(own) if backward else 0)):
            # The previous unit's weights arrive while this unit's backward runs.
            if place and units[own[place - 1]].gathers_again:
                exchanges.append(Exchange(own[place - 1], sums=False))
            if units[own[place]].reduced:
                exchanges.append(Exchange(own[place], sums=True))
        return cls(exchanges, last=own[-1], in_forward=len(own) * forward)


class ShardedStage(torch.nn.Module):
    """A stage with sharded weights and gradients; called like the stage."""

    def __init__(self, stage: VLMStage, weights: ShardedWeights) -> None:
        super().__init__()
        self.module, self.weights = stage, weights
        self.gradients = {flat: FlatGradients(flat) for flat in weights.flats if flat.is_trained}
        self._units = weights.units
        self._passes: dict[tuple[str | None, bool, bool], PassExchanges] = {}
        self._pass = PassExchanges()
        self._is_gathered = False  # all weights, for forwards without gradients
        self._begun = 0  # number of exchanges begun in the pass
        self._computing: int | None = None  # index of the unit
        self._goes_back = False  # whether the backward has begun
        self._held: dict[int, list[dist.Work]] = {}  # gathers by unit with full weights
        self._arriving: list[tuple[FlatGradients, dist.Work | None]] = []  # reductions of one unit
        self._missing: list[set[torch.nn.Parameter]] = []  # still without gradient, by unit
        for number, unit in enumerate(self._units):
            for module in unit.modules:
                module.register_forward_pre_hook(partial(self._before_forward, number))
                module.register_forward_hook(partial(self._after_forward, number))
            for flat in unit.reduced:
                take = partial(self._on_gradient, number, self.gradients[flat])
                for parameter in flat.parameters:
                    parameter.register_post_accumulate_grad_hook(take)

    def forward(self, *arguments: Any) -> Any:
        output = self.module(*arguments)
        # Join other ranks' gathers before waiting for another stage, which may wait for them.
        self._begin(self._pass.in_forward)
        return output

    def begin_pass(
        self, tower: str | None = None, *, forward: bool = True, backward: bool = True
    ) -> None:
        """End the previous pass; begin a forward, a backward or both, of one tower or all."""
        self.finish_pass()
        kind = tower, forward, backward
        if kind not in self._passes:
            self._passes[kind] = PassExchanges.list_for(
                self._units, tower, forward=forward, backward=backward
            )
        self._pass = self._passes[kind]
        self._goes_back = not forward
        self._missing = [
            {parameter for flat in unit.reduced for parameter in flat.parameters}
            for unit in self._units
        ]

    @contextmanager
    def gather_weights(self, stays: bool) -> Iterator[None]:
        """Gather all weights for no-grad forwards; collective. Freed at once unless `stays`."""
        self.finish_pass()
        for flat in self.weights.flats:
            work = flat.begin_gather()
            if work is not None:
                work.wait()
            if not stays:
                flat.release()
        self._is_gathered = True
        try:
            yield
        finally:
            self._is_gathered = False
            for flat in self.weights.flats:
                flat.release()

    def zero_gradients(self) -> None:
        for gradients in self.gradients.values():
            gradients.own_Q.zero_()

    def sum_over_copies(self) -> None:
        """Sum a step's gradients over replicas of this shard; collective over them."""
        for flat, gradients in self.gradients.items():
            if flat.groups.copies.size() > 1:
                dist.all_reduce(gradients.own_Q, group=flat.groups.copies)

    def finish_pass(self) -> None:
        """Run the pass's remaining exchanges with other ranks, and release all weights."""
        self._computing = None
        self._begin(len(self._pass.exchanges))
        self._release_units(kept=())
        self._finish_sums()
        self._pass, self._begun, self._goes_back = PassExchanges(), 0, False

    def _before_forward(self, number: int, *_: Any) -> None:
        if self._is_gathered:
            return
        if self._goes_back:  # recomputation
            self._before_backward(number)
        elif self._computing != number:
            self._enter(number, self._pass.first_gathers[number])

    def _after_forward(self, number: int, module: torch.nn.Module, _: Any, output: Any) -> None:
        # The hook of an output's gradient runs just before the unit's backward.
        for tensor in output if isinstance(output, tuple) else (output,):
            if torch.is_tensor(tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._before_backward, number))

    def _before_backward(self, number: int, *_: Any) -> None:
        if self._goes_back and self._computing == number:
            return
        self._goes_back = True
        # Units whose backward reads no weights have no gather in a backward-only pass.
        self._enter(number, self._pass.last_gathers.get(number, -1))
        for flat in self._units[number].flats:
            if flat in self.gradients:
                self.gradients[flat].open()

    def _enter(self, number: int, place: int) -> None:
        """Begin exchanges to `place`, release other units, wait for weights; gather the next."""
        self._computing = number
        self._begin(place + 1)
        self._release_units(kept=(number,))
        reads = not self._goes_back or self._units[number].gathers_again
        assert not reads or number in self._held, "units compute in another order than planned"
        for work in self._held.get(number, ()):
            work.wait()
        # Backward of the last unit begins before any other gather.
        is_last = number == self._pass.last and not self._goes_back
        following = self._pass.exchanges[self._begun : self._begun + 1]
        if following and not following[0].sums and not is_last:
            self._begin(self._begun + 1)

    def _begin(self, end: int) -> None:
        while self._begun < end:
            exchange = self._pass.exchanges[self._begun]
            self._begun += 1
            if exchange.sums:
                # At most one unit's full gradients are in flight.
                self._finish_sums()
                reduced = [self.gradients[flat] for flat in self._units[exchange.unit].reduced]
                self._arriving = [(gradients, gradients.begin_sum()) for gradients in reduced]
            else:
                self._gather(exchange.unit)

    def _gather(self, number: int) -> None:
        self._release_units(kept=(self._computing, number))
        # Join even if the unit is still here, on a rank that computed nothing: it is a collective.
        for work in self._held.get(number, ()):
            work.wait()
        works = [flat.begin_gather() for flat in self._units[number].flats]
        self._held[number] = [work for work in works if work is not None]

    def _release_units(self, kept: Sequence[int | None]) -> None:
        released = [number for number in self._held if number not in kept]
        for number in released:
            for work in self._held.pop(number):
                work.wait()  # a gather must not write to freed memory
        # A tied matrix belongs to two units.
        in_use = {flat for number in self._held for flat in self._units[number].flats}
        for flat in (flat for number in released for flat in self._units[number].flats):
            if flat not in in_use:
                flat.release()

    def _finish_sums(self) -> None:
        for gradients, work in self._arriving:
            if work is not None:
                work.wait()
            gradients.add_sum()
        self._arriving = []

    def _on_gradient(
        self, number: int, gradients: FlatGradients, parameter: torch.nn.Parameter
    ) -> None:
        place = self._pass.sums[number]
        assert self._begun <= place, "a gradient comes after its unit's sum has begun"
        gradients.take(parameter)
        self._missing[number].discard(parameter)
        if not self._missing[number]:
            self._begin(place + 1)
