"""One rank's stage and optimizer, and one training step."""

import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    ChainedOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer_config import ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.vlm.backend import COLLECTIVE_TIMEOUT, current_device
from megatron.vlm.inputs.batch import MicroBatch, MicroBatchStream
from megatron.vlm.inputs.data import LossWeighting
from megatron.vlm.model.adapters import ADAPTERS
from megatron.vlm.model.configs import parameter_dtype
from megatron.vlm.model.experts import take_expert_balance
from megatron.vlm.model.groups import (
    ShardGroups,
    create_context_groups,
    create_encoder_shard_groups,
    create_encoding_group,
    create_replica_groups,
    create_shard_groups,
)
from megatron.vlm.model.initialize import FirstWeights, first_values, initialize_parameters
from megatron.vlm.model.sharded_units import divide_weights
from megatron.vlm.model.sharded_weights import FirstValues, without_matrices
from megatron.vlm.model.stage import VLMStage, build_encoders, build_stage, tied_copies
from megatron.vlm.step.clock import Interval, Phase, PhaseClock, each_ms
from megatron.vlm.step.data_parallel import (
    DataParallel,
    DataParallelOverlap,
    Replicated,
    Sharded,
    TiedCopies,
)
from megatron.vlm.step.encoder_phase import Encoders, EncoderStep
from megatron.vlm.step.links import PipelineLinks, all_pipelines
from megatron.vlm.step.schedule import run_forward, run_forward_backward
from megatron.vlm.step.sharded import ShardedStage
from megatron.vlm.step.sharded_optimizer import ShardedAdam
from omnibal.job.plan import Plan
from omnibal.job.runlog import ExpertBalance
from omnibal.model.adapter_settings import trained_kinds
from omnibal.model.config import Provider
from omnibal.model.units import LANGUAGE, deepstack_of, unit_kinds
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.unit_runs import encoders_stage

