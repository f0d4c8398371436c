"""Cost types shared by simulator, search and report.

A unit's time and activation memory are linear in the micro-batch's features
(`omnibal.model.units.feature_names`), e.g. for InternVL

    [1, tiles, tokens, sum of squared sample tokens, loss tokens]

so pass times [packs, stages] are features [packs, features] @ coefficients [features, stages].
Sources: counts (`omnibal.cost.analytic`) and a measured profile (`omnibal.cost.profile`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np

from omnibal.model.units import HEAD, UnitKind

ParameterCount = TypeVar("ParameterCount", float, np.ndarray)
LibraryBuffer = tuple[float, frozenset[str]]  # bytes, and names of unit kinds


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UnitCost:
    """Time and memory of one unit on one device, as coefficients per feature."""

    forward_ms: np.ndarray  # forward time, [features]
    backward_ms: np.ndarray  # without recomputation; 0 if nothing up to here is trained
    weight_ms: np.ndarray  # part of backward that can be deferred, or 0 if frozen
    recompute_ms: np.ndarray  # added to backward by recomputation, 0 without backward
    collective_ms: np.ndarray  # tensor- and expert-parallel part of both passes, [2, features]
    padding_ms: np.ndarray  # part of forward and backward spent on padding, [2, features]
    context_ms: np.ndarray  # context-parallel, in forward, backward, recomputation, [3, features]
    activation_bytes: np.ndarray  # activations kept without recomputation, [features]
    boundary_bytes: np.ndarray  # the unit's input, the only activation kept if recomputed
    output_bytes: np.ndarray  # activation sent to the next stage by a cut here
    output_gradient_bytes: np.ndarray  # sent back over that cut, 0 if all before is frozen
    transient_bytes: np.ndarray  # working memory in backward, else forward, [moments, features]
    two_part_bytes: np.ndarray  # with deferred weight gradients, [moments, features]
    late_bytes: np.ndarray  # inputs, output gradients, working memory if deferred, [3, features]
    passing_bytes: np.ndarray  # held during forward through units without backward, else 0
    shared_bytes: np.ndarray  # gather buffer, one per stage, for its largest pack
    parameters: int  # parameters on this device, after tensor parallelism
    trained_parameters: int  # trained parameters on this device: all, adapters only, or 0 if frozen
    expert_parameters: int = 0  # experts' part of `parameters`, with its own data-parallel group
    host_ms: tuple[float, float] | None = None  # to launch forward, backward; None if not counted
    whole_bytes: float = 0.0  # gathered weights and gradients in backward, in `transient_bytes`
    weight_copy_bytes: float = 0.0  # bytes of FP8 weights in addition to `CostModel.rates`

    @property
    def trained_expert_parameters(self) -> int:
        return self.expert_parameters if self.trained_parameters == self.parameters else 0

    @property
    def has_backward(self) -> bool:
        """Whether anything up to this unit is trained."""
        return bool(self.backward_ms.any())


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterRates:
    """Memory per parameter, and time per trained parameter and step."""

    weight_bytes: float = 0.0
    gradient_bytes: float = 0.0
    optimizer_bytes: float = 0.0  # optimizer state on one device, after sharding
    optimizer_ms: float = 0.0  # gradient norm, clipping and weight update
    gradient_reduction_ms: float = 0.0
    weight_gather_ms: float = 0.0

    def scale_times(self, *, update: float = 1.0, exchange: float = 1.0) -> "ParameterRates":
        """Return the rates with update and exchange times multiplied."""
        return replace(
            self,
            optimizer_ms=self.optimizer_ms * update,
            gradient_reduction_ms=self.gradient_reduction_ms * exchange,
            weight_gather_ms=self.weight_gather_ms * exchange,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CostModel:
    """Costs of all units, of a step and of a cut."""

    features: tuple[str, ...]  # Micro-batch features. The first is "fixed", always 1.
    kinds: tuple[UnitKind, ...]  # unit kinds, in model order
    units: dict[str, UnitCost]  # unit costs by kind name, in model order
    rates: ParameterRates  # rates of non-expert parameters
    optimizer_ms_fixed: float  # time per step and device in addition to `rates`
    link_latency_ms: float  # latency of a send between neighbouring stages
    link_ms_per_byte: float  # time per byte of a send between neighbouring stages
    source: str  # origin of the costs, for reports
    bucket_parameters: float = math.inf  # per bucket on stage 0, others have one; inf: no overlap
    tied_parameters: int = 0  # of a tied embedding: both units count it, a stage holds it once
    expert_rates: ParameterRates = ParameterRates()  # rates of expert parameters
    expert_peer_bytes: float = 0.0  # NCCL's, on devices with experts
    runs_in_lockstep: bool = False  # whether ranks run in lockstep, as with sharded weights
    weight_parts: int = 1  # ranks that shard non-expert weights; bytes are per shard
    library_buffers: tuple[LibraryBuffer, ...] = ()  # once per stage with a unit of its kinds
    slowness: tuple[float, ...] = ()  # [parts], relative to the fastest; empty if uniform
    slow_ranks: tuple[tuple[float, ...], ...] = ()  # [ranks][parts], >= 1; empty if uniform

    def slowness_of_ranks(self, ranks: int, parts: int) -> np.ndarray | None:
        """Return `slow_ranks` as [ranks, parts], or None if uniform or of other sizes."""
        known = np.array(self.slow_ranks)
        return known if known.shape == (ranks, parts) else None

    def slowness_of(self, parts: int) -> np.ndarray:
        """Return the slowdown per part, [parts], or 1 if measured for another number of parts."""
        return np.array(self.slowness if len(self.slowness) == parts else (1.0,) * parts)

    @property
    def levels(self) -> int:
        """Number of packing levels in the features (`side_by_side`)."""
        return self.features.count(self.features[0])

    def of_units(self, field: str) -> np.ndarray:
        """Return a field of every kind's `UnitCost`. [kinds, ...]"""
        return np.stack([getattr(unit, field) for unit in self.units.values()])

    @property
    def of_experts(self) -> np.ndarray:
        """Whether units of each kind hold experts, bool [kinds]."""
        return np.array([unit.expert_parameters > 0 for unit in self.units.values()])

    @property
    def in_lockstep(self) -> np.ndarray:
        """Whether lockstep ranks synchronise in units of each kind, bool [kinds]."""
        return self.of_experts | self.runs_in_lockstep

    def of_parameters(
        self, rate: str, parameters: ParameterCount, of_experts: ParameterCount
    ) -> ParameterCount:
        """Return a rate times `parameters`; `of_experts` of them have the experts' rate."""
        per_parameter: float = getattr(self.rates, rate)
        per_expert_parameter: float = getattr(self.expert_rates, rate)
        return (parameters - of_experts) * per_parameter + of_experts * per_expert_parameter

    @property
    def tied_trained_parameters(self) -> int:
        """Trained tied parameters, or 0 if frozen."""
        return self.tied_parameters if self.units[HEAD].trained_parameters else 0

    @property
    def tied_exchange_ms(self) -> float:
        """All-reduce time of the tied gradient per step, on a stage with embedding or head."""
        # Both stages wait for each other, so it adds to the later stage's gradient reduction.
        if not self.tied_trained_parameters:
            return 0.0
        gradient_bytes = self.rates.gradient_bytes * self.tied_trained_parameters
        return 2 * self.link_latency_ms + self.link_ms_per_byte * gradient_bytes


