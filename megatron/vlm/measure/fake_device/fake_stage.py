"""Run stages of a plan at their real size on a fake device: `tools/replay.py --fake-device`."""

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

from megatron.vlm.measure.fake_device.device import install_device
from megatron.vlm.measure.fake_device.encoding import HeaviestEncoding
from megatron.vlm.measure.fake_device.memory import Label
from megatron.vlm.measure.fake_device.mode import FakeDevice, fake_cuda
from megatron.vlm.measure.replay_job import ReplayJob, StageRun, run_stages
from megatron.vlm.measure.stage_replay import LoadRows, StageReplayer, act_as_stage
from megatron.vlm.run.launch import RankLaunch
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

_BYTES_PER_GIB = 2**30
_MAX_SPREAD = 0.05  # relative; allocations may have either order if predictions are this close
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
    """Run a stage's windows on a fake device; return the counts of the largest allocation's window.

    Args:
        heaviest: windows by falling prediction. A window is skipped if predicted more than
            `_MAX_SPREAD` below the window with the largest allocation so far.
        on_run: called after building the stage, and after every window, run or skipped.
    """
    with fake_cuda() as device, act_as_stage(plan.parallel, stage) as links:
        replayer = StageReplayer(plan, links, on_phase=partial(setattr, device, "phase"))
        memory = device.memory
        device.places.name(*replayer.trainer.stages)
        memory.relabel(Label("", "optimizer state", "state"))  # all but weights and gradients
        for wrapper in replayer.trainer.wrappers:
            memory.relabel(Label("", "weights", "state"), wrapper.weights())
            memory.relabel(Label("", "gradients", "state"), wrapper.gradients())
        on_run()
        worst: FakeStage | None = None
        worst_predicted_gib = 0.0
        for rows, predicted_gib in heaviest:
            expected = predicted_gib / max(worst_predicted_gib, 1e-12)
            if worst is None or expected * (1 + _MAX_SPREAD) >= 1:
                batches = [batch.map_tensors(device.fake) for batch in load(rows)]
                encoding_work = None
                if encoding is not None:
                    shares, passes = encoding.work_of_stage(stage, rows)
                    encoding_work = shares, [batch.map_tensors(device.fake) for batch in passes]
                step = partial(replayer.activation_bytes, batches, encoding_work)
                run = _count_step(device, replayer, rows, step)
                if worst is None or run.allocated_gib > worst.allocated_gib:
                    worst, worst_predicted_gib = run, predicted_gib
            on_run()
        del replayer
        gc.collect()  # core's reference cycles: their memory must not count for the next stage
    assert worst is not None, "a stage has micro-batches"
    return worst


def _count_step(
    device: FakeDevice,
    replayer: StageReplayer,
    rows: np.ndarray,
    step: Callable[[], int],
) -> FakeStage:
    """Run `step`, one rank's forwards, backwards and update; return its counts and peak memory."""
    memory, counts = device.memory, device.counts
    plan, stage = replayer.trainer.plan, replayer.trainer.links.rank
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
    # One entry of the contents for all layers of a tower.
    numbers, sizes = Counter[Label](), Counter[Label]()
    for origin, (number, size) in memory.contents().items():
        merged = replace(origin, where=_LAYER_NUMBER.sub(".*", origin.where))
        numbers[merged] += number
        sizes[merged] += size
    return FakeStage(
        stage=stage,
        predicted_gib=predicted_peak_gib(plan, stage),
        allocated_gib=memory.highest_bytes / _BYTES_PER_GIB,
        state_gib=replayer.state_bytes / _BYTES_PER_GIB,
        activations_gib=(memory.highest_bytes - replayer.state_bytes) / _BYTES_PER_GIB,
        peak_phase=label.phase,
        peak_at=f"{label.where} {label.operation}".strip(),
        rows=tuple(rows.tolist()),
        micro_batches=len(rows),
        kernels=sum(count.kernels for count in computing),
        tflop=sum(count.tflop for count in computing),
        gigabytes=sum(count.gigabytes for count in computing),
        contents=tuple(
            PeakContent(**asdict(origin), tensors=numbers[origin], gib=size / _BYTES_PER_GIB)
            for origin, size in sizes.most_common()  # largest first
        ),
        operations=operations,
        host_reads=counts.host_reads(),
        unaligned=counts.unaligned_products(),
    )


def fake_replay_info(plan: Plan) -> FakeReplayInfo:
    """Return the settings that identify this replay: plan, torch and the trainer's sources."""
    digest = hashlib.sha256()
    for path in sorted(_TRAINER.rglob("*")):
        if path.suffix in _SOURCES:
            digest.update(path.read_bytes())
    return FakeReplayInfo(
        plan_sha256=plan_sha256(plan), torch=torch.__version__, trainer_sha256=digest.hexdigest()
    )


def check_fake_device(precision: Precision, provider: Provider) -> None:
    """Raise UserError if a fake device cannot count the kernels of precision or provider."""
    if provider == "te" or precision == "fp8":
        raise UserError(
            f"provider {provider}, precision {precision}: a fake device cannot count the kernels "
            "of Transformer Engine, which bypass torch; replay on a CUDA device, or drop "
            "--provider te and plan with --precision bf16"
        )


def run_fake_stages(
    job: ReplayJob, stages: Sequence[int], output: Path, launch: RankLaunch, store: dist.Store
) -> None:
    """Count unfinished stages, as `run_stages`."""
    install_device()  # before an output is created, as it may fail
    torch.set_num_threads(1)
    cost, workload = job.cost, job.workload
    encoding = HeaviestEncoding.find(job.plan, job.planned.job, job.packs, job.lengths, workload)

    def prepare(stage: int) -> StageRun[FakeStage]:
        windows = heaviest_windows(cost, job.plan, stage, workload)
        return 1 + len(windows), lambda on_run: run_fake_stage(
            job.plan, stage, windows, job.rows_of(stage), on_run, encoding
        )

    info = fake_replay_info(job.plan)
    run_stages("trying stages", FAKE_REPLAY_FILES, info, prepare, stages, output, launch, store)
