"""The report page, against numbers computed here without the report's own code."""

import re
import shutil
import statistics
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from io import StringIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from commands import REPOSITORY
from cost_cases import analytic_cost
from length_cases import lengths_of
from plan_cases import MODEL, origin_of
from replay_cases import write_replay
from rich.console import Console
from schedule_cases import simulate_1f1b
from typer.main import get_command

from omnibal.base.errors import UserError
from omnibal.cli import app
from omnibal.data.lengths import Lengths, write_lengths
from omnibal.job import runlog
from omnibal.job.plan import LENGTHS_FILE, PACKS_FILE, Plan, Shapes, read_plan, write_plan
from omnibal.job.plan_data import describe_data
from omnibal.job.plan_files import PlanFiles, make_job, read_plan_data
from omnibal.job.replay import StageReplay, read_replay
from omnibal.model.config import load_cluster
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.features import pack_features
from omnibal.packing.packs import Packs, ScheduledPacks, write_packs
from omnibal.packing.shares import shares_of
from omnibal.pipeline import prediction as predicting
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD
from omnibal.pipeline.stage_cost import stage_times
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.workload import Workload
from omnibal.report import figures
from omnibal.report.formatting import milliseconds
from omnibal.report.page import write_report
from omnibal.report.plan_tables import accuracy_table, peak_table, sources_table
from omnibal.report.step_time import explain_causes, split_measured_step
from omnibal.report.summary import summarise_run
from omnibal.report.timeline import representative_step, timeline_figure

pytestmark = pytest.mark.quick

HOSTILE = "<script>alert(1)</script>\"'><img src=http://evil.example/x>&amp;"
DP, MICRO_BATCHES, STEPS = 2, 4, 120
CAPS = Caps.of(tiles=12, tokens=640)
CLUSTER = load_cluster("laptop-cpu")


