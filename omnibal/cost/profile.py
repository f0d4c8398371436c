"""Types of `profile.json`, and costs fitted to it.

Unit times and kept activations are fitted by non-negative least squares over the features that the
unit depends on, with rows divided by their measured value, to minimise the relative error.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import numpy as np
from pydantic import ConfigDict, Field

from omnibal.base.errors import UserError, refuse_if
from omnibal.base.files import read_json_model
from omnibal.base.frozen import Count, Frozen
from omnibal.cost.analytic import analytic_cost, count_undivided_unit
from omnibal.cost.model import CostModel, UnitCost
from omnibal.cost.setting import CostSetting
from omnibal.cost.shaped_rates import LinearTime, collective_line, fit_line, weighted_nnls
from omnibal.model.config import (
    ClusterConfig,
    ModelConfig,
    PlainPrecision,
    Precision,
    Provider,
    model_sizes,
)
from omnibal.model.levels import MAX_CONTEXT, ContextExchange, Level
from omnibal.model.parallel import Parallel, state_group
from omnibal.model.rate_tables import Rates
from omnibal.model.runtime import OWN_RUNTIME
from omnibal.model.units import EXCHANGED, UnitKind, feature_names, unit_kinds

# Config fields that no measured unit cost depends on.
_NOT_COST = (
    *("layers", "norm_eps", "layer_scale_init"),
    *("tied_head", "rope_base", "max_positions", "rope_factor", "rope_scaling"),
    # Experts: a capacity margin counted separately, and a loss below a hundredth of a layer.
    *("imbalance", "auxiliary_loss"),
)
_MIN_MS, _MAX_MS = 1e-9, 1e12  # range of measured times, which keeps fits finite
_MeasuredMs = Annotated[float, Field(ge=_MIN_MS, le=_MAX_MS)]
_MeasuredMsOrZero = Annotated[float, Field(ge=0, le=_MAX_MS)]
_ByteCount = Annotated[int, Field(ge=0, le=2**60)]


class _Measurement(Frozen):
    """Times of a unit. Extra fields are features of the measured work, such as `tokens`."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, _ByteCount] = Field(init=False)

    unit: str  # `UnitKind.measured_name`
    forward_ms: _MeasuredMs
    backward_ms: _MeasuredMs  # backward time without recomputation

    @property
    def features(self) -> dict[str, int]:
        """Features of the measured work, by name (`omnibal.model.units.feature_names_at`)."""
        return {"fixed": 1} | self.__pydantic_extra__


class UnitMeasurement(_Measurement):
    """One unit on one micro-batch, on one device."""

    recompute_ms: _MeasuredMsOrZero | None = None  # added to backward; None if not measured
    activation_bytes: _ByteCount | None  # kept, with the input; None if not measured


class ShareMeasurement(_Measurement):
    """A language layer on a rank's share of a pack, with exchange and waits for other ranks."""

    context: Annotated[int, Field(ge=2, le=MAX_CONTEXT)]  # context-parallel ranks
    exchange: ContextExchange


class OptimizerMeasurement(Frozen):
    """Gradient norm, clipping and update of `parameters` parameters on one device."""

    parameters: Annotated[int, Field(ge=1, le=2**60)]
    optimizer_ms: _MeasuredMs


class LinkMeasurement(Frozen):
    """One send between neighbouring stages on one machine."""

    bytes: _ByteCount
    ms: _MeasuredMs


class ReadingMeasurement(Frozen):
    """CPU time to decode, tile, tokenize and hand over samples, without waiting for storage."""

    samples: Count
    item_ms: dict[str, _MeasuredMsOrZero]  # time per item, by feature
    token_ms: _MeasuredMsOrZero  # time per token, including items' tokens
    cores: Count  # CPU cores for reader processes
    is_shared: bool  # whether the model computes on these cores too


