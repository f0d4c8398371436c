"""The user's commands on the digits: planned, trained, and what a run left."""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from commands import REPOSITORY, TIMEOUT_S, Completed, Started, launcher, reserved_port

from omnibal.job.runlog import latest_step

MODEL = ("--model", "internvl-digits")
PLANNER = ("-m", "omnibal", "plan", "--cluster", "laptop-cpu", "--precision", "fp32")
PLAN = (*PLANNER, *MODEL)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
CAPS = ("--max-tiles", "12", "--max-tokens", "400")


def run(*command: object, processes: int | None = None) -> Completed:
    if command[: len(TORCHRUN)] == TORCHRUN:
        return subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=REPOSITORY, text=True, capture_output=True, timeout=TIMEOUT_S,
        )  # fmt: skip
    # A number of processes stands for a launcher: this is one rank of so many.
    ranks = {} if processes is None else {"RANK": "0", "WORLD_SIZE": str(processes)}
    return launcher().run(*command, **ranks)


def ranks_start(
    ranks: int, *command: object, **environment: str
) -> AbstractContextManager[Started]:
    """Ranks that are told where to meet, as Slurm does."""
    environments = [each | environment for each in rank_environments(ranks)]
    return launcher().start(command, environments)


def run_ranks(ranks: int, *command: object, **environment: str) -> Completed:
    """What all of them said, one after the other."""
    with ranks_start(ranks, *command, **environment) as started:
        ended = started.ended
    return Completed(
        command,
        max(abs(rank.returncode) for rank in ended),
        "".join(rank.stdout for rank in ended),
        "".join(rank.stderr for rank in ended),
    )


def rank_environments(processes: int) -> Iterator[dict[str, str]]:
    port = reserved_port()
    for rank in range(processes):
        yield {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
            "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
        }  # fmt: skip


def forked_steps(monkeypatch) -> list[str]:
    """Make `omnibal run` fork its steps, and the launch script's ranks without torchrun, from a
    process that has imported what they need; return what they say, as it comes."""
    said: list[str] = []

    def forked(command, say):
        words, ranks = command[1:], 1
        if command[0] == "bash":
            script = shlex.split(Path(words[0]).read_text(), comments=True)
            plan, data, tokenizer, save, *more = script[script.index("localhost") + 1 :]
            names = ("--plan", plan, "--data", data, "--tokenizer-model", tokenizer)
            own = ("--load", save) if latest_step(Path(save)) else more
            words, ranks = ("pretrain_vlm.py", *names, "--save", save, *more[3:], *own), 2
        ended = run_ranks(ranks, *words) if ranks > 1 else run(*words)
        said.append(ended.stdout + ended.stderr)
        return ended.returncode

    monkeypatch.setattr("omnibal.runs.running._run_command", forked)
    return said


def succeed(*command: object) -> str:
    result = run(*command)
    assert result.returncode == 0, result.stderr
    return result.stdout


def ranks_succeed(ranks: int, *command: object, **environment: str) -> str:
    result = run_ranks(ranks, *command, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def pair_succeeds(*command: object) -> str:
    return ranks_succeed(2, *command)


def refuse(*command: object, processes: int | None = None) -> str:
    """The one line of a user's mistake."""
    result = run(*command, processes=processes)
    assert result.returncode == 2, (result.returncode, result.stdout, result.stderr)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in result.stderr, result.stderr
    return lines[0]


def plan_of(lengths: Path, output: Path, *options: object) -> Path:
    """Plan whole packs, of which all parallel sizes have the same."""
    options = ("--lengths", lengths, "--micro-batches", "4", "--packing-levels", "1", *options)
    succeed(*PLAN, *CAPS, *options, "-o", output)
    return output


def training(plan: Path, digits: Path, save: Path, *options: object) -> list[object]:
    return [
        "pretrain_vlm.py", "--plan", plan, "--data", digits / "train" / "meta.json",
        "--tokenizer-model", digits / "tokenizer.model", "--save", save, "--lr", "1e-3",
        "--num-workers", "1", *options,
    ]  # fmt: skip


def records(save: Path) -> list[dict]:
    return [json.loads(line) for line in (save / "run.jsonl").read_text().splitlines()]


def losses(save: Path) -> list[float]:
    return [record["loss"] for record in records(save)]


def assert_same_evaluation(saves: list[Path]) -> None:
    """Fail unless the runs have the last validation and all answers in common."""
    for name, tolerance in (("step", 0), ("loss_tokens", 0), ("loss", 1e-4)):
        lines = [(save / "validation.jsonl").read_text().splitlines()[-1] for save in saves]
        validated = [json.loads(line)[name] for line in lines]
        assert validated == pytest.approx([validated[0]] * len(saves), rel=tolerance)
    answered = [json.loads((save / "evaluation.json").read_text()) for save in saves]
    for found in answered:
        found["examples"].sort(key=json.dumps)  # ranks ask in turn
    assert all(found == answered[0] for found in answered)


def wait_for_steps(save: Path, steps: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if (save / "run.jsonl").exists() and len(records(save)) >= steps:
            return
        time.sleep(0.05)
    raise AssertionError(f"no {steps} steps within {TIMEOUT_S} s")
