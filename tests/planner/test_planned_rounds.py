"""Encoders in rounds: simulated as a plain walk of who waits for what, dealt as item by item."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations_with_replacement, product
from pathlib import Path

import numpy as np
import pytest
from plan_cases import request
from schedule_cases import SCHEDULES, B, F

from omnibal.base.errors import UserError
from omnibal.dispatch.items import load_of_stages, share_items, unit_of_time
from omnibal.job.check import check_and_open
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import make_ordered_plan
from omnibal.model.data_parallel_encoders import (
    DataParallelEncoders,
    EncoderPlacement,
    EncoderRound,
    EncoderRounds,
)
from omnibal.model.parallel import Parallel
from omnibal.pipeline.encoder_rounds import (
    hide_encoders,
    order_of,
    simulate_rounds,
    simulate_with_encoders,
)
from omnibal.pipeline.encoding import RoundWork
from omnibal.pipeline.operation_graph import schedule_graph
from omnibal.pipeline.round_search import RoundProblem, search_rounds
from omnibal.pipeline.round_work import shares_of_rounds, with_rounds
from omnibal.pipeline.schedules import Pass, PipelineSchedule
from omnibal.pipeline.simulate import SimulatedRows, predict_steps
from omnibal.pipeline.stage_cost import per_step_costs, workload_times


def random_rounds(
    rng: np.random.Generator, schedule: PipelineSchedule, stages: int, micro_batches: int
) -> tuple[EncoderRound, ...]:
    """Rounds at the places of a random run, in which whatever may go on does so in turn."""
    count = int(rng.integers(2, micro_batches + 1))
    cuts = np.sort(rng.choice(np.arange(1, micro_batches), count - 1, replace=False))
    sizes = np.diff(np.concatenate([[0], cuts, [micro_batches]])).tolist()
    graph = schedule_graph(schedule, stages, micro_batches)
    lists = [graph.of_stage(stage).tolist() for stage in range(stages)]
    done = np.arange(len(graph) + 1) == len(graph)
    ahead, behind = np.full((2, stages, count), -1)
    returned = np.zeros(count, int)
    round_of = np.repeat(np.arange(count), sizes)
    ran = np.zeros(stages, int)

    def may_run(stage: int) -> list[str]:
        can = []
        if ran[stage] < len(lists[stage]):
            one = lists[stage][ran[stage]]
            needs = graph.kind[one] == F and graph.part[one] == 0
            if done[graph.source[one]] and not (
                needs and (ahead[:, round_of[graph.micro_batch[one]]] < 0).any()
            ):
                can.append("pass")
        begun, back = (ahead[stage] >= 0).sum(), (behind[stage] >= 0).sum()
        if begun < count:
            can.append("ahead")
        elif back < count and returned[back] == sizes[back] and (ahead >= 0).all():
            can.append("behind")
        return can

    while moves := [(stage, what) for stage in range(stages) for what in may_run(stage)]:
        stage, what = moves[int(rng.integers(len(moves)))]
        if what == "pass":
            one = lists[stage][ran[stage]]
            done[one] = True
            ran[stage] += 1
            is_back = graph.kind[one] in (Pass.BACKWARD, Pass.BACKWARD_INPUT)
            returned[round_of[graph.micro_batch[one]]] += is_back and graph.part[one] == 0
        else:
            table = ahead if what == "ahead" else behind
            table[stage, (table[stage] >= 0).sum()] = ran[stage]
    return tuple(
        EncoderRound(
            micro_batches=size,
            forward_after=tuple(ahead[:, number].tolist()),
            backward_after=tuple(behind[:, number].tolist()),
            load_ms=(0.0,) * stages,
        )
        for number, size in enumerate(sizes)
    )


def random_rows(
    rng: np.random.Generator, schedule: PipelineSchedule, stages: int, micro_batches: int, rows: int
) -> SimulatedRows:
    shape = rows, micro_batches, stages * schedule.chunks
    links = rng.uniform(0, 1, (2, *shape[:2], shape[2] - 1))
    return SimulatedRows(
        schedule=schedule,
        pass_ms={kind: rng.uniform(1, 3, shape) for kind in schedule.passes},
        forward_link_ms=links[0],
        backward_link_ms=links[1],
        counts=np.full(rows, micro_batches),
        ranks=1,
        together=False,
        context=None,
        lockstep=None,
        waits_ms=None,
    )


def random_work(
    rng: np.random.Generator, rounds: tuple[EncoderRound, ...], groups: int, pipelines: int
) -> RoundWork:
    shape = groups, pipelines, len(rounds), len(rounds[0].load_ms)
    return RoundWork(
        rounds=rounds,
        step=np.arange(groups),
        first_rank=np.zeros(groups, int),
        forward_ms=rng.uniform(0, 3, shape),
        backward_ms=rng.uniform(0, 5, shape),
        exchange_ms=rng.uniform(0, 2, shape[::2]),
        exchange_back_ms=rng.uniform(0, 2, shape[::2]),
    )


class Walk:
    """One group's step, each thing's end asked of what it waits for."""

    def __init__(
        self, schedule: PipelineSchedule, rows: SimulatedRows, work: RoundWork, group: int
    ) -> None:
        self.rows, self.work, self.group = rows, work, group
        self.pipelines, self.stages = work.forward_ms.shape[1], rows.stages
        micro_batches, self.parts = rows.pass_ms[F].shape[1:]
        self.listed = schedule.rule(self.stages, schedule.chunks, micro_batches)
        self.ends = np.cumsum([one.micro_batches for one in work.rounds])
        self.back = B if B in schedule.passes else Pass.BACKWARD_INPUT
        self.lists = [list(self._list(stage)) for stage in range(self.stages)]
        self.end, self.there = cache(self._end), cache(self._there)

    def _list(self, stage: int) -> Iterator[tuple]:
        operations = self.listed.operations[stage]
        for place in range(len(operations) + 1):
            for number, one in enumerate(self.work.rounds):
                if one.forward_after[stage] == place:
                    yield "ahead", number
            for number, one in enumerate(self.work.rounds):
                if one.backward_after[stage] == place:
                    yield "behind", number
            yield from (("pass", one) for one in operations[place : place + 1])

    def step_ms(self, pipeline: int) -> float:
        lasts = enumerate(self.lists)
        return max(self.end(pipeline, stage, len(each) - 1) for stage, each in lasts)

    def _end(self, pipeline: int, stage: int, place: int) -> float:
        if place < 0:
            return 0.0
        start, (what, one) = self.end(pipeline, stage, place - 1), self.lists[stage][place]
        if what == "ahead":
            return start + float(self.work.forward_ms[self.group, pipeline, one, stage])
        if what == "behind":
            took = self.work.backward_ms[self.group, pipeline, one, stage]
            return max(start, self.there(one, True)) + float(took)
        row, part = self._row(pipeline), self.listed.part(stage, one.chunk)
        came = self._came(pipeline, one.kind, one.micro_batch, part)
        return max(start, came) + float(self.rows.pass_ms[one.kind][row, one.micro_batch, part])

    def _row(self, pipeline: int) -> int:
        return self.group * self.pipelines + pipeline

    def _came(self, pipeline: int, kind: Pass, i: int, part: int) -> float:
        """When what a pass takes has come."""
        row = self._row(pipeline)
        if kind is F and part == 0:
            return self.there(int(np.searchsorted(self.ends, i, "right")), False)
        if kind is F:
            link = self.rows.forward_link_ms[row, i, part - 1]
            return self._ended(pipeline, F, i, part - 1) + float(link)
        if kind is self.back and part < self.parts - 1:
            link = self.rows.backward_link_ms[row, i, part]
            return self._ended(pipeline, kind, i, part + 1) + float(link)
        return 0.0

    def _ended(self, pipeline: int, kind: Pass, micro_batch: int, part: int) -> float:
        stage = self.listed.stage_of(part)
        [place] = [
            place
            for place, (what, one) in enumerate(self.lists[stage])
            if what == "pass"
            and (one.kind, one.micro_batch) == (kind, micro_batch)
            and self.listed.part(stage, one.chunk) == part
        ]
        return self.end(pipeline, stage, place)

    def _there(self, number: int, is_back: bool) -> float:
        """When a round's features are there, or their gradients."""
        every = range(self.pipelines)
        if is_back:
            last, rounds = int(self.ends[number]) - 1, len(self.work.rounds)
            leaves = [self._ended(one, self.back, last, 0) for one in every]
            leaves += [
                self.end(one, stage, own.index(("ahead", rounds - 1)))
                for one in every
                for stage, own in enumerate(self.lists)
            ]
        else:
            leaves = [
                self.end(one, stage, own.index(("ahead", number)))
                for one in every
                for stage, own in enumerate(self.lists)
            ]
        if number:
            leaves.append(self.there(number - 1, is_back))
        took = self.work.exchange_back_ms if is_back else self.work.exchange_ms
        return max(leaves) + float(took[self.group, number])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: f"{each.name}-{each.chunks}")
