"""Cost of a launch line, and of a better split with equal sizes, found by the joint search."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from omnibal.base.errors import DoesNotFit
from omnibal.job.plan import Plan
from omnibal.pipeline.chunk_search import Effort, search_parts
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
from omnibal.trainers.lint.line_job import EVERY, LineJob, recompute_first

_WORTH_TELLING = 0.005
"""Min share of a step saved to suggest other flags."""
_EFFORT = Effort(share=0.2, max_cuts=2_000)
"""Search effort per number of chunks, about a second."""
_BELOW = 1 - 1e-6
"""Factor just below 1, to exclude a peak."""
_MOST_SEARCHES = 3
"""Max searches for a split that fits. Each lowers the cap by the last excess."""
_LAYER_FLAGS: Mapping[Launcher, Callable[[Plan], list[str]]] = {
    Launcher.MEGATRON_LM: megatron_lm.layer_flags,
    Launcher.MEGATRON_BRIDGE: megatron_bridge.layer_flags,
    Launcher.MS_SWIFT: ms_swift.layer_flags,
    Launcher.LOONGFORGE: loongforge.layer_flags,
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Costed:
    """Stages of a job, with predicted time and memory."""

    parts: tuple[Stage, ...]
    """All chunks in model order."""
    schedule: PipelineSchedule
    stages: tuple[Stage, ...]
    """Stages with chunks merged."""
    prediction: Prediction
    flags: tuple[str, ...] = ()
    """Flags for the split and recomputation, or empty for the line's own."""
    memory: tuple[DeviceMemory, ...]
    """Peak memory per stage's device."""

    @property
    def step_ms(self) -> float:
        return self.prediction.step_ms

    @property
    def peaks_gib(self) -> list[float]:
        """Peak tensor memory per stage's device."""
        return [memory.allocated_gib for memory in self.memory]

    @property
    def most_gib(self) -> float:
        """Peak memory over all devices."""
        return max(memory.device_gib for memory in self.memory)


def predict_stages(
    line_job: LineJob,
    parts: Sequence[Stage],
    schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD,
    flags: Sequence[str] = (),
) -> Costed:
    """Predict a line's job with these parts."""
    job = line_job.job
    prediction = predict(
        job.cost_of_all(line_job.levels),
        job.pipeline_model,
        job.parallel,
        (tuple(parts),),
        line_job.packs,
        line_job.workload,
        schedule=schedule,
    )
    if not line_job.has_samples:
        # One step of made-up samples says nothing about a dataset.
        nothing = {"samples_per_second_per_gpu": None, "gpu_days": None}
        prediction = prediction.model_copy(update=nothing)
    stages = line_job.plan_of(parts, schedule).merge_chunks(parts)
    tensors = [stage.memory for stage in prediction.stages]
    return Costed(
        parts=tuple(parts),
        schedule=schedule,
        stages=stages,
        prediction=prediction,
        flags=tuple(flags),
        memory=device_memories(job, line_job.levels, stages, line_job.workload, tensors),
    )


def predict_line(line_job: LineJob) -> Costed:
    """Predict the line's own stages, with chunks if they can be simulated."""
    return predict_stages(line_job, line_job.parts, line_job.schedule)


def better_split(line_job: LineJob, line: Costed) -> Costed | None:
    """Return the fastest stages of equal sizes that fit and the trainer accepts, in any schedule.

    None if nothing fits, or if the line fits and is as fast or its chunks cannot be simulated.
    """
    better, limit_ms = None, np.inf
    if line.most_gib <= line_job.job.cluster.memory_gib:
        if not line_job.has_all_chunks:
            return None
        limit_ms = line.step_ms * (1 - _WORTH_TELLING)
    for schedule in _schedules(line_job):
        faster = _search_fitting(line_job, schedule, limit_ms)
        if faster is not None:
            better, limit_ms = faster, faster.step_ms
    if better is None:
        return None
    return replace(better, flags=tuple(_layer_flags(line_job, better.parts, better.schedule)))


