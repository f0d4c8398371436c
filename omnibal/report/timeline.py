"""Figure of one simulated training step over the stages."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from omnibal.job.plan_files import PlanFiles
from omnibal.pipeline.schedules import Pass
from omnibal.pipeline.simulate import Timeline, encoder_blocks, simulate_ranks
from omnibal.pipeline.stage_cost import workload_times
from omnibal.pipeline.workload import Workload
from omnibal.report.drawing import COLOURS, WIDE, add_legend, label_rows, new_figure, style
from omnibal.report.figures import PageFigure

_PASS_COLOURS = {
    Pass.FORWARD: "green",
    Pass.BACKWARD: "purple",
    Pass.BACKWARD_INPUT: "purple",
    Pass.BACKWARD_WEIGHT: "rose",
}
_NUMBERED_SHARE = 0.016  # min share of the axis for a bar to be numbered
_NUMBER: dict[str, Any] = {
    "ha": "center",
    "va": "center",
    "color": COLOURS["paper"],
    "fontsize": 10,
    "in_layout": False,
}


@style()
def timeline_figure(files: PlanFiles) -> PageFigure:
    """Return a figure of a simulated representative step of the first data-parallel rank."""
    plan, cost, workload = files.plan, files.cost, files.workload
    times = workload_times(cost, plan.stages_at_levels, workload)
    step = representative_step(workload, (times.forward_ms + times.backward_ms).sum(axis=1))
    workload = workload.of_steps([step])
    times = workload_times(cost, plan.stages_at_levels, workload)
    all_ranks = simulate_ranks(times, workload, plan.schedule)
    blocks = encoder_blocks(all_ranks, times, workload)
    micro_batches = int((workload.dp_rank == 0).sum())
    timeline, encoding = all_ranks.of_step(0), [ends_ms for rank, _, *ends_ms in blocks if not rank]
    figure = new_figure(WIDE, 90 + 30 * len(timeline.finish_ms))
    draw_step(figure.subplots(), timeline, micro_batches, encoding)
    add_legend(figure, columns=6)
    chunks = plan.schedule.chunks
    of_chunks = f", {chunks} chunks a stage" if chunks > 1 else ""
    return PageFigure(
        title=f"Step {step:,} as simulated",
        drawn=figure,
        caption="The step of median load on the first data-parallel rank: "
        f"{micro_batches} micro-batches under {timeline.schedule.name}{of_chunks}. Numbers count "
        "micro-batches. omnibal simulate PLAN --trace FILE writes all ranks and packs for "
        "Perfetto.",
        wide=True,
    )


def draw_step(
    axes: Axes,
    timeline: Timeline,
    micro_batches: int,
    encoding: Sequence[Sequence[float]] = (),
    recompute_ms: np.ndarray | None = None,
    end_ms: float | None = None,
) -> None:
    """Draw a row of passes for every stage, with idle time as empty space.

    `encoding` has starts and ends of encoders in ms. `recompute_ms`, [micro-batches, parts], is
    drawn as a part of each backward. The axis ends with the step by default.
    """
    schedule = timeline.schedule
    if end_ms is None:
        end_ms = max([float(timeline.step_ms), *(encoded_ms for _, encoded_ms in encoding)])
    bar = partial(axes.barh, height=0.8, edgecolor=COLOURS["paper"], linewidth=0.6)
    for kind, all_start_ms in timeline.start_ms.items():
        for part in range(all_start_ms.shape[1]):
            stage, is_later = schedule.stage_of(part), part >= schedule.stages
            start_ms = all_start_ms[:micro_batches, part]
            took_ms = timeline.end_ms[kind][:micro_batches, part] - start_ms
            label = f"{kind.label}{' of later chunks' if is_later else ''}"
            colour, alpha = COLOURS[_PASS_COLOURS[kind]], 0.6 if is_later else 1.0
            bar(stage, took_ms, left=start_ms, facecolor=colour, label=label, alpha=alpha)
            if recompute_ms is not None and kind is Pass.BACKWARD and recompute_ms.any():
                label, colour = "recomputed in the backward", COLOURS["orange"]
                bar(stage, recompute_ms[:, part], left=start_ms, facecolor=colour, label=label)
            for index in np.flatnonzero(took_ms >= _NUMBERED_SHARE * end_ms):
                middle_ms = start_ms[index] + took_ms[index] / 2
                axes.text(middle_ms, stage, str(index), **_NUMBER)
    for begin_ms, encoded_ms in encoding:
        stages, took_ms = range(schedule.stages), encoded_ms - begin_ms
        label, colour = "data-parallel encoders", COLOURS["teal"]
        bar(stages, took_ms, left=begin_ms, facecolor=colour, label=label)
    axes.set(xlim=(0, end_ms), xlabel="ms")
    label_rows(axes, [f"stage {stage}" for stage in range(schedule.stages)])


def representative_step(workload: Workload, load_ms: np.ndarray) -> int:
    """Return rank 0's step of (lower) median load among those with the most micro-batches."""
    first = np.flatnonzero(workload.dp_rank == 0)
    counts = np.bincount(workload.step[first])
    loads = np.bincount(workload.step[first], weights=load_ms[first])
    # The last step of an epoch may be smaller, so it does not represent the others.
    full = np.flatnonzero(counts == counts.max())
    return int(full[np.argsort(loads[full], kind="stable")[(len(full) - 1) // 2]])