def make_lengths(name="documents") -> Lengths:
    rng = np.random.default_rng(7)
    count = 3 * DP * MICRO_BATCHES * STEPS
    source = rng.integers(0, 3, count)
    tiles = np.where(source == 2, 0, rng.integers(1, 5, count))
    text = np.clip(rng.lognormal(4, 0.6, count), 8, 140).astype(np.int32)
    columns = {"tiles": tiles, "tokens": text + 16 * tiles, "loss_tokens": text // 2}
    names = ("digit strips", name, "arithmetic")
    lengths = lengths_of(source=source, source_names=names, **columns)
    return replace(lengths, origin=origin_of(MODEL, data_sha256="ab" * 32))


def make_packs(lengths: Lengths) -> ScheduledPacks:
    """Return three samples per pack in the given order, which keeps both caps."""
    samples = np.arange(len(lengths))
    packs = Packs(samples=samples, offsets=np.append(samples[::3], len(samples)))
    step, within = np.divmod(np.arange(len(packs)), DP * MICRO_BATCHES)
    return ScheduledPacks.from_packs(packs, lengths, step, *np.divmod(within, MICRO_BATCHES))


LENGTHS = make_lengths()
PACKS = make_packs(LENGTHS)
STAGES = (
    Stage.parse("vision embed", "vision 0..2", recompute=["vision 0..1"]),
    Stage.parse(
        *("vision 3", "projector", "language embed", "language 0..3", "head"),
        recompute=["language 3"],
    ),
)
MEMORY_KINDS = ("weights", "gradients", "optimizer", "activations", "transient")


def stage_prediction(forward_ms: float, backward_ms: float, wait_fraction: float, *gib: float):
    kinds = {f"{kind}_gib": each for kind, each in zip(MEMORY_KINDS, gib, strict=True)}
    times = {"forward_ms": forward_ms, "backward_ms": backward_ms, "wait_fraction": wait_fraction}
    return predicting.StagePrediction(**times, memory=predicting.StageMemory(**kinds))


LOST_MS = {"rank_imbalance": 4.0, "communication": 2.5, "weight_update": 1.0, "recompute": 9.0}
LOST_MS |= {"padding": 0.0, "stage_imbalance": 12.0, "bubble": 18.0, "ideal": 141.0}
PREDICTION = predicting.Prediction(
    cost_source="profile:CPU core",
    step_ms=187.5,
    lost=predicting.LostTime(**{f"{cause}_ms": ms for cause, ms in LOST_MS.items()}),
    bubble_fraction=0.1337,
    samples_per_second_per_gpu=32.5,
    gpu_days=0.00123,
    exchange=predicting.DataParallelExchange(total_ms=6.25, exposed_ms=1.75),
    stages=(
        stage_prediction(10.25, 25.5, 0.17, 0.31, 0.62, 0.93, 1.11, 0.07),
        stage_prediction(12.75, 26.25, 0.0974, 0.52, 0.41, 0.82, 0.66, 0.19),
    ),
)


def make_records(steps=STEPS) -> list[runlog.StepRecord]:
    rng = np.random.default_rng(3)
    records = []
    for step in range(steps):
        step_ms = (3.0 if step == 0 else 1.0) * float(rng.normal(195, 6))
        decay = float(np.exp(-step / (steps / 3)))
        counts = {"epoch": 0, "loss_tokens": 1500, "samples": 24, "tiles": 60, "tokens": 2900}
        stages = [
            {
                "forward_ms": share * step_ms,
                "backward_ms": 2.2 * share * step_ms,
                "wait_ms": wait * step_ms,
                "data_ms": 0.004 * step_ms,
                "optimizer_ms": 0.02 * step_ms,
                "peak_gib": peak + 0.0001 * step,
            }
            for share, wait, peak in ((0.225, 0.17, 3.4), (0.2475, 0.09, 3.1))
        ]
        records.append(
            runlog.StepRecord(
                **counts,
                step=step,
                step_ms=step_ms,
                stages=stages,
                loss=0.31 + 4.2 * decay + float(rng.normal(0, 0.12)) * decay,
                learning_rate=1e-3 * min(1, (step + 1) / 10) * (1 - step / (steps + 1)),
                grad_norm=float(rng.lognormal(0, 0.3)),
            )
        )
    return records


RECORDS = make_records()
ASKED = {"single digit": (200, 171, 0.1), "read the line": (150, 63, 0.001)}
"""Kinds of questions: their number, the number of right answers, and the share right by chance."""


def make_evaluation(text: str) -> runlog.Evaluation:
    kinds = ASKED | {text: (50, 31, 0.38)}
    return runlog.Evaluation(
        step=119,
        kinds=tuple(
            runlog.KindAccuracy(kind=kind, questions=questions, correct=correct, chance=chance)
            for kind, (questions, correct, chance) in kinds.items()
        ),
        examples=tuple(
            runlog.EvaluatedAnswer(
                sample=f"heldout-{i:04d}",
                question=text if i == 4 else f"Which digit is at place {i % 4 + 1}?",
                expected=str(i % 10),
                answered=str(i % 10) if i % 3 else str((i + 1) % 10),
                kind=[*ASKED][i % 2],
            )
            for i in range(20)
        ),
    )


def files_of(directory: Path) -> PlanFiles:
    """Return unchecked files, as these plans' predictions are made up."""
    plan = read_plan(directory)
    job, data = make_job(plan, directory), read_plan_data(plan, directory)
    return PlanFiles(plan=plan, job=job, data=data)


def write_plan_of(folder: Path, text: str | None = None, **changes) -> Plan:
    """Write folder/plan with changed fields, and its data if any. `text` replaces all names."""
    (folder / "plan").mkdir()
    lengths = LENGTHS if text is None else make_lengths(text)
    per_step = {"packs_per_step": MICRO_BATCHES, "micro_batches_per_step": MICRO_BATCHES}
    made = {"caps": CAPS, "method": "balanced", "seed": 42, "epochs": 1} | per_step
    plan = Plan(
        model=MODEL.model_copy(update={"name": text or MODEL.name}),
        precision="fp32",
        parallel=Parallel(pipeline=2, data=DP),
        stages=STAGES,
        cluster=CLUSTER.model_copy(update={"device": text or CLUSTER.device}),
        data=describe_data(PACKS, lengths, **made),
        prediction=PREDICTION,
    ).model_copy(update=changes)
    write_plan(plan, folder / "plan")
    if plan.data is not None:
        write_packs(PACKS, folder / "plan" / PACKS_FILE)
        write_lengths(lengths, folder / "plan" / LENGTHS_FILE)
    return plan


def write_run_of(folder: Path, records: list[runlog.StepRecord], text="documents") -> None:
    (folder / "run").mkdir()
    info = runlog.RunInfo(model="internvl-digits", packs_sha256=PACKS.sha256, provider="te")
    runlog.write_run_info(info, folder / "run")
    lines = "".join(record.model_dump_json() + "\n" for record in records)
    (folder / "run" / runlog.RUN_FILE).write_text(lines)
    runlog.write_evaluation(make_evaluation(text), folder / "run")


class Page(HTMLParser):
    """Parser that collects text, tags and names, and fails on unbalanced elements."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())
        self.names = {tag for tag, _ in self.tags}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in self.VOID or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)


def make_page(folder: Path, *sources: str) -> str:
    """Return the page of the folder's plan, with its run and its replay if named."""
    run, replay = (folder / name if name in sources else None for name in ("run", "replay"))
    write_report(files_of(folder / "plan"), run, folder / "r.html", replay)
    return (folder / "r.html").read_text("ascii")


def rows_under(page: str, heading: str) -> list[list[str]]:
    """Return cell texts of the first table after the section heading."""
    section = page.split(f"<h2>{heading}</h2>")[1]
    body = section.split("<tbody>")[1].split("</tbody>")[0]
    return [
        [unescape(re.sub(r"<[^>]+>", "", cell)) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
        for row in body.split("<tr>")[1:]
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with plan/ and run/."""
    folder = tmp_path_factory.mktemp("report")
    write_plan_of(folder)
    write_run_of(folder, RECORDS)
    return folder


@pytest.fixture(scope="module")
def page(folder) -> str:
    return make_page(folder, "run")


def test_headline_gives_measured_and_predicted(page):
    """Prevents a headline with other times than the run's median, or a wrong error."""
    step_ms = statistics.median(record.step_ms for record in RECORDS)
    bubble = statistics.median(
        sum(stage.wait_ms for stage in record.stages) / 2 / record.step_ms for record in RECORDS
    )
    seconds = sum(record.step_ms for record in RECORDS) / 1000
    rate = sum(record.samples for record in RECORDS) / seconds / 4
    text = Page(page).text
    for told in (
        f"{step_ms:.0f} ms (measured), {100 * (step_ms / 187.5 - 1):.1f} % longer than predicted",
        f"{100 * bubble:.1f} % measured predicted 13.4 %",
        f"{rate:.1f} measured predicted 32.5",
        f"{RECORDS[0].loss:.2f} \N{RIGHTWARDS ARROW} {RECORDS[-1].loss:.3f}",
        "fits 3.04 of 3.60 usable GiB predicted, on stage 0",
        "3.41 GiB measured with Python and torch, so not compared",
        "22 s predicted 120 steps, 1 epoch, 0.00123 device-days",
    ):
        assert told in text


def test_stages_have_their_own_times_and_memory(page):
    """Prevents comparing times per micro-batch and per step, and memory of another kind."""
    units = (
        (["0", "3", "0", "2 + 0"], "17.0", "vision embed"),
        (["1", "1", "4", "0 + 1"], "9.0", "projector, language embed, head"),
    )
    rows = rows_under(page, "Stages")
    for stage, (row, (layers, wait, others)) in enumerate(zip(rows, units, strict=True)):
        predicted, cells = PREDICTION.stages[stage], layers.copy()
        for name in ("forward_ms", "backward_ms"):
            per_step = statistics.median(getattr(one.stages[stage], name) for one in RECORDS)
            cells += [f"{getattr(predicted, name):.2f}", f"{per_step / MICRO_BATCHES:.2f}"]
        assert row == [*cells, f"{100 * predicted.wait_fraction:.1f}", wait, others]
    assert rows_under(page, "Memory") == [
        ["0", "0.31", "0.62", "0.93", "1.11", "0.07", "3.04", "84.4 %"],
        ["1", "0.52", "0.41", "0.82", "0.66", "0.19", "2.60", "72.2 %"],
    ]


def test_step_time_by_cause_is_that_of_the_log(folder, page):
    """Prevents a split of the measured step that loses time, or scales the wrong stage."""
    files = files_of(folder / "plan")
    run = summarise_run(RECORDS, 4, None)
    causes = split_measured_step(files, run, RECORDS)
    assert sum(causes.values()) == pytest.approx(run.step_ms)
    assert causes["weight update"] == pytest.approx(0.02 * run.step_ms - 1.75, rel=0.05)
    assert causes["reading"] == pytest.approx(0.004 * run.step_ms, rel=0.05)
    # Without recomputation: forward and backward of both stages, 1 and 2.2 times a share.
    kept = tuple(stage.model_copy(update={"recompute": ()}) for stage in STAGES)
    plan = files.plan.model_copy(update={"stages": kept})
    of_kept = split_measured_step(replace(files, plan=plan), run, RECORDS)
    needed_ms = 3.2 * (0.225 + 0.2475) / 2 * run.step_ms
    assert of_kept["ideal"] == pytest.approx(needed_ms, rel=0.01) and not of_kept["recompute"]
    assert causes["ideal"] < of_kept["ideal"] and causes["recompute"] > 0
    text = Page(page).text
    rows = [f"{name} {milliseconds(LOST_MS[name])}" for name in ("ideal", "bubble", "recompute")]
    assert all(row in text for row in [*rows, "Most of the difference: "])
    largest = max(causes.keys() - {"ideal"}, key=causes.get)
    assert f"Largest loss: {largest}, {milliseconds(causes[largest])}" in text


@pytest.mark.parametrize("parallel", [{}, {"tensor": 2}, {"data": 4, "sharded": 4}, {"expert": 2}])
def test_advice_names_options_that_exist(parallel):
    """Prevents a cause without advice, or an option that no command has."""
    sizes = Parallel(**{"pipeline": 2, "data": 2} | parallel)
    model = MODEL.model_copy(update={"name": "any"})
    plan = Plan.model_construct(
        model=model, parallel=sizes, data=None, shapes=None, schedule=ONE_FORWARD_ONE_BACKWARD
    )
    explained = explain_causes(plan, None)
    causes = {*predicting.LostTime(**dict.fromkeys(predicting.LostTime.model_fields, 1.0)).causes()}
    assert explained.keys() >= causes
    commands = get_command(app).commands
    known = {
        name for one in ("plan", "replan") for each in commands[one].params for name in each.opts
    }
    trainer = (REPOSITORY / "megatron/vlm/run/arguments.py").read_text()
    for why, remedy in explained.values():
        named = re.findall(r"--[a-z-]+", remedy)
        fields = {name: name.removeprefix("--").replace("-", "_") for name in named}
        assert why and all(name in known or f" {fields[name]}: " in trainer for name in named)


def test_device_memory_is_compared(tmp_path):
    """Prevents a run on GPUs without a measured peak, or a green verdict on a full device."""
    write_plan_of(tmp_path)
    on_gpu = [
        one.model_copy(
            update={"stages": tuple(s.model_copy(update={"reserved_gib": 3.7}) for s in one.stages)}
        )
        for one in RECORDS
    ]
    write_run_of(tmp_path, on_gpu)
    page = make_page(tmp_path, "run")
    assert [row[-1] for row in rows_under(page, "Memory")] == ["3.41", "3.11"]
    assert (
        "fits 3.04 of 3.60 usable GiB predicted, on stage 0; 3.41 GiB measured" in Page(page).text
    )


def test_memory_over_the_device_does_not_fit(tmp_path):
    """Prevents a green verdict on a plan that needs the reserved share of a device."""
    write_plan_of(tmp_path, cluster=CLUSTER.model_copy(update={"memory_gib": 3.2}))
    assert "does not fit 3.04 of 2.88 usable GiB" in Page(make_page(tmp_path)).text


def test_held_out_accuracy_and_examples(page):
    """Prevents wrong answers marked right, and an interval that is not Wilson's."""
    kinds = make_evaluation("documents").kinds
    # Bounds of Wilson's interval by the quadratic (p - x)^2 = z^2 x (1 - x) / n.
    for row, kind in zip(rows_under(page, "Held-out answers"), kinds, strict=True):
        z2, p = 1.96**2 / kind.questions, kind.correct / kind.questions
        low, high = sorted(np.roots([1 + z2, -(2 * p + z2), p * p]))
        assert row[1:4] == [str(kind.questions), str(kind.correct), f"{100 * p:.1f} %"]
        assert row[4] == f"{100 * low:.1f} \N{EN DASH} {100 * high:.1f} %"
    examples = page.split("Held-out answers</h2>")[1].split("<tbody>")[2].split("</tbody>")[0]
    marked = re.findall(r'title="(right|wrong)".*?(\d)</td><td class="wrap">(\d)</td>', examples)
    assert len(marked) == 12 and {mark for mark, *_ in marked} == {"right", "wrong"}
    assert all((mark == "right") == (want == got) for mark, want, got in marked)


def test_terminal_and_page_show_the_same_cells(folder, page):
    """Prevents two tables of the same figures from drifting apart."""
    tables = {
        "Memory": peak_table(read_plan(folder / "plan")),
        "Held-out answers": accuracy_table(make_evaluation("[bold]third[/bold] kind")),
        "Data": sources_table(LENGTHS.statistics_by_source(12)),
    }
    for heading, table in tables.items():
        console = Console(width=100, file=StringIO())
        console.print(table, markup=False)
        lines = [line.strip() for line in console.file.getvalue().splitlines() if line.strip()]
        [rule] = [place for place, line in enumerate(lines) if set(line) == {"\u2500"}]
        printed = [re.split(r" {2,}", line) for line in lines[rule + 1 :]]
        shown = [[cell for cell in row if cell] for row in rows_under(page, heading)]
        if heading == "Held-out answers":
            assert printed[2][0] == "[bold]third[/bold] kind"
            printed[2][0] = "documents"
        assert printed == shown


def test_split_draws_every_layer_once_and_hatches_recomputed(folder):
    """Prevents a picture of another split than the plan's."""
    drawn = figures.split_figure(read_plan(folder / "plan")).drawn
    blocks = [
        (round(box.get_y() + 0.4), box.get_x(), box.get_width(), box.get_hatch())
        for box in drawn.axes[0].patches
    ]
    # Embedding and vision 0 to 3, projector, embedding, language 0 to 3, head.
    hatched = {(0, 1), (0, 2), (1, 6)}
    assert blocks == [
        (stage, place, 1, "//" if (stage, place) in hatched else None)
        for stage, units in enumerate((4, 8))
        for place in range(units)
    ]
    told = "embedding, projector, head; vision layer, recomputed; vision layer; language layer; "
    told += "language layer, recomputed"
    assert [text.get_text() for text in drawn.legends[0].texts] == told.split("; ")


def test_sources_and_fill_are_those_of_the_data(page):
    """Prevents a mean of another source than the row names, and fill of other packs."""
    table = sources_table(LENGTHS.statistics_by_source(2))
    rows = [row for section in table.sections for row in section]
    order = np.argsort(-np.bincount(LENGTHS.source))
    names = [*(LENGTHS.source_names[i] for i in order[:2]), "1 smaller sources", "all"]
    assert [row[0] for row in rows] == names
    means = [LENGTHS.tokens[LENGTHS.source == i].mean() for i in order]
    means.append(LENGTHS.tokens.mean())
    assert [row[-2] for row in rows] == [f"{mean:,.1f}" for mean in means]
    text = Page(page).text
    for name, cap in (("tiles", 12), ("tokens", 640)):
        fill = PACKS.column(name).sum() / (cap * len(PACKS))
        assert f"fill of {name} {100 * fill:.1f} %" in text


def test_page_needs_nothing_else(page):
    """Prevents a page that loads or runs something, or lacks labels for screen readers."""
    parsed = Page(page)
    assert not re.search(r"https?:|//\w|url\((?!#)|@import", page)
    assert parsed.names.isdisjoint({"script", "link", "img", "iframe", "object", "embed"})
    labels = [attrs["aria-label"] for tag, attrs in parsed.tags if tag == "svg"]
    assert len(labels) == 4 and all(labels)


def test_timeline_draws_every_pass_of_the_simulated_step(folder):
    """Prevents missing passes, overlapping passes on a stage, or another time scale."""
    files = files_of(folder / "plan")
    figure = timeline_figure(files)
    cost = analytic_cost(files.plan.model, files.plan.cluster, files.plan.parallel, "fp32")
    times = stage_times(cost, STAGES, pack_features(PACKS.packs, LENGTHS, cost.features))
    number = int(re.search(r"Step (\d+) as simulated", figure.title)[1])
    rows = (PACKS.step == number) & (PACKS.dp_rank == 0)
    passes = times.forward_ms, times.backward_ms, times.forward_link_ms, times.backward_link_ms
    step = simulate_1f1b(*(each[rows] for each in passes))
    drawn: dict[int, list[tuple[float, float]]] = {}
    for bar in figure.drawn.axes[0].patches:
        box = (bar.get_x(), bar.get_x() + bar.get_width())
        drawn.setdefault(round(bar.get_y() + 0.4), []).append(box)
    assert len(drawn) == len(STAGES)
    for stage, boxes in drawn.items():
        ends = [(s[:, stage], step.end_ms[kind][:, stage]) for kind, s in step.start_ms.items()]
        expected = np.concatenate([np.stack(pair, axis=1) for pair in ends])
        np.testing.assert_allclose(np.sort(boxes, axis=0), np.sort(expected, axis=0))
        boxes.sort()
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(boxes))


def test_shapes_only_plan_has_no_rate(tmp_path):
    """Prevents an invented rate and duration for a plan without samples."""
    unknown = {"samples_per_second_per_gpu": None, "gpu_days": None}
    shapes = Shapes(caps=CAPS, micro_batches_per_step=MICRO_BATCHES)
    prediction = PREDICTION.model_copy(update=unknown)
    write_plan_of(tmp_path, data=None, shapes=shapes, prediction=prediction)
    page = make_page(tmp_path)
    assert not any(name in page for name in ("Samples/s", "Whole training", "<h2>Data"))
    for stage, row in zip(PREDICTION.stages, rows_under(page, "Stages"), strict=True):
        assert row[4] == f"{stage.forward_ms:.2f}"
    assert "4 micro-batches under 1F1B" in page


def test_representative_step_is_full_and_of_median_load():
    """Prevents representing a run by its short last step, or by an outlier."""
    rows = np.flatnonzero(PACKS.step < 6)[:-1]  # Five full steps and a step that lacks a pack.
    last = (PACKS.step == 5) & (PACKS.dp_rank == 0) & (PACKS.slot == 3)
    part = PACKS.take(rows[~last[rows]])
    load = np.array([9, 1, 5, 2, 7, 4.0])[part.step]
    shares = shares_of(part, [Level(caps=CAPS)])
    assert representative_step(Workload.build(shares, np.zeros((len(part), 1)), 2), load) == 2


def test_same_input_same_bytes(folder, page, tmp_path):
    """Prevents reports of one run that differ by timestamps, paths or unordered sets."""
    for name in ("plan", "run"):
        shutil.copytree(folder / name, tmp_path / "other" / name)
    assert make_page(tmp_path / "other", "run") == page
    assert not list(tmp_path.rglob("*.part"))


def test_text_of_the_data_stays_text(tmp_path):
    """Prevents names, questions and answers of the data from becoming HTML code."""
    write_plan_of(tmp_path, HOSTILE)
    write_run_of(tmp_path, RECORDS, HOSTILE)
    parsed = Page(make_page(tmp_path, "run"))
    assert parsed.names.isdisjoint({"script", "img"})
    assert not any(name.startswith("on") for _, attrs in parsed.tags for name in attrs)
    # Title, headline, device, kind, question, source.
    assert parsed.text.count(HOSTILE) == 6


@pytest.mark.parametrize(
    ("lacking", "shown"),
    [
        (["data"], {"Stages", "Memory"}),
        (["prediction"], {"Stages", "Data"}),
        (["data", "prediction"], {"Stages"}),
    ],
)
def test_page_of_a_partial_plan(tmp_path, lacking, shown):
    """Prevents a crash, or an empty section, if a plan lacks data or a prediction."""
    write_plan_of(tmp_path, **dict.fromkeys(lacking))
    page = make_page(tmp_path)
    assert ("measured times are compared" in Page(page).text) is ("prediction" not in lacking)
    titles = {"Stages", "Data", "Memory", "Training"}
    assert {title for title in titles if f"<h2>{title}</h2>" in page} == shown


@pytest.mark.parametrize("steps", [1, 2, 8_000])
def test_page_of_a_short_or_long_run(tmp_path, steps):
    """Prevents a crash on one step, and a page that grows with the length of the run."""
    write_plan_of(tmp_path)
    write_run_of(tmp_path, make_records(steps))
    assert f"{steps:,} steps, 0 to {steps - 1:,}" in Page(make_page(tmp_path, "run")).text
    assert (tmp_path / "r.html").stat().st_size < 400_000


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    """Prevents a report that compares a plan with another plan's packs, run or replay."""
    plan = write_plan_of(tmp_path)
    write_run_of(tmp_path, make_records(2))

    def refuse(said: str, source="run", **changes) -> None:
        write_plan(plan.model_copy(update=changes), tmp_path / "plan")
        with pytest.raises(UserError, match=said):
            make_page(tmp_path, source)

    refuse("has 2 stages, the plan 1", stages=STAGES[:1], prediction=None)
    runlog.write_run_info(
        runlog.RunInfo(model="internvl-digits", packs_sha256="0" * 64), tmp_path / "run"
    )
    refuse("trained packs of sha256 000000000000")
    (tmp_path / "run" / "run.json").unlink()
    refuse(r"run\.json: no such file")
    write_lengths(make_lengths("another name"), tmp_path / "plan" / LENGTHS_FILE)
    refuse(r"lengths\.parquet has the content hash", "")
    refuse("a plan without steps has no replay", "replay", data=None)
    assert not (tmp_path / "r.html").exists()


def test_held_out_loss_and_incidents_are_shown(tmp_path):
    """Prevents validations shown nowhere, and a run with incidents that looks clean."""
    records = RECORDS.copy()
    for step, change in (
        (5, {"skipped": True, "loss": float("nan")}),
        (9, {"spike": True, "replaced_samples": 3}),
        *((step, {"loss": float("nan")}) for step in range(STEPS - 4, STEPS)),
        *(
            (step, {"stages": tuple(
                stage.model_copy(update={"allocation_retries": count})
                for stage, count in zip(RECORDS[step].stages, retries, strict=True)
            )})
            for step, retries in ((4, (1, 2)), (7, (3, 0)))
        ),
    ):  # fmt: skip
        records[step] = records[step].model_copy(update=change)
    write_plan_of(tmp_path)
    write_run_of(tmp_path, records)
    for step in (40, 80):
        validation = runlog.ValidationRecord(step=step, loss=1.25, loss_tokens=10, seconds=1.0)
        runlog.append_record(validation, tmp_path / "run" / runlog.VALIDATION_FILE)
    text = Page(make_page(tmp_path, "run")).text
    for told in (
        "held-out data, 1.25 at the end",
        "skipped steps: 1, spikes of the loss: 1, unreadable samples replaced: 3",
        "allocation retries: 5",
        "Provider of the run's layers te",
        "Steps without a finite value: 5.",
        "\N{RIGHTWARDS ARROW} nan",
    ):
        assert told in text


def test_curve_shows_what_it_can():
    """Prevents one slow step that flattens a curve, and lost points or validations."""
    values = [record.step_ms for record in RECORDS]
    held_out = [(39, 180.0), (79, float("nan")), (119, 170.0)]
    more = {"predicted": 150.0, "held_out": held_out, "from_zero": True}
    figure = figures.curve_figure("Step time", RECORDS, values, "ms", **more)
    points, mean, predicted, validated = figure.drawn.axes[0].lines
    assert points.get_ydata() == pytest.approx(values[1:])  # The first is three times as slow.
    window = values[9 - 2 : 9 + 3]  # A fortieth of the 119 steps on each side.
    assert mean.get_ydata()[8] == pytest.approx(statistics.mean(window))
    assert predicted.get_ydata()[0] == 150
    assert validated.get_xydata().tolist() == [[39, 180], [119, 170]]
    assert "Steps above the axis: 1." in figure.caption


REPLAYED = (3, 50, 110)


def write_replay_of(folder: Path, **info) -> list[StageReplay]:
    files = files_of(folder / "plan")
    workload = files.job.workload(*files.data, files.plan.pack_levels)
    given = folder / "replay", files.plan, files.job.cost, workload, REPLAYED
    return write_replay(*given, factors=(1.5, 1.25), with_working_memory=False, **info)


@pytest.fixture(scope="module")
def replays(folder) -> list[StageReplay]:
    return write_replay_of(folder)


@pytest.fixture(scope="module")
def replay_page(folder, replays) -> str:
    return make_page(folder, "run", "replay")


def test_replayed_times_stand_between_predicted_and_measured(page, replay_page, replays):
    """Prevents comparing a replay of other steps, ranks or units than the run's."""
    before, after = rows_under(page, "Stages"), rows_under(replay_page, "Stages")
    per_micro_batch = 1 / (len(REPLAYED) * DP * MICRO_BATCHES)
    for old, new, replay in zip(before, after, replays, strict=True):
        _, backward, forward = (new.pop(column) for column in (11, 8, 5))
        assert new == old
        assert forward == f"{sum(replay.forward_ms) * per_micro_batch:.2f}"
        assert backward == f"{sum(replay.backward_ms) * per_micro_batch:.2f}"
    assert len(after[0]) + 3 == 4 + 3 * 3 + 1
    head = replay_page.split("<h2>Stages</h2>")[1].split("</thead>")[0]
    heads = re.findall(r"<th[^>]*>([\w ]+)</th>", head)
    assert heads[-10:] == [*(["predicted", "replayed", "measured"] * 3), "other units"]


def test_replay_has_its_own_step_bubble_and_memory(folder, replay_page):
    """Prevents a replay's deviation computed from other steps' prediction."""
    files = files_of(folder / "plan")
    plan, workload = files.plan, files.job.workload(*files.data, files.plan.pack_levels)
    replay = read_replay(folder / "replay", plan, files.job.cost, workload)
    text, alone = Page(replay_page).text, Page(make_page(folder, "replay")).text
    error, of_these = replay.step_ms / replay.predicted_step_ms - 1, replay.predicted_step_ms
    told = f"{milliseconds(replay.step_ms)} (replayed), {100 * error:.1f} % longer than predicted"
    assert f"{told} ({milliseconds(of_these)})" in alone
    assert f"predicted 13.4 %; replayed {100 * replay.idle_fraction:.1f} %" in text
    # Activations of 1 and 2 GiB on 0.5 GiB of weights. The prediction omits working memory.
    assert "2.50 GiB replayed where 2.41 were predicted" in text
    rows = rows_under(replay_page, "Memory")
    assert [row[8:] for row in rows] == [["2.97", "1.50"], ["2.41", "2.50"]]
    assert "A replay on a CPU measures no working memory" in text
    assert "3, 50, 110, on one device" in text


def test_page_of_a_replay_alone(tmp_path):
    """Prevents a replay that needs a run or a prediction, and code in its device's name."""
    write_plan_of(tmp_path, prediction=None)
    write_replay_of(tmp_path, device=HOSTILE, repetitions=1, processes=2, content="data")
    parsed = Page(page := make_page(tmp_path, "replay"))
    assert parsed.names.isdisjoint({"script", "img"})
    # In the note and under provenance.
    assert parsed.text.count(HOSTILE) == 2
    assert "(2 processes shared them), with the samples of the data; measured once" in parsed.text
    assert "no run was given" not in parsed.text
    assert "<small>predicted" not in parsed.text
    assert len(rows_under(page, "Stages")[0]) == 4 + 3 + 1
