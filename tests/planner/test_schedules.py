"""Schedules as lists: 1F1B and others in the one simulator, and lists that are refused."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from plan_cases import job_spec

from omnibal.job.plan_data import MockData
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.pipeline.interleaved import most_bytes, needed_bytes
from omnibal.pipeline.level_costs import features_of
from omnibal.pipeline.operation_graph import (
    OperationGraph,
    StageOrder,
    held_in_passes,
    operation_graph,
    planned_graph,
)
from omnibal.pipeline.predict import predict
from omnibal.pipeline.schedules import (
    Operation,
    Pass,
    Schedule,
    forward_only,
    interleaved,
    one_forward_one_backward,
)
from omnibal.pipeline.simulate import predict_steps, simulate_schedule, waits_before
from omnibal.pipeline.stage_cost import per_step_costs, workload_times
from omnibal.pipeline.stage_memory import GIB
from omnibal.pipeline.unit_runs import stages_from_cuts

pytestmark = pytest.mark.quick

F, B, BI, BW = Pass.FORWARD, Pass.BACKWARD, Pass.BACKWARD_INPUT, Pass.BACKWARD_WEIGHT
SIZES = [(1, 1), (5, 1), (1, 4), (2, 4), (3, 4), (4, 4), (9, 4), (7, 2), (13, 6)]
"""(micro-batches, stages)."""


def zero_bubble(stages: int, chunks: int, micro_batches: int) -> Schedule:
    """ZB-H1 (arXiv 2401.10241, section 2.2): 1F1B whose backwards of weights are put off.

    Stage s puts off s of them, so that every stage holds as much as the first; the last ones fill
    what 1F1B leaves idle at its end.
    """
    operations = []
    plain_1f1b = one_forward_one_backward(stages, chunks, micro_batches)
    for stage, plain in enumerate(plain_1f1b.operations):
        order: list[Operation] = []
        for one in plain:
            if one.kind is F:
                order.append(one)
                continue
            order.append(Operation(BI, one.micro_batch))
            if one.micro_batch >= stage:
                order.append(Operation(BW, one.micro_batch - stage))
        late = range(max(micro_batches - stage, 0), micro_batches)
        operations.append((*order, *(Operation(BW, i) for i in late)))
    return Schedule(
        name="ZB-H1", chunks=1, micro_batches=micro_batches, operations=tuple(operations),
        is_prefix_closed=False,
    )  # fmt: skip


Key = tuple[int, Operation]
"""(stage, operation)."""


def event_loop(
    schedule: Schedule,
    duration_ms: Mapping[Pass, np.ndarray],
    forward_link_ms: np.ndarray,
    backward_link_ms: np.ndarray,
) -> dict[Key, tuple[float, float]]:
    """When every operation starts and ends, by running whatever stage can go on first.

    Knows where tensors go, not what operations wait for: whoever ends a pass delivers its output.
    """
    stages, parts = schedule.stages, schedule.stages * schedule.chunks
    queues = [list(operations) for operations in schedule.operations]
    free = [0.0] * stages
    delivered: dict[tuple[str, int, int], float] = {}
    for micro_batch in range(schedule.micro_batches):
        delivered["activation", micro_batch, 0] = 0.0
    ran: dict[Key, tuple[float, float]] = {}
    while any(queues):
        ready = []
        for stage, queue in enumerate(queues):
            if not queue:
                continue
            one = queue[0]
            inbox = {F: "activation", B: "gradient", BI: "gradient", BW: "kept"}[one.kind]
            part = one.chunk * stages + stage
            arrival = delivered.get((inbox, one.micro_batch, part))
            if arrival is not None:
                ready.append((max(free[stage], arrival), stage, part))
        start, stage, part = min(ready)
        one = queues[stage].pop(0)
        end = start + duration_ms[one.kind][one.micro_batch, part]
        ran[stage, one], free[stage], i = (start, end), end, one.micro_batch
        if one.kind is F and part == parts - 1:
            delivered["gradient", i, part] = end
        elif one.kind is F:
            delivered["activation", i, part + 1] = end + forward_link_ms[i, part]
        elif one.kind is not BW and part > 0:
            delivered["gradient", i, part - 1] = end + backward_link_ms[i, part - 1]
        if one.kind is BI:
            delivered["kept", i, part] = end
    return ran


def random_durations(
    rng: np.random.Generator, schedule: Schedule, kinds: Sequence[Pass]
) -> tuple[dict[Pass, np.ndarray], np.ndarray, np.ndarray]:
    shape = schedule.micro_batches, schedule.parts
    link_shape = shape[0], shape[1] - 1
    return (
        {kind: rng.exponential(1 + kind, shape) for kind in kinds},
        rng.exponential(0.3, link_shape),
        rng.exponential(0.3, link_shape),
    )


RULES = {
    "1F1B": (one_forward_one_backward, 1, SIZES),
    "forward-only": (forward_only, 1, SIZES),
    "interleaved": (interleaved, 2, [(4, 2), (4, 4), (8, 4), (9, 3), (12, 6), (3, 1)]),
    "three-chunks": (interleaved, 3, [(4, 2), (8, 4)]),
    "zero-bubble": (zero_bubble, 1, SIZES),
}
CASES = [
    pytest.param(rule, stages, chunks, m, id=f"{name}-{stages}x{m}")
    for name, (rule, chunks, sizes) in RULES.items()
    for m, stages in sizes
]


@pytest.mark.parametrize(("rule", "stages", "chunks", "micro_batches"), CASES)
def test_any_schedule_is_simulated_as_an_event_loop_runs_it(rule, stages, chunks, micro_batches):
    """Prevents a simulator that knows one schedule: chunks and backwards in two parts fit."""
    graph = operation_graph(rule, stages, chunks, micro_batches)
    schedule, rng = graph.schedule, np.random.default_rng(stages * 100 + micro_batches)
    for _ in range(5):
        durations, forward_link, backward_link = random_durations(rng, schedule, graph.kinds)
        timeline = simulate_schedule(
            graph,
            {kind: values[None] for kind, values in durations.items()},
            forward_link[None],
            backward_link[None],
            np.array([micro_batches]),
        ).of_step(0)
        ran = event_loop(schedule, durations, forward_link, backward_link)
        for (stage, one), (start, end) in ran.items():
            place = one.micro_batch, schedule.part(stage, one.chunk)
            assert timeline.start_ms[one.kind][place] == pytest.approx(start)
            assert timeline.end_ms[one.kind][place] == pytest.approx(end)
        assert timeline.step_ms == pytest.approx(max(end for _, end in ran.values()))
        waits = waits_before(timeline)
        for stage, operations in enumerate(schedule.operations):
            busy = sum(ran[stage, one][1] - ran[stage, one][0] for one in operations)
            assert timeline.busy_ms[stage] == pytest.approx(busy)
            assert timeline.finish_ms[stage] == pytest.approx(ran[stage, operations[-1]][1])
            columns = [schedule.part(stage, chunk) for chunk in range(chunks)]
            waited = sum(values[:, columns].sum() for values in waits.values())
            assert waited + busy == pytest.approx(timeline.finish_ms[stage])


def step_ms(rule: Callable, chunks: int, durations: Mapping[Pass, float]) -> float:
    """Of 8 micro-batches on 4 equal stages without links, each pass's durations those of a part."""
    graph = operation_graph(rule, 4, chunks, 8)
    values = {kind: np.full((1, 8, 4 * chunks), ms) for kind, ms in durations.items()}
    links = np.zeros((1, 8, 4 * chunks - 1))
    return float(simulate_schedule(graph, values, links, links, np.array([8])).step_ms[0])


