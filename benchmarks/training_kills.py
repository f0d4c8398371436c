"""Training that is killed at every phase, and started again until it is done.

    python benchmarks/training_kills.py [--kills 100] [--seed 0] [--total kills.json]

Two processes train the quickstart's model again and again. They are killed by SIGKILL: one rank
after some step; all of them; any while a checkpoint is written; any while rank 0 plans anew; one of
two data-parallel ranks, so that the other goes on alone, and both again after the next kill; and
torchrun itself. The same command then goes on. Of every finished run, the log must have each step
once with the samples that the plan has there, by their numbers, so that none is lost or doubled,
and the losses of a run that was never killed: to the bit where all of its starts had the same sizes
and stages, and else within 1e-4 of each, as sums are in another order. It ends with an error where
that is not so, and else prints the kills of each phase as JSON. Several commands of other seeds can
make a hundred kills between them: `--total` names a file that keeps their results, whose sum is
printed too.
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

# Before torch is imported: torchrun gives its ranks one thread, and sums over other numbers of
# threads are in another order.
os.environ["OMP_NUM_THREADS"] = "1"

import psutil

import megatron.vlm.run.pretrain  # noqa: F401  # before ranks are forked, which then start at once
from omnibal.job.plan import PACKS_FILE
from omnibal.job.runlog import RUN_FILE, StepRecord, read_run, samples_digest
from omnibal.packing.packs import read_packs

REPOSITORY = Path(__file__).parent.parent
STEPS = 14
REPLAN_AT = 9
"""Far enough that enough steps are measured before."""
_MORE_S = 5.0
"""Seconds for the other ranks to end by themselves, before they are killed as srun would."""
_STALLED_S = 240.0
_CLOSE = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A way to train, and the phases in which it is killed."""

    plan: Path
    options: tuple[str, ...]
    phases: tuple[str, ...]
    to_the_bit: bool
    """Whether all starts have the same sizes and stages."""
    ranks: tuple[int, ...] = (2,)
    """Processes of the starts, in turn."""


class Ranks:
    """The processes of one start."""

    def __init__(self, words: list[str], count: int, output: Path) -> None:
        self.pids = fork_launched(partial(_train, words), count, output)
        self.ended: dict[int, int] = {}

    def running(self) -> list[int]:
        """Ids of the processes that have not ended."""
        for pid in self.pids:
            if pid not in self.ended:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.ended[pid] = os.waitstatus_to_exitcode(status)
        return [pid for pid in self.pids if pid not in self.ended]

    def kill(self, pids: list[int]) -> None:
        """Kill some of them, and the others if they do not end for that."""
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.wait(_MORE_S)
        for pid in self.running():
            os.kill(pid, signal.SIGKILL)
        self.wait(_STALLED_S)

    def wait(self, seconds: float) -> bool:
        """Wait until all have ended; whether they have."""
        deadline = time.monotonic() + seconds
        while self.running():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


def fork_launched(be_rank: Callable[[], object], ranks: int, output: Path) -> list[int]:
    """Fork ranks in the environment that torchrun gives them; returns their process ids.

    Args:
        be_rank: runs in every process, whose exit status is that of its SystemExit.
        output: file that stdout and stderr are appended to.
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
            _become(be_rank, output)
        pids.append(pid)
    return pids


def _become(be_rank: Callable[[], object], output: Path) -> None:
    """Be a rank, and end as it does."""
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
    """Run a program as its command does."""
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A run of a kind, its directory, and what chooses the moments."""

    kind: Kind
    digits: Path
    save: Path
    chosen: random.Random

    @property
    def words(self) -> list[str]:
        """The command, which is the same at every start."""
        given = ("--data", self.digits / "train" / "meta.json", "--tokenizer-model")
        words = ("pretrain_vlm.py", "--plan", self.kind.plan, *given)
        more = (self.digits / "tokenizer.model", "--save", self.save, "--elastic")
        often = ("--save-interval", "2", "--train-iters", STEPS, "--num-workers", "0")
        return [str(word) for word in (*words, *more, *often, *self.kind.options)]

    @property
    def output(self) -> Path:
        """What all starts said."""
        return self.save.with_name(f"{self.save.name}.txt")

    def logged(self) -> int:
        """Lines of the log."""
        log = self.save / RUN_FILE
        return log.read_bytes().count(b"\n") if log.exists() else 0

    def moment(self, phase: str, ranks: Ranks) -> bool:
        """Wait for a moment of the phase; False where the run has ended before."""
        before, deadline = self.logged(), time.monotonic() + _STALLED_S
        reached = {
            "saving": lambda: any(self.save.glob("iter_*.part")),
            "replanning": lambda: _is_planning(ranks.pids[0]),
        }.get(phase, lambda: self.logged() > before)
        while len(ranks.running()) == len(ranks.pids):
            if reached():
                time.sleep(self.chosen.uniform(0, 0.02 if phase == "saving" else 0.5))
                return len(ranks.running()) == len(ranks.pids)
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"nothing happened in {_STALLED_S:.0f} s: {self.output.read_text()}"
                )
            time.sleep(0.002)
        return False

    def attempt(self, phase: str | None, count: int) -> str | None:
        """Start it, and kill it in a phase; the phase if it was, None if it came to its end."""
        ranks = Ranks(self.words, count, self.output)
        if phase is not None and self.moment(phase, ranks):
            everyone = phase == "all" or (self.chosen.random() < 0.5 and phase != "one rank")
            ranks.kill(ranks.running() if everyone else [self.chosen.choice(ranks.running())])
            return phase
        if not ranks.wait(_STALLED_S) or any(ranks.ended.values()):
            ranks.kill(ranks.running())
            raise SystemExit(f"a start failed: {self.output.read_text()}")
        return None

    def under_torchrun(self) -> bool:
        """Kill torchrun, whose ranks must end by themselves; False where the run ended before."""
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        before = self.logged()
        with self.output.open("a") as said:
            agent = subprocess.Popen(
                [sys.executable, *launch, *self.words], cwd=REPOSITORY, stdout=said, stderr=said
            )
            while agent.poll() is None and self.logged() <= before:
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


