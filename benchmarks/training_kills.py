"""Training killed at every phase, and resumed until it ends.

    python benchmarks/training_kills.py [--kills 100] [--seed 0] [--total kills.json]

Two processes train the quickstart's model repeatedly. SIGKILL hits one rank after a step, all
ranks, any rank during a checkpoint, any during replanning, one of two data-parallel ranks (the
other continues alone until the next kill), or torchrun; the same command resumes. The log of every
finished run must have each step once, with the planned samples, and the losses of an undisturbed
run: equal if all starts had the same sizes and stages, else within 1e-4, as sums have another
order. Prints the kills by phase as JSON. `--total` names a file that adds up the results of several
seeds.
"""

import argparse
import itertools
import json
import math
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Before torch is imported: torchrun gives its ranks one thread, and sums depend on the number.
os.environ["OMP_NUM_THREADS"] = "1"

import psutil

import megatron.vlm.run.pretrain  # noqa: F401  # forked ranks then start at once
from omnibal.job.plan import PACKS_FILE
from omnibal.job.runlog import RUN_FILE, StepRecord, read_run, samples_digest
from omnibal.packing.packs import read_packs

REPOSITORY = Path(__file__).parent.parent
STEPS = 14
REPLAN_AT = 9  # late enough to have measured steps
_GRACE_S = 5.0  # for surviving ranks to end, before they are killed as by srun
_STALLED_S = 240.0
_LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A training command, and phases to kill it in."""

    plan: Path
    options: tuple[str, ...]
    phases: tuple[str, ...]
    is_bitwise: bool  # whether all starts have the same sizes and stages
    ranks: tuple[int, ...] = (2,)  # processes of successive starts


class Ranks:
    """Processes of a start."""

    def __init__(self, words: list[str], count: int, output: Path) -> None:
        self.pids = fork_launched(partial(_train, words), count, output)
        self.ended: dict[int, int] = {}

    def running(self) -> list[int]:
        """Return ids of running processes."""
        for pid in self.pids:
            if pid not in self.ended:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.ended[pid] = os.waitstatus_to_exitcode(status)
        return [pid for pid in self.pids if pid not in self.ended]

    def kill(self, pids: list[int]) -> None:
        """Kill these processes, then the others unless they end soon."""
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.wait(_GRACE_S)
        for pid in self.running():
            os.kill(pid, signal.SIGKILL)
        self.wait(_STALLED_S)

    def wait(self, seconds: float) -> bool:
        """Wait for all to end, and return whether they did in time."""
        deadline = time.monotonic() + seconds
        while self.running():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


def fork_launched(be_rank: Callable[[], object], ranks: int, output: Path) -> list[int]:
    """Fork ranks with torchrun's environment variables, and return their process ids.

    Args:
        be_rank: runs in every process; its SystemExit is the exit status.
        output: file to append stdout and stderr to.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(ranks):
        given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
        pid = os.fork()
        if not pid:
            os.environ |= {name: str(value) for name, value in given.items()}
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            _run_as_rank(be_rank, output)
        pids.append(pid)
    return pids


