"""Costs and micro-batches of one or several levels, and plain walks over all splits."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from cost_cases import LinksInTime, model_of, random_cost, random_features

from omnibal.base.errors import DoesNotFit
from omnibal.cost.model import CostModel
from omnibal.model.config import ModelConfig
from omnibal.model.units import unit_names
from omnibal.pipeline.bounds import min_step_ms
from omnibal.pipeline.least_peak import min_peak_of_splits
from omnibal.pipeline.partition import SearchResult, search_stages
from omnibal.pipeline.schedules import ChunkPass, Pass, one_forward_one_backward
from omnibal.pipeline.split_task import SplitTask
from omnibal.pipeline.stage_memory import GIB
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.unit_runs import check_stages, stage_units, unit_counts
from omnibal.pipeline.workload import Workload


def random_costs(rng: np.random.Generator, model: ModelConfig, levels: int) -> list[CostModel]:
    """Return costs of every level: different times and bytes, equal parameters and links."""
    (own,) = rng.spawn(1)
    # Exchange rates of data-parallel ranks, from negligible to longer than a pass.
    exchange = {
        "bucket_parameters": float(own.choice([np.inf, 3e6, 3e5])),
        "rates": replace(
            random_cost(np.random.default_rng(0), model).rates,
            weight_gather_ms=float(10 ** own.uniform(-7, -5)),
            gradient_reduction_ms=float(10 ** own.uniform(-7, -5)),
        ),
    }
    first, *others = (replace(random_cost(rng, model), **exchange) for _ in range(levels))
    sizes = {
        name: {size: getattr(unit, size) for size in ("parameters", "trained_parameters")}
        for name, unit in first.units.items()
    }
    units = ({n: replace(unit, **sizes[n]) for n, unit in each.units.items()} for each in others)
    return [first, *(replace(first, units=each) for each in units)]


def random_level_packs(
    rng: np.random.Generator, contexts: Sequence[int], ranks: int, features: int
) -> Workload:
    """Return a few steps of full rows of packs, then shorter rows, widest packs first.

    Packs of a row have one context size and may have any of its levels.
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
class Run:
    """Units of a stage, with choices of recomputed layers per level. [choices, rows]"""

    units: tuple[str, ...]
    forward_ms: np.ndarray
    backward_ms: np.ndarray
    kept: np.ndarray
    """Bytes kept by each micro-batch from forward to backward."""
    running: np.ndarray
    """Peak bytes of each micro-batch while a unit of the run works on it, [2, choices, rows]:
    forward and backward."""
    link_bytes: np.ndarray
    """Largest micro-batch's input, input gradient, output and output gradient, [4]."""
    state: float
    trained: int
    trained_experts: int
    exchange_ms: float
    """Gradient exchange of a tied matrix with the stage of its other copy."""

    @property
    def has_experts(self) -> bool:
        return any("experts" in unit for unit in self.units)


Sets = Sequence[tuple[tuple[tuple[str, int], ...], ...]]
"""Choices of recomputed layer counts, by level and kind."""


def every_set(cost: CostModel, units: tuple[str, ...], levels: int, alike: bool) -> Sets:
    """Return all recomputed layer counts, or only counts equal at every level."""
    layers = [kind.name for kind in cost.kinds if kind.is_layer]
    sets = [*product(*([(kind, n) for n in range(units.count(kind) + 1)] for kind in layers))]
    return [(each,) * levels for each in sets] if alike else [*product(sets, repeat=levels)]


