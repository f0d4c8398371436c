"""One rank's stage and optimizer, and one training step."""

import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    ChainedOptimizer,
    OptimizerConfig,
    ParamKey,
    _get_param_groups,
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
from megatron.vlm.step.clock import Interval, Phase, PhaseClock, phase_times_ms
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

_MIN_DIVISOR = 1e-12  # divisor of the loss of a step without loss tokens
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizationOptions:
    """Options of the loss, AdamW and its schedule, under Megatron's names."""

    lr: float | None  # maximum; `fill_rates` replaces None before training
    min_lr: float
    lr_decay_style: Literal["cosine", "linear", "constant"]
    lr_warmup_fraction: float  # share of all steps with linear warmup from 0
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    clip_grad: float
    loss_weighting: LossWeighting = LossWeighting.TOKEN
    drop_path_rate: float = 0.0  # of the last vision layer, rising linearly from 0 at the first
    # As `lr`, for the vision tower without projector and adapters; None if it is not trained.
    vision_lr: float | None = None

    @property
    def vision_settings(self) -> dict[str, Any]:
        """Return core's settings of the vision tower's parameter groups, empty if not separate."""
        if self.vision_lr is None or self.vision_lr == self.lr:
            return {}
        min_lr = self.min_lr * self.vision_lr / self.lr if self.lr else 0.0
        # `is_decoupled_lr` is among the four settings by which core finds a checkpoint's groups.
        return {"max_lr": self.vision_lr, "min_lr": min_lr, "is_decoupled_lr": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    plan: Plan
    links: PipelineLinks
    options: OptimizationOptions
    chunks: tuple[VLMStage, ...]  # this rank's parts of the model, in model order
    data_parallel: DataParallel  # of the chunks
    scheduler: OptimizerParamScheduler
    encoders: Encoders | None = None  # data-parallel, or None if they are units of the stages

    @property
    def models(self) -> Sequence[Any]:
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
        """Return an optimizer per entry of `stages`; None for frozen, replicated encoders."""
        optimizers = (self.data_parallel.optimizer,) * len(self.chunks)
        if self.encoders is None:
            return optimizers
        wrapper = self.encoders.data_parallel
        return (*optimizers, None if wrapper is None else wrapper.optimizer)

    @property
    def wrappers(self) -> list[DataParallel]:
        """Return the data-parallel wrappers of everything that may be trained."""
        encoders = None if self.encoders is None else self.encoders.data_parallel
        return [self.data_parallel] if encoders is None else [self.data_parallel, encoders]

    def zero_gradients(self) -> None:
        for wrapper in self.wrappers:
            wrapper.zero_gradients()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate in this context, with weights of data-parallel encoders gathered; collective."""
        for model in self.models:
            model.eval()
        encoders, is_first = self.encoders, self.links.is_first
        with nullcontext() if encoders is None else encoders.gather_weights(encodes=is_first):
            yield
        for model in self.models:
            model.train()

    def run_step(self, batches: MicroBatchStream, clock: PhaseClock) -> list[torch.Tensor]:
        """Run a step's passes and begin gradient reduction; return the loss sum per micro-batch."""
        self._requantize_fp8_weights()
        encoding = None if self.encoders is None else EncoderStep(self.encoders, batches, clock)
        wrapper = self.data_parallel
        with wrapper.running(batches, trains=True) as before_last_backward:
            losses = run_forward_backward(
                self.plan,
                self.models,
                self.links,
                batches,
                clock,
                wrapper.begin_pass,
                before_last_backward,
                encoding,
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
        """Append empty micro-batches up to `slots`, for collectives with other lockstep ranks."""
        if slots <= len(batches):
            return batches
        empty = MicroBatch.empty(self.plan.model, current_device(), answers=answers)
        return batches.append_empty(slots, empty)

    def max_in_lockstep(self, number: int) -> int:
        """Return the maximum of a number over lockstep ranks; collective over them."""
        parallel = self.plan.parallel
        if parallel.lockstep_ranks == 1:
            return number
        # The larger of two groups: ranks that share experts, and ranks that shard weights.
        group = parallel_state.get_expert_model_parallel_group()
        if parallel.sharded > parallel.routing_ranks:
            weights = self.chunks[0].sharded
            assert weights is not None
            group = weights.units[0].flats[0].groups.shards
        maximum = torch.tensor(number, device=current_device())
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
        return int(maximum)

    def run_forward(self, batches: MicroBatchStream) -> list[torch.Tensor]:
        """Run forwards only; return head outputs. The first stage runs data-parallel encoders."""
        self._requantize_fp8_weights()
        encode = None if self.encoders is None else self.encoders.encode
        begin_pass = self.data_parallel.begin_pass
        with self.data_parallel.running(batches, trains=False):
            return run_forward(self.plan, self.models, self.links, batches, begin_pass, encode)

    def _requantize_fp8_weights(self) -> None:
        # Transformer Engine keeps quantised weights until the first micro-batch after an update.
        for stage in self.chunks:
            stage.set_is_first_microbatch()

    def update_weights(self, divisor: float) -> float | None:
        """Reduce gradients, divide by `divisor`, clip, step, and begin gathering weights.

        Returns the gradient norm before clipping, or None with unchanged weights if not finite.
        """
        self.wait_for_weights()
        for wrapper in self.wrappers:
            wrapper.finish_gradients(1 / divisor)
        # The norm of all gradients: stages and data-parallel encoders have no parameter in common.
        grad_norm = math.hypot(*[wrapper.grad_norm() for wrapper in self.wrappers])
        is_finite = math.isfinite(grad_norm)
        for wrapper in self.wrappers if is_finite else ():
            wrapper.step(self.options.clip_grad, grad_norm)
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
    """Build this rank's stage with its initial weights, for a run of `steps`; collective."""
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
    tied = _group_tied_copies(plan, links)
    values_of = partial(first_values, seed=seed, origin=origin)
    data_parallel: DataParallel
    if is_sharded:
        # Towers with gradients over the cut before each chunk.
        input_towers = [plan.trained_towers(part - 1) for part in links.parts]
        shards = create_shard_groups(plan.parallel)
        data_parallel = _wrap_sharded(
            chunks, settings, options.vision_settings, values_of, shards, input_towers, tied
        )
    else:
        for stage in chunks:
            initialize_parameters(stage, values_of(stage))
        bucket = plan.parallel.bucket_parameters
        data_parallel = _wrap_replicated(
            chunks, settings, options.vision_settings, overlaps, bucket, tied=tied
        )
    encoders = _build_encoders(plan, options, settings, values_of)
    param_groups = list(data_parallel.optimizer.param_groups)
    if encoders is not None and encoders.data_parallel is not None:
        param_groups += encoders.data_parallel.optimizer.param_groups
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=param_groups),  # all that core's scheduler reads
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
        # A continued run takes its rates and steps from the command line, not the checkpoint.
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


def _wrap_replicated(
    chunks: Sequence[VLMStage],
    settings: OptimizerConfig,
    vision_settings: dict[str, Any],
    overlaps: bool,
    bucket_parameters: int | None = None,
    groups: ProcessGroupCollection | None = None,
    tied: TiedCopies | None = None,
) -> Replicated:
    """Return core's DDP and optimizer of chunks; `groups` replace core's process groups."""
    exchange = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=overlaps,
        # Core's hooks then wait for weights but do not begin the next gather.
        align_param_gather=overlaps,
        bucket_size=bucket_parameters,
    )
    models = [
        DistributedDataParallel(stage.config, exchange, stage, pg_collection=groups)
        for stage in chunks
    ]
    overrides = _group_overrides(chunks, settings, vision_settings)
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
        overlap=DataParallelOverlap(models if overlaps else ()),
    )


