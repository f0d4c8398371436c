"""Costs, micro-batches and plain walks of steps whose packs are of several levels."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
from cost_cases import LinksInTime, model_of, random_cost, random_features

from omnibal.cost.model import CostModel, ParameterRates
from omnibal.model.config import ModelConfig
from omnibal.model.units import UnitKind, unit_names
from omnibal.pipeline.schedules import Operation, Pass, one_forward_one_backward
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.unit_runs import recomputed_counts, stage_units
from omnibal.pipeline.workload import Workload


def random_costs(rng: np.random.Generator, model: ModelConfig, levels: int) -> list[CostModel]:
    """Costs of every level: other times and bytes, but parameters and links alike."""
    exchange = _random_exchange(rng, random_cost(np.random.default_rng(0), model).rates)
    first, *others = (replace(random_cost(rng, model), **exchange) for _ in range(levels))
    costs = [first]
    for other in others:
        units = {
            name: replace(
                unit,
                parameters=first.units[name].parameters,
                trained_parameters=first.units[name].trained_parameters,
            )
            for name, unit in other.units.items()
        }
        costs.append(replace(first, units=units))
    return costs


def _random_exchange(rng: np.random.Generator, rates: ParameterRates) -> dict[str, Any]:
    """Rates of data-parallel ranks' exchange, from next to nothing to more than a pass takes."""
    (own,) = rng.spawn(1)
    return {
        "bucket_parameters": float(own.choice([np.inf, 3e6, 3e5])),
        "rates": replace(
            rates,
            weight_gather_ms=float(10 ** own.uniform(-7, -5)),
            gradient_reduction_ms=float(10 ** own.uniform(-7, -5)),
        ),
    }


def random_level_packs(
    rng: np.random.Generator, contexts: Sequence[int], ranks: int, features: int
) -> Workload:
    """A few steps of full rows of packs, then of shorter ones, the widest packs first.

    Packs of a row have one context size and may be of any of its levels.
    """
    rows: list[tuple[int, int, int, int, int]] = []
    for step in range(int(rng.integers(1, 4))):
        full, left = int(rng.integers(1, 4)), ranks
        for slot in range(full + int(rng.integers(0, 3))):
            left = left if slot < full else int(rng.integers(0, left + 1))
            rows += _row(rng, contexts, step, slot, left)
    rows.sort()
    step, dp_rank, slot, level, context = np.array(rows, np.int64).T
    return Workload(
        features=random_features(rng, len(rows), features),
        step=step,
        dp_rank=dp_rank,
        slot=slot,
        data_parallel_size=ranks,
        level=level,
        context=context,
    )


def _row(
    rng: np.random.Generator, contexts: Sequence[int], step: int, slot: int, ranks: int
) -> Iterator[tuple[int, int, int, int, int]]:
    fitting = [context for context in contexts if ranks % context == 0]
    if not ranks or not fitting:
        return
    context = int(rng.choice(fitting))
    levels = [level for level, each in enumerate(contexts) if each == context]
    for first in range(0, ranks, context):
        level = int(rng.choice(levels))
        for rank in range(first, first + context):
            yield step, rank, slot, level, context


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WalkedStage:
    """A stage's units, and how many layers of each kind it recomputes at every level."""

    units: tuple[str, ...]
    again: tuple[dict[str, int], ...]

    def recomputed(self, level: int) -> list[bool]:
        """Whether each unit is recomputed: the earliest of their kind."""
        left, chosen = dict(self.again[level]), []
        for unit in self.units:
            chosen.append(left.get(unit, 0) > 0)
            left[unit] = left.get(unit, 0) - 1
        return chosen


def every_candidate(
    cost: CostModel, model: ModelConfig, stages: int, levels: int
) -> Iterator[tuple[WalkedStage, ...]]:
    """All splits with all recomputed sets."""
    sequence = unit_names(model)
    layers = [kind.name for kind in cost.kinds if kind.is_layer]
    for cuts in combinations(range(1, len(sequence)), stages - 1):
        runs = [sequence[a:b] for a, b in pairwise((0, *cuts, len(sequence)))]
        if not all(set(layers) & set(run) for run in runs):
            continue
        options = []
        for run in runs:
            numbers = [range(run.count(kind) + 1) for kind in layers]
            sets = [dict(zip(layers, chosen, strict=True)) for chosen in product(*numbers)]
            options.append(
                [WalkedStage(units=run, again=again) for again in product(sets, repeat=levels)]
            )
        yield from product(*options)