_SMALLEST_WEIGHT = 1e-12  # avoids division by 0 without loss tokens
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizationOptions:
    """Options of the loss, AdamW and its schedule, under Megatron's names."""

    lr: float | None
    """Largest learning rate. None for `default_rates` of the plan."""
    min_lr: float
    lr_decay_style: Literal["cosine", "linear", "constant"]
    lr_warmup_fraction: float
    """Share of all steps with linear warmup from 0."""
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    clip_grad: float
    loss_weighting: LossWeighting = LossWeighting.TOKEN
    drop_path_rate: float = 0.0
    """Drop-path rate of the last vision layer, rising linearly from 0 at the first."""
    vision_lr: float | None = None
    """Largest rate of the vision tower, without projector and adapters. None for `lr`."""

    @property
    def of_vision(self) -> dict[str, Any]:
        """Core's settings of the vision tower's parameter groups. Empty if as of all others."""
        if self.vision_lr is None or self.vision_lr == self.lr:
            return {}
        min_lr = self.min_lr * self.vision_lr / self.lr if self.lr else 0.0
        # Core keys parameter groups by the last entry.
        return {"max_lr": self.vision_lr, "min_lr": min_lr, "is_decoupled_lr": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """One rank's stage, optimizer and links to other ranks."""

    plan: Plan
    links: PipelineLinks
    options: OptimizationOptions
    chunks: tuple[VLMStage, ...]
    data_parallel: DataParallel
    scheduler: OptimizerParamScheduler
    encoders: Encoders | None = None
    """Data-parallel encoders, or None if they are units of the stages."""

    @property
    def models(self) -> Sequence[Any]:
        """Return the chunks as wrapped for data parallelism."""
        return self.data_parallel.models

    @property
    def stage(self) -> VLMStage:
        [stage] = self.chunks
        return stage

    @property
    def stages(self) -> tuple[VLMStage, ...]:
        return self.chunks if self.encoders is None else (*self.chunks, self.encoders.stage)

    @property
    def optimizers(self) -> tuple[ChainedOptimizer | ShardedAdam | None, ...]:
        """Return the optimizer of each of `stages`, or None for frozen, replicated encoders."""
        of_chunks = (self.data_parallel.optimizer,) * len(self.chunks)
        if self.encoders is None:
            return of_chunks
        held = self.encoders.data_parallel
        return (*of_chunks, None if held is None else held.optimizer)

    @property
    def held(self) -> list[DataParallel]:
        """Return the data-parallel wrappers of everything that may be trained."""
        encoders = None if self.encoders is None else self.encoders.data_parallel
        return [held for held in (self.data_parallel, encoders) if held is not None]

    def zero_gradients(self) -> None:
        for held in self.held:
            held.zero_gradients()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch to evaluation, with encoder weights gathered; collective."""
        for model in self.models:
            model.eval()
        encoders, is_first = self.encoders, self.links.is_first
        with nullcontext() if encoders is None else encoders.gather_weights(encodes=is_first):
            yield
        for model in self.models:
            model.train()

    def run_step(self, batches: MicroBatchStream, clock: PhaseClock) -> list[torch.Tensor]:
        """Run a step's forwards and backwards, encoders included, and begin gradient reduction."""
        self._requantize_fp8_weights()
        encoding = None if self.encoders is None else EncoderStep(self.encoders, batches, clock)
        held = self.data_parallel
        with held.running(batches, trains=True) as before_last_backward:
            losses = run_forward_backward(
                self.plan,
                self.models,
                self.links,
                batches,
                clock,
                before_last_backward,
                encoding,
                held.begin_pass,
            )
        if encoding is not None:
            encoding.finish()
        return losses

    @property
    def units(self) -> Stage:
        """Return the units of all chunks, which determine the fields this rank reads."""
        return self.plan.units_of(self.links.rank)

    @property
    def forward_units(self) -> Stage:
        """Return the units that `run_forward` runs on this rank."""
        if self.encoders is None or not self.links.is_first:
            return self.units
        return Stage(units=(*encoders_stage(self.plan.model).units, *self.units.units))

    def append_empty(
        self, batches: MicroBatchStream, slots: int, *, answers: bool = False
    ) -> MicroBatchStream:
        """Append empty micro-batches up to `slots`, as lockstep ranks need."""
        if slots <= len(batches):
            return batches
        empty = MicroBatch.empty(self.plan.model, current_device(), answers=answers)
        return batches.append_empty(slots, empty)

    def max_in_lockstep(self, number: int) -> int:
        """Return the maximum of a number over lockstep ranks; collective over them."""
        parallel = self.plan.parallel
        if parallel.lockstep_ranks == 1:
            return number
        group = parallel_state.get_expert_model_parallel_group()
        if parallel.sharded > parallel.routing_ranks:
            weights = self.chunks[0].sharded
            assert weights is not None
            group = weights.units[0].flats[0].groups.shards
        most = torch.tensor(number, device=current_device())
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        return int(most)

    def run_forward(self, batches: MicroBatchStream) -> list[torch.Tensor]:
        """Run forwards only. The first stage runs data-parallel encoders on its own items."""
        self._requantize_fp8_weights()
        encode = None if self.encoders is None else self.encoders.encode
        held = self.data_parallel
        with held.running(batches, trains=False):
            return run_forward(self.plan, self.models, self.links, batches, encode, held.begin_pass)

    def _requantize_fp8_weights(self) -> None:
        """Make FP8 linears quantise their weights again after an update."""
        for stage in self.chunks:
            stage.set_is_first_microbatch()

    def update_weights(self, divisor: float) -> float | None:
        """Reduce gradients, divide by `divisor`, clip, step, and begin gathering weights.

        Returns the gradient norm before clipping; if not finite, None, with unchanged weights.
        """
        self.wait_for_weights()
        for held in self.held:
            held.finish_gradients(1 / divisor)
        grad_norm = math.hypot(*[held.grad_norm() for held in self.held])
        is_finite = math.isfinite(grad_norm)
        for held in self.held if is_finite else ():
            held.step(self.options.clip_grad, grad_norm)
        self.data_parallel.begin_gather(changed=is_finite)
        return grad_norm if is_finite else None

    def discard_gradients(self) -> None:
        """End a step without an update; collective over data-parallel ranks."""
        self.wait_for_weights()
        self.data_parallel.discard_gradients()

    def wait_for_weights(self) -> None:
        """Wait until all weights are gathered, before they are saved or read outside a forward."""
        self.data_parallel.wait_for_weights()


def build_trainer(
    plan: Plan,
    links: PipelineLinks,
    options: OptimizationOptions,
    steps: int,
    seed: int,
    *,
    provider: Provider = "local",
    origin: FirstWeights = "seeded",
) -> Trainer:
    """Build this rank's stage with its first weights, for a run of `steps`; collective."""
    links = links.for_schedule(plan.schedule)
    groups = create_context_groups(plan.parallel, [level.context for level in plan.levels])
    is_sharded = plan.parallel.sharded > 1
    with without_matrices() if is_sharded else nullcontext():
        chunks = tuple(
            build_stage(plan, part, options.drop_path_rate, provider, groups)
            for part in links.parts
        )
    overlaps = plan.parallel.data > 1
    settings = _optimizer_config(plan, options, overlaps)
    tied = _tied_copies(plan, links)
    values_of = partial(first_values, seed=seed, origin=origin)
    data_parallel: DataParallel
    if is_sharded:
        fed = [plan.trained_towers(part - 1) for part in links.parts]
        shards = create_shard_groups(plan.parallel)
        data_parallel = _sharded(chunks, settings, options.of_vision, values_of, shards, fed, tied)
    else:
        for stage in chunks:
            initialize_parameters(stage, values_of(stage))
        exchange = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=overlaps,
            overlap_param_gather=overlaps,
            # Core's hooks then wait for weights but do not begin the next gather.
            align_param_gather=overlaps,
            bucket_size=plan.parallel.bucket_parameters,
        )
        data_parallel = _replicated(chunks, settings, options.of_vision, exchange, tied=tied)
    encoders = None if plan.beside is None else _build_encoders(plan, options, settings, values_of)
    of_encoders = None if encoders is None else encoders.data_parallel
    scheduler = OptimizerParamScheduler(
        _Scheduled(data_parallel, of_encoders),
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=round(options.lr_warmup_fraction * steps),
        lr_decay_steps=steps + 1,
        lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # A run goes on with the rates and steps that it is given now.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return Trainer(
        plan=plan,
        links=links,
        options=options,
        chunks=chunks,
        data_parallel=data_parallel,
        scheduler=scheduler,
        encoders=encoders,
    )


