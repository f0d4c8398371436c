"""`omnibal replan`: replan a run from its measurements, or for other devices."""

from pathlib import Path
from typing import Annotated

import typer

from omnibal.base.errors import UserError
from omnibal.base.outputs import check_folder, check_outside
from omnibal.cli.command_tables import misprediction_table, replan_facts, replan_summary
from omnibal.cli.console import ConsoleListener, print_result
from omnibal.cli.options import DirectoryArgument, JsonOption, RunOption, count_option, size_option
from omnibal.model.parallel import MAX_DEVICES


def replan(
    directory: DirectoryArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="plan directory to write")],
    run: RunOption = None,
    gpus: Annotated[int | None, size_option("number of GPUs (default: the plan's)")] = None,
    nodes: Annotated[int | None, size_option("number of whole nodes, instead of --gpus")] = None,
    after: Annotated[
        int | None, count_option("steps already trained (default: from the run's log)", least=0)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Replan a run from its measured times, or for other GPUs.

    Every step keeps its samples, so that the run's checkpoints resume under the new plan.
    """
    from omnibal.job.check import open_plan
    from omnibal.job.plan_files import save_plan
    from omnibal.job.runlog import RUN_FILE, RunLog, read_run, read_run_info
    from omnibal.search.replanning import replan as replan_run

    files = open_plan(directory, to_train=True)
    if gpus is not None and nodes is not None:
        raise UserError("--gpus and --nodes are exclusive: drop one")
    if nodes is not None:
        gpus_per_node = files.plan.cluster.gpus_per_node
        gpus = nodes * gpus_per_node
        if gpus > MAX_DEVICES:
            raise UserError(f"--nodes {nodes:,} are above {MAX_DEVICES:,} devices: give fewer")
    if run is None and gpus is None:
        raise UserError("nothing to replan for: give --run, --gpus or --nodes")
    check_folder("-o", output, [directory])
    check_outside("-o", output, directory)  # an earlier plan of `output` is replaced
    log = None
    if run is not None:
        log = RunLog(info=read_run_info(run), records=tuple(read_run(run / RUN_FILE)))
    planned = replan_run(files, log, gpus, after, ConsoleListener())
    save_plan(planned.result, output)
    tables = [] if planned.fit is None else [misprediction_table(planned.fit)]
    summary = replan_summary(planned) | {"plan": output}
    print_result(as_json, summary, *tables, replan_facts(planned), f"plan: {output}")
