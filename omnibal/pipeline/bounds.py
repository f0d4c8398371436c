"""Lower bounds on the step time of splits: paths through operations that must run in order.

A step takes at least as long as any path. A path's length is a sum over stages of terms that are
linear in what each costs (`omnibal.pipeline.critical_path`), so the least that it can be over all
ways to complete a part of a split is a shortest path over positions.

The structural paths go to the first forward of a stage, through all it does, and to its reduction,
or on from its last backward to the last one of the first stage. Instead of the forwards that it
runs before its first backward, the first micro-batch's round trip through the later stages; instead
of the backwards after its last forward, the last one's; or both. How many these are is read from
the schedule's list (`omnibal.pipeline.operation_graph.StageOrder`). What precedes and follows the
stage is the same however it is split, so each possible stage is bounded on its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import block_diag

from omnibal.cost.model import CostModel
from omnibal.model.config import ModelConfig
from omnibal.model.targets import FREE, StageRules
from omnibal.model.units import unit_names
from omnibal.pipeline.critical_path import SampledSteps, TermLayout
from omnibal.pipeline.operation_graph import StageOrder, planned_graph, require_prefix_closed
from omnibal.pipeline.predict import MAX_SIMULATED_STEPS
from omnibal.pipeline.stage_cost import bucket_counts
from omnibal.pipeline.stage_rules import allowed_runs
from omnibal.pipeline.unit_runs import holds_both_ends, holds_one_end, layer_kinds
from omnibal.pipeline.workload import Workload

_PATHS = 8
"""Structural paths through a stage on one row of every step, of which the first goes through all
that the stage does."""

Edges = Sequence[tuple[np.ndarray, np.ndarray]]
"""Start and end positions of every stage's options."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Runs:
    """Every run of units that may be a stage."""

    start: np.ndarray
    """Position of the first unit, [runs]."""
    end: np.ndarray
    """Position after the last unit, [runs]."""
    counts: np.ndarray
    """Number of units of each kind, [runs, kinds]."""
    terms: np.ndarray
    """Cost terms without recomputation and without those of buckets, [runs, terms]."""
    buckets: np.ndarray
    """Buckets that the run's parameters are exchanged in where it is the first stage, [runs]."""
    tied_ms: np.ndarray
    """Part of the reduction that is a tied matrix's, after all buckets, [runs]."""
    prefix: np.ndarray
    """Summed terms of all units before each position, [units + 1, terms]."""
    cut: np.ndarray
    """Terms of a cut at each position, [units + 1, terms]."""

    def with_buckets(self, terms: np.ndarray, run: np.ndarray, stage: int) -> np.ndarray:
        """Cost terms of runs as a stage, with those of one bucket. [options, terms]

        Args:
            terms: without them, [options, terms].
            run: the run of each, [options].
        """
        layout, terms = TermLayout.of_length(terms.shape[1]), terms.copy()
        share = 1 / (self.buckets[run] if stage == 0 else np.ones(len(run)))
        terms[:, layout.forward_share] = terms[:, layout.forward] * share[:, None]
        terms[:, layout.backward_share] = terms[:, layout.backward] * share[:, None]
        terms[:, layout.first_gather] = terms[:, layout.gather] * share
        tied_ms = self.tied_ms[run]
        terms[:, layout.last_reduction] = (terms[:, layout.reduction] - tied_ms) * share + tied_ms
        return terms

    @property
    def units(self) -> int:
        """Number of units of the model."""
        return len(self.prefix) - 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Structure:
    """Bounds that hold for every split of a model, computed before any split is tried."""

    layout: TermLayout
    recompute_ms: np.ndarray
    """Time that recomputing a layer of each kind adds to a backward at each level, [levels * layer
    kinds, features]."""
    runs: Runs
    weights: np.ndarray
    """Weights of the structural paths, averaged over the steps. [p, paths, p, terms]"""

    @classmethod
    def of(
        cls,
        cost: CostModel,
        model: ModelConfig,
        steps: SampledSteps,
        stages: int,
        rules: StageRules = FREE,
    ) -> "Structure":
        """Compute the bounds for pipelines of `stages` stages on these steps."""
        layers = layer_kinds(cost.kinds)
        recompute_ms = np.stack([unit.recompute_ms for unit in cost.units.values()])
        return cls(
            layout=steps.layout,
            recompute_ms=block_diag(*np.split(recompute_ms[layers], cost.levels, axis=1)),
            runs=possible_runs(cost, model, rules),
            weights=_structural_paths(steps, _unit_terms(cost)[layers], stages),
        )

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.weights)

    @property
    def own_ms(self) -> np.ndarray:
        """Time of all forwards and backwards of each run, which is on a path through it as any
        stage. [runs]"""
        compute = slice(self.layout.forward.start, self.layout.backward.stop)
        of_everything = self.weights[0, ::_PATHS, 0, compute]
        return (self.runs.terms[:, compute] @ of_everything.T).max(axis=1)

    def longest_of_runs_ms(self, stage: int, chosen: np.ndarray) -> np.ndarray:
        """`longest_ms` of some of the runs, by their indices, without recomputation. [chosen]"""
        runs = self.runs
        terms = runs.with_buckets(runs.terms[chosen], chosen, stage)
        return self.longest_ms(stage, runs.start[chosen], runs.end[chosen], terms)

    def longest_ms(
        self, stage: int, start: np.ndarray, end: np.ndarray, terms: np.ndarray
    ) -> np.ndarray:
        """Longest structural path through a stage, for each run that it may hold. [options]

        Infinite where the position does not allow it. Links are counted at the stage's own ends
        only.
        """
        weights, runs, layout = self.weights[stage], self.runs, self.layout
        compute = slice(layout.forward.start, layout.backward.stop)
        links = slice(layout.send.start, layout.receive.stop)
        at_start = (start == 0) == (stage == 0)
        at_end = (end == runs.units) == (stage == self.stages - 1)
        length = terms @ weights[:, stage].T
        if stage > 0:
            earlier = weights[:, stage - 1]
            before = runs.prefix[:, compute] @ earlier[:, compute].T
            before += runs.cut[:, links] @ earlier[:, links].T
            length += before[start]
        if stage < self.stages - 1:
            later = weights[:, stage + 1, compute]
            length += ((runs.prefix[-1] - runs.prefix)[:, compute] @ later.T)[end]
        return np.where(at_start & at_end, length.max(axis=1), np.inf)


