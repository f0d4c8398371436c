"""The report page of a plan, its replay and its run: one HTML file, no script and no network.

Equal inputs give equal bytes: nothing on the page depends on when or where it was written.
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from omnibal.cost.model import CostModel
from omnibal.data.lengths import Lengths
from omnibal.data.packs import ScheduledPacks
from omnibal.errors import UserError
from omnibal.files import atomic
from omnibal.plan import Plan
from omnibal.plan_files import PlanFiles
from omnibal.replay import ReplaySummary, read_replay
from omnibal.report.cards import headline_cards
from omnibal.report.figures import (
    curve_figure,
    memory_figure,
    packs_figure,
    split_figure,
    time_figure,
    waste_figure,
)
from omnibal.report.summary import RunSummary, summarise_run
from omnibal.report.tables import (
    accuracy_table,
    answers_table,
    memory_table,
    packing_facts,
    provenance_facts,
    sources_table,
    stage_table,
)
from omnibal.report.text import TIMES, escape
from omnibal.report.timeline import timeline_figure
from omnibal.runlog import (
    RUN_FILE,
    Evaluation,
    StepRecord,
    ValidationRecord,
    read_evaluation,
    read_run,
    read_run_info,
    read_validations,
)

# The page can neither load nor run anything, whatever text the data holds.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportInput:
    """Everything the page shows, read and found to belong together."""

    plan: Plan
    cost: CostModel
    data: tuple[ScheduledPacks, Lengths] | None
    """Packs and lengths: mock ones at the caps for a plan of shapes only; None without either."""
    replay: ReplaySummary | None
    records: list[StepRecord]
    validations: list[ValidationRecord]
    """Validations of the run; empty without a run."""
    run: RunSummary | None
    evaluation: Evaluation | None


def write_report(
    files: PlanFiles,
    run_directory: Path | None,
    output: Path,
    replay_directory: Path | None = None,
) -> ReportInput:
    """Write the report of a plan, and of the run trained from it and of its replay where given.

    Args:
        files: of the plan.
        run_directory: holds `run.json` and `run.jsonl`, and `evaluation.json` once the run was
            evaluated.
        output: the HTML file.
        replay_directory: made by tools/replay.py.

    Returns:
        What the page shows.

    Raises:
        UserError: a file is missing or broken, or the files do not belong together.
    """
    shown = _read(files, run_directory, replay_directory)
    page = render(shown)
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic(output) as temporary:
        # Pure ASCII survives every server, mail and editor; the rest becomes character references.
        temporary.write_bytes(page.encode("ascii", "xmlcharrefreplace"))
    return shown


def _read(
    files: PlanFiles, run_directory: Path | None, replay_directory: Path | None
) -> ReportInput:
    plan, cost, data = files.plan, files.job.cost, files.data
    records = [] if run_directory is None else _records_of(plan, run_directory)
    replay = None
    if replay_directory is not None:
        if data is None:
            raise UserError(
                "a plan with neither data nor shapes has no steps to replay; give the plan "
                f"that {replay_directory} is of, or no replay"
            )
        replay = read_replay(replay_directory, plan, cost, data)
    return ReportInput(
        plan=plan,
        cost=cost,
        data=data,
        replay=replay,
        records=records,
        validations=[] if run_directory is None else read_validations(run_directory),
        run=summarise_run(records, plan.parallel.world_size) if records else None,
        evaluation=None if run_directory is None else read_evaluation(run_directory),
    )


def _records_of(plan: Plan, run_directory: Path) -> list[StepRecord]:
    """The run's steps, if it was trained from the plan."""
    if plan.data is None:
        raise UserError(
            "a plan without data cannot have been trained; give the plan that the run "
            f"{run_directory} was trained from, or no run"
        )
    info = read_run_info(run_directory)
    if info.packs_sha256 != plan.data.packs_sha256:
        raise UserError(
            f"{run_directory}: the run trained packs of sha256 {info.packs_sha256[:12]}, and the "
            f"plan has {plan.data.packs_sha256[:12]}; give the run that was trained from this plan"
        )
    records = read_run(run_directory / RUN_FILE)
    if any(len(record.stages) != len(plan.stages) for record in records):
        raise UserError(
            f"{run_directory}: the run has {len(records[0].stages)} pipeline stages and the plan "
            f"{len(plan.stages)}; give the run that was trained from this plan"
        )
    return records


def render(report: ReportInput) -> str:
    """The whole page."""
    name = escape(report.plan.model.name)
    style = _style("report.css") + (_style("replay.css") if report.replay else "")
    sections = (
        _stages(report),
        _memory(report),
        _training(report),
        _answers(report),
        _data(report),
        _section("Provenance", provenance_facts(report.plan, report.replay, report.records)),
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}: OmniBal report</title>\n<style>\n{style}</style></head>\n<body>\n"
        f"{_header(report)}\n<main>\n{''.join(sections)}</main>\n</body></html>\n"
    )


