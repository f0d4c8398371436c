"""Time of pipeline stages: unit costs summed over what a stage holds and recomputes.

Units cost, and stages recompute, by the level of the micro-batch; all else of stages is the same at
every level.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnibal.config import ModelConfig
from omnibal.cost.model import CostModel
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.units import (
    holds_both_ends,
    holds_one_end,
    last_unit,
    recomputed_counts,
    unit_counts,
)
from omnibal.pipeline.workload import Workload
from omnibal.units import unit_names


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LevelStages:
    """Stages as they are for packs of one level."""

    cost: CostModel
    """What units cost on such packs."""
    stages: tuple[Stage, ...]
    """Stages with the layers that they recompute on such packs."""


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


def workload_times(levels: Sequence[LevelStages], workload: Workload) -> StageTimes:
    """Times of every row of the workload on the stages, each at its own level. [rows, ...]"""
    if len(levels) == 1:
        return stage_times(levels[0].cost, levels[0].stages, workload.features)
    rows = [np.flatnonzero(workload.level == index) for index in range(len(levels))]
    order = np.argsort(np.concatenate(rows))
    parts = [
        stage_times(level.cost, level.stages, workload.features[of_level])
        for level, of_level in zip(levels, rows, strict=True)
    ]
    return StageTimes(
        forward_ms=np.concatenate([part.forward_ms for part in parts])[order],
        backward_ms=np.concatenate([part.backward_ms for part in parts])[order],
        recompute_ms=np.concatenate([part.recompute_ms for part in parts])[order],
        forward_link_ms=np.concatenate([part.forward_link_ms for part in parts])[order],
        backward_link_ms=np.concatenate([part.backward_link_ms for part in parts])[order],
    )


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


def once_a_step_at(levels: Sequence[LevelStages]) -> OnceAStep:
    """Exchange and weight update of every stage, which are of no level: the first says it."""
    return once_a_step(levels[0].cost, levels[0].stages)


def bucket_counts(cost: CostModel, parameters: np.ndarray) -> np.ndarray:
    """Buckets of a first stage with so many trained parameters, at least 1. [...]"""
    return np.maximum(np.ceil(parameters / cost.bucket_parameters), 1.0)
