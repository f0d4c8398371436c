"""Stage times: unit costs summed over a stage's units and recomputed layers, per level."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnibal.base.arrays import rows_of
from omnibal.cost.model import CostModel
from omnibal.model.config import ModelConfig
from omnibal.model.units import ENCODER_WAITS_MS, unit_names
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, Pass, PipelineSchedule
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.unit_runs import count_ends, stage_units, unit_counts
from omnibal.pipeline.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageTimes:
    """Times of every pack (micro-batch) on every stage (part, with several chunks), in ms."""

    forward_ms: np.ndarray
    backward_ms: np.ndarray  # backward time including recomputation, [packs, stages]
    weight_ms: np.ndarray  # weight-gradient part of the backward, [packs, stages]
    recompute_ms: np.ndarray  # recomputation part of the backward, [packs, stages]
    forward_link_ms: np.ndarray  # P2P time of the activation over each cut, [packs, stages - 1]
    backward_link_ms: np.ndarray  # P2P time of its gradient, 0 if not needed, [packs, stages - 1]
    # Data-parallel encoders' time before the forward and after the backward, [packs, 2].
    waits_ms: np.ndarray | None = None
    has_experts: np.ndarray | None = None  # whether a stage has units in lockstep, bool [stages]

    def rows(self, picked: np.ndarray) -> "StageTimes":
        """Return the times of packs given by mask or indices."""
        return rows_of(self, picked, "has_experts")

    def pass_ms(self, kind: Pass) -> np.ndarray:
        """Return the time of a pass, [packs, stages]. Recomputation is in the first part of a split
        backward."""
        return select_pass(kind, self.forward_ms, self.backward_ms, self.weight_ms)


def select_pass(
    kind: Pass, forward: np.ndarray, backward: np.ndarray, weight: np.ndarray
) -> np.ndarray:
    """Return the values of a pass. Parts of a split backward sum to the whole."""
    match kind:
        case Pass.FORWARD:
            return forward
        case Pass.BACKWARD:
            return backward
        case Pass.BACKWARD_INPUT:
            return backward - weight
        case Pass.BACKWARD_WEIGHT:
            return weight


def workload_times(
    cost: CostModel,
    stages_at: Sequence[Sequence[Stage]],
    workload: Workload,
    *,
    without_padding: bool = False,
) -> StageTimes:
    """Return the times of every row of a workload, slow ranks included, on the stages of its level
    [levels, stages], with or without padding to the longest pack. [rows, ...]"""
    features = workload.features_of(cost, without_padding=without_padding)
    parts = len(stages_at[0])
    slowness = cost.slowness_of(parts)
    slow_ranks = cost.slowness_of_ranks(workload.data_parallel_size, parts)
    if slow_ranks is not None:
        slowness = slowness * slow_ranks[workload.dp_rank]
    return _times(cost, stages_at, features, slowness)


def stage_times(cost: CostModel, stages: Sequence[Stage], features: np.ndarray) -> StageTimes:
    """Return the times of packs of one level, given their `features` [packs, features]."""
    return _times(cost, [stages], features, cost.slowness_of(len(stages)))


def _times(
    cost: CostModel,
    stages_at: Sequence[Sequence[Stage]],
    features: np.ndarray,
    slowness: np.ndarray,
) -> StageTimes:
    """Return the times of packs, scaled by `slowness` [stages] or [packs, stages]."""
    kinds, shape = cost.kinds, (-1, len(cost.features))
    # Encoder waits are columns of features, but no stage's cost.
    waits_ms = None
    if ENCODER_WAITS_MS[0] in cost.features:
        waits_ms = np.empty((len(features), len(ENCODER_WAITS_MS)))
        features = features.copy()
        for index, name in enumerate(ENCODER_WAITS_MS):
            columns = [column for column, feature in enumerate(cost.features) if feature == name]
            waits_ms[:, index] = features[:, columns].sum(axis=1)
            features[:, columns] = 0
    held = np.stack([unit_counts(kinds, stage.units) for stage in stages_at[0]])
    last = [cost.units[stage_units(kinds, stage.units)[-1]] for stage in stages_at[0][:-1]]
    forward_bytes = np.array([unit.output_bytes for unit in last]).reshape(shape)
    backward_bytes = np.array([unit.output_gradient_bytes for unit in last]).reshape(shape)
    returns = backward_bytes.any(axis=1)
    # Levels differ in recomputed layers, so each has its own block of coefficients.
    recompute = np.split(cost.of_units("recompute_ms"), cost.levels, axis=1)
    blocks = [
        np.stack([unit_counts(kinds, stage.recompute) for stage in stages]) @ of_level
        for stages, of_level in zip(stages_at, recompute, strict=True)
    ]
    recompute_ms = features @ np.concatenate(blocks, axis=1).T * slowness
    return StageTimes(
        forward_ms=features @ (held @ cost.of_units("forward_ms")).T * slowness,
        backward_ms=features @ (held @ cost.of_units("backward_ms")).T * slowness + recompute_ms,
        weight_ms=features @ (held @ cost.of_units("weight_ms")).T * slowness,
        recompute_ms=recompute_ms,
        forward_link_ms=cost.link_latency_ms + cost.link_ms_per_byte * (features @ forward_bytes.T),
        backward_link_ms=cost.link_latency_ms * returns
        + cost.link_ms_per_byte * (features @ backward_bytes.T),
        waits_ms=waits_ms,
        has_experts=(held @ cost.in_lockstep > 0) if cost.in_lockstep.any() else None,
    )


def model_ms(cost: CostModel, model: ModelConfig, features: np.ndarray) -> np.ndarray:
    """Return forward plus backward ms of the model for `features` [packs, features]. [packs]"""
    units = [cost.units[name] for name in unit_names(model)]
    return features @ np.sum([unit.forward_ms + unit.backward_ms for unit in units], axis=0)


def held_units(
    cost: CostModel, stages: Sequence[Stage], schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD
) -> np.ndarray:
    """Return the number of units of each kind per stage, all of its chunks. [stages, kinds]"""
    counts = np.stack([unit_counts(cost.kinds, stage.units) for stage in stages])
    return np.stack([counts[parts].sum(axis=0) for parts in schedule.parts_of(len(stages))])


def trained_parameters(cost: CostModel, held: np.ndarray) -> np.ndarray:
    """Return trained parameters per device for `held` [..., stages, kinds]. [..., stages]"""
    per_unit = cost.of_units("trained_parameters").astype(np.float64)
    return held @ per_unit - cost.tied_trained_parameters * (count_ends(cost.kinds, held) == 2)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PerStepCosts:
    """Once-per-step costs of every stage, in ms, [..., stages].

    Gradients and weights are exchanged with data-parallel ranks in equal buckets that overlap with
    the last backward and the first forward; time without overlap is exposed. Passes in lockstep
    overlap equally on all ranks. Contention with P2P traffic is not modelled.
    """

    reduction_ms: np.ndarray  # gradient reduction time without overlap
    gather_ms: np.ndarray  # weight all-gather time at the start of the step, without overlap
    buckets: np.ndarray  # number of equal buckets of a stage's exchange
    overlaps: bool = True  # whether a chunk's exchange overlaps with other chunks' compute
    tied_ms: np.ndarray  # exchange of the tied matrix's gradient, after the reduction
    update_ms: np.ndarray  # optimizer step

    @property
    def exchange_ms(self) -> np.ndarray:
        """Total exchange time without overlap."""
        return self.reduction_ms + self.gather_ms + self.tied_ms

    def first_wait_ms(self, first_forward_ms: np.ndarray) -> np.ndarray:
        """Return the wait for weights, given the first forward's duration. Both [..., stages]"""
        # Each bucket but the first is gathered while layers of the bucket before it compute.
        hidden_ms = first_forward_ms * (1 - 1 / self.buckets)
        return np.maximum(self.gather_ms / self.buckets, self.gather_ms - hidden_ms)

    def first_waits_ms(self, first_start_ms: np.ndarray) -> np.ndarray:
        """Return the wait for weights if chunks are gathered in sequence, given the starts of their
        first forwards without waits, [..., chunks, stages]. [..., stages]"""
        chunks = first_start_ms.shape[-2]
        if not self.overlaps:
            return np.broadcast_to(self.gather_ms, first_start_ms[..., 0, :].shape)
        # Arrival of each chunk's weights, of the first chunk's first bucket: [..., chunks, stages].
        gathered_ms = np.arange(1, chunks + 1)[:, None] * self.gather_ms[..., None, :] / chunks
        gathered_ms[..., 0, :] /= self.buckets
        return np.maximum((gathered_ms - first_start_ms).max(axis=-2), 0)

    def chunks_exposed_ms(self, last_end_ms: np.ndarray) -> np.ndarray:
        """Return the exposed reduction if chunks are reduced after their last backwards, given the
        ends of these, [..., chunks, stages]. [..., stages]"""
        finish_ms, chunks = last_end_ms.max(axis=-2), last_end_ms.shape[-2]
        if not self.overlaps:
            return np.broadcast_to(self.reduction_ms, finish_ms.shape) + self.tied_ms
        reduced_ms = np.zeros_like(finish_ms)
        for end_ms in np.moveaxis(np.sort(last_end_ms, axis=-2), -2, 0):
            reduced_ms = np.maximum(reduced_ms, end_ms) + self.reduction_ms / chunks
        return reduced_ms - finish_ms + self.tied_ms

    def exposed_ms(self, last_backward_ms: np.ndarray) -> np.ndarray:
        """Return the exposed reduction, given the last backward's duration. Both [..., stages]"""
        # The last bucket is complete only when the backward ends.
        hidden_ms = last_backward_ms * (1 - 1 / self.buckets)
        exposed_ms = np.maximum(self.reduction_ms / self.buckets, self.reduction_ms - hidden_ms)
        return exposed_ms + self.tied_ms

    def without_exchange(self) -> "PerStepCosts":
        """Return only the weight update."""
        nothing = np.zeros_like(self.update_ms)
        return replace(self, reduction_ms=nothing, gather_ms=nothing, tied_ms=nothing)

    def nothing(self) -> "PerStepCosts":
        """Return zero costs."""
        return replace(self.without_exchange(), update_ms=np.zeros_like(self.update_ms))


