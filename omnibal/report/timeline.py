"""Drawing of one simulated training step over the stages."""

from collections.abc import Sequence

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.data.packs import ScheduledPacks
from omnibal.job import JobSpec
from omnibal.pipeline.simulate import Timeline, simulate_ranks
from omnibal.pipeline.stage_cost import workload_times
from omnibal.pipeline.workload import Workload
from omnibal.plan import Plan
from omnibal.report.figures import WIDE, Figure
from omnibal.report.svg import Scale, drawing, line, rect, text
from omnibal.report.text import milliseconds, tick

_LEFT, _ROW = 72, 32
_LABEL_WIDTH = 15.0
"""Least width of a block that carries a number."""


def timeline_figure(plan: Plan, job: JobSpec, packs: ScheduledPacks, lengths: Lengths) -> Figure:
    """The simulated schedule of one representative step of the first data-parallel rank."""
    cost, workload = job.cost_of_all(plan.levels), job.workload(packs, lengths, plan.levels)
    times = workload_times(cost, plan.stages_at_levels, workload)
    step = representative_step(workload, (times.forward_ms + times.backward_ms).sum(axis=1))
    of_step = workload.of_steps([step])
    own = of_step.rows(of_step.dp_rank == 0)
    times = workload_times(cost, plan.stages_at_levels, of_step)
    timeline = simulate_ranks(times, of_step).of_step(0)
    waits_ms = np.zeros(2)
    if times.waits_ms is not None:
        waits_ms = times.waits_ms[of_step.dp_rank == 0].sum(axis=0)
    names = [name for name in (*packs.items, "tokens") if name in cost.features]
    features = own.features[:, [cost.features.index(name) for name in names]].astype(np.int64)
    tips = [
        f"micro-batch {slot}: "
        + ", ".join(f"{count:,} {name}" for count, name in zip(counts, names, strict=True))
        + (f", its share of a pack of {context} ranks" if context > 1 else "")
        for slot, context, counts in zip(own.slot, own.context, features, strict=True)
    ]
    return Figure(
        title=f"Step {step:,} as simulated",
        svg=draw(timeline, tips, waits_ms),
        caption="The step of median load on the first data-parallel rank: "
        f"{len(own)} micro-batches under {timeline.schedule.name}. Rest the pointer on a block "
        "for its pack.",
        legend=(
            ("forward", "forward"),
            ("backward", "backward"),
            *([("encoder", "encoders beside")] if waits_ms.any() else []),
            ("wait", "waiting"),
        ),
        wide=True,
    )


def draw(timeline: Timeline, tips: Sequence[str], waits_ms: np.ndarray) -> str:
    """Draw a row per stage and a block per pass; free space is waiting.

    Args:
        waits_ms: of encoders beside the pipeline, before it and after it, [2].
    """
    stages, pipeline_ms = len(timeline.finish_ms), float(timeline.step_ms)
    end_ms = pipeline_ms + float(waits_ms[1])
    x, bottom = Scale(0, end_ms, _LEFT, WIDE - 16), _ROW * stages
    parts = []
    for value in x.ticks(8):
        parts.append(line(x(value), 0, x(value), bottom + 4, "grid"))
        parts.append(text(x(value), bottom + 20, f"{tick(value)} ms", "label middle"))
    for stage in range(stages):
        y = _ROW * stage + 3
        parts.append(text(0, y + 17, f"stage {stage}"))
        parts.append(rect(_LEFT, y, x(end_ms) - _LEFT, _ROW - 6, "wait"))
        for left_ms, right_ms in ((0.0, waits_ms[0]), (pipeline_ms, end_ms)):
            if right_ms > left_ms:
                width = x(right_ms) - x(left_ms) - 0.6
                parts.append(rect(x(left_ms), y, width, _ROW - 6, "encoder", "encoders beside"))
        for kind, start_ms in timeline.start_ms.items():
            # Other ranks may have more micro-batches.
            real = slice(len(tips)), stage
            start, end = x(start_ms[real]), x(timeline.end_ms[kind][real])
            for index, (left, right) in enumerate(zip(start, end, strict=True)):
                tip = f"{kind.label} of {tips[index]}"
                # The thin gap keeps equal neighbours apart.
                parts.append(rect(left, y, right - left - 0.6, _ROW - 6, kind.label, tip))
                if right - left >= _LABEL_WIDTH:
                    parts.append(text((left + right) / 2, y + 17, index, "block middle"))
    label = f"schedule of {len(tips)} micro-batches on {stages} stages in {milliseconds(end_ms)}"
    return drawing(WIDE, bottom + 26, label, parts)


def representative_step(workload: Workload, load_ms: np.ndarray) -> int:
    """The step of median load of the first rank, among its longest steps."""
    first = np.flatnonzero(workload.dp_rank == 0)
    counts = np.bincount(workload.step[first])
    loads = np.bincount(workload.step[first], weights=load_ms[first])
    full = np.flatnonzero(counts == counts.max())
    return int(full[np.argsort(loads[full], kind="stable")[(len(full) - 1) // 2]])