def side_by_side(costs: Sequence[CostModel]) -> CostModel:
    """Return one cost model of all levels, features concatenated.

    A share has its features in its level's block and zeros elsewhere (`Workload.features_of`), so
    times and bytes stay one product of features and coefficients. Once-per-step costs, parameters
    and links are equal at all levels and come from the first.
    """
    first = costs[0]
    if len(costs) == 1:
        return first
    units = {name: _join_costs([cost.units[name] for cost in costs]) for name in first.units}
    return replace(first, features=first.features * len(costs), units=units)


def _join_costs(units: Sequence[UnitCost]) -> UnitCost:
    joined: dict[str, Any] = {}
    for column in fields(UnitCost):
        values = [getattr(unit, column.name) for unit in units]
        if column.name in ("transient_bytes", "two_part_bytes"):  # [moments, features]
            # Moments that a level does not have cost nothing.
            moments = max(map(len, values))
            values = [np.pad(value, ((0, moments - len(value)), (0, 0))) for value in values]
        if isinstance(values[0], np.ndarray):
            joined[column.name] = np.concatenate(values, axis=-1)
    return replace(units[0], **joined)


def with_features(cost: CostModel, names: Sequence[str]) -> CostModel:
    """Return costs with more features at zero cost, in new arrays that may be modified."""

    def pad_unit(unit: UnitCost) -> UnitCost:
        arrays: dict[str, Any] = {
            field.name: np.concatenate([value, np.zeros((*value.shape[:-1], len(names)))], axis=-1)
            for field in fields(unit)
            if isinstance(value := getattr(unit, field.name), np.ndarray)
        }
        return replace(unit, **arrays)

    units = {name: pad_unit(unit) for name, unit in cost.units.items()}
    return replace(cost, features=(*cost.features, *names), units=units)
