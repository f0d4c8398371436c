"""`omnibal run`: from data to a trained model, with the other commands as its steps."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

import omnibal.cli.options as shared
import omnibal.cli.run_steps as steps_of_run
from omnibal.base.errors import UserError
from omnibal.base.folder_lock import lock_folder
from omnibal.cli.console import print_notes
from omnibal.cli.help_groups import given_options
from omnibal.cli.plan_command import PlacementOptions, PlanDataOptions, StrategyOptions
from omnibal.cli.run_steps import RunStep
from omnibal.families.named import named_model
from omnibal.model.config import ClusterConfig, load_cluster

_RESOLVED = ("model", "cluster", "gpus")  # passed to `omnibal plan` resolved, not as typed


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCommandOptions:
    """Options that `omnibal plan` does not have."""

    data: Annotated[Path, typer.Option(help="annotation file, or meta JSON of several")]
    output: Annotated[Path, typer.Option("--output", "-o", help="folder of all results")]
    tokenizer_model: shared.TokenizerOption = None
    data_root: shared.DataRootOption = None
    template: shared.TemplateOption = None
    weights: Annotated[
        Path | None, typer.Option(help="checkpoint or run to start from (default: --model)")
    ] = None
    from_scratch: Annotated[bool, typer.Option("--from-scratch", help="random initial weights")] = (
        False
    )
    lr: Annotated[
        float | None,
        typer.Option(min=0, metavar="X", help="max learning rate (default: 1e-5, with LoRA 1e-4)"),
    ] = None
    vision_lr: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="X", help="max rate of the vision encoder (default: 0.2 x --lr)"
        ),
    ] = None
    start: Annotated[
        bool, typer.Option("--start/--no-start", help="train here, if it has the GPUs")
    ] = True
    export: Annotated[
        bool, typer.Option("--export/--no-export", help="write OUTPUT/hf, as --model is")
    ] = True


def run(
    context: typer.Context,
    asked: RunCommandOptions,
    given: shared.JobOptions,
    data: PlanDataOptions,
    strategy: StrategyOptions,
    sizes: shared.SizeOptions,
    partition: PlacementOptions,
) -> None:
    """Fine-tune a released checkpoint, from scan to export.

    Each step is a printed command. The same command line resumes an interrupted run, also with
    another --lr or more --epochs, and repeats steps with changed inputs. Options of `omnibal plan`
    apply; those after `--` go to pretrain_vlm.py. A cluster of CPUs trains in fp32 by default.
    """
    # Printed commands must work in any directory.
    asked = replace(
        asked,
        data=asked.data.absolute(),
        output=asked.output.absolute(),
        weights=asked.weights and asked.weights.absolute(),
        tokenizer_model=asked.tokenizer_model and asked.tokenizer_model.absolute(),
    )
    cluster = load_cluster(given.cluster)
    gpus = _choose_gpus(cluster, strategy, sizes)
    for_other_trainer = strategy.made_for is not None
    rates = {"--lr": asked.lr, "--vision-lr": asked.vision_lr}
    more = [word for pair in rates.items() if pair[1] is not None for word in map(str, pair)]
    if for_other_trainer and (asked.weights or asked.from_scratch or more):
        raise UserError(
            "--weights, --from-scratch, --lr and --vision-lr exclude --for: drop either"
        )
    output, model, weights, is_on_hub = asked.output, given.model, None, False
    model = str(Path(model).absolute()) if Path(model).exists() else model
    if asked.weights is not None and asked.weights.resolve().is_relative_to(output.resolve()):
        raise UserError(f"--weights {asked.weights}: is in {output}; give another -o")
    if not for_other_trainer:
        weights, is_on_hub = steps_of_run.choose_weights(
            model, asked.weights, from_scratch=asked.from_scratch
        )
    model = str(weights) if is_on_hub else model  # config and tokenizer; weights come later
    named_model(model)  # an unknown model fails before the long scan
    tokenizer = asked.tokenizer_model or steps_of_run.find_tokenizer(model, weights)
    plan_options = _typed_options(context, (given, data, strategy, sizes, partition))
    if cluster.is_cpu and not {"--precision", "--profile"} & set(plan_options):
        plan_options += ["--precision", "fp32"]
    plan_options += ["--cluster", _absolute(given.cluster), "--gpus", str(gpus)]
    data_root = [] if asked.data_root is None else ["--data-root", _absolute(asked.data_root)]
    scan_options = [*data_root, *(["--template", asked.template] if asked.template else [])]
    planning = steps_of_run.plan_steps(
        asked.data, model, tokenizer, plan_options, output, scan_options
    )
    with lock_folder("-o", output, _print_progress):  # a second run would mix its files with ours
        _run_steps(planning, output)
        if for_other_trainer:
            plan, export = output / "plan", output / "export"
            words = ("omnibal", "export", str(plan), "--to", str(export), "--data", str(asked.data))
            _run_steps([RunStep(words=words, reads=(plan,), makes=export)], output)
            _print_progress(f"what to run: {export / 'RUN.md'}")
            return
        if is_on_hub:
            _print_progress(f"fetching the weights of {given.model}, or finding them in the cache")
            steps_of_run.fetch_checkpoint(given.model, weights=True)
        loaded = weights
        if weights is not None and steps_of_run.has_released_weights(weights):
            loaded = output / "weights"
            _run_steps([steps_of_run.conversion_step("import", weights, loaded)], output)
        more = ([] if loaded is None else ["--load", str(loaded), "--finetune"]) + data_root + more
        more += context.args  # last, so that the user's words override ours
        per_node = cluster.gpus_per_node
        steps_of_run.write_launch(output, asked.data, tokenizer, per_node, gpus, more)
        training = steps_of_run.training_step(output, loaded, planning[0], more)
        # Jobs of several nodes are launched by the user, with the written train.sh.
        available = per_node if cluster.is_cpu else min(_count_gpus(), per_node)
        _run_steps([training], output, trains=asked.start and gpus <= available)
        like = weights if loaded != weights else Path(model)  # whose config the export repeats
        is_released = like is not None and steps_of_run.has_released_weights(like)
        if asked.export and is_released and training.is_complete:
            released, run_folder = output / "hf", output / "run"
            template = ("--like", str(like))
            _run_steps(
                [steps_of_run.conversion_step("export", run_folder, released, *template)], output
            )


def _count_gpus() -> int:
    # Without torch or NVML, which `omnibal` does not import.
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _choose_gpus(
    cluster: ClusterConfig, strategy: StrategyOptions, sizes: shared.SizeOptions
) -> int:
    """Return the number of devices: as given, this machine's GPUs, or a node of CPUs."""
    if strategy.gpus is not None:
        return strategy.gpus
    if any((sizes.tp, sizes.pp, sizes.dp)) and (cluster.is_cpu or not _count_gpus()):
        return sizes.parallel().world_size
    count = cluster.gpus_per_node if cluster.is_cpu else _count_gpus()
    if not count:
        raise UserError("this machine has no GPU to plan for: give --gpus, or --tp, --pp and --dp")
    return count


def _absolute(word: Any) -> str:
    """Return an existing path as an absolute path, anything else unchanged."""
    return str(Path(word).absolute()) if Path(str(word)).exists() else str(word)


def _typed_options(context: typer.Context, groups: Sequence[Any]) -> list[str]:
    """Return the words of the typed options of these groups, with absolute paths."""
    names = {field.name for group in groups for field in fields(group)} - set(_RESOLVED)
    words: list[str] = []
    for option, value in given_options(context):
        if option.name in names and isinstance(value, bool):
            words.append(option.opts[0] if value else option.secondary_opts[0])
        elif option.name in names:
            for item in value if isinstance(value, list | tuple) else [value]:
                words += [option.opts[0], _absolute(item) if isinstance(item, Path) else str(item)]
    return words


def _run_steps(steps: Sequence[RunStep], output: Path, *, trains: bool = True) -> None:
    status = steps_of_run.run_steps(steps, output / "steps.json", _print_progress, trains=trains)
    if status:
        raise SystemExit(status)


def _print_progress(line: str) -> None:
    print_notes([line], prefix="")
