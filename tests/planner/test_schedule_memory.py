"""Memory of any schedule, against a walk over its operations unit by unit."""

from dataclasses import replace

import numpy as np
import pytest
from cost_cases import random_cost, small_model
from partition_cases import frozen as frozen_unit
from schedule_cases import SCHEDULES

from omnibal.cost.model import CostModel
from omnibal.pipeline.level_costs import features_of, side_by_side
from omnibal.pipeline.schedule_memory import counted_memories, schedule_memories
from omnibal.pipeline.schedules import Operation, Pass, PipelineSchedule
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.stage_memory import GIB, stage_memories
from omnibal.pipeline.unit_runs import stage_units, stages_from_cuts
from omnibal.pipeline.workload import Workload

pytestmark = pytest.mark.quick

F, B, BI, BW = Pass.FORWARD, Pass.BACKWARD, Pass.BACKWARD_INPUT, Pass.BACKWARD_WEIGHT
MODEL = small_model(4, 7)  # 15 units


def random_case(
    rng: np.random.Generator, schedule: PipelineSchedule, pipeline: int, levels: int
) -> tuple[CostModel, list[tuple[Stage, ...]], Workload]:
    """Costs, parts at every level, and two steps of two ranks with 1 to 9 micro-batches each."""
    cost = random_cost(rng, MODEL)
    frozen = {
        name: replace(
            frozen_unit(unit), late_bytes=0 * unit.late_bytes, passing_bytes=unit.boundary_bytes
        )
        for name, unit in cost.units.items()
        if name.startswith("vision") and rng.random() < 0.5
    }
    if "vision_embed" in frozen and "vision_layer" in frozen:
        cost = replace(cost, units={**cost.units, **frozen})
    cost = side_by_side([cost, replace(cost)][:levels])
    parts = pipeline * schedule.chunks
    cuts = sorted(rng.choice(np.arange(1, 15), parts - 1, replace=False).tolist())
    stages_at = [
        stages_from_cuts(MODEL, cuts, rng.integers(0, 3, (parts, 2)).tolist())
        for _ in range(levels)
    ]
    counts = rng.integers(1, 10, 4)
    rows = [(run // 2, run % 2, slot) for run, n in enumerate(counts) for slot in range(n)]
    step, rank, slot = np.array(rows).T
    features = rng.uniform(0, 3, (len(rows), len(cost.features) // levels))
    features[:, 0] = 1
    level = rng.integers(0, levels, len(rows))
    return cost, stages_at, Workload(
        features=features, step=step, dp_rank=rank, slot=slot, data_parallel_size=2, level=level
    )  # fmt: skip


class Walk:
    """What a stage of these parts holds, unit by unit, as it runs one rank's micro-batches."""

    def __init__(
        self,
        cost: CostModel,
        parts: list[list[Stage]],
        features: np.ndarray,
        workload: Workload,
        in_two: bool,
    ) -> None:
        self.cost, self.features, self.level = cost, features, workload.level
        self.in_two = in_two
        self.units = [stage_units(cost.kinds, at_levels[0]) for at_levels in parts]
        # Of every chunk and level, whether each unit is recomputed.
        self.again = [
            [
                [unit in {u for span in stage.recompute for u in span.units} for unit in listed]
                for stage in at_levels
            ]
            for at_levels in parts
            for listed in [[u for span in at_levels[0].units for u in span.units]]
        ]
        names = [*cost.units]
        before = [names.index(units[0]) - 1 for units in self.units]
        self.entering = [
            cost.units[names[index]].output_bytes
            if index >= 0
            and cost.units[names[index]].output_gradient_bytes.any()
            and units[0] in ("projector", "language_embed")
            else np.zeros(len(cost.features))
            for index, units in zip(before, self.units, strict=True)
        ]

    def kept(self, chunk: int, row: int) -> list[float]:
        """Of every unit of a chunk."""
        x = self.features[row]
        return [
            float(x @ (unit.boundary_bytes if again else unit.activation_bytes))
            for unit, again in self.of(chunk, row)
        ]

    def late(self, chunk: int, row: int) -> list[float]:
        x = self.features[row]
        return [float((unit.late_bytes[:2] @ x).sum()) for unit, _ in self.of(chunk, row)]

    def of(self, chunk: int, row: int):
        again = self.again[chunk][self.level[row]]
        return [(self.cost.units[n], a) for n, a in zip(self.units[chunk], again, strict=True)]

    def running(self, one: Operation, row: int) -> float:
        x, units = self.features[row], self.of(one.chunk, row)
        kept, late = self.kept(one.chunk, row), self.late(one.chunk, row)
        entering = float(x @ self.entering[one.chunk])
        if one.kind is BW:
            return sum(late) + max(float(unit.late_bytes[2] @ x) for unit, _ in units)
        in_two = self.in_two
        names, last = self.units[one.chunk], units[-1][0]
        most, passed = entering, dict[str, float]()
        for index, (unit, again) in enumerate(units):
            needed = (
                entering
                + sum(kept[: index + 1])
                + float(((unit.two_part_bytes if in_two else unit.transient_bytes) @ x).max())
            )
            if not unit.has_backward:
                passed[names[index]] = float(unit.passing_bytes @ x)
                most = max(most, needed + sum(passed.values())) if one.kind is F else most
                continue
            if again:
                needed += float((unit.activation_bytes - unit.boundary_bytes) @ x)
            if one.kind is not F and names[index] != names[-1]:
                needed += float(last.output_gradient_bytes @ x)
            if one.kind is BI:
                needed += sum(late[index + 1 :])
            most = max(most, needed)
        return most

    def peak(self, operations: tuple[Operation, ...], first: int) -> float:
        """Most bytes besides links and state."""
        kept: set[tuple[int, int]] = set()
        late: set[tuple[int, int]] = set()
        most = 0.0
        for one in operations:
            place = one.chunk, first + one.micro_batch
            others = [
                sum(self.kept(*each)) + float(self.features[each[1]] @ self.entering[each[0]])
                for each in kept - {place}
            ]
            others += [sum(self.late(*each)) for each in late - {place}]
            most = max(most, sum(others) + self.running(one, place[1]))
            if one.kind is F:
                kept.add(place)
            elif one.kind is BW:
                late.remove(place)
            else:
                kept.remove(place)
                late |= {place} if one.kind is BI else set()
        return most


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("levels", [1, 2])
def test_memory_is_that_of_a_walk_over_the_operations(schedule: PipelineSchedule, levels: int):
    """Prevents a chunk, a micro-batch or what waits between two backwards from being forgotten."""
    rng = np.random.default_rng(levels)
    for pipeline in (2, 3, 4):
        cost, stages_at, workload = random_case(rng, schedule, pipeline, levels)
        # Links and what units share are as large as the largest micro-batch needs; tested below.
        units = {
            name: replace(unit, shared_bytes=0 * unit.shared_bytes)
            for name, unit in cost.units.items()
        }
        cost, features = replace(cost, units=units), features_of(workload, cost)
        memories = counted_memories(cost, stages_at, workload, schedule)
        for stage, parts in enumerate(schedule.parts_of(len(stages_at[0]))):
            own = [[stages[part] for stages in stages_at] for part in parts]
            in_two = schedule.name.startswith("zb")
            walk, peak = Walk(cost, own, features, workload, in_two), 0.0
            firsts = np.flatnonzero(workload.slot == 0).tolist()
            for first, stop in zip(firsts, [*firsts[1:], len(features)], strict=True):
                listed = schedule.rule(pipeline, schedule.chunks, stop - first)
                peak = max(peak, walk.peak(listed.operations[stage], first))
            peers = peers_of(schedule, pipeline, stage)
            links = links_bytes(cost, walk.units, features.max(axis=0), peers)
            found = memories[stage].passes_gib * GIB - links
            assert found == pytest.approx(peak)


def peers_of(schedule: PipelineSchedule, pipeline: int, stage: int) -> list[tuple[object, object]]:
    """What each chunk of a stage has its input from and gives its output to: another stage, or for
    what stays on this one the cut."""
    turns = schedule.name == "zb-v"
    stages = [
        each
        for chunk in range(schedule.chunks)
        for each in (range(pipeline)[::-1] if turns and chunk % 2 else range(pipeline))
    ]
    places = [part for part, each in enumerate(stages) if each == stage]

    def peer(part: int, cut: int) -> object:
        other = stages[part] if 0 <= part < len(stages) else None
        return f"cut {cut}" if other == stage else other

    return [(peer(part - 1, part - 1), peer(part + 1, part)) for part in places]


def links_bytes(
    cost: CostModel,
    chunks: list[tuple[str, ...]],
    largest: np.ndarray,
    peers: list[tuple[object, object]],
) -> float:
    """Tensors of the cuts around chunks, at the level where they are most: the largest of those
    that go the same way to or from the same stage."""
    names, rooms = [*cost.units], dict[tuple[object, str], float]()

    def most(form: np.ndarray) -> float:
        return float((form * largest).reshape(cost.levels, -1).sum(axis=1).max())

    def there_is(peer: object, tensor: str, sent: bool, form: np.ndarray) -> None:
        way = "stays" if isinstance(peer, str) else "sent" if sent else "comes"
        key = peer, f"{tensor} {way}"
        rooms[key] = max(rooms.get(key, 0.0), most(form)) if peer is not None else 0.0

    for units, (source, target) in zip(chunks, peers, strict=True):
        before = names.index(units[0]) - 1
        came = cost.units[names[before]]
        back = came.output_gradient_bytes
        if "layer" in units[0] and (before < 0 or most(back) == 0):
            back = cost.units[units[0]].output_gradient_bytes
        there_is(source, "input", False, came.output_bytes)
        there_is(source, "gradient", True, back)
        last = cost.units[units[-1]]
        there_is(target, "input", True, last.output_bytes)
        there_is(target, "gradient", False, last.output_gradient_bytes)
    return sum(rooms.values())


def test_1f1b_is_counted_alike_by_both():
    """Prevents two memory formulas that drift apart: they differ by links that come and go."""
    rng = np.random.default_rng(3)
    schedule = SCHEDULES[0]
    for pipeline in (1, 2, 4):
        cost, stages_at, workload = random_case(rng, schedule, pipeline, 1)
        nothing = np.zeros(len(cost.features))
        head = replace(
            cost.units["head"], output_bytes=nothing, output_gradient_bytes=nothing
        )  # which goes nowhere
        cost = replace(cost, units={**cost.units, "head": head})
        largest = workload.features.max(axis=0)
        for stage, once, again in zip(
            stages_at[0],
            schedule_memories(cost, stages_at, workload, schedule),
            counted_memories(cost, stages_at, workload, schedule),
            strict=True,
        ):
            peers: list[tuple[object, object]] = [(-1, 1)]
            links = links_bytes(cost, [stage_units(cost.kinds, stage)], largest, peers) / GIB
            assert once.state_gib == again.state_gib
            assert once.activations_gib <= again.activations_gib + 1e-12
            assert once.peak_gib - 1e-9 <= again.peak_gib <= once.peak_gib + links
        assert schedule_memories(cost, stages_at, workload) == stage_memories(
            cost, stages_at, workload
        )
