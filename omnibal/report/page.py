"""A plan directory and a run directory to one HTML file: no script, no other file, no network.

Equal inputs give equal bytes: nothing on the page depends on when or where it was written.
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from omnibal.data.lengths import Lengths, read_lengths
from omnibal.data.packs import ScheduledPacks, read_packs
from omnibal.errors import UserError
from omnibal.plan import LENGTHS_FILE, PACKS_FILE, Plan, read_plan
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
from omnibal.runlog import RUN_FILE, Evaluation, StepRecord, read_evaluation, read_run

# The page can neither load nor run anything, whatever text the data holds.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportInput:
    """Everything the page shows, read and found to belong together."""

    plan: Plan
    packs: ScheduledPacks | None
    """None, as `lengths`, for a plan without data."""
    lengths: Lengths | None
    records: list[StepRecord]
    """Empty without a run."""
    run: RunSummary | None
    evaluation: Evaluation | None


def write_report(plan_directory: Path, run_directory: Path | None, output: Path) -> None:
    """Write the report of a plan, and of the run trained from it if one is given.

    Args:
        plan_directory: holds `plan.json`, and for a plan with data the packs and lengths.
        run_directory: holds `run.jsonl`, and `evaluation.json` once the run was evaluated.
        output: the HTML file; its directory must exist.

    Raises:
        UserError: a file is missing or broken, or the files do not belong together.
    """
    if not output.parent.is_dir():
        raise UserError(f"{output}: the directory {output.parent} does not exist; create it first")
    page = render(_read(plan_directory, run_directory))
    temporary = output.with_name(output.name + ".part")
    # Pure ASCII survives every server, mail and editor; the rest becomes character references.
    temporary.write_bytes(page.encode("ascii", "xmlcharrefreplace"))
    temporary.replace(output)


def _read(plan_directory: Path, run_directory: Path | None) -> ReportInput:
    plan = read_plan(plan_directory)
    packs, lengths = None, None
    if plan.data is not None:
        packs = read_packs(plan_directory / PACKS_FILE)
        lengths = read_lengths([plan_directory / LENGTHS_FILE])
        if (packs.sha256, lengths.sha256) != (plan.data.packs_sha256, plan.data.lengths_sha256):
            raise UserError(
                f"{plan_directory}: packs or lengths are not those that plan.json was made with; "
                "a plan directory is kept whole: make it anew with `omnibal plan`"
            )
    if run_directory and plan.data is None:
        raise UserError(
            f"{plan_directory}: a plan without data cannot have been trained; give the plan that "
            f"the run {run_directory} was trained from, or no run"
        )
    records = read_run(run_directory / RUN_FILE) if run_directory else []
    if any(len(record.stages) != len(plan.stages) for record in records):
        raise UserError(
            f"{run_directory}: the run has {len(records[0].stages)} pipeline stages and the plan "
            f"{len(plan.stages)}; give the run that was trained from this plan"
        )
    return ReportInput(
        plan=plan,
        packs=packs,
        lengths=lengths,
        records=records,
        run=summarise_run(records, plan.parallel.world_size) if records else None,
        evaluation=read_evaluation(run_directory) if run_directory else None,
    )


def render(report: ReportInput) -> str:
    """The whole page."""
    name = escape(report.plan.model.name)
    style = (resources.files("omnibal.report") / "report.css").read_text()
    sections = (
        _stages(report),
        _memory(report),
        _training(report),
        _answers(report),
        _data(report),
        _section("Provenance", provenance_facts(report.plan, report.records)),
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}: OmniBal report</title>\n<style>\n{style}</style></head>\n<body>\n"
        f"{_header(report)}\n<main>\n{''.join(sections)}</main>\n</body></html>\n"
    )


def _section(title: str, *parts: str) -> str:
    """Nothing to show makes no section."""
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
    if report.run is None:
        missing += (
            '<p class="note">Predicted only: no run was given. With <code>--run DIRECTORY</code> '
            "measured figures stand beside the predicted ones.</p>"
        )
    return (
        f'<header><h1>{escape(plan.model.name)}</h1><p class="soft">{layout}</p>{missing}'
        f"{headline_cards(plan, report.run, report.records, report.evaluation)}</header>"
    )


def _stages(report: ReportInput) -> str:
    return _section(
        "Stages",
        split_figure(report.plan),
        stage_table(report.plan, report.run),
        waste_figure(report.plan),
        timeline_figure(report.plan, report.packs, report.lengths),
    )


def _memory(report: ReportInput) -> str:
    return _section(
        "Time and memory",
        memory_table(report.plan, report.run),
        _grid(time_figure(report.plan, report.run), memory_figure(report.plan, report.run)),
    )


def _training(report: ReportInput) -> str:
    records, prediction = report.records, report.plan.prediction
    if not records:
        return ""
    return _section(
        "Training",
        _grid(
            curve_figure("Loss", records, [r.loss for r in records], "loss per token"),
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
    data = report.plan.data
    if data is None or report.packs is None or report.lengths is None:
        return ""
    return _section(
        "Data",
        '<div class="grid">'
        f"{packs_figure(report.packs, data.caps)}"
        f"{packing_facts(report.packs, report.lengths, report.plan)}</div>",
        sources_table(report.lengths),
    )
