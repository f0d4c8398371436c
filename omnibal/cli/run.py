"""`omnibal run`: from data to a running job, by the commands that do each step alone."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from omnibal.base.errors import UserError
from omnibal.base.files import atomic
from omnibal.cli.console import print_notes
from omnibal.cli.options import ClusterOption, ModelOption, TokenizerOption, count_option
from omnibal.families.named import named_model
from omnibal.model.config import ClusterConfig, load_cluster
from omnibal.model.parallel import MAX_DEVICES
from omnibal.model.targets import TargetName

_ROOT = Path(__file__).resolve().parents[2]
_DONE = "commands.txt"
"""File of finished commands, to resume a stopped run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """A command with its output."""

    words: tuple[str, ...]
    makes: Path | None = None

    @property
    def text(self) -> str:
        return shlex.join(("omnibal", *self.words))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """Options for the steps to run, and their directory."""

    model: ModelOption
    cluster: ClusterOption
    data: Annotated[Path, typer.Option(help="annotation file, or meta JSON that names some")]
    output: Annotated[
        Path, typer.Option("--output", "-o", help="folder of all that is made, and of the run")
    ]
    gpus: Annotated[
        int | None, count_option("devices of the job (default: those here)", most=MAX_DEVICES)
    ] = None
    tokenizer_model: TokenizerOption = None
    made_for: Annotated[
        TargetName | None,
        typer.Option("--for", help="another trainer, for which a folder is exported at the end"),
    ] = None

    def steps(self, gpus: int) -> list[_Step]:
        """Commands from data to a checked plan, and its export if asked for."""
        lengths, plan, export = (
            self.output / name for name in ("lengths.parquet", "plan", "export")
        )
        scan = ["lengths", str(self.data), "--model", self.model, "-o", str(lengths)]
        if self.tokenizer_model is not None:
            scan += ["--tokenizer-model", str(self.tokenizer_model)]
        target = [] if self.made_for is None else ["--for", self.made_for.value]
        planned = ["plan", "--model", self.model, "--cluster", self.cluster, "--gpus", str(gpus)]
        planned += ["--lengths", str(lengths), *target, "-o", str(plan)]
        steps = [
            _Step(words=tuple(scan), makes=lengths),
            _Step(words=tuple(planned), makes=plan),
            _Step(words=("check", str(plan))),
        ]
        if target:
            exported = ("export", str(plan), "--to", str(export), "--data", str(self.data), *target)
            steps.append(_Step(words=exported, makes=export))
        return steps

    def launch(self, cluster: ClusterConfig, gpus: int, more: Sequence[str]) -> str:
        """Return the training command: torchrun on one node, sbatch for several."""
        root, per_node = _ROOT / "scripts", min(gpus, cluster.gpus_per_node)
        files = (self.output / "plan", self.data, self.tokenizer_model, self.output / "run")
        job = ["" if each is None else str(each.absolute()) for each in files]
        if gpus <= per_node:
            alone = [f"GPUS_PER_NODE={gpus}", str(root / "train_nodes.sh"), "1", "0", "localhost"]
            return shlex.join(["exec", "env", *alone, *job, *more])
        per = ["--ntasks-per-node", str(per_node), "--gpus-per-node", str(per_node)]
        nodes = ["--nodes", str(-(-gpus // per_node)), *per, str(root / "slurm" / "train.sbatch")]
        submit = shlex.join(["sbatch", *nodes, *job, *more])
        return f"cd {shlex.quote(str(_ROOT))} && exec {submit}"


def run(
    context: typer.Context,
    asked: RunOptions,
    start: Annotated[
        bool, typer.Option("--start/--no-start", help="start the training where its devices are")
    ] = True,
) -> None:
    """Scan, plan, check and start a job; run again, it goes on where it was stopped.

    Every step is a command of its own, which is printed. What follows `--` goes to
    pretrain_vlm.py, in the launch script that is written.
    """
    named_model(asked.model)
    cluster = load_cluster(asked.cluster)
    gpus = asked.gpus or _devices_here()
    if not gpus:
        raise UserError("no GPU is here to plan for: give the devices of the job by --gpus")
    asked.output.mkdir(parents=True, exist_ok=True)
    _do_all(asked.steps(gpus), asked.data, asked.output / _DONE)
    if asked.made_for is not None:
        print_notes([f"what to run: {asked.output / 'export' / 'RUN.md'}"], prefix="")
        return
    script = asked.output / "train.sh"
    with atomic(script) as temporary:
        launch = asked.launch(cluster, gpus, context.args)
        temporary.write_text(f"#!/usr/bin/env bash\n{launch}\n")
    script.chmod(0o755)
    here = cluster.gpus_per_node if cluster.is_cpu else _devices_here()
    if start and gpus <= min(here, cluster.gpus_per_node):
        print_notes([f"bash {script}"], prefix="$ ")
        raise typer.Exit(subprocess.run(["bash", str(script)], check=False).returncode)
    print_notes([f"to train, where the devices are: bash {script}"], prefix="")


def _do_all(steps: Sequence[_Step], data: Path, done: Path) -> None:
    """Run the steps as processes, skipping done steps while data and earlier commands are
    unchanged."""
    about = data.stat() if data.exists() else None
    of_data = "# no data" if about is None else f"# data {about.st_size} {about.st_mtime_ns}"
    earlier = done.read_text().splitlines() if done.exists() else []
    lines = [of_data]
    for step in steps:
        lines.append(step.text)
        is_there = step.makes is not None and step.makes.exists()
        if is_there and earlier[: len(lines)] == lines:
            print_notes([f"{step.text}  (done)"], prefix="$ ")
            continue
        print_notes([step.text], prefix="$ ")
        earlier = lines[:-1]
        done.write_text("".join(f"{line}\n" for line in earlier))
        command = [sys.executable, "-m", "omnibal", *step.words]
        status = subprocess.run(command, check=False).returncode
        if status:
            raise typer.Exit(status)
        earlier = list(lines)
        done.write_text("".join(f"{line}\n" for line in earlier))


def _devices_here() -> int:
    """Number of NVIDIA GPUs of this machine."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
