"""Drawing of one simulated training step over the stages."""

from collections.abc import Iterator, Sequence

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.encoder_rounds import EncoderBlock, simulate_with_encoders
from omnibal.pipeline.schedules import Pass
from omnibal.pipeline.simulate import Timeline
from omnibal.pipeline.stage_cost import workload_times
from omnibal.pipeline.workload import Workload
from omnibal.report.figures import WIDE, Figure
from omnibal.report.formatting import milliseconds
from omnibal.report.svg import Rows, Scale, drawing, text

_LABEL_WIDTH, _LABEL_HEIGHT = 15.0, 16.0
"""Least size of a bar that carries a number, in pixels."""
_LEGEND = {
    Pass.BACKWARD: "backward",
    Pass.BACKWARD_INPUT: "backward of inputs",
    Pass.BACKWARD_WEIGHT: "backward of weights",
}
_GAP = 0.6
"""Pixels between equal neighbours."""


def timeline_figure(plan: Plan, job: JobSpec, packs: ScheduledPacks, lengths: Lengths) -> Figure:
    """The simulated schedule of one representative step of the first data-parallel rank."""
    cost, workload = (
        job.cost_of_all(plan.pack_levels),
        job.workload(packs, lengths, plan.pack_levels),
    )
    times = workload_times(cost, plan.stages_at_levels, workload)
    step = representative_step(workload, (times.forward_ms + times.backward_ms).sum(axis=1))
    of_step = workload.of_steps([step])
    own = of_step.rows(of_step.dp_rank == 0)
    times = workload_times(cost, plan.stages_at_levels, of_step)
    of_ranks, blocks = simulate_with_encoders(times, of_step, plan.schedule)
    timeline, encoding = of_ranks.of_step(0), [one for one in blocks if one.rank == 0]
    names = [name for name in (*packs.items, "tokens") if name in cost.features]
    features = own.features[:, [cost.features.index(name) for name in names]].astype(np.int64)
    tips = [
        f"micro-batch {slot}: "
        + ", ".join(f"{count:,} {name}" for count, name in zip(counts, names, strict=True))
        + (f", its share of a pack of {context} ranks" if context > 1 else "")
        for slot, context, counts in zip(own.slot, own.context, features, strict=True)
    ]
    chunks = plan.schedule.chunks
    of_chunks = f", {chunks} chunks a stage" if chunks > 1 else ""
    return Figure(
        title=f"Step {step:,} as simulated",
        svg=draw(timeline, tips, encoding),
        caption="The step of median load on the first data-parallel rank: "
        f"{len(own)} micro-batches under {timeline.schedule.name}{of_chunks}. Rest the pointer on "
        "a block for its pack.",
        legend=(
            ("forward", "forward"),
            *((kind.label, _LEGEND[kind]) for kind in plan.schedule.passes[1:]),
            *([("forward later", "later chunks")] if chunks > 1 else []),
            *([("encoder", "data-parallel encoders")] if encoding else []),
            ("wait", "waiting"),
        ),
        wide=True,
    )


def draw(timeline: Timeline, tips: Sequence[str], encoding: Sequence[EncoderBlock]) -> str:
    """Draw a row per stage and a bar per pass; free space is waiting.

    Args:
        encoding: when stages run data-parallel encoders.
    """
    stages = len(timeline.finish_ms)
    end_ms = max([float(timeline.step_ms), *(one.end_ms for one in encoding)])
    rows = Rows(x=Scale(0, end_ms, 72, WIDE - 16), top=4, pitch=32, count=stages, gap=6)
    parts = [rows.axis("ms", 8), rows.labels([f"stage {stage}" for stage in range(stages)])]
    for stage in range(stages):
        parts.append(rows.bar(stage, 0, end_ms, "wait"))
    parts += [
        rows.bar(
            one.stage,
            one.start_ms,
            one.end_ms,
            "encoder",
            f"{one.label}, {milliseconds(one.end_ms - one.start_ms)}",
            _GAP,
        )
        for one in encoding
    ]
    label = f"schedule of {len(tips)} micro-batches on {stages} stages in {milliseconds(end_ms)}"
    parts += pass_bars(rows, timeline, tips)
    return drawing(WIDE, rows.bottom + 26, label, parts)


def pass_bars(
    rows: Rows, timeline: Timeline, tips: Sequence[str], recompute_ms: np.ndarray | None = None
) -> Iterator[str]:
    """A numbered bar per pass in the rows of the stages, paler of chunks after the first.

    Args:
        tips: of the micro-batches that are drawn: other ranks may have more.
        recompute_ms: part of each backward that recomputes, drawn apart. [micro-batches, parts]
    """
    schedule = timeline.schedule
    for kind, start_ms in timeline.start_ms.items():
        for index, part in np.ndindex(len(tips), start_ms.shape[1]):
            at, stage, chunk = (index, part), schedule.stage_of(part), part // schedule.stages
            start, end = float(start_ms[at]), float(timeline.end_ms[kind][at])
            of_chunk = f" in chunk {chunk}" if schedule.chunks > 1 else ""
            tip = f"{kind.label}{of_chunk} of {tips[index]}, {milliseconds(end - start)}"
            css = f"{kind.label} later" if chunk else kind.label
            yield rows.bar(stage, start, end, css, tip, _GAP)
            if recompute_ms is not None and kind is Pass.BACKWARD and recompute_ms[at]:
                again_ms = float(recompute_ms[at])
                tip += f", of which {milliseconds(again_ms)} recompute"
                yield rows.bar(stage, start, start + again_ms, "recompute", tip)
            if rows.x(end) - rows.x(start) >= _LABEL_WIDTH and rows.pitch >= _LABEL_HEIGHT:
                middle = rows.x((start + end) / 2)
                yield text(middle, rows.middle(stage), index, "block middle")


def representative_step(workload: Workload, load_ms: np.ndarray) -> int:
    """The step of median load of the first rank, among its longest steps."""
    first = np.flatnonzero(workload.dp_rank == 0)
    counts = np.bincount(workload.step[first])
    loads = np.bincount(workload.step[first], weights=load_ms[first])
    full = np.flatnonzero(counts == counts.max())
    return int(full[np.argsort(loads[full], kind="stable")[(len(full) - 1) // 2]])
