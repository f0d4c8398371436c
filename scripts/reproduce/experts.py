"""A mixture of experts beside a dense model on the quickstart's data: accuracy by seed.

    python scripts/reproduce/experts.py [--seeds 3] [--epochs 5]

Trains `internvl-digits` and `internvl-digits-moe`, whose tokens pass as many weights, with the same
commands and options, in one process on the CPU (tests show that expert-parallel processes train the
same). Both see the same samples in the same steps. Prints which share of the held-out questions
each seed's model answers correctly.

Finished runs stay in work/experts.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from omnibal.job.runlog import EVALUATION_FILE, RUN_FILE, read_evaluation, read_run

REPOSITORY = Path(__file__).resolve().parents[2]
WORK = REPOSITORY / "work" / "experts"
MODELS = ("internvl-digits", "internvl-digits-moe")
CAPS = ("--max-tiles", "12", "--max-tokens", "448")
RATES = (
    "--lr", "1e-3", "--min-lr", "5e-5", "--lr-warmup-fraction", "0.05", "--adam-beta2", "0.95",
)  # fmt: skip
SINGLE = "single"
"""The kind of question about one digit."""


def main() -> None:
    """Train what is not trained yet and print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each model")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the samples")
    given = parser.parse_args()
    seeds, data = range(given.seeds), WORK / "digits"
    make(data, sys.executable, "tools/make_digits_dataset.py", "--output", data)
    table = Table(title="Held-out questions answered correctly, CPU")
    for name in ("model", "seed", "steps", "loss at the end", "single digits", "all questions"):
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    for model in MODELS:
        plan = planned(model, given.epochs, data)
        results = [result_of(trained(plan, data, seed)) for seed in seeds]
        for seed, (steps, loss, single, every) in zip(seeds, results, strict=True):
            table.add_row(
                model, f"{seed}", f"{steps}", f"{loss:.3f}", f"{single:.1%}", f"{every:.1%}"
            )
        means = [statistics.mean(column) for column in zip(*results, strict=True)]
        table.add_row(
            model, "mean", "", f"{means[1]:.3f}", f"{means[2]:.1%}", f"{means[3]:.1%}",
            end_section=True,
        )  # fmt: skip
    Console().print(table)


def planned(model: str, epochs: int, data: Path) -> Path:
    """The plan of a model on the training samples."""
    lengths, plan = WORK / f"{model}.parquet", WORK / f"{model}-epochs-{epochs}-plan"
    make(
        lengths, "omnibal", "lengths", data / "train" / "meta.json", "--model", model,
        "--tokenizer-model", data / "tokenizer.model", "-o", lengths,
    )  # fmt: skip
    make(
        plan, "omnibal", "plan", "--model", model, "--cluster", "laptop-cpu", "--tp", 1, "--pp", 1,
        "--dp", 1, "--precision", "fp32", "--lengths", lengths, *CAPS,
        "--micro-batches", 6, "--epochs", epochs, "-o", plan,
    )  # fmt: skip
    return plan


def trained(plan: Path, data: Path, seed: int) -> Path:
    """The run of a plan with a seed, its questions answered."""
    run = plan.with_name(f"{plan.name.removesuffix('-plan')}-seed-{seed}")
    make(
        run / EVALUATION_FILE, "torchrun", "--standalone", "--nproc-per-node", 1,
        "pretrain_vlm.py", "--plan", plan, "--tokenizer-model", data / "tokenizer.model",
        "--data", data / "train" / "meta.json", "--save", run, "--num-workers", 0, *RATES,
        "--seed", seed, "--eval-data", data / "heldout" / "meta.json", "--max-new-tokens", 16,
    )  # fmt: skip
    return run


def make(product: Path, *command: object) -> None:
    """Run a command of this repository, unless what it makes is there."""
    if product.exists():
        return
    product.parent.mkdir(parents=True, exist_ok=True)
    words = [str(word) for word in command]
    print("$", *words, flush=True)
    # The figures are those of a CPU, and small products gain nothing from threads.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(words, cwd=REPOSITORY, env=environment, check=True)


def result_of(run: Path) -> tuple[int, float, float, float]:
    """Steps, mean loss of the last ten, and shares of single digits and of all questions."""
    records, evaluation = read_run(run / RUN_FILE), read_evaluation(run)
    assert evaluation is not None
    kinds = evaluation.kinds
    single = next(kind for kind in kinds if kind.kind == SINGLE)
    correct = sum(kind.correct for kind in kinds) / sum(kind.questions for kind in kinds)
    loss = statistics.mean(record.loss for record in records[-10:])
    return len(records), loss, single.correct / single.questions, correct


if __name__ == "__main__":
    main()
