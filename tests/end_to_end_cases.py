"""Run the user's commands on the digits dataset, and read run logs and evaluations."""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from commands import REPOSITORY, TIMEOUT_S, Completed, Started, launcher, reserve_port

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
    # With `processes`, run rank 0 of an incomplete launch.
    ranks = {} if processes is None else {"RANK": "0", "WORLD_SIZE": str(processes)}
    return launcher().run(*command, **ranks)


def ranks_start(
    ranks: int, *command: object, **environment: str
) -> AbstractContextManager[Started]:
    """Start ranks with the environment variables that Slurm jobs set."""
    environments = [rank_environment | environment for rank_environment in rank_environments(ranks)]
    return launcher().start(command, environments)


def run_ranks(ranks: int, *command: object, **environment: str) -> Completed:
    """Run all ranks; return their joined output and largest exit status."""
    with ranks_start(ranks, *command, **environment) as started:
        ended = started.ended
    return Completed(
        command,
        max(abs(rank.returncode) for rank in ended),
        "".join(rank.stdout for rank in ended),
        "".join(rank.stderr for rank in ended),
    )


def rank_environments(processes: int) -> Iterator[dict[str, str]]:
    port = reserve_port()
    for rank in range(processes):
        yield {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
            "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
        }  # fmt: skip


def forked_steps(monkeypatch) -> list[str]:
    """Make `omnibal run` fork its commands and ranks from the launcher; return their output."""
    said: list[str] = []

    def fork_command(command, say):
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

    monkeypatch.setattr("omnibal.cli.run_steps._run_command", fork_command)
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
    """Run a command that must fail with one error line; return the line."""
    result = run(*command, processes=processes)
    assert result.returncode == 2, (result.returncode, result.stdout, result.stderr)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in result.stderr, result.stderr
    return lines[0]


def plan_digits(lengths: Path, output: Path, *options: object) -> Path:
    """Plan packs without context parallelism, which do not depend on the parallel sizes."""
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
    """Fail unless the runs agree in the last validation and in all answers."""
    for name, tolerance in (("step", 0), ("loss_tokens", 0), ("loss", 1e-4)):
        lines = [(save / "validation.jsonl").read_text().splitlines()[-1] for save in saves]
        validated = [json.loads(line)[name] for line in lines]
        assert validated == pytest.approx([validated[0]] * len(saves), rel=tolerance)
    answered = [json.loads((save / "evaluation.json").read_text()) for save in saves]
    for found in answered:
        found["examples"].sort(key=json.dumps)  # ranks interleave examples
    assert all(found == answered[0] for found in answered)


def wait_for_steps(save: Path, steps: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if (save / "run.jsonl").exists() and len(records(save)) >= steps:
            return
        time.sleep(0.05)
    raise AssertionError(f"no {steps} steps within {TIMEOUT_S} s")
