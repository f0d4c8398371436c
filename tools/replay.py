"""Replay a plan for many devices on one: build its stages in turn and run their packs.

    python tools/replay.py PLAN -o REPLAY [--data META --tokenizer-model TOKENIZER]
    torchrun --nproc-per-node 8 tools/replay.py PLAN -o REPLAY
    python tools/replay.py PLAN --fake-device -o DIR [--json]

Stages have the job's shapes, micro-batches in flight and, on CUDA, memory cap; received tensors are
random. The plan's schedule composes measured times into steps, compared with the prediction here
and in `omnibal report PLAN --replay REPLAY`. Processes replay stages in parallel. Finished stages
are kept: the same command resumes.

--fake-device needs no device: the trainer's step runs with fake CUDA tensors, and counts
allocations, kernel launches and reads, without times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from megatron.vlm.measure.fake_device.fake_stage import check_fake_device, run_fake_stages
from megatron.vlm.measure.replay_job import (
    ReplayJob,
    check_alone,
    load_replay,
    replay_info,
    replay_stages,
)
from megatron.vlm.model.providers import check_provider, check_provider_of
from megatron.vlm.run.launch import RankLaunch, open_store
from omnibal.base.errors import UserError
from omnibal.base.frozen import MAX_COUNT
from omnibal.base.outputs import check_folder
from omnibal.base.program import run_app
from omnibal.cli.console import print_result
from omnibal.cli.help_groups import with_groups
from omnibal.cli.options import ProviderOption
from omnibal.job.fake_replay import Roofline, read_fake_stages
from omnibal.job.replay import REPLAY_FILES, read_replay
from omnibal.model.limits import memory_cap_gib
from omnibal.report.plan_tables import peak_table, stages_table
from omnibal.report.replay_tables import (
    contents_table,
    fake_device_launches_table,
    fake_device_table,
    replayed_stages_table,
)
from omnibal.report.table import Table

_STEPS, _REPETITIONS = 10, 3  # defaults

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOptions:
    """Options of samples, timing and fake devices."""

    data: Annotated[
        Path | None,
        typer.Option(
            help="annotation file or meta.json (default: random content of the same sizes)"
        ),
    ] = None
    tokenizer_model: Annotated[Path | None, typer.Option(help="tokenizer of that data")] = None

    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_COUNT,
            help=f"number of steps, with the packs of all ranks [default: {_STEPS}]",
        ),
    ] = None
    repetitions: Annotated[
        int | None,
        typer.Option(
            min=1, max=10_000, help=f"runs of each step, for medians [default: {_REPETITIONS}]"
        ),
    ] = None
    provider: ProviderOption = "local"

    fake_device: Annotated[
        bool,
        typer.Option("--fake-device", help="count memory and kernels without a device; no times"),
    ] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="print counts of --fake-device as JSON")
    ] = False


@app.command(help=__doc__.split("\n\n")[0])
@with_groups
def replay(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="plan directory")],
    output: Annotated[Path, typer.Option("--output", "-o", help="directory for measurements")],
    options: ReplayOptions,
    stages: Annotated[str, typer.Option(help="all, or stage numbers such as 0,3")] = "all",
) -> None:
    launch = RankLaunch.from_environment()
    _check_options(options)
    if not options.fake_device:
        check_provider(options.provider)
        launch.check_device()
    inputs = (plan, options.data, options.tokenizer_model)
    check_folder("-o", output, [path for path in inputs if path is not None])
    job = load_replay(plan, options.data, options.tokenizer_model)
    numbers = _parse_stages(stages, job.plan.parallel.pipeline)
    if options.fake_device:
        check_fake_device(job.plan.precision, options.provider)
        run_fake_stages(job, numbers, output, launch, open_store(launch))
        if launch.rank == 0:
            _print_fake_stages(job, numbers, output, options.as_json)
        return
    check_alone(job.plan)
    check_provider_of(job.plan, options.provider)
    info = replay_info(
        job,
        steps=options.steps or _STEPS,
        repetitions=options.repetitions or _REPETITIONS,
        processes=launch.world_size,
        provider=options.provider,
    )
    replay_stages(job, info, numbers, output, launch, open_store(launch))
    if launch.rank != 0:
        return
    replays = REPLAY_FILES.read_stages(output, job.plan.parallel.pipeline)
    tables: list[Table | None] = [replayed_stages_table(job.plan, replays)]
    # A step can be composed only of all stages.
    if len(replays) == job.plan.parallel.pipeline:
        summary = read_replay(output, job.plan, job.cost, job.workload)
        tables += [stages_table(job.plan, None, summary), peak_table(job.plan, None, summary)]
    print_result(False, {}, *tables, f"replay: {output}")


def _check_options(options: ReplayOptions) -> None:
    if options.as_json and not options.fake_device:
        raise UserError("--json needs --fake-device; give both, or neither")
    for name, value in (("--steps", options.steps), ("--repetitions", options.repetitions)):
        if options.fake_device and value is not None:
            raise UserError(
                f"{name} and --fake-device, which times nothing, are exclusive; drop one"
            )


def _parse_stages(given: str, count: int) -> list[int]:
    if given == "all":
        return list(range(count))
    numbers = [int(part) if part.isdecimal() else count for part in given.split(",")]
    if max(numbers) >= count:
        raise UserError(f"--stages {given}: give numbers from 0 to {count - 1}, or all")
    return sorted(set(numbers))


def _print_fake_stages(job: ReplayJob, stages: Sequence[int], output: Path, as_json: bool) -> None:
    plan = job.plan
    counted = [stage for stage in read_fake_stages(output, plan) if stage.stage in stages]
    rates = Roofline.of_cluster(plan.cluster, plan.precision)
    result = {
        "cap_gib": memory_cap_gib(plan.cluster),
        "roofline": rates.model_dump(),
        "stages": [stage.figures(rates) for stage in counted],
    }
    tables = [fake_device_table(plan, counted), fake_device_launches_table(counted, rates)]
    tables += [contents_table(stage) for stage in counted]
    print_result(as_json, result, *tables, f"fake-device replay: {output}")


def main() -> None:
    run_app(app, "replay.py")


if __name__ == "__main__":
    main()
