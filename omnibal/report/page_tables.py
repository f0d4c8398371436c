"""Tables of the page, and those that commands print too: exact numbers under the figures."""

from collections.abc import Mapping, Sequence
from itertools import islice

from omnibal.job.fake_replay import FakeStage
from omnibal.job.plan import DataPlan, MixtureSeen, Plan
from omnibal.job.replay import ReplaySummary
from omnibal.job.runlog import Evaluation, KindAccuracy, StepRecord
from omnibal.model.limits import memory_cap_gib
from omnibal.pipeline.prediction import StageMemory
from omnibal.report.fake_device_tables import difference_cells
from omnibal.report.formatting import EN_DASH, aligned, held_encoders, number, percent, shorten
from omnibal.report.summary import (
    RunSummary,
    accuracy_interval,
    figures_by_source,
    is_right,
    memory_parts,
    micro_batches_per_step,
    recomputed_layers,
    replayed_peaks_as_predicted,
    telling_examples,
)
from omnibal.report.table import Cell, Column, Facts, Marked, Style, Table
from omnibal.steps.metrics import PackMetrics

_EXAMPLES_SHOWN = 12  # rows before a table is longer than a screen
_TEXT_LIMIT = 160  # characters: about three lines of a cell


def _column(
    title: str, cells: Sequence[Cell], style: Style = "", group: str = ""
) -> tuple[Column, Sequence[Cell]]:
    return Column(title=title, style=style, group=group), cells


def _beside(
    group: str, series: Mapping[str, Sequence[float]], at_least: int = 0
) -> list[tuple[Column, Sequence[Cell]]]:
    """A column of each named series, all with equal decimals; an empty one is left out."""
    cells = iter(aligned([value for values in series.values() for value in values], at_least))
    bold = ("peak", "replayed", "measured")
    return [
        _column(name, list(islice(cells, len(values))), "bold" if name in bold else "", group)
        for name, values in series.items()
        if values
    ]


def stage_table(plan: Plan, run: RunSummary | None, replay: ReplaySummary | None) -> Table:
    """Layers, times per step and waiting of every stage: predicted, replayed and measured."""
    stages, sources = plan.held(plan.stages), figures_by_source(plan, run, replay)
    towers = plan.pipeline_model.towers
    counts = {tower: [str(stage.number_of_layers(tower)) for stage in stages] for tower in towers}
    counts["recomputed by level" if plan.levels else "recomputed"] = recomputed_layers(plan)

    def times(group: str, field: str) -> list[tuple[Column, Sequence[Cell]]]:
        of = {k: [getattr(time, field) for time in one.stages] for k, one in sources.items()}
        return _beside(group, of)

    columns = [
        _column("stage", [str(i) for i in range(len(stages))], "left"),
        *(_column(name, of, group="layers") for name, of in counts.items()),
        *times("forward, ms", "forward_ms"),
        *times("backward, ms", "backward_ms"),
    ]
    if any(time.encoder_ms for one in sources.values() for time in one.stages):
        columns += times("encoders, ms", "encoder_ms") + times("exchange, ms", "exchange_ms")
    waits = {k: [100 * share for share in one.wait_fractions] for k, one in sources.items()}
    count = micro_batches_per_step(plan)
    per = f"Times of a step of {count:.4g} micro-batches; " if count else ""
    mean = f" Replayed: mean of {len(replay.info.steps):,} of the steps." if replay else ""
    slow = [f"{one} takes {one.factor:.2f} times" for one in run.slow_ranks] if run else []
    slower = f" Slow: {', '.join(slow)} the median rank's time." if slow else ""
    caption = f"{per}backward includes recomputation.{mean}{slower}"
    return Table.of_columns("Stages", columns + _beside("waiting, %", waits), caption)


