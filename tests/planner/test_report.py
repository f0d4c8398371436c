"""The report page against numbers worked out here, apart from the report's own code."""

import re
import shutil
import statistics
from html import unescape
from html.parser import HTMLParser
from io import StringIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from plan_cases import origin_of
from replay_cases import write_replay
from rich.console import Console

from omnibal.base.errors import UserError
from omnibal.cost.analytic import analytic_cost
from omnibal.cost.model import pack_features
from omnibal.data.lengths import Lengths, write_lengths
from omnibal.job.plan import (
    LENGTHS_FILE,
    PACKS_FILE,
    Plan,
    Shapes,
    read_plan,
    write_plan,
)
from omnibal.job.plan_data import describe_data
from omnibal.job.plan_files import PlanFiles, data_of_plan, job_of_plan
from omnibal.job.replay import StageReplay, read_replay
from omnibal.job.runlog import (
    RUN_FILE,
    VALIDATION_FILE,
    EvaluatedAnswer,
    Evaluation,
    KindAccuracy,
    RunInfo,
    StageRecord,
    StepRecord,
    ValidationRecord,
    append_record,
    write_evaluation,
    write_run_info,
)
from omnibal.model.config import load_cluster, load_model
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.packs import Packs, ScheduledPacks, write_packs
from omnibal.pipeline.prediction import (
    DataParallelExchange,
    LostTime,
    Prediction,
    StageMemory,
    StagePrediction,
)
from omnibal.pipeline.simulate import simulate_step
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.stage_cost import stage_times
from omnibal.pipeline.workload import Workload
from omnibal.report.figures import (
    curve_figure,
    lengths_figure,
    memory_figure,
    packs_figure,
    split_figure,
    time_figure,
)
from omnibal.report.formatting import milliseconds
from omnibal.report.length_sources import sources_table
from omnibal.report.page import write_report
from omnibal.report.plan_tables import accuracy_table, lost_time_table, memory_table
from omnibal.report.summary import figures_by_source
from omnibal.report.timeline import representative_step, timeline_figure

pytestmark = pytest.mark.quick

HOSTILE = "<script>alert(1)</script>\"'><img src=http://evil.example/x>&amp;"
DP, MICRO_BATCHES, STEPS = 2, 4, 120
CAPS = Caps.of(tiles=12, tokens=640)


