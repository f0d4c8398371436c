"""Packs above the bound, time and peak memory of a hundred million samples packed in portions.

    python benchmarks/scale.py [--samples 1000000] [--tiles 9 --tokens 4096] [--folder DIR] [--plan]

Makes synthetic lengths, packs every portion into steps of 64 ranks by predicted time, proves a
lower bound on packs of all samples, and reads a portion as a rank of the trainer does. With --plan,
runs `omnibal plan` and `omnibal check` for InternVL2.5-26B on 64 GPUs, and opens the plan as a
rank. Every task runs in its own process, for its peak memory; times are CPU seconds on one core.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from omnibal.data.lengths import Lengths, read_lengths, write_lengths
from omnibal.families.named import named_model
from omnibal.job.check import open_plan, open_portion
from omnibal.job.job import JobSpec
from omnibal.job.plan import LENGTHS_FILE, portion_folder, portion_packs_file
from omnibal.job.plan_data import SampleData
from omnibal.job.plan_portions import bound_packs, write_portions
from omnibal.model.config import load_cluster
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.pack_settings import PORTION_SAMPLES, PackSettings
from omnibal.packing.packs import ScheduledPacks, read_packs
from omnibal.packing.portions import PortionedSamples, PortionPlace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.make_lengths import make_lengths

_RANKS, _MICRO_BATCHES = 64, 8
_MAX_GAP = 0.005  # share of packs above the bound
_MAX_SECONDS, _MAX_GIB = 600, 16.0  # of packing a hundred million samples
_LENGTHS, _PLAN = "all.parquet", "plan"
_LAYOUT = "--model internvl2.5-26b --cluster h100-80g --tp 4 --pp 4 --dp 4".split()


def schedule_portion(
    lengths: Lengths, place: PortionPlace, *, samples: PortionedSamples, job: JobSpec, caps: Caps
) -> ScheduledPacks:
    """Pack a portion into steps of all ranks."""
    data = SampleData(
        lengths=lengths,
        settings=samples.settings_of(place),
        levels=(Level(caps=caps),),
        packs_per_step=_RANKS * _MICRO_BATCHES,
    )
    return data.schedule(job)[0]


def pack(folder: Path, caps: Caps, portion_samples: int) -> str:
    """Pack the lengths of a folder in portions, and return a report."""
    job = JobSpec(
        model=named_model("internvl-chat-1.5-6b-20b"),
        cluster=load_cluster("a100-80g"),
        parallel=Parallel(pipeline=1, data=_RANKS),
        precision="bf16",
    )
    settings = PackSettings(portion_samples=portion_samples)
    samples = PortionedSamples.deal(read_lengths([folder / _LENGTHS]), settings)
    if samples is None:
        raise SystemExit("--samples must be more than a portion's")
    schedule = partial(schedule_portion, samples=samples, job=job, caps=caps)
    portions = write_portions(samples, schedule, folder)
    pack_s = time.process_time()  # from the start of this process
    packs = sum(portion.packs for portion in portions)
    bound = bound_packs(samples, caps, packs)
    bound_s = time.process_time() - pack_s
    gap = packs / bound - 1
    verdict = "ok" if gap <= _MAX_GAP else "MISSES"
    within = "ok" if pack_s <= _MAX_SECONDS and peak_gib() <= _MAX_GIB else "MISSES"
    return (
        f"{len(samples.lengths):,} samples in {samples.count} portions, {caps}\n"
        f"  packs {packs:,}, at least {bound:,}: gap {gap:.3%} {verdict}\n"
        f"  read, packed and written in {pack_s:.0f} s, bound in {bound_s:.0f} s, "
        f"peak {peak_gib():.2f} GiB {within}"
    )


def read_portion(folder: Path) -> str:
    """Read a portion as a rank does, and return a report."""
    before, portion = peak_gib(), portion_folder(folder, 0)
    packs = read_packs(portion / portion_packs_file(0))
    lengths = read_lengths([portion / LENGTHS_FILE])
    return (
        f"  a rank's portion: {len(packs):,} packs of {len(lengths):,} samples, "
        f"{peak_gib() - before:.2f} GiB at most, {time.process_time():.1f} s"
    )


def open_last_portion(folder: Path) -> str:
    """Open a plan and its last portion as a resuming rank does, and return a report."""
    before = peak_gib()
    files = open_plan(folder / _PLAN, to_train=True)
    assert files.plan.data is not None, "planned with lengths"
    _, packs, _ = open_portion(files, files.plan.data.steps - 1)
    return (
        f"  a rank opens the plan, and its last portion of {len(packs):,} packs, in "
        f"{time.process_time():.1f} s, {peak_gib() - before:.2f} GiB at most"
    )


def plan_commands(given: argparse.Namespace, folder: Path) -> list[list[str]]:
    """Return the commands that plan the samples of a folder and check the plan."""
    limits = ["--max-tiles", str(given.tiles), "--max-tokens", str(given.tokens)]
    portions = ["--portion-samples", str(given.portion_samples)]
    data = ["--lengths", str(folder / _LENGTHS), *limits, *portions]
    plan = ["plan", *_LAYOUT, *data, "-o", str(folder / _PLAN)]
    return [plan, ["check", str(folder / _PLAN)]]


def measure_command(command: list[str]) -> str:
    """Run an `omnibal` command, and return its CPU seconds and peak memory."""
    process = subprocess.Popen(
        [sys.executable, "-m", "omnibal", *command], stdout=subprocess.DEVNULL, env=_one_core()
    )
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"omnibal {command[0]} failed")
    seconds = used.ru_utime + used.ru_stime
    return f"  omnibal {command[0]}: {seconds:.0f} s, peak {used.ru_maxrss / 2**20:.2f} GiB"


def peak_gib() -> float:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=100_000_000)
    parser.add_argument("--tiles", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--folder", type=Path, help="parent of the working folder")
    parser.add_argument("--portion-samples", type=int, default=PORTION_SAMPLES)
    parser.add_argument("--plan", action="store_true", help="plan, check and open a plan instead")
    tasks = ("make", "pack", "read", "open")
    parser.add_argument("--task", choices=tasks, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.task is None:
        _run_tasks(given)
    elif given.task == "make":
        write_lengths(make_lengths("internvl", given.samples, 0), given.folder / _LENGTHS)
    elif given.task == "pack":
        caps = Caps.of(tiles=given.tiles, tokens=given.tokens)
        print(pack(given.folder, caps, given.portion_samples))
    else:
        print((read_portion if given.task == "read" else open_last_portion)(given.folder))


def _one_core() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _run_tasks(given: argparse.Namespace) -> None:
    """Run every task in its own process, with the arguments of this one."""
    folder = Path(tempfile.mkdtemp(prefix="scale-", dir=given.folder))

    def run(task: str) -> None:
        command = [sys.executable, *sys.argv, "--folder", str(folder), "--task", task]
        subprocess.run(command, check=True, env=_one_core())

    try:
        run("make")
        if not given.plan:
            run("pack")
            run("read")
            return
        for command in plan_commands(given, folder):
            print(measure_command(command), flush=True)
        run("open")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
