"""Tables of a plan, its lengths, its replay and its run, for terminals and the page."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from omnibal.job.plan import DataPlan, MixtureSeen, Plan
from omnibal.job.published_errors import errors_of_plan
from omnibal.job.replay import ReplaySummary
from omnibal.job.runlog import Evaluation, StepRecord
from omnibal.model.limits import memory_cap_gib
from omnibal.packing.balance_metrics import PackMetrics
from omnibal.report.formatting import (
    EN_DASH,
    align_decimals,
    describe_sharding,
    number,
    percent,
    shorten,
)
from omnibal.report.summary import (
    RunSummary,
    accuracy_interval,
    figures_by_source,
    is_right,
    micro_batches_per_step,
    replayed_peaks_as_predicted,
    telling_examples,
)
from omnibal.report.table import Cell, Column, Facts, Marked, Style, Table

_EXAMPLES_SHOWN = 12  # rows before a table is longer than a screen
_TEXT_LIMIT = 160  # characters: about three lines of a cell


Filled = tuple[Column, Sequence[Cell]]  # a column with its cells


def _column(title: str, cells: Sequence[Cell], style: Style = "", group: str = "") -> Filled:
    return Column(title=title, style=style, group=group), cells


def _aligned_columns(
    group: str, series: Mapping[str, Sequence[float]], at_least: int = 0
) -> list[Filled]:
    """Return a column per non-empty series by name, all with equal decimals."""
    cells = iter(
        align_decimals([value for values in series.values() for value in values], at_least)
    )
    bold = ("peak", "replayed", "measured")
    return [
        _column(name, list(islice(cells, len(values))), "bold" if name in bold else "", group)
        for name, values in series.items()
        if values
    ]


def stages_table(
    plan: Plan, run: RunSummary | None = None, replay: ReplaySummary | None = None
) -> Table:
    """Return units, times per micro-batch and idle share by stage; encoders' times are per step."""
    towers, merged = plan.pipeline_model.towers, plan.merge_chunks(plan.stages)
    at_levels = [plan.merge_chunks(stages) for stages in plan.stages_at_levels]
    sources, count = figures_by_source(plan, run, replay), micro_batches_per_step(plan) or 1.0

    def of_sources(title: str, digits: int, values: Mapping[str, list[float]]) -> list[Filled]:
        texts = {name: [f"{x:,.{digits}f}" for x in column] for name, column in values.items()}
        if len(texts) == 1:
            return [_column(title, next(iter(texts.values())))]
        return [_column(name, column, group=title) for name, column in texts.items()]

    def times(field: str, per: float) -> dict[str, list[float]]:
        timed = {name: figures.stages for name, figures in sources.items() if figures.stages}
        return {
            name: [getattr(time, field) / per for time in stages] for name, stages in timed.items()
        }

    recomputed = [
        " / ".join(
            " + ".join(str(len(stages[index].recomputed_in(tower))) for tower in towers)
            for stages in at_levels
        )
        for index in range(len(merged))
    ]
    other_units = [
        ", ".join(span.name for span in stage.units if span.layers is None) for stage in merged
    ]
    layers = {name: [str(stage.number_of_layers(name)) for stage in merged] for name in towers}
    columns = [
        _column("stage", [str(index) for index in range(len(merged))]),
        *(_column(name, cells) for name, cells in layers.items()),
        _column("recompute\nby level" if plan.levels else "recompute", recomputed),
        *of_sources("forward\nms", 2, times("forward_ms", count)),
        *of_sources("backward\nms", 2, times("backward_ms", count)),
    ]
    # Encoders' phases are per step. A prediction alone lists them in its facts.
    if len(sources) > 1 and any(any(ms) for ms in times("encoder_ms", 1).values()):
        columns += of_sources("encoders\nms", 1, times("encoder_ms", 1))
        columns += of_sources("exchange\nms", 1, times("exchange_ms", 1))
    idle = {
        name: [100 * share for share in figures.wait_fractions] for name, figures in sources.items()
    }
    columns += of_sources("idle\n%", 1, idle)
    columns.append(_column("other units", other_units, "wrap"))
    mean = f" Replayed: mean of {len(replay.info.steps):,} of the steps." if replay else ""
    slow = [f"{rank} takes {rank.factor:.2f} times" for rank in run.slow_ranks] if run else []
    slower = f" Slow: {', '.join(slow)} the median rank's time." if slow else ""
    caption = f"Times of a micro-batch; backward includes recomputation.{mean}{slower}"
    return Table.of_columns("Stages", columns, caption)


