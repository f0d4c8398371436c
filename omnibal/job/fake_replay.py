"""Stages run on a fake device: what a real one would allocate, launch and read.

`tools/replay.py --fake-device` runs the trainer's own step at real size with tensors that have no
data, and keeps what it counted, a file per stage. Bytes and kernels are those of the code; no time
is measured. A time that is made of them is a roofline at the rates of the plan's cluster.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import NonNegativeFloat, NonNegativeInt

from omnibal.base.frozen import Frozen
from omnibal.cost.model import CostModel
from omnibal.job.plan import Plan
from omnibal.job.stage_files import FoundOfStage, ReplayIdentity, StageFiles
from omnibal.model.config import ClusterConfig, Precision
from omnibal.pipeline.level_costs import features_of
from omnibal.pipeline.stage_memory import GIB, bytes_in_passes, fits_cap, running_passes
from omnibal.pipeline.workload import Workload

OperationKind = Literal["matrix product", "attention", "communication", "element-wise"]


class FakeReplayInfo(ReplayIdentity):
    """Code whose allocations and operations were counted, of which all stages must be."""

    torch: str
    """Version of torch, whose operations were counted."""
    trainer_sha256: str
    """SHA-256 of the trainer's code, whose allocations were counted."""


class OperationCount(Frozen):
    """Launches of one operation in one phase of a step, over all its micro-batches."""

    phase: str
    operation: str
    kind: OperationKind
    kernels: NonNegativeInt
    tflop: NonNegativeFloat
    gigabytes: NonNegativeFloat
    """Bytes of device memory read and written, in 10^9."""


class PeakContent(Frozen):
    """Storages that one operation made and that are there at the peak; layers of a tower as one."""

    where: str
    """Path of the module, with * for the layer's number; empty outside of the stage's modules."""
    operation: str
    phase: str
    tensors: NonNegativeInt
    gib: NonNegativeFloat


class HostRead(Frozen):
    """A value of the device that the host waits for, within a step."""

    phase: str
    operation: str
    where: str
    """File and line that reads it."""
    count: NonNegativeInt


class UnalignedProduct(Frozen):
    """A 16 bit matrix product whose rows do not all begin at multiples of 16 bytes."""

    where: str
    operation: str
    sizes: tuple[NonNegativeInt, ...]
    """Rows, inner size and columns."""
    leading_dimensions: tuple[NonNegativeInt, ...]
    count: NonNegativeInt
    tflop: NonNegativeFloat


class Roofline(Frozen):
    """Rates at which the operations of a stage are turned into time."""

    name: str
    matrix_tflop_per_s: NonNegativeFloat
    attention_tflop_per_s: NonNegativeFloat
    attention_backward_tflop_per_s: NonNegativeFloat
    memory_gb_per_s: NonNegativeFloat

    @classmethod
    def of_cluster(cls, cluster: ClusterConfig, precision: Precision) -> "Roofline":
        """The rates that the plan's cluster is counted with; attention at that of products."""
        reached = cluster.tflops(precision) * cluster.matmul_efficiency
        return cls(
            name=cluster.name,
            matrix_tflop_per_s=reached,
            attention_tflop_per_s=reached,
            attention_backward_tflop_per_s=reached,
            memory_gb_per_s=cluster.memory_gb_per_s * cluster.memory_efficiency,
        )

    def operation_ms(self, one: OperationCount) -> float:
        """Time of an operation's launches: of its arithmetic or its bytes, whichever is longer.

        Communication takes none here.
        """
        if one.kind == "communication":
            return 0.0
        rate = self.matrix_tflop_per_s
        if one.kind == "attention":
            backward = "backward" in one.operation
            rate = self.attention_backward_tflop_per_s if backward else self.attention_tflop_per_s
        return 1e3 * max(one.tflop / rate, one.gigabytes / self.memory_gb_per_s)


def step_ms_by_kind(
    operations: Iterable[OperationCount], rates: Roofline
) -> dict[OperationKind, float]:
    """Time of forward and backward by kind of operation, at these rates."""
    times: dict[OperationKind, float] = dict.fromkeys(
        ("matrix product", "attention", "element-wise"), 0.0
    )
    for one in operations:
        if one.phase in ("forward", "backward") and one.kind != "communication":
            times[one.kind] += rates.operation_ms(one)
    return times


class FakeStage(FoundOfStage):
    """What one device of a stage allocates and launches in its heaviest step."""

    predicted_gib: NonNegativeFloat | None
    """Peak that the plan predicts; None without a prediction."""
    allocated_gib: NonNegativeFloat
    """Peak of what the code allocates, in blocks of the caching allocator."""
    state_gib: NonNegativeFloat
    """Memory of weights, gradients and optimizer state."""
    activations_gib: NonNegativeFloat
    """All else at the peak."""
    peak_phase: str
    """Part of the step in which the peak is: forward, backward or update."""
    peak_at: str
    """Module and operation that reach it."""
    rows: tuple[NonNegativeInt, ...]
    """Rows of the packs of that step of one rank."""
    micro_batches: NonNegativeInt
    kernels: NonNegativeInt
    """Kernels launched in forward and backward of the step, communication left out."""
    tflop: NonNegativeFloat
    gigabytes: NonNegativeFloat
    contents: tuple[PeakContent, ...]
    """What fills the peak, largest first; adds up to `allocated_gib`."""
    operations: tuple[OperationCount, ...]
    """Launches of the step, and of the update after it."""
    host_reads: tuple[HostRead, ...]
    """Reads within the step's forward and backward, and within the update."""
    unaligned: tuple[UnalignedProduct, ...]

    @property
    def deviation(self) -> float | None:
        """Predicted peak relative to the allocated one: negative where the plan says too little."""
        if self.predicted_gib is None:
            return None
        return self.predicted_gib / self.allocated_gib - 1

    def element_wise_share(self, rates: Roofline) -> float:
        """Share of the stage's computing that is neither matrix product nor attention."""
        times = step_ms_by_kind(self.operations, rates)
        total = sum(times.values())
        return times["element-wise"] / total if total else 0.0

    def figures(self, rates: Roofline) -> dict[str, Any]:
        """All that was counted as plain values, with times at these rates."""
        return self.model_dump(mode="json") | {
            "roofline_ms": step_ms_by_kind(self.operations, rates),
            "element_wise_share": self.element_wise_share(rates),
        }


