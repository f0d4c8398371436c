"""Lower bounds on step time of splits: paths through operations that run in order.

A path's length is a sum over stages of linear cost terms (`omnibal.pipeline.critical_path`), so its
min over all completions of a partial split is a shortest path over positions. Structural paths lead
to a stage's first forward, through all of its work, then to its reduction or to the first stage's
last backward. Two detours replace the forwards before the first backward, and the backwards after
the last forward, by round trips through later stages; counts are from
`omnibal.pipeline.operation_graph.others_in_flight`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import block_diag

from omnibal.base.arrays import rows_of
from omnibal.cost.model import CostModel
from omnibal.model.units import unit_names
from omnibal.pipeline.critical_path import SampledSteps, TermLayout
from omnibal.pipeline.operation_graph import others_in_flight
from omnibal.pipeline.predict import MAX_SIMULATED_STEPS
from omnibal.pipeline.split_task import SplitTask, allowed_runs
from omnibal.pipeline.stage_cost import per_step_costs_of_units
from omnibal.pipeline.unit_runs import layer_kinds

# Structural paths through a stage on one row per step. The first covers all of its work.
_PATHS_PER_ROW = 8

Edges = Sequence[tuple[np.ndarray, np.ndarray]]  # start and end positions of every stage's options


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Runs:
    """Every run of units that may be a stage."""

    start: np.ndarray  # position of the first unit, [runs]
    end: np.ndarray  # position after the last unit, [runs]
    counts: np.ndarray  # units of each kind, [runs, kinds]
    # Cost terms without recomputation and bucket terms, with the first stage's number of buckets.
    # [runs, terms]
    terms: np.ndarray
    prefix: np.ndarray  # summed terms of the units before each position, [units + 1, terms]
    cut: np.ndarray  # terms of a cut at each position, [units + 1, terms]

    @property
    def units(self) -> int:
        """Number of units of the model."""
        return len(self.prefix) - 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Structure:
    """Bounds for every split of a model."""

    layout: TermLayout
    recompute_ms: np.ndarray  # of a layer, in the backward, [levels * layer kinds, features]
    runs: Runs
    weights: np.ndarray  # of paths through each stage, mean over steps, [p, paths, p, terms]

    @classmethod
    def build(cls, task: SplitTask, steps: SampledSteps) -> "Structure":
        """Compute the bounds on these steps."""
        cost, stages = task.cost, task.stages
        layers, layout = layer_kinds(cost.kinds), steps.layout
        recompute_ms = cost.of_units("recompute_ms")
        layer_terms = _unit_terms(cost)[layers]
        layer_ms = layer_terms[:, layout.forward] + layer_terms[:, layout.backward]
        # Paths are on each step's slowest rank for each kind of layer, and for all kinds.
        load = steps.features.sum(axis=1) @ np.stack([*layer_ms, layer_ms.sum(axis=0)]).T
        slowest = load[steps.rows].argmax(axis=1)  # [steps, loads]
        rows = np.unique(np.take_along_axis(steps.rows, slowest, axis=1).T, axis=0)
        others = others_in_flight(stages, steps.features.shape[1])
        totals = np.insert(steps.features.cumsum(axis=1), 0, 0.0, axis=1)
        paths = [
            [
                _paths_through(steps, totals[row], steps.counts[row], of_stage, stage, stages)
                for stage, of_stage in enumerate(others)
            ]
            for row in rows
        ]
        return cls(
            layout=layout,
            recompute_ms=block_diag(*np.split(recompute_ms[layers], cost.levels, axis=1)),
            runs=possible_runs(task),
            weights=np.concatenate(paths, axis=1),
        )

    @property
    def stages(self) -> int:
        return len(self.weights)

    @property
    def own_ms(self) -> np.ndarray:
        """Compute time of each run, part of a path through it as any stage. [runs]"""
        compute = slice(self.layout.forward.start, self.layout.backward.stop)
        # The first path of every row has all compute of its stage.
        all_compute = self.weights[0, ::_PATHS_PER_ROW, 0, compute]
        return (self.runs.terms[:, compute] @ all_compute.T).max(axis=1)

    def with_buckets(self, terms: np.ndarray, stage: int) -> np.ndarray:
        """Add bucket terms to `terms` of runs as a stage. [options, terms]"""
        layout, terms = self.layout, terms.copy()
        if stage > 0:  # only the first stage has several buckets
            terms[:, layout.buckets] = 1
        share = 1 / terms[:, layout.buckets]
        terms[:, layout.forward_share] = terms[:, layout.forward] * share[:, None]
        terms[:, layout.backward_share] = terms[:, layout.backward] * share[:, None]
        terms[:, layout.first_gather] = terms[:, layout.gather] * share
        terms[:, layout.last_reduction] = terms[:, layout.reduction] * share
        return terms

    def longest_of_runs_ms(self, stage: int, chosen: np.ndarray) -> np.ndarray:
        """Return `longest_ms` of chosen runs, without recomputation. [chosen]"""
        runs = self.runs
        terms = self.with_buckets(runs.terms[chosen], stage)
        return self.longest_ms(stage, runs.start[chosen], runs.end[chosen], terms)

    def longest_ms(
        self, stage: int, start: np.ndarray, end: np.ndarray, terms: np.ndarray
    ) -> np.ndarray:
        """Return the longest structural path through a stage for each run it may hold, counting
        links only at its own ends; infinite if the run's position is not allowed. [options]"""
        weights, runs, layout = self.weights[stage], self.runs, self.layout
        compute = slice(layout.forward.start, layout.backward.stop)
        links = slice(layout.send.start, layout.receive.stop)
        at_start = (start == 0) == (stage == 0)
        at_end = (end == runs.units) == (stage == self.stages - 1)
        length = terms @ weights[:, stage].T  # [options, paths]
        # Stages before have equal weights, as have stages after, so sums over units suffice.
        if stage > 0:
            earlier = weights[:, stage - 1]
            before = runs.prefix[:, compute] @ earlier[:, compute].T
            before += runs.cut[:, links] @ earlier[:, links].T
            length += before[start]
        if stage < self.stages - 1:
            later = weights[:, stage + 1, compute]
            length += ((runs.prefix[-1] - runs.prefix)[:, compute] @ later.T)[end]
        return np.where(at_start & at_end, length.max(axis=1), np.inf)


