"""How many samples a second `omnibal lengths` scans, what a second process gains, and how long a
process of training takes to open a million samples by an index.

    python benchmarks/scan.py [--samples 12000] [--rounds 5]

Scans one dataset of the quickstart's kind again and again with the command that a user types, with
1 process and with 2 in turn, and prints the median of each and of the rounds' ratios. The start of
the processes is in the figures, so the machine must be idle. The image files are in the page cache:
on slower storage, more processes gain more. The million are lines of 100 files, whose versions are
asked for.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from omnibal.base.worker_pool import LocalPool
from omnibal.data.annotations import Annotations
from omnibal.data.data_index import DataIndex

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


def opened_s(folder: Path, samples: int = 1_000_000, files: int = 100) -> tuple[float, float]:
    """Seconds in which so many samples are opened without an index, which is made, and by it."""
    lines = b'{"conversations": []}\n' * (samples // files)
    names = [f"{number}.jsonl" for number in range(files)]
    for name in names:
        (folder / name).write_bytes(lines)
    meta, index = folder / "meta.json", folder / "index"
    meta.write_text(json.dumps({name: {"annotation": name} for name in names}))
    began = time.perf_counter()
    Annotations.open(meta, DataIndex.resumed(index, LocalPool()))
    made = time.perf_counter()
    Annotations.open(meta, DataIndex.read(index))
    return made - began, time.perf_counter() - made


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
    with tempfile.TemporaryDirectory() as name:
        made_s, opened = opened_s(Path(name))
    print(f"a million samples: found in {made_s:.2f} s, opened by the index in {opened:.2f} s")


if __name__ == "__main__":
    main()
