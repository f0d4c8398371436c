"""The training loop: packs of the plan in, checkpoints and `run.jsonl` out."""

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.vlm.backend import current_device, has_cuda
from megatron.vlm.batch import MicroBatch
from megatron.vlm.checkpoint import save_checkpoint
from megatron.vlm.clock import Phase, PhaseClock
from megatron.vlm.configs import parameter_dtype
from megatron.vlm.initialize import initialize_parameters
from megatron.vlm.schedule import PipelineLinks, run_forward_backward
from megatron.vlm.stage import VLMStage, build_stage
from omnibal.data.packs import ScheduledPacks
from omnibal.errors import UserError
from omnibal.plan import Plan
from omnibal.runlog import RUN_FILE, StageRecord, StepRecord, append_step

_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizationOptions:
    """AdamW and its schedule, under Megatron's names."""

    lr: float
    min_lr: float
    lr_decay_style: Literal["cosine", "linear", "constant"]
    lr_warmup_fraction: float
    """Share of all steps over which the rate rises linearly from 0."""
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    clip_grad: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """One rank's share of the job: its stage, wrapped and optimized by Megatron-core."""

    plan: Plan
    links: PipelineLinks
    options: OptimizationOptions
    stage: VLMStage
    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


def build_trainer(
    plan: Plan, links: PipelineLinks, options: OptimizationOptions, steps: int, seed: int
) -> Trainer:
    """Build this rank's stage with its initial weights; collective over all ranks.

    Args:
        steps: of the whole run, over which the learning rate is scheduled.
    """
    stage = build_stage(plan, links.rank)
    initialize_parameters(stage, seed)
    model = DistributedDataParallel(
        stage.config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
        stage,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            min_lr=options.min_lr,
            weight_decay=options.weight_decay,
            adam_beta1=options.adam_beta1,
            adam_beta2=options.adam_beta2,
            adam_eps=options.adam_eps,
            clip_grad=options.clip_grad,
            bf16=plan.precision == "bf16",
            params_dtype=parameter_dtype(plan.precision),
            use_distributed_optimizer=True,
        ),
        [model],
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=round(options.lr_warmup_fraction * steps),
        lr_decay_steps=steps + 1,
        lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return Trainer(
        plan=plan,
        links=links,
        options=options,
        stage=stage,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step did on this rank; loss and norm are of the global batch."""

    loss: float
    loss_tokens: int
    grad_norm: float
    learning_rate: float
    phases_ms: dict[Phase, float]


def train_step(
    trainer: Trainer, batches: Iterator[MicroBatch], counts: list[tuple[int, int]]
) -> StepResult:
    """One optimizer step on the next `len(counts)` micro-batches; collective over all ranks.

    The loss is the mean over the global batch's loss tokens, however they are spread over packs,
    slots and ranks.
    """
    clock = PhaseClock()
    clock.switch(Phase.WAIT)
    trainer.model.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    loss_tokens = [0]
    losses = run_forward_backward(
        trainer.plan,
        trainer.model,
        trainer.links,
        _counting_loss_tokens(batches, loss_tokens),
        counts,
        clock,
    )
    # Every stage needs the count to scale its gradients. This is also where a stage that is done
    # waits for the others, so that waiting is not mistaken for the optimizer's time.
    clock.switch(Phase.WAIT)
    loss_sum, loss_token_sum = _sum_over_ranks(
        trainer.links,
        sum(float(loss) for loss in losses),
        loss_tokens[0] if trainer.links.is_last else 0,
    )
    loss = loss_sum / max(loss_token_sum, 1)
    _check_finite("loss", loss, "the weights are those before this step")
    clock.switch(Phase.OPTIMIZER)
    finalize_model_grads([trainer.model])
    trainer.model.scale_gradients(1 / max(loss_token_sum, 1))
    # The schedule moves first: its rate at 0 steps is 0, and would waste the first batch. For the
    # same reason it decays over one step more than there are.
    trainer.scheduler.step(increment=1)
    learning_rate = trainer.optimizer.param_groups[0]["lr"]
    _, grad_norm, _ = trainer.optimizer.step()
    _check_finite("gradient norm", float(grad_norm), "the weights are spoilt and not saved")
    return StepResult(
        loss=loss,
        loss_tokens=int(loss_token_sum),
        grad_norm=float(grad_norm),
        learning_rate=learning_rate,
        phases_ms=clock.stop(),
    )


def _check_finite(name: str, value: float, state: str) -> None:
    """Every rank has the same value, so all stop together."""
    if not math.isfinite(value):
        raise UserError(
            f"the {name} is {value}, and must be a number to train on; {state}; resume from the "
            "last checkpoint with a lower --lr or --clip-grad, or in fp32"
        )


def _counting_loss_tokens(batches: Iterator[MicroBatch], total: list[int]) -> Iterator[MicroBatch]:
    """The same micro-batches, adding up how many tokens carry loss where the labels are."""
    for batch in batches:
        if batch.labels_L is not None:
            total[0] += len(batch.labels_L)
        yield batch


def _sum_over_ranks(links: PipelineLinks, loss: float, loss_tokens: int) -> tuple[float, float]:
    sums = torch.tensor([loss, loss_tokens], dtype=torch.float64, device=current_device())
    dist.all_reduce(sums, group=links.activations)
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    return tuple(sums.tolist())


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """How far to train and what to keep."""

    save: Path
    save_interval: int
    """Steps between checkpoints; one is always saved at the end."""
    last_step: int
    """Stop after this many steps of the plan (counted from its start, not from a resume)."""


def own_rows(scheduled: ScheduledPacks, first_step: int) -> np.ndarray:
    """Rows of the packs that this data-parallel rank trains from `first_step` on, in order."""
    own = scheduled.dp_rank == parallel_state.get_data_parallel_rank()
    return np.flatnonzero(own & (scheduled.step >= first_step))


def train(
    trainer: Trainer,
    scheduled: ScheduledPacks,
    batches: Iterator[MicroBatch],
    first_step: int,
    options: RunOptions,
    on_line: Callable[[str], None],
) -> None:
    """Train from `first_step` to the end of the plan or to `options.last_step`.

    Args:
        batches: this rank's micro-batches from `first_step` on.
        on_line: receives one line of progress a step, on rank 0.
    """
    own = own_rows(scheduled, first_step)
    is_writer = dist.get_rank() == 0
    started = time.perf_counter()
    for step in range(first_step, options.last_step):
        rows = own[scheduled.step[own] == step]
        counts = [(int(scheduled.tiles[row]), int(scheduled.tokens[row])) for row in rows]
        step_started = time.perf_counter()
        result = train_step(trainer, batches, counts)
        step_ms = (time.perf_counter() - step_started) * 1e3
        stages = _gather_stage_records(trainer.links, result.phases_ms)
        if is_writer:
            record = _step_record(scheduled, step, result, step_ms, stages)
            append_step(record, options.save / RUN_FILE)
            on_line(_progress_line(record, first_step, options.last_step, started))
        done = step + 1
        if done % options.save_interval == 0 or done == options.last_step:
            path = save_checkpoint(
                options.save,
                done,
                trainer.plan,
                trainer.stage,
                trainer.optimizer,
                trainer.scheduler,
                asdict(trainer.options),
            )
            if is_writer:
                on_line(f"saved {path}")


def _gather_stage_records(
    links: PipelineLinks, phases_ms: dict[Phase, float]
) -> tuple[StageRecord, ...]:
    """Per stage: phase times, mean over data-parallel ranks, and peak memory, their maximum."""
    times_ms = torch.zeros(links.size, len(Phase), dtype=torch.float64, device=current_device())
    times_ms[links.rank] = torch.tensor([phases_ms[phase] for phase in Phase])
    peaks_gib = torch.zeros(links.size, dtype=torch.float64, device=current_device())
    peaks_gib[links.rank] = _peak_gib()
    dist.all_reduce(times_ms)
    dist.all_reduce(peaks_gib, op=dist.ReduceOp.MAX)
    times_ms /= parallel_state.get_data_parallel_world_size()
    return tuple(
        StageRecord(
            **{f"{phase}_ms": value for phase, value in zip(Phase, row, strict=True)},
            peak_gib=peak_gib,
        )
        for row, peak_gib in zip(times_ms.tolist(), peaks_gib.tolist(), strict=True)
    )


def _peak_gib() -> float:
    if has_cuda():
        return torch.cuda.max_memory_allocated() / _GIB
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIB


def _step_record(
    scheduled: ScheduledPacks,
    step: int,
    result: StepResult,
    step_ms: float,
    stages: tuple[StageRecord, ...],
) -> StepRecord:
    rows = np.flatnonzero(scheduled.step == step)
    return StepRecord(
        step=step,
        epoch=int(scheduled.epoch[rows[0]]),
        loss=result.loss,
        loss_tokens=result.loss_tokens,
        samples=int(np.diff(scheduled.packs.offsets)[rows].sum()),
        tiles=int(scheduled.tiles[rows].sum()),
        tokens=int(scheduled.tokens[rows].sum()),
        step_ms=step_ms,
        learning_rate=result.learning_rate,
        grad_norm=result.grad_norm,
        stages=stages,
    )


def _progress_line(record: StepRecord, first_step: int, last_step: int, started: float) -> str:
    done = record.step + 1
    elapsed_s = time.perf_counter() - started
    rate = elapsed_s / (done - first_step)
    end = time.strftime("%H:%M:%S", time.localtime(time.time() + rate * (last_step - done)))
    return (
        f"step {done:>5}/{last_step}  loss {record.loss:.4f}  grad norm {record.grad_norm:.3f}  "
        f"lr {record.learning_rate:.2e}  {record.step_ms:.0f} ms  "
        f"{record.samples * 1e3 / record.step_ms:.1f} samples/s  ends {end}"
    )
