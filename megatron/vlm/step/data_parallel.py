"""Data parallelism of a stage: replicated (Megatron-core's DDP) or sharded, with one interface."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.overlap import DataParallelOverlap
from megatron.vlm.step.sharded import ShardedStage
from megatron.vlm.step.sharded_optimizer import ShardedAdam

PassKind = Literal["forward", "backward", "both"]


class DataParallel(ABC):
    """A stage's weights and gradients across data-parallel ranks."""

    __slots__ = ()
    models: Sequence[Any]
    """The wrapped chunks of the stage; `module` is the chunk."""
    optimizer: ChainedOptimizer | ShardedAdam

    @abstractmethod
    def zero_gradients(self) -> None:
        """Zero the gradients before a step."""

    def begin_pass(self, kind: PassKind, chunk: int) -> None:  # noqa: B027
        """Prepare a chunk's weights for a forward, a backward, or both."""

    @abstractmethod
    def running(
        self, batches: MicroBatchStream, *, trains: bool
    ) -> AbstractContextManager[Callable[[int], None] | None]:
        """Run micro-batches inside, and begin to reduce gradients if they have backwards.

        Yields a function to call before each chunk's last backward, or None.
        """

    @abstractmethod
    def finish_gradients(self, factor: float) -> None:
        """Finish the gradient reduction and scale all gradients."""

    @abstractmethod
    def grad_norm(self) -> float:
        """Return the norm of all ranks' gradients, not finite if any is not; collective."""

    @abstractmethod
    def step(self, clip_grad: float, grad_norm: float) -> None:
        """Clip gradients by the norm of all that is trained, and update weights."""

    def begin_gather(self, changed: bool) -> None:  # noqa: B027
        """Begin to gather weights on all ranks if an update changed them."""

    def discard_gradients(self) -> None:  # noqa: B027
        """Finish the reduction of unused gradients."""

    def wait_for_weights(self) -> None:  # noqa: B027
        """Wait until weights are up to date."""

    @abstractmethod
    def weights(self) -> Iterator[torch.Tensor]:
        """Return the weights that this rank keeps for computation."""

    @abstractmethod
    def gradients(self) -> Iterator[torch.Tensor]:
        """Return the gradients that this rank keeps."""

    @abstractmethod
    def optimizer_state(self) -> Iterator[torch.Tensor]:
        """Return the optimizer's state, with the weights that it updates."""


@dataclass(frozen=True, slots=True)
class TiedCopies:
    """Both copies of a tied matrix, on two stages or one."""

    group: dist.ProcessGroup | None
    """Ranks of both stages, or None if this stage holds both."""

    def sum(self, held: Sequence[torch.Tensor]) -> None:
        """Set each local copy's gradient to the sum of both; collective over the group."""
        if self.group is not None:
            for gradient in held:
                dist.all_reduce(gradient, group=self.group)
        elif held:
            one, other = held
            one += other
            other.copy_(one)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicated(DataParallel):
    """Replicated weights and gradients, sharded optimizer: core's DDP and distributed optimizer."""

    models: Sequence[DistributedDataParallel]
    optimizer: ChainedOptimizer
    reduction_groups: ProcessGroupCollection | None = None
    """Process groups of the gradient reduction if not core's, as for encoders."""
    tied: TiedCopies | None = None
    """Copies of a tied matrix on this stage, if any."""
    overlap: DataParallelOverlap | None
    """Overlapped exchanges of data-parallel ranks, or None with one rank."""

    def zero_gradients(self) -> None:
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()

    @contextmanager
    def running(
        self, batches: MicroBatchStream, *, trains: bool
    ) -> Iterator[Callable[[int], None] | None]:
        """Run micro-batches, and reduce gradients in each chunk's last backward if possible."""
        if self.overlap is None or not trains:
            yield None
            return
        # All ranks must order exchanges of shared packs and reductions alike. They do if no last
        # backward has exchanges, or all have them at the same points. A stage with several chunks
        # has backwards after a chunk's last.
        last = batches.shapes if len(self.models) > 1 else batches.shapes[-1:]
        may_overlap = batches.rows_are_full or all(shape.context == 1 for shape in last)
        with self.overlap.reducing():
            yield self.overlap.before_last_backward if may_overlap else None

    def finish_gradients(self, factor: float) -> None:
        """Wait for gradient sums, with tied copies and tensor-parallel ranks, and scale them."""
        finalize_model_grads([*self.models], pg_collection=self.reduction_groups)
        if self.tied is not None:
            stages = [model.module for model in self.models if model.module.holds_tied_copy]
            copies = [stage.shared_embedding_or_output_weight() for stage in stages]
            self.tied.sum([one.main_grad for one in copies if one.requires_grad])
        for model in self.models:
            model.scale_gradients(factor)

    def grad_norm(self) -> float:
        """Return the norm of all ranks' gradients, not finite if any gradient is not.

        Core's `step` would clip to zero and step on momentum if only the norm overflows.
        """
        has_infinite = self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        return math.inf if has_infinite else grad_norm

    def step(self, clip_grad: float, grad_norm: float) -> None:
        for one in self.optimizer.chained_optimizers:
            parameters = [] if one.is_stub_optimizer else one.get_parameters()
            if clip_grad > 0 and parameters:
                clip_grad_by_total_norm_fp32(parameters, clip_grad, grad_norm)
        self.optimizer.step_with_ready_grads()

    def begin_gather(self, changed: bool) -> None:
        if self.overlap is not None:
            self.overlap.begin_gather(changed)

    def discard_gradients(self) -> None:
        if self.overlap is not None:
            self.overlap.finish_reduction()

    def wait_for_weights(self) -> None:
        if self.overlap is not None:
            self.overlap.wait_for_weights()

    def weights(self) -> Iterator[torch.Tensor]:
        """Return all weights, replicated; trained weights are in core's buffers."""
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
class Sharded(DataParallel):
    """Sharded weights, gradients and optimizer state, with exchanges in every pass."""

    models: Sequence[ShardedStage]
    optimizer: ShardedAdam
    tied: TiedCopies | None = None
    """This rank's shards of a tied matrix's copies on this stage, if any."""

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
            every = [pair for model in self.models for pair in model.gradients.items()]
            self.tied.sum([one.own_Q for flat, one in every if flat.is_tied])
        self.optimizer.sum_over_tensor_ranks()
        self.optimizer.scale_gradients(factor)

    def grad_norm(self) -> float:
        return self.optimizer.norm()

    def step(self, clip_grad: float, grad_norm: float) -> None:
        self.optimizer.step(clip_grad, grad_norm)

    def weights(self) -> Iterator[torch.Tensor]:
        yield from (flat.own_Q for model in self.models for flat in model.weights.flats)

    def gradients(self) -> Iterator[torch.Tensor]:
        for model in self.models:
            yield from (gradients.own_Q for gradients in model.gradients.values())

    def optimizer_state(self) -> Iterator[torch.Tensor]:
        yield from _state_tensors(self.optimizer.inner.state)


def _state_tensors(states: Mapping[torch.Tensor, Mapping[str, Any]]) -> Iterator[torch.Tensor]:
    for weights, state in states.items():
        yield weights
        yield from (value for value in state.values() if torch.is_tensor(value))
