"""Per-phase clock of a stage's time, without synchronizing the device, and times of its passes.

Shapes: c chunks of a stage, m micro-batches of a rank in a step.
"""

import time
from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from megatron.vlm.backend import has_cuda
from megatron.vlm.step.links import PipelineLinks
from omnibal.pipeline.schedules import Pass


class Phase(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"
    """Whole backward, or its first part."""
    BACKWARD_WEIGHT = "backward_weight"
    """Deferred weight-gradient products."""
    WAIT = "wait"
    DATA = "data"
    OPTIMIZER = "optimizer"
    ENCODER = "encoder"
    """Forward and backward of data-parallel encoders."""
    EXCHANGE = "exchange"
    """Exchange of encoders' features and gradients, with waits."""


Interval = tuple[Phase, float]
"""Phase and milliseconds of one interval."""


class PhaseClock:
    """Clock of milliseconds between phase switches; CUDA events are read at the end of a step."""

    def __init__(self) -> None:
        self._marks: list[tuple[Phase | None, Any]] = []

    def switch(self, phase: Phase) -> None:
        self._marks.append((phase, moment()))

    def stop(self) -> tuple[Interval, ...]:
        """End the last phase; return all intervals in order, and reset."""
        self._marks.append((None, moment()))
        if has_cuda():
            self._marks[-1][1].synchronize()  # the device still gathers weights
        intervals = tuple(
            (phase, elapsed_ms(start, end))
            for (phase, start), (_, end) in pairwise(self._marks)
            if phase is not None
        )
        self._marks.clear()
        return intervals


def each_ms(intervals: Iterable[Interval], phase: Phase) -> list[float]:
    """Return milliseconds of every interval of the phase, in order."""
    return [ms for kind, ms in intervals if kind is phase]


def moment() -> Any:
    """Record a moment on the current CUDA stream or the CPU's clock."""
    if not has_cuda():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(start: Any, end: Any) -> float:
    """Return milliseconds between moments; on CUDA the device must have passed both."""
    return start.elapsed_time(end) if has_cuda() else (end - start) * 1e3


def in_place(links: PipelineLinks, in_turn_ms: Sequence[float], *kinds: Pass) -> np.ndarray:
    """Return pass times of some kinds by micro-batch and chunk, from schedule order, [m, c]."""
    schedule = links.schedule
    micro_batches = len(in_turn_ms) // schedule.chunks
    operations = schedule.rule(links.size, schedule.chunks, micro_batches).operations[links.rank]
    places = [op.micro_batch * schedule.chunks + op.chunk for op in operations if op.kind in kinds]
    times_ms = np.zeros(len(places))
    times_ms[places] = in_turn_ms
    return times_ms.reshape(-1, schedule.chunks)


def forward_and_backward_ms(links: PipelineLinks, intervals: Sequence[Interval]) -> np.ndarray:
    """Return times of a stage's forwards and whole backwards in a step, [2, m, c]."""
    forward_ms = in_place(links, each_ms(intervals, Phase.FORWARD), Pass.FORWARD)
    of_backward = Pass.BACKWARD, Pass.BACKWARD_INPUT
    backward_ms = in_place(links, each_ms(intervals, Phase.BACKWARD), *of_backward)
    late_ms = each_ms(intervals, Phase.BACKWARD_WEIGHT)
    if late_ms:
        backward_ms += in_place(links, late_ms, Pass.BACKWARD_WEIGHT)
    return np.stack([forward_ms, backward_ms])
