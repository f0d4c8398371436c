"""A run of `tools/replay.py --fake-device`: distributes stages, writes counts as they finish."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.vlm.measure.fake_device.device import install_device
from megatron.vlm.measure.fake_device.encoding import HeaviestEncoding
from megatron.vlm.measure.fake_device.fake_stage import run_fake_stage
from megatron.vlm.measure.replay_job import ReplayJob, shared_progress, stages_left
from megatron.vlm.run.launch import Launch
from omnibal.base.errors import UserError
from omnibal.job.fake_replay import FAKE_REPLAY_FILES, FakeReplayInfo, heaviest_windows
from omnibal.job.plan import Plan, plan_sha256
from omnibal.model.config import Precision, Provider

_TRAINER = Path(__file__).parents[2]
_SOURCES = (".py", ".cpp")


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
    job: ReplayJob, stages: Sequence[int], output: Path, launch: Launch, store: dist.Store
) -> None:
    """Count unfinished stages, each in one process; return when all are done.

    Raises:
        UserError: `output` holds another fake-device replay, or there is no compiler.
        RefusedByDeviceError: a real device would refuse an operation of a stage.
    """
    install_device()  # before an output is created, as it may fail
    torch.set_num_threads(1)
    info = fake_replay_info(job.plan)
    left = stages_left(FAKE_REPLAY_FILES, info, job, stages, output, launch, store)
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