@pytest.mark.parametrize("seed", range(12))
def test_steps_are_those_of_a_walk(schedule: PipelineSchedule, seed: int) -> None:
    """Prevents: an encoder that overtakes its stage's passes, or features that come too early."""
    rng = np.random.default_rng(seed)
    stages, micro_batches = int(rng.integers(2, 5)), int(rng.integers(2, 8))
    groups, pipelines = int(rng.integers(1, 3)), int(rng.integers(1, 4))
    rounds = random_rounds(rng, schedule, stages, micro_batches)
    rows = random_rows(rng, schedule, stages, micro_batches, groups * pipelines)
    work = random_work(rng, rounds, groups, pipelines)
    step_ms = simulate_rounds(schedule, rows, work).step_ms.reshape(groups, pipelines)
    for group, of_pipelines in enumerate(step_ms):
        walk = Walk(schedule, rows, work, group)
        np.testing.assert_allclose(of_pipelines, [walk.step_ms(one) for one in range(pipelines)])


def test_rounds_that_wait_for_ever_are_refused(tmp_path: Path) -> None:
    """Prevents: a plan that hangs every rank of the job."""
    first = EncoderRound(
        micro_batches=1, forward_after=(0, 0), backward_after=(8, 8), load_ms=(0.0, 0.0)
    )
    result, _ = planned()
    for change, words in (
        ({"forward_after": (0, 1)}, "stage 0 comes to the forward of micro-batch 0"),
        ({"backward_after": (3, 8)}, "its gradients are not complete before"),
        ({"backward_after": (9, 8)}, "the stage runs 8"),
        ({"load_ms": (0.0,) * 3, "forward_after": (0,) * 3, "backward_after": (8,) * 3},
         "rounds of 3 stages"),
    ):  # fmt: skip
        wrong = first.model_copy(update=change)
        rounds = EncoderRounds(micro_batches=4, rounds=(wrong,) * 4)
        assert result.plan.beside is not None
        beside = result.plan.beside.model_copy(update={"rounds": (rounds,)})
        plan = result.plan.model_copy(update={"beside": beside})
        directory = tmp_path / words[:9]
        save_plan(replace(result, plan=plan), directory)
        with pytest.raises(UserError, match=words):
            check_and_open(directory)