def _search_fitting(
    line_job: LineJob, schedule: PipelineSchedule, limit_ms: float
) -> Costed | None:
    """Search the fastest fitting stages below `limit_ms`, with lower caps if devices overflow."""
    memory_gib, cap_gib = line_job.job.cluster.memory_gib, line_job.job.memory_cap_gib
    for _ in range(_MOST_SEARCHES):
        try:
            costed = predict_stages(line_job, _search(line_job, schedule, cap_gib), schedule)
        except DoesNotFit:
            return None
        if costed.step_ms > limit_ms:
            return None
        if costed.most_gib <= memory_gib:
            return costed
        fullest = max(stage.memory.peak_gib for stage in costed.prediction.stages)
        cap_gib = min(cap_gib - (costed.most_gib - memory_gib), fullest * _BELOW)
    return None


def _schedules(line_job: LineJob) -> Iterator[PipelineSchedule]:
    """Yield 1F1B and the interleaved schedules that the line's trainer can run."""
    yield ONE_FORWARD_ONE_BACKWARD
    line, job = line_job.line, line_job.job
    stages = job.parallel.pipeline
    why = job.trainer.schedule_obstacle("interleaved", stages, line.micro_batches or 0)
    if stages == 1 or why is not None or line.chunk_group != stages:
        return
    tried = PipelineSchedule.candidates({"interleaved"})
    tried += [line_job.schedule] if line_job.schedule.chunks > 1 else []
    for schedule in dict.fromkeys(tried):
        if stages * schedule.chunks <= job.model.language.layers:
            yield schedule


def _search(line_job: LineJob, schedule: PipelineSchedule, cap_gib: float) -> tuple[Stage, ...]:
    """Search a schedule's parts within the trainer's limits; raise DoesNotFit above the cap."""
    job, rules = line_job.job, line_job.job.trainer.stages
    cost, stages = job.cost_of_all(line_job.levels), job.parallel.pipeline
    task = (cost, job.model, line_job.workload, stages, cap_gib * GIB)
    if schedule == ONE_FORWARD_ONE_BACKWARD:
        return search_stages(*task, rules=rules, prove=False).stages
    return search_parts(*task, schedule, rules=rules, effort=_EFFORT).stages


def _layer_flags(
    line_job: LineJob, parts: Sequence[Stage], schedule: PipelineSchedule
) -> list[str]:
    """Return flags that set these stages in the line's trainer."""
    plan = line_job.plan_of(parts, schedule)
    return _LAYER_FLAGS[line_job.line.launch.launcher](plan)


def least_recompute(line_job: LineJob) -> Costed | None:
    """Return the line's split with the cheapest recomputation that fits, or None.

    One number for all stages (LoongForge: per stage and for encoders too). Otherwise recompute all
    or no encoder layers, by the shorter step.
    """
    per_stage = line_job.line.launch.launcher is Launcher.LOONGFORGE
    fitting: list[Costed] = []
    for encoders in (None,) if per_stage else (0, EVERY):
        numbers = _least_numbers(line_job, encoders)
        if numbers is not None:
            numbers = numbers if per_stage else [max(numbers)] * len(numbers)
            parts = _with_numbers(line_job, numbers, encoders)
            flags = _layer_flags(line_job, parts, line_job.schedule)
            fitting.append(predict_stages(line_job, parts, line_job.schedule, flags))
    return min(fitting, key=lambda costed: costed.step_ms, default=None)


def _least_numbers(line_job: LineJob, encoders: int | None) -> list[int] | None:
    """Return the min number of recomputed layers with which each stage fits, or None if none does.

    Stages are independent, and memory falls with the number.
    """
    stages, most = line_job.job.parallel.pipeline, max(p.layer_count for p in line_job.parts)

    @cache
    def fit(number: int) -> list[bool]:
        return _fit(line_job, _with_numbers(line_job, [number] * stages, encoders))

    def find_number(stage: int) -> int:
        return bisect_left(range(most), True, key=lambda number: fit(number)[stage])

    return [find_number(stage) for stage in range(stages)] if all(fit(most)) else None


