"""What data-parallel ranks exchange while a stage computes: gradients summed, weights gathered.

Megatron-core's DistributedDataParallel divides a stage's parameters into buckets and exchanges
each by itself, without waiting. When, it leaves to the order in which gradients are ready and
weights are used, which ranks with other packs do not share: a pack without images takes other
ways through a stage, and a rank may have no pack at all. Collectives that ranks begin in
different orders take each other's data. So the buckets are begun here, in one order on every
rank: of the gradients, a bucket when all up to it are ready, in the last backward of each chunk of
the model that the stage holds; of the weights, all of them after the update, first those that the
forward needs first. Each layer, and each other unit, waits for its weights before its forward.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron.vlm.model.block import PlannedBlock


class DataParallelOverlap:
    """Exchanges of one stage's gradients and weights with its data-parallel ranks.

    Args:
        models: the stage's chunks, in model order, made with `overlap_grad_reduce`,
            `overlap_param_gather` and `align_param_gather`, on weights that are the same on every
            data-parallel rank.
    """

    def __init__(self, models: Sequence[DistributedDataParallel]) -> None:
        self._models = models
        # From the model's end, as their gradients become ready: core orders those of experts,
        # which other ranks exchange, by themselves.
        parameters = (parameter for model in models for parameter in model.module.parameters())
        place = {parameter: place for place, parameter in enumerate(parameters)}
        self._buckets = sorted(
            (
                bucket
                for model in models
                for bucket in (*model.bucket_groups, *model.expert_parallel_bucket_groups)
            ),
            key=lambda bucket: -min(place[parameter] for parameter in bucket.params),
        )
        self._bucket_of = {
            parameter: number
            for number, bucket in enumerate(self._buckets)
            for parameter in bucket.params
        }
        self._missing: list[set[torch.nn.Parameter]] = []
        self._begun = 0
        self._in_last = set[int]()
        """Chunks whose last backward has begun."""
        for chunk, model in enumerate(models):
            trained = [one for one in model.module.parameters() if one.requires_grad]
            # On core's own nodes: behind its hook, which adds the gradient to the bucket.
            deferred = model.module.deferred
            late = frozenset() if deferred is None else deferred.parameters
            for parameter, node in zip(trained, model.grad_accs, strict=True):
                if parameter not in late:
                    node.register_hook(partial(self._on_gradient, chunk, parameter))
            if deferred is not None:
                deferred.on_gradient = partial(self._on_gradient, chunk)
            for unit in _units(model.module):
                # Core's hooks wait for the parameters of the module that is called. A fused
                # operation of a layer takes those of its norms, which nobody calls.
                own = {self._bucket_of[p] for p in unit.parameters() if p in self._bucket_of}
                unit.register_forward_pre_hook(partial(self._wait_for, own))
        self._mark_gathered()

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Run a step's micro-batches inside; begins all reductions that have not begun by its end.

        Core's own count of ready gradients stays off.
        """
        self._missing = [set(bucket.params) for bucket in self._buckets]
        self._begun = 0
        with ExitStack() as without_sums:
            for model in self._models:
                without_sums.enter_context(model.no_sync())
            yield
        self._in_last.clear()
        # On a rank without micro-batches, all; where a pack leaves out parameters, what it left.
        self._begin_up_to(len(self._buckets))

    def before_last_backward(self, chunk: int) -> None:
        """From here on a gradient of a chunk is ready when it has been added to its bucket.

        One that comes in the second part of backwards is ready when the last of these adds it.
        """
        self._in_last.add(chunk)

    def _on_gradient(self, chunk: int, parameter: torch.nn.Parameter, *_: object) -> None:
        if chunk not in self._in_last:
            return
        number = self._bucket_of[parameter]
        assert number >= self._begun, "a gradient comes after its bucket's reduction has begun"
        self._missing[number].discard(parameter)
        ready = self._begun
        while ready < len(self._missing) and not self._missing[ready]:
            ready += 1
        self._begin_up_to(ready)

    def _begin_up_to(self, end: int) -> None:
        for bucket in self._buckets[self._begun : end]:
            bucket.start_grad_sync()
        self._begun = max(self._begun, end)

    def finish_reduction(self) -> None:
        """Wait for the reductions of a step whose gradients nobody will use."""
        for model in self._models:
            model.finish_grad_sync()
        self._mark_gathered()

    def begin_gather(self, changed: bool) -> None:
        """Begin to gather all weights, if the update has changed each rank's share."""
        if not changed:
            self._mark_gathered()
            return
        for bucket in reversed(self._buckets):
            bucket.start_param_sync()

    def wait_for_weights(self) -> None:
        """Wait until all weights are gathered; before they change, or are read but by a forward."""
        for bucket in self._buckets:
            bucket.finish_param_sync(skip_next_bucket_dispatch=True)

    def _wait_for(self, numbers: set[int], *_: object) -> None:
        for number in numbers:
            self._buckets[number].finish_param_sync(skip_next_bucket_dispatch=True)

    def _mark_gathered(self) -> None:
        """Say that this rank's weights are whole: core would gather them before the forward."""
        for bucket in self._buckets:
            bucket.param_gather_dispatched = True


def _units(stage: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules that a stage calls one after another, each layer by itself."""
    for part in stage.children():
        if isinstance(part, PlannedBlock):
            yield from part.layers
            if part.final_layernorm is not None:
                yield part.final_layernorm
        else:
            yield part
