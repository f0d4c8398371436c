"""Costs by counting operations and bytes at a cluster's rates.

A unit is a list of forward and of backward kernels (`omnibal.cost.kernels`) that run one after
another; `omnibal.cost.device_rates` has their times. A layer's products have 24 s h^2 + 4 s^2 h
operations per sequence (Narayanan et al. 2021, Megatron-LM, arXiv 2104.04473, appendix),
generalised to grouped-query attention, SwiGLU and any feed-forward size; causal attention halves
the squared term. Backward has a product for each needed gradient; attention's has 2.5 times
forward's operations, as it recomputes scores (Dao 2023, FlashAttention-2, arXiv 2307.08691, section
3.3). Element-wise kernels move the bytes of this project's fused kernels. Gradients accumulate in
fp32.

Activations follow Korthikanti et al. 2022 (arXiv 2205.05198), section 4, without dropout masks (32
s h bytes per layer) and with flash attention; `kept_lines` lists all. Tensors between the parallel
blocks are replicated on tensor-parallel ranks, or divided under sequence parallelism.

Not counted: the all-reduce of q/k norms over all heads under tensor parallelism. If a job spans
nodes, every cut is charged the network's rate.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from omnibal.base.errors import refuse_if
from omnibal.cost.device_rates import Device
from omnibal.cost.images import deepstack_bytes, images_embed, images_layer, images_projector
from omnibal.cost.kernels import ELEMENT_BYTES, EXCHANGES, Kernel
from omnibal.cost.language import head, language_embed, language_layer
from omnibal.cost.linears import (
    deferred_products,
    drop_weight_gradients,
    late_bytes,
    library_buffers,
    two_part_bytes,
    weight_copy_bytes,
    with_adapters,
)
from omnibal.cost.link_rates import message_line, ring_ms_per_byte
from omnibal.cost.model import CostModel, ParameterRates, UnitCost
from omnibal.cost.setting import CostSetting
from omnibal.cost.towers import clips_embed, encoder_layer, encoder_projector, tiles_embed
from omnibal.cost.work import CountedUnit, Kept
from omnibal.model.adapter_settings import AdapterConfig, adapted_linears, has_adapters
from omnibal.model.config import ModelConfig, Precision, load_cluster
from omnibal.model.encoders import ClipsEncoder, EncoderLayers, ImagesEncoder, TilesEncoder
from omnibal.model.parallel import Parallel, state_group
from omnibal.model.units import HEAD, LANGUAGE, UnitKind, feature_names, unit_kinds, unit_names

# Adam's two moments; with bf16 weights also the fp32 weights (ZeRO, arXiv 1910.02054, 3.1).
OPTIMIZER_BYTES: dict[Precision, int] = {"fp32": 8, "bf16": 12, "fp8": 12}
# Functions of an encoder's embedding (encoder, device), of a layer (model, encoder, unit kind,
# device) and of the projector (encoder, model, device).
ENCODER_UNITS: dict[type[EncoderLayers], tuple[Callable[..., CountedUnit], ...]] = {
    TilesEncoder: (tiles_embed, encoder_layer, encoder_projector),
    ClipsEncoder: (clips_embed, encoder_layer, encoder_projector),
    ImagesEncoder: (images_embed, images_layer, images_projector),
}
_MODEL_FLOP_KINDS = ("product", "attention", "other_attention")  # kernels that count as model FLOPs


@dataclass(frozen=True, kw_only=True, slots=True)
class _PlacedUnit:
    """A unit and its position in the model."""

    kind: UnitKind
    unit: CountedUnit
    unpadded: CountedUnit  # without padding of attention heads and vocabulary
    trained: bool
    adapted: bool  # whether the unit has trained adapters
    before_trained: bool  # whether anything before the unit is trained
    carried_bytes: np.ndarray  # encoders' and deepstack features that a cut here also sends
    carried_gradient_bytes: np.ndarray  # gradient of these, or 0 if their encoders are frozen

    @property
    def has_backward(self) -> bool:
        """Whether the unit runs a backward: it or anything before it is trained."""
        return self.trained or self.adapted or self.before_trained

    def backward(self, unit: CountedUnit) -> list[Kernel]:
        """Return the backward kernels of `unit`, which may be padded."""
        runs = {
            "backward": self.has_backward,
            "repeated": self.has_backward,
            "input_gradient": self.before_trained or (self.has_backward and not self.kind.is_embed),
            "weight_gradient": self.trained,
        }
        return [kernel for kernel in unit.kernels if runs.get(kernel.phase)]

    def passes(self, unit: CountedUnit, device: Device) -> tuple[list[Kernel], list[Kernel]]:
        """Return the forward kernels, and the backward kernels with gradient accumulation."""
        backward = self.backward(unit)
        if self.has_backward:
            added: float = unit.adapter_parameters
            if self.trained:  # measured products include the accumulation
                added = max(unit.parameters - device.accumulates * unit.product_weights, 0)
            backward.append(_accumulation(device, added))
        return list(unit.forward), backward

    @property
    def is_language(self) -> bool:
        """Whether the unit is a language layer or the head."""
        return self.kind.tower == LANGUAGE and not self.kind.is_embed


def analytic_cost(setting: CostSetting) -> CostModel:
    """Return the counted cost of every unit on one device."""
    model, cluster, parallel = setting.model, setting.cluster, setting.parallel
    runtime = setting.runtime
    device = Device.from_setting(setting)
    send = message_line(cluster, parallel.world_size, setting.precision)
    placed = list(_place_units(model, device, setting.frozen, setting.adapters))
    units = {item.kind.name: _unit_cost(device, item) for item in placed}
    trained = {item.kind.name: item.unit for item in placed if item.trained and item.is_language}
    language = model.language
    accumulates = runtime.accumulates_in_products
    has_copy = language.tied_head or language.prediction_layers > 0
    word_parameters = language.words_of_rank(parallel.tensor) * language.hidden_size
    rates, expert_rates = (
        _parameter_rates(setting, device, of_experts=are_experts) for are_experts in (False, True)
    )
    measured = cluster.measured_rates(setting.precision).device
    of_device = f" of {measured}" if measured else ""
    # Tables of rates exist only for measured quantities.
    basis = "fitted" if cluster.basis == "fitted" else "measured" if measured else "assumed"
    return CostModel(
        features=feature_names(model),
        kinds=unit_kinds(model),
        units=units,
        # Multi-token prediction embeds words on the last stage too.
        tied_parameters=word_parameters if has_copy else 0,
        rates=rates,
        optimizer_ms_fixed=0.0,
        link_latency_ms=send.fixed_ms,
        link_ms_per_byte=send.each_ms,
        bucket_parameters=parallel.bucket_parameters if runtime.overlap_gradients else math.inf,
        expert_rates=expert_rates,
        expert_peer_bytes=(parallel.expert - 1) * cluster.peer_bytes,
        source=f"analytic:{cluster.name}, {basis} rates{of_device}",
        library_buffers=library_buffers(trained, device.element_bytes) if accumulates else (),
    )


def _parameter_rates(setting: CostSetting, device: Device, *, of_experts: bool) -> ParameterRates:
    """Return memory and time per parameter of experts, or per other parameter."""
    cluster, parallel, precision = setting.cluster, setting.parallel, setting.precision
    runtime, size = device.runtime, ELEMENT_BYTES[precision]
    group, divides_gradients = state_group(parallel, of_experts=of_experts), parallel.sharded > 1
    gradient_bytes = runtime.gradient_bytes
    state_bytes = size + gradient_bytes + OPTIMIZER_BYTES[precision]
    replicates = runtime.replicates_optimizer and not divides_gradients
    shards = 1 if replicates else group.ranks  # of the distributed optimizer
    averages = runtime.averages_gradients and group.ranks > 1
    # Gradients are zeroed and, if Megatron averages, scaled (read and written). The norm and the
    # update read and write gradient, weight and state of the rank's shard.
    zeroed_bytes = gradient_bytes / (shards if divides_gradients else 1)
    moved_bytes = (3 if averages else 1) * zeroed_bytes + 2 * state_bytes / shards
    update_ms = moved_bytes / device.bytes_per_ms["accumulation"]
    if device.fp8 is not None:  # weights are quantised once a step; embedding and head count too
        update_ms += device.fp8.cast_bytes / device.bytes_per_ms["element_wise"]
    byte_ms = partial(
        ring_ms_per_byte, cluster, group, precision, bucket_bytes=runtime.bucket_bytes
    )
    # If weights are in FP8 only, embedding and head count like the rest.
    in_fp8 = precision == "fp8" and not runtime.fp8.keeps_bf16_weights
    # Replicated state all-reduces gradients, two ring passes, and gathers no weights.
    gather_ms = 0.0 if replicates else byte_ms("all_gather") * (1 if in_fp8 else size)
    reduce_ms = byte_ms("reduce_scatter") + (byte_ms("all_gather") if replicates else 0.0)
    return ParameterRates(
        weight_bytes=size,
        gradient_bytes=gradient_bytes + (size if runtime.keeps_gradients else 0),
        optimizer_bytes=OPTIMIZER_BYTES[precision] / shards,
        # Weights that the next forward does not gather are gathered within the update.
        optimizer_ms=update_ms + (0.0 if runtime.overlap_weights else gather_ms),
        gradient_reduction_ms=reduce_ms * gradient_bytes,
        weight_gather_ms=gather_ms if runtime.overlap_weights else 0.0,
    )


def model_flops(
    model: ModelConfig, frozen: Collection[str], adapters: AdapterConfig | None = None
) -> np.ndarray:
    """Return training operations of all units, forward and backward, [features]."""
    flops = unit_flops(model, frozen, adapters)
    return np.sum([flops[name] for name in unit_names(model)], axis=0)


def unit_flops(
    model: ModelConfig, frozen: Collection[str], adapters: AdapterConfig | None = None
) -> dict[str, np.ndarray]:
    """Return training operations of every unit kind, forward and backward, each [features].

    The numerator of model FLOPs utilization (Chowdhery et al. 2022, PaLM, arXiv 2204.02311,
    appendix B): without recomputation and padding; backward has up to two products per forward
    product, for input and weight gradients. Adapter products are left out, as negligible.
    """
    flops: dict[str, np.ndarray] = {}
    for placed in _place_units(model, _counting_device(model), frozen, adapters):
        kernels = [*placed.unpadded.forward, *placed.backward(placed.unpadded)]
        computed = [kernel.flops for kernel in kernels if kernel.kind in _MODEL_FLOP_KINDS]
        flops[placed.kind.name] = np.sum([0 * placed.unit.boundary_bytes, *computed], axis=0)
    return flops


def layer_products(
    model: ModelConfig, parallel: Parallel, precision: Precision = "bf16"
) -> list[Kernel]:
    """Return forward matrix products on one device of every unit kind except the head."""
    device = _counting_device(model, parallel, precision)
    units = [_unit_of_kind(model, kind, device) for kind in unit_kinds(model) if kind.name != HEAD]
    return [product for unit in units for product in unit.products]


def count_undivided_unit(model: ModelConfig, kind: UnitKind) -> CountedUnit:
    """Return a unit's kernels and memory on a single device, in bf16."""
    return _unit_of_kind(model, kind, _counting_device(model))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParameters:
    """Parameters of a model, including encoders and multi-token prediction."""

    stored: int  # as in a checkpoint: no vocabulary padding, a tied head counted once
    active: int  # stored parameters without inactive experts


