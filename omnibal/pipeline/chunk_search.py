"""Local search for the parts of a schedule with several chunks, and their recomputed layers.

Objective: mean simulated time of sampled steps. There are too many ways to cut for the proof of
`omnibal.pipeline.partition`, so a few starts are improved by single and combined moves, then again
from random moves of the best. A stage over the memory cap recomputes as needed
(`omnibal.pipeline.recompute_ways`) by heavy passes (`heavy_tables`); the result is checked in all.
The proven bound is weak: evenly spread work plus pipeline fill and drain.

Shapes: C candidates, p stages, k = p * chunks parts, f features.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from omnibal.base.arrays import rows_of
from omnibal.base.errors import DoesNotFit
from omnibal.model.targets import RecomputeFreedom
from omnibal.model.units import unit_names
from omnibal.pipeline.baselines import balanced_cuts, layer_mask
from omnibal.pipeline.bounds import Runs, possible_runs
from omnibal.pipeline.critical_path import PartTerms, PipelineSimulator, SampledSteps
from omnibal.pipeline.operation_graph import held_in_passes, schedule_graph
from omnibal.pipeline.partition import SearchResult, sampled_steps
from omnibal.pipeline.recompute_ways import (
    NO_NUMBER,
    FittingNumbers,
    LayerOrders,
    RecomputeWays,
    TowerNumbers,
)
from omnibal.pipeline.simulate import simulate_levels
from omnibal.pipeline.split_search import move_cuts
from omnibal.pipeline.split_task import SplitTask
from omnibal.pipeline.stage_cost import PerStepCosts, per_step_costs_of_units, select_pass
from omnibal.pipeline.stage_memory import GIB, fits_cap, heavy_tables, stage_memories, state_bytes
from omnibal.pipeline.unit_runs import layer_kinds, stages_from_cuts

_MAX_OPERATIONS = 250_000_000  # simulated, over all candidates and rows: about 5 s of a core
_MAX_COMBINED_MOVES = 6  # best moves of a round that are combined
_MOVES_PER_KICK = 3  # random moves applied to the best cuts before improving again
# Max restarts without improvement: six searches on 2 and 4 stages found nothing after that.
_MAX_VAIN_RESTARTS = 10
_MAX_TIGHTENINGS = 4  # max searches, each with lower caps if the full check finds a higher peak
_MIN_CUT_GAIN = 1e-9  # relative gain required of a better candidate


@dataclass(frozen=True, slots=True)
class CutCandidate:
    """Cuts of the model, and the recompute way of every stage."""

    edges: tuple[int, ...]  # positions of the cuts, including 0 and the number of units, [k + 1]
    orders: tuple[int, ...]  # every stage's index in `FittingNumbers.ways`, [p]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartProblem:
    """Parts of a schedule to search, and ways to recompute their layers."""

    task: SplitTask
    runs: Runs
    run_at: np.ndarray  # run between two positions, -1 if not allowed, [units + 1, units + 1]
    simulator: PipelineSimulator
    numbers: Sequence[FittingNumbers]  # recompute ways of every stage, and numbers that fit

    @classmethod
    def build(cls, task: SplitTask) -> "PartProblem":
        """Return the problem of `search_parts`."""
        cost, workload, stages, schedule = task.cost, task.workload, task.stages, task.schedule
        runs, freedom = possible_runs(task), task.rules.recompute
        run_at = np.full((runs.units + 1, runs.units + 1), -1)
        run_at[runs.start, runs.end] = np.arange(len(runs.start))
        steps = SampledSteps.build(sampled_steps(workload), cost)
        ways: list[RecomputeWays]
        if freedom is RecomputeFreedom.LAYERS:
            mean = workload.features_of(cost).mean(axis=0)
            graph = schedule_graph(schedule, stages, int(workload.slot.max()) + 1)
            held = [held_in_passes(graph, stage).held for stage in range(stages)]
            in_flight = [np.diff(of_stage)[..., 0].max(axis=0) for of_stage in held]  # [chunks]
            ways = [LayerOrders.build(cost, runs, mean, of_stage) for of_stage in in_flight]
        else:
            ways = [TowerNumbers.build(task, runs)] * stages
        tables = heavy_tables(cost, workload, schedule, stages)
        return cls(
            task=task,
            runs=runs,
            run_at=run_at,
            simulator=PipelineSimulator.build(steps, stages, schedule),
            numbers=[
                FittingNumbers(tables=of_chunks, cap_bytes=task.memory_cap_bytes, ways=of_stage)
                for of_chunks, of_stage in zip(tables, ways, strict=True)
            ],
        )

    @property
    def parts(self) -> int:
        return self.task.stages * self.task.schedule.chunks

    @property
    def parts_of_stages(self) -> np.ndarray:
        """Parts of every stage, [p, chunks]."""
        return np.array(self.task.schedule.parts_of(self.parts))


def search_parts(task: SplitTask, effort: float = 1.0, *, max_cuts: float = np.inf) -> SearchResult:
    """Return the fastest parts found for the task's schedule, in model order.

    Args:
        effort: share of `_MAX_OPERATIONS` and `_MAX_VAIN_RESTARTS`.
        max_cuts: max cuts evaluated; limits the time for short steps.

    Raises:
        DoesNotFit: no fitting parts are found.
    """
    problem, cost, cap_bytes = PartProblem.build(task), task.cost, task.memory_cap_bytes
    # The search counts memory in heavy passes only. If a stage of the result exceeds the cap in
    # another pass, repeat with its cap lowered by the same factor.
    best, caps_bytes = None, np.full(task.stages, cap_bytes)
    for _ in range(_MAX_TIGHTENINGS):
        search = _Search(
            problem=problem,
            work_left=effort * _MAX_OPERATIONS,
            max_cuts=max_cuts,
            max_in_vain=math.ceil(effort * _MAX_VAIN_RESTARTS),
        )
        search.run(best)
        best = search.best
        if best is None:
            break
        _, recomputed, _ = _fit_candidates(problem, [best])
        layers = recomputed[0][:, layer_kinds(cost.kinds)].tolist()
        stages_at = (stages_from_cuts(task.model, best.edges[1:-1], layers),) * cost.levels
        memories = stage_memories(cost, stages_at, task.workload, task.schedule)
        peaks = np.array([memory.peak_gib for memory in memories]) * GIB
        if fits_cap(peaks, cap_bytes).all():
            packs = sampled_steps(task.workload)
            step_ms = float(simulate_levels(cost, stages_at, packs, task.schedule).step_ms.mean())
            return SearchResult(
                stages_at=stages_at,
                step_ms=step_ms,
                lower_bound_ms=min(min_work_ms(problem), step_ms),
            )
        caps_bytes = caps_bytes * np.minimum(cap_bytes / peaks, 1)
        pairs = zip(problem.numbers, caps_bytes.tolist(), strict=True)
        numbers = [of_stage.on(of_stage.tables, stage_cap) for of_stage, stage_cap in pairs]
        problem = replace(problem, numbers=numbers)
    raise DoesNotFit(
        f"no cut of {task.model.name} into {problem.parts} parts was found for schedule "
        f"{task.schedule.name} that fits the memory cap of {cap_bytes / GIB:.2f} GiB per device",
        "raise the memory cap, plan for schedule 1f1b, use more pipeline stages or tensor "
        "parallelism, or pack to smaller caps",
    )


def min_work_ms(problem: PartProblem) -> float:
    """Return a lower bound on the mean step time: evenly spread compute plus min pipeline fill and,
    unless weight gradients are deferred, drain."""
    simulator, runs = problem.simulator, problem.runs
    steps, layout = simulator.steps, simulator.steps.layout
    # Part s begins after s parts of at least one layer.
    reach = [0]
    while len(reach) < problem.task.stages:
        reach.append(int(runs.end[runs.start >= reach[-1]].min()))
    before, model = runs.prefix[reach], runs.prefix[-1]  # summed terms of units
    fill = before[:, layout.forward].sum(axis=0)
    drain = before[:, layout.backward].sum(axis=0)
    if problem.task.schedule.in_two:
        drain[:] = 0  # deferred weight gradients may fill the end
    row_ms = steps.features.sum(axis=1) @ (model[layout.forward] + model[layout.backward])
    row_ms += steps.first_features @ fill + steps.last_features @ drain
    return float(row_ms[steps.rows].max(axis=1) @ steps.weight) / problem.task.stages


def _fit_candidates(
    problem: PartProblem, candidates: Sequence[CutCandidate]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return candidates' runs [C, k], recomputed layers [C, k, kinds], and whether they fit [C]."""
    edges = np.array([candidate.edges for candidate in candidates])
    orders = np.array([candidate.orders for candidate in candidates])
    chosen = problem.run_at[edges[:, :-1], edges[:, 1:]]
    fits = (chosen >= 0).all(axis=1)
    recomputed = np.zeros_like(problem.runs.counts[chosen])
    number = np.zeros(orders.shape, np.int64)
    allowed = np.flatnonzero(fits)
    if not allowed.size:
        return chosen, recomputed, fits
    for stage, held in enumerate(problem.parts_of_stages):
        fewest = problem.numbers[stage].find(chosen[allowed][:, held], orders[allowed, stage])
        number[allowed, stage] = fewest
        fits[allowed] &= fewest < NO_NUMBER
    if problem.numbers[0].ways.is_shared:
        number[:] = number.max(axis=1, keepdims=True)
    fitting = np.flatnonzero(fits)
    for stage, held in enumerate(problem.parts_of_stages):
        recomputed[fitting[:, None], held] = problem.numbers[stage].ways.count_recomputed(
            chosen[fitting][:, held], orders[fitting, stage], number[fitting, stage]
        )
    return chosen, recomputed, fits


