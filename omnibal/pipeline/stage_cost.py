"""Time and memory of pipeline stages: unit costs summed over what a stage holds and recomputes.

The search and the plan use the one memory formula here: static state of the parameters, plus the
activations of all micro-batches in flight, plus the largest unit's working memory. A recomputed
layer keeps only its input; the rest comes back as working memory while its backward runs. A stage's
output is free again once it is sent.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from omnibal.config import ModelConfig
from omnibal.cost.model import CostModel
from omnibal.pipeline.operation_graph import (
    in_flight,
    planned_graph,
    require_in_order,
    require_shortens,
)
from omnibal.pipeline.prediction import StageMemory
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.units import (
    holds_both_ends,
    holds_one_end,
    last_unit,
    recomputed_counts,
    unit_counts,
)
from omnibal.units import UnitKind, unit_names

GIB = 1024**3
_CAP_TOLERANCE = 1e-12
"""Relative tolerance; sums of the same bytes in another order differ by less."""
_KEPT_COUNTS = 8
"""Pairs of pipeline size and micro-batches whose in-flight counts are cached, as they repeat."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageTimes:
    """Times of every pack (micro-batch) on every stage, in ms."""

    forward_ms: np.ndarray
    """Forward time, [packs, stages]."""
    backward_ms: np.ndarray
    """Backward time, recomputation included, [packs, stages]."""
    recompute_ms: np.ndarray
    """Part of the backward time that recomputes, [packs, stages]."""
    forward_link_ms: np.ndarray
    """Time of one send of the activation over each cut, [packs, stages - 1]."""
    backward_link_ms: np.ndarray
    """Time of one send of its gradient, 0 where none is needed, [packs, stages - 1]."""


def stage_times(cost: CostModel, stages: Sequence[Stage], features: np.ndarray) -> StageTimes:
    """Times of packs with `features` [packs, features] on the given stages."""
    kinds, units, shape = cost.kinds, cost.units.values(), (-1, len(cost.features))
    held = np.stack([unit_counts(kinds, stage) for stage in stages])
    again = np.stack([recomputed_counts(kinds, stage) for stage in stages])
    forward = np.stack([unit.forward_ms for unit in units])
    backward = np.stack([unit.backward_ms for unit in units])
    last = [cost.units[last_unit(kinds, stage)] for stage in stages[:-1]]
    forward_bytes = np.array([unit.output_bytes for unit in last]).reshape(shape)
    backward_bytes = np.array([unit.output_gradient_bytes for unit in last]).reshape(shape)
    returns = backward_bytes.any(axis=1)
    recompute = np.stack([unit.recompute_ms for unit in units])
    recompute_ms = features @ (again @ recompute).T
    return StageTimes(
        forward_ms=features @ (held @ forward).T,
        backward_ms=features @ (held @ backward).T + recompute_ms,
        recompute_ms=recompute_ms,
        forward_link_ms=cost.link_latency_ms + cost.link_ms_per_byte * (features @ forward_bytes.T),
        backward_link_ms=cost.link_latency_ms * returns
        + cost.link_ms_per_byte * (features @ backward_bytes.T),
    )


def model_ms(cost: CostModel, model: ModelConfig, features: np.ndarray) -> np.ndarray:
    """Forward and backward ms of the whole model for `features` [packs, features]. [packs]"""
    units = [cost.units[name] for name in unit_names(model)]
    return features @ np.sum([unit.forward_ms + unit.backward_ms for unit in units], axis=0)


