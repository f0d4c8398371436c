"""What a plan's run by another trainer is expected to take: steps, time and memory."""

from typing import Self

import numpy as np

from omnibal.base.frozen import Frozen
from omnibal.export.exported import ExportInput
from omnibal.export.reading_order import packs_per_step
from omnibal.job.planner import prediction_of
from omnibal.model.limits import memory_cap_gib
from omnibal.pipeline.prediction import Prediction


class Expected(Frozen):
    """Figures of a run, all of them simulated; None where the plan has no samples."""

    steps: int | None
    """Steps that the trainer runs, all of them full."""
    packs_per_step: int
    """Packs of all data-parallel ranks in a step."""
    micro_batches: int
    """Packs of one rank in a step."""
    packs: int | None
    samples: int | None
    """Samples of these packs, each counted once an epoch."""
    samples_per_step: float | None
    dropped_packs: int
    """Packs of a last step that is not full, which the trainer leaves out."""
    dropped_samples: int
    """Samples of these, and of those that the plan has in no step."""
    step_ms: float
    samples_per_second: float | None
    samples_per_second_per_gpu: float | None
    bubble: float
    """Idle share of device time for any cause."""
    peak_gib: tuple[float, ...]
    """Peak memory of one device of every stage."""
    usable_gib: float
    """What a plan may fill of a device."""
    device_gib: float
    cost_source: str

    @classmethod
    def of(cls, given: ExportInput) -> Self:
        """Count what is trained, and take time and memory from the plan's prediction.

        Raises:
            UserError: the plan has neither data nor shapes.
        """
        plan = given.files.plan
        prediction = _prediction(given)
        shapes = plan.data or plan.shapes
        assert shapes is not None  # as `prediction` is of its packs
        ranks, per_gpu = plan.parallel.data, prediction.samples_per_second_per_gpu
        full = (
            shapes.micro_batches_per_step * ranks
            if plan.data is None
            else packs_per_step(plan.data, ranks)
        )
        trained = _Trained.of(given, full)
        left_out = 0 if plan.data is None else plan.data.left_out
        return cls(
            steps=trained.steps,
            packs_per_step=full,
            micro_batches=full // ranks,
            packs=trained.packs,
            samples=trained.samples,
            samples_per_step=trained.samples_per_step,
            dropped_packs=trained.dropped_packs,
            dropped_samples=trained.dropped_samples + left_out,
            step_ms=prediction.step_ms,
            samples_per_second=None if per_gpu is None else per_gpu * plan.parallel.world_size,
            samples_per_second_per_gpu=per_gpu,
            bubble=prediction.bubble_fraction,
            peak_gib=tuple(stage.memory.peak_gib for stage in prediction.stages),
            usable_gib=memory_cap_gib(plan.cluster),
            device_gib=plan.cluster.memory_gib,
            cost_source=prediction.cost_source,
        )

    @property
    def source_words(self) -> str:
        """Where the costs are from, in words."""
        is_measured = self.cost_source.startswith("profile:")
        return f"{'measured' if is_measured else 'counted'} ({self.cost_source})"


class _Trained(Frozen):
    """What a trainer takes of a plan's packs: all full steps."""

    steps: int | None
    packs: int | None
    samples: int | None
    samples_per_step: float | None
    dropped_packs: int
    dropped_samples: int

    @classmethod
    def of(cls, given: ExportInput, full: int) -> Self:
        if given.order is None:
            return cls(
                steps=None, packs=None, samples=None, samples_per_step=None,
                dropped_packs=0, dropped_samples=0,
            )  # fmt: skip
        steps, left = divmod(len(given.order), full)
        sizes = np.diff(given.order.packs.offsets)
        trained = int(sizes[: steps * full].sum())
        return cls(
            steps=steps,
            packs=steps * full,
            samples=trained,
            samples_per_step=trained / steps if steps else None,
            dropped_packs=left,
            dropped_samples=int(sizes.sum()) - trained,
        )


def _prediction(given: ExportInput) -> Prediction:
    """The plan's prediction, made anew where it was removed."""
    plan, job = given.files.plan, given.files.job
    if plan.prediction is not None:
        return plan.prediction
    packs, lengths = given.files.steps
    return prediction_of(plan, job, packs, job.workload(packs, lengths, plan.pack_levels))
