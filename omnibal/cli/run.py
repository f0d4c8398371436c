"""`omnibal run`: from data to a trained model, by the commands that do each step alone."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from omnibal import running
from omnibal.base.errors import UserError
from omnibal.base.files import atomic
from omnibal.cli.console import print_notes
from omnibal.cli.groups import given_options
from omnibal.cli.options import JobOptions, SizeOptions, TokenizerOption
from omnibal.cli.plan import DataOptions, PlacementOptions, StrategyOptions
from omnibal.families.named import named_model
from omnibal.model.config import load_cluster
from omnibal.running import Step

_OWN = ("model", "cluster", "gpus")
"""Options of `omnibal plan` that are given to it in another way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """Options that `omnibal plan` does not have."""

    data: Annotated[Path, typer.Option(help="annotation file, or meta JSON that names some")]
    output: Annotated[
        Path, typer.Option("--output", "-o", help="folder of all that is made, and of the run")
    ]
    tokenizer_model: TokenizerOption = None
    weights: Annotated[
        Path | None,
        typer.Option(
            help="folder with the first weights: a released checkpoint, or the run directory of an "
            "import or a training (default: --model)"
        ),
    ] = None
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="start from random weights")
    ] = False
    lr: Annotated[float | None, typer.Option(min=0, help="largest learning rate")] = None
    start: Annotated[
        bool, typer.Option("--start/--no-start", help="start the training where its devices are")
    ] = True
    export: Annotated[
        bool, typer.Option("--export/--no-export", help="at the end write OUTPUT/hf, like --model")
    ] = True


def run(
    context: typer.Context,
    asked: RunOptions,
    given: JobOptions,
    data: DataOptions,
    strategy: StrategyOptions,
    sizes: SizeOptions,
    partition: PlacementOptions,
) -> None:
    """Fine-tune a released checkpoint: scan, plan, check, import, train and export.

    Every step is a command of its own, which is printed. Run again, it goes on where it was
    stopped, and repeats the steps whose files have changed. It takes the options of `omnibal plan`
    too; options after `--` are for pretrain_vlm.py.
    """
    asked = replace(asked, data=asked.data.absolute(), output=asked.output.absolute())
    cluster, output = load_cluster(given.cluster), asked.output
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    gpus, is_exported = strategy.gpus or devices, strategy.made_for is not None
    if not gpus:
        raise UserError("no GPU is here to plan for: give the devices of the job by --gpus")
    model, weights, is_fetched = given.model, None, False
    model = str(Path(model).absolute()) if Path(model).exists() else model
    if is_exported and (asked.weights or asked.from_scratch or asked.lr is not None):
        raise UserError(
            "--weights, --from-scratch and --lr are of this project's trainer; leave them out "
            f"with --for {strategy.made_for}"
        )
    if asked.weights is not None and asked.weights.resolve().is_relative_to(output.resolve()):
        raise UserError(f"--weights {asked.weights}: is in {output}; give another -o")
    if not is_exported:
        weights, is_fetched = running.first_weights(
            model, asked.weights, from_scratch=asked.from_scratch
        )
    model = str(weights) if is_fetched else model
    named_model(model)
    tokenizer = asked.tokenizer_model or running.tokenizer_of(model, weights)
    planned_with = _on_the_command_line(context, (given, data, strategy, sizes, partition))
    planned_with += ["--cluster", given.cluster, "--gpus", str(gpus)]
    plan = output / "plan"
    steps = running.plan_steps(asked.data, model, tokenizer, planned_with, output)
    output.mkdir(parents=True, exist_ok=True)
    _do(steps, output)
    if is_exported:
        export = output / "export"
        words = ("omnibal", "export", str(plan), "--to", str(export), "--data", str(asked.data))
        _do([Step(words=words, reads=(plan,), makes=export)], output)
        _say(f"what to run: {export / 'RUN.md'}")
        return
    if is_fetched:
        _say(f"fetching the weights of {given.model}, or finding them in the cache")
        running.fetch_checkpoint(given.model, weights=True)
    loads = weights
    if weights is not None and running.holds_released(weights):
        loads = output / "weights"
        _do([running.conversion("import", weights, loads)], output)
    more = [] if loads is None else ["--load", str(loads.absolute()), "--finetune"]
    more += [] if asked.lr is None else ["--lr", str(asked.lr)]
    more += context.args
    script = output / "train.sh"
    with atomic(script) as temporary:
        per_node = cluster.gpus_per_node
        command = running.launch(output, asked.data, tokenizer, per_node, gpus, more)
        temporary.write_text(f"#!/usr/bin/env bash\n{command}\n")
    script.chmod(0o755)
    training = running.training(output, loads, more)
    here = cluster.gpus_per_node if cluster.is_cpu else devices
    _do([training], output, trains=asked.start and gpus <= min(here, per_node))
    like = weights if loads != weights else Path(model)
    if asked.export and like is not None and running.holds_released(like) and training.is_complete:
        export = output / "hf"
        _do([running.conversion("export", output / "run", export, "--like", str(like))], output)


def _on_the_command_line(context: typer.Context, groups: Sequence[Any]) -> list[str]:
    """Return the words of the options of some groups that were given."""
    names = {field.name for group in groups for field in fields(group)} - set(_OWN)
    words: list[str] = []
    for option, value in given_options(context):
        if option.name in names and isinstance(value, bool):
            words.append(option.opts[0] if value else option.secondary_opts[0])
        elif option.name in names:
            for one in value if isinstance(value, list | tuple) else [value]:
                words += [option.opts[0], str(one)]
    return words


def _do(steps: Sequence[Step], output: Path, *, trains: bool = True) -> None:
    status = running.run_steps(steps, output / "steps.json", _say, trains=trains)
    if status:
        raise typer.Exit(status)


def _say(line: str) -> None:
    print_notes([line], prefix="")
