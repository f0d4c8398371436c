"""`omnibal simulate`: simulate all steps of a plan."""

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import omnibal.cli.command_tables as tables
from omnibal.base.errors import UserError
from omnibal.base.outputs import check_files
from omnibal.cli.console import print_result, status
from omnibal.cli.options import DirectoryArgument, JsonOption, check_picture, count_option
from omnibal.job.plan import plan_files
from omnibal.report.formatting import write_ascii


def simulate(
    directory: DirectoryArgument,
    trace: Annotated[
        Path | None, typer.Option(help="Chrome trace of a step to write, for Perfetto")
    ] = None,
    step: Annotated[
        int | None, count_option("step of the trace, from 0 (default: the slowest)", least=0)
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="SVG file to write: the step of median load")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate all steps of a plan; report times and busy stages."""
    from omnibal.cli.trace import chrome_trace
    from omnibal.job.check import open_plan
    from omnibal.pipeline.simulate import simulate_levels

    check_files({"--trace": trace, "--picture": picture}, plan_files(directory))
    check_picture(picture)
    files = open_plan(directory)
    cost, workload, schedule = files.cost, files.workload, files.plan.schedule
    stages_at, count = files.plan.stages_at_levels, files.steps[0].steps
    with status("simulating"):
        steps = simulate_levels(cost, stages_at, workload, schedule)
    shown = int(steps.step_ms.argmax()) if step is None else step
    if shown >= count:
        raise UserError(f"--step {shown} must be one of the plan's steps, 0 to {count - 1}")
    if trace is not None:
        events = chrome_trace(cost, stages_at, workload, shown, schedule)
        write_ascii(json.dumps(events) + "\n", trace)
    if picture is not None:
        from omnibal.report.drawing import svg_file
        from omnibal.report.timeline import timeline_figure

        figure = timeline_figure(files)
        assert figure.drawn is not None
        write_ascii(svg_file(figure.drawn, figure.title), picture)
    result = {
        "steps": count,
        "step_ms_mean": float(steps.step_ms.mean()),
        "step_ms_median": float(np.median(steps.step_ms)),
        "step_ms_min": float(steps.step_ms.min()),
        "step_ms_max": float(steps.step_ms.max()),
        "slowest_step": int(steps.step_ms.argmax()),
        # [stages]: busy_ms is [steps, stages]
        "busy_fraction": (steps.busy_ms.sum(axis=0) / steps.step_ms.sum()).tolist(),
        "trace": None if trace is None else str(trace),
        "trace_step": None if trace is None else shown,
    }
    print_result(as_json, result, tables.simulation_facts(result))