def run_of(costs: Sequence[CostModel], units: tuple[str, ...], packs: Workload, sets: Sets) -> Run:
    cost, levels = costs[0], range(len(costs))
    of_level = [packs.features * (packs.level == level)[:, None] for level in levels]
    figures = [
        {
            numbers: _figures(costs[n], units, dict(numbers), of_level[n])
            for numbers in {*numbers_at}
        }
        for n, numbers_at in enumerate(zip(*sets, strict=True))
    ]
    found = np.array([sum(figures[n][chosen[n]] for n in levels) for chosen in sets])
    last = max(units, key=list(cost.units).index)
    sizes = [
        max(
            rows.max(axis=0) @ getattr(costs[n].units[end], name) if end else 0.0
            for n, rows in enumerate(of_level)
        )
        for end in (_before(cost, units[0]), last)
        for name in ("output_bytes", "output_gradient_bytes")
    ]
    shared = max(
        rows.max(axis=0) @ costs[n].units[unit].shared_bytes
        for n, rows in enumerate(of_level)
        for unit in units
    )
    held = [cost.units[unit] for unit in units]
    experts = sum(unit.trained_expert_parameters for unit in held)
    rates, tied = cost.expert_rates, {"language_embed", "head"} & set(units)
    once = cost.tied_parameters if len(tied) == 2 else 0
    state = sum(2 * unit.parameters + 16 * unit.trained_parameters for unit in held) - 18 * once
    state += sum(unit.expert_parameters for unit in held) * (rates.weight_bytes - 2)
    state += experts * (rates.gradient_bytes - 4 + rates.optimizer_bytes - 12)
    state += cost.expert_peer_bytes * any(unit.expert_parameters for unit in held)
    both_ways_ms = 2 * (cost.link_latency_ms + cost.link_ms_per_byte * 2 * cost.tied_parameters)
    return Run(
        units=units,
        forward_ms=found[:, 0],
        backward_ms=found[:, 1],
        kept=found[:, 2],
        running=found[:, 3:].swapaxes(0, 1),
        link_bytes=np.array(sizes),
        state=state + shared,
        trained=sum(unit.trained_parameters for unit in held) - once - experts,
        trained_experts=experts,
        exchange_ms=both_ways_ms if cost.tied_parameters and len(tied) == 1 else 0.0,
    )


def _figures(
    cost: CostModel, units: tuple[str, ...], numbers: dict[str, int], features: np.ndarray
) -> np.ndarray:
    """Return forward and backward ms, bytes kept, and needed forward and backward. [5, rows]"""
    left, again = dict(numbers), []
    for unit in units:
        again.append(left.get(unit, 0) > 0)
        left[unit] = left.get(unit, 0) - 1
    forward_ms = features @ sum(cost.units[unit].forward_ms for unit in units)
    backward_ms = features @ sum(
        cost.units[unit].backward_ms + recomputed * cost.units[unit].recompute_ms
        for unit, recomputed in zip(units, again, strict=True)
    )
    kept, running = _memory(cost, units, again, features)
    return np.array([forward_ms, backward_ms, kept, *running])


