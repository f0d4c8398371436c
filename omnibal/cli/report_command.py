"""`omnibal report`: write the HTML page of a plan, its replay and its run."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnibal.base.errors import UserError
from omnibal.base.outputs import check_files
from omnibal.cli.console import print_result
from omnibal.cli.options import DirectoryArgument, JsonOption, RunOption
from omnibal.job.plan import plan_files
from omnibal.job.runlog import EVALUATION_FILE, RUN_FILE, RUN_INFO_FILE, VALIDATION_FILE
from omnibal.report.table import Facts, Table

if TYPE_CHECKING:  # the page imports matplotlib
    from omnibal.report.page import ReportInput


def report(
    directory: DirectoryArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write")],
    run: RunOption = None,
    replay: Annotated[
        Path | None, typer.Option(help="replay directory (-o of tools/replay.py)")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write an HTML page of predicted, replayed and measured times."""
    from omnibal.job.check import open_plan
    from omnibal.job.fake_replay import FAKE_REPLAY_FILES, Roofline
    from omnibal.job.replay import REPLAY_FILES
    from omnibal.report.page import write_report
    from omnibal.report.summary import replay_figures

    inputs = [*plan_files(directory)]
    if run is not None:
        if run.is_file() and run.name != RUN_FILE:
            raise UserError(f"--run {run}: is a file; give the run's directory, with {RUN_FILE}")
        run = run.parent if run.is_file() else run
        names = (RUN_FILE, RUN_INFO_FILE, VALIDATION_FILE, EVALUATION_FILE)
        inputs += [run / name for name in names]
    if replay is not None:
        inputs += [*REPLAY_FILES.all_files(replay), *FAKE_REPLAY_FILES.all_files(replay)]
    check_files({"-o": output}, inputs)
    shown = write_report(open_plan(directory), run, output, replay)
    result: dict[str, Any] = {}
    if shown.replay is not None:
        result["replay"] = replay_figures(shown.plan, shown.replay)
    if shown.fake_stages:  # replays without a device
        rates = Roofline.of_cluster(shown.plan.cluster, shown.plan.precision)
        result["fake_device"] = [stage.figures(rates) for stage in shown.fake_stages]
    if shown.run is not None:
        result["run"] = shown.run
        if shown.plan.prediction is not None:
            result["predicted_step_ms"] = shown.plan.prediction.step_ms
    if shown.time is not None:
        result["lost_ms"] = {cause.name: cause.ms for cause in shown.time.causes}
        result["advice"] = shown.time.sentences
    if shown.evaluation is not None:
        result["accuracy"] = {kind.kind: kind.accuracy for kind in shown.evaluation.kinds}
        result["chance"] = {kind.kind: kind.chance for kind in shown.evaluation.kinds}
    result["report"] = output
    advice = result.get("advice", ())
    print_result(as_json, result, *_tables(shown), *advice, f"report: {output}")


def _tables(shown: "ReportInput") -> Iterator[Table | Facts | None]:
    """Yield the printed tables: of a replay, a run, and held-out accuracy."""
    from omnibal.report.cards import card_facts, headline_cards
    from omnibal.report.plan_tables import accuracy_table, peak_table, stages_table
    from omnibal.report.replay_tables import fake_device_table

    sources, run = (shown.plan, shown.run, shown.replay), shown.run
    if run or shown.replay:
        yield card_facts(headline_cards(*sources, shown.records))
        yield stages_table(*sources)
        yield peak_table(*sources)
    if run:
        counts = [(name, f"{count:,}") for name, count in run.incidents().items()]
        yield Facts("Run", [("provider", run.provider or "not recorded"), *counts])
    if shown.fake_stages:
        yield fake_device_table(shown.plan, shown.fake_stages)
    yield None if shown.evaluation is None else accuracy_table(shown.evaluation)