def _group_overrides(
    chunks: Sequence[VLMStage], settings: OptimizerConfig, vision_settings: dict[str, Any]
) -> dict[ParamKey, dict[str, Any]]:
    """Return core's settings of parameter groups: vectors do not decay, and `vision_settings` are
    of the vision tower without its projector and adapters."""
    named = (item for stage in chunks for item in stage.named_parameters())
    towers = ("vision_embedding.", "vision.")
    vision = {weight for name, weight in named if name.startswith(towers) and ADAPTERS not in name}
    overrides = get_standard_config_overrides(settings)
    if vision_settings:
        is_vision = ParamPredicate("vision tower", vision.__contains__)
        overrides[ParamKey(predicate=is_vision)] = vision_settings
    return overrides


def _wrap_sharded(
    chunks: Sequence[VLMStage],
    settings: OptimizerConfig,
    vision_settings: dict[str, Any],
    values_of: Callable[[VLMStage], FirstValues],
    shards: tuple[ShardGroups, ShardGroups],
    input_towers: Sequence[Collection[str]],
    tied: TiedCopies | None = None,
) -> Sharded:
    """Shard a stage's chunks, built without matrices, and set their initial weights.

    Args:
        shards: groups of dense weights, and of experts.
        input_towers: by chunk, towers with a gradient of the chunk's inputs.
    """
    models = []
    for stage, towers in zip(chunks, input_towers, strict=True):
        divide_weights(stage, *shards, values_of(stage), towers)
        assert stage.sharded is not None
        models.append(ShardedStage(stage, stage.sharded))
    gradients = {flat: own for model in models for flat, own in model.gradients.items()}
    groups = _get_param_groups(
        models, settings, _group_overrides(chunks, settings, vision_settings)
    )
    optimizer = ShardedAdam(gradients, chunks[0].tp_group, settings, groups)
    return Sharded(models=models, optimizer=optimizer, tied=tied)


