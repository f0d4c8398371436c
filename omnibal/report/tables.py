"""Tables of the page, and those that commands print too: exact numbers under the figures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from omnibal.data.bound import naive_lower_bound
from omnibal.data.lengths import Lengths
from omnibal.data.metrics import measure_packs
from omnibal.data.packs import ScheduledPacks
from omnibal.limits import memory_cap_gib
from omnibal.pipeline.prediction import StageMemory
from omnibal.plan import DataPlan, Plan
from omnibal.pretended import PretendedStage
from omnibal.replay import ReplaySummary
from omnibal.report.figures import MEMORY_PARTS, memory_parts, meter
from omnibal.report.pretended import difference_cells
from omnibal.report.summary import (
    RunSummary,
    StageTime,
    accuracy_interval,
    is_right,
    micro_batches_per_step,
    replayed_peaks_as_predicted,
    stage_times_by_source,
    telling_examples,
)
from omnibal.report.table import Cell, Column, Drawing, Facts, Marked, Style, Table
from omnibal.report.text import EN_DASH, aligned, number, percent, shorten
from omnibal.runlog import Evaluation, StepRecord

_EXAMPLES_SHOWN = 12
_TEXT_LIMIT = 160


def _column(
    title: str, cells: Sequence[Cell], style: Style = "", group: str = ""
) -> tuple[Column, Sequence[Cell]]:
    return Column(title=title, style=style, group=group), cells


def _beside(
    group: str, series: Mapping[str, Sequence[float]]
) -> list[tuple[Column, Sequence[Cell]]]:
    """A column of each named series, all with equal decimals; an empty one is left out."""
    cells = iter(aligned([value for values in series.values() for value in values]))
    return [
        _column(
            name, list(islice(cells, len(values))), "" if name == "predicted" else "bold", group
        )
        for name, values in series.items()
        if values
    ]


def stage_table(plan: Plan, run: RunSummary | None, replay: ReplaySummary | None) -> Table:
    """Layers, times per step and waiting of every stage: predicted, replayed and measured."""
    stages, times = plan.stages, stage_times_by_source(plan, run, replay)
    counts = {
        **{
            tower: [str(len(s.layers(tower))) for s in stages]
            for tower in plan.pipeline_model.towers
        },
        "recomputed by level" if plan.levels else "recomputed": [
            " / ".join(str(stage.recomputed_layers) for stage in at_levels)
            for at_levels in zip(*plan.stages_at_levels, strict=True)
        ],
    }
    waits = {
        "predicted": [s.wait_fraction for s in plan.prediction.stages] if plan.prediction else (),
        "replayed": replay.wait_fractions.tolist() if replay else (),
        "measured": run.wait_fractions if run else (),
    }
    columns = [
        _column("stage", [str(i) for i in range(len(stages))], "left"),
        *(_column(name, of, group="layers") for name, of in counts.items()),
        *_beside("forward, ms", {k: [time.forward_ms for time in v] for k, v in times.items()}),
        *_beside("backward, ms", {k: [time.backward_ms for time in v] for k, v in times.items()}),
        *_encoder_columns(times),
        *_beside("waiting, %", {k: [100 * share for share in v] for k, v in waits.items()}),
    ]
    count = micro_batches_per_step(plan)
    per = f"Times of a step of {count:.4g} micro-batches; " if count else ""
    mean = f" Replayed: mean of {len(replay.info.steps):,} of the steps." if replay else ""
    return Table.of_columns("Stages", columns, f"{per}backward includes recomputation.{mean}")


def _encoder_columns(
    times: Mapping[str, Sequence[StageTime]],
) -> Iterator[tuple[Column, Sequence[Cell]]]:
    """Times of encoders beside the pipeline, where there are any."""
    encoder = {source: [time.encoder_ms for time in stages] for source, stages in times.items()}
    exchange = {source: [time.exchange_ms for time in stages] for source, stages in times.items()}
    if any(map(any, encoder.values())):
        yield from _beside("encoders, ms", encoder)
        yield from _beside("exchange, ms", exchange)


_BESIDE = "encoders"


def memory_table(
    plan: Plan,
    run: RunSummary | None = None,
    replay: ReplaySummary | None = None,
    pretended: Sequence[PretendedStage] = (),
) -> Table | None:
    """Predicted memory by kind, the sum against the device's, and the peak by other sources.

    The replayed peak is shown beside its predicted value, and that allocated on a pretended device
    with the prediction's difference from it. None where there is nothing to show.
    """
    cap_gib = memory_cap_gib(plan.cluster)
    beside = plan.prediction.beside if plan.prediction else None
    names = [str(stage) for stage in range(len(plan.stages))]
    memories = [stage.memory for stage in plan.prediction.stages] if plan.prediction else []
    if beside is not None:
        names.append(_BESIDE)
        memories.append(beside.memory)
    columns = [_column("stage", names, "left")]
    if memories:
        columns += _predicted_memory(memories, cap_gib)
    caption = "Memory of one device of each stage at the peak of the step; usable are "
    caption += f"{number(cap_gib)} GiB."
    if beside is not None:
        caption += " Encoders beside the pipeline: their part of a device that embeds tokens."
    if replay:
        peaks = {
            "predicted": replayed_peaks_as_predicted(plan, replay),
            "peak": [stage.peak_gib for stage in replay.stages],
        }
        columns += _beside("replayed, GiB", peaks)
        if not all(stage.with_working_memory for stage in replay.stages):
            caption += " A replay on a CPU measures no working memory: predicted beside it is "
            caption += "the rest."
    if pretended:
        by_stage = {one.stage: difference_cells(one) for one in pretended}
        cells = [by_stage.get(stage, [""] * 3) for stage in range(len(plan.stages))]
        for index, title in enumerate(("predicted", "allocated", "difference")):
            style: Style = "bold" if title == "allocated" else ""
            column = [each[index] for each in cells]
            columns.append(_column(title, column, style, "pretended, GiB"))
        caption += " Pretended: what the code would allocate, counted without a device."
    if run:
        measured = [*aligned(run.peak_gib), *[""] * (len(names) - len(plan.stages))]
        columns.append(_column("peak", measured, "bold", "measured, GiB"))
    if len(columns) == 1:
        return None
    table = Table.of_columns(f"Memory, GiB of {cap_gib:.2f}", columns, caption)
    return replace(table, tight=True)


def _predicted_memory(
    memories: Sequence[StageMemory], cap_gib: float
) -> list[tuple[Column, Sequence[Cell]]]:
    # Aligned together and dealt out again, so that all columns get the same decimals.
    rows = [(*memory_parts(memory), memory.peak_gib) for memory in memories]
    cells, group = aligned([size for row in rows for size in row], at_least=2), "predicted, GiB"
    titles = (*MEMORY_PARTS, "peak")
    shares = [memory.peak_gib / cap_gib for memory in memories]
    verdicts = [Marked(percent(share), "good" if share <= 1 else "bad") for share in shares]
    return [
        *(
            _column(title, cells[i :: len(titles)], "bold" if title == "peak" else "", group)
            for i, title in enumerate(titles)
        ),
        _column("of usable", verdicts, group=group),
    ]


def accuracy_table(evaluation: Evaluation) -> Table | None:
    """Exact answers by kind with their 95 % interval, beside chance; None without kinds."""
    kinds = evaluation.kinds
    if not kinds:
        return None
    intervals = [accuracy_interval(kind) for kind in kinds]
    columns = [
        _column("kind of question", [kind.kind for kind in kinds], "left"),
        _column("questions", [f"{kind.questions:,}" for kind in kinds]),
        _column("correct", [f"{kind.correct:,}" for kind in kinds]),
        _column("accuracy", [percent(kind.accuracy) for kind in kinds], "bold"),
        _column(
            "95 % interval",
            [f"{100 * low:.1f} {EN_DASH} {100 * high:.1f} %" for low, high in intervals],
        ),
        _column("chance", [percent(kind.chance) for kind in kinds]),
        _column("", [Drawing(meter(kind.accuracy, kind.chance)) for kind in kinds], "drawing"),
    ]
    return Table.of_columns(
        "Held-out answers, exact",
        columns,
        f"Exact matches after step {evaluation.step:,}. Chance, the mark on the bar, is the best "
        "that one constant answer reaches.",
    )


def answers_table(evaluation: Evaluation) -> Table | None:
    """A few questions of every kind, right and wrong ones; None without any."""
    examples = telling_examples(evaluation, _EXAMPLES_SHOWN)
    if not examples:
        return None
    right = Marked("\N{CHECK MARK}", "good", "right")
    wrong = Marked("\N{BALLOT X}", "bad", "wrong")
    texts = {
        "kind": [e.kind for e in examples],
        "question": [e.question for e in examples],
        "expected": [e.expected for e in examples],
        "answered": [e.answered for e in examples],
        "sample": [e.sample for e in examples],
    }
    columns = [
        _column("", [right if is_right(example) else wrong for example in examples], "mark"),
        *(
            _column(name, [shorten(value, _TEXT_LIMIT) for value in values], "wrap")
            for name, values in texts.items()
        ),
    ]
    caption = "Examples, right and wrong ones of every kind; not in proportion."
    return Table.of_columns("Examples", columns, caption)


def packing_facts(packs: ScheduledPacks, lengths: Lengths, data: DataPlan, plan: Plan) -> Facts:
    """Facts about the micro-batches of all ranks: fill and balance, and what ranks exchange."""
    bound, dp = naive_lower_bound(lengths, data.caps), plan.parallel.data
    m = measure_packs(packs, lengths, data.caps, dp, packs.tokens, bound, plan.levels)
    entries = [
        ("Samples", f"{len(lengths):,}, {m.samples_per_pack:.3g} per pack"),
        ("Packs", f"{m.packs:,} (at least {m.packs_lower_bound:,} are needed)"),
        *(
            (f"{name.capitalize()} filled", f"{percent(m.fill[name])} of the cap")
            for name in m.fill
        ),
    ]
    if dp > 1:
        entries += [
            (f"Uneven {name}", f"{percent(ratio)} below the busiest of {dp} ranks")
            for name, ratio in m.dist_ratio.items()
        ]
        uneven = f"{percent(m.attention_balance_ratio)} below the busiest of {dp} ranks"
        entries.append(("Uneven attention", uneven))
    if plan.levels:
        divided = f"{percent(m.exchanged_ratio)} in samples that are divided"
        shared = f"{percent(m.communication_ratio)} of tokens, {divided}"
        entries.append(("In shared packs", shared))
    count = data.micro_batches_per_step
    entries += [
        ("Steps", f"{m.steps:,} of {_at_most(data)}{count} micro-batches on each of {dp} ranks"),
        ("Method", _packed_by(data)),
    ]
    return Facts("Packing", entries)


def provenance_facts(
    plan: Plan,
    replay: ReplaySummary | None,
    run: RunSummary | None,
    records: Sequence[StepRecord],
) -> Facts:
    """Facts about the page's inputs."""
    entries: list[tuple[str, str | Marked]] = [
        ("Plan schema", f"version {plan.schema_version}"),
        ("Cluster", f"{plan.cluster.name}, {plan.cluster.memory_gib:g} GiB a device"),
    ]
    if plan.prediction:
        entries += [("Costs from", plan.prediction.cost_source)]
    if plan.data:
        entries += [
            ("Packs made by", _packed_by(plan.data)),
            ("Lengths", _sha256(plan.data.lengths_sha256)),
            ("Packs", _sha256(plan.data.packs_sha256)),
        ]
    if plan.data and plan.data.origin:
        origin = plan.data.origin
        entries += [("Data", _sha256(origin.data_sha256))]
        entries += [("Tokenizer", _sha256(origin.tokenizer_sha256))]
    if replay:
        steps = ", ".join(f"{step:,}" for step in replay.info.steps)
        about = f"on {replay.info.device}, provider {replay.info.provider}"
        entries += [("Replayed steps", f"{steps}, {about}")]
    if run:
        entries += [("Provider of the run's layers", run.provider or "not recorded")]
    if records:
        seen = f"{len(records):,} steps, {records[0].step:,} to {records[-1].step:,}"
        entries += [("Run log", seen)]
    return Facts("", entries)


def _at_most(data: DataPlan) -> str:
    return "" if data.window is None else "at most "


def _packed_by(data: DataPlan) -> str:
    method = data.method.replace("_", " ")
    if data.window is None:
        return f"{method}, seed {data.seed}"
    return f"{method}, in windows of {data.window:,} samples in their order"


def _sha256(value: str) -> Marked:
    return Marked(f"sha256 {value}", "code")
