"""Cost of a launch line, and of a better split with equal sizes, found by the joint search."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnibal.base.errors import DoesNotFit
from omnibal.job.plan import Plan
from omnibal.pipeline.chunk_search import Effort, search_parts
from omnibal.pipeline.partition import search_stages
from omnibal.pipeline.predict import predict
from omnibal.pipeline.prediction import Prediction
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.stage_memory import GIB, stage_memories
from omnibal.trainers.export import megatron_bridge, megatron_lm, ms_swift
from omnibal.trainers.lint import loongforge
from omnibal.trainers.lint.device_memory import DeviceMemory, device_memories
from omnibal.trainers.lint.launch import Finding, Launcher
from omnibal.trainers.lint.launched import EVERY, Launched, recomputing

_WORTH_TELLING = 0.005
"""Min share of a step saved to suggest other flags."""
_EFFORT = Effort(share=0.2, most_cuts=2_000)
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
        return [each.allocated_gib for each in self.memory]

    @property
    def most_gib(self) -> float:
        """Peak memory over all devices."""
        return max(each.device_gib for each in self.memory)


def predicted(
    launched: Launched,
    parts: Sequence[Stage],
    schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD,
    flags: Sequence[str] = (),
) -> Costed:
    job = launched.job
    prediction = predict(
        job.cost_of_all(launched.levels),
        job.pipeline_model,
        job.parallel,
        (tuple(parts),),
        launched.packs,
        launched.workload,
        schedule=schedule,
    )
    if not launched.has_samples:
        # One step of made-up samples says nothing about a dataset.
        nothing = {"samples_per_second_per_gpu": None, "gpu_days": None}
        prediction = prediction.model_copy(update=nothing)
    stages = launched.plan_of(parts, schedule).held(parts)
    tensors = [stage.memory for stage in prediction.stages]
    return Costed(
        parts=tuple(parts),
        schedule=schedule,
        stages=stages,
        prediction=prediction,
        flags=tuple(flags),
        memory=device_memories(job, launched.levels, stages, launched.workload, tensors),
    )


def predicted_line(launched: Launched) -> Costed:
    """Predict the line's own stages, with chunks if they can be simulated."""
    return predicted(launched, launched.parts, launched.schedule)


def better_split(launched: Launched, line: Costed) -> Costed | None:
    """Return the fastest stages of equal sizes that fit and the trainer accepts, in any schedule.

    None if nothing fits, or if the line fits and is as fast or its chunks cannot be simulated.
    """
    better, limit_ms = None, np.inf
    if line.most_gib <= launched.job.cluster.memory_gib:
        if not launched.has_all_chunks:
            return None
        limit_ms = line.step_ms * (1 - _WORTH_TELLING)
    for schedule in _schedules(launched):
        found = _fitting(launched, schedule, limit_ms)
        if found is not None:
            better, limit_ms = found, found.step_ms
    if better is None:
        return None
    return replace(better, flags=tuple(flags_of(launched, better.parts, better.schedule)))


def _fitting(launched: Launched, schedule: PipelineSchedule, limit_ms: float) -> Costed | None:
    """Search the fastest fitting stages below `limit_ms`, with lower caps if devices overflow."""
    memory_gib, cap_gib = launched.job.cluster.memory_gib, launched.job.memory_cap_gib
    for _ in range(_MOST_SEARCHES):
        try:
            found = predicted(launched, _searched(launched, schedule, cap_gib), schedule)
        except DoesNotFit:
            return None
        if found.step_ms > limit_ms:
            return None
        if found.most_gib <= memory_gib:
            return found
        over_gib = found.most_gib - memory_gib
        fullest = max(each.memory.peak_gib for each in found.prediction.stages)
        cap_gib = min(cap_gib - over_gib, fullest * _BELOW)
    return None


def _schedules(launched: Launched) -> Iterator[PipelineSchedule]:
    """Yield 1F1B and the interleaved schedules that the line's trainer can run."""
    yield ONE_FORWARD_ONE_BACKWARD
    line, job = launched.line, launched.job
    stages = job.parallel.pipeline
    why = job.trainer.schedule_obstacle("interleaved", stages, line.micro_batches or 0)
    if stages == 1 or why is not None or line.chunk_group != stages:
        return
    tried = PipelineSchedule.candidates({"interleaved"})
    tried += [launched.schedule] if launched.schedule.chunks > 1 else []
    for schedule in dict.fromkeys(tried):
        if stages * schedule.chunks <= job.model.language.layers:
            yield schedule