def model_parameters(model: ModelConfig) -> ModelParameters:
    """Return a model's parameters, as sums over its units."""
    units = {kind.name: count_undivided_unit(model, kind) for kind in unit_kinds(model)}
    names, language = unit_names(model), model.language
    # Prediction layers follow the last layer and are of its kind.
    experts = [kind.experts for kind in (*language.kinds, language.kinds[-1])]
    with_experts = names[-len(experts) :]
    idle = sum(
        units[name].expert_parameters // moe.experts * (moe.experts - moe.experts_per_token)
        for name, moe in zip(with_experts, experts, strict=True)
        if moe is not None
    )
    # The last stage has a copy of the embedding, as tied head and for predictions.
    matrices = 3 if language.prediction_layers and not language.tied_head else 2
    padded = matrices * language.words_of_rank(1)
    words = (1 if language.tied_head else 2) * language.vocab_size
    stored = sum(units[name].parameters for name in names)
    stored -= (padded - words) * language.hidden_size
    return ModelParameters(stored=stored, active=stored - idle)


def kept_lines(
    model: ModelConfig,
    parallel: Parallel,
    precision: Precision,
    frozen: Collection[str] = (),
    adapters: AdapterConfig | None = None,
) -> dict[str, tuple[Kept, ...]]:
    """Return the activations kept for backward by unit kind, one `Kept` per tensor."""
    placed = _place_units(model, _counting_device(model, parallel, precision), frozen, adapters)
    return {item.kind.name: item.unit.kept_lines(trained=item.trained) for item in placed}


