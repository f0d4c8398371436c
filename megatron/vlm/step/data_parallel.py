"""How data-parallel ranks hold a stage in training: whole, by Megatron-core, or divided.

A trainer asks the one or the other the same questions, in the order of a step.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

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

RunMicroBatches = Callable[[Callable[[], None] | None], list[torch.Tensor]]
"""Function that runs a step's micro-batches; calls what it is given before the last backward."""


class DataParallel(Protocol):
    """What holds a stage's weights and gradients with other data-parallel ranks."""

    @property
    def optimizer(self) -> ChainedOptimizer | ShardedAdam:
        """The optimizer of what is trained."""

    @property
    def model(self) -> Any:
        """The stage as micro-batches run it; itself it is its `module`."""

    def zero_gradients(self) -> None:
        """Zero the gradients, before the first micro-batch of a step."""

    def begin_pass(self, kind: Literal["forward", "backward", "both"]) -> None:
        """Have weights ready for a forward, a backward, or a forward and its backward at once."""

    def run(self, run: RunMicroBatches, batches: MicroBatchStream) -> list[torch.Tensor]:
        """Run a step's micro-batches, and begin to sum their gradients over ranks."""

    def run_forward(self, run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Run forwards alone."""

    def finish_gradients(self, factor: float) -> None:
        """Sum what is left to sum over ranks, and multiply all gradients."""

    def grad_norm(self) -> float:
        """Norm of all ranks' gradients; not finite where any of them is not; collective."""

    def step(self, clip_grad: float, grad_norm: float) -> None:
        """Clip gradients by the norm of all that is trained, and update weights."""

    def begin_gather(self, changed: bool) -> None:
        """Begin to make weights whole on all ranks, if an update has changed them."""

    def discard_gradients(self) -> None:
        """Finish the sums of a step whose gradients nobody will use."""

    def wait_for_weights(self) -> None:
        """Wait until weights are what the last update made of them."""

    def weights(self) -> Iterator[torch.Tensor]:
        """Weights that this rank keeps, as it computes with them."""

    def gradients(self) -> Iterator[torch.Tensor]:
        """Sums of gradients that this rank keeps."""

    def optimizer_state(self) -> Iterator[torch.Tensor]:
        """State of the optimizer, with the weights that it updates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicated:
    """Whole weights and gradients on every rank, and the optimizer's state divided: core's
    DistributedDataParallel and distributed optimizer."""

    model: DistributedDataParallel
    optimizer: ChainedOptimizer
    reduction_groups: ProcessGroupCollection | None
    """Process groups of the gradient reduction where they are not core's: of a stage that holds one
    of two tied copies, and of encoders."""
    overlap: DataParallelOverlap | None
    """Exchanges of data-parallel ranks while the stage computes; None where there is one rank."""

    def zero_gradients(self) -> None:
        """Zero core's buffers of gradients."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def begin_pass(self, kind: Literal["forward", "backward", "both"]) -> None:
        """Nothing: a unit waits for its weights by itself."""

    def run(self, run: RunMicroBatches, batches: MicroBatchStream) -> list[torch.Tensor]:
        """Run micro-batches; gradients are summed in the last backward, where ranks may."""
        if self.overlap is None:
            return run(None)
        with self.overlap.reducing():
            return run(self.overlap.before_last_backward if _may_overlap(batches) else None)

    def run_forward(self, run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Run forwards alone."""
        return run()

    def finish_gradients(self, factor: float) -> None:
        """Wait for the sums, also of tied copies and over tensor-parallel ranks; multiply them."""
        finalize_model_grads([self.model], pg_collection=self.reduction_groups)
        self.model.scale_gradients(factor)

    def grad_norm(self) -> float:
        """Norm of all ranks' gradients; not finite where any of them is not.

        Core's own `step` looks at gradients alone: where their norm overflows, it clips all of them
        to zero and steps on momentum.
        """
        has_infinite = self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        return math.inf if has_infinite else grad_norm

    def step(self, clip_grad: float, grad_norm: float) -> None:
        """Clip, and update this rank's share of the weights."""
        for one in self.optimizer.chained_optimizers:
            parameters = [] if one.is_stub_optimizer else one.get_parameters()
            if clip_grad > 0 and parameters:
                clip_grad_by_total_norm_fp32(parameters, clip_grad, grad_norm)
        self.optimizer.step_with_ready_grads()

    def begin_gather(self, changed: bool) -> None:
        """Begin to gather all weights, if an update has changed each rank's share."""
        if self.overlap is not None:
            self.overlap.begin_gather(changed)

    def discard_gradients(self) -> None:
        """Finish the sums of a step whose gradients nobody will use."""
        if self.overlap is not None:
            self.overlap.finish_reduction()

    def wait_for_weights(self) -> None:
        """Wait until all weights are gathered."""
        if self.overlap is not None:
            self.overlap.wait_for_weights()

    def weights(self) -> Iterator[torch.Tensor]:
        """All of them, whole: those that are trained lie in core's buffers."""
        yield from self.model.module.parameters()

    def gradients(self) -> Iterator[torch.Tensor]:
        """Core's buffers of them."""
        buffers = (*self.model.buffers, *self.model.expert_parallel_buffers)
        yield from (buffer.grad_data for buffer in buffers)

    def optimizer_state(self) -> Iterator[torch.Tensor]:
        """The parts of weights in float32 and the moments."""
        for optimizer in self.optimizer.chained_optimizers:
            kept = {} if optimizer.is_stub_optimizer else optimizer.optimizer.state
            yield from _state_tensors(kept)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharded:
    """Parts of weights, gradients and optimizer state on every rank."""

    model: ShardedStage
    optimizer: ShardedAdam
    tied: dist.ProcessGroup | None = None
    """The two ranks that hold the same part of a tied matrix of two stages; None where there is
    none here."""

    def zero_gradients(self) -> None:
        """Zero this rank's part."""
        self.model.zero_gradients()

    def begin_pass(self, kind: Literal["forward", "backward", "both"]) -> None:
        """Begin the exchanges of a pass; those of the last one end."""
        self.model.begin_pass(forward=kind != "backward", backward=kind != "forward")

    def run(self, run: RunMicroBatches, batches: MicroBatchStream) -> list[torch.Tensor]:
        """Run micro-batches, each of which sums its gradients over the ranks that divide them."""
        results = run(None)
        self.model.finish_pass()
        return results

    def run_forward(self, run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Run forwards alone."""
        results = run()
        self.model.finish_pass()
        return results

    def finish_gradients(self, factor: float) -> None:
        """Sum over copies of the same part, also on another stage, and over tensor-parallel ranks;
        multiply all."""
        self.model.sum_over_copies(self.tied)
        self.optimizer.sum_over_tensor_ranks()
        self.optimizer.scale_gradients(factor)

    def grad_norm(self) -> float:
        """Norm of all ranks' gradients; not finite where any of them is not."""
        return self.optimizer.norm()

    def step(self, clip_grad: float, grad_norm: float) -> None:
        """Clip, and update this rank's parts."""
        self.optimizer.step(clip_grad, grad_norm)

    def begin_gather(self, changed: bool) -> None:
        """Nothing: every pass gathers weights for itself."""

    def discard_gradients(self) -> None:
        """Nothing: the sums of a pass end with it."""

    def wait_for_weights(self) -> None:
        """Nothing: a rank's part is its own."""

    def weights(self) -> Iterator[torch.Tensor]:
        """This rank's parts."""
        yield from (flat.own_Q for flat in self.model.weights.flats)

    def gradients(self) -> Iterator[torch.Tensor]:
        """Gradients of this rank's parts."""
        yield from (gradients.own_Q for gradients in self.model.gradients.values())

    def optimizer_state(self) -> Iterator[torch.Tensor]:
        """The parts in float32 and their moments."""
        yield from _state_tensors(self.optimizer.inner.state)


def _state_tensors(
    states: Mapping[torch.Tensor, Mapping[str, Any]],
) -> Iterator[torch.Tensor]:
    """Weights that an optimizer updates, and its state of them."""
    for weights, state in states.items():
        yield weights
        yield from (value for value in state.values() if torch.is_tensor(value))


def _may_overlap(batches: MicroBatchStream) -> bool:
    """Whether gradients may be reduced while the last micro-batch's backward runs.

    All ranks must begin the exchanges of a shared pack and the reductions in one order. They do
    where none exchanges in its last backward, and where all do, at the same places. A rank whose
    last pack is shared while another, which may share it, has one more to come, reduces after it.
    """
    return batches.rows_are_full or not batches.shapes or batches.shapes[-1].context == 1
