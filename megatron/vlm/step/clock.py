"""Per-phase clock of a stage's time, without synchronizing the device."""

import time
from collections.abc import Iterable
from enum import StrEnum
from itertools import pairwise
from typing import Any

import torch

from megatron.vlm.backend import has_cuda


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
    return [ms for one, ms in intervals if one is phase]


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