def peak_table(
    plan: Plan, run: RunSummary | None = None, replay: ReplaySummary | None = None
) -> Table | None:
    """Return predicted memory by kind, and peaks by source and stage. None without any source."""
    cap_gib = memory_cap_gib(plan.cluster)
    encoders = plan.prediction.data_parallel_encoders if plan.prediction else None
    names = [str(stage) for stage in range(plan.parallel.pipeline)]
    memories = [stage.memory for stage in plan.prediction.stages] if plan.prediction else []
    caption = "Memory of one device of each stage at the peak of the step; usable are "
    caption += f"{number(cap_gib)} GiB."
    if encoders is not None and plan.data_parallel_encoders is not None:
        names.append("encoders")
        memories.append(encoders.memory)
        sharding = describe_sharding(plan.parallel, plan.data_parallel_encoders.sharded)
        caption += " Data-parallel encoders: their part of a device that embeds tokens"
        caption += f"; weights are {sharding}."
    columns = [_column("stage", names, "left")]
    if memories:
        sizes = {
            "weights": [memory.weights_gib for memory in memories],
            "gradients": [memory.gradients_gib for memory in memories],
            "optimizer": [memory.optimizer_gib for memory in memories],
            "activations": [memory.activations_gib for memory in memories],
            "working": [memory.transient_gib for memory in memories],
            "peak": [memory.peak_gib for memory in memories],
        }
        shares = [Marked.share(memory.peak_gib / cap_gib) for memory in memories]
        columns += _aligned_columns("predicted, GiB", sizes, at_least=2)
        columns.append(_column("of usable", shares, group="predicted, GiB"))
    if replay:
        peaks = {
            "predicted": replayed_peaks_as_predicted(plan, replay),
            "peak": [stage.peak_gib for stage in replay.stages],
        }
        columns += _aligned_columns("replayed, GiB", peaks)
        if not all(stage.with_working_memory for stage in replay.stages):
            caption += " A replay on a CPU measures no working memory; its predicted peak has "
            caption += "none either."
    if run and not run.is_on_cpu:  # on a CPU the processes hold Python and torch too
        columns += _aligned_columns("measured, GiB", {"peak": run.peak_gib})
    if len(columns) == 1:
        return None
    return Table.of_columns(f"Memory, GiB of {cap_gib:.2f}", columns, caption)


def accuracy_table(evaluation: Evaluation) -> Table | None:
    """Return exact answers by kind with 95 % intervals and chance rate, or None without kinds."""
    if not evaluation.kinds:
        return None
    rows = [
        (
            kind.kind,
            f"{kind.questions:,}",
            f"{kind.correct:,}",
            percent(kind.accuracy),
            f"{100 * low:.1f} {EN_DASH} {percent(high)}",
            percent(kind.chance),
        )
        for kind in evaluation.kinds
        for low, high in [accuracy_interval(kind)]
    ]
    question = Column(title="kind of question", style="left")
    accuracy = Column(title="accuracy", style="bold")
    titles = (question, "questions", "correct", accuracy, "95 % interval", "chance")
    caption = f"Exact matches after step {evaluation.step:,}. Chance: the best constant answer."
    return Table.of_rows("Held-out answers, exact", titles, rows, caption=caption)


