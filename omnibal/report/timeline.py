"""Figure of one simulated training step over the stages."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.schedules import Pass
from omnibal.pipeline.simulate import EncoderBlock, Timeline, encoder_blocks, simulate_ranks
from omnibal.pipeline.stage_cost import workload_times
from omnibal.pipeline.workload import Workload
from omnibal.report.drawing import COLOURS, WIDE, label_rows, new_figure, style
from omnibal.report.figures import PageFigure

_COLOURS = {
    Pass.FORWARD: "green",
    Pass.BACKWARD: "purple",
    Pass.BACKWARD_INPUT: "purple",
    Pass.BACKWARD_WEIGHT: "rose",
}
_NUMBERED_SHARE = 0.016
"""Smallest share of the axis whose bar has room for its number."""


@style()
def timeline_figure(
    plan: Plan, job: JobSpec, packs: ScheduledPacks, lengths: Lengths
) -> PageFigure:
    """Draw the simulated schedule of one representative step of the first data-parallel rank."""
    cost = job.cost_of_all(plan.pack_levels)
    workload = job.workload(packs, lengths, plan.pack_levels)
    times = workload_times(cost, plan.stages_at_levels, workload)
    step = representative_step(workload, (times.forward_ms + times.backward_ms).sum(axis=1))
    of_step = workload.of_steps([step])
    times = workload_times(cost, plan.stages_at_levels, of_step)
    of_ranks = simulate_ranks(times, of_step, plan.schedule)
    blocks = encoder_blocks(of_ranks, times, of_step)
    micro_batches = int((of_step.dp_rank == 0).sum())
    timeline, encoding = of_ranks.of_step(0), [one for one in blocks if one.rank == 0]
    figure = new_figure(WIDE, 90 + 30 * len(timeline.finish_ms))
    draw_step(figure.subplots(), timeline, micro_batches, encoding)
    figure.legend(loc="outside upper left", ncols=6)
    chunks = plan.schedule.chunks
    of_chunks = f", {chunks} chunks a stage" if chunks > 1 else ""
    return PageFigure(
        title=f"Step {step:,} as simulated",
        drawn=figure,
        label=f"schedule of {micro_batches} micro-batches on {len(timeline.finish_ms)} stages",
        caption="The step of median load on the first data-parallel rank: "
        f"{micro_batches} micro-batches under {timeline.schedule.name}{of_chunks}. Numbers count "
        "micro-batches. All ranks and their packs: `omnibal simulate PLAN --trace FILE`, for "
        "Perfetto.",
        wide=True,
    )


def draw_step(
    axes: Axes,
    timeline: Timeline,
    micro_batches: int,
    encoding: Sequence[EncoderBlock] = (),
    recompute_ms: np.ndarray | None = None,
    end_ms: float | None = None,
) -> None:
    """Draw a row of passes for every stage; empty space is waiting.

    Args:
        micro_batches: number drawn; other ranks may have more.
        recompute_ms: part of each backward that recomputes, drawn apart. [micro-batches, parts]
        end_ms: end of the axis; None for the end of the step.
    """
    schedule, stages = timeline.schedule, len(timeline.finish_ms)
    if end_ms is None:
        end_ms = max([float(timeline.step_ms), *(one.end_ms for one in encoding)])
    for kind, start_ms in timeline.start_ms.items():
        for part in range(start_ms.shape[1]):
            stage, is_later = schedule.stage_of(part), part >= schedule.stages
            starts = start_ms[:micro_batches, part]
            ends = timeline.end_ms[kind][:micro_batches, part]
            label = "" if part else kind.label
            if kind is Pass.FORWARD and part == schedule.stages:
                label = "forward of later chunks"
            alpha = 0.6 if is_later else 1.0
            _bars(axes, stage, starts, ends - starts, _COLOURS[kind], label=label, alpha=alpha)
            if recompute_ms is not None and kind is Pass.BACKWARD and recompute_ms.any():
                label = "" if part else "recomputed in the backward"
                _bars(axes, stage, starts, recompute_ms[:, part], "orange", label=label)
            for index in np.flatnonzero(ends - starts >= _NUMBERED_SHARE * end_ms):
                axes.text(
                    *((starts[index] + ends[index]) / 2, stage, str(index)),
                    ha="center",
                    va="center",
                    color=COLOURS["paper"],
                    fontsize=10,
                    in_layout=False,
                )
    if encoding:
        starts = [block.start_ms for block in encoding]
        took = [block.end_ms - block.start_ms for block in encoding]
        for stage in range(stages):
            label = "" if stage else "data-parallel encoders"
            _bars(axes, stage, starts, took, "teal", label=label)
    axes.set_xlim(0, end_ms)
    axes.set_xlabel("ms")
    label_rows(axes, [f"stage {stage}" for stage in range(stages)])


def _bars(
    axes: Axes,
    stage: int,
    start_ms: Sequence[float] | np.ndarray,
    took_ms: Sequence[float] | np.ndarray,
    colour: str,
    *,
    label: str = "",
    alpha: float = 1.0,
) -> None:
    axes.broken_barh(
        list(zip(start_ms, took_ms, strict=True)),
        (stage - 0.4, 0.8),
        facecolor=COLOURS[colour],
        edgecolor=COLOURS["paper"],
        linewidth=0.6,
        label=label,
        alpha=alpha,
    )


def representative_step(workload: Workload, load_ms: np.ndarray) -> int:
    """The step of median load of the first rank, among its longest steps."""
    first = np.flatnonzero(workload.dp_rank == 0)
    counts = np.bincount(workload.step[first])
    loads = np.bincount(workload.step[first], weights=load_ms[first])
    full = np.flatnonzero(counts == counts.max())
    return int(full[np.argsort(loads[full], kind="stable")[(len(full) - 1) // 2]])