def planned(**changes):
    """A plan of two pipelines of two stages with encoders beside them, and its request."""
    usual = {"parallel": Parallel(pipeline=2, data=2), "packs_per_step": 8}
    asked = request(**(usual | {"placement": EncoderPlacement.DATA_PARALLEL} | changes))
    return make_ordered_plan(asked, in_rounds=False), asked


def problem_of(**changes) -> tuple[RoundProblem, DataParallelEncoders]:
    result, asked = planned(**changes)
    plan = result.plan
    assert plan.beside is not None
    job = replace(asked.job, beside=plan.beside)
    packs, lengths = asked.data.schedule(job)
    cost = job.cost_of_all(plan.pack_levels)
    assert job.encoders_cost is not None
    problem = RoundProblem(
        workload=job.workload(packs, lengths, plan.pack_levels),
        features=cost.features,
        cost=cost,
        encoders=job.encoders_cost,
        beside=plan.beside,
        stages_at=plan.stages_at_levels,
        schedule=plan.schedule,
        memory_cap_bytes=job.memory_cap_gib * 2**30,
    )
    return problem, plan.beside


def test_a_round_is_dealt_as_a_step_of_its_own_beside_its_load() -> None:
    """Prevents: a planner and a trainer that deal a round's items otherwise."""
    problem, beside = problem_of()
    workload, encoders = problem.workload, problem.encoders
    loads = (0.0, 3 * beside.item_ms["vision"])
    one = EncoderRound(micro_batches=2, forward_after=(0, 0), backward_after=(8, 8), load_ms=loads)
    rounds = EncoderRounds(micro_batches=4, rounds=(one, one))
    found = list(shares_of_rounds(workload, problem.features, encoders, beside, rounds))
    unit_ms = unit_of_time(beside.item_ms, {})
    tiles = workload.features[:, problem.features.index("tiles")].astype(int)
    groups = 2 // beside.pipelines
    tried = 0
    for step, number in product(found[0].steps.tolist(), range(2)):
        at = int(np.searchsorted(found[0].steps, step))
        for group in range(groups):
            ranks = np.arange(group * beside.pipelines, (group + 1) * beside.pipelines)
            own = (workload.step == step) & np.isin(workload.dp_rank, ranks)
            counts = np.bincount(workload.dp_rank[own], minlength=2)[ranks]
            encoded = found[number].encoded["vision"].reshape(-1, groups, 2 * beside.pipelines)
            if (counts != 4).any():
                assert not encoded[at, group].any()
                continue
            own &= workload.slot // 2 == number
            runs = share_items(
                {"vision": tiles[own]},
                workload.dp_rank[own] - ranks[0],
                pipelines=beside.pipelines,
                ranks_of_pipeline=2,
                item_ms=beside.item_ms,
                load=load_of_stages(loads, unit_ms, pipelines=beside.pipelines, tensor=1),
                unit_ms=unit_ms,
            )["vision"]
            dealt = np.bincount(runs.rank, runs.count, 2 * beside.pipelines)
            np.testing.assert_array_equal(encoded[at, group], dealt)
            tried += 1
    assert tried > 4


