"""Data parallelism of a stage: replicated (Megatron-core's DDP) or sharded, with one interface.

`begin_pass` prepares a chunk's weights for a forward, a backward, or both. `running` wraps a step's
micro-batches and yields a function to call before each chunk's last backward, or None. Then come
`finish_gradients`, `grad_norm` over all ranks, not finite if any gradient is not, and `step`, which
clips by the norm of everything trained.

Shapes: Q values of this rank's shard of a unit's weights.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.model.sharded_units import list_units
from megatron.vlm.step.sharded import ShardedStage
from megatron.vlm.step.sharded_optimizer import ShardedAdam

PassKind = Literal["forward", "backward", "both"]


@dataclass(frozen=True, slots=True)
class TiedCopies:
    """Both copies of a tied matrix, on two stages or one."""

    group: dist.ProcessGroup | None  # ranks of both stages, or None if this stage holds both

    def sum(self, gradients: Sequence[torch.Tensor]) -> None:
        """Set each local copy's gradient to the sum of both; collective over the group."""
        if self.group is not None:
            for gradient in gradients:
                dist.all_reduce(gradient, group=self.group)
        elif gradients:
            first, second = gradients
            first += second
            second.copy_(first)


class DataParallelOverlap:
    """Reduces gradients and gathers weights of one stage while it computes.

    Core's DistributedDataParallel starts its buckets as gradients become ready and weights are
    used. Ranks with different packs differ in that order (a pack without images, or no pack), and
    collectives in different orders mix their data. So buckets start here in one order on all ranks:
    gradients when all previous buckets are ready, in each chunk's last backward; weights after the
    update, in forward order. Each layer or other unit waits for its weights before its forward.

    Hooks of autograd's nodes hold it, so it must not hold the optimizer: garbage collection sees no
    cycles through nodes.

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
        self._missing: list[set[torch.nn.Parameter]] = []  # parameters not yet ready, by bucket
        self._begun = 0  # number of buckets whose reduction has begun
        self._in_last = set[int]()  # chunks in their last backward
        for chunk, model in enumerate(models):
            trained = [p for p in model.module.parameters() if p.requires_grad]
            # Hooks on core's nodes run after core's hook, which adds the gradient to the bucket.
            deferred = model.module.deferred
            late = frozenset() if deferred is None else deferred.parameters
            for parameter, node in zip(trained, model.grad_accs, strict=True):
                if parameter not in late:
                    node.register_hook(partial(self._on_gradient, chunk, parameter))
            if deferred is not None:
                deferred.on_gradient = partial(self._on_gradient, chunk)
            for unit in (unit for _, units in list_units(model.module) for unit in units):
                # Core's hooks wait for the parameters of called modules, but fused operations use
                # norms without calling them.
                own = {self._bucket_of[p] for p in unit.parameters() if p in self._bucket_of}
                unit.register_forward_pre_hook(partial(self._wait_for, own))
        self._mark_gathered()

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Run a step's micro-batches inside, then begin the remaining reductions."""
        self._missing = [set(bucket.params) for bucket in self._buckets]
        self._begun = 0
        with ExitStack() as stack:
            for model in self._models:
                stack.enter_context(model.no_sync())  # core does not count ready gradients
            yield
        self._in_last.clear()
        # Buckets with parameters that the packs did not use: all on a rank without micro-batches.
        self._begin_up_to(len(self._buckets))

    def before_last_backward(self, chunk: int) -> None:
        """Count a chunk's gradients as ready from now on, as its last backward begins."""
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
        """Begin to gather all weights if an update `changed` them."""
        if not changed:
            self._mark_gathered()
            return
        for bucket in reversed(self._buckets):
            bucket.start_param_sync()

    def wait_for_weights(self) -> None:
        """Wait until all weights are gathered, before they change or are read outside a forward."""
        for bucket in self._buckets:
            # Core would begin the next bucket's gather, which has begun in this class's order.
            bucket.finish_param_sync(skip_next_bucket_dispatch=True)

    def _wait_for(self, numbers: set[int], *_: object) -> None:
        for number in numbers:
            self._buckets[number].finish_param_sync(skip_next_bucket_dispatch=True)

    def _mark_gathered(self) -> None:
        # Otherwise core would gather unchanged weights before the forward.
        for bucket in self._buckets:
            bucket.param_gather_dispatched = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicated:
    """Replicated weights and gradients, sharded optimizer: core's DDP and distributed optimizer."""

    models: Sequence[DistributedDataParallel]
    optimizer: ChainedOptimizer
    reduction_groups: ProcessGroupCollection | None = None  # None for core's; encoders have others
    tied: TiedCopies | None = None  # copies of a tied matrix on this stage, if any
    overlap: DataParallelOverlap  # without models for one data-parallel rank, and for encoders

    def zero_gradients(self) -> None:
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def begin_pass(self, kind: PassKind, chunk: int) -> None:
        """Do nothing: replicated weights are ready for any pass."""

    @contextmanager
    def running(
        self, batches: MicroBatchStream, *, trains: bool
    ) -> Iterator[Callable[[int], None] | None]:
        """Run micro-batches, and reduce gradients in each chunk's last backward if possible."""
        if not trains:
            yield None
            return
        # Ranks must have one order of reductions and exchanges of shared packs, or NCCL deadlocks.
        # They do if no last backward has exchanges, or all have them at the same points. With
        # several chunks, other chunks' backwards follow a chunk's last.
        last = batches.shapes if len(self.models) > 1 else batches.shapes[-1:]
        may_overlap = batches.rows_are_full or all(shape.context == 1 for shape in last)
        with self.overlap.reducing():
            yield self.overlap.before_last_backward if may_overlap else None

    def finish_gradients(self, factor: float) -> None:
        """Finish sums over data- and tensor-parallel ranks and tied copies, and scale them."""
        finalize_model_grads([*self.models], pg_collection=self.reduction_groups)
        if self.tied is not None:
            stages = [model.module for model in self.models if model.module.holds_tied_copy]
            copies = [stage.shared_embedding_or_output_weight() for stage in stages]
            self.tied.sum([weight.main_grad for weight in copies if weight.requires_grad])
        for model in self.models:
            model.scale_gradients(factor)

    def grad_norm(self) -> float:
        # Not core's `step`: if only the norm overflows, it clips to zero and steps on momentum.
        has_infinite = self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        return math.inf if has_infinite else grad_norm

    def step(self, clip_grad: float, grad_norm: float) -> None:
        for optimizer in self.optimizer.chained_optimizers:
            parameters = [] if optimizer.is_stub_optimizer else optimizer.get_parameters()
            if clip_grad > 0 and parameters:
                clip_grad_by_total_norm_fp32(parameters, clip_grad, grad_norm)
        self.optimizer.step_with_ready_grads()

    def begin_gather(self, changed: bool) -> None:
        """Begin to gather all weights if an update `changed` them; do nothing without overlap."""
        self.overlap.begin_gather(changed)

    def discard_gradients(self) -> None:
        """Finish reductions in progress, of gradients that no update uses."""
        self.overlap.finish_reduction()

    def wait_for_weights(self) -> None:
        self.overlap.wait_for_weights()

    def weights(self) -> Iterator[torch.Tensor]:
        """Yield all weights; trained weights are views of core's buffers."""
        for model in self.models:
            yield from model.module.parameters()

    def gradients(self) -> Iterator[torch.Tensor]:
        for model in self.models:
            buffers = (*model.buffers, *model.expert_parallel_buffers)
            yield from (buffer.grad_data for buffer in buffers)

    def optimizer_state(self) -> Iterator[torch.Tensor]:
        for optimizer in self.optimizer.chained_optimizers:
            kept = {} if optimizer.is_stub_optimizer else optimizer.optimizer.state
            yield from _state_tensors(kept)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharded:
    """Sharded weights, gradients and optimizer state, with exchanges in every pass."""

    models: Sequence[ShardedStage]
    optimizer: ShardedAdam
    tied: TiedCopies | None = None  # this rank's shards of a tied matrix on this stage, if any

    def zero_gradients(self) -> None:
        for model in self.models:
            model.zero_gradients()

    def begin_pass(self, kind: PassKind, chunk: int) -> None:
        """Begin the exchanges of a pass and finish the previous pass."""
        self._finish_passes()
        self.models[chunk].begin_pass(forward=kind != "backward", backward=kind != "forward")

    def _finish_passes(self) -> None:
        for model in self.models:
            model.finish_pass()

    @contextmanager
    def running(self, batches: MicroBatchStream, *, trains: bool) -> Iterator[None]:
        """Run micro-batches, each with its own gradient reduction."""
        yield
        self._finish_passes()

    def finish_gradients(self, factor: float) -> None:
        """Sum over replicas, tied copies and tensor-parallel ranks, and scale all gradients."""
        for model in self.models:
            model.sum_over_copies()
        if self.tied is not None:
            pairs = [pair for model in self.models for pair in model.gradients.items()]
            self.tied.sum([gradients.own_Q for flat, gradients in pairs if flat.is_tied])
        self.optimizer.sum_over_tensor_ranks()
        self.optimizer.scale_gradients(factor)

    def grad_norm(self) -> float:
        return self.optimizer.norm()

    def step(self, clip_grad: float, grad_norm: float) -> None:
        self.optimizer.step(clip_grad, grad_norm)

    def begin_gather(self, changed: bool) -> None:
        """Do nothing, as the next two methods: every pass gathers and reduces."""

    def discard_gradients(self) -> None: ...

    def wait_for_weights(self) -> None: ...

    def weights(self) -> Iterator[torch.Tensor]:
        yield from (flat.own_Q for model in self.models for flat in model.weights.flats)

    def gradients(self) -> Iterator[torch.Tensor]:
        for model in self.models:
            yield from (gradients.own_Q for gradients in model.gradients.values())

    def optimizer_state(self) -> Iterator[torch.Tensor]:
        yield from _state_tensors(self.optimizer.inner.state)


DataParallel: TypeAlias = Replicated | Sharded


def _state_tensors(states: Mapping[torch.Tensor, Mapping[str, Any]]) -> Iterator[torch.Tensor]:
    for weights, state in states.items():
        yield weights
        yield from (value for value in state.values() if torch.is_tensor(value))
