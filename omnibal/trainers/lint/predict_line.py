"""Predicted cost of a launch line, and of a better split with its parallel sizes."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from omnibal.base.errors import DoesNotFit
from omnibal.job.plan import Plan
from omnibal.pipeline.chunk_search import search_parts
from omnibal.pipeline.partition import search_stages
from omnibal.pipeline.predict import predict
from omnibal.pipeline.prediction import Prediction
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.pipeline.stage_memory import GIB, stage_memories
from omnibal.pipeline.stage_units import Stage
from omnibal.trainers.export import megatron_bridge, megatron_lm, ms_swift
from omnibal.trainers.lint import loongforge
from omnibal.trainers.lint.device_memory import DeviceMemory, device_memories
from omnibal.trainers.lint.launch_settings import Finding, Launcher
from omnibal.trainers.lint.line_job import ALL_LAYERS, LineJob, recompute_first

_MIN_SAVING = 0.005  # share of a step, to suggest other flags
_EFFORT, _MAX_CUTS = 0.2, 2_000  # about a second per number of chunks
_BELOW_PEAK = 1 - 1e-6  # excludes the split of that peak from the next search
_MAX_FIT_SEARCHES = 3  # for a split that fits; each lowers the cap by the last excess
_LAYER_FLAGS: Mapping[Launcher, Callable[[Plan], list[str]]] = {
    Launcher.MEGATRON_LM: megatron_lm.layer_flags,
    Launcher.MEGATRON_BRIDGE: megatron_bridge.layer_flags,
    Launcher.MS_SWIFT: ms_swift.layer_flags,
    Launcher.LOONGFORGE: loongforge.layer_flags,
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Costed:
    """Stages of a line's job, with predicted time and memory."""

    parts: tuple[Stage, ...]  # all chunks in model order
    schedule: PipelineSchedule
    stages: tuple[Stage, ...]  # stages with chunks merged
    prediction: Prediction
    flags: tuple[str, ...] = ()  # for the split and recomputation; empty for the line's own
    memory: tuple[DeviceMemory, ...]  # peak memory per stage's device

    @property
    def step_ms(self) -> float:
        return self.prediction.step_ms

    @property
    def peaks_gib(self) -> list[float]:
        """Peak tensor memory per stage's device."""
        return [memory.allocated_gib for memory in self.memory]

    @property
    def max_device_gib(self) -> float:
        """Peak memory of the fullest device."""
        return max(memory.device_gib for memory in self.memory)


def predict_stages(
    line_job: LineJob,
    parts: Sequence[Stage],
    schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD,
) -> Costed:
    """Return the cost of a line's job with these parts, chunks in model order."""
    job = line_job.job
    prediction = predict(
        job.cost_of_all(line_job.levels),
        job.parallel,
        (tuple(parts),),
        line_job.packs if line_job.has_samples else None,
        line_job.workload,
        schedule=schedule,
    )
    stages = line_job.plan_of(parts, schedule).merge_chunks(parts)
    tensors = [stage.memory for stage in prediction.stages]
    return Costed(
        parts=tuple(parts),
        schedule=schedule,
        stages=stages,
        prediction=prediction,
        memory=device_memories(job, line_job.levels, stages, line_job.workload, tensors),
    )


def predict_line(line_job: LineJob) -> Costed:
    """Return the cost of the line's own stages."""
    return predict_stages(line_job, line_job.parts, line_job.schedule)


def better_split(line_job: LineJob, line: Costed) -> Costed | None:
    """Return the fastest stages for the line's sizes that fit, in any schedule of the trainer.

    None if nothing fits, or if the line fits and is as fast or its chunks cannot be simulated.
    """
    better, limit_ms = None, np.inf
    if line.max_device_gib <= line_job.job.cluster.memory_gib:
        if not line_job.has_all_chunks:
            return None
        limit_ms = line.step_ms * (1 - _MIN_SAVING)
    for schedule in _schedules(line_job):
        faster = _search_fitting(line_job, schedule, limit_ms)
        if faster is not None:
            better, limit_ms = faster, faster.step_ms
    return _with_flags(line_job, better)


def _search_fitting(
    line_job: LineJob, schedule: PipelineSchedule, limit_ms: float
) -> Costed | None:
    """Return the fastest stages that fit and take at most `limit_ms`, or None."""
    job = line_job.job
    memory_gib, cap_gib = job.cluster.memory_gib, job.memory_cap_gib
    task = job.split_task(line_job.workload, line_job.levels, schedule)
    # The search limits tensors; memory of the allocator and libraries is only known afterwards.
    for _ in range(_MAX_FIT_SEARCHES):
        task = replace(task, memory_cap_bytes=cap_gib * GIB)
        try:
            if schedule == ONE_FORWARD_ONE_BACKWARD:
                parts = search_stages(task, prove=False).stages
            else:
                parts = search_parts(task, _EFFORT, max_cuts=_MAX_CUTS).stages
        except DoesNotFit:
            return None
        costed = predict_stages(line_job, parts, schedule)
        if costed.step_ms > limit_ms:
            return None
        if costed.max_device_gib <= memory_gib:
            return costed
        peak = max(stage.memory.peak_gib for stage in costed.prediction.stages)
        cap_gib = min(cap_gib - (costed.max_device_gib - memory_gib), peak * _BELOW_PEAK)
    return None


