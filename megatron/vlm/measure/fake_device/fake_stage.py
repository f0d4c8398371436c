"""Stages of a plan at their real size on a fake device: `tools/replay.py --fake-device`."""

import gc
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron.vlm.inputs.batch import MicroBatch
from megatron.vlm.measure.fake_device.device import install_device
from megatron.vlm.measure.fake_device.encoding import HeaviestEncoding
from megatron.vlm.measure.fake_device.memory import Label
from megatron.vlm.measure.fake_device.mode import FakeCuda, FakeDevice, fake_cuda
from megatron.vlm.measure.replay_job import ReplayJob, list_unfinished_stages, shared_progress
from megatron.vlm.measure.stage_replay import LoadRows, StageReplayer, standing_in
from megatron.vlm.run.launch import RankLaunch
from megatron.vlm.step.clock import Phase
from megatron.vlm.step.train import Trainer
from omnibal.base.errors import UserError
from omnibal.job.fake_replay import (
    COMPUTE_PHASES,
    FAKE_REPLAY_FILES,
    FakeReplayInfo,
    FakeStage,
    PeakContent,
    Window,
    heaviest_windows,
    predicted_peak_gib,
)
from omnibal.job.plan import Plan, plan_sha256
from omnibal.model.config import Precision, Provider

_GIB = 2**30
_MOST_SPREAD = 0.05
"""Tolerated error of one window's prediction relative to another's."""
_TRAINER = Path(__file__).parents[2]
_SOURCES = (".py", ".cpp")
_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def run_fake_stage(
    plan: Plan,
    stage: int,
    heaviest: Sequence[Window],
    load: LoadRows,
    on_run: Callable[[], None],
    encoding: HeaviestEncoding | None = None,
) -> FakeStage:
    """Build a stage of the plan on a fake device and run its heaviest windows.

    `heaviest` has windows by falling prediction. The largest allocation counts; windows predicted
    `_MOST_SPREAD` below it are skipped. `on_run` is called after building, and per window.
    """
    with fake_cuda() as fake_device, standing_in(plan.parallel, stage) as links:

        def follow(phase: Phase) -> None:
            fake_device.device.phase = phase.value

        replayer = StageReplayer(plan, links, on_phase=follow)
        _describe_state(fake_device.device, replayer.trainer)
        on_run()
        worst: FakeStage | None = None
        worst_predicted_gib = 0.0
        for window in heaviest:
            expected = window.predicted_gib / max(worst_predicted_gib, 1e-12)
            if worst is None or expected * (1 + _MOST_SPREAD) >= 1:
                batches = [_drop_data(batch, fake_device) for batch in load(window.rows)]
                of_encoders = None
                if encoding is not None:
                    shares, passes = encoding.of_stage(stage, window.rows)
                    of_encoders = shares, [_drop_data(batch, fake_device) for batch in passes]
                memory = partial(replayer.activation_bytes, batches, of_encoders)
                run = _run_step(fake_device.device, replayer, window.rows, memory, plan, stage)
                if worst is None or run.allocated_gib > worst.allocated_gib:
                    worst, worst_predicted_gib = run, window.predicted_gib
            on_run()
        del replayer
        gc.collect()
    assert worst is not None, "a stage has micro-batches"
    return worst


def _drop_data(batch: MicroBatch, fake_device: FakeCuda) -> MicroBatch:
    """Replace the micro-batch's tensors by fake ones, host tensors too."""
    tensors = {name: value for name, value in vars(batch).items() if torch.is_tensor(value)}
    return replace(batch, **{name: fake_device.fake(value) for name, value in tensors.items()})


def _describe_state(device: FakeDevice, trainer: Trainer) -> None:
    """Label allocations after building, and name the modules."""
    device.places.name(*trainer.stages)
    device.memory.relabel_rest(Label("", "optimizer state", "state"))
    for held in trainer.held:
        device.memory.relabel(held.weights(), Label("", "weights", "state"))
        device.memory.relabel(held.gradients(), Label("", "gradients", "state"))


