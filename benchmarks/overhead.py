"""Overhead of a training step: its time besides computing and communicating.

    python benchmarks/overhead.py [--steps 80] [--num-workers 1]

Trains the quickstart's model on the quickstart's data (made on the first run) with pretrain_vlm.py,
two stages in two processes, and reads the run log. Overhead is waiting for data, time between steps
(logging, the exchange of stage times, polling a checkpoint's progress), and time of a step in no
phase. Prints their means, without the first five steps, and whether they are below 2 %. The halt
for a checkpoint, while the state is copied, is printed separately.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from omnibal.job.runlog import RUN_FILE, StageRecord, StepRecord, read_run

BAR = 0.02
WARM_UP_STEPS = 5
SAVE_INTERVAL = 20
ROOT = Path(__file__).parent.parent
CAPS = ("--max-tiles", "12", "--max-tokens", "448")
MODEL = ("--model", "internvl-digits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--num-workers", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        records = train(Path(folder), arguments.steps, arguments.num_workers)
    print_overhead(records[WARM_UP_STEPS:])


def train(work: Path, steps: int, num_workers: int) -> list[StepRecord]:
    """Train the quickstart's model, and return the run log."""
    data = ROOT / "work" / "quickstart" / "digits"
    if not data.exists():
        run("tools/make_digits_dataset.py", "--output", data)
    meta, tokenizer = data / "train" / "meta.json", data / "tokenizer.model"
    lengths, plan, save = work / "lengths.parquet", work / "plan", work / "run"
    run("-m", "omnibal", "lengths", meta, *MODEL, "--tokenizer-model", tokenizer, "-o", lengths)
    run(
        "-m", "omnibal", "plan", *MODEL, "--cluster", "laptop-cpu", "--pp", "2", "--precision",
        "fp32", "--lengths", lengths, *CAPS, "--micro-batches", "3", "-o", plan,
    )  # fmt: skip
    run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "pretrain_vlm.py",
        "--plan", plan, "--data", meta, "--tokenizer-model", tokenizer, "--save", save, "--lr",
        "1e-3", "--num-workers", num_workers, "--train-iters", steps,
        "--save-interval", SAVE_INTERVAL,
    )  # fmt: skip
    return read_run(save / RUN_FILE)


def run(*command: object) -> None:
    """Run a Python command; print its output only if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT, env=environment, text=True, capture_output=True,
    )  # fmt: skip
    if result.returncode:
        sys.exit(result.stdout + result.stderr)


def print_overhead(records: list[StepRecord]) -> None:
    """Print the shares of the time from the end of a step to the end of the next."""
    # A save begins after its step and completes after the next: both are left out.
    saving = [record for record in records if record.step % SAVE_INTERVAL == 0]
    records = [record for record in records if record.step % SAVE_INTERVAL > 1]
    total_ms = np.array([record.step_ms + record.between_ms for record in records])  # [steps]
    data_ms = np.array([np.mean([stage.data_ms for stage in step.stages]) for step in records])
    phases_ms = np.array([np.mean([_phases_ms(stage) for stage in r.stages]) for r in records])
    step_ms = np.array([record.step_ms for record in records])
    between_ms = np.array([record.between_ms for record in records])
    rows = {
        "waiting for data": data_ms,
        "between steps": between_ms,
        "in no phase": step_ms - phases_ms,
    }
    table = Table("", "ms a step", "share", box=box.SIMPLE_HEAD)
    for name, values in rows.items():
        table.add_row(name, f"{values.mean():.2f}", f"{values.sum() / total_ms.sum():.2%}")
    overhead = sum(values.sum() for values in rows.values()) / total_ms.sum()
    table.add_row("overhead", "", f"{overhead:.2%}")
    console = Console()
    console.print(f"{len(records)} steps of {total_ms.mean():.0f} ms on two processes")
    console.print(table)
    console.print(f"the bar of {BAR:.0%} {'holds' if overhead <= BAR else 'is missed'}")
    halts_ms = [record.between_ms for record in saving]
    console.print(
        f"a checkpoint halts training for {np.median(halts_ms):.0f} ms (median of {len(saving)})"
    )


def _phases_ms(stage: StageRecord) -> float:
    return stage.forward_ms + stage.backward_ms + stage.wait_ms + stage.data_ms + stage.optimizer_ms


if __name__ == "__main__":
    main()