class _Scheduled:
    """All optimizers of a rank, as core's scheduler takes them."""

    def __init__(self, *held: DataParallel | None) -> None:
        self._held = [wrapper for wrapper in held if wrapper is not None]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return all parameter groups (torch's name); not cached, as loading replaces them."""
        return [group for wrapper in self._held for group in wrapper.optimizer.param_groups]


def _replicated(
    chunks: Sequence[VLMStage],
    settings: OptimizerConfig,
    of_vision: dict[str, Any],
    exchange: DistributedDataParallelConfig,
    groups: ProcessGroupCollection | None = None,
    tied: TiedCopies | None = None,
) -> Replicated:
    """Wrap replicated chunks; `groups` replace core's process groups if given."""
    models = [
        DistributedDataParallel(stage.config, exchange, stage, pg_collection=groups)
        for stage in chunks
    ]
    overrides = get_standard_config_overrides(settings)
    if of_vision:
        is_vision = ParamPredicate("vision tower", _vision_weights(chunks).__contains__)
        overrides[ParamKey(predicate=is_vision)] = of_vision
    optimizer = get_megatron_optimizer(
        settings, models, overrides, use_gloo_process_groups=False, pg_collection=groups
    )
    # One kernel without temporary tensors: core's default takes 4 bytes a parameter on CUDA, and a
    # dozen operations per tensor on the CPU.
    for chained in optimizer.chained_optimizers:
        inner = None if chained.is_stub_optimizer else chained.optimizer
        if isinstance(inner, torch.optim.AdamW):
            for group in (inner.defaults, *inner.param_groups):
                group.update(fused=True, foreach=False)
    return Replicated(
        models=models,
        optimizer=optimizer,
        reduction_groups=groups,
        tied=tied,
        overlap=DataParallelOverlap(models) if exchange.overlap_param_gather else None,
    )


def _vision_weights(chunks: Sequence[VLMStage]) -> set[torch.nn.Parameter]:
    """Return weights of the vision tower, without its projector and adapters."""
    named = (item for stage in chunks for item in stage.named_parameters())
    towers = ("vision_embedding.", "vision.")
    return {own for name, own in named if name.startswith(towers) and ADAPTERS not in name}


def _sharded(
    chunks: Sequence[VLMStage],
    settings: OptimizerConfig,
    of_vision: dict[str, Any],
    values_of: Callable[[VLMStage], FirstValues],
    shards: tuple[ShardGroups, ShardGroups],
    fed: Sequence[Collection[str]],
    tied: TiedCopies | None = None,
) -> Sharded:
    """Shard a stage's chunks, built without matrices, and set their first weights.

    `shards` are the groups of dense weights and experts; `fed` has towers with input gradients.
    """
    models = []
    for stage, wanted in zip(chunks, fed, strict=True):
        divide_weights(stage, *shards, values_of(stage), wanted)
        assert stage.sharded is not None
        models.append(ShardedStage(stage, stage.sharded))
    gradients = {flat: own for model in models for flat, own in model.gradients.items()}
    of_groups = {
        "lr": settings.lr,
        "betas": (settings.adam_beta1, settings.adam_beta2),
        "eps": settings.adam_eps,
        "weight_decay": settings.weight_decay,
        # Core's own settings of parameter groups.
        "max_lr": settings.lr,
        "min_lr": settings.min_lr,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "default_config": True,
    }
    vision = _vision_weights(chunks) if of_vision else set()
    optimizer = ShardedAdam(
        gradients, chunks[0].tp_group, of_groups, vision, {**of_vision, "default_config": False}
    )
    return Sharded(models=models, optimizer=optimizer, tied=tied)


def _build_encoders(
    plan: Plan,
    options: OptimizationOptions,
    settings: OptimizerConfig,
    values_of: Callable[[VLMStage], FirstValues],
) -> Encoders:
    assert plan.beside is not None, "encoders are data-parallel"
    group, groups = create_encoding_group(plan), create_replica_groups()
    is_sharded = plan.beside.sharded > 1
    with without_matrices() if is_sharded else nullcontext():
        stage = build_encoders(plan, groups, options.drop_path_rate)
    trained = frozenset(
        kind.tower
        for kind in unit_kinds(plan.model)
        if kind.tower != LANGUAGE
        and kind.name in trained_kinds(plan.model, plan.frozen, plan.adapters)
    )
    held: DataParallel | None = None
    if is_sharded:
        shards = create_encoder_shard_groups(plan)
        held = _sharded([stage], settings, options.of_vision, values_of, (shards, shards), [()])
    else:
        initialize_parameters(stage, values_of(stage))
    if trained and not is_sharded:
        # No overlap: nothing else runs during these exchanges.
        exchange = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True
        )
        held = _replicated([stage], settings, options.of_vision, exchange, groups)
    return Encoders(
        stage=stage,
        data_parallel=held,
        group=group,
        trained=trained,
        made={
            name: (
                name,
                *(feature.name for feature in deepstack_of(plan.model) if feature.tower == name),
            )
            for name in plan.model.encoders
        },
        trained_features=plan.trained_towers(0),
        items_per_pass=plan.beside.items_per_pass,
    )


