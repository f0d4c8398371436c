"""Types of `profile.json`, and costs that are fitted to it.

Unit times are fitted by non-negative least squares over the features that the unit depends on. Rows
are divided by their measured value to minimise the relative error.
"""

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import ConfigDict, Field
from scipy.optimize import nnls

from omnibal.base.errors import UserError
from omnibal.base.files import read_json_model, write_json_model
from omnibal.base.frozen import Count, Frozen
from omnibal.cost.analytic import analytic_cost, unit_on_one
from omnibal.cost.links import expert_state_group, state_group
from omnibal.cost.model import CostModel, UnitCost
from omnibal.cost.shaped_rates import Line, fitted_line, ring_line
from omnibal.model.adapters import AdapterConfig
from omnibal.model.config import (
    ClusterConfig,
    ModelConfig,
    PlainPrecision,
    Precision,
    Provider,
    model_sizes,
)
from omnibal.model.levels import MAX_CONTEXT, ContextExchange, Level
from omnibal.model.parallel import Parallel
from omnibal.model.rates import Rates
from omnibal.model.runtime import RuntimeOptions
from omnibal.model.units import (
    EXCHANGED,
    UnitKind,
    feature_names,
    unit_kinds,
)

_NOT_COST = (
    *("layers", "norm_eps", "layer_scale_init"),
    *("tied_head", "rope_base", "max_positions", "rope_factor", "rope_scaling"),
    # Experts: a capacity margin counted separately, and a loss below a hundredth of a layer.
    *("imbalance", "auxiliary_loss"),
)
"""Config fields that no measured unit cost depends on."""
_LEAST_MS, _MOST_MS = 1e-9, 1e12
"""Range of measured times, which keeps fits finite."""
_Time = Annotated[float, Field(ge=_LEAST_MS, le=_MOST_MS)]
_TimeOrZero = Annotated[float, Field(ge=0, le=_MOST_MS)]
_Bytes = Annotated[int, Field(ge=0, le=2**60)]


class UnitMeasurement(Frozen):
    """One unit on one micro-batch, on one device.

    Extra fields are the micro-batch's features by name, such as `tiles` and `tokens`
    (`omnibal.model.units.feature_names` without the fixed one).
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, _Bytes] = Field(init=False)

    unit: str
    forward_ms: _Time
    backward_ms: _Time
    """Backward time without recomputation."""
    recompute_ms: _TimeOrZero | None = None
    """Time that recomputation adds to forward and backward, or None if not measured."""
    activation_bytes: _Bytes | None
    """Activations kept for backward, with the unit's input if needed, or None if not measured."""

    @property
    def features(self) -> dict[str, int]:
        """Features of the micro-batch, by name."""
        return {"fixed": 1} | self.__pydantic_extra__


class ShareMeasurement(Frozen):
    """A language layer on one rank's share of a pack, run on all context-parallel ranks.

    Times include the exchange and waiting for other ranks.
    """

    unit: str
    context: Annotated[int, Field(ge=2, le=MAX_CONTEXT)]
    """Context-parallel ranks."""
    exchange: ContextExchange
    tokens: _Bytes
    squared_tokens: _Bytes
    exchanged_tokens: _Bytes
    forward_ms: _Time
    backward_ms: _Time

    @property
    def features(self) -> dict[str, int]:
        """Features of the share, by name."""
        return {
            "fixed": 1,
            "tokens": self.tokens,
            "squared_tokens": self.squared_tokens,
            EXCHANGED: self.exchanged_tokens,
        }


class OptimizerMeasurement(Frozen):
    """Gradient norm, clipping and update of `parameters` parameters on one device."""

    parameters: Annotated[int, Field(ge=1, le=2**60)]
    optimizer_ms: _Time


class LinkMeasurement(Frozen):
    """One send between neighbouring stages on one machine."""

    bytes: _Bytes
    ms: _Time


class ReadingMeasurement(Frozen):
    """CPU time to decode, tile, tokenize and hand over samples, without waiting for storage."""

    samples: Count
    """Number of samples read."""
    item_ms: dict[str, _TimeOrZero]
    """Time per item, by feature."""
    token_ms: _TimeOrZero
    """Time per token, including items' tokens."""
    cores: Count
    """CPU cores for reader processes."""
    is_shared: bool
    """Whether the model computes on these cores too."""


