"""The cost of every unit of the model, in one place: simulator, search and report all use it.

A unit's time is linear in the features of a micro-batch, and so is its activation memory. Which
features these are is the model's (`omnibal.model.units.feature_names`); InternVL's are

    [1, tiles, tokens, sum of squared sample tokens, loss tokens]

so the times of a whole run are one matrix product, features [packs, features] @ coefficients
[features, stages].
The analytic source counts operations and bytes (`omnibal.cost.analytic`); the fitted source reads a
measured profile (`omnibal.cost.profile`). Both give the types below.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.model.units import HEAD, TIMES, UnitKind, window_of_feature
from omnibal.packing.packs import Packs

Count = TypeVar("Count", float, np.ndarray)
"""A number of parameters, or an array of them."""

Rate = Literal[
    "weight_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "optimizer_ms",
    "gradient_reduction_ms",
    "weight_gather_ms",
]
"""A field of `ParameterRates`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UnitCost:
    """Time and memory of one unit on one device. Vectors have one coefficient per feature."""

    forward_ms: np.ndarray
    """Forward time, [features]."""
    backward_ms: np.ndarray
    """Backward time without recomputation, [features]; 0 where nothing up to here is trained."""
    weight_ms: np.ndarray
    """Part of the backward time that gives gradients of weights, which a schedule may put off
    (`omnibal.cost.weight_part`), [features]; 0 where the unit is frozen."""
    recompute_ms: np.ndarray
    """Time that recomputing the unit adds to the backward, [features]; it may be less than another
    forward, as caches are warm, and is 0 where there is no backward."""
    collective_ms: np.ndarray
    """Part of the forward and backward time spent in tensor-parallel collectives, and in exchanges
    of expert-parallel ranks, [2, features]."""
    padding_ms: np.ndarray
    """Part of the forward and backward time spent on padding, [2, features]."""
    context_ms: np.ndarray
    """Part of the forward, backward and recompute time spent in exchange with the ranks that share
    a pack, [3, features]."""
    activation_bytes: np.ndarray
    """Activations kept from forward to backward when nothing is recomputed, [features]."""
    boundary_bytes: np.ndarray
    """Input of the unit, all that is kept when it is recomputed, [features]."""
    output_bytes: np.ndarray
    """Activation sent to the next stage when the cut is right after this unit, [features]."""
    output_gradient_bytes: np.ndarray
    """Gradient sent back over that cut, [features]: 0 where nothing up to here is trained."""
    transient_bytes: np.ndarray
    """Working memory while the unit runs backward, on top of what is kept, [moments, features]; the
    largest of the moments counts. Where the unit has no backward, while it runs forward."""
    two_part_bytes: np.ndarray
    """`transient_bytes` of a backward whose products for weight gradients come later, [moments,
    features]."""
    late_bytes: np.ndarray
    """Inputs of linears, gradients of their outputs, which a micro-batch keeps until that part has
    run, and what one product works with besides, [3, features]."""
    passing_bytes: np.ndarray
    """What it holds while its micro-batch runs forward through the units that have no backward,
    [features]; 0 where it has one."""
    shared_bytes: np.ndarray
    """Room that all such units of a stage share as long as the run lasts, the size of the largest
    micro-batch, [features]."""
    parameters: int
    """Parameters on this device, after tensor parallelism."""
    trained_parameters: int
    """Trained parameters on this device: all of them, those of adapters, or 0 where the unit is
    frozen."""
    expert_parameters: int = 0
    """Parameters that are experts', which other ranks hold too than hold the rest."""
    whole_bytes: float = 0.0
    """Whole weights and gradients that are there while the unit runs backward, where ranks divide
    them; part of those moments of `transient_bytes`."""
    weight_copy_bytes: float = 0.0
    """Bytes of weights in FP8, besides those of `CostModel.rates`."""

    @property
    def trained_expert_parameters(self) -> int:
        """Parameters of experts that are trained."""
        return self.expert_parameters if self.trained_parameters == self.parameters else 0

    @property
    def has_backward(self) -> bool:
        """Whether anything up to this unit is trained."""
        return bool(self.backward_ms.any())


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterRates:
    """What a parameter costs of memory, and a trained one once a step.

    Its gradient is reduced, its weight gathered and its optimizer state shared out over the ranks
    that hold it: of an expert over `omnibal.model.parallel.Parallel.expert_data` ranks, in buffers
    of their own. Where ranks divide weights, an expert is divided over
    `omnibal.model.parallel.Parallel.expert_shards` of these.
    """

    weight_bytes: float = 0.0
    gradient_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    """Optimizer state on one device, after sharding."""
    optimizer_ms: float = 0.0
    """Gradient norm, clipping and weight update."""
    gradient_reduction_ms: float = 0.0
    weight_gather_ms: float = 0.0

    def slowed(self, *, update: float = 1.0, exchange: float = 1.0) -> "ParameterRates":
        """Return the rates with the times of update and exchange multiplied."""
        return replace(
            self,
            optimizer_ms=self.optimizer_ms * update,
            gradient_reduction_ms=self.gradient_reduction_ms * exchange,
            weight_gather_ms=self.weight_gather_ms * exchange,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LibraryBuffer:
    """Room that a stage has once, to the end of the run, where it holds a unit of some kind."""

    what: str
    bytes: float
    kinds: frozenset[str]
    """Names of the kinds."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CostModel:
    """Costs of all units and of what happens once a step or at a cut."""

    features: tuple[str, ...]
    """Features of a micro-batch that costs are linear in; the first is "fixed", always 1."""
    kinds: tuple[UnitKind, ...]
    """Kinds of unit, in model order."""
    units: dict[str, UnitCost]
    """Cost of a unit of each kind, by the kind's name, in model order."""
    rates: ParameterRates
    """Rates of all parameters but experts'."""
    optimizer_ms_fixed: float
    link_latency_ms: float
    link_ms_per_byte: float
    """Time per byte of one send between neighbouring stages."""
    source: str
    bucket_parameters: float = math.inf
    """Parameters that the first stage reduces or gathers at a time while it computes. Later stages
    exchange all at once, as in Megatron-core, and so does the first one where this is infinite."""
    tied_parameters: int = 0
    """Parameters on this device of the matrix that is both language embed and head, or that embeds
    words for multi-token prediction in the head. Both units count it, but a stage that holds both
    has it once."""
    expert_rates: ParameterRates = ParameterRates()
    """Rates of experts' parameters."""
    expert_peer_bytes: float = 0.0
    """Buffers of the communication library for the ranks that share out experts, on a device that
    holds any."""
    runs_in_lockstep: bool = False
    """Whether ranks meet in every unit, as those that divide weights do."""
    weight_parts: int = 1
    """Ranks that each have a part of every weight but experts': bytes per parameter above are of a
    part."""
    library_buffers: tuple[LibraryBuffer, ...] = ()
    """What the trainer's libraries keep (`omnibal.cost.transformer_engine`)."""
    slowness: tuple[float, ...] = ()
    """Time of every part of the model on its stage's devices over what its units cost, 1 of the
    fastest; empty where all devices are alike."""
    slow_ranks: tuple[tuple[float, ...], ...] = ()
    """Time of every part on the devices of each data-parallel rank over that of the other ranks,
    [ranks][parts], at least 1; empty where all ranks are alike."""

    def slowness_of_ranks(self, ranks: int, parts: int) -> np.ndarray | None:
        """`slow_ranks` of so many ranks and parts, [ranks, parts]; None where it is not known of
        these, or none is slow."""
        known = np.array(self.slow_ranks)
        return known if known.shape == (ranks, parts) else None

    def slowness_of(self, parts: int) -> np.ndarray:
        """Slowness of so many parts of the model, 1 where it is known of another number. [parts]"""
        return np.array(self.slowness if len(self.slowness) == parts else (1.0,) * parts)

    @property
    def levels(self) -> int:
        """Levels whose features stand side by side; see `omnibal.pipeline.level_costs`."""
        return self.features.count(self.features[0])

    @property
    def of_experts(self) -> np.ndarray:
        """Whether units of each kind hold experts. bool [kinds]"""
        return np.array([unit.expert_parameters > 0 for unit in self.units.values()])

    @property
    def in_lockstep(self) -> np.ndarray:
        """Whether ranks that run in lockstep meet in units of each kind. bool [kinds]"""
        return self.of_experts | self.runs_in_lockstep

    def of_parameters(self, rate: Rate, parameters: Count, of_experts: Count) -> Count:
        """Bytes or time by a rate, of parameters on one device, or of arrays of them, of which so
        many are experts'."""
        each: float = getattr(self.rates, rate)
        of_expert: float = getattr(self.expert_rates, rate)
        return (parameters - of_experts) * each + of_experts * of_expert

    @property
    def tied_trained_parameters(self) -> int:
        """Tied parameters that are trained: all, or 0 where they are frozen."""
        return self.tied_parameters if self.units[HEAD].trained_parameters else 0

    @property
    def tied_exchange_ms(self) -> float:
        """All-reduce time of the tied gradient, once a step, on a stage with one of its two units.

        Two stages all-reduce its gradient: each sends and receives it in two halves. Both wait for
        each other, so that it prolongs the later one's gradient reduction.
        """
        if not self.tied_trained_parameters:
            return 0.0
        gradient_bytes = self.rates.gradient_bytes * self.tied_trained_parameters
        return 2 * self.link_latency_ms + self.link_ms_per_byte * gradient_bytes


def with_features(unit: UnitCost, more: int) -> dict[str, Any]:
    """Coefficients of a unit's costs with so many features more, of 0, by their fields."""
    return {
        each.name: np.concatenate([value, np.zeros((*value.shape[:-1], more))], axis=-1)
        for each in fields(unit)
        if isinstance(value := getattr(unit, each.name), np.ndarray)
    }


def pack_features(packs: Packs, lengths: Lengths, features: Sequence[str]) -> np.ndarray:
    """Features of every pack, float64 [packs, features], as `omnibal.model.units.feature_names`
    lists."""
    columns = [packs.sums(_of_sample(lengths, name)) for name in features if name != "fixed"]
    return np.stack([np.ones(len(packs)), *columns], axis=1).astype(np.float64)


def trained_features(
    features: np.ndarray, names: Sequence[str], *, padded: bool, whole_loss: bool
) -> np.ndarray:
    """Features of packs [packs, features] as a trainer computes them.

    Args:
        features: of the packs' samples.
        padded: whether every pack is padded to the tokens of the largest, by one more segment.
        whole_loss: whether tokens without loss reach the head as well.
    """
    if not (padded or whole_loss):
        return features
    features, tokens = features.copy(), list(names).index("tokens")
    if padded:
        padding = features[:, tokens].max(initial=0) - features[:, tokens]
        features[:, tokens] += padding
        for column, name in enumerate(names):
            if is_attended(name):
                features[:, column] += attended(padding, name)
    if whole_loss:
        features[:, list(names).index("loss_tokens")] = features[:, tokens]
    return features


def _of_sample(lengths: Lengths, feature: str) -> np.ndarray:
    """What every sample adds to a feature of its pack, [samples]."""
    if is_attended(feature):
        return attended(lengths.tokens.astype(np.int64), feature)
    if feature in TIMES:  # of a step or a pack, and not of its samples
        return np.zeros(len(lengths), np.int64)
    match feature:
        case "loss_tokens":
            return loss_tokens(lengths)
        case _:
            return lengths.column(feature)


def is_attended(feature: str) -> bool:
    """Whether attention of some kind of layer costs the feature."""
    return feature == "squared_tokens" or window_of_feature(feature) is not None


def attended(tokens: np.ndarray, feature: str) -> np.ndarray:
    """Twice what the first `tokens` of a sample attend to, the cost of such a feature. [...]"""
    window = window_of_feature(feature)
    return tokens**2 - (np.maximum(tokens - window, 0) ** 2 if window is not None else 0)


def loss_tokens(lengths: Lengths) -> np.ndarray:
    """Tokens that reach the head; all of them in sources that do not say which carry loss."""
    counted = np.bincount(
        lengths.source, weights=lengths.loss_tokens, minlength=len(lengths.source_names)
    )
    return np.where(counted[lengths.source] > 0, lengths.loss_tokens, lengths.tokens)