_load_cluster_once = cache(load_cluster)


def _counting_device(
    model: ModelConfig, parallel: Parallel | None = None, precision: Precision = "bf16"
) -> Device:
    """Return a device for counts, whose rates do not matter; by default not parallel."""
    cluster = _load_cluster_once("h100-80g")  # any: counts do not depend on rates
    sizes = parallel or Parallel(pipeline=1)
    return Device.from_setting(CostSetting(model, cluster, sizes, precision))


def _place_units(
    model: ModelConfig, device: Device, frozen: Collection[str], adapters: AdapterConfig | None
) -> Iterator[_PlacedUnit]:
    """Yield every unit kind with its position in the model, in model order."""
    nothing = 0 * device.features["fixed"]
    carried, carried_gradient, before_trained = nothing, nothing, False
    any_encoder_trained = deepstack_returns = False
    for kind in unit_kinds(model):
        is_language = kind.tower == LANGUAGE
        if kind.is_embed:
            # Nothing precedes an encoder. All encoders precede the language model.
            before_trained = is_language and any_encoder_trained
        if kind.is_embed and is_language:  # consumes the encoders' features
            carried = carried_gradient = nothing
        is_adapted = has_adapters(model, kind, adapters)
        trained = kind.part not in (*frozen, *(adapters.parts if adapters else ()))
        unit = unpadded = _unit_of_kind(model, kind, device)
        if kind.name == HEAD or (kind.is_layer and not is_language):
            unpadded = _unit_of_kind(model, kind, replace(device, pads=False))
        if is_adapted and adapters is not None:
            linears = {linear.module: linear for linear in adapted_linears(model, kind, adapters)}
            part = device.sequence_share if is_language else 1.0
            unit, unpadded = (
                with_adapters(counted, device, adapters, linears, part=part)
                for counted in (unit, unpadded)
            )
        deepstack = deepstack_bytes(model, kind, device)
        deepstack_returns = deepstack_returns or (kind.has_deepstack and (trained or is_adapted))
        yield _PlacedUnit(
            kind=kind,
            unit=unit,
            unpadded=unpadded,
            trained=trained,
            adapted=is_adapted,
            before_trained=before_trained,
            carried_bytes=deepstack + carried,
            carried_gradient_bytes=deepstack_returns * deepstack + carried_gradient,
        )
        before_trained = before_trained or trained or is_adapted
        any_encoder_trained = any_encoder_trained or trained or is_adapted
        if kind.is_projector:
            carried = carried + unit.output_bytes
            carried_gradient = carried_gradient + before_trained * unit.output_bytes


