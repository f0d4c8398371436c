"""Times of a step's passes by micro-batch, from a stage's clock in schedule order.

Shapes: c chunks of a stage, m micro-batches of a rank in a step.
"""

from collections.abc import Sequence

import numpy as np

from megatron.vlm.step.clock import Interval, Phase, each_ms
from megatron.vlm.step.links import PipelineLinks
from omnibal.pipeline.schedules import Pass


def in_place(links: PipelineLinks, in_turn_ms: Sequence[float], *kinds: Pass) -> np.ndarray:
    """Return pass times of some kinds by micro-batch and chunk, from schedule order, [m, c]."""
    schedule = links.schedule
    micro_batches = len(in_turn_ms) // schedule.chunks
    listed = schedule.rule(links.size, schedule.chunks, micro_batches).operations[links.rank]
    places = [one.micro_batch * schedule.chunks + one.chunk for one in listed if one.kind in kinds]
    found = np.zeros(len(places))
    found[places] = in_turn_ms
    return found.reshape(-1, schedule.chunks)


def forward_and_backward_ms(links: PipelineLinks, intervals: Sequence[Interval]) -> np.ndarray:
    """Return times of a stage's forwards and whole backwards in a step, [2, m, c]."""
    forward_ms = in_place(links, each_ms(intervals, Phase.FORWARD), Pass.FORWARD)
    of_backward = Pass.BACKWARD, Pass.BACKWARD_INPUT
    backward_ms = in_place(links, each_ms(intervals, Phase.BACKWARD), *of_backward)
    late_ms = each_ms(intervals, Phase.BACKWARD_WEIGHT)
    if late_ms:
        backward_ms += in_place(links, late_ms, Pass.BACKWARD_WEIGHT)
    return np.stack([forward_ms, backward_ms])
