"""`omnibal run`: from data to a trained model, by the commands that do each step alone."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from omnibal.base.errors import UserError
from omnibal.base.folder_lock import lock_folder
from omnibal.cli.console import print_notes
from omnibal.cli.help_groups import given_options
from omnibal.cli.options import (
    DataRootOption,
    JobOptions,
    SizeOptions,
    TemplateOption,
    TokenizerOption,
)
from omnibal.cli.plan_command import DataOptions, PlacementOptions, StrategyOptions
from omnibal.families.named import named_model
from omnibal.model.config import ClusterConfig, load_cluster
from omnibal.runs import running
from omnibal.runs.running import RunStep

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
    data_root: DataRootOption = None
    template: TemplateOption = None
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
    lr: Annotated[
        float | None,
        typer.Option(min=0, help="largest learning rate (default: 1e-5, of adapters 1e-4)"),
    ] = None
    vision_lr: Annotated[
        float | None,
        typer.Option(min=0, help="that of the vision encoder's own weights (default: 0.2 x --lr)"),
    ] = None
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
    stopped, also with another --lr or more --epochs, and repeats steps after a change of their
    files. It takes the options of `omnibal plan` too; options after `--` are for pretrain_vlm.py. A
    cluster of CPUs trains in fp32 unless --precision is given.
    """
    asked = replace(
        asked,
        data=asked.data.absolute(),
        output=asked.output.absolute(),
        weights=asked.weights and asked.weights.absolute(),
        tokenizer_model=asked.tokenizer_model and asked.tokenizer_model.absolute(),
    )
    cluster = load_cluster(given.cluster)
    gpus = _devices(cluster, strategy, sizes)
    is_exported = strategy.made_for is not None
    rates = {"--lr": asked.lr, "--vision-lr": asked.vision_lr}
    more = [word for pair in rates.items() if pair[1] is not None for word in map(str, pair)]
    if is_exported and (asked.weights or asked.from_scratch or more):
        raise UserError(
            "--weights, --from-scratch and rates are of this project's trainer; leave them out "
            f"with --for {strategy.made_for}"
        )
    output, model, weights, is_fetched = asked.output, given.model, None, False
    model = str(Path(model).absolute()) if Path(model).exists() else model
    if asked.weights is not None and asked.weights.resolve().is_relative_to(output.resolve()):
        raise UserError(f"--weights {asked.weights}: is in {output}; give another -o")
    if not is_exported:
        weights, is_fetched = running.choose_weights(
            model, asked.weights, from_scratch=asked.from_scratch
        )
    model = str(weights) if is_fetched else model
    named_model(model)
    tokenizer = asked.tokenizer_model or running.find_tokenizer(model, weights)
    planned_with = _on_the_command_line(context, (given, data, strategy, sizes, partition))
    if cluster.is_cpu and not {"--precision", "--profile"} & set(planned_with):
        planned_with += ["--precision", "fp32"]
    planned_with += ["--cluster", _absolute(given.cluster), "--gpus", str(gpus)]
    confined = [] if asked.data_root is None else ["--data-root", _absolute(asked.data_root)]
    scanned_with = [*confined, *(["--template", asked.template] if asked.template else [])]
    planning = running.plan_steps(asked.data, model, tokenizer, planned_with, output, scanned_with)
    with lock_folder("-o", output, _say):
        _do(planning, output)
        if is_exported:
            _export(output, asked.data)
            return
        if is_fetched:
            _say(f"fetching the weights of {given.model}, or finding them in the cache")
            running.fetch_checkpoint(given.model, weights=True)
        loads = weights
        if weights is not None and running.has_released_weights(weights):
            loads = output / "weights"
            _do([running.conversion_step("import", weights, loads)], output)
        more = ([] if loads is None else ["--load", str(loads), "--finetune"]) + confined + more
        per_node = cluster.gpus_per_node
        more += context.args
        running.write_launch(output, asked.data, tokenizer, per_node, gpus, more)
        training = running.training_step(output, loads, planning[0], more)
        here = per_node if cluster.is_cpu else min(_gpus_here(), per_node)
        _do([training], output, trains=asked.start and gpus <= here)
        like = weights if loads != weights else Path(model)
        is_like = like is not None and running.has_released_weights(like)
        if asked.export and is_like and training.is_complete:
            export = output / "hf"
            _do(
                [running.conversion_step("export", output / "run", export, "--like", str(like))],
                output,
            )


def _gpus_here() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _devices(cluster: ClusterConfig, strategy: StrategyOptions, sizes: SizeOptions) -> int:
    """Return the devices of the job: as given, those here, or a node of a cluster of CPUs."""
    if strategy.gpus is not None:
        return strategy.gpus
    if any((sizes.tp, sizes.pp, sizes.dp)) and (cluster.is_cpu or not _gpus_here()):
        return sizes.parallel().world_size
    found = cluster.gpus_per_node if cluster.is_cpu else _gpus_here()
    if not found:
        raise UserError(
            "no GPU is here to plan for: give the devices of the job by --gpus, or by --tp, --pp "
            "and --dp"
        )
    return found


def _export(output: Path, data: Path) -> None:
    """Export the plan to the trainer that it was made for."""
    plan, export = output / "plan", output / "export"
    words = ("omnibal", "export", str(plan), "--to", str(export), "--data", str(data))
    _do([RunStep(words=words, reads=(plan,), makes=export)], output)
    _say(f"what to run: {export / 'RUN.md'}")


def _absolute(word: Any) -> str:
    """Return a path that is there as an absolute one, and anything else as it is."""
    return str(Path(word).absolute()) if Path(str(word)).exists() else str(word)


def _on_the_command_line(context: typer.Context, groups: Sequence[Any]) -> list[str]:
    """Return the words of the options of some groups that were given."""
    names = {field.name for group in groups for field in fields(group)} - set(_OWN)
    words: list[str] = []
    for option, value in given_options(context):
        if option.name in names and isinstance(value, bool):
            words.append(option.opts[0] if value else option.secondary_opts[0])
        elif option.name in names:
            for one in value if isinstance(value, list | tuple) else [value]:
                words += [option.opts[0], _absolute(one) if isinstance(one, Path) else str(one)]
    return words


def _do(steps: Sequence[RunStep], output: Path, *, trains: bool = True) -> None:
    status = running.run_steps(steps, output / "steps.json", _say, trains=trains)
    if status:
        raise SystemExit(status)


def _say(line: str) -> None:
    print_notes([line], prefix="")
