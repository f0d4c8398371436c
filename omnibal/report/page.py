"""The report page of a plan, its replay and run: one deterministic HTML file without scripts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from omnibal.base.errors import UserError
from omnibal.base.printable import printable
from omnibal.job import runlog
from omnibal.job.fake_replay import FAKE_REPLAY_FILES, FakeStage, is_fake_replay, read_fake_stages
from omnibal.job.plan import Plan, plan_sha256
from omnibal.job.plan_files import PlanFiles
from omnibal.job.replay import INFO_FILE, ReplaySummary, read_replay
from omnibal.packing.balance_metrics import measure_packs
from omnibal.packing.pack_bound import naive_lower_bound
from omnibal.report import plan_tables
from omnibal.report.cards import headline_cards
from omnibal.report.figures import curve_figure, split_figure
from omnibal.report.formatting import change_ms, milliseconds, percent, write_ascii
from omnibal.report.replay_tables import fake_device_table
from omnibal.report.step_time import StepTime, split_measured_step, step_time
from omnibal.report.summary import RunSummary, summarise_run
from omnibal.report.timeline import timeline_figure

_SOURCES_SHOWN = 12  # rows before a table is longer than a screen


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportInput:
    """Content of the page: a plan, and the replay and run of the same plan if given."""

    files: PlanFiles
    replay: ReplaySummary | None
    fake_stages: tuple[FakeStage, ...]  # stages replayed on fake devices so far
    records: list[runlog.StepRecord]
    validations: list[runlog.ValidationRecord]
    run: RunSummary | None
    evaluation: runlog.Evaluation | None
    time: StepTime | None  # a step's time by cause, or None if neither predicted nor measured

    @property
    def plan(self) -> Plan:
        return self.files.plan


def write_report(
    files: PlanFiles, run_directory: Path | None, output: Path, replay_directory: Path | None = None
) -> ReportInput:
    """Write and return the report of a plan, with its run and replay. UserError if of another."""
    plan, records = files.plan, list[runlog.StepRecord]()
    run, causes = None, {}
    if run_directory is not None:
        info, records = _read_plan_run(plan, run_directory)
        run = summarise_run(records, plan.parallel.world_size, info.provider)
        causes = split_measured_step(files, run, records)
    replay, fake_stages = None, tuple[FakeStage, ...]()
    is_fake = replay_directory is not None and is_fake_replay(replay_directory)
    if replay_directory is not None and is_fake:
        FAKE_REPLAY_FILES.identity_of(replay_directory, plan_sha256(plan))
        fake_stages = read_fake_stages(replay_directory, plan)
    if replay_directory and not (is_fake and not (replay_directory / INFO_FILE).exists()):
        if files.data is None:
            raise UserError(f"a plan without steps has no replay: give that of {replay_directory}")
        replay = read_replay(replay_directory, plan, files.cost, files.workload)
    report = ReportInput(
        files=files,
        replay=replay,
        fake_stages=fake_stages,
        records=records,
        validations=[] if run_directory is None else runlog.read_validations(run_directory),
        run=run,
        evaluation=None if run_directory is None else runlog.read_evaluation(run_directory),
        time=step_time(plan, run, replay, causes),
    )
    write_ascii(render(report), output)
    return report


def _read_plan_run(
    plan: Plan, run_directory: Path
) -> tuple[runlog.RunInfo, list[runlog.StepRecord]]:
    """Return the run and its steps. UserError if its packs or stages are not the plan's."""
    if plan.data is None:
        raise UserError(f"a plan without data has no runs: give the plan of {run_directory}")
    info = runlog.read_run_info(run_directory)
    if info.packs_sha256 != plan.data.packs_sha256:
        raise UserError(
            f"{run_directory}: the run trained packs of sha256 {info.packs_sha256[:12]}, and the "
            f"plan has {plan.data.packs_sha256[:12]}; give a run of this plan"
        )
    records = runlog.read_run(run_directory / runlog.RUN_FILE)
    stages = len(plan.merge_chunks(plan.stages))
    if any(len(record.stages) != stages for record in records):
        raise UserError(
            f"{run_directory}: has {len(records[0].stages)} stages, the plan {stages}; give its run"
        )
    return info, records


def render(report: ReportInput) -> str:
    pages = Environment(
        loader=PackageLoader("omnibal", "report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        # Only plain strings: Markup, such as SVG, is already safe.
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    pages.filters |= {"percent": percent, "time": milliseconds, "change": change_ms}
    return pages.get_template("page.html.jinja").render(report=report, **_variables(report))


def _variables(report: ReportInput) -> dict[str, Any]:
    """Return the template's variables. Sections without content are empty."""
    plan, run, replay, evaluation = report.plan, report.run, report.replay, report.evaluation
    variables = {
        "cards": headline_cards(plan, run, replay, report.records),
        "split": split_figure(plan),
        "stages": plan_tables.stages_table(plan, run, replay),
        "timeline": timeline_figure(report.files) if report.files.data else "",
        "memory": plan_tables.peak_table(plan, run, replay),
        "fake": fake_device_table(plan, report.fake_stages) if report.fake_stages else None,
        "incidents": ", ".join(f"{k}: {n:,}" for k, n in run.incidents().items()) if run else "",
        "curves": (),
        "accuracy": plan_tables.accuracy_table(evaluation) if evaluation else None,
        "answers": plan_tables.answers_table(evaluation) if evaluation else None,
        "packing": None,
        "mixture": plan_tables.mixture_table(plan.data.mixture)
        if plan.data and plan.data.mixture
        else None,
        "provenance": plan_tables.provenance_facts(plan, replay, run, report.records),
    }
    if run:
        records, predicted = report.records, plan.prediction.step_ms if plan.prediction else None
        held_out = [(record.step - 1, record.loss) for record in report.validations]
        losses, step_ms = zip(*((record.loss, record.step_ms) for record in records), strict=True)
        variables["curves"] = (
            curve_figure("Loss", records, losses, "loss per token", held_out=held_out),
            curve_figure("Step time", records, step_ms, "ms", predicted=predicted, from_zero=True),
        )
    if plan.data is not None and report.files.data is not None:
        packs, lengths = report.files.data
        bound, dp = naive_lower_bound(lengths, plan.data.caps), plan.parallel.data
        metrics = measure_packs(packs, lengths, plan.pack_levels, dp, packs.tokens, bound)
        variables |= {
            "packing": plan_tables.packing_facts(metrics, "tokens", plan.data),
            "sources": plan_tables.sources_table(lengths.statistics_by_source(_SOURCES_SHOWN)),
        }
    return variables