def make_lengths(name: str) -> Lengths:
    rng = np.random.default_rng(7)
    count = 3 * DP * MICRO_BATCHES * STEPS
    source = rng.integers(0, 3, count).astype(np.int32)
    tiles = np.where(source == 2, 0, rng.integers(1, 5, count)).astype(np.int32)
    text = np.clip(rng.lognormal(4, 0.6, count), 8, 140).astype(np.int32)
    return Lengths(
        items={"tiles": tiles},
        tokens=(text + 16 * tiles).astype(np.int32),
        loss_tokens=(text // 2).astype(np.int32),
        source=source,
        source_names=("digit strips", name, "arithmetic"),
        origin=origin_of(load_model("internvl-digits"), data_sha256="ab" * 32),
    )


def make_packs(lengths: Lengths) -> ScheduledPacks:
    """Three samples a pack in the order given, which keeps both caps."""
    count = len(lengths) // 3
    packs = Packs(samples=np.arange(len(lengths)), offsets=3 * np.arange(count + 1))
    per_step = DP * MICRO_BATCHES
    index = np.arange(count)
    dp_rank = index % per_step // MICRO_BATCHES
    return ScheduledPacks.of(packs, lengths, index // per_step, dp_rank, index % MICRO_BATCHES)


STAGES = (
    Stage.of("vision embed", "vision 0..2", recompute=["vision 0..1"]),
    Stage.of(
        *("vision 3", "projector", "language embed", "language 0..3", "head"),
        recompute=["language 3"],
    ),
)
MEMORY_KINDS = ("weights", "gradients", "optimizer", "activations", "transient")


def stage_prediction(
    forward_ms: float, backward_ms: float, wait_fraction: float, *gib: float
) -> StagePrediction:
    kinds = {f"{kind}_gib": each for kind, each in zip(MEMORY_KINDS, gib, strict=True)}
    return StagePrediction(
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        wait_fraction=wait_fraction,
        memory=StageMemory(**kinds),
    )


PREDICTION = Prediction(
    cost_source="profile:CPU core",
    step_ms=187.5,
    lost=LostTime(
        rank_imbalance_ms=4.0,
        communication_ms=2.5,
        weight_update_ms=1.0,
        recompute_ms=9.0,
        padding_ms=0.0,
        stage_imbalance_ms=12.0,
        bubble_ms=18.0,
        ideal_ms=141.0,
    ),
    bubble_fraction=0.1337,
    samples_per_second_per_gpu=32.5,
    gpu_days=0.00123,
    exchange=DataParallelExchange(total_ms=6.25, exposed_ms=1.75),
    stages=(
        stage_prediction(10.25, 25.5, 0.17, 0.31, 0.62, 0.93, 1.11, 0.07),
        stage_prediction(12.75, 26.25, 0.0974, 0.52, 0.41, 0.82, 0.66, 0.19),
    ),
)


def make_records(steps: int) -> list[StepRecord]:
    rng = np.random.default_rng(3)
    records = []
    for step in range(steps):
        slow = 3.0 if step == 0 else 1.0
        step_ms = slow * float(rng.normal(195, 6))
        stages = tuple(
            StageRecord(
                forward_ms=share * step_ms,
                backward_ms=2.2 * share * step_ms,
                wait_ms=wait * step_ms,
                data_ms=0.004 * step_ms,
                optimizer_ms=0.02 * step_ms,
                peak_gib=peak + 0.0001 * step,
            )
            for share, wait, peak in ((0.225, 0.17, 3.4), (0.2475, 0.09, 3.1))
        )
        decay = float(np.exp(-step / (steps / 3)))
        records.append(
            StepRecord(
                step=step,
                epoch=0,
                loss=0.31 + 4.2 * decay + float(rng.normal(0, 0.12)) * decay,
                loss_tokens=1500,
                samples=24,
                tiles=60,
                tokens=2900,
                step_ms=step_ms,
                learning_rate=1e-3 * min(1, (step + 1) / 10) * (1 - step / (steps + 1)),
                grad_norm=float(rng.lognormal(0, 0.3)),
                stages=stages,
            )
        )
    return records


def make_evaluation(text: str) -> Evaluation:
    return Evaluation(
        step=119,
        kinds=(
            KindAccuracy(kind="single digit", questions=200, correct=171, chance=0.1),
            KindAccuracy(kind="read the line", questions=150, correct=63, chance=0.001),
            KindAccuracy(kind=text, questions=50, correct=31, chance=0.38),
        ),
        examples=tuple(
            EvaluatedAnswer(
                sample=f"heldout-{i:04d}",
                question=text if i == 4 else f"Which digit is at place {i % 4 + 1}?",
                expected=str(i % 10),
                answered=str(i % 10) if i % 3 else str((i + 1) % 10),
                kind=("single digit", "read the line")[i % 2],
            )
            for i in range(20)
        ),
    )


def files_of(directory: Path) -> PlanFiles:
    """As they stand: these plans' predictions are made up, so no check would pass them."""
    plan = read_plan(directory)
    job, data = job_of_plan(plan, directory), data_of_plan(plan, directory)
    return PlanFiles(plan=plan, job=job, data=data)


def write_plan_directory(
    directory: Path,
    *,
    text: str = "documents",
    data: bool = True,
    prediction: bool = True,
    shapes: bool = False,
) -> Plan:
    directory.mkdir()
    lengths = make_lengths(text)
    packs = make_packs(lengths)
    data_plan = describe_data(
        packs,
        lengths,
        caps=CAPS,
        method="balanced",
        seed=42,
        epochs=1,
        packs_per_step=MICRO_BATCHES,
        micro_batches_per_step=MICRO_BATCHES,
    )
    model = load_model("internvl-digits")
    cluster = load_cluster("laptop-cpu")
    plan = Plan(
        model=model.model_copy(update={"name": text}) if text == HOSTILE else model,
        precision="fp32",
        parallel=Parallel(pipeline=2, data=DP),
        stages=STAGES,
        cluster=cluster.model_copy(update={"device": text}) if text == HOSTILE else cluster,
        data=data_plan if data else None,
        shapes=Shapes(caps=CAPS, micro_batches_per_step=MICRO_BATCHES) if shapes else None,
        prediction=PREDICTION if prediction else None,
    )
    write_plan(plan, directory)
    if data:
        write_packs(packs, directory / PACKS_FILE)
        write_lengths(lengths, directory / LENGTHS_FILE)
    return plan


def write_run_directory(
    directory: Path, *, steps: int = STEPS, text: str = "documents"
) -> list[StepRecord]:
    directory.mkdir()
    packs = make_packs(make_lengths(text))
    info = RunInfo(model="internvl-digits", packs_sha256=packs.sha256, provider="te")
    write_run_info(info, directory)
    records = make_records(steps)
    lines = [record.model_dump_json() for record in records]
    (directory / RUN_FILE).write_text("\n".join(lines) + "\n")
    write_evaluation(make_evaluation(text), directory)
    return records


class Page(HTMLParser):
    """Collects what the tests ask for and fails on unbalanced elements."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def names(self) -> set[str]:
        return {tag for tag, _ in self.tags}


def reported(folder: Path, *sources: str) -> str:
    """Page of the folder's plan, with its run and its replay if they are named."""
    run, replay = (folder / name if name in sources else None for name in ("run", "replay"))
    write_report(files_of(folder / "plan"), run, folder / "r.html", replay)
    return (folder / "r.html").read_text("ascii")


def rows_under(page: str, heading: str) -> list[list[str]]:
    """Cell texts of the first table after the section heading."""
    section = page.split(f"<h2>{heading}</h2>")[1]
    body = section.split("<tbody>")[1].split("</tbody>")[0]
    return [
        [unescape(re.sub(r"<[^>]+>", "", cell)) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
        for row in body.split("<tr>")[1:]
    ]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("report")
    write_plan_directory(base / "plan")
    write_run_directory(base / "run")
    return base / "plan", base / "run"


@pytest.fixture(scope="module")
def page(directories: tuple[Path, Path]) -> str:
    return reported(directories[0].parent, "run")


def test_headline_gives_measured_and_predicted(page: str) -> None:
    """Prevents a headline that shows other steps' times than the run's median, or a wrong error."""
    records = make_records(STEPS)
    step_ms = statistics.median(record.step_ms for record in records)
    bubble = statistics.median(
        (record.stages[0].wait_ms + record.stages[1].wait_ms) / 2 / record.step_ms
        for record in records
    )
    seconds = sum(record.step_ms for record in records) / 1000
    rate = sum(record.samples for record in records) / seconds / 4
    text = Page(page).text
    assert f"{step_ms:.0f} ms measured" in text
    assert f"predicted 188 ms, {100 * (1 - 187.5 / step_ms):.1f} % too low" in text
    assert f"{100 * bubble:.1f} % measured predicted 13.4 %" in text
    assert f"{rate:.1f} measured predicted 32.5" in text
    assert f"{records[0].loss:.2f} \N{RIGHTWARDS ARROW} {records[-1].loss:.3f}" in text
    assert "fits 3.04 of 3.60 usable GiB predicted, on stage 0" in text
    assert "22 s predicted 120 steps, 1 epoch, 0.00123 device-days" in text
    assert "single digit 85.5 % chance 10.0 %" in text


def test_stage_times_are_per_micro_batch_on_both_sides(page: str) -> None:
    """Prevents a time per micro-batch from standing beside one per step."""
    records = make_records(STEPS)
    for stage, row in enumerate(rows_under(page, "Stages")):
        predicted = PREDICTION.stages[stage]
        measured = [record.stages[stage] for record in records]
        layers, recomputed = [("3", "0"), ("1", "4")][stage], ["2 + 0", "0 + 1"][stage]
        assert row == [
            str(stage),
            *layers,
            recomputed,
            f"{predicted.forward_ms:.2f}",
            f"{statistics.median(s.forward_ms for s in measured) / MICRO_BATCHES:.2f}",
            f"{predicted.backward_ms:.2f}",
            f"{statistics.median(s.backward_ms for s in measured) / MICRO_BATCHES:.2f}",
            f"{100 * predicted.wait_fraction:.1f}",
            f"{(17.0, 9.0)[stage]:.1f}",
            ["vision embed", "projector, language embed, head"][stage],
        ]


def test_memory_kinds_and_share_of_the_device(page: str) -> None:
    """Prevents kinds of memory in each other's columns, and a share of the wrong capacity."""
    rows = rows_under(page, "Time and memory")
    assert rows[0] == ["0", "0.31", "0.62", "0.93", "1.11", "0.07", "3.04", "84.4 %", "3.41"]
    assert rows[1] == ["1", "0.52", "0.41", "0.82", "0.66", "0.19", "2.60", "72.2 %", "3.11"]


def test_memory_over_the_device_does_not_fit(tmp_path: Path) -> None:
    """Prevents a green verdict on a plan that needs the share of a device that is kept free."""
    plan = write_plan_directory(tmp_path / "plan")
    small = plan.cluster.model_copy(update={"memory_gib": 3.2})
    write_plan(plan.model_copy(update={"cluster": small}), tmp_path / "plan")
    assert "does not fit 3.04 of 2.88 usable GiB" in Page(reported(tmp_path)).text


def test_held_out_accuracy_and_examples(page: str) -> None:
    """Prevents wrong answers marked right, and an interval that is not Wilson's."""
    rows = rows_under(page, "Held-out answers")
    # Bounds of Wilson's interval by the quadratic (p - x)^2 = z^2 x (1 - x) / n.
    for row, (questions, correct) in zip(rows, [(200, 171), (150, 63), (50, 31)], strict=True):
        z2, p = 1.96**2 / questions, correct / questions
        low, high = sorted(np.roots([1 + z2, -(2 * p + z2), p * p]))
        assert row[1:4] == [str(questions), str(correct), f"{100 * p:.1f} %"]
        assert row[4] == f"{100 * low:.1f} \N{EN DASH} {100 * high:.1f} %"
    examples = page.split("Held-out answers</h2>")[1].split("<tbody>")[2].split("</tbody>")[0]
    marked = re.findall(r'title="(right|wrong)".*?(\d)</td><td class="wrap">(\d)</td>', examples)
    assert len(marked) == 12
    assert {mark for mark, _, _ in marked} == {"right", "wrong"}
    assert all((mark == "right") == (want == got) for mark, want, got in marked)


def test_terminal_and_page_show_the_same_cells(directories: tuple[Path, Path], page: str) -> None:
    """Prevents two tables of the same figures from drifting apart."""
    evaluation = make_evaluation("[bold]third[/bold] kind")
    tables = {
        "Time and memory": memory_table(read_plan(directories[0])),
        "Held-out answers": accuracy_table(evaluation),
        "Data": sources_table(make_lengths("documents"), most=12),
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
        if heading == "Time and memory":
            shown = [row[:-1] for row in shown]  # the run's peak
        assert printed == shown


def test_split_draws_every_layer_once_and_hatches_recomputed(
    directories: tuple[Path, Path],
) -> None:
    """Prevents a picture of another split than the plan's."""
    drawn = split_figure(read_plan(directories[0])).drawn
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
    assert [text.get_text() for text in drawn.legends[0].texts] == [
        "embedding, projector, head",
        "vision layer, recomputed",
        "vision layer",
        "language layer",
        "language layer, recomputed",
    ]


def test_pack_density_draws_every_cell(page: str) -> None:
    """Prevents packs that the density leaves out, and figures of fill that are not the packs'."""
    packs = make_packs(make_lengths("documents"))
    # 640 tokens over 64 cells: 10 tokens a cell, one tile a cell.
    cells = {
        (tiles, tokens // 10 * 10)
        for tiles, tokens in zip(packs.column("tiles"), packs.tokens, strict=True)
    }
    axes = packs_figure(packs, CAPS).drawn.axes[0]
    drawn = [tuple(point) for shade in axes.collections for point in shade.get_offsets()]
    assert len(drawn) == len(cells)
    assert set(drawn) == cells
    assert sorted(line.get_xdata()[0] or line.get_ydata()[0] for line in axes.lines) == [12, 640]
    text = Page(page).text
    assert f"fill of tiles {100 * packs.column('tiles').sum() / (12 * len(packs)):.1f} %" in text
    assert f"fill of tokens {100 * packs.tokens.sum() / (640 * len(packs)):.1f} %" in text


def test_lengths_are_drawn_by_source() -> None:
    """Prevents quartiles of another source than the row's name, or of the wrong feature."""
    lengths = make_lengths("documents")
    tiles, tokens = lengths_figure(lengths, most=2).drawn.axes
    names = [label.get_text() for label in tiles.get_yticklabels()]
    counts = np.bincount(lengths.source)
    order = np.argsort(-counts)
    assert names == [*(lengths.source_names[i] for i in order[:2]), "1 smaller sources", "all"]
    medians = [line.get_xdata()[0] for line in tokens.lines if line.get_linewidth() == 2.5]
    expected = [np.median(lengths.tokens[lengths.source == i]) for i in order]
    assert medians == [*expected, np.median(lengths.tokens)]


def test_page_needs_nothing_else(page: str) -> None:
    """Prevents a page that loads or runs something, or that cannot be followed without sight."""
    parsed = Page(page)
    assert not re.search(r"https?:|//\w|url\((?!#)|@import", page)
    assert parsed.names.isdisjoint({"script", "link", "img", "iframe", "object", "embed"})
    drawings = [attrs for tag, attrs in parsed.tags if tag == "svg"]
    assert len(drawings) > 8
    assert all(attrs["aria-label"] for attrs in drawings)


def test_timeline_draws_every_pass_of_the_simulated_step(directories: tuple[Path, Path]) -> None:
    """Prevents a schedule with passes missing, two at once on one stage, or on another scale."""
    lengths = make_lengths("documents")
    packs, files = make_packs(lengths), files_of(directories[0])
    figure = timeline_figure(files.plan, files.job, packs, lengths)
    cost = analytic_cost(files.plan.model, files.plan.cluster, files.plan.parallel, "fp32")
    times = stage_times(cost, STAGES, pack_features(packs.packs, lengths, cost.features))
    number = int(re.search(r"Step (\d+) as simulated", figure.title)[1])
    rows = (packs.step == number) & (packs.dp_rank == 0)
    step = simulate_step(
        times.forward_ms[rows],
        times.backward_ms[rows],
        times.forward_link_ms[rows],
        times.backward_link_ms[rows],
    )
    drawn: dict[int, list[tuple[float, float]]] = {}
    for bar in figure.drawn.axes[0].patches:
        drawn.setdefault(round(bar.get_y() + 0.4), []).append(
            (bar.get_x(), bar.get_x() + bar.get_width())
        )
    assert len(drawn) == len(STAGES)
    for stage, boxes in drawn.items():
        ends = [(s[:, stage], step.end_ms[kind][:, stage]) for kind, s in step.start_ms.items()]
        expected = np.concatenate([np.stack(pair, axis=1) for pair in ends])
        np.testing.assert_allclose(np.sort(boxes, axis=0), np.sort(expected, axis=0))
        boxes.sort()
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(boxes))


def test_shapes_only_plan_is_drawn_per_step(tmp_path: Path) -> None:
    """Prevents an invented rate and duration, and one micro-batch's times in a step's bars."""
    plan = write_plan_directory(tmp_path / "plan", data=False, shapes=True)
    unknown = {"samples_per_second_per_gpu": None, "gpu_days": None}
    prediction = plan.prediction.model_copy(update=unknown)
    write_plan(plan.model_copy(update={"prediction": prediction}), tmp_path / "plan")
    page = reported(tmp_path)
    assert "Samples per second" not in page
    assert "Whole training" not in page
    updates_ms = []
    for stage, row in zip(PREDICTION.stages, rows_under(page, "Stages"), strict=True):
        assert row[4] == f"{stage.forward_ms:.2f}"
        update_ms = PREDICTION.step_ms * (1 - stage.wait_fraction) - MICRO_BATCHES * (
            stage.forward_ms + stage.backward_ms
        )
        updates_ms.append(max(update_ms, 0.0))
    shapes_only = read_plan(tmp_path / "plan")
    drawn = time_figure(shapes_only, figures_by_source(shapes_only, None, None)).drawn
    [update] = [bars for bars in drawn.axes[0].containers if bars.get_label() == "update"]
    assert [bar.get_width() for bar in update] == pytest.approx(updates_ms)
    assert "4 micro-batches under 1F1B" in page
    assert "<h2>Data</h2>" not in page


def test_representative_step_is_full_and_of_median_load() -> None:
    """Prevents the short last step, or an outlier, from standing for the run."""
    packs = make_packs(make_lengths("documents"))
    rows = np.flatnonzero(packs.step < 6)[:-1]  # Five full steps and one that lacks a pack.
    rows = rows[~((packs.step[rows] == 5) & (packs.dp_rank[rows] == 0) & (packs.slot[rows] == 3))]
    part = packs.take(rows)
    load = np.array([[9, 1, 5, 2, 7, 4][step] for step in part.step], float)
    assert representative_step(Workload.of(part, np.zeros((len(part), 1)), 2), load) == 2


def test_same_input_same_bytes(directories: tuple[Path, Path], page: str, tmp_path: Path) -> None:
    """Prevents timestamps, paths and unordered sets from making two reports of one run differ."""
    plan_directory, run_directory = (
        shutil.copytree(directory, tmp_path / f"other {directory.name}")
        for directory in directories
    )
    write_report(files_of(plan_directory), run_directory, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text("ascii") == page
    assert not list(tmp_path.glob("*.part"))


def test_text_of_the_data_stays_text(tmp_path: Path) -> None:
    """Prevents names, questions and answers of the data from becoming part of the page's code."""
    write_plan_directory(tmp_path / "plan", text=HOSTILE)
    write_run_directory(tmp_path / "run", text=HOSTILE)
    parsed = Page(reported(tmp_path, "run"))
    assert parsed.names.isdisjoint({"script", "img"})
    assert not any(name.startswith("on") for _, attrs in parsed.tags for name in attrs)
    # Title, headline, device, kind on the card and in the table, question, source.
    assert parsed.text.count(HOSTILE) == 7


@pytest.mark.parametrize(
    ("parts", "shown", "hidden"),
    [
        ({"data": False}, ["Stages", "Time and memory"], ["Data", "Training"]),
        ({"prediction": False}, ["Stages", "Data"], ["Time and memory", "Training"]),
        ({"data": False, "prediction": False}, ["Stages"], ["Data", "Time and memory"]),
    ],
)
def test_page_of_a_partial_plan(
    tmp_path: Path, parts: dict[str, bool], shown: list[str], hidden: list[str]
) -> None:
    """Prevents a crash, or an empty section, where the plan holds less than everything."""
    write_plan_directory(tmp_path / "plan", **parts)
    page = reported(tmp_path)
    assert "no run was given" in Page(page).text
    assert all(f"<h2>{title}</h2>" in page for title in shown)
    assert not any(f"<h2>{title}</h2>" in page for title in hidden)


@pytest.mark.parametrize("steps", [1, 2, 8_000])
def test_page_of_a_short_or_long_run(tmp_path: Path, steps: int) -> None:
    """Prevents a crash on one step, and a page that grows with the length of the run."""
    write_plan_directory(tmp_path / "plan")
    write_run_directory(tmp_path / "run", steps=steps)
    assert f"{steps:,} steps, 0 to {steps - 1:,}" in Page(reported(tmp_path, "run")).text
    assert (tmp_path / "r.html").stat().st_size < 400_000


def test_diverged_run_is_said_to_have_diverged(tmp_path: Path) -> None:
    """Prevents losses that are not numbers from breaking the page or vanishing from it."""
    write_plan_directory(tmp_path / "plan")
    records = write_run_directory(tmp_path / "run", steps=20)
    broken = [
        record.model_copy(update={"loss": float("nan")}) if record.step >= 15 else record
        for record in records
    ]
    lines = [record.model_dump_json() for record in broken]
    (tmp_path / "run" / RUN_FILE).write_text(
        "\n".join([*lines, ""]).replace('"loss":null', '"loss":NaN')
    )
    text = Page(reported(tmp_path, "run")).text
    assert "Steps without a finite value: 5." in text
    assert "\N{RIGHTWARDS ARROW} nan" in text


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    """Prevents a report that compares a plan with another plan's packs, run or replay."""
    plan = write_plan_directory(tmp_path / "plan")
    write_run_directory(tmp_path / "run", steps=2)
    one_stage = plan.model_copy(update={"stages": STAGES[:1], "prediction": None})
    write_plan(one_stage, tmp_path / "plan")
    with pytest.raises(UserError, match="2 pipeline stages and the plan 1"):
        reported(tmp_path, "run")
    write_plan(plan, tmp_path / "plan")
    info = RunInfo(model="internvl-digits", packs_sha256="0" * 64)
    write_run_info(info, tmp_path / "run")
    with pytest.raises(UserError, match="trained packs of sha256 000000000000"):
        reported(tmp_path, "run")
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(UserError, match=r"run\.json: no such file"):
        reported(tmp_path, "run")
    write_lengths(make_lengths("another name"), tmp_path / "plan" / LENGTHS_FILE)
    with pytest.raises(UserError, match=r"lengths\.parquet has the content hash"):
        reported(tmp_path)
    write_plan(plan.model_copy(update={"data": None}), tmp_path / "plan")
    with pytest.raises(UserError, match="has no steps to replay"):
        reported(tmp_path, "replay")
    assert not (tmp_path / "r.html").exists()


def test_held_out_loss_and_incidents_are_shown(tmp_path: Path) -> None:
    """Prevents: validations that cost time and are shown nowhere, and a run that looks clean."""
    write_plan_directory(tmp_path / "plan")
    records = write_run_directory(tmp_path / "run")
    records[5] = records[5].model_copy(update={"skipped": True, "loss": float("nan")})
    records[9] = records[9].model_copy(update={"spike": True, "replaced_samples": 3})
    for step, retries in ((4, (1, 2)), (7, (3, 0))):
        stages = tuple(
            stage.model_copy(update={"allocation_retries": count})
            for stage, count in zip(records[step].stages, retries, strict=True)
        )
        records[step] = records[step].model_copy(update={"stages": stages})
    lines = [record.model_dump_json() for record in records]
    (tmp_path / "run" / RUN_FILE).write_text("\n".join(lines) + "\n")
    for step in (40, 80):
        validation = ValidationRecord(step=step, loss=1.25, loss_tokens=10, seconds=1.0)
        append_record(validation, tmp_path / "run" / VALIDATION_FILE)
    words = " ".join(Page(reported(tmp_path, "run")).words)
    assert "held-out data, 1.25 at the end" in words
    assert "skipped steps: 1, spikes of the loss: 1, unreadable samples passed over: 3" in words
    assert "retries of allocations: 5" in words
    assert "Provider of the run's layers te" in words


def test_curve_shows_what_it_can() -> None:
    """Prevents one slow step that flattens a curve, and points or validations that are lost."""
    records = make_records(STEPS)
    values = [record.step_ms for record in records]
    held_out = [(39, 180.0), (79, float("nan")), (119, 170.0)]
    figure = curve_figure(
        "Step time", records, values, "ms", predicted=150.0, held_out=held_out, from_zero=True
    )
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
def replays(directories: tuple[Path, Path]) -> list[StageReplay]:
    return write_replay_of(directories[0].parent)


@pytest.fixture(scope="module")
def three_columns(directories: tuple[Path, Path], replays: list[StageReplay]) -> str:
    return reported(directories[0].parent, "run", "replay")


def test_replayed_times_stand_between_predicted_and_measured(
    page: str, three_columns: str, replays: list[StageReplay]
) -> None:
    """Prevents a replay's time of other steps, ranks or units beside the run's and prediction's."""
    before, after = rows_under(page, "Stages"), rows_under(three_columns, "Stages")
    rank_steps = len(REPLAYED) * DP
    for old, new, replay in zip(before, after, replays, strict=True):
        replayed = [new.pop(column) for column in (11, 8, 5)]
        assert new == old
        assert replayed[2] == f"{sum(replay.forward_ms) / rank_steps / MICRO_BATCHES:.2f}"
        assert replayed[1] == f"{sum(replay.backward_ms) / rank_steps / MICRO_BATCHES:.2f}"
    assert len(after[0]) + 3 == 4 + 3 * 3 + 1
    head = three_columns.split("<h2>Stages</h2>")[1].split("</thead>")[0]
    heads = re.findall(r"<th[^>]*>([\w ]+)</th>", head)
    assert heads[-10:] == [*(["predicted", "replayed", "measured"] * 3), "also holds"]


def test_replay_has_its_own_step_bubble_and_memory(
    directories: tuple[Path, Path], three_columns: str, replays: list[StageReplay]
) -> None:
    """Prevents a replay's deviation from other steps' prediction."""
    files = files_of(directories[0])
    plan, workload = files.plan, files.job.workload(*files.data, files.plan.pack_levels)
    replay = read_replay(directories[0].parent / "replay", plan, files.job.cost, workload)
    text = Page(three_columns).text
    error = 1 - replay.predicted_step_ms / replay.step_ms
    of_these = f"{milliseconds(replay.predicted_step_ms)}, {100 * error:.1f} % too low"
    assert f"replayed {milliseconds(replay.step_ms)}; for the replayed steps the cost" in text
    assert f"model says {of_these}" in text
    assert f"predicted 13.4 %; replayed {100 * replay.idle_fraction:.1f} %" in text
    # Activations of 1 and 2 GiB on 0.5 GiB of weights; predicted is all but the working memory.
    assert "2.50 GiB replayed where 2.41 were predicted" in text
    rows = rows_under(three_columns, "Time and memory")
    assert [row[8:] for row in rows] == [["2.97", "1.50", "3.41"], ["2.41", "2.50", "3.11"]]
    assert "A replay on a CPU measures no working memory" in text
    drawn = memory_figure(plan, figures_by_source(plan, None, replay)).drawn
    peaks, usable = drawn.axes[0].lines
    assert peaks.get_xdata().tolist() == pytest.approx([1.5, 2.5])
    assert usable.get_xdata()[0] == pytest.approx(3.6)
    lost = lost_time_table(plan, replay)
    ideal = f"{replay.lost.ideal_ms:.1f}", f"{100 * replay.lost.ideal_ms / replay.step_ms:.1f} %"
    assert lost.sections[0][0] == ["ideal", "141.0", "75.2 %", *ideal]
    assert lost.sections[1][0][1::2] == ["187.5", f"{replay.step_ms:.1f}"]
    assert "3, 50, 110, on one device" in text


def test_page_of_a_replay_alone(tmp_path: Path) -> None:
    """Prevents a replay that needs a run or a prediction, and code in the name of its device."""
    write_plan_directory(tmp_path / "plan", prediction=False)
    write_replay_of(tmp_path, device=HOSTILE, repetitions=1, processes=2, content="data")
    parsed = Page(page := reported(tmp_path, "replay"))
    assert parsed.names.isdisjoint({"script", "img"})
    # In the note and under provenance.
    assert parsed.text.count(HOSTILE) == 2
    assert "(2 processes shared them), with the samples of the data; measured once" in parsed.text
    assert "no run was given" not in parsed.text
    assert "<small>predicted" not in parsed.text
    assert len(rows_under(page, "Stages")[0]) == 4 + 3 + 1
