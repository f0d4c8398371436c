"""`omnibal export`: write a plan as files, flags and command of another trainer."""

from pathlib import Path
from typing import Annotated, Any

import typer

from omnibal.base.errors import UserError
from omnibal.base.files import check_new_folder
from omnibal.base.outputs import check_folder, check_outside
from omnibal.cli.console import print_notes, print_result, status
from omnibal.cli.lengths_command import is_parquet
from omnibal.cli.options import DirectoryArgument, JsonOption, count_option
from omnibal.families.named import hub_ids
from omnibal.job.plan import plan_files
from omnibal.model.targets import TARGETS, TargetName
from omnibal.report.table import Facts

_MOST_WORKERS = 256  # loader processes of a rank; more than a node has cores


def export(
    directory: DirectoryArgument,
    to: Annotated[Path, typer.Option(help="folder to make")],
    target: Annotated[
        TargetName | None,
        typer.Option(
            "--for", metavar="TRAINER", help=f"{', '.join(TargetName)} (default: the plan's)"
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="data of the lengths (default: export no samples)")
    ] = None,
    workers: Annotated[
        int, count_option("data loader processes per rank", most=_MOST_WORKERS, least=0)
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Export a plan for another trainer, with its command."""
    from omnibal.data.external_lengths import cached_folder
    from omnibal.job.check import open_plan
    from omnibal.trainers.export.directory import EXPORTS, export_input, make_export

    check_new_folder(to)  # check paths before reading the data, which takes long
    inputs = [directory, *plan_files(directory), *([] if data is None else [data])]
    check_folder("--to", to, inputs)
    if data is not None:
        _check_has_samples(data, is_counted=cached_folder(data) is not None)
    files = open_plan(directory)
    check_outside("--to", to, directory)
    name = target or files.plan.made_for
    if name is None:
        raise UserError(f"the plan has no other trainer; name it by --for: {', '.join(TargetName)}")
    with status("reading the data"):
        [*released] = hub_ids().get(files.plan.model.name, [])  # the first id goes into commands
        given = export_input(files, TARGETS[name], data, to, workers, *released[:1])
        made = make_export(given, EXPORTS[name])
    with status("writing"):
        made.write()
    print_notes(made.exported.deviations, prefix="not as planned: ")
    print_notes(made.exported.notes)
    expected = made.expected
    result: dict[str, Any] = {
        "target": name,
        "folder": to,
        "files": made.files,
        "command": made.exported.script,
        "settings": made.exported.settings,
        "given_up": made.exported.deviations,
        "notes": made.exported.notes,
        "expected": expected,
    }
    entries = [
        ("Steps", "-" if expected.steps is None else f"{expected.steps:,}"),
        ("Step time", f"{expected.step_ms:,.1f} ms"),
        ("Memory of the fullest device", f"{max(expected.peak_gib):.1f} GiB"),
        ("Files", ", ".join(made.files)),
    ]
    facts = Facts(f"For {TARGETS[name].title}, simulated", entries)
    print_result(as_json, result, facts, f"what to run: {to / 'RUN.md'}")


def _check_has_samples(data: Path, *, is_counted: bool) -> None:
    """Raise UserError if `data` is a folder, or holds lengths instead of samples."""
    if is_counted:
        raise UserError(f"--data {data}: was counted by ms-swift; give the JSONL it was made from")
    if data.is_dir() or (data.is_file() and is_parquet(data)):
        raise UserError(
            f"--data {data}: is a folder, or Parquet of lengths; give the annotation file, or meta "
            "JSON, that the lengths were scanned from"
        )