def _schedules(line_job: LineJob) -> Iterator[PipelineSchedule]:
    """Yield 1F1B and the interleaved schedules that the line's trainer can run."""
    yield ONE_FORWARD_ONE_BACKWARD
    line, job = line_job.line, line_job.job
    stages = job.parallel.pipeline
    obstacle = job.trainer.schedule_obstacle("interleaved", stages, line.micro_batches or 0)
    # Interleaving is simulated with groups of `stages` micro-batches.
    if stages == 1 or obstacle is not None or line.chunk_group != stages:
        return
    candidates = PipelineSchedule.candidates({"interleaved"})
    candidates += [line_job.schedule] if line_job.schedule.chunks > 1 else []
    for schedule in dict.fromkeys(candidates):
        if stages * schedule.chunks <= job.model.language.layers:
            yield schedule


def _with_flags(line_job: LineJob, costed: Costed | None) -> Costed | None:
    """Return stages with the trainer's flags for them, None for None."""
    if costed is None:
        return None
    plan = line_job.plan_of(costed.parts, costed.schedule)
    return replace(costed, flags=tuple(_LAYER_FLAGS[line_job.line.launch.launcher](plan)))


def least_recompute(line_job: LineJob) -> Costed | None:
    """Return the line's split with the least recomputation with which it fits, or None."""
    # LoongForge has a number per stage, for encoders too. Other trainers have one number for all
    # stages, and recompute all encoder layers or none: take the shorter step.
    per_stage = line_job.line.launch.launcher is Launcher.LOONGFORGE
    fitting: list[Costed] = []
    for encoders in (None,) if per_stage else (0, ALL_LAYERS):
        numbers = _min_recompute_numbers(line_job, encoders)
        if numbers is not None:
            numbers = numbers if per_stage else [max(numbers)] * len(numbers)
            parts = _with_numbers(line_job, numbers, encoders)
            fitting.append(predict_stages(line_job, parts, line_job.schedule))
    fastest = min(fitting, key=lambda costed: costed.step_ms, default=None)
    return _with_flags(line_job, fastest)


def _min_recompute_numbers(line_job: LineJob, encoders: int | None) -> list[int] | None:
    """Return the min number of recomputed layers with which each stage fits, or None. [stages]"""
    job, schedule = line_job.job, line_job.schedule
    cost, stages = job.cost_of_all(line_job.levels), job.parallel.pipeline
    layers = max(part.number_of_layers() for part in line_job.parts)

    @cache
    def fit(number: int) -> list[bool]:  # whether each stage fits its device, [stages]
        parts = _with_numbers(line_job, [number] * stages, encoders)
        tensors = stage_memories(cost, (parts,), line_job.workload, schedule)
        merged = line_job.plan_of(parts, schedule).merge_chunks(parts)
        memories = device_memories(job, line_job.levels, merged, line_job.workload, tensors)
        return [memory.device_gib <= job.cluster.memory_gib for memory in memories]

    def find_number(stage: int) -> int:
        return bisect_left(range(layers), True, key=lambda number: fit(number)[stage])

    # Bisection is valid as a stage's memory does not depend on other stages' numbers, and falls
    # with its own.
    return [find_number(stage) for stage in range(stages)] if all(fit(layers)) else None


def _with_numbers(
    line_job: LineJob, numbers: Sequence[int], encoders: int | None
) -> tuple[Stage, ...]:
    """Return parts that recompute n language layers per chunk, `numbers` [stages].

    Encoders recompute `encoders` layers, or n if None.
    """
    # Part k is on stage k % stages.
    pairs = zip(line_job.parts, [*numbers] * line_job.schedule.chunks, strict=True)
    return tuple(recompute_first(part, n, n if encoders is None else encoders) for part, n in pairs)


def memory_finding(line_job: LineJob, line: Costed) -> Finding | None:
    """Return a warning if a stage's predicted memory exceeds the device's."""
    cluster = line_job.job.cluster
    stage, memory = max(enumerate(line.memory), key=lambda pair: pair[1].device_gib)
    if memory.device_gib <= cluster.memory_gib:
        return None
    over = sum(other.device_gib > cluster.memory_gib for other in line.memory)
    return Finding(
        rule="memory",
        severity="warning",
        message=(
            f"stage {stage} is predicted to take {memory.device_gib:,.1f} GiB, and a device of "
            f"{cluster.name} has {cluster.memory_gib:g} GiB: {memory.allocated_gib:,.1f} of "
            f"tensors, {memory.reserved_gib:,.1f} with blocks that torch reserves, the remainder "
            f"of CUDA and NCCL; {over} of {len(line.memory)} stages exceed it: recompute more "
            "layers, raise parallel sizes, or set your devices by --cluster and --memory-gib"
        ),
        source=f"the prediction below, with costs {line.prediction.cost_source}",
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Verdict:
    """Predicted cost of a launch line, with improvements."""

    line_job: LineJob
    line: Costed
    finding: Finding | None  # a memory warning, or None if the line fits
    better: Costed | None  # faster stages, or stages that fit if the line's do not
    least: Costed | None  # the line's split with least recomputation, if the line does not fit

    @classmethod
    def predict(cls, line_job: LineJob) -> "Verdict":
        """Predict a line, and search for better stages, if flags can express them."""
        line = predict_line(line_job)
        finding = memory_finding(line_job, line)
        has_flags = line_job.line.launch.launcher in _LAYER_FLAGS
        return cls(
            line_job=line_job,
            line=line,
            finding=finding,
            better=better_split(line_job, line) if has_flags else None,
            least=least_recompute(line_job) if has_flags and finding is not None else None,
        )

    @property
    def saving(self) -> float:
        """Share of the line's step that the better split saves, negative if slower."""
        assert self.better is not None
        return 1 - self.better.step_ms / self.line.step_ms

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Language tokens per second and GPU, mean over steps."""
        line_job = self.line_job
        samples = line_job.packs.packs.samples
        tokens = int(line_job.lengths.tokens[samples].sum()) / line_job.packs.steps
        sizes = line_job.job.parallel
        return tokens / (self.line.step_ms / 1e3) / sizes.world_size