def _optimizer_config(plan: Plan, options: OptimizationOptions, overlaps: bool) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        min_lr=options.min_lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        adam_eps=options.adam_eps,
        clip_grad=options.clip_grad,
        bf16=plan.precision != "fp32",
        params_dtype=parameter_dtype(plan.precision),
        use_distributed_optimizer=True,
        overlap_param_gather=overlaps,
        # Any scale makes core check for gradients that are not finite and skip the update.
        loss_scale=1.0,
    )


def _tied_copies(plan: Plan, links: PipelineLinks) -> TiedCopies | None:
    """Return this stage's copies of a tied matrix with their group, or None; collective."""
    stages = [links.stage_of(part) for part in tied_copies(plan)]
    if len(set(stages)) == 1:
        return TiedCopies(None) if links.rank in stages else None
    if not stages:
        return None
    # Core's embedding group joins the first and last stage, not these stages.
    holders = [[ranks[stage] for stage in stages] for ranks in all_pipelines()]
    own, _ = dist.new_subgroups_by_enumeration(holders, timeout=COLLECTIVE_TIMEOUT)
    return None if own is None else TiedCopies(own)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Result of a step, equal on every rank except `intervals`."""

    loss: float
    """Weighted mean loss over the global batch; with `sum` too, so that steps compare."""
    loss_tokens: int
    grad_norm: float
    """Gradient norm before clipping; NaN in a skipped step."""
    learning_rate: float
    skipped: bool
    """Whether loss or gradients were not finite, so that weights are unchanged."""
    replaced_samples: int
    """Unreadable samples in the global batch."""
    stop_requested: bool
    experts: ExpertBalance | None
    """Balance of tokens over experts, or None without experts."""
    intervals: tuple[Interval, ...]
    """This rank's intervals in order; one forward and backward per micro-batch."""

    @property
    def phases_ms(self) -> dict[Phase, float]:
        return {phase: sum(each_ms(self.intervals, phase)) for phase in Phase}