def _unit_of_kind(model: ModelConfig, kind: UnitKind, device: Device) -> CountedUnit:
    """Return the kernels and memory of a unit of a kind."""
    if kind.layer is not None:
        return language_layer(model.language, kind.layer, device)
    if kind.name == HEAD:
        return head(model.language, device)
    if kind.tower == LANGUAGE:
        return language_embed(model, device)
    tower = model.encoders[kind.tower]
    message = f"encoders of {type(tower).__name__} have no costs; add some"
    refuse_if(type(tower) not in ENCODER_UNITS, f"{message} to omnibal/cost/analytic.py")
    embed, layer, projector = ENCODER_UNITS[type(tower)]
    if kind.is_layer:
        return layer(model, tower, kind, device)
    return embed(tower, device) if kind.is_embed else projector(tower, model, device)


def _unit_cost(device: Device, placed: _PlacedUnit) -> UnitCost:
    """Return the cost of a unit at its position in the model."""
    unit, nothing, has_backward = placed.unit, 0 * placed.unit.boundary_bytes, placed.has_backward
    passes = placed.passes(unit, device)
    times_ms = _sum_ms(device, passes)
    unpadded_ms = times_ms
    if placed.unpadded.kernels is not unit.kernels:
        unpadded_ms = _sum_ms(device, placed.passes(placed.unpadded, device))
    exchanges = [[kernel for kernel in kernels if kernel.kind in EXCHANGES] for kernels in passes]
    late = deferred_products(placed.kind, unit, trained=placed.trained)
    # Measured products include the accumulation.
    late_weights = sum(product.weights for product in late)
    added = 0.0 if device.accumulates else min(late_weights, unit.parameters)
    weight_bytes = placed.trained * device.element_bytes * device.features["fixed"]
    # Gradients of earlier encoders' features wait while this unit runs backward.
    waiting_bytes = placed.carried_gradient_bytes if has_backward else nothing
    moments = unit.working if has_backward else unit.forward_working
    if device.runtime.accumulates_in_products and placed.is_language:
        moments = drop_weight_gradients(moments)
    transient_bytes = [
        unit.working_bytes(moment, trained=placed.trained)
        + weight_bytes * moment.weight
        + waiting_bytes
        for moment in moments
    ]
    in_two_bytes = transient_bytes
    if late:
        in_two_bytes = [
            two_part_bytes(device, placed.kind, unit, late, moment) + waiting_bytes
            for moment in (*moments, *unit.late_working)
        ]
    launch_ms, waits_for_host = device.launch_ms, placed.kind.is_layer and device.host_ms
    return UnitCost(
        forward_ms=times_ms[0],
        backward_ms=times_ms[1],
        weight_ms=_sum_ms(device, [[*late, _accumulation(device, added)]])[0],
        recompute_ms=times_ms[0] if has_backward else nothing,
        collective_ms=_sum_ms(device, exchanges),
        # Measured times can be longer for smaller products, hence the maximum.
        padding_ms=np.maximum(times_ms - unpadded_ms, 0),
        context_ms=np.zeros((3, len(nothing))),
        activation_bytes=unit.kept_bytes(trained=placed.trained) if has_backward else nothing,
        boundary_bytes=unit.boundary_bytes if has_backward else nothing,
        output_bytes=unit.output_bytes + placed.carried_bytes,
        output_gradient_bytes=has_backward * unit.output_bytes + placed.carried_gradient_bytes,
        transient_bytes=np.stack([nothing, *transient_bytes]),
        two_part_bytes=np.stack([nothing, *in_two_bytes]),
        late_bytes=late_bytes(device, placed.kind, unit, late),
        passing_bytes=nothing if has_backward else nothing + unit.passing_bytes,
        shared_bytes=placed.trained * (nothing + unit.gathered_bytes),
        parameters=unit.parameters,
        trained_parameters=unit.parameters if placed.trained else unit.adapter_parameters,
        expert_parameters=unit.expert_parameters,
        weight_copy_bytes=weight_copy_bytes(device, unit.products),
        host_ms=(launch_ms(passes[0]), launch_ms(passes[1])) if waits_for_host else None,
    )


def _sum_ms(device: Device, passes: Sequence[Sequence[Kernel]]) -> np.ndarray:
    """Return the summed kernel time of every pass, [passes, features]."""
    nothing = 0 * device.features["fixed"]
    return np.stack([np.sum([nothing, *map(device.ms, kernels)], axis=0) for kernels in passes])


def _accumulation(device: Device, parameters: float) -> Kernel:
    """Return the kernel that adds a micro-batch's gradients to the step's."""
    added_bytes = parameters * 2 * device.runtime.gradient_bytes * device.features["fixed"]
    return Kernel(kind="accumulation", phase="weight_gradient", bytes=added_bytes, launches=0)
