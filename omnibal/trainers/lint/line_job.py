"""Convert a launch line to a job for prediction, with notes on approximated and ignored parts."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import get_args

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths
from omnibal.job import plan_data
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan, Shapes
from omnibal.job.published_errors import JobKind, job_kind
from omnibal.model.config import ClusterConfig, ModelConfig, with_imbalance
from omnibal.model.fp8 import TRAINED_FP8, Fp8
from omnibal.model.levels import ContextExchange, CutRule, Level
from omnibal.model.limits import IMAGE_TOKENS, Caps, words
from omnibal.model.parallel import Parallel, WeightSharding, expert_counts
from omnibal.model.runtime import Dispatcher, RecomputedModule, RuntimeOptions
from omnibal.model.targets import TARGETS, TargetName
from omnibal.model.units import LANGUAGE, model_parts
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.packing.steps import Steps
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.pipeline.stage_units import Span, Stage
from omnibal.pipeline.unit_runs import stages_from_cuts, unit_spans
from omnibal.pipeline.workload import Workload
from omnibal.trainers.lint import weights
from omnibal.trainers.lint.flags import flag_of
from omnibal.trainers.lint.launch_settings import ARGPARSE, Launcher
from omnibal.trainers.lint.line import LaunchLine, layers_by_chunk
from omnibal.trainers.lint.loongforge import LOONGFORGE_TRAINER
from omnibal.trainers.lint.other_trainers import TRAINERS
from omnibal.trainers.lint.unmodelled_flags import cuts_samples, notes_on

_GRAPH_HOST_SLOWDOWN = 0.1  # factor on host time per kernel with CUDA graphs (assumed)
ALL_LAYERS = 10**6  # more than any stage has


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LineJob:
    """Job, micro-batches and stages of a launch line."""

    line: LaunchLine
    job: JobSpec
    levels: tuple[Level, ...]  # one; its context is 1 if CP is predicted as shorter samples
    packs: ScheduledPacks  # micro-batches of a dataset's steps, or of one mock step
    lengths: Lengths  # of the packs' samples
    has_samples: bool  # whether from a dataset; False for mock samples
    workload: Workload
    parts: tuple[Stage, ...]  # chunks in model order, or stages if chunks cannot be simulated
    schedule: PipelineSchedule  # interleaved if several chunks are simulated, else 1F1B
    kind: JobKind  # selects the published errors of such predictions
    notes: tuple[str, ...]  # parts of the line that are approximated or not counted

    @property
    def has_all_chunks(self) -> bool:
        """Whether all chunks of the line are simulated, rather than each stage as one chunk."""
        return self.schedule.chunks == (self.line.virtual or 1)

    def plan_of(self, parts: Sequence[Stage], schedule: PipelineSchedule) -> Plan:
        """Return a plan of the job with `parts` as stages, this schedule and no data."""
        return self.job.plan(schedule=schedule, stages=tuple(parts), data=None)


def make_line_job(
    line: LaunchLine,
    model: ModelConfig,
    cluster: ClusterConfig,
    samples: Lengths | None,
    image_share: float,
    sample_tokens: int | None = None,
) -> LineJob:
    """Return the job of a valid line. Raise UserError if it cannot be predicted.

    Without `samples`, equal mock samples of at least `sample_tokens` tokens (default: the sequence
    length) fill the sequence length, with `image_share` (0 to 1) of the tokens from images.
    """
    _check_predictable(line)
    launch, is_bridge = line.launch, line.launch.launcher is Launcher.MEGATRON_BRIDGE
    length, micro_batch = launch.sequence_length or 1, launch.micro_batch or 1
    pack_samples = max(length // min(sample_tokens or length, length), 1)  # of a mock sequence
    sample_tokens = length // pack_samples
    precision, fp8 = weights.precision_of(line)
    trainers = {**TRAINERS, Launcher.LOONGFORGE: LOONGFORGE_TRAINER}
    trainer = trainers.get(launch.launcher) or TARGETS[TargetName(launch.launcher.value)]
    # Multi-token prediction: Bridge recipes default to the released model's, others to no layers.
    predicted = launch.prediction_layers
    if predicted is None:
        predicted = model.language.prediction_layers if is_bridge else 0
    trained = model.with_tower(LANGUAGE, prediction_layers=predicted)
    # Mock samples, or padding to capacity, load experts evenly.
    if samples is None or line.on("moe-pad-expert-input-to-capacity"):
        trained = with_imbalance(trained, 1.0)
    job = JobSpec(
        model=trained,
        cluster=cluster,
        parallel=_parallel_sizes(line, model),
        precision=precision,
        frozen=_frozen_parts(line, model),
        adapters=weights.adapters_of_line(line, model),
        trainer=trainer.model_copy(
            update={
                "runtime": _set_sample_tokens(line, samples, runtime_of(line, fp8), sample_tokens),
                "shardings": tuple(WeightSharding),
                "tensor_across_nodes": True,
            }
        ),
    )
    caps = _sample_caps(line, job.model, samples, image_share, pack_samples)
    data = _make_data(line, job, samples, caps, pack_samples * micro_batch)
    packs, lengths = data.schedule(job)
    layers = layers_by_chunk(line)
    if (held := sum(map(sum, layers))) != model.language.layers:
        raise UserError(f"stages hold {held} of {model.language.layers} layers: correct the split")
    parts, schedule = _chunk_parts(line, job.model, layers)
    return LineJob(
        line=line,
        job=job,
        levels=data.levels,
        packs=packs,
        lengths=lengths,
        has_samples=samples is not None,
        workload=job.workload(packs, lengths, data.levels),
        parts=parts,
        schedule=schedule,
        kind=job_kind(
            job.model,
            job.parallel,
            job.adapters,
            int(lengths.tokens.max(initial=0)),
            has_images=any(column.any() for column in lengths.items.values()),
        ),
        notes=tuple(notes_on(line, job, samples, chunks_are_simulated=schedule.chunks > 1)),
    )


def _set_sample_tokens(
    line: LaunchLine, samples: Lengths | None, runtime: RuntimeOptions, sample_tokens: int
) -> RuntimeOptions:
    """Return options with mock samples' `sample_tokens`, or a dataset's `ring_tokens` (rings)."""
    if samples is None:
        # A kernel has a rank's part of a sample, or all of it after an all-to-all (HEADS).
        parts = line.launch.context if line.exchange is ContextExchange.GATHER else 1
        return runtime.model_copy(update={"sample_tokens": max(sample_tokens // parts, 1)})
    if runtime.ring_tokens is None:
        return runtime
    lengths = samples.tokens.astype(np.float64)
    # Weighted by tokens: a ring is hidden by attention, which grows with a sample's square.
    mean = max(int((lengths**2).sum() / max(lengths.sum(), 1)), 1)
    return runtime.model_copy(update={"ring_tokens": min(mean, runtime.ring_tokens)})


def runtime_of(line: LaunchLine, fp8: Fp8 = TRAINED_FP8) -> RuntimeOptions:
    """Return runtime options by a line's flags or, outside Megatron, by its ZeRO stage alone."""
    # Megatron-Bridge recipes overlap communication and fuse the loss by default; Megatron-LM's
    # flags are opt-in; ms-swift's loss is per token, so gradients are summed.
    launch, stage = line.launch, weights.zero_stage(line)
    sharding = {
        "keeps_weights": stage is weights.ZeroStage.GRADIENTS,
        "replicates_optimizer": stage is weights.ZeroStage.NOTHING,
    }
    if launch.launcher in TRAINERS:
        return TRAINERS[launch.launcher].runtime.model_copy(update=sharding)
    is_bridge = launch.launcher is Launcher.MEGATRON_BRIDGE
    averages = launch.launcher in ARGPARSE and not line.on("calculate-per-token-loss")
    plain = line.on("no-bias-swiglu-fusion")
    fused_loss = line.on("cross-entropy-loss-fusion", default=is_bridge)
    in_fp32 = line.on("grad-reduce-in-fp32", default=True)
    # The overlap's user buffers have one shape, so it excludes variable lengths.
    overlap_tensor = line.on("tp-comm-overlap") and not line.on("variable-seq-lengths")
    graphs = line.on("enable-cuda-graph") or line.on("external-cuda-graph")
    has_graphs = graphs or line.text("cuda-graph-impl") is not None
    has_engine, fusion = line.text("transformer-impl") != "local", "gradient-accumulation-fusion"
    accumulates = line.on(fusion, default=True) and not line.on(f"no-{fusion}")
    dispatchers: dict[str | None, Dispatcher] = {name: name for name in get_args(Dispatcher)}
    dispatcher = dispatchers.get(line.text("moe-token-dispatcher-type"))
    selected = launch.recompute_modules if launch.recompute == "selective" else ()
    return RuntimeOptions(
        overlap_gradients=line.on("overlap-grad-reduce", default=is_bridge),
        overlap_weights=line.on("overlap-param-gather", default=is_bridge),
        overlap_tensor=overlap_tensor and launch.tensor > 1,
        ring_tokens=launch.sequence_length if line.is_ring else None,
        bf16_gradients=line.on("grad-reduce-in-bf16") or not in_fp32,
        **sharding,
        averages_gradients=averages and not line.on("ddp-average-in-collective"),
        fused_loss=fused_loss,
        kept_logits=1 if fused_loss else 2,
        plain=plain,
        fragmentation=0.15 if plain else 0.1,  # share of the passes' memory, see device_memory.py
        host_slowdown=_GRAPH_HOST_SLOWDOWN if has_graphs else 1.0,
        dispatcher=dispatcher or ("flex" if is_bridge else "alltoall"),
        padded_experts=line.on("moe-pad-expert-input-to-capacity"),
        overlap_experts=line.on("overlap-moe-expert-parallel-comm"),
        fused_routing=line.on("moe-permute-fusion", default=is_bridge),
        transformer_engine=has_engine,
        accumulates_in_products=has_engine and accumulates,
        recomputed=tuple(name for name in get_args(RecomputedModule) if name in selected),
        fp8=fp8,
    )