def answers_table(evaluation: Evaluation) -> Table | None:
    """Return a few questions of every kind, right and wrong, or None without examples."""
    examples = telling_examples(evaluation, _EXAMPLES_SHOWN)
    if not examples:
        return None
    right = Marked("\N{CHECK MARK}", "good", "right")
    wrong = Marked("\N{BALLOT X}", "bad", "wrong")
    rows: list[list[Cell]] = []
    for answer in examples:
        texts = (answer.kind, answer.question, answer.expected, answer.answered, answer.sample)
        sign = right if is_right(answer) else wrong
        rows.append([sign, *(shorten(text, _TEXT_LIMIT) for text in texts)])
    titles = ("kind", "question", "expected", "answered", "sample")
    wide = (Column(title=title, style="wrap") for title in titles)
    caption = "Right and wrong examples of every kind, not in proportion."
    return Table.of_rows("Examples", (Column(title="", style="mark"), *wide), rows, caption=caption)


def packing_facts(metrics: PackMetrics, load: str, data: DataPlan | None = None) -> Facts:
    """Return fill, balance and communication of packs; `load` is what the straggler factor sums."""
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
        count = f"{'at most ' if data.packs_are_maxima else ''}{data.micro_batches_per_step}"
        entries += [
            ("micro-batches of a rank in a step", count),
            ("method", _describe_packing(data)),
        ]
    return Facts("Packs", entries)


def mixture_table(mixture: MixtureSeen) -> Table:
    """Return the epochs of every source trained by some steps."""
    rows: list[list[Cell]] = [
        [
            source.name,
            f"{source.samples:,}",
            *(f"{seen / max(source.samples, 1):.2f}" for seen in source.seen),
        ]
        for source in mixture.sources
    ]
    steps = (f"step {step:,}" for step in mixture.by_step)
    caption = "Epochs of a source that were trained by each step."
    return Table.of_rows("Mixture", ["source", "samples", *steps], rows, caption=caption)


def provenance_facts(
    plan: Plan, replay: ReplaySummary | None, run: RunSummary | None, records: Sequence[StepRecord]
) -> Facts:
    entries: dict[str, str | Marked] = {
        "Plan schema": f"version {plan.schema_version}",
        "Cluster": f"{plan.cluster.name}, {plan.cluster.memory_gib:g} GiB a device",
    }
    if plan.prediction:
        entries["Costs from"] = plan.prediction.cost_source
        entries["Error of such predictions"] = str(errors_of_plan(plan))
    if plan.data:
        entries["Packs made by"] = _describe_packing(plan.data)
        entries["Lengths"] = _hash_mark(plan.data.lengths_sha256)
        entries["Packs"] = _hash_mark(plan.data.packs_sha256)
    if plan.data and plan.data.origin:
        entries["Data"] = _hash_mark(plan.data.origin.data_sha256)
        entries["Tokenizer"] = _hash_mark(plan.data.origin.tokenizer_sha256)
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


def _describe_packing(data: DataPlan) -> str:
    method = data.method.replace("_", " ")
    if data.window is None:
        return f"{method}, seed {data.seed}"
    return f"{method}, in windows of {data.window:,} samples in their order"


def _hash_mark(value: str) -> Marked:
    return Marked(f"sha256 {value}", "code")


def sources_table(statistics: Sequence[Mapping[str, Any]]) -> Table:
    """Return counts, mean and max lengths of samples by source, and of all, the last entry."""
    quantities = [name for name in statistics[0] if name not in ("source", "samples")]
    digits = {"max": 0, "mean": 2}

    def row(entry: Mapping[str, Any]) -> list[str]:
        cells = [entry["source"], f"{entry['samples']:,}"]
        for name in quantities:
            places = 1 if name == "tokens_mean" else digits[name.rpartition("_")[2]]
            cells.append("-" if entry[name] is None else f"{entry[name]:,.{places}f}")
        return cells

    *sources, all_samples = map(row, statistics)
    titles = [" ".join(name.rsplit("_", 1)) for name in quantities]
    source = Column(title="source", style="wrap")
    return Table.of_rows("Sample lengths", [source, "samples", *titles], sources, [all_samples])