def walked_peak(
    costs: Sequence[CostModel], stages: Sequence[WalkedStage], packs: Workload
) -> float:
    """Most bytes of any stage at any moment."""
    return max(
        stage_peak(costs, stage, len(stages), number, packs) for number, stage in enumerate(stages)
    )


def walked_peaks(
    costs: Sequence[CostModel], candidates: Sequence[Sequence[WalkedStage]], packs: Workload
) -> np.ndarray:
    """`walked_peak` of all candidates of one number of stages, of each stage once. [candidates]"""
    peaks: dict[str, float] = {}
    for stages in candidates:
        for number, stage in enumerate(stages):
            key = f"{number} {stage}"
            if key not in peaks:
                peaks[key] = stage_peak(costs, stage, len(stages), number, packs)
    return np.array([max(peaks[f"{n} {stage}"] for n, stage in enumerate(s)) for s in candidates])


def stage_peak(
    costs: Sequence[CostModel], stage: WalkedStage, stages: int, number: int, packs: Workload
) -> float:
    """Most bytes of one of `stages` stages, by walking every rank's passes."""
    of_unit = [costs[0].units[unit] for unit in stage.units]
    state = sum(unit.parameters * 2 + unit.trained_parameters * 16 for unit in of_unit)
    experts = sum(unit.trained_expert_parameters for unit in of_unit)
    rates = costs[0].expert_rates
    state += sum(unit.expert_parameters for unit in of_unit) * (rates.weight_bytes - 2)
    state += experts * (rates.gradient_bytes - 4 + rates.optimizer_bytes - 12)
    state += costs[0].expert_peer_bytes * holds_experts(costs, stage)
    every = range(len(packs.step))
    unkept = [_unkept_input(costs, stage, packs, row) for row in every]
    kept = [sum(_kept(costs, stage, packs, row), unkept[row]) for row in every]
    running = {
        kind: [_most_running(costs, stage, packs, row, kind) for row in every]
        for kind in (Pass.FORWARD, Pass.BACKWARD)
    }
    place = packs.step * packs.data_parallel_size + packs.dp_rank
    link_bytes = np.array(_link_bytes(costs, stage, packs))
    state += max(_largest(costs, packs, unit, "shared_bytes") for unit in stage.units)
    most = 0.0
    for rank in np.unique(place):
        rows = np.flatnonzero(place == rank).tolist()
        held: set[int] = set()
        links = LinksInTime(len(rows))
        for operation in one_forward_one_backward(stages, 1, len(rows)).operations[number]:
            row, kind = rows[operation.micro_batch], operation.kind
            others = sum(kept[other] for other in held if other != row)
            there = links.before(kind) @ link_bytes
            most = max(most, running[kind][row] + others + there)
            held ^= {row}  # from its forward to its backward
            links.run(kind)
    return state + most


def holds_experts(costs: Sequence[CostModel], stage: WalkedStage) -> bool:
    return any(costs[0].units[unit].expert_parameters for unit in stage.units)


def _kept(costs: Sequence[CostModel], stage: WalkedStage, packs: Workload, row: int) -> list[float]:
    level, features = int(packs.level[row]), packs.features[row]
    units = [costs[level].units[unit] for unit in stage.units]
    again = stage.recomputed(level)
    return [
        float(features @ (unit.boundary_bytes if a else unit.activation_bytes))
        for unit, a in zip(units, again, strict=True)
    ]


def _before(costs: Sequence[CostModel], stage: WalkedStage) -> str | None:
    """The unit from which the stage receives."""
    order = list(costs[0].units)
    place = order.index(stage.units[0])
    return order[place - 1] if place else None


def _unkept_input(
    costs: Sequence[CostModel], stage: WalkedStage, packs: Workload, row: int
) -> float:
    """Input of a stage whose first unit keeps none; the stage does, for its gradient."""
    before = _before(costs, stage)
    if before is None or not stage.units[0].endswith(("projector", "embed")):
        return 0.0
    return float(packs.features[row] @ costs[int(packs.level[row])].units[before].output_bytes)


def _link_bytes(costs: Sequence[CostModel], stage: WalkedStage, packs: Workload) -> list[float]:
    """Of the largest micro-batch: input, its gradient, output, its gradient."""
    last = max(stage.units, key=list(costs[0].units).index)
    return [
        _largest(costs, packs, unit, name)
        for unit in (_before(costs, stage), last)
        for name in ("output_bytes", "output_gradient_bytes")
    ]