def per_step_costs(
    cost: CostModel, stages: Sequence[Stage], schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD
) -> PerStepCosts:
    """Return data-parallel exchange and weight update of every stage."""
    return per_step_costs_of_units(cost, held_units(cost, stages, schedule))


def per_step_costs_of_units(cost: CostModel, held: np.ndarray) -> PerStepCosts:
    """Return exchange and weight update of stages with units `held` [..., stages, kinds]."""
    parameters = trained_parameters(cost, held)
    of_experts = held @ cost.of_units("trained_expert_parameters").astype(np.float64)
    buckets = np.ones(parameters.shape)
    # Megatron disables bucketing on all stages but the first.
    buckets[..., 0] = np.maximum(np.ceil(parameters[..., 0] / cost.bucket_parameters), 1)
    return PerStepCosts(
        reduction_ms=cost.of_parameters("gradient_reduction_ms", parameters, of_experts),
        gather_ms=cost.of_parameters("weight_gather_ms", parameters, of_experts),
        buckets=buckets,
        overlaps=math.isfinite(cost.bucket_parameters),
        tied_ms=cost.tied_exchange_ms * (count_ends(cost.kinds, held) == 1),
        update_ms=cost.optimizer_ms_fixed
        + cost.of_parameters("optimizer_ms", parameters, of_experts),
    )