def test_other_schedules_have_their_textbook_bubbles():
    """Prevents interleaved and zero-bubble lists that are 1F1B under other names."""
    work_ms = 8 * 4.0
    assert step_ms(one_forward_one_backward, 1, {F: 2, B: 2}) - work_ms == 3 * 4.0
    assert step_ms(interleaved, 2, {F: 1, B: 1}) - work_ms == 3 * 4.0 / 2
    # (p - 1) (F + B - W) of arXiv 2401.10241, table 1, with B that of the input alone.
    assert step_ms(zero_bubble, 1, {F: 1, BI: 1, BW: 1}) - 8 * 3 == pytest.approx(3)


def test_one_chunk_interleaved_is_1f1b_in_time_and_memory():
    """Prevents: a prediction of chunks that counts otherwise than that of plans."""
    job = job_spec(parallel=Parallel(pipeline=3, data=2))
    data = MockData(caps=Caps.of(tiles=3, tokens=700), micro_batches_per_step=6)
    packs, lengths = data.schedule(job)
    workload = job.workload(packs, lengths, data.levels)
    stages = stages_from_cuts(job.model, (4, 8), [[2, 0], [1, 1], [0, 0]])
    plain = predict(job.cost, job.model, job.parallel, (stages,), packs, workload)
    times, once = workload_times(job.cost, (stages,), workload), per_step_costs(job.cost, stages)
    assert predict_steps(times, workload, once).step_ms.mean() == plain.step_ms
    passes = [s.memory.activations_gib + s.memory.transient_gib for s in plain.stages]
    for stage, gib in enumerate(passes):
        graph = operation_graph(one_forward_one_backward, 3, 1, 6)
        largest = features_of(workload, job.cost).max(axis=0)
        needs = [needed_bytes(job.cost, stages[stage], largest)]
        # Links are there in every pass here, and in most there.
        assert gib <= most_bytes(graph, stage, needs) / GIB < 1.1 * gib


