"""Costs by counting operations and bytes at a cluster's rates.

Rates are shares of the data sheet's, or come from measured tables (`omnibal.cost.shaped_rates`).
Forward time of a unit is the sum of four counts, without overlap:

* matrix products, at `matmul_efficiency` of peak: 24 s h^2 + 4 s^2 h operations per layer and
  sequence (Narayanan et al. 2021, Megatron-LM, arXiv 2104.04473, appendix), generalised to
  grouped-query attention, SwiGLU and any feed-forward size. Causal attention does half of the
  squared term. Backward is twice forward, or once if only the input's gradient is needed;
  attention's is 2.5 times, as it recomputes scores (Dao 2023, FlashAttention-2, arXiv 2307.08691,
  section 3.3).
* element-wise passes, in bytes read and written by this project's fused kernels, at
  `memory_efficiency` of the memory's rate. Norms and residuals are not divided by tensor
  parallelism. A smaller share describes systems with fewer fused kernels.
* tensor-parallel collectives: two all-reduces of the layer's output per direction; under sequence
  parallelism all-gathers and reduce-scatters, and two more gathers in backward (Korthikanti et al.
  2022, arXiv 2205.05198, section 4.2.2).
* kernel launches at `kernel_us`; backward also accumulates fp32 gradients.

Activations follow Korthikanti et al., section 4, without dropout masks (32 s h bytes per layer) and
with flash attention (one fp32 log-sum-exp per head); `kept_lines` lists all. Tensors between the
parallel blocks are replicated on tensor-parallel ranks, or divided under sequence parallelism. A
frozen layer keeps only what the gradient of its input needs.

Not counted: the all-reduce of sums for q/k norms over all heads under tensor parallelism. If a job
spans nodes, every cut is charged the network's rate. `tools/replay.py --fake-device` counts the
bytes and kernels of the fused layers.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from omnibal.cost.adapter_counts import with_adapters
from omnibal.cost.attention_rates import TILE, AttentionPass, AttentionTimes
from omnibal.cost.counts import ELEMENT_BYTES, Counts, Device, Features, Kept, Product
from omnibal.cost.encoder_kinds import counts_of_kind
from omnibal.cost.fp8_counts import cast_bytes, weight_cast_bytes, weight_copy_bytes
from omnibal.cost.image_counts import deepstack_bytes
from omnibal.cost.language_counts import head, language_embed, language_layer
from omnibal.cost.links import (
    Group,
    all_to_all_line,
    expert_state_group,
    message_line,
    pass_line,
    ring_ms_per_byte,
    state_group,
)
from omnibal.cost.model import CostModel, ParameterRates, UnitCost
from omnibal.cost.shaped_rates import ProductTimes
from omnibal.cost.transformer_engine import library_buffers, without_gradients
from omnibal.cost.weight_part import late_bytes, late_parameters, late_products, two_part_bytes
from omnibal.model.adapters import AdapterConfig, adapted_linears, has_adapters
from omnibal.model.config import ClusterConfig, ModelConfig, Precision
from omnibal.model.parallel import Parallel
from omnibal.model.rates import CopyKind, CopyTime, Pass, Rates
from omnibal.model.runtime import OWN_RUNTIME, RuntimeOptions
from omnibal.model.units import (
    HEAD,
    LANGUAGE,
    UnitKind,
    feature_names,
    unit_kinds,
    unit_names,
)

OPTIMIZER_BYTES: dict[Precision, int] = {"fp32": 8, "bf16": 12, "fp8": 12}
"""Adam's two moments; with bf16 weights also the fp32 weights (ZeRO, arXiv 1910.02054, 3.1)."""

