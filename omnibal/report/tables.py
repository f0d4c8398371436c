"""The report's tables: exact numbers under the figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

import numpy as np

from omnibal.data.bound import naive_lower_bound
from omnibal.data.lengths import Lengths
from omnibal.data.metrics import measure_packs
from omnibal.data.packs import ScheduledPacks
from omnibal.limits import memory_cap_gib
from omnibal.pipeline.prediction import StageMemory
from omnibal.plan import Plan
from omnibal.replay import ReplaySummary
from omnibal.report.figures import MEMORY_PARTS, bars, memory_parts
from omnibal.report.summary import (
    RunSummary,
    accuracy_interval,
    is_right,
    micro_batches_per_step,
    replayed_peaks_as_predicted,
    stage_times_by_source,
    telling_examples,
)
from omnibal.report.text import EN_DASH, aligned, escape, number, percent, shorten
from omnibal.runlog import Evaluation, StepRecord

_SOURCES_SHOWN = 12
_EXAMPLES_SHOWN = 12
_TEXT_LIMIT = 160


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column; neighbours of the same non-empty group share a heading. Cells are trusted."""

    group: str = ""
    title: str
    cells: Sequence[str]
    css: str = ""


def table(columns: Sequence[Column], caption: str) -> str:
    """A table that scrolls sideways where it is too wide, what to know of it below."""
    groups = [(name, len(list(members))) for name, members in groupby(c.group for c in columns)]
    head = "".join(f'<th colspan="{span}">{escape(name)}</th>' for name, span in groups)
    head = f"<tr>{head}</tr>" if any(name for name, _ in groups) else ""
    titles = "".join(f'<th class="{c.css}">{escape(c.title)}</th>' for c in columns)
    rows = "".join(
        "<tr>" + "".join(f'<td class="{c.css}">{c.cells[i]}</td>' for c in columns) + "</tr>"
        for i in range(len(columns[0].cells))
    )
    return (
        f'<div class="scroll"><table><thead>{head}<tr>{titles}</tr></thead>'
        f'<tbody>{rows}</tbody></table></div><p class="caption">{escape(caption)}</p>'
    )