def _largest(costs: Sequence[CostModel], packs: Workload, unit: str | None, name: str) -> float:
    """Bytes of a micro-batch with the most of every feature, at the level where they are most."""
    if unit is None:
        return 0.0
    return max(
        float(packs.features[packs.level == level].max(axis=0) @ getattr(cost.units[unit], name))
        for level, cost in enumerate(costs)
        if (packs.level == level).any()
    )


def _most_running(
    costs: Sequence[CostModel], stage: WalkedStage, packs: Workload, row: int, kind: Pass
) -> float:
    level, features = int(packs.level[row]), packs.features[row]
    kept, most = _kept(costs, stage, packs, row), 0.0
    last = max(stage.units, key=list(costs[0].units).index)
    gradient = float(features @ costs[level].units[last].output_gradient_bytes)
    for place, again in enumerate(stage.recomputed(level)):
        unit = costs[level].units[stage.units[place]]
        back = float(features @ (unit.activation_bytes - unit.boundary_bytes)) if again else 0.0
        working = float((unit.transient_bytes @ features).max())
        if kind is Pass.BACKWARD and stage.units[place] != last:
            working += gradient
        most = max(most, sum(kept[: place + 1]) + back + working)
    return most + _unkept_input(costs, stage, packs, row)


def walked_step_ms(
    costs: Sequence[CostModel], stages: Sequence[WalkedStage], packs: Workload
) -> float:
    """Mean step time, by letting every block of ranks run its next pass when all its ranks can.

    Weights come and gradients go bucket by bucket, each as its part of a pass begins or has run.
    """
    first = costs[0]
    units = [[first.units[unit] for unit in stage.units] for stage in stages]
    experts = np.array([sum(unit.trained_expert_parameters for unit in of) for of in units])
    others = np.array([sum(unit.trained_parameters for unit in of) for of in units]) - experts
    rates = first.expert_rates
    update_ms = first.optimizer_ms_fixed + max(
        first.rates.optimizer_ms * others + rates.optimizer_ms * experts
    )
    reduction_ms = (
        first.rates.gradient_reduction_ms * others + rates.gradient_reduction_ms * experts
    )
    gather_ms = first.rates.weight_gather_ms * others + rates.weight_gather_ms * experts
    buckets = [1] * len(stages)
    buckets[0] = max(math.ceil((others[0] + experts[0]) / first.bucket_parameters), 1)
    step_ms = []
    for step in np.unique(packs.step):
        walk = _StepWalk(costs, stages, packs, int(step), gather_ms, buckets)
        reduced = [
            _reduced(end, walk.lasted[place], reduction_ms[place[1]], buckets[place[1]])
            for place, end in walk.ends().items()
        ]
        step_ms.append(max(reduced) + update_ms)
    return float(np.mean(step_ms))


def _reduced(end_ms: float, lasted_ms: float, reduction_ms: float, buckets: int) -> float:
    """End of the last bucket's reduction beside a backward of such an end and duration."""
    free = 0.0
    for ran in range(1, buckets + 1):
        ready = end_ms - lasted_ms * (1 - ran / buckets)
        free = max(free, ready) + reduction_ms / buckets
    return free


def _begun(lasts_ms: float, gather_ms: float, buckets: int) -> float:
    """Start of a forward that runs without a break and has each bucket in time."""
    return max(
        (came + 1) * gather_ms / buckets - came * lasts_ms / buckets for came in range(buckets)
    )


