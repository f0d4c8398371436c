"""How data-parallel ranks hold a stage in training: whole, by Megatron-core, or divided.

A trainer asks the one or the other the same questions, in the order of a step.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
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

RunMicroBatches = Callable[[Callable[[int], None] | None], list[torch.Tensor]]
"""Function that runs a step's micro-batches; calls what it is given before the last backward of
every chunk of the model that the stage holds."""


PassKind = Literal["forward", "backward", "both"]
"""Forward, backward, or a forward and its backward at once."""


class DataParallel(ABC):
    """What holds a stage's weights and gradients with other data-parallel ranks."""

    __slots__ = ()
    models: Sequence[Any]
    """The stage's chunks as micro-batches run them; each itself is its `module`."""
    optimizer: ChainedOptimizer | ShardedAdam

    @abstractmethod
    def zero_gradients(self) -> None:
        """Zero the gradients, before the first micro-batch of a step."""

    def begin_pass(self, kind: PassKind, chunk: int) -> None:  # noqa: B027
        """Have a chunk's weights ready for a forward, a backward, or both at once."""

    @abstractmethod
    def run(self, run: RunMicroBatches, batches: MicroBatchStream) -> list[torch.Tensor]:
        """Run a step's micro-batches, and begin to sum their gradients over ranks."""

    def run_forward(self, run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Run forwards alone."""
        return run()

    @abstractmethod
    def finish_gradients(self, factor: float) -> None:
        """Sum what is left to sum over ranks, and multiply all gradients."""

    @abstractmethod
    def grad_norm(self) -> float:
        """Norm of all ranks' gradients; not finite where any of them is not; collective."""

    @abstractmethod
    def step(self, clip_grad: float, grad_norm: float) -> None:
        """Clip gradients by the norm of all that is trained, and update weights."""

    def begin_gather(self, changed: bool) -> None:  # noqa: B027
        """Begin to make weights whole on all ranks, if an update has changed them."""

    def discard_gradients(self) -> None:  # noqa: B027
        """Finish the sums of a step whose gradients nobody will use."""

    def wait_for_weights(self) -> None:  # noqa: B027
        """Wait until weights are what the last update made of them."""

    @abstractmethod
    def weights(self) -> Iterator[torch.Tensor]:
        """Weights that this rank keeps, as it computes with them."""

    @abstractmethod
    def gradients(self) -> Iterator[torch.Tensor]:
        """Sums of gradients that this rank keeps."""

    @abstractmethod
    def optimizer_state(self) -> Iterator[torch.Tensor]:
        """State of the optimizer, with the weights that it updates."""


@dataclass(frozen=True, slots=True)
class TiedCopies:
    """The two copies of a tied matrix, in parts of the model that may be on two stages or one."""

    group: dist.ProcessGroup | None
    """Ranks of the two stages; None where this one holds both."""

    def sum(self, held: Sequence[torch.Tensor]) -> None:
        """Give each copy held here the sum of both gradients; collective over the group."""
        if self.group is not None:
            for gradient in held:
                dist.all_reduce(gradient, group=self.group)
        elif held:
            one, other = held
            one += other
            other.copy_(one)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicated(DataParallel):
    """Whole weights and gradients on every rank, and the optimizer's state divided: core's
    DistributedDataParallel and distributed optimizer."""

    models: Sequence[DistributedDataParallel]
    optimizer: ChainedOptimizer
    reduction_groups: ProcessGroupCollection | None = None
    """Process groups of the gradient reduction where they are not core's, as of encoders."""
    tied: TiedCopies | None = None
    """The copies of a tied matrix that the stage holds one or both of; None where it has none."""
    overlap: DataParallelOverlap | None
    """Exchanges of data-parallel ranks while the stage computes; None where there is one rank."""

    def zero_gradients(self) -> None:
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def run(self, run: RunMicroBatches, batches: MicroBatchStream) -> list[torch.Tensor]:
        """Run micro-batches; gradients are summed in a chunk's last backward, where ranks may."""
        if self.overlap is None:
            return run(None)
        may_overlap = _may_overlap(batches, len(self.models))
        with self.overlap.reducing():
            return run(self.overlap.before_last_backward if may_overlap else None)

    def finish_gradients(self, factor: float) -> None:
        """Wait for the sums, also of tied copies and over tensor-parallel ranks; multiply them."""
        finalize_model_grads([*self.models], pg_collection=self.reduction_groups)
        if self.tied is not None:
            copies = (model.module.tied_copy for model in self.models)
            held: list[Any] = [one for one in copies if one is not None and one.requires_grad]
            self.tied.sum([one.main_grad for one in held])
        for model in self.models:
            model.scale_gradients(factor)

    def grad_norm(self) -> float:
        """Norm of all ranks' gradients; not finite where any of them is not.

        Core's own `step` looks at gradients alone: where their norm overflows, it clips all of them
        to zero and steps on momentum.
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
        """All of them, whole: those that are trained lie in core's buffers."""
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
    """Parts of weights, gradients and optimizer state on every rank. Every pass gathers weights for
    itself and ends its sums."""

    models: Sequence[ShardedStage]
    optimizer: ShardedAdam
    tied: TiedCopies | None = None
    """The copies of a tied matrix that the stage holds one or both of, of which this rank has a
    part; None where it has none."""

    def zero_gradients(self) -> None:
        for model in self.models:
            model.zero_gradients()

    def begin_pass(self, kind: PassKind, chunk: int) -> None:
        """Begin the exchanges of a pass; those of the last one end."""
        self._finish_passes()
        self.models[chunk].begin_pass(forward=kind != "backward", backward=kind != "forward")

    def _finish_passes(self) -> None:
        for model in self.models:
            model.finish_pass()

    def run(self, run: RunMicroBatches, batches: MicroBatchStream) -> list[torch.Tensor]:
        """Run micro-batches, each of which sums its gradients over the ranks that divide them."""
        results = run(None)
        self._finish_passes()
        return results

    def run_forward(self, run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        results = run()
        self._finish_passes()
        return results

    def finish_gradients(self, factor: float) -> None:
        """Sum over copies of the same part, also on another stage, and over tensor-parallel ranks;
        multiply all."""
        for model in self.models:
            model.sum_over_copies()
        if self.tied is not None:
            self.tied.sum([own_Q for model in self.models for own_Q in model.tied_gradients()])
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


def _state_tensors(
    states: Mapping[torch.Tensor, Mapping[str, Any]],
) -> Iterator[torch.Tensor]:
    """Weights that an optimizer updates, and its state of them."""
    for weights, state in states.items():
        yield weights
        yield from (value for value in state.values() if torch.is_tensor(value))


def _may_overlap(batches: MicroBatchStream, chunks: int) -> bool:
    """Whether gradients may be reduced while the last backwards run.

    All ranks must begin the exchanges of a shared pack and the reductions in one order. They do
    where none exchanges in its last backward, and where all do, at the same places. A rank whose
    last pack is shared while another, which may share it, has one more to come, reduces after it.
    Where a stage holds several chunks, backwards of the others come after a chunk's last.
    """
    last = batches.shapes if chunks > 1 else batches.shapes[-1:]
    return batches.rows_are_full or all(shape.context == 1 for shape in last)
