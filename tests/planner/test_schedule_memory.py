"""Memory of any schedule, against a unit-by-unit walk over its operations."""

from dataclasses import replace

import numpy as np
import pytest
from cost_cases import random_cost, small_model
from partition_cases import frozen as frozen_unit
from schedule_cases import BI, BW, SCHEDULES, F, held_in_list, workload_of

from omnibal.cost.model import CostModel, side_by_side
from omnibal.pipeline.schedules import ChunkPass, PipelineSchedule
from omnibal.pipeline.stage_memory import GIB, stage_memories
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.unit_runs import stage_units, stages_from_cuts
from omnibal.pipeline.workload import Workload

pytestmark = pytest.mark.quick

MODEL = small_model(4, 7)  # 15 units


def random_case(
    rng: np.random.Generator, schedule: PipelineSchedule, pipeline: int, levels: int
) -> tuple[CostModel, list[tuple[Stage, ...]], Workload]:
    """Return costs, parts by level, and two steps of two ranks with 1 to 9 micro-batches each."""
    cost = random_cost(rng, MODEL)
    units = dict(cost.units)
    for name in ("vision_embed", "vision_layer") if rng.random() < 0.5 else ():
        passing = {"late_bytes": 0 * units[name].late_bytes}
        passing["passing_bytes"] = units[name].boundary_bytes
        units[name] = replace(frozen_unit(units[name]), **passing)
    cost = replace(cost, units=units)
    cost = side_by_side([cost, replace(cost)][:levels])
    parts = pipeline * schedule.chunks
    cuts = sorted(rng.choice(np.arange(1, 15), parts - 1, replace=False).tolist())
    recomputed = rng.integers(0, 3, (levels, parts, 2)).tolist()
    stages_at = [stages_from_cuts(MODEL, cuts, numbers) for numbers in recomputed]
    counts = rng.integers(1, 10, (2, 2))
    features = rng.uniform(0, 3, (counts.sum(), len(cost.features) // levels))
    features[:, 0] = 1
    level = rng.integers(0, levels, len(features))
    return cost, stages_at, workload_of(counts, features, level=level)


class Walk:
    """Bytes of a stage with these parts, unit by unit, while one rank's micro-batches run."""

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
        self.units = [stage_units(cost.kinds, at_levels[0].units) for at_levels in parts]
        # [chunk][level]: whether each unit is recomputed.
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
        """Return bytes kept for backward by every unit of a chunk."""
        x = self.features[row]
        kept = [u.boundary_bytes if a else u.activation_bytes for u, a in self.pairs(chunk, row)]
        return [float(x @ bytes_) for bytes_ in kept]

    def chunk_bytes(self, chunk: int, row: int) -> float:
        return sum(self.kept(chunk, row)) + float(self.features[row] @ self.entering[chunk])

    def late(self, chunk: int, row: int) -> list[float]:
        x = self.features[row]
        return [float((unit.late_bytes[:2] @ x).sum()) for unit, _ in self.pairs(chunk, row)]

    def pairs(self, chunk: int, row: int):
        again = self.again[chunk][self.level[row]]
        return [(self.cost.units[n], a) for n, a in zip(self.units[chunk], again, strict=True)]

    def running(self, one: ChunkPass, row: int) -> float:
        x, units = self.features[row], self.pairs(one.chunk, row)
        kept, late = self.kept(one.chunk, row), self.late(one.chunk, row)
        entering = float(x @ self.entering[one.chunk])
        if one.kind is BW:
            return sum(late) + max(float(unit.late_bytes[2] @ x) for unit, _ in units)
        in_two = self.in_two
        names, last = self.units[one.chunk], units[-1][0]
        highest, passed = entering, dict[str, float]()
        for index, (unit, again) in enumerate(units):
            working = unit.two_part_bytes if in_two else unit.transient_bytes
            needed = entering + sum(kept[: index + 1]) + float((working @ x).max())
            if not unit.has_backward:
                passed[names[index]] = float(unit.passing_bytes @ x)
                highest = max(highest, needed + sum(passed.values())) if one.kind is F else highest
                continue
            if again:
                needed += float((unit.activation_bytes - unit.boundary_bytes) @ x)
            if one.kind is not F and names[index] != names[-1]:
                needed += float(last.output_gradient_bytes @ x)
            if one.kind is BI:
                needed += sum(late[index + 1 :])
            highest = max(highest, needed)
        return highest

    def peak(self, operations: tuple[ChunkPass, ...], first: int) -> float:
        """Return peak bytes without links and state."""
        highest = 0.0
        for one, kept, late in held_in_list(operations):
            here = {(one.chunk, one.micro_batch)}
            others = sum(self.chunk_bytes(chunk, first + i) for chunk, i in kept - here)
            others += sum(sum(self.late(chunk, first + i)) for chunk, i in late - here)
            highest = max(highest, others + self.running(one, first + one.micro_batch))
        return highest


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("levels", [1, 2])
def test_memory_is_that_of_a_walk_over_the_operations(schedule: PipelineSchedule, levels: int):
    """Prevents memory that omits a chunk, a micro-batch or tensors kept between BI and BW."""
    rng = np.random.default_rng(levels)
    for pipeline in (2, 3, 4):
        cost, stages_at, workload = random_case(rng, schedule, pipeline, levels)
        # Links and shared buffers are sized by the largest micro-batch; tested below.
        nothing = {"shared_bytes": np.zeros(len(cost.features))}
        if schedule.name == "1f1b":  # link buffers are not permanent: `level_cases` walks them
            names = "output_bytes", "output_gradient_bytes"
            nothing |= dict.fromkeys(names, nothing["shared_bytes"])
        units = {name: replace(unit, **nothing) for name, unit in cost.units.items()}
        cost, features = replace(cost, units=units), workload.features_of(cost)
        memories = stage_memories(cost, stages_at, workload, schedule)
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
    """Return (source, target) of a stage's chunks: another stage, or a cut within this stage."""
    turns = schedule.name == "zb-v"
    orders = [range(pipeline), range(pipeline)[:: -1 if turns else 1]]
    stages = [each for chunk in range(schedule.chunks) for each in orders[chunk % 2]]
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
    """Return bytes of cut tensors at their largest level; one buffer per peer and direction."""
    names, rooms = [*cost.units], dict[tuple[object, str], float]()

    def highest(form: np.ndarray) -> float:
        return float((form * largest).reshape(cost.levels, -1).sum(axis=1).max())

    def add_buffer(peer: object, tensor: str, sent: bool, form: np.ndarray) -> None:
        way = "stays" if isinstance(peer, str) else "sent" if sent else "comes"
        key = peer, f"{tensor} {way}"
        rooms[key] = max(rooms.get(key, 0.0), highest(form)) if peer is not None else 0.0

    for units, (source, target) in zip(chunks, peers, strict=True):
        before = names.index(units[0]) - 1
        came = cost.units[names[before]]
        back = came.output_gradient_bytes
        if "layer" in units[0] and (before < 0 or highest(back) == 0):
            back = cost.units[units[0]].output_gradient_bytes
        add_buffer(source, "input", False, came.output_bytes)
        add_buffer(source, "gradient", True, back)
        last = cost.units[units[-1]]
        add_buffer(target, "input", True, last.output_bytes)
        add_buffer(target, "gradient", False, last.output_gradient_bytes)
    return sum(rooms.values())