def memory_table(
    plan: Plan,
    run: RunSummary | None = None,
    replay: ReplaySummary | None = None,
    fake_stages: Sequence[FakeStage] = (),
) -> Table | None:
    """Predicted memory by kind, the sum against the device's, and the peak by other sources.

    The replayed peak is shown beside its predicted value, and that allocated on a fake device
    beside its own; the last row is of data-parallel encoders, if there are any. None if there
    is nothing to show.
    """
    cap_gib = memory_cap_gib(plan.cluster)
    beside = plan.prediction.beside if plan.prediction else None
    names = [str(stage) for stage in range(plan.parallel.pipeline)]
    memories = [stage.memory for stage in plan.prediction.stages] if plan.prediction else []
    caption = "Memory of one device of each stage at the peak of the step; usable are "
    caption += f"{number(cap_gib)} GiB."
    if beside is not None and plan.beside is not None:
        names.append("encoders")
        memories.append(beside.memory)
        caption += " Data-parallel encoders: their part of a device that embeds tokens"
        caption += f"; weights are {held_encoders(plan.parallel, plan.beside.sharded)}."
    columns = [_column("stage", names, "left")]
    if memories:
        columns += _predicted_memory(memories, cap_gib)
    if replay:
        peaks = {
            "predicted": replayed_peaks_as_predicted(plan, replay),
            "peak": [stage.peak_gib for stage in replay.stages],
        }
        columns += _beside("replayed, GiB", peaks)
        if not all(stage.with_working_memory for stage in replay.stages):
            caption += " A replay on a CPU measures no working memory: predicted beside it is "
            caption += "the rest."
    if fake_stages:
        by_stage = {one.stage: difference_cells(one) for one in fake_stages}
        cells = zip(
            *(by_stage.get(i, [""] * 3) for i in range(plan.parallel.pipeline)), strict=True
        )
        for title, column in zip(("predicted", "allocated", "difference"), cells, strict=True):
            style: Style = "bold" if title == "allocated" else ""
            columns.append(_column(title, column, style, "fake device, GiB"))
        caption += " Fake device: what the code would allocate, counted without a device."
    if run:
        columns += _beside("measured, GiB", {"peak": run.peak_gib})
    if len(columns) == 1:
        return None
    filled = [(one, [*cells, *[""] * (len(names) - len(cells))]) for one, cells in columns]
    return Table.of_columns(f"Memory, GiB of {cap_gib:.2f}", filled, caption)


def _predicted_memory(
    memories: Sequence[StageMemory], cap_gib: float
) -> list[tuple[Column, Sequence[Cell]]]:
    parts = [memory_parts(memory) | {"peak": memory.peak_gib} for memory in memories]
    sizes = {kind: [part[kind] for part in parts] for kind in parts[0]}
    shares = [memory.peak_gib / cap_gib for memory in memories]
    return [
        *_beside("predicted, GiB", sizes, at_least=2),
        _column("of usable", [Marked.share(share) for share in shares], group="predicted, GiB"),
    ]


def accuracy_table(evaluation: Evaluation) -> Table | None:
    """Exact answers by kind with their 95 % interval, beside chance; None without kinds."""
    if not evaluation.kinds:
        return None
    return Table.of_records(
        "Held-out answers, exact",
        evaluation.kinds,
        {
            Column(title="kind of question", style="left"): lambda kind: kind.kind,
            "questions": lambda kind: f"{kind.questions:,}",
            "correct": lambda kind: f"{kind.correct:,}",
            Column(title="accuracy", style="bold"): lambda kind: percent(kind.accuracy),
            "95 % interval": _interval,
            "chance": lambda kind: percent(kind.chance),
        },
        f"Exact matches after step {evaluation.step:,}. Chance is the best "
        "that one constant answer reaches.",
    )


def _interval(kind: KindAccuracy) -> str:
    low, high = accuracy_interval(kind)
    return f"{100 * low:.1f} {EN_DASH} {percent(high)}"


def answers_table(evaluation: Evaluation) -> Table | None:
    """A few questions of every kind, right and wrong ones; None without any."""
    examples = telling_examples(evaluation, _EXAMPLES_SHOWN)
    if not examples:
        return None
    right = Marked("\N{CHECK MARK}", "good", "right")
    wrong = Marked("\N{BALLOT X}", "bad", "wrong")
    rows: list[list[Cell]] = []
    for one in examples:
        texts = (one.kind, one.question, one.expected, one.answered, one.sample)
        sign = right if is_right(one) else wrong
        rows.append([sign, *(shorten(text, _TEXT_LIMIT) for text in texts)])
    titles = ("kind", "question", "expected", "answered", "sample")
    wide = (Column(title=title, style="wrap") for title in titles)
    caption = "Examples, right and wrong ones of every kind; not in proportion."
    return Table.of_rows("Examples", (Column(title="", style="mark"), *wide), rows, caption=caption)