def train_step(
    trainer: Trainer, batches: MicroBatchStream, stop_requested: bool = False, slots: int = 0
) -> StepResult:
    """Run one optimizer step on this rank's micro-batches; collective over all ranks.

    The loss is the weighted mean over loss tokens of the global batch, for any packing or layout.

    Args:
        stop_requested: whether this rank was asked to stop. All ranks learn of it.
        slots: micro-batches with empty ones appended for lockstep ranks.
    """
    batches = trainer.append_empty(batches, slots)
    clock = PhaseClock()
    clock.switch(Phase.OPTIMIZER)
    trainer.zero_gradients()
    seen = SeenBatches(reads_once=trainer.encoders is not None)
    losses = trainer.run_step(seen.count(batches), clock)
    # Every stage needs the weight sum. Stages also wait here, outside the optimizer's phase.
    clock.switch(Phase.WAIT)
    sums = global_sums(trainer.links, losses, seen, stop_requested)
    clock.switch(Phase.OPTIMIZER)
    for error in seen.list_errors(trainer.links):
        _log.warning(f"passed over: {error}")
    # Schedule first: the rate at step 0 is 0, and would waste the first batch. The decay has one
    # more step for the same reason. Skipped steps count too, so that rates depend on the sample
    # only.
    trainer.scheduler.step(increment=1)
    # Core's mark of groups at the rate of `lr`. None has it if only vision is trained.
    groups = trainer.scheduler.optimizer.param_groups
    learning_rate = max(groups, key=lambda group: group["default_config"])["lr"]
    grad_norm = None
    if math.isfinite(sums.loss):
        is_summed = trainer.options.loss_weighting is LossWeighting.SUM
        grad_norm = trainer.update_weights(1.0 if is_summed else sums.divisor)
    else:
        trainer.discard_gradients()
    return StepResult(
        loss=sums.mean_loss,
        loss_tokens=int(sums.loss_tokens),
        grad_norm=math.nan if grad_norm is None else grad_norm,
        learning_rate=learning_rate,
        skipped=grad_norm is None,
        replaced_samples=int(sums.replaced_samples),
        stop_requested=sums.stop_requests > 0,
        experts=take_expert_balance(trainer.chunks, trainer.plan.parallel),
        intervals=clock.stop(),
    )


class SeenBatches:
    """Counter of loss tokens, loss weights and unreadable samples of passing micro-batches.

    `reads_once`: no other rank reads this rank's images, with data-parallel encoders.
    """

    def __init__(self, reads_once: bool = False) -> None:
        self.reads_once = reads_once
        self.loss_tokens = 0
        self.loss_weights: list[torch.Tensor] = []
        self.unreadable: list[str] = []

    def count(self, batches: MicroBatchStream) -> MicroBatchStream:
        return replace(batches, batches=map(self._count_batch, batches.batches))

    def _count_batch(self, batch: MicroBatch) -> MicroBatch:
        if batch.labels_L is not None:
            self.loss_tokens += len(batch.labels_L)
            self.loss_weights.append(batch.loss_weights_L)
        self.unreadable += batch.unreadable
        return batch

    def list_errors(self, links: PipelineLinks) -> tuple[str, ...]:
        """Return errors of unreadable samples, on one rank only."""
        first = links.is_first and parallel_state.get_tensor_model_parallel_rank() == 0
        return tuple(self.unreadable) if first or self.reads_once else ()


@dataclass(frozen=True, slots=True)
class GlobalSums:
    loss: float
    loss_weight: float
    loss_tokens: float
    replaced_samples: float
    stop_requests: float

    @property
    def divisor(self) -> float:
        """Return the positive divisor of loss and gradients."""
        return max(self.loss_weight, _SMALLEST_WEIGHT)

    @property
    def mean_loss(self) -> float:
        return self.loss / self.divisor


def global_sums(
    links: PipelineLinks,
    losses: Sequence[torch.Tensor],
    seen: SeenBatches,
    stop_requested: bool = False,
) -> GlobalSums:
    """Sum all ranks' counts and losses in one all-reduce; collective over all ranks."""
    # Tensor-parallel ranks see the same micro-batches; rank 0 counts.
    counts = parallel_state.get_tensor_model_parallel_rank() == 0
    tokens = seen.loss_tokens if counts and links.is_last else 0
    replaced = len(seen.list_errors(links))
    own = torch.tensor(
        [0, 0, tokens, replaced, stop_requested], dtype=torch.float64, device=current_device()
    )
    if counts and links.is_last and losses:
        own[0] = torch.stack(losses).sum(dtype=torch.float64)
    if counts and links.is_last and seen.loss_weights:
        own[1] = torch.cat(seen.loss_weights).sum(dtype=torch.float64)
    dist.all_reduce(own)
    return GlobalSums(*own.tolist())