def _searched(launched: Launched, schedule: PipelineSchedule, cap_gib: float) -> tuple[Stage, ...]:
    """Search a schedule's parts within the trainer's limits; raise DoesNotFit above the cap."""
    job, cap_bytes = launched.job, cap_gib * GIB
    cost, stages = job.cost_of_all(launched.levels), job.parallel.pipeline
    rules, workload = job.trainer.stages, launched.workload
    if schedule == ONE_FORWARD_ONE_BACKWARD:
        return search_stages(
            cost, job.model, workload, stages, cap_bytes, rules=rules, prove=False
        ).stages
    return search_parts(
        cost, job.model, workload, stages, cap_bytes, schedule, rules=rules, effort=_EFFORT
    ).stages


def flags_of(launched: Launched, parts: Sequence[Stage], schedule: PipelineSchedule) -> list[str]:
    """Return flags that set these stages in the line's trainer."""
    plan = launched.plan_of(parts, schedule)
    return _LAYER_FLAGS[launched.line.launch.launcher](plan)


def least_recompute(launched: Launched) -> Costed | None:
    """Return the line's split with the cheapest recomputation that fits, or None.

    One number for all stages (LoongForge: per stage and for encoders too). Otherwise recompute all
    or no encoder layers, by the shorter step.
    """
    per_stage = launched.line.launch.launcher is Launcher.LOONGFORGE
    schedule, count = launched.schedule, launched.job.parallel.pipeline
    most = max(part.layer_count for part in launched.parts)
    found: list[Costed] = []
    for encoders in (None,) if per_stage else (0, EVERY):
        low, high = np.zeros(count, np.int64), np.full(count, most)
        if not _fit(launched, _with_numbers(launched, high, encoders)).all():
            continue
        while (low < high).any():
            middle = (low + high) // 2
            enough = _fit(launched, _with_numbers(launched, middle, encoders))
            high, low = np.where(enough, middle, high), np.where(enough, low, middle + 1)
        numbers = high if per_stage else np.full_like(high, high.max())
        parts = _with_numbers(launched, numbers, encoders)
        flags = flags_of(launched, parts, schedule)
        found.append(predicted(launched, parts, schedule, flags))
    return min(found, key=lambda one: one.step_ms, default=None)


def _with_numbers(
    launched: Launched, numbers: np.ndarray, encoders: int | None
) -> tuple[Stage, ...]:
    """Recompute `numbers` layers of the language model per chunk, [stages], and of each encoder.

    Encoders have the language model's number if `encoders` is None.
    """
    # Part k is on stage k % stages.
    of_parts = zip(launched.parts, numbers.tolist() * launched.schedule.chunks, strict=True)
    return tuple(
        recomputing(part, number, number if encoders is None else encoders)
        for part, number in of_parts
    )


def _fit(launched: Launched, parts: Sequence[Stage]) -> np.ndarray:
    """Whether each stage fits its devices. bool [stages]"""
    job, schedule = launched.job, launched.schedule
    cost = job.cost_of_all(launched.levels)
    tensors = stage_memories(cost, (parts,), launched.workload, schedule)
    stages = launched.plan_of(parts, schedule).held(parts)
    memories = device_memories(job, launched.levels, stages, launched.workload, tensors)
    return np.array([each.device_gib for each in memories]) <= job.cluster.memory_gib


def memory_finding(launched: Launched, line: Costed) -> Finding | None:
    """Return a warning if a stage's predicted memory exceeds the device's."""
    cluster, memory = launched.job.cluster, line.memory
    of_device = [each.device_gib for each in memory]
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

    launched: Launched
    line: Costed
    finding: Finding | None
    """A memory warning, or None if the line fits."""
    better: Costed | None
    """Faster stages, or stages that fit if the line's do not, or None."""
    least: Costed | None
    """The line's split with minimal recomputation that fits, or None if it fits unchanged."""

    @classmethod
    def of(cls, launched: Launched) -> "Verdict":
        """Predict a line, and search for better stages of equal sizes that its trainer takes."""
        line = predicted_line(launched)
        finding = memory_finding(launched, line)
        if launched.line.launch.launcher not in _LAYER_FLAGS:
            return cls(launched=launched, line=line, finding=finding, better=None, least=None)
        return cls(
            launched=launched,
            line=line,
            finding=finding,
            better=better_split(launched, line),
            least=None if finding is None else least_recompute(launched),
        )

    @property
    def saved(self) -> float:
        """Share of the line's step saved by the better split, negative if slower."""
        assert self.better is not None
        return 1 - self.better.step_ms / self.line.step_ms

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Mean over steps."""
        launched = self.launched
        samples = launched.packs.packs.samples
        tokens = int(launched.lengths.tokens[samples].sum()) / launched.packs.steps
        sizes = launched.job.parallel
        return tokens / (self.line.step_ms / 1e3) / sizes.world_size