def run(trial: Trial, phases: Iterator[str], left: int) -> Counter[str]:
    """Kill a run so many times at most, and let it come to its end; the kills by phase."""
    counted, counts = Counter[str](), itertools.cycle(trial.kind.ranks)
    while True:
        phase = next(phases) if counted.total() < left else None
        if phase == "launcher":
            if trial.under_torchrun():
                counted[phase] += 1
            continue
        killed = trial.attempt(phase, next(counts))
        if killed is None:
            return counted
        counted[killed] += 1


def check(trial: Trial, whole: list[StepRecord]) -> None:
    """Compare a run's log with the plan, by the numbers of samples, and with a run that was never
    killed."""
    packs = read_packs(trial.kind.plan / PACKS_FILE)
    lines = (trial.save / RUN_FILE).read_text().splitlines()
    if [json.loads(line)["step"] for line in lines] != list(range(STEPS)):
        raise SystemExit(f"{trial.save}: steps are missing, doubled or out of order")
    for record, other in zip(read_run(trial.save / RUN_FILE), whole, strict=True):
        first, last = packs.packs.offsets[
            [int((packs.step < record.step).sum()), int((packs.step <= record.step).sum())]
        ]
        if record.samples_sha256 != samples_digest(packs.packs.samples[first:last]):
            raise SystemExit(f"{trial.save}: step {record.step} trained other samples")
        tolerance = 0.0 if trial.kind.to_the_bit else _CLOSE
        if not math.isclose(record.loss, other.loss, rel_tol=tolerance):
            raise SystemExit(
                f"{trial.save}: loss {record.loss!r} in step {record.step}, and {other.loss!r} in "
                "a run that was never killed"
            )


def kinds_of(folder: Path) -> tuple[Path, list[Kind]]:
    """Make the data and the plans; the kinds of runs."""
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
    anew = ("--replan-at", str(REPLAN_AT))
    several = ("one rank", "all", "saving", "launcher", "saving", "one rank", "all")
    return digits, [
        Kind(plan=plans["--pp"], options=(), phases=several, to_the_bit=True),
        Kind(plan=plans["--pp"], options=anew, phases=("replanning", "all"), to_the_bit=False),
        Kind(plan=plans["--dp"], options=(), phases=("node",), to_the_bit=False, ranks=(2, 1)),
    ]


def _run(*command: object) -> None:
    subprocess.run(
        [sys.executable, *map(str, command)], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL
    )


def killed(folder: Path, kills: int, chosen: random.Random) -> tuple[Counter[str], int]:
    """Run all kinds in turn until so many kills were made; these by phase, and the finished
    runs."""
    digits, kinds = kinds_of(folder)
    whole: dict[Path, list[StepRecord]] = {}
    for kind in kinds:
        if kind.plan not in whole:
            save = folder / "whole"
            alone = Kind(plan=kind.plan, options=(), phases=(), to_the_bit=True)
            trial = Trial(kind=alone, digits=digits, save=save, chosen=chosen)
            run(trial, iter(()), 0)
            whole[kind.plan] = read_run(save / RUN_FILE)
            shutil.rmtree(save)
    phases = [itertools.cycle(kind.phases) for kind in kinds]
    counted, finished = Counter[str](), 0
    while counted.total() < kills:
        kind, of_kind = kinds[finished % len(kinds)], phases[finished % len(kinds)]
        save = folder / f"run {finished}"
        trial = Trial(kind=kind, digits=digits, save=save, chosen=chosen)
        # Some kills a run: each leaves it with the checkpoints of two steps more, or none.
        counted += run(trial, of_kind, min(kills - counted.total(), 5))
        check(trial, whole[kind.plan])
        shutil.rmtree(save)
        finished += 1
        print(f"{counted.total()} kills, {finished} finished runs", file=sys.stderr, flush=True)
    return counted, finished


def main(arguments: list[str] | None = None, report: Callable[[str], None] = print) -> None:
    """Kill, and print what was killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total", type=Path, help="file of the results of all seeds")
    given = parser.parse_args(arguments)
    os.chdir(REPOSITORY)
    with tempfile.TemporaryDirectory() as name:
        counted, finished = killed(Path(name), given.kills, random.Random(given.seed))
    result = {"killed": dict(counted), "finished": finished, "lost": 0, "doubled": 0}
    report(json.dumps(result))
    if given.total is not None:
        report(json.dumps(added(given.total, given.seed, result)))


def added(path: Path, seed: int, result: dict[str, Any]) -> dict[str, Any]:
    """Keep the result of a seed in a file; the sum of all that it keeps."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept[str(seed)] = result
    path.write_text(json.dumps(kept))
    killed = sum((Counter(one["killed"]) for one in kept.values()), Counter[str]())
    sums = {
        name: sum(one[name] for one in kept.values()) for name in ("finished", "lost", "doubled")
    }
    return {"seeds": len(kept), "killed": dict(killed), "kills": killed.total(), **sums}


if __name__ == "__main__":
    main()