def _check_predictable(line: LaunchLine) -> None:
    """Raise UserError for sizes unlike the named model's or not divisible, and missing flags."""
    launch, changed = line.launch, line.changed_sizes
    if changed:
        name, (built, known) = next(iter(changed.items()))
        raise UserError(f"the line's model has {name} {built:,}, the named {known:,}; correct one")
    if launch.gpus and line.data is None:
        raise UserError(f"{launch.gpus} GPUs are no multiple of TP x PP x CP, {line.grid}: mend it")
    if line.data and launch.global_batch and line.micro_batches is None and launch.micro_batch:
        raise UserError(
            f"global batch size {launch.global_batch} is no multiple of the "
            f"{launch.micro_batch * line.data} samples of all ranks' micro-batches: correct it"
        )
    # Experts with tensor parallelism have costs only with sequence parallelism.
    routes_alone = launch.tensor > 1 and not launch.sequence_parallel and line.sizes.experts
    needed = {
        "seq-length": launch.sequence_length,
        "micro-batch-size": launch.micro_batch,
        "sequence-parallel": not routes_alone,
    }
    missing = [] if launch.gpus else ["the number of GPUs (--gpus)"]
    missing += [flag_of(launch, name) for name, value in needed.items() if not value]
    if missing:
        raise UserError(f"the line does not set {words(missing)}: give them")


