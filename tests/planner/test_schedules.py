"""Schedules as operation lists: 1F1B and others in one simulator, and rejected lists."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest
from schedule_cases import BI, BW, B, F, Held, held_in_list

from omnibal.pipeline.operation_graph import (
    OperationGraph,
    held_in_passes,
    operation_graph,
    others_in_flight,
)
from omnibal.pipeline.schedules import (
    ChunkPass,
    Pass,
    StepSchedule,
    forward_only,
    interleaved_1f1b,
    one_forward_one_backward,
    zero_bubble_h1,
    zero_bubble_v,
)
from omnibal.pipeline.simulate import Joins, order_passes, run_passes

pytestmark = pytest.mark.quick

SIZES = [(1, 1), (5, 1), (1, 4), (2, 4), (3, 4), (4, 4), (9, 4), (7, 2), (13, 6)]
"""(micro-batches, stages)."""


RULES = {
    "1F1B": (one_forward_one_backward, 1, SIZES),
    "forward-only": (forward_only, 1, SIZES),
    "interleaved": (interleaved_1f1b, 2, [(4, 2), (4, 4), (8, 4), (9, 3), (12, 6), (3, 1), *SIZES]),
    "three-chunks": (interleaved_1f1b, 3, [(4, 2), (8, 4), (2, 4), (7, 3)]),
    "zb-h1": (zero_bubble_h1, 1, SIZES),
    "zb-v": (zero_bubble_v, 2, SIZES),
}
CASES = [
    pytest.param(rule, stages, chunks, m, id=f"{name}-{stages}x{m}")
    for name, (rule, chunks, sizes) in RULES.items()
    for m, stages in sizes
]


def bubble_ms(
    rule: Callable, stages: int, chunks: int, micro_batches: int, durations: Mapping[Pass, float]
) -> tuple[float, float]:
    """Return idle ms of equal stages per step, and the maximum between first and last passes."""
    graph, parts = operation_graph(rule, stages, chunks, micro_batches), stages * chunks
    took_ms = np.empty((len(graph.kinds), micro_batches, parts, 1))
    took_ms[:] = np.array([durations[kind] for kind in graph.kinds])[:, None, None, None]
    links_ms = np.zeros((2, micro_batches, parts - 1, 1))
    joins, ready_ms = Joins.build(None), np.zeros((stages, 1))
    end_ms, finish_ms = run_passes(order_passes(graph), took_ms, links_ms, ready_ms, joins)
    work_ms = micro_batches * chunks * sum(durations[kind] for kind in graph.kinds)
    first = [graph.schedule.part(stage, 0) for stage in range(stages)]
    begun_ms = (end_ms - took_ms)[0, 0, first]
    return float(finish_ms.max() - work_ms), float((finish_ms - begun_ms).max() - work_ms)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (4, 12), (6, 24), (8, 16)])
def test_schedules_have_their_textbook_bubbles(stages, micro_batches):
    """Prevents interleaved and zero-bubble lists that have 1F1B's bubble."""
    size = stages, micro_batches
    for f, b, w in ((1.0, 1.0, 1.0), (3.0, 4.0, 2.0), (5.0, 2.0, 2.0), (2.0, 3.0, 1.0)):
        durations = {F: f, B: b + w, BI: b, BW: w}

        def bubble(rule, chunks, durations=durations):
            return bubble_ms(rule, stages, chunks, micro_batches, durations)[0]

        # arXiv 2104.04473, section 2.2; durations are per chunk.
        assert bubble(one_forward_one_backward, 1) == pytest.approx((stages - 1) * (f + b + w))
        for chunks in (2, 3, 5):
            assert bubble(interleaved_1f1b, chunks) == pytest.approx((stages - 1) * (f + b + w))
        # arXiv 2401.10241, table 1, b: the input gradient alone, for w <= f.
        assert bubble(zero_bubble_h1, 1) == pytest.approx((stages - 1) * (f + b - w)), size
    # Section 6: no bubble if f = b = w, except the first micro-batch's latency.
    in_step, between = bubble_ms(zero_bubble_v, *(stages, 2, micro_batches), {F: 1, BI: 1, BW: 1})
    assert (in_step, between) == (stages - 1, 0)


def test_a_smaller_last_group_takes_less_than_a_whole_one():
    """Prevents interleaving that pads the last group with micro-batches that do not exist."""
    durations = {F: 1.0, B: 2.0}

    def step(m):
        return bubble_ms(interleaved_1f1b, 4, 2, m, durations)[0] + m * 2 * 3

    assert all(earlier < later for earlier, later in pairwise(map(step, range(1, 14))))


@pytest.mark.parametrize("rule", [zero_bubble_h1, zero_bubble_v])
def test_zero_bubble_holds_no_more_than_1f1b(rule):
    """Prevents deferred weight gradients that exceed 1F1B's memory."""
    chunks = 1 + (rule is zero_bubble_v)
    for m, p in SIZES:
        for operations in rule(p, chunks, m).operations:
            held = [len(kept | late) for _, kept, late in held_in_list(operations)]
            assert max(held) <= p * chunks