@dataclass(kw_only=True, slots=True, eq=False)
class _Search:
    """Local search over candidates, with restarts from random moves of the best."""

    problem: PartProblem
    work_left: float
    max_cuts: float
    max_in_vain: int
    best: CutCandidate | None = None
    best_ms: float = np.inf
    # Step times, infinite without a fit, or lower bounds of candidates that were not simulated.
    found_ms: dict[CutCandidate, float] = field(default_factory=dict)

    def run(self, known: CutCandidate | None = None) -> None:
        """Improve several starts or `known`, then random moves of the best, to the work limit."""
        for start in self._make_starts() if known is None else [known]:
            self._improve(start)
        rng, in_vain = np.random.default_rng(0), 0
        while self.best is not None and self.has_work and in_vain < self.max_in_vain:
            before, best_ms = len(self.found_ms), self.best_ms
            kicked = self.best
            for _ in range(_MOVES_PER_KICK):
                moves = self._list_moves(kicked)
                kicked = moves[int(rng.integers(len(moves)))]
            self._improve(kicked)
            if len(self.found_ms) == before:  # all candidates around are known
                break
            in_vain = 0 if self.best_ms < best_ms else in_vain + 1

    @property
    def has_work(self) -> bool:
        return self.work_left > 0 and len(self.found_ms) < self.max_cuts

    def _make_starts(self) -> list[CutCandidate]:
        """Return cuts into parts of even time, of even forward time, and of even memory."""
        problem = self.problem
        steps = problem.simulator.steps
        mean = steps.features.sum(axis=(0, 1)) / max(steps.counts.sum(), 1)
        names = unit_names(problem.task.model)
        cost, stages = problem.task.cost, problem.task.stages
        units = [cost.units[name] for name in names]
        forward_ms = np.array([unit.forward_ms @ mean for unit in units])
        backward_ms = np.array([unit.backward_ms @ mean for unit in units])
        orders = (0,) * stages
        # If memory is short, parts of even activations and state may fit.
        kept = np.array([unit.activation_bytes @ mean for unit in units])
        state = np.array([state_bytes(cost, unit).sum() for unit in units])
        # The minimum content of the first part by the rules counts as one unit here.
        first = int(problem.runs.end[problem.runs.start == 0].min())
        begins = np.r_[0, first : len(names)]
        has_layer = np.logical_or.reduceat(layer_mask(problem.task.model), begins)
        starts = []
        for weights in (forward_ms + backward_ms, forward_ms, kept * stages + state):
            cuts = balanced_cuts(np.add.reduceat(weights, begins), has_layer, problem.parts)
            starts.append(CutCandidate((0, *begins[list(cuts)].tolist(), len(names)), orders))
        return list(dict.fromkeys(starts))

    def _improve(self, start: CutCandidate) -> None:
        """Apply the best move or combination while it improves."""
        [at_ms] = self._evaluate([start], np.inf)
        at = start
        while self.has_work:
            moves = self._list_moves(at)
            step_ms = self._evaluate(moves, at_ms)
            better = np.flatnonzero(step_ms < at_ms * (1 - _MIN_CUT_GAIN))
            if not len(better):
                return
            top = [moves[i] for i in better[np.argsort(step_ms[better], kind="stable")]]
            combined = _combine_moves(at, top[:_MAX_COMBINED_MOVES])
            combined_ms = self._evaluate(combined, step_ms.min())
            step_ms = np.append(combined_ms, step_ms[moves.index(top[0])])
            at = [*combined, top[0]][int(step_ms.argmin())]
            at_ms = float(step_ms.min())

    def _list_moves(self, at: CutCandidate) -> list[CutCandidate]:
        """Return candidates with a range of cuts moved by one unit or a way changed."""
        cuts = move_cuts(np.array(at.edges))
        cuts = cuts[(np.diff(cuts) > 0).all(axis=1)]
        moved = [CutCandidate(tuple(edges), at.orders) for edges in cuts.tolist()]
        # Change the way of a stage, or of all if shared.
        for stage, numbers in enumerate(self.problem.numbers):
            for order in range(len(numbers.ways)):
                orders = (*at.orders[:stage], order, *at.orders[stage + 1 :])
                if numbers.ways.is_shared:
                    orders = (order,) * len(at.orders)
                moved.append(CutCandidate(at.edges, orders))
        return [candidate for candidate in dict.fromkeys(moved) if candidate != at]

    def _evaluate(self, candidates: Sequence[CutCandidate], limit_ms: float) -> np.ndarray:
        """Return step times; lower bounds if not below the limit, infinite without a fit. [C]"""
        new = [
            candidate for candidate in dict.fromkeys(candidates) if candidate not in self.found_ms
        ]
        if new:
            self.found_ms |= zip(new, self._simulate(new, limit_ms).tolist(), strict=True)
        return np.array([self.found_ms[candidate] for candidate in candidates])

    def _simulate(self, candidates: Sequence[CutCandidate], limit_ms: float) -> np.ndarray:
        """Return `_evaluate` of candidates that were not evaluated yet, and keep the best. [C]"""
        problem, found_ms = self.problem, np.full(len(candidates), np.inf)
        runs, recomputed, fits = _fit_candidates(problem, candidates)
        chosen = np.flatnonzero(fits)
        if not len(chosen):
            return found_ms
        terms, once = _candidate_costs(problem, runs[chosen], recomputed[chosen])
        bound_ms = _stage_bound_ms(problem, terms)
        found_ms[chosen], picked = bound_ms, np.flatnonzero(bound_ms < limit_ms)
        if not len(picked):
            return found_ms
        step_ms = problem.simulator.step_ms(rows_of(terms, picked), rows_of(once, picked))
        found_ms[chosen[picked]] = step_ms
        self.work_left -= problem.simulator.operations * len(picked)
        if step_ms.min() < self.best_ms:
            self.best_ms = float(step_ms.min())
            self.best = candidates[chosen[picked[step_ms.argmin()]]]
        return found_ms