def packing_facts(metrics: PackMetrics, load: str, data: DataPlan | None = None) -> Facts:
    """Figures of packs: how full they are, how even over ranks, and what ranks exchange.

    Args:
        load: by which the straggler factor is measured.
        data: of the plan that the packs are of, whose steps and method are said too.
    """
    samples = f"{metrics.packed:,} of {metrics.samples:,}, {metrics.samples_per_pack:.3g} a pack"
    entries = [
        ("samples packed", samples),
        ("packs", f"{metrics.packs:,}"),
        ("packs needed at least", f"{metrics.packs_lower_bound:,}"),
        ("gap to bound", f"{100 * metrics.gap:.2f} %"),
        *((f"fill of {name}", percent(share)) for name, share in metrics.fill.items()),
        ("pad ratio", f"{metrics.pad_ratio:.4f}"),
        *((f"dist ratio of {name}", f"{ratio:.4f}") for name, ratio in metrics.dist_ratio.items()),
        ("attention balance ratio", f"{metrics.attention_balance_ratio:.4f}"),
        ("ABR lower bound", f"{metrics.least_attention_balance_ratio:.4f}"),
        ("communication ratio", f"{metrics.communication_ratio:.4f}"),
        ("exchanged ratio", f"{metrics.exchanged_ratio:.4f}"),
        ("tokens of a rank in a step", f"{metrics.tokens_per_rank:,.0f}"),
        ("straggler factor", f"{metrics.straggler_factor:.4f}"),
        ("straggler factor measured in", load),
        ("steps", f"{metrics.steps:,}"),
    ]
    if data is not None:
        count = f"{'' if data.window is None else 'at most '}{data.micro_batches_per_step}"
        entries += [("micro-batches of a rank in a step", count), ("method", _packed_by(data))]
    return Facts("Packs", entries)


def mixture_table(mixture: MixtureSeen) -> Table:
    """Epochs of every source of a mixture that were seen by some steps of the run."""
    rows: list[list[Cell]] = [
        [
            each.name,
            f"{each.samples:,}",
            *(f"{seen / max(each.samples, 1):.2f}" for seen in each.seen),
        ]
        for each in mixture.sources
    ]
    steps = (f"step {step:,}" for step in mixture.by_step)
    caption = "Times that a source's samples were seen by each step."
    return Table.of_rows("Mixture", ["source", "samples", *steps], rows, caption=caption)


def provenance_facts(
    plan: Plan,
    replay: ReplaySummary | None,
    run: RunSummary | None,
    records: Sequence[StepRecord],
) -> Facts:
    """Facts about the page's inputs."""
    entries: dict[str, str | Marked] = {
        "Plan schema": f"version {plan.schema_version}",
        "Cluster": f"{plan.cluster.name}, {plan.cluster.memory_gib:g} GiB a device",
    }
    if plan.prediction:
        entries["Costs from"] = plan.prediction.cost_source
    if plan.data:
        entries["Packs made by"] = _packed_by(plan.data)
        entries["Lengths"] = _sha256(plan.data.lengths_sha256)
        entries["Packs"] = _sha256(plan.data.packs_sha256)
    if plan.data and plan.data.origin:
        entries["Data"] = _sha256(plan.data.origin.data_sha256)
        entries["Tokenizer"] = _sha256(plan.data.origin.tokenizer_sha256)
    if replay:
        steps = ", ".join(f"{step:,}" for step in replay.info.steps)
        about = f"on {replay.info.device}, provider {replay.info.provider}"
        entries["Replayed steps"] = f"{steps}, {about}"
    if run:
        entries["Provider of the run's layers"] = run.provider or "not recorded"
    if records:
        first, last = records[0].step, records[-1].step
        entries["Run log"] = f"{len(records):,} steps, {first:,} to {last:,}"
    return Facts("", [*entries.items()])


def _packed_by(data: DataPlan) -> str:
    method = data.method.replace("_", " ")
    if data.window is None:
        return f"{method}, seed {data.seed}"
    return f"{method}, in windows of {data.window:,} samples in their order"


def _sha256(value: str) -> Marked:
    return Marked(f"sha256 {value}", "code")
