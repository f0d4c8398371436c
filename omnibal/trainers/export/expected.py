"""Expected steps, time and memory of a plan's run by another trainer."""

from typing import Any, Self

import numpy as np

from omnibal.base.frozen import Frozen
from omnibal.job.planner import prediction_of
from omnibal.model.limits import memory_cap_gib
from omnibal.trainers.export.exported import ExportInput


class Expected(Frozen):
    """Simulated figures of a run, or None without samples."""

    steps: int | None = None
    """Full steps."""
    packs_per_step: int
    micro_batches: int
    packs: int | None = None
    samples: int | None = None
    """Samples in these steps, counted once per epoch."""
    samples_per_step: float | None = None
    dropped_packs: int
    """Packs of a dropped incomplete last step."""
    dropped_samples: int
    """Samples dropped, including samples in no step of the plan."""
    step_ms: float
    samples_per_second: float | None
    samples_per_second_per_gpu: float | None
    bubble: float
    """Idle share of device time."""
    peak_gib: tuple[float, ...]
    usable_gib: float
    """Usable memory of a device."""
    device_gib: float
    cost_source: str

    @classmethod
    def of(cls, given: ExportInput) -> Self:
        """Count trained samples, and copy the plan's predicted time and memory."""
        plan, job, prediction = given.files.plan, given.files.job, given.files.plan.prediction
        if prediction is None:  # as it was removed
            packs, lengths = given.files.steps
            workload = job.workload(packs, lengths, plan.pack_levels)
            prediction = prediction_of(plan, job, packs, workload)
        per_gpu = prediction.samples_per_second_per_gpu
        return cls(
            **_trained(given),
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


def _trained(given: ExportInput) -> dict[str, Any]:
    """Return the fields on full steps."""
    order, data, full = given.order, given.files.plan.data, given.packs_per_step
    if order is None or data is None:
        return {"dropped_packs": 0, "dropped_samples": 0}
    steps, left = divmod(len(order), full)
    sizes = np.diff(order.packs.offsets)
    trained = int(sizes[: steps * full].sum())
    return {
        "steps": steps,
        "packs": steps * full,
        "samples": trained,
        "samples_per_step": trained / steps if steps else None,
        "dropped_packs": left,
        "dropped_samples": int(sizes.sum()) - trained + data.left_out,
    }