def _frozen_parts(line: LaunchLine, model: ModelConfig) -> tuple[str, ...]:
    parts = model_parts(model)
    if weights.is_adapter(line):  # adapters freeze all parts but the language model
        return tuple(part for part in parts if part != LANGUAGE)

    def flag_part(part: str) -> str:  # freezing flags name all encoders `vision`
        if part == LANGUAGE:
            return part
        return "projector" if part.endswith("projector") else "vision"

    return tuple(part for part in parts if flag_part(part) in line.launch.frozen)


def _parallel_sizes(line: LaunchLine, model: ModelConfig) -> Parallel:
    launch = line.launch
    assert line.data is not None
    data, tensor = line.data * launch.context, launch.tensor  # CP ranks count as DP in a plan
    expert = launch.expert * line.expert_tensor if expert_counts(model) else 1
    if tensor * data % expert or (expert % tensor and tensor % expert):
        raise UserError(
            f"ETP {line.expert_tensor} x EP {launch.expert} is not predicted for TP {tensor} and "
            f"DP {data}; give ETP 1 and an EP that divides TP, or is a multiple of it"
        )
    return Parallel(
        tensor=tensor,
        pipeline=launch.pipeline,
        data=data,
        sequence_parallel=launch.sequence_parallel and tensor > 1,
        expert=expert,
        sharded=weights.weight_shards(line, data),
    )