def trained_parameters(cost: CostModel, stages: Sequence[Stage]) -> np.ndarray:
    """Parameters of one device of every stage that are updated. [stages]"""
    per_unit = np.array([unit.trained_parameters for unit in cost.units.values()], np.float64)
    counts = np.stack([unit_counts(cost.kinds, stage) for stage in stages])
    return counts @ per_unit - cost.tied_trained_parameters * holds_both_ends(cost.kinds, counts)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OnceAStep:
    """What every stage does once a step, in ms. All are [stages].

    A stage's exchange with its data-parallel ranks is in equal buckets. One is reduced when its
    share of the last backward has run, and a share of the first forward waits for one to be
    gathered: what these leave is exposed. Traffic between stages on the same links is not modelled.
    """

    reduction_ms: np.ndarray
    """Time of the gradient reduction, were it alone."""
    gather_ms: np.ndarray
    """Time of the gather of new weights, at the start of the step, were it alone."""
    buckets: np.ndarray
    """Number of buckets."""
    tied_ms: np.ndarray
    """Exchange of a tied matrix's gradient with its other stage, after the reduction."""
    update_ms: np.ndarray
    """Weight update."""

    @property
    def exchange_ms(self) -> np.ndarray:
        """All that a stage exchanges, were nothing hidden."""
        return self.reduction_ms + self.gather_ms + self.tied_ms

    def first_wait_ms(self, first_forward_ms: np.ndarray) -> np.ndarray:
        """Wait for weights before the first forward, given its time. Both [..., stages]"""
        hidden_ms = first_forward_ms * (1 - 1 / self.buckets)
        return np.maximum(self.gather_ms / self.buckets, self.gather_ms - hidden_ms)

    def exposed_ms(self, last_backward_ms: np.ndarray) -> np.ndarray:
        """Time from the end of the last backward to that of the exchange of gradients, given the
        time of this backward. Both [..., stages]"""
        hidden_ms = last_backward_ms * (1 - 1 / self.buckets)
        rest_ms = np.maximum(self.reduction_ms / self.buckets, self.reduction_ms - hidden_ms)
        return rest_ms + self.tied_ms

    def without_exchange(self) -> "OnceAStep":
        """The same with the weight update alone."""
        nothing = np.zeros_like(self.update_ms)
        return replace(self, reduction_ms=nothing, gather_ms=nothing, tied_ms=nothing)

    def nothing(self) -> "OnceAStep":
        """The same without anything."""
        return replace(self.without_exchange(), update_ms=np.zeros_like(self.update_ms))


def once_a_step(cost: CostModel, stages: Sequence[Stage]) -> OnceAStep:
    """Exchange with data-parallel ranks and weight update of every stage."""
    parameters = trained_parameters(cost, stages)
    counts = np.stack([unit_counts(cost.kinds, stage) for stage in stages])
    buckets = np.ones(len(stages))
    buckets[0] = bucket_counts(cost, parameters[0])
    return OnceAStep(
        reduction_ms=cost.gradient_reduction_ms_per_parameter * parameters,
        gather_ms=cost.weight_gather_ms_per_parameter * parameters,
        buckets=buckets,
        tied_ms=cost.tied_exchange_ms * holds_one_end(cost.kinds, counts),
        update_ms=cost.optimizer_ms_fixed + cost.optimizer_ms_per_parameter * parameters,
    )


def bucket_counts(cost: CostModel, parameters: np.ndarray) -> np.ndarray:
    """Buckets of a first stage with so many trained parameters, at least 1. [...]"""
    return np.maximum(np.ceil(parameters / cost.bucket_parameters), 1.0)


def fits_cap(peak: np.ndarray | float, memory_cap: float) -> np.ndarray:
    """Whether peaks are within a memory cap, to rounding: a cap that is a peak holds it. [...]"""
    return np.asarray(peak) <= memory_cap * (1 + _CAP_TOLERANCE)


def in_flight_features(
    features: np.ndarray, slot: np.ndarray, pipeline_size: int, stage: int
) -> np.ndarray:
    """Summed features of what a stage holds after every forward. [packs, features]

    Held are micro-batches whose forward has run and whose backward has not ended. Packs are sorted
    by step, rank and slot, and slots count from 0 without gaps; row i is after pack i's forward.
    """
    others = _held_besides(pipeline_size, int(slot.max()) + 1)[stage]
    return _in_flight_sums(_running_sums(features), slot, others).T


@lru_cache(maxsize=_KEPT_COUNTS)
def _held_besides(pipeline_size: int, micro_batches: int) -> tuple[np.ndarray, ...]:
    """Number of earlier micro-batches still held right after the forward of each one. [m] of every
    stage of the planned schedule"""
    graph = planned_graph(pipeline_size, micro_batches)
    require_in_order(graph)
    require_shortens(graph.schedule)
    held = [in_flight(graph, stage)[:, 0] for stage in range(pipeline_size)]
    return tuple(stop - first - 1 for first, stop in (runs.T for runs in held))