_BACKWARD_OF_ATTENTION = 2.5  # backward has five products to forward's two: scores are recomputed
_TILE_ROWS = 128
"""Tile rows of a grouped product (CUTLASS's largest, 16 bit); on average half a tile is padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counted:
    """Counts of a unit and its position in the model."""

    kind: UnitKind
    counts: Counts
    unpadded: Counts
    """Counts without padded attention heads and vocabulary."""
    trained: bool
    adapted: bool
    """Whether the unit has trained adapters."""
    before_trained: bool
    """Whether anything before the unit is trained."""
    carried_bytes: np.ndarray
    """Earlier encoders' and deepstack features that a cut after this unit also sends."""
    carried_gradient_bytes: np.ndarray
    """Gradient of the carried features, or 0 if their encoders are frozen."""

    @property
    def has_backward(self) -> bool:
        """Whether gradients reach the unit."""
        return self.trained or self.adapted or self.before_trained

    @property
    def wants_input_gradient(self) -> bool:
        """Whether backward computes the gradient of the input."""
        own = (self.trained or self.adapted) and not self.counts.begins_with_weights
        return self.before_trained or own

    @property
    def is_language(self) -> bool:
        """Whether it is a language layer or the head."""
        return self.kind.tower == LANGUAGE and not self.kind.is_embed


def analytic_cost(
    model: ModelConfig,
    cluster: ClusterConfig,
    parallel: Parallel,
    precision: Precision,
    frozen: Collection[str] = (),
    *,
    adapters: AdapterConfig | None = None,
    runtime: RuntimeOptions = OWN_RUNTIME,
) -> CostModel:
    """Cost of every unit on one device of `cluster` under the given parallel sizes.

    Optimizer state is sharded over data-parallel ranks.
    """
    element_bytes, engine = ELEMENT_BYTES[precision], runtime.accumulates_in_products
    device = _device(cluster, parallel, precision, runtime)
    send = message_line(cluster, parallel.world_size, precision)
    counted = list(_counted(model, device, frozen, adapters))
    if engine:
        counted = [
            replace(one, counts=replace(one.counts, working=without_gradients(one.counts.working)))
            if one.is_language
            else one
            for one in counted
        ]
    units = {one.kind.name: _unit_cost(device, one) for one in counted}
    trained = {one.kind.name: one.counts for one in counted if one.trained and one.is_language}
    language = model.language
    has_copy = language.tied_head or language.prediction_layers > 0
    word_parameters = language.words_of_rank(parallel.tensor) * language.hidden_size
    rates_of = partial(
        _parameter_rates,
        cluster,
        precision,
        device,
        divides_gradients=parallel.sharded > 1,
    )
    return CostModel(
        features=feature_names(model),
        kinds=unit_kinds(model),
        units=units,
        # Multi-token prediction also embeds words on the last stage.
        tied_parameters=word_parameters if has_copy else 0,
        rates=rates_of(state_group(parallel)),
        optimizer_ms_fixed=0.0,
        link_latency_ms=send.fixed_ms,
        link_ms_per_byte=send.each_ms,
        bucket_parameters=parallel.bucket_parameters if runtime.overlap_gradients else math.inf,
        expert_rates=rates_of(expert_state_group(parallel)),
        expert_peer_bytes=(parallel.expert - 1) * cluster.peer_bytes,
        source=f"analytic:{cluster.name}, {_rates_described(cluster, precision)}",
        library_buffers=library_buffers(trained, element_bytes) if engine else (),
    )


