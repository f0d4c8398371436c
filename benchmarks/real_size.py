"""Predicted against allocated peak memory of plans of real size, on fake CUDA devices.

    python benchmarks/real_size.py [--quick] [--provider local] [--work work/real_size]

Plans each job, runs all stages on fake devices (`tools/replay.py --fake-device`) and prints

1. the predicted and the allocated peak of every stage, and the largest differences;
2. kernels, arithmetic and element-wise share of each stage of InternViT-6B with InternLM2-20B for
   TP 2 x PP 4 x DP 4, every micro-batch at 9 tiles and 4,096 tokens.

Lengths are synthetic. Takes about half an hour, with --quick some minutes. Finished stages stay in
--work until plans or the trainer's code change, so an interrupted run continues. No time is
measured.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from rich.console import Console

from megatron.vlm.measure.fake_device.fake_stage import (
    check_fake_device,
    fake_replay_info,
    run_fake_stages,
)
from megatron.vlm.measure.replay_job import load_replay
from megatron.vlm.run.launch import RankLaunch, open_store
from omnibal.base.errors import EXIT_USER_ERROR, UserError
from omnibal.job.fake_replay import FakeStage, Roofline, read_fake_stages
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan
from omnibal.job.plan_data import MockData, SampleData
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import PlanRequest, make_plan
from omnibal.model.config import Provider, load_cluster, load_model
from omnibal.model.levels import Level
from omnibal.model.limits import Caps, memory_cap_gib
from omnibal.model.parallel import Parallel
from omnibal.pipeline.baselines import JOINT, PartitionMethod, RecomputeRule, SplitRule
from omnibal.report.replay_tables import fake_device_launches_table
from omnibal.report.table import Column, Table

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts" / "reproduce")]
from paper import layers_of  # noqa: E402

from tools.make_lengths import make_lengths  # noqa: E402

SAMPLES = 6_000
MICRO_BATCHES = 16
LARGE_KERNELS = Roofline(
    name="H100, published rates of large kernels; assumed, not measured here",
    matrix_tflop_per_s=600,
    attention_tflop_per_s=380,
    attention_backward_tflop_per_s=280,
    memory_gb_per_s=2600,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RealSizeJob:
    """Settings of a plan to compare."""

    model: str
    cluster: str
    sizes: tuple[int, int, int]  # TP, PP, DP
    tiles: int = 9
    tokens: int = 4096
    sequence_parallel: bool = True
    frozen: tuple[str, ...] = ()
    recompute: RecomputeRule = RecomputeRule.CHEAPEST
    at_caps: bool = False  # micro-batches at the caps, instead of packed samples

    @property
    def parallel(self) -> Parallel:
        tensor, pipeline, data = self.sizes
        sequence = self.sequence_parallel and tensor > 1
        return Parallel(tensor=tensor, pipeline=pipeline, data=data, sequence_parallel=sequence)

    @property
    def name(self) -> str:
        """Name of the job's folder and table rows."""
        tensor, pipeline, data = self.sizes
        parts = [self.model, self.cluster.split("-")[0], f"tp{tensor} pp{pipeline} dp{data}"]
        parts += ["no sp"] * (tensor > 1 and not self.sequence_parallel)
        parts += [f"{part} frozen" for part in self.frozen]
        parts += [f"recompute {self.recompute}"] * (self.recompute != RecomputeRule.CHEAPEST)
        parts += [f"{self.tiles}/{self.tokens}"] * ((self.tiles, self.tokens) != (9, 4096))
        return ", ".join([*parts, *["at caps"] * self.at_caps])

    def request(self) -> PlanRequest:
        model = load_model(self.model)
        job = JobSpec(
            model=model,
            cluster=load_cluster(self.cluster),
            parallel=self.parallel,
            precision="bf16",
            frozen=self.frozen,
        )
        limits = {"tiles": self.tiles} if model.takes_images else {}
        caps = Caps.of(**limits, tokens=self.tokens)
        data: MockData | SampleData = MockData(caps=caps, micro_batches_per_step=MICRO_BATCHES)
        if model.takes_images and not self.at_caps:
            data = SampleData(
                lengths=make_lengths("internvl", SAMPLES, seed=0),
                levels=(Level(caps=caps),),
                packs_per_step=MICRO_BATCHES * self.parallel.data,
            )
        rule = SplitRule(method=PartitionMethod.LAYER, recompute=self.recompute)
        split = JOINT if self.recompute == RecomputeRule.CHEAPEST else rule
        return PlanRequest(job=job, data=data, split=split)