def least_slowest_ms(structure: Structure) -> float:
    """Longest structural path through the slowest stage of a split, least over all splits.

    A split that is good by the stages' own work alone says what is too long to be in the best.
    """
    runs, own_ms = structure.runs, structure.own_ms
    edges = [(runs.start, runs.end)] * structure.stages
    _, good = least_largest_path(edges, [own_ms] * structure.stages, runs.units)
    limit_ms = max(
        structure.longest_of_runs_ms(stage, np.array([run]))[0] for stage, run in enumerate(good)
    )
    short = np.flatnonzero(own_ms <= limit_ms)
    bounds_ms = [structure.longest_of_runs_ms(stage, short) for stage in range(structure.stages)]
    few = [(runs.start[short], runs.end[short])] * structure.stages
    return min(least_largest(few, bounds_ms, runs.units), limit_ms)


def least_step_ms(
    cost: CostModel,
    model: ModelConfig,
    workload: Workload,
    pipeline_size: int,
    rules: StageRules = FREE,
) -> float:
    """Lower bound on the mean step that `predict` gives, over all splits and recomputed layers.

    A fraction of what the search takes: neither memory nor recomputation are in it.
    """
    steps = SampledSteps.of(workload.some_steps(MAX_SIMULATED_STEPS), cost)
    return least_slowest_ms(Structure.of(cost, model, steps, pipeline_size, rules))


def least_largest(edges: Edges, sizes: Sequence[np.ndarray], units: int) -> float:
    """Least possible value of the largest of the stages' sizes [options]; infinite if no way leads
    through all of them."""
    return float(_least_largest_so_far(edges, sizes, units)[-1][-1])


def least_largest_with(
    edges: Edges, sizes: Sequence[np.ndarray], marked: Sequence[np.ndarray], units: int
) -> float:
    """Least possible largest size over ways with one of the marked options [options]; infinite if
    none does."""
    with_one = np.full(units + 1, np.inf)
    so_far = _least_largest_so_far(edges, sizes, units)
    for (start, end), size, mark, before in zip(edges, sizes, marked, so_far[:-1], strict=True):
        largest = np.maximum(np.where(mark, before[start], with_one[start]), size)
        with_one = np.full(units + 1, np.inf)
        np.minimum.at(with_one, end, largest)
    return float(with_one[-1])