def _parameter_rates(
    cluster: ClusterConfig,
    precision: Precision,
    device: Device,
    group: Group,
    *,
    divides_gradients: bool,
) -> ParameterRates:
    """Return memory and time per parameter held by the ranks of a group.

    Gradients are zeroed and, if Megatron averages, scaled. The norm and the update read and write
    gradient, weight and state of the rank's shard. Weights not gathered during the next forward are
    gathered within the update.

    Args:
        divides_gradients: whether these ranks shard gradients too, and not the optimizer alone.
    """
    runtime, size = device.runtime, ELEMENT_BYTES[precision]
    gradient_bytes = runtime.gradient_bytes
    state_bytes = size + gradient_bytes + OPTIMIZER_BYTES[precision]
    shards = group.ranks
    averages = runtime.averages_gradients and shards > 1
    zeroed_bytes = gradient_bytes / (shards if divides_gradients else 1)
    moved_bytes = (3 if averages else 1) * zeroed_bytes + 2 * state_bytes / shards
    update_ms = moved_bytes / device.streamed_bytes_per_ms
    update_ms += weight_cast_bytes(device) / device.bytes_per_ms
    byte_ms = partial(ring_ms_per_byte, cluster, group, precision)
    # If weights are in FP8 only, embedding and head count like the rest.
    in_fp8 = precision == "fp8" and not runtime.fp8.keeps_bf16_weights
    gather_ms = byte_ms("all_gather") * (1 if in_fp8 else size)
    return ParameterRates(
        weight_bytes=size,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=OPTIMIZER_BYTES[precision] / shards,
        optimizer_ms=update_ms + (0.0 if runtime.overlap_weights else gather_ms),
        gradient_reduction_ms=byte_ms("reduce_scatter") * gradient_bytes,
        weight_gather_ms=gather_ms if runtime.overlap_weights else 0.0,
    )


def model_flops(
    model: ModelConfig,
    cluster: ClusterConfig,
    frozen: Collection[str],
    adapters: AdapterConfig | None = None,
) -> np.ndarray:
    """Training operations of all units per feature, forward and backward, [features]."""
    names = unit_names(model)
    flops = np.zeros(len(feature_names(model)))
    for name, once in unit_flops(model, cluster, frozen, adapters).items():
        flops += names.count(name) * once
    return flops


def unit_flops(
    model: ModelConfig,
    cluster: ClusterConfig,
    frozen: Collection[str],
    adapters: AdapterConfig | None = None,
) -> dict[str, np.ndarray]:
    """Training operations per unit kind and feature, forward and backward, each [features].

    The numerator of model FLOPs utilization (Chowdhery et al. 2022, PaLM, arXiv 2204.02311,
    appendix B): neither recomputation nor padding counts, and each product has up to two in
    backward, for input and weight gradients. Adapter products are negligible.
    """
    device = _device(cluster, Parallel(pipeline=1), "bf16")
    flops = {}
    for one in _counted(model, device, frozen, adapters):
        # Input and weight gradients; norms before a product are trained too.
        products = 1 + int(one.trained) + int(one.wants_input_gradient)
        attention = 3 if one.has_backward else 1
        counts = one.unpadded
        flops[one.kind.name] = products * counts.matmul_flops + attention * counts.attention_flops
    return flops


def layer_products(
    model: ModelConfig,
    cluster: ClusterConfig,
    parallel: Parallel,
    precision: Precision = "bf16",
) -> list[Product]:
    """Forward matrix products on one device of every unit kind except the head."""
    device, features = _device(cluster, parallel, precision), Features(names=feature_names(model))
    kinds = [kind for kind in unit_kinds(model) if kind.name != HEAD]
    return [one for kind in kinds for one in _counts(model, kind, device, features)[0].products]


def kept_lines(
    model: ModelConfig,
    cluster: ClusterConfig,
    parallel: Parallel,
    precision: Precision,
    frozen: Collection[str] = (),
    adapters: AdapterConfig | None = None,
) -> dict[str, tuple[Kept, ...]]:
    """Activations that every unit kind keeps from forward to backward, line by line."""
    device = _device(cluster, parallel, precision)
    return {
        one.kind.name: one.counts.kept_lines(trained=one.trained)
        for one in _counted(model, device, frozen, adapters)
    }