_TITLES = (
    *("job", "stage", "layers (recomputed)", "predicted", "allocated", "difference", "of usable"),
    "peak in",
)
_6B_20B = "internvl-chat-1.5-6b-20b"
# Job of the printed kernels.
COUNTED = RealSizeJob(model=_6B_20B, cluster="h100-80g", sizes=(2, 4, 4), at_caps=True)
QUICK = (
    RealSizeJob(model="internvl2.5-8b", cluster="a100-80g", sizes=(1, 2, 4)),
    RealSizeJob(model=_6B_20B, cluster="a100-80g", sizes=(2, 4, 4)),
    RealSizeJob(model="llama3.1-8b", cluster="h100-80g", sizes=(2, 2, 4), tokens=8192),
)
JOBS = (
    *QUICK,
    # Table 9 of the paper, and the first of its jobs on other devices and layouts.
    RealSizeJob(model="internvit-6b-llama3-8b", cluster="a100-80g", sizes=(1, 4, 8)),
    RealSizeJob(model=_6B_20B, cluster="a100-80g", sizes=(4, 4, 2)),
    RealSizeJob(model="internvl-chat-1.5-6b-34b", cluster="a100-80g", sizes=(4, 4, 2)),
    RealSizeJob(model="internvit-6b-llama3-70b", cluster="a100-80g", sizes=(4, 8, 2)),
    RealSizeJob(model="internvit-6b-qwen1.5-110b", cluster="a100-80g", sizes=(8, 8, 1)),
    RealSizeJob(model=_6B_20B, cluster="h100-80g", sizes=(2, 4, 4), frozen=("vision",)),
    RealSizeJob(model=_6B_20B, cluster="h100-80g", sizes=(4, 2, 2), sequence_parallel=False),
    RealSizeJob(
        model=_6B_20B, cluster="a100-80g", sizes=(8, 2, 2), recompute=RecomputeRule.FULL
    ),
    RealSizeJob(
        model="internvl2.5-8b", cluster="h100-80g", sizes=(1, 1, 8), tiles=12, tokens=6144
    ),
    RealSizeJob(
        model="internvl2.5-8b", cluster="h100-80g", sizes=(2, 2, 4), tiles=24, tokens=16384
    ),
    RealSizeJob(model="internvl2.5-38b", cluster="h100-80g", sizes=(4, 4, 2)),
    RealSizeJob(model="internvl2.5-38b", cluster="a100-80g", sizes=(8, 2, 2), tokens=8192),
    RealSizeJob(model="internvl2.5-78b", cluster="h100-80g", sizes=(8, 4, 2)),
    RealSizeJob(
        model="internvl2.5-78b", cluster="a100-80g", sizes=(8, 8, 1), frozen=("vision",),
        recompute=RecomputeRule.FULL,
    ),
    RealSizeJob(model="qwen2.5-32b", cluster="h100-80g", sizes=(4, 4, 2), tokens=16384),
)  # fmt: skip


def counted_stages(job: RealSizeJob, work: Path) -> tuple[Plan, tuple[FakeStage, ...]]:
    """Return a job's plan and its stages on fake devices, from the work folder if finished.

    Raises:
        UserError: no plan fits, or no compiler is installed.
    """
    result = make_plan(job.request())
    identity = fake_replay_info(result.plan)
    key = f"{identity.plan_sha256[:8]}-{identity.trainer_sha256[:8]}"
    folder = work / job.name.replace(", ", "_").replace(" ", "-").replace("/", "-") / key
    save_plan(result, folder / "plan")
    launch = RankLaunch(rank=0, world_size=1, local_rank=0)
    replayed = load_replay(folder / "plan", None, None)
    stages = range(result.plan.parallel.pipeline)
    run_fake_stages(replayed, stages, folder / "counted", launch, open_store(launch))
    return result.plan, read_fake_stages(folder / "counted", result.plan)


def comparison_rows(job: RealSizeJob, plan: Plan, stages: Sequence[FakeStage]) -> list[list]:
    """Return a row per stage, with the job's name in the first."""
    return [
        [
            job.name if fake.stage == 0 else "",
            f"{fake.stage}",
            layers_of([plan.merge_chunks(plan.stages)[fake.stage]]),
            f"{fake.predicted_gib:.2f}",
            f"{fake.allocated_gib:.2f}",
            f"{fake.deviation:+.2%}",
            f"{fake.allocated_gib / memory_cap_gib(plan.cluster):.0%}",
            fake.peak_at.rsplit("::", 1)[-1] + f", {fake.peak_phase}",
        ]
        for fake in stages
    ]


def compare(jobs: Sequence[RealSizeJob], work: Path, console: Console) -> None:
    """Print predicted and allocated peaks of all jobs; progress goes to stderr."""
    deviations: list[tuple[float, str]] = []
    rows: list[list] = []
    for number, job in enumerate(jobs, 1):
        print(f"{number} of {len(jobs)}: {job.name}", file=sys.stderr)
        try:
            plan, stages = counted_stages(job, work)
        except UserError as error:
            print(f"left out, {job.name}: {error}", file=sys.stderr)
            rows.append([job.name, "", "no plan", *[""] * 5])
            continue
        rows += comparison_rows(job, plan, stages)
        deviations += [(s.deviation or 0.0, f"{job.name}, stage {s.stage}") for s in stages]
        worst = max(stages, key=lambda stage: abs(stage.deviation or 0.0))
        print(f"  worst: {worst.deviation:+.2%}, stage {worst.stage}", file=sys.stderr)
    columns = [Column(title=title, style="left" if title == "job" else "") for title in _TITLES]
    console.print(Table(title="Peak memory, GiB", columns=columns, sections=[rows]))
    if deviations:
        lowest, highest = min(deviations), max(deviations)
        console.print(f"predicted too little, at most: {lowest[0]:+.2%} ({lowest[1]})")
        console.print(f"predicted too much, at most: {highest[0]:+.2%} ({highest[1]})")
        within = sum(-0.01 <= deviation <= 0.02 for deviation, _ in deviations)
        console.print(f"between -1 % and +2 %: {within} of {len(deviations)} stages")


def show_kernels(work: Path, console: Console) -> None:
    """Print the kernels of each stage of `COUNTED`, at two sets of rates."""
    plan, stages = counted_stages(COUNTED, work)
    console.print(f"\n{COUNTED.name}: {layers_of(plan.stages)}")
    for rates in (Roofline.of_cluster(plan.cluster, plan.precision), LARGE_KERNELS):
        console.print(fake_device_launches_table(stages, rates))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only three jobs")
    parser.add_argument("--provider", choices=get_args(Provider), default="local")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "work" / "real_size")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    console = Console(width=200)
    try:
        check_fake_device("bf16", given.provider)
        console.print(f"provider of layers: {given.provider}")
        compare(QUICK if given.quick else JOBS, given.work, console)
        show_kernels(given.work, console)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


if __name__ == "__main__":
    main()
