"""`RUN.md`: an export's training command, and its simulated time, memory and samples."""

from typing import Any, Self

import numpy as np

from omnibal.base.frozen import Frozen
from omnibal.job.planner import predict_plan
from omnibal.job.published_errors import errors_of_plan
from omnibal.model.limits import memory_cap_gib
from omnibal.trainers.export.exported import Exported, ExportInput, fill_template
from omnibal.trainers.export.reading_order import ORDER_FILE

RUN_PAGE = "RUN.md"


class Expected(Frozen):
    """Simulated figures of a plan's run by another trainer; sample counts may be None."""

    steps: int | None = None  # full steps
    packs_per_step: int  # of all ranks
    micro_batches: int  # per data-parallel rank and step
    packs: int | None = None  # in full steps
    samples: int | None = None  # in full steps, counted once per epoch
    samples_per_step: float | None = None
    dropped_packs: int = 0  # packs of a dropped incomplete last step
    dropped_samples: int = 0  # samples of dropped packs, and samples in no pack of the plan
    step_ms: float  # mean
    samples_per_second: float | None
    samples_per_second_per_gpu: float | None
    bubble: float  # idle share of device time
    peak_gib: tuple[float, ...]  # by pipeline stage
    usable_gib: float  # memory cap of a device that plans keep
    device_gib: float  # whole memory of a device
    cost_source: str  # "profile:..." if costs are measured

    @classmethod
    def count(cls, given: ExportInput) -> Self:
        """Return counts of full steps with the plan's predicted time and memory."""
        plan, job, prediction = given.plan, given.files.job, given.plan.prediction
        if prediction is None:  # removed, or of a later portion
            packs, lengths = given.files.steps
            workload = job.workload(packs, lengths, plan.pack_levels)
            prediction = predict_plan(plan, job, packs, workload)
        per_gpu = prediction.samples_per_second_per_gpu
        return cls(
            **_count_trained(given),
            packs_per_step=given.packs_per_step,
            micro_batches=given.packs_per_step // plan.parallel.data,
            step_ms=prediction.step_ms,
            samples_per_second=None if per_gpu is None else per_gpu * plan.parallel.world_size,
            samples_per_second_per_gpu=per_gpu,
            bubble=prediction.bubble_fraction,
            peak_gib=tuple(stage.memory.peak_gib for stage in prediction.stages),
            usable_gib=memory_cap_gib(plan.cluster),
            device_gib=plan.cluster.memory_gib,
            cost_source=prediction.cost_source,
        )


def _count_trained(given: ExportInput) -> dict[str, Any]:
    """Return the fields of `Expected` that count packs and samples; none without samples."""
    order, data, steps = given.order, given.plan.data, given.full_steps
    if order is None or data is None or steps is None:
        return {}
    packs, sizes = steps * given.packs_per_step, np.diff(order.packs.offsets)  # samples by pack
    trained = int(sizes[:packs].sum())
    return {
        "steps": steps,
        "packs": packs,
        "samples": trained,
        "samples_per_step": trained / steps if steps else None,
        "dropped_packs": len(order) - packs,
        "dropped_samples": int(sizes.sum()) - trained + data.left_out,
    }


def run_page(given: ExportInput, exported: Exported, expected: Expected) -> str:
    """Return `RUN.md` in Markdown; empty sections are left out."""
    plan, parts = given.plan, given.plan.stages_at(0)
    return fill_template(
        "run_page.md.jinja",
        plan=plan,
        target=given.target,
        exported=exported,
        expected=expected,
        errors=errors_of_plan(plan),
        stages=[[parts[part] for part in chunks] for chunks in plan.schedule.parts_of(len(parts))],
        has_order=given.order is not None,
        order_file=ORDER_FILE,
    )
