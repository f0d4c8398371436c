"""Time of pipeline stages: unit costs summed over what a stage holds and recomputes."""

from collections.abc import Sequence
from dataclasses import dataclass

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
from omnibal.units import unit_names


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


def once_a_step_ms(cost: CostModel, stages: Sequence[Stage]) -> tuple[np.ndarray, np.ndarray]:
    """Gradient reduction and weight update of every stage. Both [stages]"""
    parameters = trained_parameters(cost, stages)
    reduction_ms = cost.gradient_reduction_ms_per_parameter * parameters
    counts = np.stack([unit_counts(cost.kinds, stage) for stage in stages])
    reduction_ms += cost.tied_exchange_ms * holds_one_end(cost.kinds, counts)
    return reduction_ms, cost.optimizer_ms_fixed + cost.optimizer_ms_per_parameter * parameters
