"""What a launch line costs, and what a better split of the same sizes would.

Times and memory are the planner's own: the line's stages are predicted as a plan's are, and the
better ones are what the joint search finds within what the trainer can be told.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from omnibal.base.errors import DoesNotFit
from omnibal.export import loongforge, megatron_bridge, megatron_lm, ms_swift
from omnibal.job.plan import Plan
from omnibal.lint.device_memory import DeviceMemory, DeviceOverhead, device_overheads
from omnibal.lint.launch import Finding, Launcher
from omnibal.lint.launched import EVERY, Launched, recomputing
from omnibal.pipeline.partition import search_stages
from omnibal.pipeline.predict import predict
from omnibal.pipeline.prediction import Prediction
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.stage_memory import GIB, stage_memories

_WORTH_TELLING = 0.005
"""Least share of a step that a better split must save to be worth new flags."""
_MOST_SEARCHES = 3
"""Searches for a split that fits: each lowers the cap by what the last one's devices were over."""
_LAYER_FLAGS: Mapping[Launcher, Callable[[Plan], list[str]]] = {
    Launcher.MEGATRON_LM: megatron_lm.layer_flags,
    Launcher.MEGATRON_BRIDGE: megatron_bridge.layer_flags,
    Launcher.MS_SWIFT: ms_swift.layer_flags,
    Launcher.LOONGFORGE: loongforge.layer_flags,
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Costed:
    """Stages of a job, and what is predicted of them."""

    stages: tuple[Stage, ...]
    prediction: Prediction
    """Prediction with the line's chunks; by 1F1B where a stage has one, or they cannot be
    simulated."""
    flags: tuple[str, ...] = ()
    """Flags that say the split and the recomputed layers; empty for those of the line itself."""
    overheads: tuple[DeviceOverhead, ...]
    """Memory without tensors of a device of every stage."""

    @property
    def step_ms(self) -> float:
        """Time of a step."""
        return self.prediction.step_ms

    @property
    def wait_fractions(self) -> list[float]:
        """Share of a step in which each stage idles. [stages]"""
        return [stage.wait_fraction for stage in self.prediction.stages]

    @property
    def bubble_fraction(self) -> float:
        """Share of device time that is idle."""
        return self.prediction.bubble_fraction

    @property
    def memory(self) -> list[DeviceMemory]:
        """Most memory of a device of every stage."""
        memories = [stage.memory for stage in self.prediction.stages]
        return [
            each.memory(memory.state_gib, memory.passes_gib)
            for each, memory in zip(self.overheads, memories, strict=True)
        ]

    @property
    def peaks_gib(self) -> list[float]:
        """Most memory of tensors on a device of every stage."""
        return [each.allocated_gib for each in self.memory]

    @property
    def most_gib(self) -> float:
        """Most memory in use on any device."""
        return max(each.device_gib for each in self.memory)


def predicted(
    launched: Launched,
    stages: Sequence[Stage],
    flags: Sequence[str] = (),
    chunks: Sequence[Stage] = (),
) -> Costed:
    """Predict stages of a line's job on its micro-batches.

    Args:
        chunks: of all stages in model order, where these have several.
    """
    job, parts = launched.job, tuple(chunks or stages)
    schedule = ONE_FORWARD_ONE_BACKWARD
    if chunks:
        schedule = PipelineSchedule(name="interleaved", chunks=len(chunks) // len(stages))
    prediction = predict(
        job.cost_of_all(launched.levels),
        job.pipeline_model,
        job.parallel,
        (parts,),
        launched.packs,
        launched.workload,
        schedule=schedule,
    )
    if not launched.has_samples:
        # One step of made-up samples says nothing about a dataset.
        nothing = {"samples_per_second_per_gpu": None, "gpu_days": None}
        prediction = prediction.model_copy(update=nothing)
    return Costed(
        stages=tuple(stages),
        prediction=prediction,
        flags=tuple(flags),
        overheads=tuple(device_overheads(job, launched.levels, stages, launched.workload)),
    )


def predicted_line(launched: Launched) -> Costed:
    """Predict the line's own stages, with their chunks where these can be simulated."""
    return predicted(launched, launched.stages, chunks=launched.parts)


def better_split(launched: Launched, line: Costed) -> Costed | None:
    """The fastest stages of the same sizes that fit and that the trainer can be told.

    None where they are not faster than the line's, which fit, or where none are found that fit.
    Stages are searched for within the memory that a plan may use, and less where devices are then
    full.
    """
    memory_gib, cap_gib = launched.job.cluster.memory_gib, launched.job.memory_cap_gib
    for _ in range(_MOST_SEARCHES):
        better = _fastest(launched, cap_gib)
        if better is None:
            return None
        if better.most_gib <= memory_gib:
            saved = 1 - better.step_ms / line.step_ms
            return better if saved >= _WORTH_TELLING or line.most_gib > memory_gib else None
        cap_gib -= better.most_gib - memory_gib
    return None


def _fastest(launched: Launched, cap_gib: float) -> Costed | None:
    """The fastest stages that the trainer can be told, within a cap; None where nothing fits."""
    job = launched.job
    try:
        found = search_stages(
            job.cost_of_all(launched.levels),
            job.model,
            launched.workload,
            job.parallel.pipeline,
            cap_gib * GIB,
            rules=job.trainer.stages,
            prove=False,
        )
    except DoesNotFit:
        return None
    return predicted(launched, found.stages, flags_of(launched, found.stages))


def flags_of(launched: Launched, stages: Sequence[Stage]) -> list[str]:
    """Flags that tell the line's trainer of stages."""
    job = launched.job
    plan = Plan(
        model=job.model,
        precision=job.precision,
        parallel=job.parallel,
        frozen=job.frozen,
        adapters=job.adapters,
        made_for=job.trainer.name,
        stages=tuple(stages),
        cluster=job.cluster,
        data=None,
    )
    return _LAYER_FLAGS[launched.line.launch.launcher](plan)


def least_recompute(launched: Launched) -> Costed | None:
    """The line's layers by stage with the recomputation that fits and costs least; None where none
    fits.

    One number for all stages, of LoongForge one a stage and of the encoders too; elsewhere no layer
    of the encoders or all, whichever makes the shorter step. Stages have one chunk.
    """
    per_stage = launched.line.launch.launcher is Launcher.LOONGFORGE
    count = len(launched.stages)
    most = max(stage.layer_count for stage in launched.stages)
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
        stages = _with_numbers(launched, numbers, encoders)
        found.append(predicted(launched, stages, flags_of(launched, stages)))
    return min(found, key=lambda one: one.step_ms, default=None)


def _with_numbers(
    launched: Launched, numbers: np.ndarray, encoders: int | None
) -> tuple[Stage, ...]:
    """The line's stages, each with its number of recomputed layers.

    Args:
        numbers: layers of the language model to recompute. [stages]
        encoders: layers of each encoder to recompute; None for as many as of the language model.
    """
    by_stage = zip(launched.stages, numbers.tolist(), strict=True)
    return tuple(
        recomputing(stage, number, number if encoders is None else encoders)
        for stage, number in by_stage
    )


def _fit(launched: Launched, stages: Sequence[Stage]) -> np.ndarray:
    """Whether every stage fits its devices. bool [stages]"""
    job = launched.job
    memories = stage_memories(job.cost_of_all(launched.levels), (stages,), launched.workload)
    overheads = device_overheads(job, launched.levels, stages, launched.workload)
    device_gib = [
        each.memory(memory.state_gib, memory.passes_gib).device_gib
        for each, memory in zip(overheads, memories, strict=True)
    ]
    return np.array(device_gib) <= job.cluster.memory_gib


def memory_finding(launched: Launched, line: Costed) -> Finding | None:
    """A warning where a stage is predicted to take more memory than a device has."""
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
            f"and one of {cluster.name} has {cluster.memory_gib:,.0f}: "
            f"{memory[heaviest].allocated_gib:,.1f} of tensors, "
            f"{memory[heaviest].reserved_gib:,.1f} with blocks that torch keeps for them, the rest "
            f"of CUDA and NCCL; {over} of {len(memory)} stages take more: recompute more layers, "
            "divide the model further, or name your devices by --cluster and --memory-gib"
        ),
        source=f"the prediction below, with costs {line.prediction.cost_source}",
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Verdict:
    """What a launch line costs, and what would be better."""

    launched: Launched
    line: Costed
    finding: Finding | None
    """A warning of memory; None where the line fits."""
    better: Costed | None
    """Stages that are faster, or that fit where the line's do not; None where none are found."""
    least: Costed | None
    """The line's split with the least recomputation that fits; None where it fits as it is."""

    @classmethod
    def of(cls, launched: Launched) -> "Verdict":
        """Predict a line, and look for better stages of the same sizes."""
        line = predicted_line(launched)
        finding = memory_finding(launched, line)
        return cls(
            launched=launched,
            line=line,
            finding=finding,
            better=better_split(launched, line),
            least=None if finding is None else least_recompute(launched),
        )

    @property
    def saved(self) -> float:
        """Share of the line's step that the better split saves; below 0 where it takes longer."""
        assert self.better is not None
        return 1 - self.better.step_ms / self.line.step_ms

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens that a GPU trains in a second, mean over the steps."""
        launched = self.launched
        samples = launched.packs.packs.samples
        tokens = int(launched.lengths.tokens[samples].sum()) / launched.packs.steps
        sizes = launched.job.parallel
        return tokens / (self.line.step_ms / 1e3) / sizes.world_size