def facts(title: str, entries: Sequence[tuple[str, str]]) -> str:
    """Names and values; values are trusted."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{value}</dd>" for name, value in entries)
    return f'<div>{title and f"<h3>{escape(title)}</h3>"}<dl class="provenance">{rows}</dl></div>'


def _beside(group: str, series: Mapping[str, Sequence[float]]) -> list[Column]:
    """A column of each named series, all with equal decimals; an empty one is left out."""
    cells = iter(aligned([value for values in series.values() for value in values]))
    return [
        Column(
            group=group,
            title=name,
            cells=list(islice(cells, len(values))),
            css="bold" * (name != "predicted"),
        )
        for name, values in series.items()
        if values
    ]


def stage_table(plan: Plan, run: RunSummary | None, replay: ReplaySummary | None) -> str:
    """Layers, times per step and waiting of every stage: predicted, replayed and measured."""
    stages, times = plan.stages, stage_times_by_source(plan, run, replay)
    counts = {
        "vision": [len(s.layers("vision")) for s in stages],
        "language": [len(s.layers("language")) for s in stages],
        "recomputed": [s.recomputed_layers for s in stages],
    }
    waits = {
        "predicted": [s.wait_fraction for s in plan.prediction.stages] if plan.prediction else (),
        "replayed": replay.wait_fractions.tolist() if replay else (),
        "measured": run.wait_fractions if run else (),
    }
    columns = [
        Column(title="stage", cells=[str(i) for i in range(len(stages))], css="left"),
        *(Column(group="layers", title=k, cells=[f"{n}" for n in v]) for k, v in counts.items()),
        *_beside("forward, ms", {k: [time.forward_ms for time in v] for k, v in times.items()}),
        *_beside("backward, ms", {k: [time.backward_ms for time in v] for k, v in times.items()}),
        *_beside("waiting, %", {k: [100 * share for share in v] for k, v in waits.items()}),
    ]
    count = micro_batches_per_step(plan)
    per = f"Times of a step of {count:.4g} micro-batches; " if count else ""
    mean = f" Replayed: mean of {len(replay.info.steps):,} of the steps." if replay else ""
    return table(columns, f"{per}backward includes recomputation.{mean}")


def memory_table(plan: Plan, run: RunSummary | None, replay: ReplaySummary | None) -> str:
    """Predicted memory by kind, the sum against the device's, and the replayed and measured peak.

    The replayed peak is shown beside its predicted value.
    """
    columns = [Column(title="stage", cells=[str(i) for i in range(len(plan.stages))], css="left")]
    if plan.prediction:
        columns += _predicted_memory(
            [stage.memory for stage in plan.prediction.stages], memory_cap_gib(plan.cluster)
        )
    caption = "Memory of one device of each stage at the peak of the step."
    if replay:
        peaks = {
            "predicted": replayed_peaks_as_predicted(plan, replay),
            "peak": [stage.peak_gib for stage in replay.stages],
        }
        columns += _beside("replayed, GiB", peaks)
        if not all(stage.with_working_memory for stage in replay.stages):
            caption += " A replay on a CPU measures no working memory: predicted beside it is "
            caption += "the rest."
    if run:
        cells = aligned(run.peak_gib)
        columns.append(Column(group="measured, GiB", title="peak", cells=cells, css="bold"))
    if len(columns) == 1:
        return ""
    return table(columns, caption)


def _predicted_memory(memories: Sequence[StageMemory], cap_gib: float) -> list[Column]:
    # Aligned together and dealt out again, so that all columns get the same decimals.
    rows = [(*memory_parts(memory), memory.peak_gib) for memory in memories]
    cells, titles = aligned([size for row in rows for size in row]), (*MEMORY_PARTS, "peak")
    shares = [memory.peak_gib / cap_gib for memory in memories]
    columns = {title: cells[i :: len(titles)] for i, title in enumerate(titles)}
    columns[f"of {number(cap_gib)} usable"] = [
        f'<span class="{"good" if share <= 1 else "bad"}">{percent(share)}</span>'
        for share in shares
    ]
    return [
        Column(group="predicted, GiB", title=title, cells=column, css="bold" * (title == "peak"))
        for title, column in columns.items()
    ]


def accuracy_table(evaluation: Evaluation) -> str:
    """Exact answers by kind with their 95 % interval, beside chance."""
    kinds = evaluation.kinds
    if not kinds:
        return ""
    shares = [kind.accuracy for kind in kinds]
    intervals = [accuracy_interval(kind) for kind in kinds]
    meters = [
        f'<span class="meter"><i style="width:{100 * share:.1f}%"></i>'
        f'<b style="left:{100 * kind.chance:.1f}%"></b></span>'
        for kind, share in zip(kinds, shares, strict=True)
    ]
    columns = [
        Column(title="kind of question", cells=[escape(k.kind) for k in kinds], css="left"),
        Column(title="questions", cells=[f"{k.questions:,}" for k in kinds]),
        Column(title="correct", cells=[f"{k.correct:,}" for k in kinds]),
        Column(title="accuracy", cells=[percent(share) for share in shares], css="bold"),
        Column(
            title="95 % interval",
            cells=[f"{100 * low:.1f} {EN_DASH} {100 * high:.1f} %" for low, high in intervals],
        ),
        Column(title="chance", cells=[percent(k.chance) for k in kinds]),
        Column(title="", cells=meters),
    ]
    return table(
        columns,
        f"Exact matches after step {evaluation.step:,}. Chance, the mark on the bar, is the best "
        "that one constant answer reaches.",
    )


def answers_table(evaluation: Evaluation) -> str:
    """A few questions of every kind, right and wrong ones."""
    examples = telling_examples(evaluation, _EXAMPLES_SHOWN)
    if not examples:
        return ""
    marks = [
        '<span class="good" title="right">&#10003;</span>'
        if is_right(example)
        else '<span class="bad" title="wrong">&#10007;</span>'
        for example in examples
    ]
    texts = {
        "kind": [e.kind for e in examples],
        "question": [e.question for e in examples],
        "expected": [e.expected for e in examples],
        "answered": [e.answered for e in examples],
        "sample": [e.sample for e in examples],
    }
    columns = [Column(title="", cells=marks, css="mark")]
    columns += [
        Column(title=name, cells=[escape(shorten(v, _TEXT_LIMIT)) for v in values], css="wrap")
        for name, values in texts.items()
    ]
    return table(columns, "Examples, right and wrong ones of every kind; not in proportion.")


def packing_facts(packs: ScheduledPacks, lengths: Lengths, plan: Plan) -> str:
    """Facts about the micro-batches: fill and balance."""
    if plan.data is None:
        return ""
    dp = plan.parallel.data
    bound = naive_lower_bound(lengths, plan.data.caps)
    m = measure_packs(packs, lengths, plan.data.caps, dp, packs.tokens, bound)
    entries = [
        ("Samples", f"{len(lengths):,}, {m.samples_per_pack:.3g} per pack"),
        ("Packs", f"{m.packs:,} (at least {m.packs_lower_bound:,} are needed)"),
        ("Tiles filled", f"{percent(m.fill_tiles)} of the cap"),
        ("Tokens filled", f"{percent(m.fill_tokens)} of the cap"),
    ]
    if dp > 1:
        entries += [
            ("Uneven tiles", f"{percent(m.dist_ratio_vision)} below the busiest of {dp} ranks"),
            ("Uneven tokens", f"{percent(m.dist_ratio_language)} below the busiest of {dp} ranks"),
        ]
    count = plan.data.micro_batches_per_step
    entries += [
        ("Steps", f"{m.steps:,} of {count} micro-batches on each of {dp} ranks"),
        ("Method", f"{escape(plan.data.method)}, seed {plan.data.seed}"),
    ]
    return facts("Packing", entries)


def sources_table(lengths: Lengths) -> str:
    """Tiles and tokens of every source as small histograms on common axes."""
    counts = np.bincount(lengths.source, minlength=len(lengths.source_names))
    order = [int(i) for i in np.argsort(-counts, kind="stable")]
    groups = [(lengths.source_names[i], [i]) for i in order[:_SOURCES_SHOWN]]
    rest = order[_SOURCES_SHOWN:]
    groups += [(f"{len(rest)} smaller sources", rest)] if rest else []
    most_tiles, tokens = int(lengths.tiles.max()), lengths.tokens
    tile_edges = np.linspace(-0.5, most_tiles + 0.5, min(most_tiles + 1, 40) + 1)
    token_edges = np.geomspace(tokens.min(), max(tokens.max(), tokens.min() + 1), 31)
    # Rounding may put the outermost samples a hair outside.
    token_edges[[0, -1]] = tokens.min(), max(tokens.max(), tokens.min() + 1)
    masks = [np.isin(lengths.source, members) for _, members in groups]

    def drawn(values: np.ndarray, edges: np.ndarray, css: str, unit: str) -> list[str]:
        return [
            bars(np.histogram(values[mask], edges)[0], css, f"histogram of {unit}: {name}")
            for mask, (name, _) in zip(masks, groups, strict=True)
        ]

    columns = [
        Column(title="source", cells=[escape(name) for name, _ in groups], css="wrap"),
        Column(title="samples", cells=[f"{int(mask.sum()):,}" for mask in masks]),
        Column(title="mean tiles", cells=aligned([lengths.tiles[mask].mean() for mask in masks])),
        Column(
            title=f"tiles, 0 to {most_tiles}",
            cells=drawn(lengths.tiles, tile_edges, "vision", "tiles"),
        ),
        Column(title="mean tokens", cells=aligned([tokens[mask].mean() for mask in masks])),
        Column(
            title=f"tokens, {tokens.min():,} to {tokens.max():,}, logarithmic",
            cells=drawn(tokens, token_edges, "language", "tokens"),
        ),
    ]
    return table(columns, "Samples by source; bar heights are relative to the row's highest.")


def provenance_facts(
    plan: Plan, replay: ReplaySummary | None, records: Sequence[StepRecord]
) -> str:
    """Facts about the page's inputs."""
    entries = [("Plan schema", f"version {plan.schema_version}")]
    entries += [
        ("Cluster", f"{escape(plan.cluster.name)}, {plan.cluster.memory_gib:g} GiB a device")
    ]
    if plan.prediction:
        entries += [("Costs from", escape(plan.prediction.cost_source))]
    if plan.data:
        entries += [
            ("Packs made by", f"{escape(plan.data.method)}, seed {plan.data.seed}"),
            ("Lengths", f"<code>sha256 {escape(plan.data.lengths_sha256)}</code>"),
            ("Packs", f"<code>sha256 {escape(plan.data.packs_sha256)}</code>"),
        ]
    if plan.data and plan.data.origin:
        origin = plan.data.origin
        entries += [
            ("Data", f"<code>sha256 {escape(origin.data_sha256)}</code>"),
            ("Tokenizer", f"<code>sha256 {escape(origin.tokenizer_sha256)}</code>"),
        ]
    if replay:
        steps = ", ".join(f"{step:,}" for step in replay.info.steps)
        entries += [("Replayed steps", f"{steps}, on {escape(replay.info.device)}")]
    if records:
        seen = f"{len(records):,} steps, {records[0].step:,} to {records[-1].step:,}"
        entries += [("Run log", seen)]
    return facts("", entries)