def _style(name: str) -> str:
    return (resources.files("omnibal.report") / name).read_text()


def _section(title: str, *parts: str) -> str:
    """A section of the page; empty if there is nothing to show."""
    body = "\n".join(part for part in parts if part)
    return f"<section><h2>{escape(title)}</h2>\n{body}\n</section>\n" if body else ""


def _grid(*figures: str) -> str:
    shown = [drawn for drawn in figures if drawn]
    return f'<div class="grid">{"".join(shown)}</div>' if shown else ""


def _header(report: ReportInput) -> str:
    plan = report.plan
    sizes = plan.parallel
    layout = (
        f"{sizes.pipeline} pipeline {TIMES} {sizes.tensor} tensor {TIMES} {sizes.data} data = "
        f"{sizes.world_size} devices ({escape(plan.cluster.device)}, {plan.precision})"
    )
    missing = ""
    if plan.prediction is None:
        missing += '<p class="note">This plan holds no prediction.</p>'
    if report.replay is not None:
        missing += f'<p class="note">{escape(_about(report.replay))}</p>'
    elif report.run is None:
        missing += (
            '<p class="note">Predicted only: no run was given. With <code>--run DIRECTORY</code> '
            "measured figures stand beside the predicted ones.</p>"
        )
    return (
        f'<header><h1>{escape(plan.model.name)}</h1><p class="soft">{layout}</p>{missing}'
        f"{headline_cards(plan, report.run, report.replay, report.records, report.evaluation)}"
        "</header>"
    )


def _about(replay: ReplaySummary) -> str:
    """Explanation of how the replayed figures were measured, and of their limits."""
    info = replay.info
    steps, repetitions = len(info.steps), info.repetitions
    several = f" ({info.processes:,} processes shared them)" if info.processes > 1 else ""
    repeated = f"median of {repetitions:,} repetitions" if repetitions > 1 else "measured once"
    content = {"data": "the samples of the data", "random": "random content of the plan's sizes"}
    return (
        f"Replayed: {steps:,} step{'s' * (steps > 1)} of the plan, each stage by itself on "
        f"{info.device}{several}, with {content[info.content]}; {repeated}. What devices exchange "
        "is the cost model's, as no other device was there; reading samples, logging and drop path "
        "are left out."
    )


def _stages(report: ReportInput) -> str:
    return _section(
        "Stages",
        split_figure(report.plan),
        stage_table(report.plan, report.run, report.replay),
        waste_figure(report.plan, report.replay),
        timeline_figure(report.plan.stages, report.cost, *report.data) if report.data else "",
    )


def _memory(report: ReportInput) -> str:
    shown = (report.plan, report.run, report.replay)
    return _section(
        "Time and memory",
        memory_table(*shown),
        _grid(time_figure(*shown), memory_figure(*shown)),
    )


def _training(report: ReportInput) -> str:
    records, prediction = report.records, report.plan.prediction
    if report.run is None:
        return ""
    incidents = ", ".join(f"{name}: {count:,}" for name, count in report.run.incidents().items())
    return _section(
        "Training",
        f'<p class="note">{escape(incidents)}.</p>' if incidents else "",
        _grid(
            curve_figure(
                "Loss",
                records,
                [r.loss for r in records],
                "loss per token",
                held_out=[(one.step - 1, one.loss) for one in report.validations],
            ),
            curve_figure(
                "Step time",
                records,
                [r.step_ms for r in records],
                "ms",
                predicted=prediction.step_ms if prediction else None,
                from_zero=True,
            ),
            curve_figure(
                "Learning rate",
                records,
                [r.learning_rate for r in records],
                "rate",
                smooth=False,
                from_zero=True,
            ),
            curve_figure(
                "Gradient norm",
                records,
                [r.grad_norm for r in records],
                "norm before clipping",
                from_zero=True,
            ),
        ),
    )


def _answers(report: ReportInput) -> str:
    if report.evaluation is None:
        return ""
    return _section(
        "Held-out answers",
        accuracy_table(report.evaluation),
        answers_table(report.evaluation),
    )


def _data(report: ReportInput) -> str:
    if report.plan.data is None or report.data is None:
        return ""
    packs, lengths = report.data
    return _section(
        "Data",
        '<div class="grid">'
        f"{packs_figure(packs, report.plan.data.caps)}"
        f"{packing_facts(packs, lengths, report.plan)}</div>",
        sources_table(lengths),
    )