class _StepWalk:
    """One step, pass by pass; places are (rank, stage)."""

    def __init__(
        self,
        costs: Sequence[CostModel],
        stages: Sequence[WalkedStage],
        packs: Workload,
        step: int,
        gather_ms: np.ndarray,
        buckets: Sequence[int],
    ) -> None:
        self.costs, self.stages, self.packs = costs, stages, packs
        ranks, p = range(packs.data_parallel_size), len(stages)
        self.rows = [np.flatnonzero((packs.step == step) & (packs.dp_rank == r)) for r in ranks]
        self.lists = [one_forward_one_backward(p, 1, len(rows)).operations for rows in self.rows]
        self.at = {(rank, stage): 0 for rank in ranks for stage in range(p)}
        self.lasted = dict.fromkeys(self.at, 0.0)
        self.free = {
            place: _begun(self._lasts(place), gather_ms[place[1]], buckets[place[1]])
            for place in self.at
        }
        self.ended: dict[tuple[int, int, Operation], float] = {}

    def ends(self) -> dict[tuple[int, int], float]:
        """End of the last pass of every rank and stage."""
        moved = True
        while moved:
            moved = any(self._moves(*place) for place in self.at)
        assert all(self._next(place) is None for place in self.at)
        return self.free

    def _next(self, place: tuple[int, int]) -> Operation | None:
        rank, stage = place
        own = self.lists[rank][stage]
        return own[self.at[place]] if self.at[place] < len(own) else None

    def _moves(self, rank: int, stage: int) -> bool:
        """Run the next pass of a rank and all that share its pack; whether it can be run."""
        operation = self._next((rank, stage))
        if operation is None:
            return False
        block = self._block((rank, stage), operation)
        starts = [self._start(place, operation) for place in block]
        if None in starts:
            return False
        took = [self._took(place, operation) for place in block]
        for place in block:
            self.free[place] = self.ended[*place, operation] = max(starts) + max(took)
            self.lasted[place] = max(took)
            self.at[place] += 1
        return True

    def _lasts(self, place: tuple[int, int]) -> float:
        """Time of a rank's first pass, with all that run it too."""
        operation = self._next(place)
        if operation is None:
            return 0.0
        return max(self._took(each, operation) for each in self._block(place, operation))

    def _block(self, place: tuple[int, int], operation: Operation) -> list[tuple[int, int]]:
        """Places that run a pass of one of them together."""
        rank, stage = place
        context = int(self.packs.context[self.rows[rank][operation.micro_batch]])
        if holds_experts(self.costs, self.stages[stage]):
            context = max(context, self.packs.lockstep_ranks)
        first = rank // context * context
        return [(each, stage) for each in range(first, first + context)]

    def _start(self, place: tuple[int, int], operation: Operation) -> float | None:
        """When a rank can start a pass; None where another is its next, or its input not known."""
        if self._next(place) != operation:
            return None
        rank, stage = place
        is_forward = operation.kind is Pass.FORWARD
        source = stage - 1 if is_forward else stage + 1
        if not 0 <= source < len(self.stages):
            return self.free[place]
        if (rank, source, operation) not in self.ended:
            return None
        row = int(self.rows[rank][operation.micro_batch])
        cost, features = self.costs[self.packs.level[row]], self.packs.features[row]
        sender = cost.units[self.stages[min(source, stage)].units[-1]]
        sent = sender.output_bytes if is_forward else sender.output_gradient_bytes
        link_ms = cost.link_latency_ms + cost.link_ms_per_byte * float(features @ sent)
        return max(self.free[place], self.ended[rank, source, operation] + link_ms)

    def _took(self, place: tuple[int, int], operation: Operation) -> float:
        rank, stage = place
        row = int(self.rows[rank][operation.micro_batch])
        level, features = int(self.packs.level[row]), self.packs.features[row]
        units = [self.costs[level].units[unit] for unit in self.stages[stage].units]
        if operation.kind is Pass.FORWARD:
            return sum(float(features @ unit.forward_ms) for unit in units)
        again = self.stages[stage].recomputed(level)
        return sum(
            float(features @ (unit.backward_ms + (unit.recompute_ms if recomputed else 0)))
            for unit, recomputed in zip(units, again, strict=True)
        )


def level_case(
    rng: np.random.Generator, towers: str, most: int, contexts: Sequence[int], ranks: int
) -> tuple[list[CostModel], ModelConfig, Workload, int]:
    """Costs of every level, a model of at most so many layers, packs and pipeline size."""
    number = len(towers.split())
    layers = 1 + rng.multinomial(rng.integers(0, most - number + 1), [1 / number] * number)
    model = model_of(towers, *layers.tolist())
    costs = random_costs(rng, model, len(contexts))
    packs = random_level_packs(rng, contexts, ranks, len(costs[0].features))
    return costs, model, packs, int(rng.integers(1, min(3, model.layers) + 1))


def walked(kinds: Sequence[UnitKind], stages_at: Sequence[Sequence[Stage]]) -> list[WalkedStage]:
    """The planner's stages, as the walks take them."""
    found = []
    for at_levels in zip(*stages_at, strict=True):
        again = [recomputed_counts(kinds, stage).tolist() for stage in at_levels]
        names = [kind.name for kind in kinds]
        found.append(
            WalkedStage(
                units=stage_units(kinds, at_levels[0]),
                again=tuple(dict(zip(names, counts, strict=True)) for counts in again),
            )
        )
    return found