def _with_numbers(
    line_job: LineJob, numbers: Sequence[int], encoders: int | None
) -> tuple[Stage, ...]:
    """Recompute `numbers` layers of the language model per chunk, [stages], and of each encoder.

    Encoders have the language model's number if `encoders` is None.
    """
    # Part k is on stage k % stages.
    of_parts = zip(line_job.parts, [*numbers] * line_job.schedule.chunks, strict=True)
    return tuple(
        recompute_first(part, number, number if encoders is None else encoders)
        for part, number in of_parts
    )


def _fit(line_job: LineJob, parts: Sequence[Stage]) -> list[bool]:
    """Return whether each stage fits its devices. [stages]"""
    job, schedule = line_job.job, line_job.schedule
    cost = job.cost_of_all(line_job.levels)
    tensors = stage_memories(cost, (parts,), line_job.workload, schedule)
    stages = line_job.plan_of(parts, schedule).merge_chunks(parts)
    memories = device_memories(job, line_job.levels, stages, line_job.workload, tensors)
    return [memory.device_gib <= job.cluster.memory_gib for memory in memories]


def memory_finding(line_job: LineJob, line: Costed) -> Finding | None:
    """Return a warning if a stage's predicted memory exceeds the device's."""
    cluster, memory = line_job.job.cluster, line.memory
    of_device = [stage.device_gib for stage in memory]
    heaviest = int(np.argmax(of_device))
    if of_device[heaviest] <= cluster.memory_gib:
        return None
    over = sum(gib > cluster.memory_gib for gib in of_device)
    return Finding(
        rule="memory",
        severity="warning",
        message=(
            f"stage {heaviest} is predicted to take {of_device[heaviest]:,.1f} GiB of a device, "
            f"and one of {cluster.name} has {cluster.memory_gib:g}: "
            f"{memory[heaviest].allocated_gib:,.1f} of tensors, "
            f"{memory[heaviest].reserved_gib:,.1f} with blocks that torch keeps for them, the rest "
            f"of CUDA and NCCL; {over} of {len(memory)} stages take more: recompute more layers, "
            "divide the model further, or name your devices by --cluster and --memory-gib"
        ),
        source=f"the prediction below, with costs {line.prediction.cost_source}",
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Verdict:
    """Cost of a launch line, and improvements."""

    line_job: LineJob
    line: Costed
    finding: Finding | None
    """A memory warning, or None if the line fits."""
    better: Costed | None
    """Faster stages, or stages that fit if the line's do not, or None."""
    least: Costed | None
    """The line's split with minimal recomputation that fits, or None if it fits unchanged."""

    @classmethod
    def of(cls, line_job: LineJob) -> "Verdict":
        """Predict a line, and search for better stages of equal sizes that its trainer takes."""
        line = predict_line(line_job)
        finding = memory_finding(line_job, line)
        if line_job.line.launch.launcher not in _LAYER_FLAGS:
            return cls(line_job=line_job, line=line, finding=finding, better=None, least=None)
        return cls(
            line_job=line_job,
            line=line,
            finding=finding,
            better=better_split(line_job, line),
            least=None if finding is None else least_recompute(line_job),
        )

    @property
    def saved(self) -> float:
        """Share of the line's step saved by the better split, negative if slower."""
        assert self.better is not None
        return 1 - self.better.step_ms / self.line.step_ms

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Mean over steps."""
        line_job = self.line_job
        samples = line_job.packs.packs.samples
        tokens = int(line_job.lengths.tokens[samples].sum()) / line_job.packs.steps
        sizes = line_job.job.parallel
        return tokens / (self.line.step_ms / 1e3) / sizes.world_size
