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

from omnibal.config import ModelConfig
from omnibal.cost.model import FEATURES, CostModel, Unit
from omnibal.pipeline.critical_path import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    RECEIVE,
    REDUCTION,
    SEND,
    TERMS,
    SampledSteps,
)
from omnibal.pipeline.operation_graph import StageOrder, planned_graph, require_shortens
from omnibal.pipeline.predict import MAX_SIMULATED_STEPS
from omnibal.pipeline.units import (
    LANGUAGE_LAYER,
    UNITS,
    VISION_LAYER,
    holds_both_ends,
    holds_one_end,
    unit_sequence,
)
from omnibal.pipeline.workload import Workload

_LAYERS = (Unit.VISION_LAYER, Unit.LANGUAGE_LAYER)
_COMPUTE = slice(FORWARD.start, BACKWARD.stop)
_LINKS = slice(SEND.start, RECEIVE.stop)
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
    """Cost terms without recomputation, [runs, TERMS]."""
    prefix: np.ndarray
    """Summed terms of all units before each position, [units + 1, TERMS]."""
    cut: np.ndarray
    """Terms of a cut at each position, [units + 1, TERMS]."""

    @property
    def units(self) -> int:
        """Number of units of the model."""
        return len(self.prefix) - 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Structure:
    """Bounds that hold for every split of a model, computed before any split is tried."""

    recompute_ms: np.ndarray
    """Time that recomputing a vision and a language layer adds to a backward, [2, 5]."""
    runs: Runs
    weights: np.ndarray
    """Weights of the structural paths, averaged over the steps. [p, paths, p, TERMS]"""

    @classmethod
    def of(
        cls, cost: CostModel, model: ModelConfig, steps: SampledSteps, stages: int
    ) -> "Structure":
        """Compute the bounds for pipelines of `stages` stages on these steps."""
        unit_terms = _unit_terms(cost)
        return cls(
            recompute_ms=np.stack([cost.units[unit].recompute_ms for unit in _LAYERS]),
            runs=possible_runs(cost, model),
            weights=_structural_paths(steps, unit_terms, stages),
        )

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.weights)

    def longest_ms(
        self, stage: int, start: np.ndarray, end: np.ndarray, terms: np.ndarray
    ) -> np.ndarray:
        """Longest structural path through a stage, for each run that it may hold. [options]

        Infinite where the position does not allow it. Links are counted at the stage's own ends
        only.
        """
        weights, runs = self.weights[stage], self.runs
        at_start = (start == 0) == (stage == 0)
        at_end = (end == runs.units) == (stage == self.stages - 1)
        length = terms @ weights[:, stage].T
        if stage > 0:
            earlier = weights[:, stage - 1]
            before = runs.prefix[:, _COMPUTE] @ earlier[:, _COMPUTE].T
            before += runs.cut[:, _LINKS] @ earlier[:, _LINKS].T
            length += before[start]
        if stage < self.stages - 1:
            later = weights[:, stage + 1, _COMPUTE]
            length += ((runs.prefix[-1] - runs.prefix)[:, _COMPUTE] @ later.T)[end]
        return np.where(at_start & at_end, length.max(axis=1), np.inf)


def least_step_ms(
    cost: CostModel, model: ModelConfig, workload: Workload, pipeline_size: int
) -> float:
    """Lower bound on the mean step that `predict` gives, over all splits and recomputed layers.

    A fraction of what the search takes: neither memory nor recomputation are in it.

    Args:
        pipeline_size: stages; at most as many as the model has layers.
    """
    steps = SampledSteps.of(workload.some_steps(MAX_SIMULATED_STEPS))
    structure = Structure.of(cost, model, steps, pipeline_size)
    runs = structure.runs
    bounds_ms = [
        structure.longest_ms(stage, runs.start, runs.end, runs.terms)
        for stage in range(pipeline_size)
    ]
    return least_largest([(runs.start, runs.end)] * pipeline_size, bounds_ms, runs.units)


def least_largest(edges: Edges, sizes: Sequence[np.ndarray], units: int) -> float:
    """Least possible value of the largest of the stages' sizes [options]; infinite if no way leads
    through all of them."""
    reached = np.where(np.arange(units + 1) == 0, 0.0, np.inf)
    for (start, end), size in zip(edges, sizes, strict=True):
        largest = np.maximum(reached[start], size)
        reached = np.full(units + 1, np.inf)
        np.minimum.at(reached, end, largest)
    return float(reached[-1])


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


