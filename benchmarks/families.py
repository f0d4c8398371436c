"""Every preset planned for several numbers of GPUs: seconds that it takes, and what is predicted.

    taskset -c 0 python benchmarks/families.py [--models NAME ...] [--gpus 8 64 512]
                     [--samples 100000] [--cluster h100-80g] [--timeout 600] [--json FILE]

Each plan is `omnibal plan --gpus N --lengths L` in a process of its own: seconds are those that a
user waits, imports and writing included, and CPU seconds what they cost whatever else runs. Those
of workers are not counted, so that CPU seconds are whole on one core alone, as here. Lengths are
the mixture `internvl` of `tools/make_lengths.py`: as tiles for models of tiles, as image tokens,
256 for a tile, for models of native-resolution images, and as text alone for others. What cannot be
planned is listed with the command's own error. Predictions are simulated, by counted costs: nothing
here ran on a GPU.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from omnibal.base.program import ArgumentParser, one_line_errors
from omnibal.data.lengths import Lengths, write_lengths
from omnibal.model.config import load_model, preset_names
from tools.length_mixtures import TOKENS_PER_TILE
from tools.make_lengths import make_lengths

SEED = 0
TOY = "internvl-digits"
"""Presets that begin so are for tests, of a few thousand parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One plan, or why there is none."""

    model: str
    gpus: int
    seconds: float
    cpu_seconds: float
    """Of the command's own process."""
    sizes: str = ""
    caps: str = ""
    peak_gib: float = 0.0
    samples_per_second: float = 0.0
    gap: float = 0.0
    """Share of the step by which stages that are not ruled out may be faster."""
    error: str = ""


def lengths_for(items: Sequence[str], drawn: Lengths) -> Lengths:
    """Samples with the items that a model takes; those that the mixture does not have are none."""
    tiles = drawn.items["tiles"]
    known = {"tiles": tiles, "image_tokens": tiles * TOKENS_PER_TILE}
    return replace(drawn, items={name: known.get(name, 0 * tiles) for name in items})


def planned(model: str, gpus: int, lengths: Path, cluster: str, timeout: float) -> Planned:
    """Plan a preset in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "omnibal", "plan", "--model", model, "--json"]
        command += ["--cluster", cluster, "--gpus", str(gpus), "--lengths", str(lengths)]
        started, cpu_started = time.perf_counter(), _cpu_seconds()
        try:
            done = subprocess.run(
                [*command, "-o", f"{folder}/plan"],
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
            error = (done.stderr.strip().splitlines() or ["no message"])[-1]
        except subprocess.TimeoutExpired:
            done, error = None, "out of time"
        seconds, cpu_seconds = time.perf_counter() - started, _cpu_seconds() - cpu_started
    row = Planned(model=model, gpus=gpus, seconds=seconds, cpu_seconds=cpu_seconds)
    if done is None or done.returncode:
        return replace(row, error=error)
    plan = json.loads(done.stdout)
    best = plan["strategies"][0]
    parallel = best["parallel"]
    names = {"TP": "tensor", "PP": "pipeline", "DP": "data", "EP": "expert"}
    sizes = (f"{short} {parallel.get(name, 1)}" for short, name in names.items())
    return replace(
        row,
        sizes=" ".join(sizes),
        caps=", ".join(f"{cap:,} {name[4:]}" for name, cap in best["caps"].items()),
        peak_gib=max(stage["peak_gib"] for stage in plan["stages"]),
        samples_per_second=plan["samples_per_second_per_gpu"] * gpus,
        gap=plan["search_gap"] or 0.0,
    )


def _cpu_seconds() -> float:
    """User and system time of the processes that have ended."""
    of_ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return of_ended.ru_utime + of_ended.ru_stime


def table_of(rows: Sequence[Planned]) -> Table:
    """The plans, a line each."""
    table = Table(title="Plans by model and GPUs, simulated")
    names = "model", "GPUs", "s", "CPU s", "sizes", "caps", "peak GiB", "samples/s", "gap"
    for name in names:
        table.add_column(name, justify="left" if name in ("model", "sizes", "caps") else "right")
    for row in rows:
        start = row.model, str(row.gpus), f"{row.seconds:.1f}", f"{row.cpu_seconds:.1f}"
        if row.error:
            table.add_row(*start, row.error)
            continue
        figures = f"{row.peak_gib:.1f}", f"{row.samples_per_second:.1f}", f"{row.gap:.1%}"
        table.add_row(*start, row.sizes, row.caps, *figures)
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Plan all, and print the table."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", help="presets (default: all)")
    parser.add_argument("--gpus", nargs="+", type=int, default=[8, 64, 512])
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--cluster", default="h100-80g")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of one plan")
    parser.add_argument("--json", type=Path, help="file to write all rows to")
    given = parser.parse_args(argv)
    models = given.models or [name for name in preset_names("models") if not name.startswith(TOY)]
    drawn = make_lengths("internvl", given.samples, SEED)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            lengths = Path(folder) / "lengths.parquet"
            write_lengths(lengths_for(load_model(model).item_features, drawn), lengths)
            for gpus in given.gpus:
                rows.append(planned(model, gpus, lengths, given.cluster, given.timeout))
                sys.stderr.write(f"{rows[-1]}\n")
    Console(width=140).print(table_of(rows))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        main()