def _candidate_costs(
    problem: PartProblem, runs: np.ndarray, recomputed: np.ndarray
) -> tuple[PartTerms, PerStepCosts]:
    """Return costs of candidates with runs [C, k] and recomputed layers [C, k, kinds]."""
    table, layout, cost = problem.runs, problem.simulator.steps.layout, problem.task.cost
    terms = table.terms[runs]
    counts = table.counts[runs][:, problem.parts_of_stages].sum(axis=2)
    slowness = cost.slowness_of(problem.parts)[:, None]
    forward = terms[..., layout.forward] * slowness
    backward = (terms[..., layout.backward] + recomputed @ cost.of_units("recompute_ms")) * slowness
    weight_part = table.counts[runs] @ cost.of_units("weight_ms") * slowness
    times = forward, backward, weight_part
    passes = [select_pass(kind, *times) for kind in problem.task.schedule.passes]
    links = [terms[:, :-1, layout.send], terms[:, :-1, layout.receive]]
    return (
        PartTerms(passes=np.stack(passes, axis=1), links=np.stack(links, axis=1)),
        per_step_costs_of_units(cost, counts),
    )


def _stage_bound_ms(problem: PartProblem, terms: PartTerms) -> np.ndarray:
    """Return a lower bound on the mean step: the slowest stage's work, fill and any drain. [C]"""
    steps = problem.simulator.steps
    forward, backward = terms.passes[:, 0], terms.passes[:, 1:].sum(axis=1)
    of_stages = (forward + backward)[:, problem.parts_of_stages].sum(axis=2)  # [C, p, f]
    # Part s is the first of stage s.
    fill, drain = ((ms.cumsum(axis=1) - ms)[:, : problem.task.stages] for ms in (forward, backward))
    length = of_stages @ steps.features.sum(axis=1).T + fill @ steps.first_features.T
    if not problem.task.schedule.in_two:
        length += drain @ steps.last_features.T
    return length.max(axis=1)[:, steps.rows].max(axis=2) @ steps.weight


def _combine_moves(at: CutCandidate, moves: Sequence[CutCandidate]) -> list[CutCandidate]:
    """Return candidates with pairs of moves, and with the first 3, 4, ... moves."""
    sets = [*combinations(moves, 2), *(moves[:number] for number in range(3, len(moves) + 1))]
    here, combined = np.array(at.edges), []
    for chosen in sets:
        edges = here + sum(np.array(move.edges) - here for move in chosen)
        orders = list(at.orders)
        for move in chosen:
            for stage, order in enumerate(move.orders):
                if order != at.orders[stage]:
                    orders[stage] = order
        if (np.diff(edges) > 0).all():  # sums of moves may empty a part
            combined.append(CutCandidate(tuple(edges.tolist()), tuple(orders)))
    return combined
