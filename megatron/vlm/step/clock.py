"""Clock of a stage's phases, without synchronizing the device, and times of its passes.

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
    BACKWARD = "backward"  # whole backward, or its first part
    BACKWARD_WEIGHT = "backward_weight"  # deferred weight-gradient products
    WAIT = "wait"
    DATA = "data"
    OPTIMIZER = "optimizer"
    ENCODER = "encoder"  # forward and backward of data-parallel encoders
    EXCHANGE = "exchange"  # exchange of encoders' features and gradients, with waits


Interval = tuple[Phase, float]  # phase and milliseconds of one interval


class PhaseClock:
    """Clock of milliseconds between phase switches; CUDA events are read at the end of a step."""

    def __init__(self) -> None:
        self._marks: list[tuple[Phase | None, Any]] = []  # phases and moments of their beginnings

    def switch(self, phase: Phase) -> None:
        self._marks.append((phase, record_moment()))

    def stop(self) -> tuple[Interval, ...]:
        """End the last phase; return all intervals in order, and reset."""
        self._marks.append((None, record_moment()))
        if has_cuda():
            # Only for this event: `torch.cuda.synchronize` would also wait for weight gathers.
            self._marks[-1][1].synchronize()
        intervals = tuple(
            (phase, elapsed_ms(start, end))
            for (phase, start), (_, end) in pairwise(self._marks)
            if phase is not None
        )
        self._marks.clear()
        return intervals


def phase_times_ms(intervals: Iterable[Interval], phase: Phase) -> list[float]:
    """Return milliseconds of every interval of the phase, in order."""
    return [ms for kind, ms in intervals if kind is phase]


def record_moment() -> Any:
    """Return a CUDA event of the current stream, or seconds of the CPU's clock."""
    if not has_cuda():
        return time.perf_counter()
    # The device's time when it gets here, not the time of this call.
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(start: Any, end: Any) -> float:
    """Return milliseconds between moments; on CUDA the device must have passed both."""
    return start.elapsed_time(end) if has_cuda() else (end - start) * 1e3


def by_micro_batch(links: PipelineLinks, ordered_ms: Sequence[float], *kinds: Pass) -> np.ndarray:
    """Return times in ms of passes of `kinds`, given in schedule order, as [m, c]."""
    schedule = links.schedule
    micro_batches = len(ordered_ms) // schedule.chunks
    operations = schedule.rule(links.size, schedule.chunks, micro_batches).operations[links.rank]
    places = [op.micro_batch * schedule.chunks + op.chunk for op in operations if op.kind in kinds]
    times_ms = np.zeros(len(places))
    times_ms[places] = ordered_ms
    return times_ms.reshape(-1, schedule.chunks)


def forward_and_backward_ms(links: PipelineLinks, intervals: Sequence[Interval]) -> np.ndarray:
    """Return ms of a stage's forwards and whole backwards in a step, [2, m, c]."""
    forward_ms = by_micro_batch(links, phase_times_ms(intervals, Phase.FORWARD), Pass.FORWARD)
    kinds = Pass.BACKWARD, Pass.BACKWARD_INPUT
    backward_ms = by_micro_batch(links, phase_times_ms(intervals, Phase.BACKWARD), *kinds)
    late_ms = phase_times_ms(intervals, Phase.BACKWARD_WEIGHT)
    if late_ms:
        backward_ms += by_micro_batch(links, late_ms, Pass.BACKWARD_WEIGHT)
    return np.stack([forward_ms, backward_ms])