class Profile(Frozen):
    """Content of `profile.json`."""

    device: str
    precision: PlainPrecision
    model: str
    model_sha256: str
    tensor: Count
    """Tensor-parallel size of the measured units."""
    processes: Count
    """Processes measured at the same time on the machine."""
    provider: Provider = "local"
    """Provider of the measured layers."""
    measurements: tuple[UnitMeasurement, ...]
    shares: tuple[ShareMeasurement, ...] = ()
    optimizer: tuple[OptimizerMeasurement, ...] = ()
    links: tuple[LinkMeasurement, ...] = ()
    rates: Rates | None = None
    """Matrix products, collectives and a copy by shape, or None if absent."""
    reading: ReadingMeasurement | None = None
    """Time to read the data, or None if no data was given."""

    @property
    def link(self) -> Line | None:
        """Latency and time per byte between devices of a node, None if not measured."""
        links = [(m.bytes, m.ms) for m in self.links]
        return _line(links) if links else None


Quantity = Literal["forward_ms", "backward_ms", "recompute_ms", "activation_bytes"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
_TIMES: tuple[Quantity, ...] = ("forward_ms", "backward_ms")


@dataclass(frozen=True, kw_only=True, slots=True)
class FitResidual:
    """Relative error of a fit."""

    unit: str
    quantity: Quantity
    measurements: int
    median_error: float
    max_error: float


def model_sha256(model: ModelConfig) -> str:
    """Hash of the model fields that unit costs depend on, without layer counts and constants."""
    sizes = model_sizes(model, without=_NOT_COST)
    for name, tower in model.encoders.items():
        described = sizes[name] if name in sizes else sizes["encoders"][name]
        described["layer_scale"] = tower.layer_scale_init is not None
    return hashlib.sha256(json.dumps(sizes, sort_keys=True).encode()).hexdigest()


def write_profile(profile: Profile, path: Path) -> None:
    """Write `profile.json`; equal profiles give equal bytes."""
    write_json_model(profile, path)


def read_profile(path: Path) -> Profile:
    """Read `profile.json`."""
    return read_json_model(Profile, path, f"measure one with `omnibal profile -o {path}`")


def fitted_cost(
    profile: Profile,
    model: ModelConfig,
    cluster: ClusterConfig,
    parallel: Parallel,
    precision: Precision,
    frozen: Collection[str],
    *,
    adapters: AdapterConfig | None,
    runtime: RuntimeOptions,
) -> CostModel:
    """Fit the profile's times to all units; quantities not measured are counted.

    Links are measured on one machine, so jobs on several nodes use the cluster's rates. Profiles
    hold trained units without expert parallelism: frozen units, adapters and expert-parallel
    exchange are corrected by the difference of counted costs.
    """
    _check_match(profile, model, parallel, precision)
    cost = analytic_cost(
        model, cluster, parallel, precision, frozen, adapters=adapters, runtime=runtime
    )
    trained = analytic_cost(model, cluster, parallel, precision).units
    plural = "es" if profile.processes > 1 else ""
    cost = replace(
        cost,
        units={
            kind.name: _fitted_unit(profile, model, cost, kind, trained[kind.name])
            for kind in cost.kinds
        },
        source=f"profile:{profile.device}, {profile.processes} process{plural}, "
        f"provider {profile.provider}",
    )
    if parallel.expert > 1:
        alone = parallel.model_copy(update={"expert": 1})
        counted = (
            analytic_cost(model, cluster, each, precision, frozen, adapters=adapters)
            for each in (parallel, alone)
        )
        cost = _with_shared_out_experts(cost, *counted)
    if profile.optimizer:
        cost = _with_optimizer(cost, profile, parallel)
    if (link := profile.link) and parallel.world_size <= cluster.gpus_per_node:
        rings = () if profile.rates is None else profile.rates.collectives
        cost = _with_link(cost, link, rings_are_measured=ring_line(rings, 2) is not None)
    return cost


def fitted_exchange_ms(
    profile: Profile, model: ModelConfig, unit: UnitKind, level: Level
) -> np.ndarray | None:
    """Fit the extra time of layers on shares, [2, features at levels].

    Coefficients of a constant, tokens and exchanged tokens have minimum relative error.

    Returns:
        None if the profile has no such shares.
    """
    wanted = unit.measured_name, level.context, level.exchange
    shares = [one for one in profile.shares if (one.unit, one.context, one.exchange) == wanted]
    if not shares:
        return None
    names = feature_names(model)
    at_levels = (*names, EXCHANGED)
    given = np.array([[one.features.get(name, 0) for name in at_levels] for one in shares], float)
    can_cost = np.array([name in ("fixed", "tokens", EXCHANGED) for name in at_levels])
    added_ms = []
    for quantity in _TIMES:
        measured_ms = np.array([getattr(one, quantity) for one in shares])
        features, alone_ms = _series(profile, unit.measured_name, quantity, names)
        fitted = _relative_nnls(features * _depends_on(model, unit), alone_ms)
        more_ms = measured_ms - given[:, :-1] @ fitted
        added_ms.append(_weighted_nnls(given * can_cost, more_ms, 1 / measured_ms))
    return np.stack(added_ms)


def _with_optimizer(cost: CostModel, profile: Profile, parallel: Parallel) -> CostModel:
    """Return costs with the measured update time, divided over data-parallel ranks."""
    line = _line([(m.parameters, m.optimizer_ms) for m in profile.optimizer])
    return replace(
        cost,
        optimizer_ms_fixed=line.fixed_ms,
        rates=replace(cost.rates, optimizer_ms=line.each_ms / state_group(parallel).ranks),
        expert_rates=replace(
            cost.expert_rates, optimizer_ms=line.each_ms / expert_state_group(parallel).ranks
        ),
    )


def _with_link(cost: CostModel, line: Line, *, rings_are_measured: bool) -> CostModel:
    """Return costs with the measured send rate, also for data-parallel exchange if not measured."""
    slower = 1.0 if rings_are_measured else line.each_ms / cost.link_ms_per_byte
    return replace(
        cost,
        link_latency_ms=line.fixed_ms,
        link_ms_per_byte=line.each_ms,
        rates=cost.rates.slowed(exchange=slower),
        expert_rates=cost.expert_rates.slowed(exchange=slower),
    )


def _with_shared_out_experts(cost: CostModel, counted: CostModel, alone: CostModel) -> CostModel:
    """Return measured costs corrected for expert parallelism.

    Args:
        counted: counted costs with expert parallelism.
        alone: counted costs with all experts on one device.
    """

    def shared_out(name: str, unit: UnitCost) -> UnitCost:
        after, before = counted.units[name], alone.units[name]
        names = ("forward_ms", "backward_ms", "weight_ms", "recompute_ms", "activation_bytes")
        changed: dict[str, Any] = {
            each: np.maximum(getattr(unit, each) + getattr(after, each) - getattr(before, each), 0)
            for each in names
        }
        return replace(unit, **changed, collective_ms=after.collective_ms - before.collective_ms)

    units = {
        name: shared_out(name, unit) if unit.expert_parameters else unit
        for name, unit in cost.units.items()
    }
    return replace(cost, units=units)


def with_measured_rates(cluster: ClusterConfig, profile: Profile) -> ClusterConfig:
    """Return the cluster with the profile's rates, in its precision."""
    if profile.rates is None:
        raise UserError(
            f"the profile of {profile.model} on {profile.device} has no rates by shape, of which "
            f"{cluster.name} was to have a table: measure it anew with `omnibal profile`"
        )
    rates = cluster.rates | {profile.precision: profile.rates}
    return cluster.model_copy(update={"rates": rates, "basis": "measured"})


def fit_residuals(profile: Profile, model: ModelConfig) -> tuple[FitResidual, ...]:
    """Relative errors of every fit that `fitted_cost` makes for this model."""
    residuals = []
    names = feature_names(model)
    for kind in {kind.measured_name: kind for kind in unit_kinds(model)}.values():
        for quantity in QUANTITIES:
            features, measured = _series(profile, kind.measured_name, quantity, names)
            positive = measured > 0
            if not positive.any():
                continue
            fitted = features @ _relative_nnls(features * _depends_on(model, kind), measured)
            errors = np.abs(fitted - measured)[positive] / measured[positive]
            residuals.append(
                FitResidual(
                    unit=kind.measured_name,
                    quantity=quantity,
                    measurements=len(errors),
                    median_error=float(np.median(errors)),
                    max_error=float(errors.max()),
                )
            )
    return tuple(residuals)


def _check_match(
    profile: Profile, model: ModelConfig, parallel: Parallel, precision: Precision
) -> None:
    if profile.model_sha256 != model_sha256(model):
        raise UserError(
            f"the profile measured the model {profile.model}, whose sizes are not those of "
            f"{model.name}; both must be equal: run `omnibal profile` for that model, "
            "or plan without --profile"
        )
    if precision == "fp8":
        raise UserError(
            "a profile was given for precision fp8, which is not measured; plan without --profile, "
            "or in bf16"
        )
    if profile.precision != precision:
        raise UserError(
            f"the profile was measured in {profile.precision} but the plan is for {precision}; "
            f"both must be equal: profile again in {precision}, or plan in {profile.precision}"
        )
    if profile.tensor != parallel.tensor:
        raise UserError(
            f"the profile was measured with tensor parallel size {profile.tensor} but the plan "
            f"has {parallel.tensor}; profiles are of tensor parallel 1: plan with --tp 1 or "
            "without --profile"
        )


def _fitted_unit(
    profile: Profile, model: ModelConfig, cost: CostModel, kind: UnitKind, trained: UnitCost
) -> UnitCost:
    """Return the measured cost of a unit, or its counted cost if not measured."""
    counted, allowed = cost.units[kind.name], _depends_on(model, kind)
    fitted: dict[Quantity, np.ndarray] = {}
    for quantity in QUANTITIES:
        features, measured = _series(profile, kind.measured_name, quantity, cost.features)
        if len(measured):
            fitted[quantity] = _relative_nnls(features * allowed, measured)
        elif quantity in _TIMES:
            raise UserError(
                f"the profile of {profile.model} on {profile.device} has no measurement of "
                f"{kind.measured_name}; it must have every kind of unit: run `omnibal profile` "
                "again"
            )
    features, _ = _series(profile, kind.measured_name, "forward_ms", cost.features)
    forward_share = _share(features, counted.forward_ms, trained.forward_ms)
    backward_share = _share(features, counted.backward_ms, trained.backward_ms)
    backward_ms = backward_share * fitted["backward_ms"]
    # Not measured separately: use the counted share.
    weight_share = _share(features, counted.weight_ms, counted.backward_ms)
    recompute_ms = forward_share * fitted.get("recompute_ms", fitted["forward_ms"])
    activation_bytes = counted.activation_bytes
    if "activation_bytes" in fitted:
        features, _ = _series(profile, kind.measured_name, "activation_bytes", cost.features)
        kept_share = _share(features, counted.activation_bytes, trained.activation_bytes)
        # Kept bytes include the input, so recomputation never costs memory.
        kept_bytes = kept_share * fitted["activation_bytes"]
        activation_bytes = np.maximum(kept_bytes, counted.boundary_bytes)
    return replace(
        counted,
        forward_ms=forward_share * fitted["forward_ms"],
        backward_ms=backward_ms,
        weight_ms=weight_share * backward_ms,
        recompute_ms=recompute_ms if backward_share else 0 * recompute_ms,
        collective_ms=np.zeros((2, len(cost.features))),
        padding_ms=np.zeros((2, len(cost.features))),
        activation_bytes=activation_bytes,
    )


def _depends_on(model: ModelConfig, kind: UnitKind) -> np.ndarray:
    """Features that the unit's kernels depend on, bool [features]."""
    sizes = [
        kernel.rows + kernel.pairs + kernel.bytes for kernel in unit_on_one(model, kind).kernels
    ]
    return np.array([name == "fixed" for name in feature_names(model)]) | np.any(sizes, axis=0)


def _share(features: np.ndarray, part: np.ndarray, whole: np.ndarray) -> float:
    """Share of `part` in `whole`, both [features], summed over micro-batches, or 1 if that is 0."""
    total = float((features @ whole).sum())
    return float((features @ part).sum()) / total if total else 1.0


def _series(
    profile: Profile, unit: str, quantity: Quantity, features: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Features [n, features] and values [n] of one unit's measurements."""
    rows, measured = [], []
    for m in profile.measurements:
        value: float | None = getattr(m, quantity)
        if m.unit == unit and value is not None:
            if m.features.keys() != set(features):
                raise UserError(
                    f"the profile of {profile.model} measured {unit} at "
                    f"{', '.join(m.features)}; it must be at {', '.join(features)}: run "
                    "`omnibal profile` again"
                )
            rows.append([m.features[name] for name in features])
            measured.append(value)
    return np.array(rows, np.float64).reshape(-1, len(features)), np.array(measured, np.float64)


def _line(points: Sequence[tuple[float, float]]) -> Line:
    """Non-negative line with minimum relative error through (x, y) points."""
    sizes, times_ms = np.array(points, np.float64).T
    return fitted_line(sizes, times_ms, least_ms=0.0)


def _relative_nnls(features: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Coefficients [features] >= 0 with minimum relative error."""
    weights = 1 / np.where(measured > _LEAST_MS, measured, max(measured.mean(), 1.0))
    return _weighted_nnls(features, measured, weights)


def _weighted_nnls(features: np.ndarray, measured: np.ndarray, weights: np.ndarray) -> np.ndarray:
    rows = features * weights[:, None]
    # Column scales differ by many orders of magnitude (1, squared tokens).
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1.0
    coefficients, _ = nnls(rows / scale, measured * weights)
    return coefficients / scale
