"""How many samples a second `omnibal lengths` scans, and what a second process gains.

    python benchmarks/scan.py [--samples 12000] [--rounds 5]

Scans one dataset of the quickstart's kind again and again with the command that a user types, with
1 process and with 2 in turn, and prints the median of each and of the rounds' ratios. The start of
the processes is in the figures, so the machine must be idle. The image files are in the page cache:
on slower storage, more processes gain more.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent


def run(*command: object) -> str:
    """Output of a Python program in the repository."""
    result = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=REPOSITORY,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return result.stdout


def scanned_per_second(folder: Path, processes: int) -> float:
    """Samples a second of one scan from the start."""
    result = json.loads(
        run(
            "-m", "omnibal", "lengths", folder / "train" / "meta.json",
            "--model", "internvl-digits", "--tokenizer-model", folder / "tokenizer.model",
            "--processes", processes, "-o", folder / "lengths.parquet", "--json",
        )
    )  # fmt: skip
    return result["samples"] / result["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=12000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rates: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "digits"
        run("tools/make_digits_dataset.py", "--output", folder, "--samples", arguments.samples)
        for _ in range(arguments.rounds):
            for processes, found in rates.items():
                found.append(scanned_per_second(folder, processes))
    for processes, found in rates.items():
        print(f"{processes} process(es): {statistics.median(found):,.0f} samples/s")
    ratios = [two / one for one, two in zip(*rates.values(), strict=True)]
    print(f"ratio: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
