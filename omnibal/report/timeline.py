"""Drawing of one simulated training step over the stages."""

from collections.abc import Sequence

import numpy as np

from omnibal.cost.model import CostModel, pack_features
from omnibal.data.lengths import Lengths
from omnibal.data.packs import ScheduledPacks
from omnibal.pipeline.simulate import Timeline, simulate_step
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.stage_cost import stage_times
from omnibal.report.figures import WIDE, Figure
from omnibal.report.svg import Scale, drawing, line, rect, text
from omnibal.report.text import milliseconds, tick

_LEFT, _ROW = 72, 32
_LABEL_WIDTH = 15.0
"""Least width of a block that carries a number."""


def timeline_figure(
    stages: Sequence[Stage], cost: CostModel, packs: ScheduledPacks, lengths: Lengths
) -> Figure:
    """The simulated schedule of one representative step of the first data-parallel rank."""
    times = stage_times(cost, stages, pack_features(packs.packs, lengths, cost.features))
    rows = representative_step(packs, (times.forward_ms + times.backward_ms).sum(axis=1))
    timeline = simulate_step(
        times.forward_ms[rows],
        times.backward_ms[rows],
        times.forward_link_ms[rows],
        times.backward_link_ms[rows],
    )
    names = (*packs.items, "tokens")
    tips = [
        f"micro-batch {packs.slot[row]}: "
        + ", ".join(f"{packs.column(name)[row]:,} {name}" for name in names)
        for row in rows
    ]
    return Figure(
        title=f"Step {packs.step[rows[0]]:,} as simulated",
        svg=draw(timeline, tips),
        caption="The step of median load on the first data-parallel rank: "
        f"{len(rows)} micro-batches under {timeline.schedule.name}. Rest the pointer on a block "
        "for its pack.",
        legend=(("forward", "forward"), ("backward", "backward"), ("wait", "waiting")),
        wide=True,
    )


def draw(timeline: Timeline, tips: Sequence[str]) -> str:
    """Draw a row per stage and a block per pass; free space is waiting."""
    stages, end_ms = len(timeline.finish_ms), float(timeline.step_ms)
    x, bottom = Scale(0, end_ms, _LEFT, WIDE - 16), _ROW * stages
    parts = []
    for value in x.ticks(8):
        parts.append(line(x(value), 0, x(value), bottom + 4, "grid"))
        parts.append(text(x(value), bottom + 20, f"{tick(value)} ms", "label middle"))
    for stage in range(stages):
        y = _ROW * stage + 3
        parts.append(text(0, y + 17, f"stage {stage}"))
        parts.append(rect(_LEFT, y, x(end_ms) - _LEFT, _ROW - 6, "wait"))
        for kind, start_ms in timeline.start_ms.items():
            start, end = x(start_ms[:, stage]), x(timeline.end_ms[kind][:, stage])
            for index, (left, right) in enumerate(zip(start, end, strict=True)):
                tip = f"{kind.label} of {tips[index]}"
                # The thin gap keeps equal neighbours apart.
                parts.append(rect(left, y, right - left - 0.6, _ROW - 6, kind.label, tip))
                if right - left >= _LABEL_WIDTH:
                    parts.append(text((left + right) / 2, y + 17, index, "block middle"))
    label = f"schedule of {len(tips)} micro-batches on {stages} stages in {milliseconds(end_ms)}"
    return drawing(WIDE, bottom + 26, label, parts)


def representative_step(packs: ScheduledPacks, load_ms: np.ndarray) -> np.ndarray:
    """Rows of the first rank's packs in the step of median load, among its longest steps."""
    first = np.flatnonzero(packs.dp_rank == 0)
    counts = np.bincount(packs.step[first])
    loads = np.bincount(packs.step[first], weights=load_ms[first])
    full = np.flatnonzero(counts == counts.max())
    middle = full[np.argsort(loads[full], kind="stable")[(len(full) - 1) // 2]]
    return first[packs.step[first] == middle]