def _run_as_rank(be_rank: Callable[[], object], output: Path) -> None:
    """Run a rank, and exit without the parent's cleanup."""
    code = 1
    try:
        file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        be_rank()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _train(words: list[str]) -> None:
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A run of a kind, its directory, and the random times of its kills."""

    kind: Kind
    digits: Path
    save: Path
    rng: random.Random

    @property
    def command(self) -> list[str]:
        """Command line, the same for every start."""
        data = ("--data", self.digits / "train" / "meta.json", "--tokenizer-model")
        words = ("pretrain_vlm.py", "--plan", self.kind.plan, *data)
        save = (self.digits / "tokenizer.model", "--save", self.save, "--elastic")
        sizes = ("--save-interval", "2", "--train-iters", STEPS, "--num-workers", "0")
        return [str(word) for word in (*words, *save, *sizes, *self.kind.options)]

    @property
    def output(self) -> Path:
        """File of the output of all starts."""
        return self.save.with_name(f"{self.save.name}.txt")

    def count_logged(self) -> int:
        """Return the number of logged steps."""
        log = self.save / RUN_FILE
        return log.read_bytes().count(b"\n") if log.exists() else 0

    def wait_for_phase(self, phase: str, ranks: Ranks) -> bool:
        """Wait for a random time in the phase, and return False if a rank ends before."""
        before, deadline = self.count_logged(), time.monotonic() + _STALLED_S
        is_reached = {
            "saving": lambda: any(self.save.glob("iter_*.part")),
            "replanning": lambda: _is_planning(ranks.pids[0]),
        }.get(phase, lambda: self.count_logged() > before)
        while len(ranks.running()) == len(ranks.pids):
            if is_reached():
                time.sleep(self.rng.uniform(0, 0.02 if phase == "saving" else 0.5))
                return len(ranks.running()) == len(ranks.pids)
            if time.monotonic() > deadline:
                raise SystemExit(f"no progress in {_STALLED_S:.0f} s: {self.output.read_text()}")
            time.sleep(0.002)
        return False

    def start_and_kill(self, phase: str | None, count: int) -> str | None:
        """Start `count` ranks, kill them in a phase and return it, or None if training ends."""
        ranks = Ranks(self.command, count, self.output)
        if phase is not None and self.wait_for_phase(phase, ranks):
            kills_all = phase == "all" or (self.rng.random() < 0.5 and phase != "one rank")
            ranks.kill(ranks.running() if kills_all else [self.rng.choice(ranks.running())])
            return phase
        if not ranks.wait(_STALLED_S) or any(ranks.ended.values()):
            ranks.kill(ranks.running())
            raise SystemExit(f"a start failed: {self.output.read_text()}")
        return None

    def kill_torchrun(self) -> bool:
        """Kill torchrun and wait for its ranks to end; return False if training ends before."""
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        before = self.count_logged()
        with self.output.open("a") as out:
            agent = subprocess.Popen(
                [sys.executable, *launch, *self.command], cwd=REPOSITORY, stdout=out, stderr=out
            )
            while agent.poll() is None and self.count_logged() <= before:
                time.sleep(0.01)
            if agent.poll() is not None:
                return False
            ranks = psutil.Process(agent.pid).children(recursive=True)
            agent.kill()
            agent.wait()
        _, alive = psutil.wait_procs(ranks, _STALLED_S)
        if alive:
            raise SystemExit(f"ranks outlived their launcher: {self.output.read_text()}")
        return True


def _is_planning(pid: int) -> bool:
    try:
        children = psutil.Process(pid).children()
        return any("replan" in child.cmdline() for child in children)
    except psutil.Error:
        return False


def run(trial: Trial, phases: Iterator[str], max_kills: int) -> Counter[str]:
    """Train to the end with at most `max_kills` kills; return them by phase."""
    kills, counts = Counter[str](), itertools.cycle(trial.kind.ranks)
    while True:
        phase = next(phases) if kills.total() < max_kills else None
        if phase == "launcher":
            if trial.kill_torchrun():
                kills[phase] += 1
            continue
        killed_in = trial.start_and_kill(phase, next(counts))
        if killed_in is None:
            return kills
        kills[killed_in] += 1


def check(trial: Trial, undisturbed: list[StepRecord]) -> None:
    """Raise unless a run's log has the plan's samples, and the losses of an undisturbed run."""
    packs = read_packs(trial.kind.plan / PACKS_FILE)
    lines = (trial.save / RUN_FILE).read_text().splitlines()
    if [json.loads(line)["step"] for line in lines] != list(range(STEPS)):
        raise SystemExit(f"{trial.save}: steps are missing, doubled or out of order")
    for record, other in zip(read_run(trial.save / RUN_FILE), undisturbed, strict=True):
        first, last = packs.packs.offsets[
            [int((packs.step < record.step).sum()), int((packs.step <= record.step).sum())]
        ]
        if record.samples_sha256 != samples_digest(packs.packs.samples[first:last]):
            raise SystemExit(f"{trial.save}: step {record.step} trained other samples")
        tolerance = 0.0 if trial.kind.is_bitwise else _LOSS_TOLERANCE
        if not math.isclose(record.loss, other.loss, rel_tol=tolerance):
            raise SystemExit(
                f"{trial.save}: loss {record.loss!r} in step {record.step}, and {other.loss!r} in "
                "an undisturbed run"
            )


def prepare_kinds(folder: Path) -> tuple[Path, list[Kind]]:
    """Make data and plans, and return the data's folder and the kinds of runs."""
    digits, lengths = folder / "digits", folder / "lengths.parquet"
    _run("tools/make_digits_dataset.py", "--output", digits, "--samples", "80")
    tokenizer, model = digits / "tokenizer.model", ("--model", "internvl-digits")
    meta = digits / "train" / "meta.json"
    _run("-m", "omnibal", "lengths", meta, *model, "--tokenizer-model", tokenizer, "-o", lengths)
    plans = {}
    for option in ("--pp", "--dp"):
        plans[option] = folder / f"plan{option}"
        _run(
            "-m", "omnibal", "plan", *model, "--cluster", "laptop-cpu", "--precision", "fp32",
            "--max-tiles", "12", "--max-tokens", "400", "--lengths", lengths, "--micro-batches",
            "2", "--epochs", "8", "--packing-levels", "1", option, "2", "-o", plans[option],
        )  # fmt: skip
    replan = ("--replan-at", str(REPLAN_AT))
    phases = ("one rank", "all", "saving", "launcher", "saving", "one rank", "all")
    return digits, [
        Kind(plan=plans["--pp"], options=(), phases=phases, is_bitwise=True),
        Kind(plan=plans["--pp"], options=replan, phases=("replanning", "all"), is_bitwise=False),
        Kind(plan=plans["--dp"], options=(), phases=("node",), is_bitwise=False, ranks=(2, 1)),
    ]


