"""MFU of a 26B model on H100s, simulated from the kernels that the trainer launches.

    python benchmarks/mfu.py [--work work/mfu]

MFU is model FLOPs utilization: needed operations over what all devices could do. Plans InternViT-6B
with InternLM2-20B for TP 2 x PP 4 x DP 4, every micro-batch at 9 tiles and 4,096 tokens, counts the
kernels of every stage on fake devices (`tools/replay.py --fake-device`), turns them into time at
named rates, and simulates the plan's schedule; what ranks exchange is the cost model's. Nothing is
measured: no GPU takes part, and rates of kernels are assumed.

Transformer Engine cannot be counted without a device. Its matrix products are cuBLAS's, as those of
the provider `local` are, and what this project fuses itself stays; what differs is attention, which
it runs at about FlashAttention 3's rates. So the difference between the providers is that of
attention, and there is none where `local` has FlashAttention 3 too.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from megatron.vlm.measure.fake_device.job import run_fake_stages
from megatron.vlm.measure.replay_job import load_replay
from megatron.vlm.run.launch import Launch, open_store
from omnibal.base.errors import EXIT_USER_ERROR, UserError
from omnibal.cost.analytic import model_flops
from omnibal.job.fake_replay import FakeStage, Roofline, read_fake_stages
from omnibal.job.job import JobSpec
from omnibal.job.plan import plan_sha256
from omnibal.job.plan_data import MockData
from omnibal.job.plan_files import PlanFiles, save_plan
from omnibal.job.planner import PlanRequest, make_plan
from omnibal.job.replay import (
    ReplayInfo,
    ReplaySummary,
    StageReplay,
    rows_of_steps,
    summarise_replay,
)
from omnibal.model.config import load_cluster, load_model
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.pipeline.stage_cost import per_step_costs
from omnibal.report.table import Column, Table

REPOSITORY = Path(__file__).resolve().parent.parent
MICRO_BATCHES = 32
_LARGE = {"matrix_tflop_per_s": 600.0, "memory_gb_per_s": 2600.0}
RATES = (
    Roofline(
        name="local, FlashAttention 2",
        attention_tflop_per_s=380,
        attention_backward_tflop_per_s=280,
        **_LARGE,
    ),
    Roofline(
        name="te, or local with FlashAttention 3",
        attention_tflop_per_s=550,
        attention_backward_tflop_per_s=420,
        **_LARGE,
    ),
)
"""Assumed rates of an H100 by provider: of large products and copies, and of attention with heads
of 128 and some thousand positions. Of no measurement of this project."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Utilization:
    """What the rates give for the plan's step."""

    step_ms: float
    mfu: float
    idle: float
    """Share of the step in which stages wait."""
    element_wise: float
    """Share of all computing that is neither matrix product nor attention."""


def counted(work: Path) -> tuple[PlanFiles, tuple[FakeStage, ...]]:
    """Plan the job and count its stages, or take what is kept of them in the folder.

    Raises:
        UserError: there is no compiler.
    """
    parallel = Parallel(tensor=2, pipeline=4, data=4, sequence_parallel=True)
    job = JobSpec(
        model=load_model("internvl-chat-1.5-6b-20b"),
        cluster=load_cluster("h100-80g"),
        parallel=parallel,
        precision="bf16",
    )
    data = MockData(caps=Caps.of(tiles=9, tokens=4096), micro_batches_per_step=MICRO_BATCHES)
    plan = make_plan(PlanRequest(job=job, data=data))
    folder = work / plan_sha256(plan.plan)[:8]
    save_plan(plan, folder / "plan")
    replay = load_replay(folder / "plan", None, None)
    launch = Launch(rank=0, world_size=1, local_rank=0)
    run_fake_stages(replay, range(4), folder / "counted", launch, open_store(launch))
    return replay.planned, read_fake_stages(folder / "counted", replay.plan)


def as_replayed(
    stage: FakeStage, rates: Roofline, rows: Sequence[int], update_ms: float
) -> StageReplay:
    """A stage's counted kernels as the times of equal micro-batches.

    Args:
        rows: of the packs of the steps.
        update_ms: of the weights, once a step.
    """
    times = {
        phase: sum(rates.operation_ms(one) for one in stage.operations if one.phase == phase)
        / stage.micro_batches
        for phase in ("forward", "backward")
    }
    count = len(rows)
    return StageReplay(
        stage=stage.stage,
        rows=tuple(rows),
        forward_ms=(times["forward"],) * count,
        backward_ms=(times["backward"],) * count,
        recompute_ms=(0.0,) * count,
        update_ms=update_ms,
        state_gib=stage.state_gib,
        activations_gib=stage.activations_gib,
        with_working_memory=True,
    )


def utilization(files: PlanFiles, stages: Sequence[FakeStage], rates: Roofline) -> Utilization:
    """Simulate a step of the plan with every stage's kernels at these rates."""
    plan, cost = files.plan, files.job.cost
    packs, lengths = files.steps
    info = ReplayInfo(
        plan_sha256=plan_sha256(plan), steps=(0,), repetitions=1, content="random",
        device=rates.name, processes=1,
    )  # fmt: skip
    rows = rows_of_steps(packs, info.steps)
    workload = files.job.workload(packs, lengths, plan.pack_levels)
    features = workload.features[rows]
    update_ms = per_step_costs(cost, plan.stages).update_ms
    replays = [
        as_replayed(stage, rates, rows.tolist(), float(update_ms[stage.stage])) for stage in stages
    ]
    summary: ReplaySummary = summarise_replay(info, replays, plan, cost, workload)
    flops = float(
        (features @ model_flops(plan.model, plan.cluster, plan.frozen, plan.adapters)).sum()
    )
    device_flops = 1e12 * plan.cluster.tflops(plan.precision) * plan.parallel.world_size
    shares = [stage.element_wise_share(rates) for stage in stages]
    weights = [replay.forward_ms[0] + replay.backward_ms[0] for replay in replays]
    return Utilization(
        step_ms=summary.step_ms,
        mfu=flops / (1e-3 * summary.step_ms * device_flops),
        idle=summary.idle_fraction,
        element_wise=float(np.average(shares, weights=weights)),
    )


def print_result(files: PlanFiles, stages: Sequence[FakeStage], console: Console) -> None:
    """Print a row of each set of rates, and the difference between them."""
    prediction = files.plan.prediction
    assert prediction is not None
    found = [utilization(files, stages, rates) for rates in RATES]
    rows = [
        [rates.name, f"{one.step_ms:,.0f}", f"{one.mfu:.1%}", f"{one.element_wise:.1%}",
         f"{one.idle:.1%}"]
        for rates, one in zip(RATES, found, strict=True)
    ]  # fmt: skip
    titles = ("step ms", "MFU", "element-wise", "idle")
    columns = [Column(title="provider", style="left"), *(Column(title=title) for title in titles)]
    title = f"{files.plan.model.name}, {files.plan.parallel}, simulated from counted kernels"
    console.print(Table(title=title, columns=columns, sections=[rows]))
    console.print(
        f"difference: {100 * (found[1].mfu - found[0].mfu):+.1f} points of MFU; planned with "
        f"{prediction.cost_source}: {prediction.step_ms:,.0f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=REPOSITORY / "work" / "mfu")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    try:
        files, stages = counted(given.work)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    print_result(files, stages, Console(width=120))


if __name__ == "__main__":
    main()