def _run_step(
    device: FakeDevice,
    replayer: StageReplayer,
    rows: np.ndarray,
    step: Callable[[], int],
    plan: Plan,
    stage: int,
) -> FakeStage:
    """Run one rank's step and the update after it; return the counts."""
    memory, counts = device.memory, device.counts
    counts.clear()
    memory.watch()
    step()
    label = memory.highest_label
    assert label is not None, "nothing ran"
    operations = counts.operations()
    computing = [
        count
        for count in operations
        if count.phase in COMPUTE_PHASES and count.kind != "communication"
    ]
    return FakeStage(
        stage=stage,
        predicted_gib=predicted_peak_gib(plan, stage),
        allocated_gib=memory.highest_bytes / _GIB,
        state_gib=replayer.state_bytes / _GIB,
        activations_gib=(memory.highest_bytes - replayer.state_bytes) / _GIB,
        peak_phase=label.phase,
        peak_at=f"{label.where} {label.operation}".strip(),
        rows=tuple(rows.tolist()),
        micro_batches=len(rows),
        kernels=sum(count.kernels for count in computing),
        tflop=sum(count.tflop for count in computing),
        gigabytes=sum(count.gigabytes for count in computing),
        contents=_merge_layers(memory.contents()),
        operations=operations,
        host_reads=counts.host_reads(),
        unaligned=counts.unaligned(),
    )


def _merge_layers(by_label: dict[Label, tuple[int, int]]) -> tuple[PeakContent, ...]:
    """Contents of the peak, layers of a tower merged, largest first."""
    tensors, sizes = Counter[Label](), Counter[Label]()
    for label, (count, size) in by_label.items():
        merged = replace(label, where=_LAYER_NUMBER.sub(".*", label.where))
        tensors[merged] += count
        sizes[merged] += size
    return tuple(
        PeakContent(**asdict(label), tensors=tensors[label], gib=size / _GIB)
        for label, size in sizes.most_common()
    )


def fake_replay_info(plan: Plan) -> FakeReplayInfo:
    """Describe the settings that identify this fake-device replay."""
    digest = hashlib.sha256()
    for path in sorted(_TRAINER.rglob("*")):
        if path.suffix in _SOURCES:
            digest.update(path.read_bytes())
    return FakeReplayInfo(
        plan_sha256=plan_sha256(plan), torch=torch.__version__, trainer_sha256=digest.hexdigest()
    )


def check_fake_device(precision: Precision, provider: Provider) -> None:
    """Raise UserError if a fake device cannot count the kernels of precision or provider."""
    if provider == "te":
        raise UserError(
            "--provider te: Transformer Engine launches its kernels past torch, where a fake "
            "device cannot count them; leave --provider out, or replay on a CUDA device"
        )
    if precision == "fp8":
        raise UserError(
            "the plan is in fp8, whose products Transformer Engine launches past torch, where a "
            "fake device cannot count them; give a plan in bf16, or replay on a CUDA device"
        )


def run_fake_stages(
    job: ReplayJob, stages: Sequence[int], output: Path, launch: RankLaunch, store: dist.Store
) -> None:
    """Count unfinished stages, each in one process; return when all are done."""
    install_device()  # before an output is created, as it may fail
    torch.set_num_threads(1)
    info = fake_replay_info(job.plan)
    left = list_unfinished_stages(FAKE_REPLAY_FILES, info, job, stages, output, launch, store)
    cost, workload = job.cost, job.workload
    encoding = HeaviestEncoding.of(job.plan, job.planned.job, job.packs, job.lengths, workload)
    windows = {stage: heaviest_windows(cost, job.plan, stage, workload) for stage in left}
    runs = sum(1 + len(windows[stage]) for stage in left)
    with shared_progress("trying stages", launch, store, runs) as on_run:
        for stage in left[launch.rank :: launch.world_size]:
            counted = run_fake_stage(
                job.plan, stage, windows[stage], job.rows_of(stage), on_run, encoding
            )
            FAKE_REPLAY_FILES.write(counted, output)
