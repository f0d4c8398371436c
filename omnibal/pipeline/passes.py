"""Passes of a stage in any schedule, with the micro-batches in flight during each.

A chunk keeps a micro-batch's activations from forward to the end of (input) backward, then, with
split backwards, linear inputs and output gradients until the weight backward
(`omnibal.cost.linears`). In 1F1B, receives are posted while a pass computes and a send is waited
for at the next one, so P2P tensors come and go. Other schedules have one buffer each way per peer
stage throughout, sized for the largest chunk.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from omnibal.base.arrays import rows_of
from omnibal.pipeline.operation_graph import held_in_passes, listed_micro_batches, schedule_graph
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, Pass, PipelineSchedule
from omnibal.pipeline.workload import Workload

_PASSES_AT_ONCE = 4_096  # passes computed at a time
_PACKS_AT_ONCE = 50_000  # micro-batches per batch of passes: limits memory to a few hundred MB

# Groups of P2P tensors sharing one buffer: index in `CUT_TENSORS`, and chunk.
LinkBuffers = tuple[tuple[tuple[int, int], ...], ...]
CUT_TENSORS = "input", "input's gradient", "output", "output's gradient"
"""P2P tensors of the cuts before and after a chunk."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Passes:
    """Passes of one chunk of a stage. F features are of all levels."""

    chunk: int
    chunks: int
    link_buffers: LinkBuffers
    largest: np.ndarray  # maximum of each feature over all micro-batches, [F]
    row: np.ndarray  # workload row of the running micro-batch, [passes]
    kind: np.ndarray  # `Pass` of each, [passes]
    own: np.ndarray  # features of the running micro-batch, [passes, F]
    # Summed features of the other micro-batches that each chunk keeps for backward, then, if
    # backwards are split, of those awaiting weight gradients. [passes, (1 or 2) * chunks, F]
    others: np.ndarray
    links: np.ndarray  # 1 if the P2P buffer is in use, else 0, [passes, buffers]

    def take(self, chosen: np.ndarray | slice) -> "Passes":
        """Select passes."""
        return rows_of(self, chosen, "largest")

    def batches(self) -> Iterator["Passes"]:
        """Yield all passes in turn, few at a time, which limits memory."""
        for first in range(0, len(self.row), _PASSES_AT_ONCE):
            yield self.take(slice(first, first + _PASSES_AT_ONCE))

    @property
    def in_two(self) -> bool:
        """Whether backwards are split."""
        return self.others.shape[1] > self.chunks

    @property
    def is_backward(self) -> np.ndarray:
        """Whether the pass has an output gradient: a backward, or its input part. [passes]"""
        return (self.kind == Pass.BACKWARD) | (self.kind == Pass.BACKWARD_INPUT)