def _sample_caps(
    line: LaunchLine,
    model: ModelConfig,
    samples: Lengths | None,
    image_share: float,
    pack_samples: int,
) -> Caps:
    """Return caps of a mock sample, or of a micro-batch of dataset samples. Raises UserError."""
    launch = line.launch
    assert launch.sequence_length is not None and launch.micro_batch is not None
    tokens = launch.sequence_length // (launch.context if cuts_samples(line) else 1)
    if samples is not None:
        if cuts_samples(line):
            raise UserError(f"CP {launch.context} is not predicted with --lengths here; omit them")
        return plan_data.caps_of_tokens(
            samples, plan_data.limited_features(model), tokens * launch.micro_batch
        )
    others = [tower.feature for tower in model.encoders.values() if not tower.of_images]
    if others:
        raise UserError(f"{model.name} takes {words(others)}, not in mock samples; give --lengths")
    return Caps.of(**plan_data.shape_caps(model, {"tokens": tokens // pack_samples}, image_share))


def _make_data(
    line: LaunchLine, job: JobSpec, samples: Lengths | None, caps: Caps, size: int
) -> plan_data.SampleData:
    """Return a dataset's samples, or a mock step. Both have one level.

    A micro-batch of a mock step has `size` samples, each at the `caps`.
    """
    launch, ranks = line.launch, job.parallel.data
    assert line.micro_batches is not None
    levels: tuple[Level, ...] = (Level(caps=caps),)
    if launch.context > 1 and not cuts_samples(line):
        # Megatron cuts every pack into 2 x CP parts; a rank gets one from each end.
        of_pack = Caps.of(**{name: caps[name] * size for name in caps.names})
        cut, exchange = CutRule.ZIGZAG, line.exchange
        levels = (Level(caps=of_pack, context=launch.context, cut=cut, exchange=exchange),)
    data = partial(plan_data.SampleData, levels=levels, packs_per_step=line.micro_batches * ranks)
    if samples is not None:
        return data(lengths=samples, rules=job.trainer.packs)
    shapes = Shapes(
        caps=caps,
        micro_batches_per_step=line.micro_batches * size,
        image_tokens=IMAGE_TOKENS if job.model.images is not None else None,
    )
    lengths = plan_data.data_at_caps(shapes, ranks if cuts_samples(line) else line.data or 1)[1]
    packs = Packs.from_lists(np.arange(len(lengths)).reshape(-1, size).tolist())
    zeros = np.zeros(len(packs), np.int64)
    return data(lengths=lengths, steps=Steps(packs=packs, step=zeros, epoch=zeros))


def _build_stages(
    line: LaunchLine, model: ModelConfig, layers: Sequence[Sequence[int]]
) -> tuple[Stage, ...]:
    """Return stages with these layer counts and the line's recomputation, encoders on the first."""
    held = [sum(chunks) for chunks in layers]
    empty = [stage for stage, count in enumerate(held[1:-1], 1) if not count]
    if empty:
        raise UserError(f"stage {empty[0]} holds no layer of the language model: give it a layer")
    # Units before the language layers: encoders, projectors, the word embedding. After: the head.
    first = len(unit_spans(model)) - model.language.layers - 1
    cuts = list(accumulate(held[:-1], initial=first))[1:]
    stages = []
    split = zip(stages_from_cuts(model, cuts), layers, strict=True)
    for place, (stage, counts) in enumerate(split):
        of_chunk, of_encoders = _line_recompute_numbers(line, place % line.launch.pipeline)
        of_language = max(sum(min(of_chunk, count) for count in counts), 0)
        stages.append(recompute_first(stage, of_language, of_encoders))
    return tuple(stages)


def _chunk_parts(
    line: LaunchLine, model: ModelConfig, layers: Sequence[Sequence[int]]
) -> tuple[tuple[Stage, ...], PipelineSchedule]:
    """Return chunks in model order, interleaved, or 1F1B stages if a chunk is empty or alone."""
    chunks = len(layers[0])
    if chunks > 1:
        in_order = [[of_stage[chunk]] for chunk in range(chunks) for of_stage in layers]
        with suppress(UserError):  # of an empty chunk
            parts = _build_stages(line, model, in_order)
            return parts, PipelineSchedule(name="interleaved", chunks=chunks)
    return _build_stages(line, model, layers), ONE_FORWARD_ONE_BACKWARD


def _line_recompute_numbers(line: LaunchLine, stage: int) -> tuple[int, int]:
    """Return max recomputed layers of a stage: of the language model per chunk, and per encoder."""
    launch, number = line.launch, 0
    if launch.recompute == "full":
        number = launch.recompute_layers or 0
        if launch.recompute_by_stage is not None:
            number = launch.recompute_by_stage[stage]
        elif launch.recompute_method == "uniform":
            number = ALL_LAYERS
    number = max(number, 0)
    if launch.launcher is Launcher.LOONGFORGE:
        return number, number  # encoders' configurations have the same fields
    recomputes = launch.recompute_encoders
    if launch.launcher is Launcher.MS_SWIFT and "vit-gradient-checkpointing" not in line.flags:
        recomputes = "vision" not in launch.frozen  # its default, megatron_args.py:856 of 4.6.0
    return number, ALL_LAYERS if recomputes else 0


def recompute_first(stage: Stage, of_language: int, of_encoders: int) -> Stage:
    """Return a stage that recomputes the first `of_language` or `of_encoders` layers per tower."""
    recompute = [
        Span(tower, layers)
        for tower in dict.fromkeys(span.name for span in stage.units if span.layers)
        if (layers := stage.layers(tower)[: of_language if tower == LANGUAGE else of_encoders])
    ]
    return stage.model_copy(update={"recompute": tuple(recompute)})