def _running_sums(features: np.ndarray) -> np.ndarray:
    """Sum of each feature over the packs before each one and over all. [features, packs + 1]"""
    total = np.zeros((features.shape[1], len(features) + 1))
    np.cumsum(features.T, axis=1, out=total[:, 1:])
    return total


def _in_flight_sums(total: np.ndarray, slot: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Compute `in_flight_features` from running sums. [features, packs]"""
    first = np.arange(len(slot)) - others[slot]
    return total[:, 1:] - total[:, first]


def stage_memories(
    cost: CostModel, stages: Sequence[Stage], slot: np.ndarray, features: np.ndarray
) -> list[StageMemory]:
    """Peak memory of one device of every stage, over all packs of a run.

    Args:
        slot: [packs]; packs are sorted by step, rank and slot.
        features: [packs, features].
    """
    tables = memory_tables(cost, features, slot, len(stages))
    return [_memory(cost, *each) for each in zip(stages, tables, strict=True)]


def stage_memory(
    cost: CostModel, stage: Stage, held_features: np.ndarray, features: np.ndarray
) -> StageMemory:
    """Peak memory of one device of the stage.

    Args:
        held_features: [sets, features], each row the summed features of micro-batches that the
            stage holds at the same time.
        features: [packs, features] of single micro-batches.
    """
    return _memory(cost, stage, memory_table(cost, held_features, features))


def _memory(cost: CostModel, stage: Stage, table: "MemoryTable") -> StageMemory:
    kinds = cost.kinds
    counts, recomputed = unit_counts(kinds, stage), recomputed_counts(kinds, stage)
    parameters = sum(
        number * unit.parameters
        for unit, number in zip(cost.units.values(), counts.tolist(), strict=True)
    )
    parameters -= cost.tied_parameters * int(holds_both_ends(kinds, counts))
    trained = float(trained_parameters(cost, [stage])[0])
    return StageMemory(
        weights_gib=parameters * cost.weight_bytes_per_parameter / GIB,
        gradients_gib=trained * cost.gradient_bytes_per_parameter / GIB,
        optimizer_gib=trained * cost.optimizer_bytes_per_parameter / GIB,
        activations_gib=float(table.activation_bytes(counts, recomputed)) / GIB,
        transient_gib=float(table.transient_bytes(counts, recomputed)) / GIB,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemoryTable:
    """Bytes by kind of unit. `counts` and `recomputed` of the methods are [..., kinds]."""

    kinds: tuple[UnitKind, ...]
    state_bytes: np.ndarray
    """Bytes of weights, gradients and optimizer state, [kinds]."""
    tied_bytes: float
    """Part of the state that a stage with both language embed and head has once and not twice."""
    kept_bytes: np.ndarray
    """Activations of micro-batches held at the same time, [sets, kinds]."""
    input_bytes: np.ndarray
    """Activations that remain when the unit is recomputed, [sets, kinds]."""
    working_bytes: np.ndarray
    """Working memory of the worst pack, [kinds]."""
    recompute_working_bytes: np.ndarray
    """Working memory of the worst pack when the unit is recomputed, [kinds]."""

    def activation_bytes(self, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """Activations of all micro-batches in flight, at most. [...]"""
        kept = (counts - recomputed) @ self.kept_bytes.T
        return (kept + recomputed @ self.input_bytes.T).max(axis=-1)

    def transient_bytes(self, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """Working memory of the stage's largest unit. [...]"""
        working = np.where(recomputed > 0, self.recompute_working_bytes, self.working_bytes)
        return np.where(counts > 0, working, 0.0).max(axis=-1)

    def peak_bytes(self, counts: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
        """Peak memory of a stage, all kinds of memory together. [...]"""
        state = counts @ self.state_bytes - self.tied_bytes * holds_both_ends(self.kinds, counts)
        activations = self.activation_bytes(counts, recomputed)
        return state + activations + self.transient_bytes(counts, recomputed)


def _state_bytes(cost: CostModel, parameters: int, trained: int) -> float:
    trained_bytes = cost.gradient_bytes_per_parameter + cost.optimizer_bytes_per_parameter
    return parameters * cost.weight_bytes_per_parameter + trained * trained_bytes


def memory_table(cost: CostModel, held_features: np.ndarray, features: np.ndarray) -> MemoryTable:
    """Memory by kind of unit.

    Args:
        held_features: [sets, features] of micro-batches that are held at the same time.
        features: [packs, features] of single ones.
    """
    return _tables(cost, features, [held_features.T[_kept_features(cost)]])[0]


def memory_tables(
    cost: CostModel, features: np.ndarray, slot: np.ndarray, pipeline_size: int
) -> list[MemoryTable]:
    """Memory tables of every stage of a pipeline, each with its own micro-batches in flight.

    Args:
        features: [packs, features]; packs are sorted by step, rank and slot.
        slot: [packs].
    """
    others = _held_besides(pipeline_size, int(slot.max()) + 1)
    # Stages that hold the same micro-batches share a table.
    distinct = {besides.tobytes(): besides for besides in others}
    total = _running_sums(features[:, _kept_features(cost)])
    held = (_in_flight_sums(total, slot, besides) for besides in distinct.values())
    tables = dict(zip(distinct, _tables(cost, features, held), strict=True))
    return [tables[besides.tobytes()] for besides in others]


def _kept_features(cost: CostModel) -> np.ndarray:
    """The features that anything kept grows with."""
    kept = [[unit.activation_bytes, unit.boundary_bytes] for unit in cost.units.values()]
    return np.flatnonzero((np.array(kept) > 0).any(axis=(0, 1)))


def _tables(cost: CostModel, features: np.ndarray, held: Iterable[np.ndarray]) -> list[MemoryTable]:
    """Memory tables for sets of micro-batches, by `_kept_features` [kept, sets] each."""
    units, kept = cost.units.values(), _kept_features(cost)
    activation = np.stack([unit.activation_bytes for unit in units])
    boundary = np.stack([unit.boundary_bytes for unit in units])
    working = np.stack([unit.transient_bytes for unit in units])
    state_bytes = [_state_bytes(cost, unit.parameters, unit.trained_parameters) for unit in units]
    working_bytes = (features @ working.T).max(axis=0)
    recompute_working_bytes = (features @ (working + activation - boundary).T).max(axis=0)
    # Coefficients are never negative, so only sets that no other set dominates can be the largest.
    largest = (undominated(sets.T) for sets in held)
    return [
        MemoryTable(
            kinds=cost.kinds,
            state_bytes=np.array(state_bytes),
            tied_bytes=_state_bytes(cost, cost.tied_parameters, cost.tied_trained_parameters),
            kept_bytes=rows @ activation[:, kept].T,
            input_bytes=rows @ boundary[:, kept].T,
            working_bytes=working_bytes,
            recompute_working_bytes=recompute_working_bytes,
        )
        for rows in largest
    ]


def bytes_by_feature(cost: CostModel, stage: Stage) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that a stage keeps per micro-batch, [features], and its kinds' working memory.

    The second is [kinds, features].
    """
    kinds, units = cost.kinds, cost.units.values()
    activation = np.stack([unit.activation_bytes for unit in units])
    boundary = np.stack([unit.boundary_bytes for unit in units])
    transient = np.stack([unit.transient_bytes for unit in units])
    counts, recomputed = unit_counts(kinds, stage), recomputed_counts(kinds, stage)
    again = (recomputed > 0)[:, None] * (activation - boundary)
    kept = (counts - recomputed) @ activation + recomputed @ boundary
    return kept, (counts > 0)[:, None] * (transient + again)


def undominated(rows: np.ndarray) -> np.ndarray:
    """The distinct rows [n, k] that no other row equals or exceeds in every column."""
    columns = np.ascontiguousarray(rows.T)
    sums = (1 / np.maximum(columns.max(axis=1), 1)) @ columns
    found = []
    while len(sums):
        # A row with the largest scaled sum is dominated by no other.
        top = columns[:, sums.argmax()]
        found.append(top)
        left = np.zeros(len(sums), bool)
        for column, value in zip(columns, top, strict=True):
            left |= column > value
        columns, sums = columns[:, left], sums[left]
    return np.array(found)