def least_largest_path(
    edges: Edges, sizes: Sequence[np.ndarray], units: int
) -> tuple[float, list[int]]:
    """`least_largest`, and the options [stages] of one way that attains it; there must be one.

    Every stage of the way is as small as the rest of it allows.
    """
    so_far, position = _least_largest_so_far(edges, sizes, units), units
    path = []
    for (start, end), size, reached in zip(
        reversed(edges), reversed(sizes), reversed(so_far[:-1]), strict=True
    ):
        largest = np.where(end == position, np.maximum(reached[start], size), np.inf)
        path.append(int(largest.argmin()))
        position = int(start[path[-1]])
    return float(so_far[-1][-1]), path[::-1]


def _least_largest_so_far(
    edges: Edges, sizes: Sequence[np.ndarray], units: int
) -> list[np.ndarray]:
    """Least largest size on a way to each position, through no stage to all. [units + 1] each"""
    so_far = [np.where(np.arange(units + 1) == 0, 0.0, np.inf)]
    for (start, end), size in zip(edges, sizes, strict=True):
        reached = np.full(units + 1, np.inf)
        np.minimum.at(reached, end, np.maximum(so_far[-1][start], size))
        so_far.append(reached)
    return so_far


def least_sums(
    edges: Edges,
    costs: Sequence[np.ndarray],
    source: int,
    units: int,
) -> list[np.ndarray]:
    """Least cost of reaching each position through the first stages, from none to all of them.

    Args:
        costs: [options, cuts] of each stage.

    Returns:
        [stages + 1] of [units + 1, cuts].
    """
    reached = [np.full((units + 1, costs[0].shape[1]), np.inf)]
    reached[0][source] = 0.0
    for (tail, head), cost in zip(edges, costs, strict=True):
        order = np.argsort(head, kind="stable")
        heads, first = np.unique(head[order], return_index=True)
        least = np.full_like(reached[0], np.inf)
        least[heads] = np.minimum.reduceat((reached[-1][tail] + cost)[order], first, axis=0)
        reached.append(least)
    return reached


def possible_runs(cost: CostModel, model: ModelConfig, rules: StageRules = FREE) -> Runs:
    """All runs of units that hold a layer, and are allowed."""
    kinds, layout, unit_terms = cost.kinds, TermLayout.of(cost), _unit_terms(cost)
    indices = {kind.name: index for index, kind in enumerate(kinds)}
    sequence = np.array([indices[name] for name in unit_names(model)])
    before = np.zeros((len(sequence) + 1, len(kinds)), np.int64)
    np.cumsum(sequence[:, None] == np.arange(len(kinds)), axis=0, out=before[1:])
    start, end = np.triu_indices(len(sequence) + 1, k=1)
    counts = before[end] - before[start]
    allowed = counts[:, layer_kinds(kinds)].any(axis=1) & allowed_runs(model, rules, start, end)
    start, end, counts = start[allowed], end[allowed], counts[allowed]
    terms = counts @ unit_terms
    for link in (layout.send, layout.receive):
        sent = unit_terms[sequence[end - 1], link]
        terms[:, link] = np.where((end < len(sequence))[:, None], sent, 0.0)
    terms[:, layout.optimizer] += cost.optimizer_ms_fixed
    once = cost.tied_trained_parameters * holds_both_ends(kinds, counts)
    terms[:, layout.reduction] -= cost.rates.gradient_reduction_ms * once
    terms[:, layout.gather] -= cost.rates.weight_gather_ms * once
    tied_ms = cost.tied_exchange_ms * holds_one_end(kinds, counts)
    terms[:, layout.reduction] += tied_ms
    terms[:, layout.optimizer] -= cost.rates.optimizer_ms * once
    if layout.has_experts:
        terms[:, layout.without_experts] = counts @ cost.in_lockstep == 0
    prefix = before @ unit_terms
    cut = np.zeros_like(prefix)
    cut[1:-1] = unit_terms[sequence[:-1]]
    per_unit = np.array([unit.trained_parameters for unit in cost.units.values()], np.float64)
    return Runs(
        start=start, end=end, counts=counts, terms=terms,
        buckets=bucket_counts(cost, counts @ per_unit - once),
        tied_ms=np.broadcast_to(tied_ms, start.shape), prefix=prefix, cut=cut,
    )  # fmt: skip


