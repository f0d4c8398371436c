"""Levels of packs planned for a large data set: time and memory of `omnibal plan`, ours and HBP's.

    python benchmarks/level_search.py [--samples 1000000] [--mixture tulu3-longcite] [--json]

Makes synthetic lengths and plans Llama 3.1 8B on 32 H100 for them with `--packing-levels auto` and
with `--packing-levels hbp`. Seconds are of the whole command, reading and writing of the plan
included; memory is of all its processes together, as they are looked at ten times a second. Steps
are simulated.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from omnibal.data.lengths import write_lengths
from tools.length_mixtures import MixtureName
from tools.make_lengths import make_lengths

PLAN = "plan --model llama3.1-8b --cluster h100-80g --dp 32 --micro-batches 4"
PAGE_GIB = os.sysconf("SC_PAGE_SIZE") / 2**30
LOOK_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One plan, and what making it took."""

    levels: str
    seconds: float
    cpu_seconds: float
    peak_gib: float
    packs: str
    step_ms: float
    samples_per_second: float
    communication_ratio: float
    attention_balance_ratio: float


def main() -> None:
    """Make the lengths, plan twice, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--mixture", choices=list(MixtureName), default="tulu3-longcite")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lengths = Path(folder) / "lengths.parquet"
        write_lengths(make_lengths(options.mixture, options.samples, 0), lengths)
        found = [measured(levels, lengths, Path(folder) / levels) for levels in ("auto", "hbp")]
    if options.json:
        print(json.dumps([asdict(one) for one in found]))
        return
    table = Table(title=f"{options.samples:,} samples of mixture {options.mixture}")
    rows = [[_shown(value) for value in asdict(one).values()] for one in found]
    for title in asdict(found[0]):
        table.add_column(title.replace("_", " "))
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)


def measured(levels: str, lengths: Path, output: Path) -> Measured:
    """Run `omnibal plan` with these levels."""
    command = [sys.executable, "-m", "omnibal", *PLAN.split(), "--lengths", str(lengths)]
    command += ["--packing-levels", levels, "--json", "-o", str(output)]
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    peak_gib = 0.0
    cpu_s: dict[int, float] = {}
    while process.poll() is None:
        gib, so_far = used(process.pid)
        peak_gib = max(peak_gib, gib)
        cpu_s |= so_far
        time.sleep(LOOK_S)
    seconds = time.perf_counter() - start
    assert process.stdout is not None
    printed = json.loads(process.stdout.read())
    return Measured(
        levels=levels,
        seconds=seconds,
        cpu_seconds=sum(cpu_s.values()),
        peak_gib=peak_gib,
        packs=", ".join(
            f"{one['packs']:,} of {one['max_tokens']:,} on {one['context']}"
            for one in printed["levels"]
        ),
        step_ms=printed["step_ms"],
        samples_per_second=32 * printed["samples_per_second_per_gpu"],
        communication_ratio=printed["communication_ratio"],
        attention_balance_ratio=printed["attention_balance_ratio"],
    )


def used(session: int) -> tuple[float, dict[int, float]]:
    """Memory of all processes of a session together, and the processor time of each so far."""
    ticks, gib = os.sysconf("SC_CLK_TCK"), 0.0
    seconds: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[3]) == session:
            gib += int(fields[21]) * PAGE_GIB
            seconds[int(path.parent.name)] = (int(fields[11]) + int(fields[12])) / ticks
    return gib, seconds


def _shown(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:,.3g}" if value < 1e3 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