def _memory(
    cost: CostModel, held: tuple[str, ...], again: list[bool], features: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return bytes kept for backward, [rows], and needed forward and backward, [2, rows]."""
    first, last = held[0], max(held, key=list(cost.units).index)
    gradient = features @ cost.units[last].output_gradient_bytes
    layers = {kind.name: kind.tower for kind in cost.kinds if kind.is_layer}
    kept, running = np.zeros(len(features)), np.zeros((2, len(features)))
    before = _before(cost, first)
    if first.endswith(("projector", "embed")) and before:
        # Kept for its gradient, outside any unit.
        came = cost.units[before]
        kept = kept + features @ came.output_bytes * came.output_gradient_bytes.any()
    for place, unit in enumerate(held):
        costs = cost.units[unit]
        back = features @ (costs.activation_bytes - costs.boundary_bytes)
        kept = kept + features @ costs.boundary_bytes + (0 if again[place] else back)
        tower = layers.get(unit)
        own = [i for i, name in enumerate(held) if tower and layers.get(name) == tower]
        ahead = kept
        if len({held[i] for i in own}) > 1:
            # Layers of several kinds alternate; each counts as if all others came before.
            of_kind = [again[i] for i in own if held[i] == unit]
            back = back if all(of_kind) else 0 * back
            for i in own:
                if i > place:
                    later = cost.units[held[i]]
                    bytes_ = later.boundary_bytes if again[i] else later.activation_bytes
                    ahead = ahead + features @ bytes_
        # Later units keep no bytes yet in forward, and no longer in backward.
        brought = back if again[place] else 0
        working = (features @ costs.transient_bytes.T).max(axis=1)
        if cost.tied_trained_parameters and {"language_embed", "head"} <= set(held):
            # The tied matrix's gradient from the head waits for the embedding's, then their sum.
            waiting = 2 * (unit == "language_embed") + unit.startswith("language_layer")
            working = working + 2 * waiting * cost.tied_parameters
        given = np.zeros_like(gradient) if unit == last or not costs.has_backward else gradient
        running = np.maximum(running, ahead + brought + working + np.stack([0 * given, given]))
    return kept, running


def _before(cost: CostModel, unit: str) -> str | None:
    """Return the unit before this one, or None for the first."""
    place = list(cost.units).index(unit)
    return list(cost.units)[place - 1] if place else None


def run_peaks(run: Run, stage: int, stages: int, packs: Workload) -> np.ndarray:
    """Return peak bytes while any rank's step runs, one operation after another. [choices]"""
    most = np.zeros(len(run.kept))
    place = packs.step * packs.data_parallel_size + packs.dp_rank
    for rows in (np.flatnonzero(place == each) for each in np.unique(place)):
        links, held = LinksInTime(len(rows)), []
        for operation in one_forward_one_backward(stages, 1, len(rows)).operations[stage]:
            one, backward = rows[operation.micro_batch], operation.kind is Pass.BACKWARD
            held += [] if backward else [one]
            others = run.kept[:, held].sum(axis=1) - run.kept[:, one]
            there = np.array(links.before(operation.kind)) @ run.link_bytes
            most = np.maximum(most, others + run.running[int(backward), :, one] + there)
            links.run(operation.kind)
            held = held[backward:]
    return most + run.state


def split_ms(costs: Sequence[CostModel], runs: Sequence[Run], packs: Workload) -> np.ndarray:
    """Return the mean step of all choices of a split. [choices of stage 0, of stage 1, ...]

    Weights and gradients move per bucket, as its part of a pass begins or ends.
    """
    first, rates = costs[0], costs[0].expert_rates
    others, experts = np.array([(run.trained, run.trained_experts) for run in runs]).T
    gather_ms, reduction_ms, update_ms = (
        getattr(first.rates, name) * others + getattr(rates, name) * experts
        for name in ("weight_gather_ms", "gradient_reduction_ms", "optimizer_ms")
    )
    buckets = [1] * len(runs)
    buckets[0] = max(math.ceil((others[0] + experts[0]) / first.bucket_parameters), 1)
    steps = np.unique(packs.step)
    total_ms = np.zeros(1)
    for step in steps:
        walk = _StepWalk(costs, runs, packs, int(step), gather_ms, buckets)
        reduced = []
        for (rank, stage), end in walk.ends().items():
            free, number = np.zeros(1), buckets[stage]
            for ran in range(1, number + 1):
                ready = end - walk.lasted[rank, stage] * (1 - ran / number)
                free = np.maximum(free, ready) + reduction_ms[stage] / number
            reduced.append(free + runs[stage].exchange_ms)
        total_ms = total_ms + reduce(np.maximum, reduced) + first.optimizer_ms_fixed
    mean_ms = total_ms / len(steps) + max(update_ms)
    return np.broadcast_to(mean_ms, [len(run.kept) for run in runs])


class _StepWalk:
    """One step, pass by pass, for all choices at once; places are (rank, stage)."""

    def __init__(
        self,
        costs: Sequence[CostModel],
        runs: Sequence[Run],
        packs: Workload,
        step: int,
        gather_ms: np.ndarray,
        buckets: Sequence[int],
    ) -> None:
        self.runs, self.packs, self.gather_ms, self.buckets = runs, packs, gather_ms, buckets
        ranks, p = range(packs.data_parallel_size), len(runs)
        self.rows = [np.flatnonzero((packs.step == step) & (packs.dp_rank == r)) for r in ranks]
        lists = [one_forward_one_backward(p, 1, len(rows)).operations for rows in self.rows]
        self.left = {(rank, stage): [*lists[rank][stage]] for rank in ranks for stage in range(p)}
        self.free = dict.fromkeys(self.left, np.zeros(1))
        self.lasted = dict.fromkeys(self.left, np.zeros(1))
        self.ended: dict[tuple[int, int, ChunkPass], np.ndarray] = {}
        self.link_ms = np.zeros((2, p, len(packs.step)))
        for stage, run in enumerate(runs[:-1]):
            for level, cost in enumerate(costs):
                sender = cost.units[run.units[-1]]
                forms = sender.output_bytes, sender.output_gradient_bytes
                for way, form in enumerate(forms):
                    ms = cost.link_latency_ms * form.any() + cost.link_ms_per_byte * (
                        packs.features @ form
                    )
                    self.link_ms[way, stage] += (packs.level == level) * ms

    def ends(self) -> dict[tuple[int, int], np.ndarray]:
        """Return the end of the last pass of every rank and stage."""
        moved = True
        while moved:
            moved = any(self._moves(*place) for place in self.left)
        assert not any(self.left.values())
        return self.free

    def _moves(self, rank: int, stage: int) -> bool:
        """Run the next pass of a rank and all ranks that share its pack. Return whether it ran."""
        if not self.left[rank, stage]:
            return False
        operation = self.left[rank, stage][0]
        context = int(self.packs.context[self.rows[rank][operation.micro_batch]])
        if self.runs[stage].has_experts:
            context = max(context, self.packs.lockstep_ranks)
        first = rank // context * context
        block = [(each, stage) for each in range(first, first + context)]
        starts = [self._start(place, operation) for place in block]
        if any(start is None for start in starts):
            return False
        took_ms = reduce(np.maximum, [self._took(place, operation) for place in block])
        if operation == ChunkPass(Pass.FORWARD, 0):
            # It runs without a break, so each bucket of weights must arrive in time.
            number = self.buckets[stage]
            come = self.gather_ms[stage] * np.arange(1, number + 1) / number
            starts += [ms - took_ms * came / number for came, ms in enumerate(come)]
        end = reduce(np.maximum, starts) + took_ms
        for place in block:
            self.free[place] = self.ended[*place, operation] = end
            self.lasted[place] = took_ms
            self.left[place].pop(0)
        return True

    def _start(self, place: tuple[int, int], operation: ChunkPass) -> np.ndarray | None:
        """Return when a rank can start a pass; None if not its next pass or without input yet."""
        if self.left[place][:1] != [operation]:
            return None
        rank, stage = place
        is_backward = operation.kind is Pass.BACKWARD
        source = stage + 1 if is_backward else stage - 1
        if not 0 <= source < len(self.runs):
            return self.free[place]
        if (rank, source, operation) not in self.ended:
            return None
        row = self.rows[rank][operation.micro_batch]
        link_ms = self.link_ms[int(is_backward), min(source, stage), row]
        return np.maximum(self.free[place], self.ended[rank, source, operation] + link_ms)

    def _took(self, place: tuple[int, int], operation: ChunkPass) -> np.ndarray:
        rank, stage = place
        run, shape = self.runs[stage], [1] * len(self.runs)
        shape[stage] = -1
        times_ms = run.backward_ms if operation.kind is Pass.BACKWARD else run.forward_ms[:1]
        return times_ms[:, self.rows[rank][operation.micro_batch]].reshape(shape)


def brute_force(
    costs: Sequence[CostModel], model: ModelConfig, packs: Workload, p: int, alike: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return step ms and peak bytes of all splits with all recompute choices."""
    sequence = unit_names(model)
    layers = {kind.name for kind in costs[0].kinds if kind.is_layer}

    @cache
    def run(start: int, end: int) -> Run:
        units = sequence[start:end]
        return run_of(costs, units, packs, every_set(costs[0], units, len(costs), alike))

    @cache
    def peaks_of(stage: int, start: int, end: int) -> np.ndarray:
        return run_peaks(run(start, end), stage, p, packs)

    times, peaks = [], []
    for cuts in combinations(range(1, len(sequence)), p - 1):
        ends = [*pairwise((0, *cuts, len(sequence)))]
        if all(layers & set(sequence[a:b]) for a, b in ends):
            times.append(split_ms(costs, [run(*each) for each in ends], packs).ravel())
            of_stages = [peaks_of(stage, *each) for stage, each in enumerate(ends)]
            peaks.append(reduce(np.maximum.outer, of_stages).ravel())
    return np.concatenate(times), np.concatenate(peaks)


def walk_all(
    costs: Sequence[CostModel], stages_at: Sequence[Sequence[Stage]], packs: Workload
) -> tuple[float, list[float]]:
    """Return step ms and each stage's peak bytes, for the planner's stages at every level."""
    kinds = costs[0].kinds
    names = [kind.name for kind in kinds]
    runs = []
    for at_levels in zip(*stages_at, strict=True):
        again = [unit_counts(kinds, stage.recompute).tolist() for stage in at_levels]
        chosen = tuple(tuple(zip(names, counts, strict=True)) for counts in again)
        runs.append(run_of(costs, stage_units(kinds, at_levels[0].units), packs, [chosen]))
    peaks = [float(run_peaks(run, n, len(runs), packs)[0]) for n, run in enumerate(runs)]
    return float(split_ms(costs, runs, packs).ravel()[0]), peaks


def random_model(rng: np.random.Generator, towers: str, most: int) -> ModelConfig:
    """Return a model of these towers with at most `most` layers."""
    number = len(towers.split())
    layers = 1 + rng.multinomial(rng.integers(0, most - number + 1), [1 / number] * number)
    return model_of(towers, *layers.tolist())


def level_case(
    rng: np.random.Generator, towers: str, most: int, contexts: Sequence[int], ranks: int
) -> tuple[list[CostModel], ModelConfig, Workload, int]:
    """Return costs per level, a `random_model`, packs and pipeline size."""
    model = random_model(rng, towers, most)
    costs = random_costs(rng, model, len(contexts))
    packs = random_level_packs(rng, contexts, ranks, len(costs[0].features))
    return costs, model, packs, int(rng.integers(1, min(3, model.layers) + 1))


def search_all(
    task: SplitTask, times: np.ndarray, peaks: np.ndarray, share: float
) -> tuple[SplitTask, SearchResult, bool]:
    """Return the task with a memory cap, stages found, and whether a first cap was refused.

    The cap is that share of the way from the least to the greatest of the peaks of all splits, and
    must be refused below the least. Results are compared with all splits' `times` and `peaks`.
    """
    low, high = peaks.min(), peaks.max()
    assert min_peak_of_splits(task) == pytest.approx(low, rel=1e-9)
    cap, bound_ms = low * (1 + 1e-9) + share * (high - low), min_step_ms(task)
    if is_refused := cap < low:
        with pytest.raises(DoesNotFit, match=r"needs .* more than the memory cap") as raised:
            search_stages(replace(task, memory_cap_bytes=cap))
        stated = float(re.search(r"needs ([\d.]+) GiB", str(raised.value))[1])
        assert stated == pytest.approx(low / GIB, abs=0.005)
    task = replace(task, memory_cap_bytes=max(cap, low * (1 + 1e-9)))
    result, best_ms = search_stages(task), times[peaks <= task.memory_cap_bytes].min()
    assert result.step_ms == result.lower_bound_ms == pytest.approx(best_ms, rel=2e-9)
    assert 0 < bound_ms <= best_ms * (1 + 1e-9)
    for stages in result.stages_at:
        check_stages(task.model, stages)
    return task, result, is_refused