def _device(
    cluster: ClusterConfig,
    parallel: Parallel,
    precision: Precision,
    runtime: RuntimeOptions = OWN_RUNTIME,
) -> Device:
    rates, fp8_flops_per_ms, fp8 = cluster.measured(precision), 0.0, None
    if precision == "fp8":
        share = cluster.fp8_efficiency or cluster.matmul_efficiency
        fp8_flops_per_ms, fp8 = cluster.tflops("fp8") * 1e9 * share, runtime.fp8
    streamed = streamed_bytes_per_ms(cluster, precision)
    precision = "bf16" if precision == "fp8" else precision  # rates of operations not in the table
    plain = _fastest(rates, "plain")
    # Kernel latency and the rate of element-wise kernels are measured together.
    latency_ms = plain.latency_ms if plain else None
    bytes_per_ms = cluster.memory_gb_per_s * 1e6 * cluster.memory_efficiency
    if plain is not None and latency_ms is not None:
        bytes_per_ms = plain.bytes_per_ms

    def slowdown(kind: CopyKind) -> float:
        found = _fastest(rates, kind)
        return 1.0 if found is None else bytes_per_ms / found.bytes_per_ms

    # fp32 products regardless of the precision; without an fp32 peak, the precision's peak.
    fp32: Precision = "fp32" if "fp32" in cluster.peak_tflops else precision
    ring = pass_line(cluster, Group(parallel.tensor), precision)
    experts = all_to_all_line(cluster, Group(parallel.expert), precision)
    to_others = (parallel.expert - 1) / parallel.expert
    products, grouped, attention = _times_of(rates) if rates else (None, None, None)
    return Device(
        flops_per_ms=cluster.tflops(precision) * 1e9 * cluster.matmul_efficiency,
        fp32_flops_per_ms=cluster.tflops(fp32) * 1e9 * cluster.matmul_efficiency,
        fp8=fp8,
        fp8_flops_per_ms=fp8_flops_per_ms,
        product_times=products,
        grouped_times=grouped,
        attention_times=attention,
        bytes_per_ms=bytes_per_ms,
        streamed_bytes_per_ms=streamed,
        collective_bytes_per_ms=1 / ring.each_ms if ring.each_ms else math.inf,
        pass_ms=ring.fixed_ms,
        expert_bytes_per_ms=1 / (experts.each_ms * to_others) if experts.each_ms else math.inf,
        expert_pass_ms=experts.fixed_ms,
        kernel_ms=cluster.kernel_us / 1e3 if latency_ms is None else latency_ms,
        permute_slowdown=slowdown("permute"),
        loss_slowdown=slowdown("fused_cross_entropy" if runtime.fused_loss else "cross_entropy"),
        tensor=parallel.tensor,
        sequence_parallel=parallel.sequence_parallel,
        element_bytes=ELEMENT_BYTES[precision],
        runtime=runtime,
        expert=parallel.expert,
    )


@lru_cache(maxsize=64)
def _times_of(
    rates: Rates,
) -> tuple[ProductTimes | None, ProductTimes | None, AttentionTimes | None]:
    """Times of products, grouped products and attention, fitted once, or None if not measured."""
    products, grouped = (
        ProductTimes.of(measured, rates.tflops) if measured else None
        for measured in (rates.products, rates.grouped)
    )
    attention = rates.attention
    return products, grouped, AttentionTimes.of(attention, rates.tflops) if attention else None


def _rates_described(cluster: ClusterConfig, precision: Precision) -> str:
    rates = cluster.measured(precision)
    # Tables exist only for measured quantities.
    basis = "fitted" if cluster.basis == "fitted" else "measured" if rates else "assumed"
    return f"{basis} rates of {rates.device}" if rates else f"{basis} rates"


def streamed_bytes_per_ms(cluster: ClusterConfig, precision: Precision) -> float:
    """Rate of long contiguous device memory reads and writes, measured if available."""
    plain = _fastest(cluster.measured(precision), "plain")
    return plain.bytes_per_ms if plain is not None else cluster.memory_gb_per_s * 1e6


def _fastest(rates: Rates | None, kind: CopyKind) -> CopyTime | None:
    """Return the fastest measured copy of a kind within the memory, or None if not measured."""
    found = [one for one in (rates.copies if rates else ()) if one.kind == kind]
    return max(found, key=lambda one: one.bytes_per_ms, default=None)


