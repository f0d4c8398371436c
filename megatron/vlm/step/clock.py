"""Clock of a stage's time by phase, without synchronizing the device."""

import time
from collections.abc import Iterable
from enum import StrEnum
from itertools import pairwise
from typing import Any

import torch

from megatron.vlm.backend import has_cuda


class Phase(StrEnum):
    """Phase of a step on one stage."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Whole, or the first of two parts."""
    BACKWARD_WEIGHT = "backward_weight"
    """The second part: products for weight gradients."""
    WAIT = "wait"
    DATA = "data"
    OPTIMIZER = "optimizer"
    ENCODER = "encoder"
    """Forward and backward of data-parallel encoders."""
    EXCHANGE = "exchange"
    """Their features and gradients sent, and the wait for the ranks that these come from."""


Interval = tuple[Phase, float]
"""Phase and milliseconds of one interval; a step has several of each phase."""


class PhaseClock:
    """Clock that measures the milliseconds between switches from one phase to the next.

    On CUDA the switches are events on the current stream, read once at the end of the step; on the
    CPU they are clock readings.
    """

    def __init__(self) -> None:
        self._marks: list[tuple[Phase | None, Any]] = []

    def switch(self, phase: Phase) -> None:
        """End the current phase and begin `phase`."""
        self._marks.append((phase, moment()))

    def stop(self) -> tuple[Interval, ...]:
        """End the last phase; returns all since the first switch, in order, and resets."""
        self._marks.append((None, moment()))
        if has_cuda():
            torch.cuda.synchronize()
        intervals = tuple(
            (phase, elapsed_ms(start, end))
            for (phase, start), (_, end) in pairwise(self._marks)
            if phase is not None
        )
        self._marks.clear()
        return intervals


def each_ms(intervals: Iterable[Interval], phase: Phase) -> list[float]:
    """Milliseconds of every interval of the phase, in order."""
    return [ms for one, ms in intervals if one is phase]


def moment() -> Any:
    """Record a moment on the current CUDA stream, or on the CPU's clock."""
    if not has_cuda():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(start: Any, end: Any) -> float:
    """Milliseconds between two moments; on CUDA the device must have passed both."""
    return start.elapsed_time(end) if has_cuda() else (end - start) * 1e3
