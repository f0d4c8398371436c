"""`omnibal lint`: check whether a launch line can start, and predict its cost."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from omnibal.base.errors import EXIT_USER_ERROR, UserError
from omnibal.base.files import read_text
from omnibal.cli.console import print_notes, print_result
from omnibal.cli.lint_cost import CostOptions, cost_result, cost_tables
from omnibal.cli.options import JsonOption, count_option, size_option
from omnibal.families.named import model_notes, model_of_line, named_model
from omnibal.trainers.lint.launch_settings import Launch, Launcher

_MAX_SCRIPT_BYTES = 2**20  # larger files are data


def lint(
    line: Annotated[
        str, typer.Argument(metavar="LINE", help="quoted command or flags, or a script's path")
    ],
    cost: CostOptions,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="as in `omnibal plan` (default: the line's)")
    ] = None,
    launcher: Annotated[
        Launcher | None,
        typer.Option(
            metavar="TRAINER", help=f"{', '.join(Launcher)} (default: by program and flags)"
        ),
    ] = None,
    gpus: Annotated[int | None, size_option("GPUs of the job (default: the line's)")] = None,
    variables: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="shell variable (repeatable)"),
    ] = None,
    line_number: Annotated[
        int | None, count_option("line of the script to check, if it has several")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a launch line, and predict memory and step time.

    The exit status is 2 if it cannot start. The line is not executed.
    """
    from omnibal.trainers.lint.command_line import read_launch
    from omnibal.trainers.lint.line import layers_by_chunk, line_of
    from omnibal.trainers.lint.rules import can_start, findings_of

    values = _parse_variables(variables or ())
    launch = read_launch(_read_line(line), values, launcher, gpus, line_number)
    name = model or _find_model(launch)
    sizes = named_model(name)
    checked = line_of(launch, sizes)
    findings = findings_of(checked)
    starts = can_start(checked, findings)
    unjudged = "not judged, for an unknown flag" if checked.misspelled_flags else "not judged"
    answer = {True: "starts", False: "cannot start", None: unjudged}[starts]
    layers = None if starts is False else layers_by_chunk(checked)  # [stages][chunks]
    verdict, reason = (None, None) if starts is False else cost.predict(checked, sizes)
    tables, notes = [], [] if reason is None else [reason]
    if verdict is not None:
        # Memory that does not fit is a finding, but `starts` is about flags only.
        findings += filter(None, [verdict.finding])
        tables, notes = cost_tables(verdict), [*verdict.line_job.notes]
    result = {
        "starts": starts,
        "findings": findings,
        "launch": launch,
        "layers_by_chunk": layers,
        **cost_result(verdict),
        "not_predicted": reason,
    }
    parts = [f"TP {launch.tensor}", f"PP {launch.pipeline}", f"CP {launch.context}"]
    parts += [f"DP {checked.data}"] if checked.data is not None else []
    parts += [f"{checked.virtual} chunks a stage"] if checked.virtual else []
    parts += [f"EP {launch.expert}", f"ETP {checked.expert_tensor}"] if launch.expert > 1 else []
    stages = ", ".join("+".join(map(str, chunks)) for chunks in layers or ())
    layer_line = [f"layers by stage: {stages}"] if len(layers or ()) > 1 else []
    print_notes(
        f"--{flag} is not read and not judged; if --{known} is meant, correct it"
        for flag, known in checked.misspelled_flags.items()
    )
    print_result(
        as_json,
        result,
        f"{answer}: {launch.launcher.value}, {launch.gpus or 'unknown'} GPUs, {', '.join(parts)}",
        *layer_line,
        *(
            f"\n{finding.severity.replace('-', ' ')}: {finding.rule}\n  {finding.message}\n"
            f"  checked in {finding.source}"
            for finding in findings
        ),
        *tables,
    )
    names = ", ".join(launch.unknown)
    unknown = [f"unknown variables, set by --set NAME=VALUE: {names}"] if names else []
    source = [] if model else [f"the model is {name}, which the line names; --model names another"]
    print_notes([*source, *model_notes(name), *notes, *unknown])
    if starts is False:
        raise typer.Exit(EXIT_USER_ERROR)


def _find_model(launch: Launch) -> str:
    """Return the first model named by the line with known sizes. UserError if none."""
    from omnibal.trainers.lint.line import named_models

    names = named_models(launch)
    model = next(filter(None, map(model_of_line, names)), None)
    if model is None:
        wrong = [f"the line's model, {name}, is no preset and has no config.json" for name in names]
        raise UserError(f"{next(iter(wrong), 'the line names no model')}; give --model")
    return model


def _read_line(line: str) -> str:
    """Return `line`, or the script's text if it is a path. UserError if it cannot be read."""
    if not line.strip():
        raise UserError("the launch line is empty; give a command in quotes, or a script's path")
    if re.search(r"\s", line.strip()) or line.startswith("-") or "=" in line:
        return line  # words, flags or overrides, not a path
    path = Path(line)
    if not path.is_file():
        raise UserError(f"{line}: there is no such script; give a path, or a launch line in quotes")
    if path.stat().st_size > _MAX_SCRIPT_BYTES:
        raise UserError(f"{path} has more than {_MAX_SCRIPT_BYTES:,} bytes; give the line alone")
    return read_text(path, "give another script")


def _parse_variables(variables: Sequence[str]) -> dict[str, str]:
    for text in variables:
        if not re.match(r"\w+=", text):
            raise UserError(f"--set {text}: must be a variable and its value, such as NNODES=4")
    return {name: value for name, _, value in (text.partition("=") for text in variables)}