class Profile(Frozen):
    """Content of `profile.json`."""

    device: str
    precision: PlainPrecision
    model: str  # model name, for messages
    model_sha256: str  # `model_sha256` of the measured model
    tensor: Count  # tensor-parallel size of the measured units
    processes: Count  # processes measured at the same time on the machine
    provider: Provider = "local"  # provider of the measured layers
    measurements: tuple[UnitMeasurement, ...]
    shares: tuple[ShareMeasurement, ...] = ()
    optimizer: tuple[OptimizerMeasurement, ...] = ()
    links: tuple[LinkMeasurement, ...] = ()
    rates: Rates | None = None  # of matrix products, attention, collectives and copies by size
    reading: ReadingMeasurement | None = None  # time to read the data, or None if no data was given

    @property
    def link(self) -> LinearTime | None:
        """Latency and time per byte between devices of a node, None if not measured."""
        links = [(m.bytes, m.ms) for m in self.links]
        return fit_line(*np.array(links, float).T, least_ms=0.0) if links else None


Quantity = Literal["forward_ms", "backward_ms", "recompute_ms", "activation_bytes"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
_TIMES: tuple[Quantity, ...] = ("forward_ms", "backward_ms")


@dataclass(frozen=True, slots=True)
class FitResidual:
    """Relative error of a fit."""

    unit: str
    quantity: Quantity
    measurements: int
    median_error: float  # of |fitted - measured| / measured
    max_error: float


def model_sha256(model: ModelConfig) -> str:
    """Return a hash of the fields that unit costs depend on: without layer counts etc."""
    sizes = model_sizes(model, without=_NOT_COST)
    for name, tower in model.encoders.items():
        described = sizes[name] if name in sizes else sizes["encoders"][name]
        described["layer_scale"] = tower.layer_scale_init is not None
    return hashlib.sha256(json.dumps(sizes, sort_keys=True).encode()).hexdigest()


def read_profile(path: Path) -> Profile:
    """Read `profile.json`."""
    return read_json_model(Profile, path, f"measure one with `omnibal profile -o {path}`")


def fit_cost(profile: Profile, setting: CostSetting) -> CostModel:
    """Return costs with unit times, activations, update and links fitted to the profile.

    Other quantities are counted. Profiles hold trained units without expert parallelism: frozen
    units and adapters are scaled by counted shares, expert parallelism adds a counted difference.
    Raise UserError if model, precision or tensor size is not the profile's.
    """
    model, parallel = setting.model, setting.parallel
    _check_match(profile, model, parallel, setting.precision)
    cost, own = analytic_cost(setting), replace(setting, runtime=OWN_RUNTIME)
    trained = analytic_cost(replace(own, frozen=(), adapters=None)).units
    expert_parallel = single = cost.units
    if parallel.expert > 1:
        alone = replace(own, parallel=parallel.model_copy(update={"expert": 1}))
        expert_parallel, single = (analytic_cost(part).units for part in (own, alone))
    units = dict[str, UnitCost]()
    for kind in cost.kinds:
        sources = cost.units, trained, expert_parallel, single
        counted = (costs[kind.name] for costs in sources)
        units[kind.name] = _fitted_unit(_fit_quantities(profile, model, kind), *counted)
    plural = "es" if profile.processes > 1 else ""
    source = f"profile:{profile.device}, {profile.processes} process{plural}"
    cost = replace(cost, units=units, source=f"{source}, provider {profile.provider}")
    if profile.optimizer:
        points = [(m.parameters, m.optimizer_ms) for m in profile.optimizer]
        line = fit_line(*np.array(points, float).T, least_ms=0.0)
        rates, expert_rates = (
            replace(
                base, optimizer_ms=line.each_ms / state_group(parallel, of_experts=is_moe).ranks
            )
            for base, is_moe in ((cost.rates, False), (cost.expert_rates, True))
        )
        fixed_ms = line.fixed_ms
        cost = replace(cost, optimizer_ms_fixed=fixed_ms, rates=rates, expert_rates=expert_rates)
    # Links are measured within one machine, so jobs on several nodes keep the cluster's rates.
    if (link := profile.link) and parallel.world_size <= setting.cluster.gpus_per_node:
        rings = () if profile.rates is None else profile.rates.collectives
        # If collectives are not measured, they have the measured rate of sends.
        slower = 1.0 if collective_line(rings, 2) else link.each_ms / cost.link_ms_per_byte
        cost = replace(
            cost,
            link_latency_ms=link.fixed_ms,
            link_ms_per_byte=link.each_ms,
            rates=cost.rates.scale_times(exchange=slower),
            expert_rates=cost.expert_rates.scale_times(exchange=slower),
        )
    return cost


def fit_exchange_ms(
    profile: Profile, model: ModelConfig, unit: UnitKind, level: Level
) -> np.ndarray | None:
    """Return time that context parallelism adds to a layer, fitted to measured shares.

    Returns:
        [2 (forward, backward), model features + exchanged tokens]. None if not measured.
    """
    wanted = unit.measured_name, level.context, level.exchange
    shares = [
        share for share in profile.shares if (share.unit, share.context, share.exchange) == wanted
    ]
    if not shares:
        return None
    at_levels, fits = (*feature_names(model), EXCHANGED), _fit_quantities(profile, model, unit)
    values = [[share.features.get(name, 0) for name in at_levels] for share in shares]
    features = np.array(values, float)  # [shares, features at levels]
    can_cost = np.array([name in ("fixed", "tokens", EXCHANGED) for name in at_levels])
    added_ms = []
    for quantity in _TIMES:
        measured_ms = np.array([getattr(share, quantity) for share in shares])
        more_ms = measured_ms - features[:, :-1] @ fits[quantity].coefficients
        added_ms.append(weighted_nnls(features * can_cost, more_ms, 1 / measured_ms))
    return np.stack(added_ms)


def with_measured_rates(cluster: ClusterConfig, profile: Profile) -> ClusterConfig:
    """Return the cluster with the profile's rates, if any."""
    if profile.rates is None:
        return cluster
    rates = cluster.rates | {profile.precision: profile.rates}
    return cluster.model_copy(update={"rates": rates, "basis": "measured"})


def fit_residuals(profile: Profile, model: ModelConfig) -> tuple[FitResidual, ...]:
    """Return the relative errors of every fit of `fit_cost` for this model."""
    residuals = []
    for kind in {kind.measured_name: kind for kind in unit_kinds(model)}.values():
        for quantity, fit in _fit_quantities(profile, model, kind).items():
            positive = fit.measured > 0
            if not positive.any():
                continue
            errors = np.abs(fit.features @ fit.coefficients - fit.measured)[positive]
            errors /= fit.measured[positive]
            found = len(errors), float(np.median(errors)), float(errors.max())
            residuals.append(FitResidual(kind.measured_name, quantity, *found))
    return tuple(residuals)


def _check_match(
    profile: Profile, model: ModelConfig, parallel: Parallel, precision: Precision
) -> None:
    """Raise unless the profile is of the job's model, precision and tensor size."""
    is_other = profile.model_sha256 != model_sha256(model)
    message = f"the profile is of {profile.model}, with other sizes than {model.name}"
    refuse_if(is_other, f"{message}: run `omnibal profile` again, or plan without --profile")
    message = "profiles do not measure fp8: plan without --profile, or in bf16"
    refuse_if(precision == "fp8", message)
    message = f"the profile was measured in {profile.precision} but the plan is for {precision}"
    remedy = f"profile again in {precision}, or plan in {profile.precision}"
    refuse_if(profile.precision != precision, f"{message}: {remedy}")
    message = f"the profile is of tensor size {profile.tensor} but the plan has {parallel.tensor}"
    remedy = f"plan with --tp {profile.tensor} or without --profile"
    refuse_if(profile.tensor != parallel.tensor, f"{message}: {remedy}")


class _QuantityFit(NamedTuple):
    """A quantity of a unit at n measured micro-batches."""

    features: np.ndarray  # [n, features]
    measured: np.ndarray  # [n]
    coefficients: np.ndarray  # non-negative, with minimum relative error, [features]

    def share(self, part: np.ndarray, whole: np.ndarray) -> float:
        """Return the share of `part` in `whole`, [features] each, over the micro-batches."""
        total = float((self.features @ whole).sum())
        return float((self.features @ part).sum()) / total if total else 1.0


def _fit_quantities(
    profile: Profile, model: ModelConfig, kind: UnitKind
) -> dict[Quantity, _QuantityFit]:
    """Return fits of a unit's measured quantities; UserError if the profile lacks the unit."""
    unit, names = kind.measured_name, feature_names(model)
    kernels = count_undivided_unit(model, kind).kernels
    sizes = [kernel.rows + kernel.pairs + kernel.bytes for kernel in kernels]
    allowed = np.array([name == "fixed" for name in names]) | np.any(sizes, axis=0)
    rows = [row for row in profile.measurements if row.unit == unit]
    if not rows:
        message = f"the profile of {profile.model} has no measurement of {unit}"
        raise UserError(f"{message}: run `omnibal profile` again")
    if other := [row for row in rows if row.features.keys() != set(names)]:
        found = f"{', '.join(other[0].features)}, not at {', '.join(names)}"
        raise UserError(f"the profile measured {unit} at {found}: run `omnibal profile` again")
    fits: dict[Quantity, _QuantityFit] = {}
    for quantity in QUANTITIES:
        points = [
            ([row.features[name] for name in names], value)
            for row in rows
            if (value := getattr(row, quantity)) is not None
        ]
        if points:
            features, measured = (np.array(side, np.float64) for side in zip(*points, strict=True))
            # Relative error, except for measurements of 0.
            weights = 1 / np.where(measured > _MIN_MS, measured, max(measured.mean(), 1.0))
            coefficients = weighted_nnls(features * allowed, measured, weights)
            fits[quantity] = _QuantityFit(features, measured, coefficients)
    return fits


def _fitted_unit(
    fits: dict[Quantity, _QuantityFit],
    counted: UnitCost,
    trained: UnitCost,
    expert_parallel: UnitCost,
    single: UnitCost,
) -> UnitCost:
    """Return the measured cost of a unit; quantities not measured are counted.

    Args:
        fits: of the trained unit, with all experts on one device.
        trained: counted, without frozen parts and adapters.
        expert_parallel: counted with expert parallelism.
        single: counted with all experts on one device.
    """
    forward, backward = (fits[quantity] for quantity in _TIMES)
    forward_share = forward.share(counted.forward_ms, trained.forward_ms)
    backward_ms = backward.share(counted.backward_ms, trained.backward_ms) * backward.coefficients
    recompute_ms = forward_share * fits.get("recompute_ms", forward).coefficients
    changed: dict[str, Any] = {
        "forward_ms": forward_share * forward.coefficients,
        "backward_ms": backward_ms,
        # Not measured separately, so the counted share of backward.
        "weight_ms": forward.share(counted.weight_ms, counted.backward_ms) * backward_ms,
        "recompute_ms": counted.has_backward * recompute_ms,
        "activation_bytes": counted.activation_bytes,
    }
    if kept := fits.get("activation_bytes"):
        kept_share = kept.share(counted.activation_bytes, trained.activation_bytes)
        # Kept bytes include the input, so recomputation never costs memory.
        kept_bytes = kept_share * kept.coefficients
        changed["activation_bytes"] = np.maximum(kept_bytes, counted.boundary_bytes)
    for name, value in changed.items():
        more = getattr(expert_parallel, name) - getattr(single, name)
        changed[name] = np.maximum(value + more, 0)
    return replace(
        counted,
        **changed,
        collective_ms=expert_parallel.collective_ms - single.collective_ms,
        padding_ms=0 * counted.padding_ms,
    )