def possible_runs(cost: CostModel, model: ModelConfig) -> Runs:
    """All runs of units that hold a layer."""
    sequence = unit_sequence(model)
    kinds = np.array([[unit == kind for kind in UNITS] for unit in sequence], np.int64)
    before = np.concatenate([np.zeros((1, len(UNITS)), np.int64), np.cumsum(kinds, axis=0)])
    start, end = np.triu_indices(len(sequence) + 1, k=1)
    counts = before[end] - before[start]
    has_layer = counts[:, VISION_LAYER] + counts[:, LANGUAGE_LAYER] > 0
    start, end, counts = start[has_layer], end[has_layer], counts[has_layer]
    unit_terms = _unit_terms(cost)
    terms = counts @ unit_terms
    last = np.array([UNITS.index(unit) for unit in sequence])[end - 1]
    for link in (SEND, RECEIVE):
        terms[:, link] = np.where((end < len(sequence))[:, None], unit_terms[last, link], 0.0)
    terms[:, OPTIMIZER] += cost.optimizer_ms_fixed
    once = cost.tied_trained_parameters * holds_both_ends(counts)
    terms[:, REDUCTION] -= cost.gradient_reduction_ms_per_parameter * once
    terms[:, REDUCTION] += cost.tied_exchange_ms * holds_one_end(counts)
    terms[:, OPTIMIZER] -= cost.optimizer_ms_per_parameter * once
    prefix = before @ unit_terms
    cut = np.zeros_like(prefix)
    cut[1:-1] = unit_terms[[UNITS.index(unit) for unit in sequence[:-1]]]
    return Runs(start=start, end=end, counts=counts, terms=terms, prefix=prefix, cut=cut)


def _unit_terms(cost: CostModel) -> np.ndarray:
    """Terms that a unit of each kind, and a cut right after it, add to a stage. [kinds, TERMS]"""
    fixed = np.zeros(len(FEATURES))
    fixed[0] = cost.link_latency_ms
    terms = np.zeros((len(UNITS), TERMS))
    for kind, unit in enumerate(UNITS):
        unit_cost = cost.units[unit]
        returns = unit_cost.output_gradient_bytes.any()
        terms[kind, FORWARD] = unit_cost.forward_ms
        terms[kind, BACKWARD] = unit_cost.backward_ms
        terms[kind, SEND] = fixed + cost.link_ms_per_byte * unit_cost.output_bytes
        terms[kind, RECEIVE] = (
            fixed * returns + cost.link_ms_per_byte * unit_cost.output_gradient_bytes
        )
        trained = unit_cost.trained_parameters
        terms[kind, REDUCTION] = cost.gradient_reduction_ms_per_parameter * trained
        terms[kind, OPTIMIZER] = cost.optimizer_ms_per_parameter * trained
    return terms


def _structural_paths(steps: SampledSteps, unit_terms: np.ndarray, stages: int) -> np.ndarray:
    """Weights of paths through each stage, averaged over the steps. [p, paths, p, TERMS]

    Each is taken on the ranks that are slowest in vision, in language and in both layers.
    """
    layer_ms = unit_terms[[VISION_LAYER, LANGUAGE_LAYER]]
    layer_ms = layer_ms[:, FORWARD] + layer_ms[:, BACKWARD]
    load = steps.features.sum(axis=1) @ np.stack([*layer_ms, layer_ms.sum(axis=0)]).T
    slowest = load[steps.rows].argmax(axis=1)  # [steps, loads]
    rows = np.unique(np.take_along_axis(steps.rows, slowest, axis=1).T, axis=0)
    graph = planned_graph(stages, steps.features.shape[1])
    if (steps.counts < graph.schedule.micro_batches).any():
        require_shortens(graph.schedule)
    orders = StageOrder.of_stages(graph)
    return np.concatenate([_paths_on(steps, row, orders) for row in rows], axis=1)


def _paths_on(steps: SampledSteps, row: np.ndarray, orders: Sequence[StageOrder]) -> np.ndarray:
    """The structural paths on one row of every step. [p, 8, p, TERMS]"""
    features = steps.features[row]
    total = np.concatenate([np.zeros_like(features[:, :1]), features.cumsum(axis=1)], axis=1)
    paths = [
        _paths_through(steps.weight, total, steps.counts[row], order, stage, len(orders))
        for stage, order in enumerate(orders)
    ]
    return np.stack(paths)


def _paths_through(
    weight: np.ndarray,
    total: np.ndarray,
    count: np.ndarray,
    order: StageOrder,
    stage: int,
    stages: int,
) -> np.ndarray:
    """The structural paths through a stage. [8, p, TERMS]

    Four ways through, each followed by the stage's reduction or by the last backwards before it.

    Args:
        weight: [steps].
        total: [steps, m + 1, 5]; features of the micro-batches before each one and of all.
        count: [steps] micro-batches.
        order: of the stage.
    """
    every = np.arange(len(count))
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
    weights = np.zeros((2, len(ways), stages, TERMS))
    for i, (own_forward, own_backward, later) in enumerate(ways):
        way = weights[:, i]
        for forward, backward in ((FORWARD, BACKWARD), (SEND, RECEIVE)):
            way[:, :stage, forward] = weight @ opening
            way[0, :stage, backward] = weight @ closing
            way[:, stage:, forward] = way[:, stage:, backward] = weight @ later
        way[:, stage, FORWARD] = weight @ own_forward
        way[:, stage, BACKWARD] = weight @ own_backward
    weights[0, :, 0, REDUCTION] = weights[1, :, stage, REDUCTION] = 1
    weights[:, :, stage, OPTIMIZER] = 1
    return weights.reshape(-1, stages, TERMS)
