"""The job of the paper's ablation (InternViT-6B and InternLM2-20B on A100s), tried on one device.

    python scripts/reproduce/replay_26b.py [--work work/replay_26b] [--steps 1]

Plans the published lengths for TP 2 x PP 4 x DP 4 as common practice, careful practice and this
project do (`benchmarks/ablation_variants.py`), at real sizes in bf16 under an 80 GB cap, from
counted costs, and replays every stage of each with tools/replay.py: of two tensor-parallel ranks
the first, whose linears are half as wide, without the exchange with the other, which is added as it
is predicted. Needs a CUDA device of 80 GB or more; --model, --cluster, --tp and --precision try it
on less. What is finished stays in --work, and the same command goes on.
"""

import argparse
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from paper import ABLATION_JOB, CAPS, described, print_table

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))
from ablation_variants import (  # noqa: E402
    PUBLISHED,
    AblationJob,
    Variant,
    make_variant,
    real_lengths,
)

from omnibal.base.errors import EXIT_USER_ERROR, UserError  # noqa: E402
from omnibal.job.plan import plan_sha256  # noqa: E402
from omnibal.job.plan_files import save_plan  # noqa: E402
from omnibal.job.planner import PlanResult  # noqa: E402
from omnibal.job.replay import ReplaySummary, read_replay  # noqa: E402
from omnibal.model.config import load_cluster, load_model  # noqa: E402

VARIANTS = (Variant.COMMON, Variant.CAREFUL, Variant.MEMORY)


def replayed(
    result: PlanResult, job: AblationJob, folder: Path, steps: int
) -> ReplaySummary | None:
    """Save the plan and replay all of its stages, unless that is done; None where one failed, which
    has said why."""
    plan, replay = folder / "plan", folder / f"replay_{plan_sha256(result.plan)[:8]}_{steps}"
    save_plan(result, plan)
    command = [sys.executable, REPOSITORY / "tools" / "replay.py", plan, "-o", replay]
    ended = subprocess.run([*map(str, command), "--steps", str(steps)], check=False)
    if ended.returncode:
        return None
    assert result.data is not None
    workload = job.spec.workload(*result.data, result.plan.pack_levels)
    return read_replay(replay, result.plan, job.cost, workload)


def samples_per_second(result: PlanResult, summary: ReplaySummary) -> float:
    """Of the replayed steps."""
    assert result.data is not None
    packs, _ = result.data
    rows = np.flatnonzero(np.isin(packs.step, summary.info.steps))
    samples = len(packs.packs.take(rows).samples)
    return 1e3 * samples / float(summary.each_step_ms.sum())


def print_result(
    results: Mapping[Variant, PlanResult],
    summaries: Mapping[Variant, ReplaySummary],
    cluster: str,
) -> None:
    rates = {one: samples_per_second(results[one], summaries[one]) for one in summaries}
    first = next(iter(rates.values()))
    rows = [
        [
            variant,
            described(results[variant].plan.stages),
            f"{summary.step_ms:,.0f}",
            f"{summary.predicted_step_ms / summary.step_ms - 1:+.1%}",
            f"{rates[variant] / first:.2f}",
            f"{summary.idle_fraction:.0%}",
            f"{summary.recompute_fraction:.0%}",
            " ".join(f"{stage.peak_gib:.1f}" for stage in summary.stages),
        ]
        for variant, summary in summaries.items()
    ]
    columns = ("", "vision+language (recomputed)", "step ms", "predicted", "speed", "idle")
    device = next(iter(summaries.values())).info.device
    title = f"Replayed on {device}; what devices exchange, and the prediction: {cluster}"
    print_table(title, (*columns, "recomputing", "peak GiB"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=REPOSITORY / "work" / "replay_26b")
    parser.add_argument("--steps", type=int, default=1, help="of the run, to be replayed")
    parser.add_argument("--samples-per-step", type=int, default=512)
    parser.add_argument("--model", default=ABLATION_JOB.model)
    parser.add_argument("--cluster", default="a100-80g")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    try:
        replay_variants(parser.parse_args())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


def replay_variants(given: argparse.Namespace) -> None:
    """Plan and replay all of them, and print what was measured."""
    model = load_model(given.model)
    sizes = {"tensor": given.tp, "data": 4, "sequence_parallel": given.tp > 1}
    job = AblationJob(
        model=model,
        parallel=ABLATION_JOB.parallel.model_copy(update=sizes),
        cluster=load_cluster(given.cluster),
        caps=CAPS,
        samples_per_step=given.samples_per_step,
        lengths=real_lengths(PUBLISHED, model),
        seed=0,
        precision=given.precision,
    )
    results = {variant: make_variant(job, variant) for variant in VARIANTS}
    summaries = {
        variant: replayed(result, job, given.work / variant.name.lower(), given.steps)
        for variant, result in results.items()
    }
    done = {variant: summary for variant, summary in summaries.items() if summary is not None}
    if done:
        print_result(results, done, given.cluster)
    if len(done) < len(summaries):
        sys.exit(EXIT_USER_ERROR)


if __name__ == "__main__":
    main()
