"""Tables of stages that were replayed, on a device or a fake one."""

from collections.abc import Sequence

import numpy as np

from omnibal.job.fake_replay import FakeStage, Roofline
from omnibal.job.plan import Plan
from omnibal.job.replay import StageReplay
from omnibal.model.limits import memory_cap_gib
from omnibal.report.formatting import gib_or_mib, percent
from omnibal.report.table import Column, Marked, Table

_SHOWN_CONTENTS = 14  # all kinds of large tensors of a stage; smaller tensors are summed up


def replayed_stages_table(plan: Plan, replays: Sequence[StageReplay]) -> Table:
    """Return replayed stages' ms per micro-batch and update, peak memory and predicted memory."""
    rows = []
    for replay in replays:
        times = (replay.forward_ms, replay.backward_ms, replay.recompute_ms)
        peaks_gib = [replay.peak_gib]
        if plan.prediction is not None:
            peaks_gib.append(replay.predicted_gib(plan.prediction.stages[replay.stage].memory))
        rows.append(
            [
                f"{replay.stage}",
                f"{len(replay.rows):,}",
                *(f"{np.sum(ms) / len(replay.rows):,.2f}" for ms in times),
                f"{replay.update_ms:,.2f}",
                *map(gib_or_mib, peaks_gib),
            ]
        )
    titles = ["stage", "packs", *(f"{name} ms" for name in ("forward", "backward", "recompute"))]
    titles += ["update ms", "peak", *["predicted"] * (plan.prediction is not None)]
    return Table.of_rows("Replayed stages, per micro-batch", titles, rows)


def fake_device_table(plan: Plan, stages: Sequence[FakeStage]) -> Table:
    """Return predicted and allocated peak by stage, and their difference."""
    cap_gib = memory_cap_gib(plan.cluster)
    rows = [
        (
            f"{stage.stage}",
            "" if stage.predicted_gib is None else f"{stage.predicted_gib:.2f}",
            f"{stage.allocated_gib:.2f}",
            "" if stage.deviation is None else f"{100 * stage.deviation:+.1f} %",
            Marked.share(stage.allocated_gib / cap_gib),
            f"{stage.state_gib:.2f}",
            f"{stage.activations_gib:.2f}",
            stage.peak_phase,
        )
        for stage in stages
    ]
    return Table.of_rows(
        f"Allocated on fake devices, GiB of {cap_gib:.2f}",
        ("stage", "predicted", "allocated", "difference", "of usable", "state", "rest", "in"),
        rows,
        caption="Memory that the code would allocate on one device of each stage, and the plan's "
        "prediction. A difference below zero: the plan predicts too little.",
    )


def fake_device_launches_table(stages: Sequence[FakeStage], rates: Roofline) -> Table:
    """Return kernels, FLOPs, bytes, roofline ms, host reads, unaligned products per micro-batch."""
    rows = []
    for stage in stages:
        times, count = stage.step_ms(rates), stage.micro_batches
        reads = sum(read.count for read in stage.host_reads if read.phase != "optimizer")
        rows.append(
            [
                f"{stage.stage}",
                f"{stage.kernels / count:,.0f}",
                f"{stage.tflop / count:,.1f}",
                f"{stage.gigabytes / count:,.1f}",
                *(f"{ms / count:,.1f}" for ms in times.values()),
                percent(stage.element_wise_share(rates)),
                f"{reads / count:.3g}",
                f"{sum(product.count for product in stage.unaligned) / count:.3g}",
            ]
        )
    titles = ("stage", "kernels", "TFLOP", "GB", "products", "attention", "rest", "its share")
    return Table.of_rows(
        f"Per micro-batch; ms are a roofline at {rates.matrix_tflop_per_s:,.0f} TFLOP/s "
        f"and {rates.memory_gb_per_s:,.0f} GB/s ({rates.name})",
        (*titles, "host reads", "unaligned"),
        rows,
    )


def contents_table(stage: FakeStage) -> Table:
    """Return storages at a stage's peak by operation, largest first, the smallest in one row."""
    rows = [
        [f"{part.gib:.2f}", f"{part.tensors:,}", part.phase, part.where or "-", part.operation]
        for part in stage.contents[:_SHOWN_CONTENTS]
    ]
    others = stage.contents[_SHOWN_CONTENTS:]
    if others:
        gib, tensors = sum(part.gib for part in others), sum(part.tensors for part in others)
        rows.append([f"{gib:.2f}", f"{tensors:,}", "", "rest", ""])
    words = (Column(title=title, style="left") for title in ("made in", "by", "operation"))
    title = f"Stage {stage.stage} at its peak, {stage.allocated_gib:.2f} GiB, in {stage.peak_at}"
    return Table.of_rows(title, ("GiB", "tensors", *words), rows)
