"""Try a plan for many devices on one: build its stages one after another and run their packs.

    python tools/replay.py PLAN -o REPLAY [--data META --tokenizer-model TOKENIZER]
    torchrun --nproc-per-node 8 tools/replay.py PLAN -o REPLAY

Each stage has the shapes, the micro-batches in flight and, on CUDA, the memory cap that it would
have in the job; what its neighbours would send is made up. Measured times are put together in the
plan's schedule, and stand beside the prediction here and in `omnibal report PLAN --replay REPLAY`.
Several processes replay several stages at a time, one a device. What is finished is kept: the same
command goes on where it was stopped.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megatron.vlm.measure.replay_job import ReplayJob, ReplayOptions, load_replay, replay_stages
from megatron.vlm.run.launch import Launch, open_store
from omnibal import tables
from omnibal.errors import UserError
from omnibal.frozen import MAX_COUNT
from omnibal.outputs import check_folder
from omnibal.program import run_app
from omnibal.replay import read_replay, read_stages

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__.split("\n\n")[0])
def replay(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="plan directory")],
    output: Annotated[Path, typer.Option("--output", "-o", help="directory for what was measured")],
    data: Annotated[
        Path | None, typer.Option(help="meta.json (default: random content of the same sizes)")
    ] = None,
    tokenizer_model: Annotated[Path | None, typer.Option(help="of that data")] = None,
    stages: Annotated[str, typer.Option(help="all, or numbers such as 0,3")] = "all",
    steps: Annotated[
        int,
        typer.Option(min=1, max=MAX_COUNT, help="of the run, with the packs of all their ranks"),
    ] = 10,
    repetitions: Annotated[
        int, typer.Option(min=1, max=10_000, help="of each step; medians count")
    ] = 3,
) -> None:
    launch = Launch.from_environment()
    launch.check_device()
    check_folder("-o", output, [path for path in (plan, data, tokenizer_model) if path is not None])
    job = load_replay(plan, data, tokenizer_model)
    numbers = _stage_numbers(stages, len(job.plan.stages))
    options = ReplayOptions(steps=steps, repetitions=repetitions)
    replay_stages(job, options, numbers, output, launch, open_store(launch))
    if launch.rank == 0:
        _print_result(job, output)


def _stage_numbers(given: str, count: int) -> list[int]:
    if given == "all":
        return list(range(count))
    numbers = [int(part) if part.isdecimal() else count for part in given.split(",")]
    if max(numbers) >= count:
        raise UserError(
            f"--stages {given}: the plan has stages 0 to {count - 1}; give some of them with "
            "commas between, or all"
        )
    return sorted(set(numbers))


def _print_result(job: ReplayJob, output: Path) -> None:
    kept = read_stages(output, job.plan)
    console = Console()
    console.print(tables.replayed_stages_table(job.plan, kept))
    if len(kept) == len(job.plan.stages):
        summary = read_replay(output, job.plan, job.cost, (job.packs, job.lengths))
        console.print(tables.run_table(job.plan, None, summary))
    print(f"replay: {output}")


def main() -> None:
    run_app(app, "replay.py")


if __name__ == "__main__":
    main()