def held_in_list(operations: Sequence[Operation]) -> list[tuple[int, set[tuple[int, int]]]]:
    """Every pass but backwards of the input alone: the micro-batch that runs, and all (chunk,
    micro-batch) that are held meanwhile, by walking the list."""
    held: set[tuple[int, int]] = set()
    found = []
    for one in operations:
        if one.kind is BI:
            continue
        held.add((one.chunk, one.micro_batch))
        found.append((one.micro_batch, set(held)))
        if one.kind is not F:
            held.remove((one.chunk, one.micro_batch))
    return found


@pytest.mark.parametrize(
    ("rule", "stages", "chunks", "micro_batches"),
    [case for case in CASES if not case.id.startswith("forward")],
)
def test_what_is_in_flight_is_read_from_the_list(rule, stages, chunks, micro_batches):
    """Prevents a memory count of another schedule than the one that is trained by."""
    graph = operation_graph(rule, stages, chunks, micro_batches)
    for stage, operations in enumerate(graph.schedule.operations):
        passes = held_in_passes(graph, stage)
        counted = [
            (own, {(chunk, i) for chunk, ends in enumerate(runs) for i in range(*ends)})
            for own, runs in zip(passes.micro_batch, passes.held, strict=True)
        ]
        assert counted == held_in_list(operations)
        begins = [one.kind is F for one in operations if one.kind is not BI]
        assert passes.is_forward.tolist() == begins


def test_1f1b_keeps_no_more_than_the_stages_that_are_left():
    """Prevents warm-ups of another length: p - s in flight, and p - 1 - s forwards ahead."""
    for m, p in SIZES:
        graph = planned_graph(p, m)
        for stage in range(p):
            held = [len(each) for _, each in held_in_list(graph.schedule.operations[stage])]
            assert max(held) == min(p - stage, m)
        assert graph.depths == 2 * (m + p - 1)


@pytest.mark.parametrize("rule", [one_forward_one_backward, forward_only])
def test_lists_that_say_so_hold_for_fewer_micro_batches(rule):
    """Prevents short steps that are simulated in an order in which they do not run."""
    for m, p in SIZES:
        schedule = rule(p, 1, m)
        assert schedule.is_prefix_closed
        for fewer in range(m):
            shortened = tuple(
                tuple(one for one in operations if one.micro_batch < fewer)
                for operations in schedule.operations
            )
            assert shortened == rule(p, 1, fewer).operations


