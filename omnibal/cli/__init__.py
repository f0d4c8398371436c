"""The `omnibal` command: results on stdout (tables or `--json`), progress and errors on stderr.

Imports for a single command are inside its function, to keep `omnibal --help` fast.
"""

import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from omnibal import __version__
from omnibal.base.program import run_app
from omnibal.cli import (
    caps,
    check,
    export,
    lengths,
    lint,
    pack,
    plan,
    presets,
    profile,
    replan,
    report,
    run,
    simulate,
)
from omnibal.cli.earlier_names import with_current_names
from omnibal.cli.groups import with_groups

app = typer.Typer(name="omnibal", add_completion=False, pretty_exceptions_enable=False)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line. User errors are one line on stderr, with exit status 2."""
    given = sys.argv[1:] if arguments is None else arguments
    run_app(app, "omnibal", with_current_names(given))


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    """Plan the training of language models with or without encoders: packs, stages, recomputing."""
    if version:
        sys.stdout.write(f"omnibal {__version__}\n")
    elif context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")


for command in (
    lengths.lengths,
    pack.pack,
    caps.caps,
    profile.profile,
    plan.plan,
    presets.presets,
    check.check,
    export.export,
    simulate.simulate,
    report.report,
    replan.replan,
):
    app.command()(with_groups(command))
# What follows `--` is the trainer's.
app.command(context_settings={"allow_extra_args": True})(with_groups(run.run))
# A launch line of flags alone begins as an option does.
app.command(context_settings={"ignore_unknown_options": True})(with_groups(lint.lint))