def _run(*command: object) -> None:
    subprocess.run(
        [sys.executable, *map(str, command)], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL
    )


def kill_runs(folder: Path, kills: int, rng: random.Random) -> tuple[Counter[str], int]:
    """Run all kinds in turn until `kills` kills; return them by phase, and the finished runs."""
    digits, kinds = prepare_kinds(folder)
    undisturbed: dict[Path, list[StepRecord]] = {}
    for kind in kinds:
        if kind.plan not in undisturbed:
            save = folder / "whole"
            without_kills = Kind(plan=kind.plan, options=(), phases=(), is_bitwise=True)
            run(Trial(kind=without_kills, digits=digits, save=save, rng=rng), iter(()), 0)
            undisturbed[kind.plan] = read_run(save / RUN_FILE)
            shutil.rmtree(save)
    phases = [itertools.cycle(kind.phases) for kind in kinds]
    counted, finished = Counter[str](), 0
    while counted.total() < kills:
        kind, kind_phases = kinds[finished % len(kinds)], phases[finished % len(kinds)]
        save = folder / f"run {finished}"
        trial = Trial(kind=kind, digits=digits, save=save, rng=rng)
        # Few kills per run: each leaves the checkpoints of two more steps, or none.
        counted += run(trial, kind_phases, min(kills - counted.total(), 5))
        check(trial, undisturbed[kind.plan])
        shutil.rmtree(save)
        finished += 1
        print(f"{counted.total()} kills, {finished} finished runs", file=sys.stderr, flush=True)
    return counted, finished


def main(arguments: list[str] | None = None, report: Callable[[str], None] = print) -> None:
    """Kill runs, and report the kills as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total", type=Path, help="file of the results of all seeds")
    given = parser.parse_args(arguments)
    os.chdir(REPOSITORY)
    with tempfile.TemporaryDirectory() as name:
        counted, finished = kill_runs(Path(name), given.kills, random.Random(given.seed))
    result = {"killed": dict(counted), "finished": finished, "lost": 0, "doubled": 0}
    report(json.dumps(result))
    if given.total is not None:
        report(json.dumps(add_result(given.total, given.seed, result)))


def add_result(path: Path, seed: int, result: dict[str, Any]) -> dict[str, Any]:
    """Store the result of a seed in a file, and return the sum over its seeds."""
    results = json.loads(path.read_text()) if path.exists() else {}
    results[str(seed)] = result
    path.write_text(json.dumps(results))
    killed = sum((Counter(seed["killed"]) for seed in results.values()), Counter[str]())
    names = ("finished", "lost", "doubled")
    sums = {name: sum(seed[name] for seed in results.values()) for name in names}
    return {"seeds": len(results), "killed": dict(killed), "kills": killed.total(), **sums}


if __name__ == "__main__":
    main()
