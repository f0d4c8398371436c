"""The `omnibal` command: results on stdout (tables or `--json`), progress and errors on stderr."""

# Every command imports scipy and its own modules in its function: `omnibal --help` stays fast.

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, NoReturn

import typer

from omnibal.base.program import run_app
from omnibal.base.version import VERSION
from omnibal.cli import (
    caps_command,
    check_command,
    export_command,
    lengths_command,
    lint_command,
    pack_command,
    plan_command,
    presets_command,
    profile_command,
    replan_command,
    report_command,
    run_command,
    simulate_command,
)
from omnibal.cli.console import print_notes
from omnibal.cli.earlier_names import with_current_names
from omnibal.cli.help_groups import GroupedCommand, with_groups

app = typer.Typer(name="omnibal", add_completion=False, rich_markup_mode=None)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line. User errors are one line on stderr, with exit status 2."""
    given, notes = with_current_names(sys.argv[1:] if arguments is None else arguments)
    print_notes(notes)
    run_app(app, "omnibal", given)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    """Plan training of (vision-)language models: packs, parallel sizes, stages, recomputation."""
    if version:
        sys.stdout.write(f"omnibal {VERSION}\n")
    elif context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")


EXAMPLES: dict[Callable[..., None], str] = {
    run_command.run: r"""
        omnibal run --model OpenGVLab/InternVL3-8B --data meta.json \
            --cluster h100-80g --gpus 8 -o job
        omnibal run --model Qwen/Qwen3-VL-8B-Instruct --data data.jsonl \
            --tokenizer-model Qwen3-VL-8B --cluster h100-80g --gpus 8 \
            --for ms-swift -o job""",
    lengths_command.lengths: r"""
        omnibal lengths data.jsonl --model Qwen/Qwen3-VL-8B-Instruct \
            --tokenizer-model Qwen3-VL-8B -o lengths.parquet""",
    plan_command.plan: r"""
        omnibal plan --model Qwen/Qwen3-VL-8B-Instruct --gpus 8 \
            --cluster h100-80g --lengths lengths.parquet -o plan
        omnibal plan --model llama3.1-8b --gpus 64 --max-tokens 8192 \
            --cluster h100-80g --for megatron-lm -o plan""",
    check_command.check: "omnibal check plan",
    export_command.export: "omnibal export plan --to export --data data.jsonl",
    report_command.report: "omnibal report plan --run job/run -o report.html",
    replan_command.replan: "omnibal replan plan --run job/run --gpus 4 -o new-plan",
    lint_command.lint: r"""
        omnibal lint train.sh --model qwen3-vl-30b-a3b --set NNODES=4
        omnibal lint "run_recipe.py -ng 64 -tp 2 -pp 4 -ep 8 -mb 1 \
            -gb 1024 -sl 4096" --model qwen3.5-397b-a17b""",
    presets_command.presets: "",
    pack_command.pack: "",
    caps_command.caps: "",
    profile_command.profile: "",
    simulate_command.simulate: "omnibal simulate plan --trace step.json",
}

for command, examples in EXAMPLES.items():  # help lists the commands in this order
    settings = {
        # Arguments after `--` go to pretrain_vlm.py.
        "allow_extra_args": command is run_command.run,
        # A launch line may consist of flags, which click would take for options.
        "ignore_unknown_options": command is lint_command.lint,
    }
    without = "lengths" if command is run_command.run else ""
    typed = with_groups(command, without)
    app.command(cls=GroupedCommand, epilog=examples, context_settings=settings)(typed)
