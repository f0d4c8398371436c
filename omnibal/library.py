"""Public functions of `import omnibal`: the commands, typed and without output (docs/python.md)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from omnibal.base.errors import UserError
from omnibal.base.files import check_new_folder
from omnibal.base.outputs import check_files
from omnibal.data import lengths as lengths_module
from omnibal.data.lengths import Lengths
from omnibal.families.named import named_model
from omnibal.job import check as check_module
from omnibal.job import plan_files as files_module
from omnibal.job.job import JobSpec, costs_and_sizes
from omnibal.job.plan import plan_files
from omnibal.job.plan_files import PlanFiles
from omnibal.job.planner import PlanResult
from omnibal.model.adapter_settings import AdapterConfig, adapters_of
from omnibal.model.config import Precision, load_cluster
from omnibal.model.encoders import ITEM_FEATURES
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.targets import TARGETS, TargetName, trainer_of
from omnibal.packing.packing import PackingMethod, pack_samples
from omnibal.packing.packs import Packs
from omnibal.pipeline.simulate import StepTimes, simulate_levels
from omnibal.search.goal import Free, Goal, Samples
from omnibal.search.planning import Planned, plan
from omnibal.trainers.export.directory import EXPORTS, Export, export_input, make_export
from omnibal.trainers.lint.command_line import read_launch
from omnibal.trainers.lint.launch_settings import Finding, Launch
from omnibal.trainers.lint.line import line_of
from omnibal.trainers.lint.rules import can_start, findings_of


def read_lengths(*paths: Path | str) -> Lengths:
    """Return the joined samples of files of `omnibal lengths`."""
    return lengths_module.read_lengths([Path(path) for path in paths])


def pack(
    lengths: Lengths, max_tokens: int, *, seed: int = 0, limits: Mapping[str, int] | None = None
) -> Packs:
    """Return packs of all samples, close to the min number of packs.

    Args:
        max_tokens: max tokens per pack.
        limits: max of other features per pack, such as `{"tiles": 12}`.
    """
    for name in limits or {}:
        _check_choice("limit of", name, (*lengths.item_names, *ITEM_FEATURES))
    caps = Caps.of(**(limits or {}), tokens=max_tokens)
    return pack_samples(lengths, caps, PackingMethod.BALANCED, seed)


def training_job(
    model: str,
    cluster: str,
    *,
    parallel: Parallel | None = None,
    precision: Precision = "bf16",
    frozen: tuple[str, ...] = (),
    adapters: AdapterConfig | None = None,
    profile: Path | str | None = None,
    trainer: str | None = None,
) -> JobSpec:
    """Return a training job without its data.

    Args:
        model: a preset, a hub id, or a model's TOML file, config.json or folder.
        cluster: a preset or a TOML file.
        parallel: parallel sizes; default: PP 1 and TP as profiled or 1, for a search of sizes.
        frozen: parts that are not trained, such as "vision".
        adapters: LoRA of parts that are not in `frozen`; their base weights are frozen.
        profile: file of `omnibal profile`; default: costs from the cluster's rates.
        trainer: target trainer, such as "ms-swift"; default: this project's.
    """
    if trainer is not None:
        _check_choice("trainer", trainer, list(TargetName))
    _check_choice("precision", precision, get_args(Precision))
    planned_for = trainer_of(None if trainer is None else TargetName(trainer))
    file = None if profile is None else Path(profile)
    costs, sizes = costs_and_sizes(file, parallel, planned_for)
    return JobSpec(
        model=named_model(model),
        cluster=load_cluster(cluster),
        parallel=sizes,
        precision=precision,
        frozen=frozen,
        adapters=adapters,
        cost_source=costs,
        trainer=planned_for,
    )


def _check_choice(title: str, given: str, choices: Collection[str]) -> None:
    if given not in choices:
        raise UserError(f"{title} {given!r} is not known; choose from {', '.join(choices)}")


def save_plan(planned: Planned | PlanResult, directory: Path | str) -> None:
    """Write a plan to a directory."""
    result = planned.result if isinstance(planned, Planned) else planned
    files_module.save_plan(result, Path(directory))


def open_plan(directory: Path | str) -> PlanFiles:
    """Return the content of a plan directory: plan, job, packs and lengths."""
    return check_module.open_plan(Path(directory))


def check(directory: Path | str) -> list[str]:
    """Return a sentence per passed check of a plan. Raise UserError at the first that fails."""
    return check_module.check_plan(Path(directory))


def simulate(directory: Path | str) -> StepTimes:
    """Return simulated times of all steps of a plan's packs."""
    files = open_plan(directory)
    stages_at, schedule = files.plan.stages_at_levels, files.plan.schedule
    return simulate_levels(files.cost, stages_at, files.workload, schedule)


def export_plan(
    directory: Path | str,
    to: Path | str,
    *,
    trainer: str | None = None,
    data: Path | str | None = None,
    workers: int = 0,
) -> Export:
    """Write a plan as files, flags and command of another trainer, and return them.

    Args:
        to: new folder.
        trainer: target; default: the trainer that the plan was made for.
        data: annotation file or meta JSON that the lengths were scanned from.
        workers: data loader processes per rank, if the trainer's files depend on them.
    """
    folder, files = Path(to), open_plan(directory)
    check_new_folder(folder)  # before the data is read
    name = trainer or files.plan.made_for
    if name is None:
        raise UserError(f"trainer is not given: choose from {', '.join(TargetName)}")
    _check_choice("trainer", name, list(TargetName))
    target, source = TargetName(name), None if data is None else Path(data)
    made = make_export(
        export_input(files, TARGETS[target], source, folder, workers), EXPORTS[target]
    )
    made.write()
    return made


@dataclass(frozen=True, slots=True)
class Linted:
    """Parsed launch line and its findings."""

    launch: Launch
    findings: list[Finding]
    starts: bool | None  # whether Megatron starts, None if a flag may be misspelled


def lint_line(line: str, model: str, variables: Mapping[str, str] | None = None) -> Linted:
    """Return a parsed Megatron launch line, its findings and whether it can start.

    Args:
        line: a command, or the text of a script.
        model: as for `training_job`.
        variables: values of the line's shell variables.
    """
    launch = read_launch(line, dict(variables or {}), None, None, None)
    checked = line_of(launch, named_model(model))
    findings = findings_of(checked)
    return Linted(launch, findings, can_start(checked, findings))


def report_plan(
    directory: Path | str, output: Path | str, *, run: Path | str | None = None
) -> Path:
    """Write the HTML report of a plan and its run; return `output`."""
    from omnibal.report.page import write_report  # matplotlib takes a second to import

    page = Path(output)
    check_files({"output": page}, plan_files(Path(directory)))
    write_report(open_plan(directory), None if run is None else Path(run), page)
    return page


__all__ = [
    "Free",
    "Goal",
    "Planned",
    "Samples",
    "adapters_of",
    "check",
    "export_plan",
    "lint_line",
    "open_plan",
    "pack",
    "plan",
    "read_lengths",
    "report_plan",
    "save_plan",
    "simulate",
    "training_job",
]
