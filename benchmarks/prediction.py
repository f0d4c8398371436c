"""How far the predicted step time is from the measured one, on this machine.

    python benchmarks/prediction.py [--rounds 3] [--train-iters 120]

Each round profiles, plans and trains the quickstart's model anew, with the commands that a user
types, so that the machine's moods are in the figures. Needs the quickstart's data: run
`scripts/quickstart.sh` first. Prints one row a round and the median of the errors' sizes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
QUICKSTART = REPOSITORY / "work" / "quickstart"
MODEL = ("--model", "internvl-digits", "--precision", "fp32")
CAPS = ("--max-tiles", "12", "--max-tokens", "448")


def run(*command: object) -> str:
    """Output of a command in the repository, one thread a process and no GPU, as the quickstart."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=REPOSITORY,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    return result.stdout


def measure(folder: Path, train_iters: int) -> tuple[float, float]:
    """Predicted and measured milliseconds of a step, from one profile, plan and run."""
    omnibal = ("-m", "omnibal")
    lengths = ("--lengths", QUICKSTART / "lengths.parquet")
    profile, plan, save = folder / "profile.json", folder / "plan", folder / "run"
    run(
        *omnibal, "profile", *MODEL, *CAPS, *lengths, "--processes", "2", "--repetitions", "25",
        "-o", profile,
    )  # fmt: skip
    run(
        *omnibal, "plan", *MODEL, *CAPS, *lengths, "--cluster", "laptop-cpu", "--pp", "2",
        "--profile", profile, "--micro-batches", "4", "-o", plan,
    )  # fmt: skip
    run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "pretrain_vlm.py",
        "--plan", plan, "--data", QUICKSTART / "digits" / "train" / "meta.json",
        "--tokenizer-model", QUICKSTART / "digits" / "tokenizer.model", "--save", save,
        "--num-workers", "0", "--train-iters", train_iters,
    )  # fmt: skip
    report = json.loads(
        run(*omnibal, "report", plan, "--run", save, "-o", folder / "report.html", "--json")
    )
    return report["predicted_step_ms"], report["run"]["step_ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--train-iters", type=int, default=120)
    arguments = parser.parse_args()
    if not (QUICKSTART / "lengths.parquet").is_file():
        parser.error(f"{QUICKSTART} has no lengths.parquet; run scripts/quickstart.sh first")
    errors = []
    print("round  predicted ms  measured ms   error")
    for number in range(1, arguments.rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            predicted_ms, measured_ms = measure(Path(folder), arguments.train_iters)
        errors.append(predicted_ms / measured_ms - 1)
        print(f"{number:>5}  {predicted_ms:>12.0f}  {measured_ms:>11.0f}  {errors[-1]:>+6.1%}")
    print(f"median size of the error: {statistics.median(map(abs, errors)):.1%}")


if __name__ == "__main__":
    main()