def _counted(
    model: ModelConfig,
    device: Device,
    frozen: Collection[str],
    adapters: AdapterConfig | None,
) -> Iterator[_Counted]:
    """Iterate over the counts of every unit kind, in model order."""
    features = Features(names=feature_names(model))
    carried, carried_gradient, before_trained = features.none, features.none, False
    any_encoder_trained = deepstack_returns = False
    for kind in unit_kinds(model):
        is_language = kind.tower == LANGUAGE
        if kind.is_embed:
            # Nothing precedes an encoder. All encoders precede the language model.
            before_trained = is_language and any_encoder_trained
        is_adapted = has_adapters(model, kind, adapters)
        is_whole = adapters is None or kind.part not in adapters.parts
        trained = kind.part not in frozen and is_whole
        counts, unpadded = _counts(model, kind, device, features)
        if is_adapted and adapters is not None:
            named = {one.module: one for one in adapted_linears(model, kind, adapters)}
            part = device.whole if is_language else 1.0
            counts, unpadded = (
                with_adapters(each, device, adapters, named, part=part)
                for each in (counts, unpadded)
            )
        deepstack = deepstack_bytes(model, kind, device, features)
        deepstack_returns = deepstack_returns or (kind.has_deepstack and (trained or is_adapted))
        yield _Counted(
            kind=kind,
            counts=counts,
            unpadded=unpadded,
            trained=trained,
            adapted=is_adapted,
            before_trained=before_trained,
            carried_bytes=deepstack + (features.none if is_language else carried),
            carried_gradient_bytes=(
                deepstack_returns * deepstack + (features.none if is_language else carried_gradient)
            ),
        )
        before_trained = before_trained or trained or is_adapted
        any_encoder_trained = any_encoder_trained or trained or is_adapted
        if kind.is_projector:
            carried = carried + counts.output_bytes
            carried_gradient = carried_gradient + before_trained * counts.output_bytes


def _counts(
    model: ModelConfig, kind: UnitKind, device: Device, features: Features
) -> tuple[Counts, Counts]:
    """Counts of one unit kind, with and without padded attention heads and vocabulary."""
    if kind.tower == LANGUAGE:
        if kind.layer is not None:
            counts = language_layer(model.language, kind.layer, device, features)
        elif kind.is_embed:
            counts = language_embed(model, device, features)
        else:
            sizes_of_head = model.language, device, features
            return head(*sizes_of_head), head(*sizes_of_head, padded=False)
        return counts, counts
    tower = model.encoders[kind.tower]
    counted = counts_of_kind(tower)
    if kind.is_layer:
        sizes = model, tower, kind, device, features
        return counted.layer(*sizes, padded=True), counted.layer(*sizes, padded=False)
    if kind.is_embed:
        counts = counted.embed(tower, device, features)
    else:
        counts = counted.projector(tower, model, device, features)
    return counts, counts


def _unit_cost(device: Device, one: _Counted) -> UnitCost:
    """Cost of a unit; it has a backward if it or anything before it is trained."""
    forward_ms, backward_ms = _times_ms(device, one, one.counts)
    unpadded_forward_ms, unpadded_backward_ms = _times_ms(device, one, one.unpadded)
    counts, nothing = one.counts, 0 * forward_ms
    has_backward = one.has_backward
    late = late_products(one.kind, counts, trained=one.trained)
    kept_bytes = counts.kept_bytes(trained=one.trained)
    # Measured times can be longer for smaller products.
    padding_ms = np.maximum(
        [forward_ms - unpadded_forward_ms, backward_ms - unpadded_backward_ms], 0
    )
    own_gradient_bytes = counts.output_bytes if has_backward else nothing
    weight_bytes = one.trained * device.element_bytes
    # Gradients of earlier encoders' features wait while this unit runs backward.
    waiting_bytes = one.carried_gradient_bytes if has_backward else nothing
    moments = counts.working if has_backward else counts.forward_working
    transient_bytes = [
        counts.working_bytes(each, trained=one.trained)
        + _fixed(weight_bytes * each.weight, nothing)
        + waiting_bytes
        for each in moments
    ]
    in_two_bytes = transient_bytes
    if late:
        in_two_bytes = [
            two_part_bytes(device, one.kind, counts, late, each) + waiting_bytes
            for each in (*moments, *counts.late_working)
        ]
    return UnitCost(
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        weight_ms=_weight_ms(device, one, late),
        recompute_ms=forward_ms if has_backward else nothing,
        collective_ms=_collective_ms(device, one),
        padding_ms=padding_ms,
        context_ms=np.zeros((3, len(forward_ms))),
        activation_bytes=kept_bytes if has_backward else nothing,
        boundary_bytes=counts.boundary_bytes if has_backward else nothing,
        output_bytes=counts.output_bytes + one.carried_bytes,
        output_gradient_bytes=own_gradient_bytes + one.carried_gradient_bytes,
        transient_bytes=np.stack([nothing, *transient_bytes]),
        two_part_bytes=np.stack([nothing, *in_two_bytes]),
        late_bytes=late_bytes(device, one.kind, counts, late),
        passing_bytes=nothing if has_backward else nothing + counts.passing_bytes,
        shared_bytes=one.trained * (nothing + counts.collectives.gathered_bytes),
        parameters=counts.parameters,
        trained_parameters=counts.parameters if one.trained else counts.adapter_parameters,
        expert_parameters=counts.expert_parameters,
        weight_copy_bytes=weight_copy_bytes(device, counts.products),
    )