def min_slowest_ms(structure: Structure) -> float:
    """Return the min over splits of the longest structural path through any stage, in ms."""
    runs, own_ms = structure.runs, structure.own_ms
    edges = [(runs.start, runs.end)] * structure.stages
    # A good split by compute alone limits the runs whose paths are computed.
    _, good = min_largest_path(edges, [own_ms] * structure.stages, runs.units)
    limit_ms = max(
        structure.longest_of_runs_ms(stage, np.array([run]))[0] for stage, run in enumerate(good)
    )
    short = np.flatnonzero(own_ms <= limit_ms)
    bounds_ms = [structure.longest_of_runs_ms(stage, short) for stage in range(structure.stages)]
    few = [(runs.start[short], runs.end[short])] * structure.stages
    return min(min_largest(few, bounds_ms, runs.units), limit_ms)


def min_step_ms(task: SplitTask) -> float:
    """Return a lower bound on the mean step of `predict` over all splits, ignoring memory and
    recomputation; much faster than the search."""
    steps = SampledSteps.build(task.workload.some_steps(MAX_SIMULATED_STEPS), task.cost)
    return min_slowest_ms(Structure.build(task, steps))


def min_largest(edges: Edges, sizes: Sequence[np.ndarray], units: int) -> float:
    """Return the min over splits of the largest of `sizes` [options] per stage, inf if no split."""
    return float(_min_largest_prefixes(edges, sizes, units)[-1][-1])