def test_random_sizes_are_schedules():
    """Prevents lists that lose an operation, or hang, at unusual sizes."""
    rng = np.random.default_rng(0)
    for _ in range(150):
        stages, micro_batches = int(rng.integers(1, 10)), int(rng.integers(0, 30))
        several = int(rng.integers(1, 6))
        for rule, chunks in ((interleaved_1f1b, several), (zero_bubble_h1, 1), (zero_bubble_v, 2)):
            graph = OperationGraph.build(rule(stages, chunks, micro_batches))
            two_parts = rule is not interleaved_1f1b
            assert len(graph) == (2 + two_parts) * stages * chunks * micro_batches


@pytest.mark.parametrize(
    ("rule", "stages", "chunks", "micro_batches"),
    [case for case in CASES if not case.id.startswith("forward")],
)
def test_what_is_in_flight_is_read_from_the_list(rule, stages, chunks, micro_batches):
    """Prevents memory counted for a schedule other than the trained one."""
    graph = operation_graph(rule, stages, chunks, micro_batches)

    def places(runs: np.ndarray) -> Held:
        return {(chunk, i) for chunk, ends in enumerate(runs) for i in range(*ends)}

    for stage, operations in enumerate(graph.schedule.operations):
        passes = held_in_passes(graph, stage)
        ran = map(Pass, passes.kind), passes.micro_batch, passes.chunk
        listed = [ChunkPass(*each) for each in zip(*ran, strict=True)]
        counted = zip(listed, map(places, passes.held), map(places, passes.late), strict=True)
        assert list(counted) == held_in_list(operations)


def test_1f1b_keeps_no_more_than_the_stages_that_are_left():
    """Prevents warm-ups of a wrong length: p - s in flight, and p - 1 - s forwards ahead."""
    for m, p in SIZES:
        graph = operation_graph(one_forward_one_backward, p, 1, m)
        for stage in range(p):
            held = [len(kept) for _, kept, _ in held_in_list(graph.schedule.operations[stage])]
            assert max(held) == min(p - stage, m)


@pytest.mark.parametrize(
    ("rule", "chunks"),
    [(one_forward_one_backward, 1), (forward_only, 1), (interleaved_1f1b, 3), (zero_bubble_h1, 1)],
)
def test_lists_that_say_so_hold_for_fewer_micro_batches(rule, chunks):
    """Prevents short steps simulated in an order that differs from the run's."""
    for m, p in SIZES:
        schedule = rule(p, chunks, m)
        assert schedule.is_prefix_closed
        for fewer in range(m):
            for operations, short in zip(
                schedule.operations, rule(p, chunks, fewer).operations, strict=True
            ):
                assert tuple(one for one in operations if one.micro_batch < fewer) == short


def test_others_in_flight_count_passes_of_every_shorter_step():
    """Prevents step-time bounds with missing passes or passes that do not run."""
    for m, p in SIZES:
        graph = operation_graph(one_forward_one_backward, p, 1, m)
        for stage in range(p):
            others, count = others_in_flight(p, m)[stage], np.arange(1, m + 1)
            ahead, behind = [], []
            for fewer in count:
                operations = graph.schedule.operations[stage]
                kinds = [one.kind for one in operations if one.micro_batch < fewer]
                ahead.append(kinds.index(B))
                behind.append(kinds[::-1].index(F))
            assert np.minimum(others[1, 0] + 1, count).tolist() == ahead
            assert (others[0] + 1).tolist() == behind


def with_operations(*operations: Sequence[ChunkPass], chunks: int = 1) -> StepSchedule:
    """Return a schedule of 2 micro-batches."""
    return StepSchedule(
        name="made up", chunks=chunks, micro_batches=2,
        operations=tuple(map(tuple, operations)), is_prefix_closed=False,
    )  # fmt: skip


F0, F1, B0, B1 = (ChunkPass(kind, i) for kind in (F, B) for i in range(2))
FIRST, LAST = (F0, F1, B0, B1), (F0, B0, F1, B1)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (with_operations(FIRST, (F0, B0, F1)), "micro-batch 1 of part 1"),
        (with_operations(FIRST, (F0, B0, F1, B1, B1)), "9 operations do not run every"),
        (with_operations(FIRST, (F0, B0, F1, ChunkPass(BI, 1))), "micro-batch 1 of part 1"),
        (with_operations((F0, F1), (F0, F0)), "micro-batch 1 of part 1"),
        (with_operations(FIRST, (B0, F0, F1, B1)), "micro-batch 0 of part 1"),
        (with_operations(FIRST, (F0, B0, F1, ChunkPass(BW, 1), ChunkPass(BI, 1))), "batch 1 of"),
        (with_operations((F0, B0, F1, B1), (F0, F1, B0, B1)), "deadlock of stages"),
    ],
)
def test_wrong_lists_are_refused(schedule: StepSchedule, message: str):
    """Prevents a schedule that loses a micro-batch or hangs, found only during a run."""
    with pytest.raises(ValueError, match=message):
        OperationGraph.build(schedule)


def test_what_a_list_lacks_is_named_by_what_relies_on_it():
    """Prevents bounds, memory or short steps silently computed for 1F1B."""
    unordered = OperationGraph.build(with_operations((F0, F1, B1, B0), (F0, F1, B1, B0)))
    with pytest.raises(ValueError, match="out of order"):
        held_in_passes(unordered, 0)


def test_nothing_to_run_is_a_schedule_too():
    """Prevents a rank without micro-batches from failing while other ranks have some."""
    graph = operation_graph(one_forward_one_backward, 3, 1, 0)
    assert graph.schedule.operations == ((), (), ())
    assert len(graph) == 0