def stage_passes(
    features: np.ndarray,
    workload: Workload,
    schedule: PipelineSchedule,
    stages: int,
    stage: int,
    chosen: np.ndarray | None = None,
) -> Iterator[Passes]:
    """Yield every pass of a stage in a run, in batches of one kind and chunk.

    Args:
        features: [rows, F], sorted by step, rank and slot.
        chosen: indices of the passes to return, increasing, or None for all. With equal chunks,
            an index is the same pass of the same micro-batch in every stage.
    """
    # Micro-batches in flight are consecutive rows, so prefix sums give their summed features.
    total = np.zeros((len(features) + 1, features.shape[1]))
    np.cumsum(features, axis=0, out=total[1:])
    first = np.flatnonzero(workload.slot == 0)
    counts = np.diff(np.append(first, len(features)))
    listed = listed_micro_batches(
        schedule_graph(schedule, stages, int(counts.max())),
        counts,
        workload.step[first],
        together=workload.runs_together,
    )
    buffers, largest, yielded = link_buffers(schedule, stages, stage), features.max(axis=0), 0
    for length in np.unique(listed).tolist():
        passes = held_in_passes(schedule_graph(schedule, stages, length), stage)
        own_kinds = np.unique(passes.kind).tolist()
        ranks, at_once = np.flatnonzero(listed == length), max(_PACKS_AT_ONCE // length, 1)
        for begin in range(0, len(ranks), at_once):
            batch = ranks[begin : begin + at_once]
            for kind, chunk in [(kind, c) for kind in own_kinds for c in range(schedule.chunks)]:
                operations = np.flatnonzero((passes.kind == kind) & (passes.chunk == chunk))
                rank, place = np.nonzero(passes.micro_batch[operations] < counts[batch][:, None])
                if chosen is not None:  # of the indices from `yielded` on
                    here = chosen[np.searchsorted(chosen, yielded) :] - yielded
                    yielded += len(rank)
                    here = here[: np.searchsorted(here, len(rank))]
                    rank, place = rank[here], place[here]
                place, base, count = operations[place], first[batch][rank], counts[batch][rank]
                held, late = passes.held[place], passes.late[place]  # [passes, chunks, 2]
                links = _live_links(schedule, kind, held[:, 0].T, count, len(buffers))
                # The running micro-batch is the last that begun, or the first to end.
                if kind == Pass.FORWARD:
                    held[:, chunk, 1] -= 1
                else:
                    (late if kind == Pass.BACKWARD_WEIGHT else held)[:, chunk, 0] += 1
                runs = np.concatenate([held, late], axis=1) if schedule.in_two else held
                # Ranks may have fewer micro-batches than their list.
                runs = base[:, None, None] + np.minimum(runs, count[:, None, None])
                row = base + passes.micro_batch[place]
                yield Passes(
                    chunk=chunk,
                    chunks=schedule.chunks,
                    link_buffers=buffers,
                    largest=largest,
                    row=row,
                    kind=np.full(len(row), kind),
                    own=features[row],
                    others=total[runs[..., 1]] - total[runs[..., 0]],
                    links=links,
                )


def join_passes(batches: Sequence[Passes]) -> Passes:
    """Concatenate passes of one chunk."""
    names = "row", "kind", "own", "others", "links"
    arrays: dict[str, Any] = {n: np.concatenate([getattr(b, n) for b in batches]) for n in names}
    return replace(batches[0], **arrays)


def all_passes(
    features: np.ndarray,
    workload: Workload,
    stages: int,
    stage: int,
    chosen: np.ndarray | None = None,
) -> Passes:
    """Return every pass of a stage in 1F1B, or the passes at increasing indices `chosen`."""
    schedule = ONE_FORWARD_ONE_BACKWARD
    return join_passes([*stage_passes(features, workload, schedule, stages, stage, chosen)])


def largest_pass(features: np.ndarray, workload: Workload, stages: int, stage: int) -> Passes:
    """Return a made-up pass that bounds all of a stage in 1F1B, as bytes grow with features."""
    schedule, micro_batches = ONE_FORWARD_ONE_BACKWARD, int(workload.slot.max()) + 1
    held = held_in_passes(schedule_graph(schedule, stages, micro_batches), stage).held[:, 0]
    largest, buffers = features.max(axis=0), link_buffers(schedule, stages, stage)
    return Passes(
        chunk=0,
        chunks=1,
        link_buffers=buffers,
        largest=largest,
        row=np.zeros(1, np.int64),
        kind=np.array([Pass.BACKWARD]),
        own=largest[None],
        others=(np.diff(held).max() - 1) * largest[None, None],
        links=np.ones((1, len(buffers))),
    )


def _live_links(
    schedule: PipelineSchedule, kind: int, held: np.ndarray, count: np.ndarray, buffers: int
) -> np.ndarray:
    """Return which P2P buffers are in use during passes of one kind, given the first and end
    micro-batch in flight `held` [2, passes] and the rank's micro-batches `count` [passes]."""
    links = np.ones((len(count), buffers))
    if schedule == ONE_FORWARD_ONE_BACKWARD:
        first, end = held
        # Input, its gradient, output, its gradient: receives for the next pass are posted while
        # this pass computes. A step's first forward and first backward begin without them.
        if kind == Pass.FORWARD:
            begun = end > 1
            live = begun & (end < count), first > 0, begun, first > 0
        else:
            live = end < count, first > 0, count > 0, (first > 0) & (first + 1 < count)
        links[:] = np.stack(live, axis=1)
    return links


def link_buffers(schedule: PipelineSchedule, stages: int, stage: int) -> LinkBuffers:
    """Return the P2P buffers of a stage: one per tensor in 1F1B, else one per peer stage and
    direction for activations, and one for gradients, which chunks share."""
    if schedule == ONE_FORWARD_ONE_BACKWARD:
        return tuple(((tensor, 0),) for tensor in range(len(CUT_TENSORS)))
    place, last = schedule.placement, stages * schedule.chunks - 1
    buffers: defaultdict[tuple[int, int, bool], list[tuple[int, int]]] = defaultdict(list)
    for chunk in range(schedule.chunks):
        part = place.part(stage, chunk, stages)
        for tensor, other in enumerate((part - 1, part - 1, part + 1, part + 1)):
            if 0 <= other <= last:
                peer = place.stage_of(other, stages)
                # Input and output gradient are received; on the same stage nothing is.
                is_received = tensor in (0, 3) and peer != stage
                buffers[peer, tensor % 2, is_received].append((tensor, chunk))
    return tuple(map(tuple, buffers.values()))