def min_largest_with_marked(
    edges: Edges, sizes: Sequence[np.ndarray], marked: Sequence[np.ndarray], units: int
) -> float:
    """Return `min_largest` over splits with a marked option [options], infinite if none has."""
    with_marked = np.full(units + 1, np.inf)  # of prefixes with a marked option
    prefixes = _min_largest_prefixes(edges, sizes, units)
    for (start, end), size, mark, before in zip(edges, sizes, marked, prefixes[:-1], strict=True):
        largest = np.maximum(np.where(mark, before[start], with_marked[start]), size)
        with_marked = np.full(units + 1, np.inf)
        np.minimum.at(with_marked, end, largest)
    return float(with_marked[-1])


def min_largest_path(
    edges: Edges, sizes: Sequence[np.ndarray], units: int
) -> tuple[float, list[int]]:
    """Return `min_largest` and the options [stages] of a split that attains it, each stage
    minimal given the stages after it; such a split must exist."""
    so_far, position = _min_largest_prefixes(edges, sizes, units), units
    path = []
    for (start, end), size, reached in zip(
        reversed(edges), reversed(sizes), reversed(so_far[:-1]), strict=True
    ):
        largest = np.where(end == position, np.maximum(reached[start], size), np.inf)
        path.append(int(largest.argmin()))
        position = int(start[path[-1]])
    return float(so_far[-1][-1]), path[::-1]


def _min_largest_prefixes(
    edges: Edges, sizes: Sequence[np.ndarray], units: int
) -> list[np.ndarray]:
    """Return the min largest size up to each position, for 0 to all stages, by dynamic
    programming. [units + 1] each"""
    so_far = [np.where(np.arange(units + 1) == 0, 0.0, np.inf)]
    for (start, end), size in zip(edges, sizes, strict=True):
        reached = np.full(units + 1, np.inf)
        np.minimum.at(reached, end, np.maximum(so_far[-1][start], size))
        so_far.append(reached)
    return so_far


def min_path_costs(
    edges: Edges, costs: Sequence[np.ndarray], source: int, units: int
) -> list[np.ndarray]:
    """Return the min of summed `costs` [options, cuts] per stage from position `source` to each
    position, after 0 to all stages, infinite if none. [stages + 1] of [units + 1, cuts]"""
    reached = [np.full((units + 1, costs[0].shape[1]), np.inf)]
    reached[0][source] = 0.0
    for (tail, head), cost in zip(edges, costs, strict=True):
        # Sorted by head, for one reduceat instead of the slower np.minimum.at.
        order = np.argsort(head, kind="stable")
        heads, first = np.unique(head[order], return_index=True)
        lowest = np.full_like(reached[0], np.inf)
        lowest[heads] = np.minimum.reduceat((reached[-1][tail] + cost)[order], first, axis=0)
        reached.append(lowest)
    return reached


def possible_runs(task: SplitTask) -> Runs:
    """Return all allowed runs of units with at least one layer."""
    cost, model = task.cost, task.model
    kinds, layout, unit_terms = cost.kinds, TermLayout.build(cost), _unit_terms(cost)
    indices = {kind.name: index for index, kind in enumerate(kinds)}
    sequence = np.array([indices[name] for name in unit_names(model)])
    before = np.zeros((len(sequence) + 1, len(kinds)), np.int64)
    np.cumsum(sequence[:, None] == np.arange(len(kinds)), axis=0, out=before[1:])
    start, end = np.triu_indices(len(sequence) + 1, k=1)
    counts = before[end] - before[start]
    allowed = counts[:, layer_kinds(kinds)].any(axis=1) & allowed_runs(task, start, end)
    start, end, counts = start[allowed], end[allowed], counts[allowed]
    terms = counts @ unit_terms
    for link in (layout.send, layout.receive):
        sent = unit_terms[sequence[end - 1], link]
        terms[:, link] = np.where((end < len(sequence))[:, None], sent, 0.0)
    once = rows_of(per_step_costs_of_units(cost, counts[:, None]), np.s_[:, 0])
    terms[:, layout.reduction], terms[:, layout.gather] = once.reduction_ms, once.gather_ms
    terms[:, layout.tied], terms[:, layout.optimizer] = once.tied_ms, once.update_ms
    terms[:, layout.buckets] = once.buckets
    if layout.has_experts:
        terms[:, layout.without_experts] = counts @ cost.in_lockstep == 0
    prefix = before @ unit_terms
    cut = np.zeros_like(prefix)
    cut[1:-1] = unit_terms[sequence[:-1]]
    return Runs(start=start, end=end, counts=counts, terms=terms, prefix=prefix, cut=cut)