def test_stage_order_counts_passes_of_every_shorter_step():
    """Prevents bounds whose paths leave out passes that run, or take in some that do not."""
    for m, p in SIZES:
        graph = planned_graph(p, m)
        for stage in range(p):
            order, count = StageOrder.of_stages(graph)[stage], np.arange(1, m + 1)
            ahead, behind = [], []
            for fewer in count:
                kinds = [
                    one.kind for one in graph.schedule.operations[stage] if one.micro_batch < fewer
                ]
                ahead.append(kinds.index(B))
                behind.append(kinds[::-1].index(F))
            assert order.forwards_before_first_backward(count).tolist() == ahead
            assert order.backwards_after_last_forward(count).tolist() == behind


def with_operations(*operations: Sequence[Operation], chunks: int = 1) -> Schedule:
    """Of 2 micro-batches."""
    return Schedule(
        name="made up", chunks=chunks, micro_batches=2,
        operations=tuple(map(tuple, operations)), is_prefix_closed=False,
    )  # fmt: skip


F0, F1, B0, B1 = (Operation(kind, i) for kind in (F, B) for i in range(2))
FIRST, LAST = (F0, F1, B0, B1), (F0, B0, F1, B1)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (with_operations(FIRST, (F0, B0, F1)), "stage 1 runs micro-batch 1 of chunk 0 forward 1"),
        (with_operations(FIRST, (F0, B0, F1, B1, B1)), "backward 2 times whole"),
        (with_operations(FIRST, (F0, B0, F1, Operation(BI, 1))), "0 times for the weights"),
        (with_operations((F0, F1), (F0, F0)), "micro-batch 0 of chunk 0 forward 2 times"),
        (with_operations(FIRST, (B0, F0, F1, B1)), "stage 1 runs backward of micro-batch 0"),
        (
            with_operations(FIRST, (F0, B0, F1, Operation(BW, 1), Operation(BI, 1))),
            "runs backward weight of micro-batch 1, chunk 0 before backward input",
        ),
        (with_operations(FIRST, (F0, B0, F1, Operation(B, 2))), "of 2 micro-batches"),
        (with_operations(FIRST, (F0, B0, F1, Operation(B, 1, 1))), "and 1 chunks"),
        (
            with_operations((F0, B0, F1, B1), (F0, F1, B0, B1)),
            "ever: stage 0 at backward of micro-batch 0, chunk 0 for stage 1; stage 1 at forward",
        ),
    ],
)
def test_wrong_lists_are_refused(schedule: Schedule, message: str):
    """Prevents a schedule that loses a micro-batch or hangs, found first in a run."""
    with pytest.raises(ValueError, match=message):
        OperationGraph.of(schedule)


def test_what_a_list_lacks_is_named_by_what_relies_on_it():
    """Prevents bounds, memory or short steps that are silently those of 1F1B."""
    two_parts = operation_graph(zero_bubble, 2, 1, 4)
    several = operation_graph(interleaved, 2, 2, 4)
    for graph in (two_parts, several):
        with pytest.raises(ValueError, match="need a schedule of one chunk a stage"):
            StageOrder.of_stages(graph)
    unordered = OperationGraph.of(with_operations((F0, F1, B1, B0), (F0, F1, B1, B0)))
    with pytest.raises(ValueError, match="each run in micro-batch order"):
        StageOrder.of_stages(unordered)
    with pytest.raises(ValueError, match="out of order"):
        held_in_passes(unordered, 0)
    with pytest.raises(ValueError, match="does not hold for fewer"):
        rng = np.random.default_rng(0)
        durations, *links = random_durations(rng, two_parts.schedule, two_parts.kinds)
        simulate_schedule(
            two_parts,
            {kind: np.stack([values] * 2) for kind, values in durations.items()},
            *(np.stack([values] * 2) for values in links),
            np.array([4, 3]),
        )
    with pytest.raises(ValueError, match="1F1B has 1 chunk a stage, not 2"):
        one_forward_one_backward(4, 2, 8)


def test_nothing_to_run_is_a_schedule_too():
    """Prevents a rank without micro-batches from failing where others have some."""
    graph = planned_graph(3, 0)
    assert graph.schedule.operations == ((), (), ())
    assert (len(graph), graph.depths) == (0, 0)
