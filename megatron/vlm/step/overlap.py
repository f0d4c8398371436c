"""Overlap of a stage's data-parallel exchanges: gradients reduced, weights gathered.

Core's DistributedDataParallel starts its buckets as gradients become ready and weights are used.
Ranks with different packs differ in that order (a pack without images, or no pack), and collectives
in different orders mix their data. So buckets start here in one order on all ranks: gradients when
all previous buckets are ready, in each chunk's last backward; weights after the update, in forward
order. Each layer or other unit waits for its weights before its forward.
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
        models: chunks in model order, with equal weights on all ranks, and made with
            `overlap_grad_reduce`, `overlap_param_gather` and `align_param_gather`.
    """

    def __init__(self, models: Sequence[DistributedDataParallel]) -> None:
        self._models = models
        # From the model's end, as gradients become ready; core orders experts separately.
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
        for chunk, model in enumerate(models):
            trained = [one for one in model.module.parameters() if one.requires_grad]
            # On core's own nodes: after its hook, which adds the gradient to the bucket.
            deferred = model.module.deferred
            late = frozenset() if deferred is None else deferred.parameters
            for parameter, node in zip(trained, model.grad_accs, strict=True):
                if parameter not in late:
                    node.register_hook(partial(self._on_gradient, chunk, parameter))
            if deferred is not None:
                deferred.on_gradient = partial(self._on_gradient, chunk)
            for unit in _units(model.module):
                # Core's hooks wait for the called module's parameters; fused operations use
                # uncalled norms.
                own = {self._bucket_of[p] for p in unit.parameters() if p in self._bucket_of}
                unit.register_forward_pre_hook(partial(self._wait_for, own))
        self._mark_gathered()

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Run a step's micro-batches inside and begin the remaining reductions; core does not
        count."""
        self._missing = [set(bucket.params) for bucket in self._buckets]
        self._begun = 0
        with ExitStack() as without_sums:
            for model in self._models:
                without_sums.enter_context(model.no_sync())
            yield
        self._in_last.clear()
        # All on a rank without micro-batches, or parameters that a pack did not use.
        self._begin_up_to(len(self._buckets))

    def before_last_backward(self, chunk: int) -> None:
        """Mark a chunk's gradients as ready once added to their bucket, for the last time if
        deferred."""
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
        for model in self._models:
            model.finish_grad_sync()
        self._mark_gathered()

    def begin_gather(self, changed: bool) -> None:
        """Begin to gather all weights if the update changed each rank's shard."""
        if not changed:
            self._mark_gathered()
            return
        for bucket in reversed(self._buckets):
            bucket.start_param_sync()

    def wait_for_weights(self) -> None:
        """Wait until all weights are gathered, before they change or are read outside a forward."""
        for bucket in self._buckets:
            bucket.finish_param_sync(skip_next_bucket_dispatch=True)

    def _wait_for(self, numbers: set[int], *_: object) -> None:
        for number in numbers:
            self._buckets[number].finish_param_sync(skip_next_bucket_dispatch=True)

    def _mark_gathered(self) -> None:
        """Mark this rank's weights as gathered; core would gather them before the forward."""
        for bucket in self._buckets:
            bucket.param_gather_dispatched = True


def _units(stage: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for part in stage.children():
        if isinstance(part, PlannedBlock):
            yield from part.layers
            if part.final_layernorm is not None:
                yield part.final_layernorm
        else:
            yield part