def _unit_terms(cost: CostModel) -> np.ndarray:
    """Return forward, backward and link terms of a unit and the cut after it. [kinds, terms]"""
    layout = TermLayout.build(cost)
    # The first feature of every level is 1.
    fixed = np.zeros(layout.features)
    fixed[:: layout.features // cost.levels] = cost.link_latency_ms
    terms = np.zeros((len(cost.units), len(layout)))
    for kind, unit_cost in enumerate(cost.units.values()):
        returns = unit_cost.output_gradient_bytes.any()  # no gradient, no latency
        terms[kind, layout.forward] = unit_cost.forward_ms
        terms[kind, layout.backward] = unit_cost.backward_ms
        terms[kind, layout.send] = fixed + cost.link_ms_per_byte * unit_cost.output_bytes
        terms[kind, layout.receive] = (
            fixed * returns + cost.link_ms_per_byte * unit_cost.output_gradient_bytes
        )
    return terms


def _paths_through(
    steps: SampledSteps,
    total: np.ndarray,
    count: np.ndarray,
    others: np.ndarray,
    stage: int,
    stages: int,
) -> np.ndarray:
    """Return the structural paths through a stage. [8, p, terms]

    Four ways through, each followed by the stage's reduction or by the last backwards before it.

    Args:
        total: prefix sums over micro-batches of one row per step, [steps, m + 1, features].
        count: micro-batches of these rows, [steps].
        others: other micro-batches that the stage holds in its forwards and backwards, [2, m].
    """
    weight, step = steps.weight, np.arange(len(count))
    last = np.maximum(count - 1, 0)
    # Forwards 1 to `ahead` run before the first backward, and `behind` backwards between the last
    # forward and the last backward.
    ahead, behind = np.minimum(others[1, 0], last), others[0, last]
    everything, opening = total[:, -1], total[:, 1]
    closing = everything - total[step, last]
    forwards = everything - total[step, ahead + 1] + opening
    backwards = total[step, last - behind] + closing
    # With both detours, the first backward must precede the last forward.
    both = (last > ahead)[:, None]
    ways = (  # features of the stage's forwards, of its backwards, of later stages' round trips
        (everything, everything, np.zeros_like(opening)),
        (forwards, everything, opening),
        (everything, backwards, closing),
        (forwards, np.where(both, backwards, everything), opening + np.where(both, closing, 0.0)),
    )
    layout = steps.layout
    weights = np.zeros((2, len(ways), stages, len(layout)))
    pairs = (layout.forward, layout.backward), (layout.send, layout.receive)
    for i, (own_forward, own_backward, later) in enumerate(ways):
        way = weights[:, i]
        for forward, backward in pairs:
            way[:, :stage, forward] = weight @ opening
            way[0, :stage, backward] = weight @ closing
            way[:, stage:, forward] = way[:, stage:, backward] = weight @ later
        way[:, stage, layout.forward] = weight @ own_forward
        way[:, stage, layout.backward] = weight @ own_backward
    # The exchange that no compute can hide: the last bucket's reduction, the first's gather.
    for reduction in (layout.last_reduction, layout.tied):
        weights[0, :, 0, reduction] = weights[1, :, stage, reduction] = 1
    weights[:, :, 0, layout.first_gather] = 1
    weights[:, :, stage, layout.optimizer] = 1
    return weights.reshape(-1, stages, len(layout))
