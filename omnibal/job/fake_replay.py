"""Stages run on a fake device: allocated bytes, launched operations and host reads.

`tools/replay.py --fake-device` writes a file per stage. Times are rooflines.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import NonNegativeFloat, NonNegativeInt

from omnibal.base.frozen import Frozen
from omnibal.cost.model import CostModel
from omnibal.job.plan import Plan
from omnibal.job.replay import ReplayIdentity, StageFiles, StageResult
from omnibal.model.config import ClusterConfig, Precision
from omnibal.pipeline.operation_graph import held_in_passes, schedule_graph
from omnibal.pipeline.schedules import PipelineSchedule
from omnibal.pipeline.stage_memory import GIB, PassBytes, bytes_of_passes, fits_cap
from omnibal.pipeline.workload import Workload

COMPUTE_PHASES = ("forward", "backward", "backward_weight")

OperationKind = Literal["matrix product", "attention", "communication", "element-wise"]


class FakeReplayInfo(ReplayIdentity):
    torch: str  # torch version of the operations counted
    trainer_sha256: str


class OperationCount(Frozen):
    phase: str
    operation: str
    kind: OperationKind
    kernels: NonNegativeInt
    tflop: NonNegativeFloat
    gigabytes: NonNegativeFloat  # bytes of device memory read and written, in 10^9


class PeakContent(Frozen):
    """Storages of one operation alive at the peak, merged over a tower's layers."""

    where: str
    """Path of the module, with * for the layer's number, or empty outside the stage's modules."""
    operation: str
    phase: str
    tensors: NonNegativeInt
    gib: NonNegativeFloat


class HostRead(Frozen):
    """A device-to-host read within a step."""

    phase: str
    operation: str
    where: str
    count: NonNegativeInt


class UnalignedProduct(Frozen):
    """16-bit matrix product with rows not aligned to 16 bytes."""

    where: str  # file and line
    operation: str
    sizes: tuple[NonNegativeInt, ...]  # rows, inner size and columns
    leading_dimensions: tuple[NonNegativeInt, ...]
    count: NonNegativeInt
    tflop: NonNegativeFloat


class Roofline(Frozen):
    """Rates that turn a stage's operations into time."""

    name: str
    matrix_tflop_per_s: NonNegativeFloat
    attention_tflop_per_s: NonNegativeFloat
    attention_backward_tflop_per_s: NonNegativeFloat
    memory_gb_per_s: NonNegativeFloat

    @classmethod
    def of_cluster(cls, cluster: ClusterConfig, precision: Precision) -> "Roofline":
        """Return the cluster's achieved rates, with attention at the matrix product rate."""
        reached = cluster.tflops(precision) * cluster.matmul_efficiency
        return cls(
            name=cluster.name,
            matrix_tflop_per_s=reached,
            attention_tflop_per_s=reached,
            attention_backward_tflop_per_s=reached,
            memory_gb_per_s=cluster.memory_gb_per_s * cluster.memory_efficiency,
        )

    def operation_ms(self, count: OperationCount) -> float:
        """Return the time of all counted launches in ms: the max of compute and memory time."""
        rate = self.matrix_tflop_per_s
        if count.kind == "attention":
            backward = "backward" in count.operation
            rate = self.attention_backward_tflop_per_s if backward else self.attention_tflop_per_s
        return 1e3 * max(count.tflop / rate, count.gigabytes / self.memory_gb_per_s)


class FakeStage(StageResult):
    """Allocations and launches of one device of a stage in its heaviest step."""

    predicted_gib: NonNegativeFloat | None  # predicted peak, or None without a prediction
    allocated_gib: NonNegativeFloat  # peak allocated, in blocks of the caching allocator
    state_gib: NonNegativeFloat  # weights, gradients and optimizer state
    activations_gib: NonNegativeFloat  # everything else at the peak
    peak_phase: str  # "forward", "backward" or "update"
    peak_at: str
    rows: tuple[NonNegativeInt, ...]  # rows of the rank's packs in that step
    micro_batches: NonNegativeInt
    kernels: NonNegativeInt  # kernels of forward and backward, without communication
    tflop: NonNegativeFloat
    gigabytes: NonNegativeFloat
    contents: tuple[PeakContent, ...]  # largest first; sum `allocated_gib`
    operations: tuple[OperationCount, ...]
    host_reads: tuple[HostRead, ...]  # reads in forward, backward and update
    unaligned: tuple[UnalignedProduct, ...]

    @property
    def deviation(self) -> float | None:
        """Predicted over allocated peak, minus 1, or None without a prediction."""
        if self.predicted_gib is None:
            return None
        return self.predicted_gib / self.allocated_gib - 1

    def step_ms(self, rates: Roofline) -> dict[OperationKind, float]:
        """Return the step's compute time in ms by kind, without communication and update."""
        kinds: tuple[OperationKind, ...] = ("matrix product", "attention", "element-wise")
        times = dict.fromkeys(kinds, 0.0)
        for count in self.operations:
            if count.phase in COMPUTE_PHASES and count.kind in times:
                times[count.kind] += rates.operation_ms(count)
        return times

    def element_wise_share(self, rates: Roofline) -> float:
        """Return the share (0 to 1) of compute time outside matrix products and attention."""
        times = self.step_ms(rates)
        total = sum(times.values())
        return times["element-wise"] / total if total else 0.0

    def figures(self, rates: Roofline) -> dict[str, Any]:
        """Return all counts as plain values, with times at these rates."""
        return self.model_dump(mode="json") | {
            "roofline_ms": self.step_ms(rates),
            "element_wise_share": self.element_wise_share(rates),
        }