def _weight_ms(device: Device, one: _Counted, late: tuple[Product, ...]) -> np.ndarray:
    """Time of weight gradients, [features]: products, kernel launches and accumulation."""
    nothing = 0 * one.counts.moved_bytes
    products_ms = (_product_ms(device, each, "weight_gradient") for each in late)
    # Measured products include the accumulation.
    accumulates = device.product_times is not None and device.product_times.accumulates
    added = 0.0 if accumulates else min(late_parameters(late), one.counts.parameters)
    added_ms = added * 2 * device.runtime.gradient_bytes / device.streamed_bytes_per_ms
    once_ms = added_ms + len(late) * device.kernel_ms
    return np.sum([_fixed(once_ms, nothing), *products_ms], axis=0)


def _collective_ms(device: Device, one: _Counted) -> np.ndarray:
    """Exposed time of a unit's collectives in forward and backward, [2, features].

    An exchange overlapped with its product is split into one part per tensor-parallel rank; only
    the first or the last part is exposed (Transformer Engine's user buffers), if products take
    longer.
    """
    sent, nothing = one.counts.collectives, 0 * one.counts.moved_bytes

    def pass_ms(sent_bytes: np.ndarray | float, passes: int, exchanges: int) -> np.ndarray:
        ring_ms = (nothing + sent_bytes) / device.collective_bytes_per_ms
        ring_ms = ring_ms + _fixed(passes * device.pass_ms, nothing)
        # All-to-alls of routed tokens.
        exchanged_ms = sent.exchanged_bytes / device.expert_bytes_per_ms
        exchanged_ms = exchanged_ms + _fixed(exchanges * device.expert_pass_ms, nothing)
        parts = device.tensor if device.runtime.overlap_tensor else 1
        return ring_ms / parts + exchanged_ms

    forward_ms = pass_ms(sent.forward_bytes, sent.passes, sent.exchanges)
    if not one.has_backward:
        return np.stack([forward_ms, nothing])
    back_bytes = sent.backward_bytes + one.trained * sent.again_bytes
    back_passes = sent.back_passes + one.trained * sent.passes_again
    return np.stack([forward_ms, pass_ms(back_bytes, back_passes, sent.back_exchanges)])


def _fixed(value: float, like: np.ndarray) -> np.ndarray:
    """Vector with `value` for the fixed feature and 0 for other features, [features]."""
    vector = np.zeros(len(like))
    vector[0] = value
    return vector