def _build_encoders(
    plan: Plan,
    options: OptimizationOptions,
    settings: OptimizerConfig,
    values_of: Callable[[VLMStage], FirstValues],
) -> Encoders | None:
    if plan.data_parallel_encoders is None:
        return None
    group, groups = create_encoding_group(plan), create_replica_groups()
    is_sharded = plan.data_parallel_encoders.sharded > 1
    with without_matrices() if is_sharded else nullcontext():
        stage = build_encoders(plan, groups, options.drop_path_rate)
    trained = frozenset(
        kind.tower
        for kind in unit_kinds(plan.model)
        if kind.tower != LANGUAGE
        and kind.name in trained_kinds(plan.model, plan.frozen, plan.adapters)
    )
    wrapper: DataParallel | None = None
    if is_sharded:
        shards = create_encoder_shard_groups(plan)
        wrapper = _wrap_sharded(
            [stage], settings, options.vision_settings, values_of, (shards, shards), [()]
        )
    else:
        initialize_parameters(stage, values_of(stage))
    if trained and not is_sharded:
        # No overlap: nothing else runs during these exchanges.
        vision = options.vision_settings
        wrapper = _wrap_replicated([stage], settings, vision, overlaps=False, groups=groups)
    return Encoders(
        stage=stage,
        data_parallel=wrapper,
        group=group,
        trained=trained,
        outputs={
            name: (
                name,
                *(feature.name for feature in deepstack_of(plan.model) if feature.tower == name),
            )
            for name in plan.model.encoders
        },
        trained_features=plan.trained_towers(0),
        items_per_pass=plan.data_parallel_encoders.items_per_pass,
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


def _group_tied_copies(plan: Plan, links: PipelineLinks) -> TiedCopies | None:
    """Return this stage's copies of a tied matrix with their group, or None; collective."""
    stages = [links.stage_of(part) for part in tied_copies(plan)]
    if len(set(stages)) == 1:
        return TiedCopies(None) if links.rank in stages else None
    if not stages:
        return None
    # Core's embedding group joins the first and last stage; copies may be elsewhere.
    holders = [[ranks[stage] for stage in stages] for ranks in all_pipelines()]
    own, _ = dist.new_subgroups_by_enumeration(holders, timeout=COLLECTIVE_TIMEOUT)
    return None if own is None else TiedCopies(own)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Result of a step, equal on every rank except `intervals`."""

    loss: float  # weighted mean loss over the global batch; with `sum` too, so that steps compare
    loss_tokens: int
    grad_norm: float  # gradient norm before clipping; NaN in a skipped step
    learning_rate: float
    skipped: bool  # whether loss or gradients were not finite, so that weights are unchanged
    replaced_samples: int  # unreadable samples in the global batch
    stop_requested: bool
    experts: ExpertBalance | None  # balance of tokens over experts, or None without experts
    prediction_loss: float  # as `loss`, of the prediction layer; 0 without one
    intervals: tuple[Interval, ...]  # phases of this rank in order, several per micro-batch

    @property
    def phases_ms(self) -> dict[Phase, float]:
        return {phase: sum(phase_times_ms(self.intervals, phase)) for phase in Phase}


def train_step(
    trainer: Trainer, batches: MicroBatchStream, stop_requested: bool = False, slots: int = 0
) -> StepResult:
    """Run one optimizer step on this rank's micro-batches; collective over all ranks.

    The loss is the weighted mean over loss tokens of the global batch, for any packing or layout.

    Args:
        stop_requested: whether this rank was asked to stop. All ranks learn of it.
        slots: minimum micro-batches; empty micro-batches are appended for lockstep ranks.
    """
    batches = trainer.append_empty(batches, slots)
    clock = PhaseClock()
    clock.switch(Phase.OPTIMIZER)
    trainer.zero_gradients()
    seen = SeenBatches(reads_once=trainer.encoders is not None)
    losses = trainer.run_step(seen.count(batches), clock)
    # All stages need the weight sum. They wait for each other here, outside the optimizer's phase.
    clock.switch(Phase.WAIT)
    predicted = [loss for stage in trainer.chunks for loss in stage.take_prediction_losses()]
    sums = global_sums(trainer.links, losses, seen, stop_requested, predicted)
    clock.switch(Phase.OPTIMIZER)
    for error in seen.list_errors(trainer.links):
        _log.warning(f"passed over: {error}")
    # Schedule first: the rate of step 0 is 0 and would waste the first batch. So the decay has one
    # step more. Skipped steps count, so that rates depend on the number of samples only.
    trainer.scheduler.step(increment=1)
    # `default_config` is core's mark of groups at rate `lr`. Absent if only vision is trained.
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
        prediction_loss=sums.prediction_loss / sums.divisor,
        intervals=clock.stop(),
    )


class SeenBatches:
    """Loss tokens, loss weights and errors of unreadable samples of a stream's micro-batches."""

    def __init__(self, reads_once: bool = False) -> None:
        self.reads_once = reads_once  # only this rank reads its images (data-parallel encoders)
        self.loss_tokens = 0
        self.loss_weights: list[torch.Tensor] = []
        self.unreadable: list[str] = []

    def count(self, batches: MicroBatchStream) -> MicroBatchStream:
        """Return the stream; reading it adds its micro-batches to the counts."""

        def count_batch(batch: MicroBatch) -> MicroBatch:
            if batch.labels_L is not None:
                self.loss_tokens += len(batch.labels_L)
                self.loss_weights.append(batch.loss_weights_L)
            self.unreadable += batch.unreadable
            return batch

        return replace(batches, batches=map(count_batch, batches.batches))

    def list_errors(self, links: PipelineLinks) -> tuple[str, ...]:
        """Return errors of unreadable samples; empty on all but one of the ranks that read them."""
        first = links.is_first and parallel_state.get_tensor_model_parallel_rank() == 0
        return tuple(self.unreadable) if first or self.reads_once else ()


@dataclass(frozen=True, slots=True)
class GlobalSums:
    loss: float  # weighted sum over all ranks; other fields are sums too
    loss_weight: float
    loss_tokens: float
    replaced_samples: float
    stop_requests: float
    prediction_loss: float

    @property
    def divisor(self) -> float:
        return max(self.loss_weight, _MIN_DIVISOR)

    @property
    def mean_loss(self) -> float:
        return self.loss / self.divisor


def global_sums(
    links: PipelineLinks,
    losses: Sequence[torch.Tensor],
    seen: SeenBatches,
    stop_requested: bool = False,
    prediction_losses: Sequence[torch.Tensor] = (),
) -> GlobalSums:
    """Sum all ranks' counts and losses in one all-reduce; collective over all ranks."""
    # Tensor-parallel ranks see the same micro-batches, and the first of them counts.
    counts = parallel_state.get_tensor_model_parallel_rank() == 0
    tokens = seen.loss_tokens if counts and links.is_last else 0
    replaced = len(seen.list_errors(links))
    # float64: a float32 sum would lose counts above 2^24.
    own = torch.tensor(
        [0, 0, tokens, replaced, stop_requested, 0], dtype=torch.float64, device=current_device()
    )
    if counts and links.is_last and losses:
        own[0] = torch.stack(losses).sum(dtype=torch.float64)
    if counts and prediction_losses:
        own[5] = torch.stack(list(prediction_losses)).sum(dtype=torch.float64)
    if counts and links.is_last and seen.loss_weights:
        own[1] = torch.cat(seen.loss_weights).sum(dtype=torch.float64)
    dist.all_reduce(own)
    return GlobalSums(*own.tolist())