FAKE_REPLAY_FILES = StageFiles(
    identity=FakeReplayInfo,
    result=FakeStage,
    info_file="fake_device.json",
    prefix="fake_device",
)


def read_fake_stages(directory: Path, plan: Plan) -> tuple[FakeStage, ...]:
    return tuple(
        stage.model_copy(update={"predicted_gib": predicted_peak_gib(plan, stage.stage)})
        for stage in FAKE_REPLAY_FILES.read_stages(directory, plan.parallel.pipeline)
    )


def predicted_peak_gib(plan: Plan, stage: int) -> float | None:
    """Return a stage's predicted peak without NCCL buffers of data-parallel encoders, or None."""
    if plan.prediction is None:
        return None
    # A fake device has no NCCL. Buffers for expert-parallel peers are not subtracted.
    peers = 0
    if (encoders := plan.data_parallel_encoders) is not None:
        peers = encoders.pipelines * plan.parallel.pipeline * plan.parallel.tensor - 1
    peak_gib = plan.prediction.stages[stage].memory.peak_gib
    return peak_gib - peers * plan.cluster.peer_bytes / GIB


def is_fake_replay(directory: Path) -> bool:
    return (directory / FAKE_REPLAY_FILES.info_file).exists()


# Workload rows of consecutive micro-batches around a pass, and its memory beyond the state in GiB.
Window = tuple[np.ndarray, float]
_FEATURE_ERROR = 0.1  # relative error assumed between costs of two features


def heaviest_windows(cost: CostModel, plan: Plan, stage: int, workload: Workload) -> list[Window]:
    """Return windows around candidate passes for the stage's peak memory, heaviest first.

    Candidates are the predicted peak, and the peaks if one feature had `_FEATURE_ERROR` more
    memory. `cost` is of all levels, `workload` of all the plan's packs.
    """
    features = workload.features_of(cost)

    def passes_with(factors: np.ndarray) -> PassBytes:
        scaled = features * np.tile(factors, cost.levels)
        return bytes_of_passes(cost, plan.stages_at_levels, workload, plan.schedule, stage, scaled)

    even = np.ones(workload.features.shape[1])
    predicted, heaviest = passes_with(even), set[int]()
    for passes in (predicted, *map(passes_with, even + _FEATURE_ERROR * np.eye(len(even)))):
        equal = np.flatnonzero(fits_cap(passes.needed.max(), passes.needed))
        # Ties go to the pass with most micro-batches in flight: errors per micro-batch add up.
        heaviest.add(int(equal[passes.others[equal].argmax()]))
    return [
        (
            _rows_around(plan, stage, workload, predicted, number),
            float(predicted.needed[number]) / GIB,
        )
        for number in sorted(heaviest, key=lambda number: -predicted.needed[number])
    ]


def _rows_around(
    plan: Plan, stage: int, workload: Workload, passes: PassBytes, number: int
) -> np.ndarray:
    """Return the shortest run of the rank's rows with a pass's in-flight set and neighbours."""
    row, kind, chunk = int(passes.row[number]), int(passes.kind[number]), int(passes.chunk[number])
    of_rank = (workload.step == workload.step[row]) & (workload.dp_rank == workload.dp_rank[row])
    step_rows = np.flatnonzero(of_rank)
    place, count, schedule = int(row - step_rows[0]), len(step_rows), plan.schedule

    def find_in_flight(first: int, number: int) -> set[tuple[int, int, int]]:
        """Return the pass's in-flight set in a step of `number` micro-batches from `first`."""
        in_flight = _list_in_flight(schedule, plan.parallel.pipeline, stage, number)
        entries = in_flight[kind, chunk, place - first]
        return {(part, state, first + micro_batch) for part, state, micro_batch in entries}

    wanted = find_in_flight(0, count)
    near = {micro_batch for _, _, micro_batch in wanted} | {place}
    start, stop = max(min(near) - 1, 0), min(max(near) + 2, count)
    # Warm-up depends on the number of micro-batches, so shorter steps may hold other sets.
    for number in range(stop - start, count):
        for first in range(max(stop - number, 0), min(start, count - number) + 1):
            if find_in_flight(first, number) == wanted:
                return step_rows[first : first + number]
    return step_rows


@lru_cache(maxsize=64)  # windows of all passes try the same sizes
def _list_in_flight(
    schedule: PipelineSchedule, stages: int, stage: int, micro_batches: int
) -> dict[tuple[int, int, int], list[tuple[int, int, int]]]:
    """Map passes (kind, chunk, micro-batch) to in-flight (chunk, weight pending, micro-batch)."""
    passes = held_in_passes(schedule_graph(schedule, stages, micro_batches), stage)
    states = list(enumerate((passes.held, passes.late)))
    keys = zip(
        passes.kind.tolist(), passes.chunk.tolist(), passes.micro_batch.tolist(), strict=True
    )
    return {
        key: [
            (chunk, state, micro_batch)
            for state, runs in states
            for chunk, (first, stop) in enumerate(runs[place].tolist())
            for micro_batch in range(first, stop)
        ]
        for place, key in enumerate(keys)
    }