PRETENDED_FILES = StageFiles(
    what="fake-device replay",
    identity=FakeReplayInfo,
    found=FakeStage,
    info_file="pretended.json",
    prefix="pretended",
    remedy="count anew with tools/replay.py --fake-device, into another directory",
)


def read_fake_stages(directory: Path, plan: Plan) -> tuple[FakeStage, ...]:
    """Read the stages that have been counted so far, in order, with the plan's prediction.

    Raises:
        UserError: a file does not follow the schema, or is of another stage than its name says.
    """
    return tuple(
        one.model_copy(update={"predicted_gib": predicted_peak_gib(plan, one.stage)})
        for one in PRETENDED_FILES.read(directory, len(plan.stages))
    )


def predicted_peak_gib(plan: Plan, stage: int) -> float | None:
    """Peak that the plan predicts for a stage, without buffers of a communication library, which a
    fake device has not; None without a prediction."""
    if plan.prediction is None:
        return None
    peers = 0
    if plan.beside is not None:
        peers = plan.beside.pipelines * plan.parallel.pipeline * plan.parallel.tensor - 1
    peak_gib = plan.prediction.stages[stage].memory.peak_gib
    return peak_gib - peers * plan.cluster.peer_bytes / GIB


def is_fake_replay(directory: Path) -> bool:
    """Whether a directory holds a fake-device replay."""
    return (directory / PRETENDED_FILES.info_file).exists()


def check_fake_replay(directory: Path, plan_sha256: str) -> None:
    """Refuse a directory with the fake-device replay of another plan.

    Raises:
        UserError: it is of another plan, or has no valid file.
    """
    PRETENDED_FILES.identity_of(directory, plan_sha256)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Window:
    """Consecutive micro-batches of a rank's step, about those in flight at one moment."""

    rows: np.ndarray
    """Rows of the packs: those in flight, and where there are any the one before and after them."""
    predicted_gib: float
    """Memory besides the state that is predicted for that moment."""


_UNSURE = 0.1
"""Share by which costs of one feature may be wrong beside those of another."""


def heaviest_windows(cost: CostModel, plan: Plan, stage: int, workload: Workload) -> list[Window]:
    """Passes of the run in one of which the stage needs most memory, heaviest first.

    The heaviest as predicted, and those that would be if memory grew by a tenth faster with one of
    the features.

    Args:
        cost: of all levels (`omnibal.pipeline.level_costs.side_by_side`).
        workload: of all the plan's packs.
    """
    features, slot, size = features_of(workload, cost), workload.slot, len(plan.stages)
    stage_at = [stages[stage] for stages in plan.stages_at_levels]

    def pass_bytes(factors: np.ndarray) -> np.ndarray:
        passes = running_passes(features * np.tile(factors, cost.levels), slot, size, stage)
        return bytes_in_passes(cost, passes, stage_at)[0]

    even = np.ones(workload.features.shape[1])
    unsure = even + _UNSURE * np.eye(len(even))
    predicted = pass_bytes(even)
    ones = running_passes(np.ones((len(workload), 1)), slot, size, stage)
    others = ones.others[:, 0].astype(int)
    heaviest = {_fullest(pass_bytes(factors), others) for factors in (even, *unsure)}
    return [
        Window(
            rows=_rows_about(workload, one, others[one]), predicted_gib=float(predicted[one]) / GIB
        )
        for one in sorted(heaviest, key=lambda one: -predicted[one])
    ]


def _fullest(pass_bytes: np.ndarray, others: np.ndarray) -> int:
    """The heaviest pass, of equal ones the first with the most micro-batches in flight: there too
    where nothing is predicted to be kept of them, as before the first trained unit."""
    equal = np.flatnonzero(fits_cap(pass_bytes.max(), pass_bytes))
    return int(equal[others[equal].argmax()])


def _rows_about(workload: Workload, one: int, others: int) -> np.ndarray:
    """Rows that are held in a pass, and their neighbours in the same step of the same rank.

    Args:
        one: the pass, of all forwards in the packs' order and then all backwards.
        others: micro-batches held besides its own: before it in a forward, after it in a backward.
    """
    row = one % len(workload)
    first, last = (row - others, row) if one < len(workload) else (row, row + others)
    near = np.arange(max(first - 1, 0), min(last + 2, len(workload)))
    step, dp_rank = workload.step, workload.dp_rank
    return near[(step[near] == step[row]) & (dp_rank[near] == dp_rank[row])]