def _unit_terms(cost: CostModel) -> np.ndarray:
    """Terms that a unit of each kind, and a cut right after it, add to a stage. [kinds, terms]"""
    layout = TermLayout.of(cost)
    # The first feature of every level is 1.
    fixed = np.zeros(layout.features)
    fixed[:: layout.features // cost.levels] = cost.link_latency_ms
    terms = np.zeros((len(cost.units), len(layout)))
    for kind, unit_cost in enumerate(cost.units.values()):
        returns = unit_cost.output_gradient_bytes.any()
        terms[kind, layout.forward] = unit_cost.forward_ms
        terms[kind, layout.backward] = unit_cost.backward_ms
        terms[kind, layout.send] = fixed + cost.link_ms_per_byte * unit_cost.output_bytes
        terms[kind, layout.receive] = (
            fixed * returns + cost.link_ms_per_byte * unit_cost.output_gradient_bytes
        )
        trained = unit_cost.trained_parameters, unit_cost.trained_expert_parameters
        terms[kind, layout.reduction] = cost.of_parameters("gradient_reduction_ms", *trained)
        terms[kind, layout.gather] = cost.of_parameters("weight_gather_ms", *trained)
        terms[kind, layout.optimizer] = cost.of_parameters("optimizer_ms", *trained)
    return terms


def _structural_paths(steps: SampledSteps, layer_terms: np.ndarray, stages: int) -> np.ndarray:
    """Weights of paths through each stage, averaged over the steps. [p, paths, p, terms]

    Each is taken on the ranks that are slowest in each kind of layer, and in all.

    Args:
        layer_terms: [layer kinds, terms].
    """
    layout = steps.layout
    layer_ms = layer_terms[:, layout.forward] + layer_terms[:, layout.backward]
    load = steps.features.sum(axis=1) @ np.stack([*layer_ms, layer_ms.sum(axis=0)]).T
    slowest = load[steps.rows].argmax(axis=1)  # [steps, loads]
    rows = np.unique(np.take_along_axis(steps.rows, slowest, axis=1).T, axis=0)
    graph = planned_graph(stages, steps.features.shape[1])
    if (steps.counts < graph.schedule.micro_batches).any():
        require_prefix_closed(graph.schedule)
    orders = StageOrder.of_stages(graph)
    totals = np.insert(steps.features.cumsum(axis=1), 0, 0.0, axis=1)
    paths = [
        [
            _paths_through(steps, totals[row], steps.counts[row], order, stage, stages)
            for stage, order in enumerate(orders)
        ]
        for row in rows
    ]
    return np.concatenate(paths, axis=1)


def _paths_through(
    steps: SampledSteps,
    total: np.ndarray,
    count: np.ndarray,
    order: StageOrder,
    stage: int,
    stages: int,
) -> np.ndarray:
    """The structural paths through a stage. [8, p, terms]

    Four ways through, each followed by the stage's reduction or by the last backwards before it.

    Args:
        total: [steps, m + 1, features]; features of the micro-batches before each one and of all.
        count: [steps] micro-batches.
        order: of the stage.
    """
    weight, every = steps.weight, np.arange(len(count))
    last = np.maximum(count - 1, 0)
    # Forwards 1 to `ahead` run before the first backward, and `behind` backwards between the last
    # forward and the last backward.
    ahead = np.maximum(order.forwards_before_first_backward(count) - 1, 0)
    behind = np.maximum(order.backwards_after_last_forward(count) - 1, 0)
    everything, opening = total[:, -1], total[:, 1]
    closing = everything - total[every, last]
    forwards = everything - total[every, ahead + 1] + opening
    backwards = total[every, last - behind] + closing
    # With both detours, the first backward must come before the last forward.
    both = (last > ahead)[:, None]
    ways = (
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
    # Of an exchange, what nothing can hide: the last bucket's, and before a path the first's.
    weights[0, :, 0, layout.last_reduction] = weights[1, :, stage, layout.last_reduction] = 1
    weights[:, :, 0, layout.first_gather] = 1
    weights[:, :, stage, layout.optimizer] = 1
    return weights.reshape(-1, stages, len(layout))