def _matmul_ms(device: Device, one: _Counted, counts: Counts) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward time of all matrix products, both [features]."""
    nothing = 0 * counts.moved_bytes
    backwards: list[Pass] = ["input_gradient"] if one.wants_input_gradient else []
    backwards += ["weight_gradient"] if one.trained else []
    passes: tuple[list[Pass], list[Pass]] = (["forward"], backwards)
    forward, backward = (
        np.sum(
            [nothing, *(_product_ms(device, each, of) for each in counts.products for of in some)],
            axis=0,
        )
        for some in passes
    )
    return forward, backward


def _product_ms(device: Device, counted: Product, of: Pass) -> np.ndarray:
    """Time of one pass of a product, [features]. A grouped product is one kernel."""
    rows, sizes = counted.rows, (counted.inner, counted.outer)
    if counted.groups > 1:  # padded to full tiles
        rows = rows + _fixed(counted.groups * _TILE_ROWS / 2, rows)
    # FP8 speeds up all shapes by the ratio of peak rates to bf16.
    faster = device.fp8_flops_per_ms / device.flops_per_ms if counted.is_fp8 else 1.0
    if counted.is_fp32:
        return rows * 2 * (counted.inner * counted.outer) / device.fp32_flops_per_ms
    if counted.groups > 1 and device.grouped_times is not None:
        rows, line = counted.rows, device.grouped_times.line(of, *sizes, groups=counted.groups)
    elif device.product_times is not None:
        line = device.product_times.line(of, *sizes)
    else:
        return rows * 2 * (counted.inner * counted.outer) / (device.flops_per_ms * faster)
    return (rows * line.each_ms + _fixed(line.fixed_ms, rows)) / faster


def _attention_ms(device: Device, counts: Counts, of: AttentionPass) -> np.ndarray:
    """Time of softmax and other attention, [features]."""
    scale = 1.0 if of == "forward" else _BACKWARD_OF_ATTENTION
    times, softmax = device.attention_times, counts.attended
    if times is None:
        return scale * counts.attention_flops / device.flops_per_ms
    rest = 0 * counts.moved_bytes + counts.other_attention_flops
    time_ms = scale * rest / device.flops_per_ms
    for one in softmax:
        tokens = device.runtime.sample_tokens if one.causal else None
        line = times.line(of, one.elements, causal=one.causal, tokens=tokens)
        # In full tiles of keys: half a tile per query is padding.
        flops = (one.pairs + TILE / 2 * one.rows) * 2 * (one.heads * one.elements)
        time_ms = time_ms + scale * flops * line.each_ms + _fixed(line.fixed_ms, rest)
    return time_ms


def _accumulated(device: Device, counts: Counts) -> float:
    """Parameters with gradients accumulated in a separate pass, not in measured products."""
    if device.product_times is None or not device.product_times.accumulates:
        return counts.parameters
    of_products = sum(one.inner * one.outer * one.groups for one in counts.products)
    return max(counts.parameters - of_products, 0)


def _times_ms(device: Device, one: _Counted, counts: Counts) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward time of a unit with these counts, both [features]."""
    kernels_ms = _fixed(counts.kernels * device.kernel_ms, counts.moved_bytes)
    matmul_ms, back_matmul_ms = _matmul_ms(device, one, counts)
    attention_ms = _attention_ms(device, counts, "forward")
    input_bytes, gradient_bytes = cast_bytes(device, counts.products, counts.moved_bytes)
    moved_ms = (counts.moved_bytes + input_bytes) / device.bytes_per_ms
    collective_ms, back_collective_ms = _collective_ms(device, one)
    forward_ms = matmul_ms + attention_ms + moved_ms + collective_ms + kernels_ms
    if not one.has_backward:
        return forward_ms, 0 * forward_ms
    accumulated = _accumulated(device, counts) if one.trained else counts.adapter_parameters
    accumulated_bytes = accumulated * 2 * device.runtime.gradient_bytes
    backward_ms = (
        back_matmul_ms
        + _attention_ms(device, counts, "backward")
        + (counts.back_moved_bytes + gradient_bytes) / device.bytes_per_ms
        + 2 * kernels_ms
        + back_collective_ms
        + _fixed(accumulated_bytes / device.streamed_bytes_per_ms, forward_ms)
    )
    return forward_ms, backward_ms