def test_predicted_steps_have_what_rounds_leave_of_the_waits() -> None:
    """Prevents: a prediction of rounds that is not the simulated step."""
    problem, beside = problem_of()
    rng = np.random.default_rng(0)
    asked = [
        EncoderRounds(micro_batches=n, rounds=random_rounds(rng, problem.schedule, 2, n))
        for n in (3, 4)
    ]
    placed = beside.model_copy(update={"rounds": tuple(asked)})
    workload = with_rounds(problem.workload, problem.features, problem.encoders, placed)
    cost, stages_at, schedule = problem.cost, problem.stages_at, problem.schedule
    hidden = hide_encoders(workload, cost, stages_at, schedule)
    once = per_step_costs(cost, stages_at[0])
    times = workload_times(cost, stages_at, hidden)
    predicted = predict_steps(times, hidden, once.nothing()).step_ms
    once_ms = sum(workload.encoding.once_ms)
    for at, step in enumerate(np.unique(workload.step).tolist()):
        alone = workload.of_steps([step])
        times = workload_times(cost, stages_at, alone)
        timeline, blocks = simulate_with_encoders(times, alone, schedule)
        last_ms = timeline.step_ms.copy()
        for one in blocks:
            last_ms[one.rank] = max(last_ms[one.rank], one.end_ms)
        last_ms[list({one.rank for one in blocks if one.number is not None})] += once_ms
        assert predicted[at] == pytest.approx(last_ms.max())


def test_the_search_is_near_the_best_of_all_places() -> None:
    """Prevents: a search that leaves encoders exposed where a place hides them."""
    problem, beside = problem_of(packs_per_step=4)
    found = search_rounds(problem)
    sequences = list(combinations_with_replacement(range(5), 4))
    best_ms = np.inf
    for one, other in product(sequences, sequences):
        rounds = tuple(
            EncoderRound(
                micro_batches=1,
                forward_after=(one[number], other[number]),
                backward_after=(one[2 + number], other[2 + number]),
                load_ms=(0.0, 0.0),
            )
            for number in range(2)
        )
        try:
            order_of(problem.schedule, 2, rounds)
        except ValueError:
            continue
        best_ms = min(best_ms, mean_ms(problem, beside, rounds))
    before_ms = mean_ms(problem, beside, ())
    found_ms = before_ms
    if found:
        chosen = found[-1].beside
        found_ms = mean_ms(problem, chosen, chosen.rounds_of(2))
    assert found_ms <= best_ms + 0.1 * max(before_ms - best_ms, 0)


def mean_ms(
    problem: RoundProblem, beside: DataParallelEncoders, rounds: tuple[EncoderRound, ...]
) -> float:
    asked = (EncoderRounds(micro_batches=2, rounds=rounds),) if rounds else ()
    placed = beside.model_copy(update={"rounds": asked})
    workload = with_rounds(problem.workload, problem.features, problem.encoders, placed)
    hidden = hide_encoders(workload, problem.cost, problem.stages_at, problem.schedule)
    times = workload_times(problem.cost, problem.stages_at, hidden)
    once = per_step_costs(problem.cost, problem.stages_at[0])
    return float(predict_steps(times, hidden, once).step_ms.mean())
