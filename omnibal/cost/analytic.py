"""Costs by counting operations and bytes against a cluster's rates.

Rates are shares of the data sheet's, the same for all shapes; or, where the cluster has a table of
measured ones (`rates`), those of matrix products and collectives are of their shapes, and weights
and gradients are streamed at a copy's rate (`omnibal.cost.shaped_rates`).

Time of a unit's forward pass is the sum of four counts, none of which overlaps another:

* matrix products, at a share `matmul_efficiency` of the device's peak. A layer of hidden size h
  does 24 s h^2 + 4 s^2 h operations per sequence of s (Narayanan et al. 2021, Megatron-LM, arXiv
  2104.04473, appendix); generalised here to grouped-query attention, SwiGLU and any feed-forward
  size. Causal attention does half of the squared term. Backward is twice forward, and half of that
  where only the input's gradient is wanted; attention's is 2.5 times forward, as it recomputes its
  scores (Dao 2023, FlashAttention-2, arXiv 2307.08691, section 3.3).
* element-wise passes (norms, biases, residuals, activation functions, rotary embedding), in bytes
  read and written by this project's fused kernels, at a share `memory_efficiency` of the memory's
  rate. They make a vision layer slower than its operations say: tensor parallelism divides its
  products but not its norms and residuals, as a sequence of 1,025 positions cannot be divided. A
  system whose element-wise work is not fused moves more, which a smaller share stands for.
* tensor-parallel collectives: two all-reduces of the layer's output in each direction, or with
  sequence parallelism an all-gather and a reduce-scatter in place of each, and in backward two
  gathers more (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).
* kernels, each at `kernel_us` besides its work; backward also adds to fp32 gradients, once per
  parameter and micro-batch.

Activations: Korthikanti et al., section 4: 34 s h bytes per layer in 16 bit besides attention's
squared term; here without dropout masks (32 s h), with flash attention (nothing quadratic, one fp32
log-sum-exp per head), plus what layer scale and q/k norms keep; `kept_lines` lists it all. Tensors
between the parallel blocks are whole on every tensor-parallel rank, or divided under sequence
parallelism; those inside are divided. A frozen layer keeps only what its input's gradient needs: no
inputs of linear layers.

Not counted: the exchange of sums that q/k norms over all heads need under tensor parallelism. A job
that spans nodes pays the network's price at every cut, also where two stages share a node. Bytes
moved and numbers of kernels are those of this project's fused layers, as `tools/replay.py
--pretend` counts them.

What each unit counts is in `omnibal.cost.encoder_counts`, `omnibal.cost.image_counts` and
`omnibal.cost.language_counts`.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from omnibal.config import ClusterConfig, ModelConfig, Precision
from omnibal.cost.attention_rates import AttentionPass, AttentionTimes
from omnibal.cost.counts import (
    ELEMENT_BYTES,
    GRADIENT_BYTES,
    Counts,
    Device,
    Features,
    Kept,
    Product,
)
from omnibal.cost.encoder_kinds import counts_of_kind
from omnibal.cost.image_counts import (
    deepstack_bytes,
)
from omnibal.cost.language_counts import head, language_embed, language_layer
from omnibal.cost.model import CostModel, ExpertRates, UnitCost
from omnibal.cost.shaped_rates import (
    Line,
    ProductTimes,
    exchanged_line,
    ring_line,
    send_line,
)
from omnibal.parallel import Parallel
from omnibal.rates import Pass, Rates
from omnibal.units import (
    HEAD,
    LANGUAGE,
    LANGUAGE_EMBED,
    UnitKind,
    feature_names,
    unit_kinds,
    unit_names,
)

OPTIMIZER_BYTES: dict[Precision, int] = {"fp32": 8, "bf16": 12}
"""Adam's two moments, and in bf16 the fp32 weights (ZeRO, arXiv 1910.02054, section 3.1)."""

_BACKWARD_OF_ATTENTION = 2.5
_TILE_ROWS = 128
"""Rows of a tile of a grouped product's kernel (CUTLASS's largest for 16 bit), of which every group
leaves half of one empty on average."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counted:
    """Counts of a unit, and what its place in the model decides."""

    kind: UnitKind
    counts: Counts
    unpadded: Counts
    """The same without padded attention heads and words."""
    trained: bool
    before_trained: bool
    """Whether anything that the unit's input comes from is trained."""
    carried_bytes: np.ndarray
    """Features of earlier encoders, and of deepstack projectors, which a cut after this unit sends
    on too."""
    carried_gradient_bytes: np.ndarray
    """Gradient of them, sent back: 0 where what made them is frozen."""


def analytic_cost(
    model: ModelConfig,
    cluster: ClusterConfig,
    parallel: Parallel,
    precision: Precision,
    frozen: Collection[str] = (),
    *,
    distributed_optimizer: bool = True,
) -> CostModel:
    """Cost of every unit on one device of `cluster` under the given parallel sizes.

    Args:
        frozen: parts that are not trained.
        distributed_optimizer: shard the optimizer's state over data-parallel ranks, and exchange
            with them while computing, as this project's trainer always does; other systems do not.
    """
    element_bytes = ELEMENT_BYTES[precision]
    shards = parallel.data if distributed_optimizer else 1
    state_bytes = element_bytes + GRADIENT_BYTES + OPTIMIZER_BYTES[precision]
    device = _device(cluster, parallel, precision)
    streamed_bytes_per_ms = device.streamed_bytes_per_ms
    send = _send_line(cluster, parallel, precision)
    exchange_ms_per_byte = _exchange_ms_per_byte(cluster, parallel, parallel.data, precision)
    units = {one.kind.name: _unit_cost(device, one) for one in _counted(model, device, frozen)}
    has_copy = model.language.tied_head or model.language.prediction_layers > 0
    return CostModel(
        features=feature_names(model),
        kinds=unit_kinds(model),
        units=units,
        # Multi-token prediction embeds words on the last stage too.
        tied_parameters=units[LANGUAGE_EMBED].parameters if has_copy else 0,
        weight_bytes_per_parameter=element_bytes,
        gradient_bytes_per_parameter=GRADIENT_BYTES,
        optimizer_bytes_per_parameter=OPTIMIZER_BYTES[precision] / shards,
        optimizer_ms_fixed=0.0,
        # Weight, gradient and state are read and written once, each rank its own share.
        optimizer_ms_per_parameter=2 * state_bytes / streamed_bytes_per_ms / shards,
        link_latency_ms=send.fixed_ms,
        link_ms_per_byte=send.each_ms,
        # Without sharded state, gradients are gathered again: an all-reduce, beside nothing.
        gradient_reduction_ms_per_parameter=exchange_ms_per_byte
        * (GRADIENT_BYTES if distributed_optimizer else 2 * GRADIENT_BYTES),
        weight_gather_ms_per_parameter=exchange_ms_per_byte
        * (element_bytes if distributed_optimizer else 0),
        bucket_parameters=parallel.bucket_parameters if distributed_optimizer else math.inf,
        expert_rates=_expert_rates(cluster, parallel, precision, device, distributed_optimizer),
        expert_peer_bytes=(parallel.expert - 1) * cluster.peer_bytes,
        source=f"analytic:{cluster.name}, {_rates_described(cluster, precision)}",
    )


def _expert_rates(
    cluster: ClusterConfig,
    parallel: Parallel,
    precision: Precision,
    device: Device,
    distributed_optimizer: bool,
) -> ExpertRates:
    """What a trained parameter of an expert costs; as that of others, over other ranks."""
    size, ranks = ELEMENT_BYTES[precision], parallel.expert_data
    shards = ranks if distributed_optimizer else 1
    state_bytes = size + GRADIENT_BYTES + OPTIMIZER_BYTES[precision]
    exchange_ms_per_byte = _exchange_ms_per_byte(cluster, parallel, ranks, precision)
    return ExpertRates(
        optimizer_bytes=OPTIMIZER_BYTES[precision] / shards,
        optimizer_ms=2 * state_bytes / device.streamed_bytes_per_ms / shards,
        gradient_reduction_ms=exchange_ms_per_byte
        * (GRADIENT_BYTES if distributed_optimizer else 2 * GRADIENT_BYTES),
        weight_gather_ms=exchange_ms_per_byte * (size if distributed_optimizer else 0),
    )


def model_flops(model: ModelConfig, cluster: ClusterConfig, frozen: Collection[str]) -> np.ndarray:
    """Operations of forward and backward that training needs per feature of a micro-batch,
    [features]: those of all units together (`unit_flops`)."""
    names = unit_names(model)
    flops = np.zeros(len(feature_names(model)))
    for name, once in unit_flops(model, cluster, frozen).items():
        flops += names.count(name) * once
    return flops


def unit_flops(
    model: ModelConfig, cluster: ClusterConfig, frozen: Collection[str]
) -> dict[str, np.ndarray]:
    """Operations of forward and backward that training needs of a unit of each kind, by its name,
    per feature of a micro-batch, [features].

    The numerator of model FLOPs utilization (Chowdhery et al. 2022, PaLM, arXiv 2204.02311,
    appendix B): neither recomputation nor padding counts, and backward is two more products for
    each of forward's, or one where only the input's or only the weights' gradient is wanted.
    """
    device = _device(cluster, Parallel(pipeline=1), "bf16")
    flops = {}
    for one in _counted(model, device, frozen):
        products = 1 + _backward_products(one)
        attention = 3 if one.trained or one.before_trained else 1
        counts = one.unpadded
        flops[one.kind.name] = products * counts.matmul_flops + attention * counts.attention_flops
    return flops


def layer_products(model: ModelConfig, cluster: ClusterConfig, parallel: Parallel) -> list[Product]:
    """Matrix products of the forward of every kind of unit but the head, on one device."""
    device, features = _device(cluster, parallel, "bf16"), Features(names=feature_names(model))
    counted = [
        _counts(model, kind, device, features)[0] for kind in unit_kinds(model) if kind.name != HEAD
    ]
    return [product for counts in counted for product in counts.products]


def kept_lines(
    model: ModelConfig,
    cluster: ClusterConfig,
    parallel: Parallel,
    precision: Precision,
    frozen: Collection[str] = (),
) -> dict[str, tuple[Kept, ...]]:
    """The table of what every kind of unit keeps from its forward to its backward, line by line."""
    device = _device(cluster, parallel, precision)
    return {
        one.kind.name: tuple(
            line for line in one.counts.kept if one.trained or not line.for_weights
        )
        for one in _counted(model, device, frozen)
    }


def _device(cluster: ClusterConfig, parallel: Parallel, precision: Precision) -> Device:
    memory_bytes_per_ms = cluster.memory_gb_per_s * 1e6
    rates = cluster.rates.get(precision)
    ring = _ring_line(cluster, parallel.tensor, parallel.tensor, precision)
    experts = _expert_line(cluster, parallel.expert, precision)
    products, grouped, attention = _times_of(rates) if rates else (None, None, None)
    return Device(
        flops_per_ms=cluster.tflops(precision) * 1e9 * cluster.matmul_efficiency,
        fp32_flops_per_ms=_fp32_tflops(cluster, precision) * 1e9 * cluster.matmul_efficiency,
        product_times=products,
        grouped_times=grouped,
        attention_times=attention,
        bytes_per_ms=memory_bytes_per_ms * cluster.memory_efficiency,
        streamed_bytes_per_ms=_copied_bytes_per_ms(rates) or memory_bytes_per_ms,
        collective_bytes_per_ms=1 / ring.each_ms if ring.each_ms else math.inf,
        pass_ms=ring.fixed_ms,
        expert_bytes_per_ms=1 / experts.each_ms if experts.each_ms else math.inf,
        expert_pass_ms=experts.fixed_ms,
        kernel_ms=cluster.kernel_us / 1e3,
        tensor=parallel.tensor,
        sequence_parallel=parallel.sequence_parallel,
        element_bytes=ELEMENT_BYTES[precision],
        expert=parallel.expert,
    )


@lru_cache(maxsize=64)
def _times_of(
    rates: Rates,
) -> tuple[ProductTimes | None, ProductTimes | None, AttentionTimes | None]:
    """Times of products, grouped products and attention; None of which nothing was measured. A
    table is fitted once."""
    products, grouped = (
        ProductTimes.of(measured, rates.tflops) if measured else None
        for measured in (rates.products, rates.grouped)
    )
    attention = rates.attention
    return products, grouped, AttentionTimes.of(attention, rates.tflops) if attention else None


def _expert_line(cluster: ClusterConfig, ranks: int, precision: Precision) -> Line:
    """Time of an all-to-all of `ranks` consecutive ones, and of a byte of each one's tensor.

    A tensor goes in equal parts to all ranks, one of them its own. Parts within a node go beside
    those between nodes, and the slower of the two counts; the latency is a send's, as ranks send to
    all others at the same time, or that of a measured all-to-all.
    """
    if ranks == 1:
        return Line(fixed_ms=0, each_ms=0)
    neighbours = min(ranks, cluster.gpus_per_node)
    rates = cluster.rates.get(precision)
    measured = exchanged_line(rates.collectives, neighbours) if rates else None
    within = measured or exchange_line(cluster, neighbours, precision)
    within_ms = within.each_ms * (neighbours - 1) / ranks
    if ranks <= cluster.gpus_per_node:
        return Line(fixed_ms=within.fixed_ms, each_ms=within_ms)
    between = exchange_line(cluster, ranks, precision)
    between_ms = between.each_ms * (ranks - neighbours) / ranks
    return Line(fixed_ms=between.fixed_ms, each_ms=max(within_ms, between_ms))


def _fp32_tflops(cluster: ClusterConfig, precision: Precision) -> float:
    """Peak in fp32, of products that are in it whatever the precision; where none is given, of
    that precision."""
    return cluster.tflops("fp32" if "fp32" in cluster.peak_tflops else precision)


def _rates_described(cluster: ClusterConfig, precision: Precision) -> str:
    rates = cluster.rates.get(precision)
    # Of what is measured there are tables.
    basis = "fitted" if cluster.basis == "fitted" else "measured" if rates else "assumed"
    return f"{basis} rates of {rates.device}" if rates else f"{basis} rates"


def _copied_bytes_per_ms(rates: Rates | None) -> float | None:
    """Rate of the fastest copy that was measured; None where none was."""
    copies = rates.copies if rates else ()
    plain = [one.bytes_per_ms for one in copies if one.kind == "plain"]
    return max(plain, default=None)


def _send_line(cluster: ClusterConfig, parallel: Parallel, precision: Precision) -> Line:
    """Time of a send between stages and of a byte of it; measured ones are of one node."""
    rates, ranks = cluster.rates.get(precision), parallel.world_size
    measured = send_line(rates.collectives) if rates and ranks <= cluster.gpus_per_node else None
    latency_ms = cluster.link_latency_us / 1e3
    return measured or Line(fixed_ms=latency_ms, each_ms=_link_ms_per_byte(cluster, ranks))


def exchange_line(cluster: ClusterConfig, consecutive_ranks: int, precision: Precision) -> Line:
    """Time of a message, and of a byte that a rank sends or receives, where ranks among so many
    consecutive ones each send to several."""
    return _send_line(cluster, Parallel(pipeline=consecutive_ranks), precision)


def tensor_line(cluster: ClusterConfig, parallel: Parallel, precision: Precision) -> Line:
    """Time of a pass round the ring of tensor-parallel ranks, and of a byte that a rank sends."""
    return _ring_line(cluster, parallel.tensor, parallel.tensor, precision)


def gather_line(cluster: ClusterConfig, ranks: int, precision: Precision) -> Line:
    """Time of a pass round a ring of consecutive ranks, and of a byte that a rank sends."""
    return _ring_line(cluster, ranks, ranks, precision)


def _ring_line(
    cluster: ClusterConfig, ranks: int, consecutive_ranks: int, precision: Precision
) -> Line:
    """Time of a pass round a ring and of a byte that a rank sends; measured ones are of one node.

    Args:
        ranks: of the ring.
        consecutive_ranks: of which the ring's are some.
    """
    measured = _measured_ring(cluster, ranks, consecutive_ranks, precision)
    return measured or Line(fixed_ms=0, each_ms=_link_ms_per_byte(cluster, consecutive_ranks))


def context_line(cluster: ClusterConfig, context: int, tensor: int, precision: Precision) -> Line:
    """Time of a collective of the ranks that share a pack, and of a byte that a rank sends in it.

    Megatron numbers ranks tensor first, then data, so that they are of so many consecutive ones.
    Where none was measured, the collective takes the latency of a send once: every layer waits for
    its exchange, so that it cannot be left out.
    """
    measured = _measured_ring(cluster, context, context * tensor, precision)
    return measured or Line(
        fixed_ms=cluster.link_latency_us / 1e3,
        each_ms=_link_ms_per_byte(cluster, context * tensor),
    )


def _measured_ring(
    cluster: ClusterConfig, ranks: int, consecutive_ranks: int, precision: Precision
) -> Line | None:
    rates, within_node = cluster.rates.get(precision), consecutive_ranks <= cluster.gpus_per_node
    return ring_line(rates.collectives, ranks) if rates and within_node else None


def _link_ms_per_byte(cluster: ClusterConfig, consecutive_ranks: int) -> float:
    """Milliseconds per byte for a group of `consecutive_ranks`, within a node or between nodes."""
    within_node = consecutive_ranks <= cluster.gpus_per_node
    rate = cluster.intra_node_gb_per_s if within_node else cluster.inter_node_gb_per_s
    return 1 / (rate * 1e6 * cluster.link_efficiency)


def _exchange_ms_per_byte(
    cluster: ClusterConfig, parallel: Parallel, ranks: int, precision: Precision
) -> float:
    """Ring reduce-scatter or all-gather over `ranks` of a stage, per byte of the whole buffer.

    A ring sends (d - 1) / d of the buffer. Megatron numbers ranks tensor first, then data, so that
    both the data-parallel ones and those that hold the same experts are spread over all of the
    stage. The fixed time of a pass comes once a bucket of tens of millions of parameters, and is
    left out.
    """
    share = (ranks - 1) / ranks
    ring = _ring_line(cluster, ranks, parallel.tensor * parallel.data, precision)
    return share * ring.each_ms


def _counted(model: ModelConfig, device: Device, frozen: Collection[str]) -> Iterator[_Counted]:
    """Counts of every kind of unit, in model order."""
    features = Features(names=feature_names(model))
    carried, carried_gradient, before_trained = features.none, features.none, False
    any_encoder_trained = deepstack_returns = False
    for kind in unit_kinds(model):
        is_language = kind.tower == LANGUAGE
        if kind.is_embed:
            # Nothing comes before an encoder; all encoders come before the language model.
            before_trained = is_language and any_encoder_trained
        trained = kind.part not in frozen
        counts, unpadded = _counts(model, kind, device, features)
        deepstack = deepstack_bytes(model, kind, device, features)
        deepstack_returns = deepstack_returns or (kind.has_deepstack and trained)
        yield _Counted(
            kind=kind,
            counts=counts,
            unpadded=unpadded,
            trained=trained,
            before_trained=before_trained,
            carried_bytes=deepstack + (features.none if is_language else carried),
            carried_gradient_bytes=(
                deepstack_returns * deepstack + (features.none if is_language else carried_gradient)
            ),
        )
        before_trained = before_trained or trained
        any_encoder_trained = any_encoder_trained or trained
        if kind.is_projector:
            carried = carried + counts.output_bytes
            carried_gradient = carried_gradient + before_trained * counts.output_bytes


def _counts(
    model: ModelConfig, kind: UnitKind, device: Device, features: Features
) -> tuple[Counts, Counts]:
    """Counts of one kind of unit, with padded attention heads and words and without."""
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


def _backward_products(one: _Counted) -> int:
    """Gradients of the input and of the weights are a product each; norms before a product are
    trained too."""
    return int(one.trained) + int(_wants_input_gradient(one))


def _wants_input_gradient(one: _Counted) -> bool:
    return one.before_trained or (one.trained and not one.counts.begins_with_weights)


def _unit_cost(device: Device, one: _Counted) -> UnitCost:
    """Cost of a unit, which has a backward if it or anything before it is trained."""
    forward_ms, backward_ms = _times_ms(device, one, one.counts)
    unpadded_forward_ms, unpadded_backward_ms = _times_ms(device, one, one.unpadded)
    counts, nothing = one.counts, 0 * forward_ms
    has_backward = one.trained or one.before_trained
    kept_bytes = counts.kept_bytes(trained=one.trained)
    # Products of measured times may be slower for being smaller.
    padding_ms = np.maximum(
        [forward_ms - unpadded_forward_ms, backward_ms - unpadded_backward_ms], 0
    )
    own_gradient_bytes = counts.output_bytes if has_backward else nothing
    weight_bytes = one.trained * device.element_bytes
    # Gradients of earlier encoders' features wait while this one runs backward.
    waiting_bytes = one.carried_gradient_bytes if has_backward else nothing
    transient_bytes = [
        counts.working_bytes(each, trained=one.trained)
        + _fixed(weight_bytes * each.weight, nothing)
        + waiting_bytes
        for each in (counts.working if has_backward else counts.forward_working)
    ]
    return UnitCost(
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        recompute_ms=forward_ms if has_backward else nothing,
        collective_ms=np.stack(
            [_collective_ms(device, one.counts), _back_collective_ms(device, one)]
        ),
        padding_ms=padding_ms,
        context_ms=np.zeros((3, len(forward_ms))),
        activation_bytes=kept_bytes if has_backward else nothing,
        boundary_bytes=counts.boundary_bytes if has_backward else nothing,
        output_bytes=counts.output_bytes + one.carried_bytes,
        output_gradient_bytes=own_gradient_bytes + one.carried_gradient_bytes,
        transient_bytes=np.stack([nothing, *transient_bytes]),
        passing_bytes=nothing if has_backward else nothing + counts.passing_bytes,
        shared_bytes=one.trained * (nothing + counts.shared_bytes),
        parameters=counts.parameters,
        trained_parameters=counts.parameters if one.trained else 0,
        expert_parameters=counts.expert_parameters,
    )


def _collective_ms(device: Device, counts: Counts) -> np.ndarray:
    """Time of a unit's collectives in forward, [features]."""
    passes_ms = _passes_ms(device, counts.collective_bytes, counts.passes)
    return passes_ms + _exchanges_ms(device, counts, counts.exchanges)


def _back_collective_ms(device: Device, one: _Counted) -> np.ndarray:
    """Time of a unit's collectives in backward, [features]."""
    counts = one.counts
    if not one.trained and not one.before_trained:
        return 0 * counts.back_collective_bytes
    back_sent_bytes = counts.back_collective_bytes + one.trained * counts.gathered_again_bytes
    passes = counts.back_passes + one.trained * counts.passes_again
    passes_ms = _passes_ms(device, back_sent_bytes, passes)
    return passes_ms + _exchanges_ms(device, counts, counts.back_exchanges)


def _exchanges_ms(device: Device, counts: Counts, exchanges: int) -> np.ndarray:
    """Time of so many all-to-alls of the tokens of a unit's experts, [features]."""
    sent_ms = counts.exchanged_bytes / device.expert_bytes_per_ms
    return sent_ms + _fixed(exchanges * device.expert_pass_ms, counts.moved_bytes)


def _passes_ms(device: Device, sent_bytes: np.ndarray, passes: int) -> np.ndarray:
    """Time of passes round the tensor-parallel ring, [features]."""
    return sent_bytes / device.collective_bytes_per_ms + _fixed(passes * device.pass_ms, sent_bytes)


def _fixed(value: float, like: np.ndarray) -> np.ndarray:
    """Vector of a value for every micro-batch and nothing for its features, [features]."""
    vector = np.zeros(len(like))
    vector[0] = value
    return vector


def _matmul_ms(device: Device, one: _Counted, counts: Counts) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward of all matrix products, both [features]."""
    nothing = 0 * counts.moved_bytes
    passes: list[Pass] = ["input_gradient"] if _wants_input_gradient(one) else []
    passes += ["weight_gradient"] if one.trained else []
    return (
        np.sum([nothing, *(_product_ms(device, each, "forward") for each in counts.products)], 0),
        np.sum(
            [
                nothing,
                *(_product_ms(device, each, of) for each in counts.products for of in passes),
            ],
            axis=0,
        ),
    )


def _product_ms(device: Device, counted: Product, of: Pass) -> np.ndarray:
    """Time of a pass of a counted product, [features]; groups are one kernel."""
    rows, sizes = _computed_rows(counted), (counted.inner, counted.outer)
    if counted.is_fp32:
        return rows * 2 * (counted.inner * counted.outer) / device.fp32_flops_per_ms
    if counted.groups > 1 and device.grouped_times is not None:
        rows, line = counted.rows, device.grouped_times.line(of, *sizes, groups=counted.groups)
    elif device.product_times is not None:
        line = device.product_times.line(of, *sizes)
    else:
        return rows * 2 * (counted.inner * counted.outer) / device.flops_per_ms
    return rows * line.each_ms + _fixed(line.fixed_ms, rows)


def _computed_rows(product: Product) -> np.ndarray:
    """Rows that a kernel computes for a product, [features]: in groups, whole tiles of each."""
    is_grouped = product.groups > 1
    return product.rows + _fixed(is_grouped * product.groups * _TILE_ROWS / 2, product.rows)


def _attention_ms(device: Device, counts: Counts, of: AttentionPass) -> np.ndarray:
    """Time of attention, softmax or not, [features]."""
    scale = 1.0 if of == "forward" else _BACKWARD_OF_ATTENTION
    times, softmax = device.attention_times, counts.attended
    if times is None:
        return scale * counts.attention_flops / device.flops_per_ms
    rest = counts.attention_flops - np.sum([one.flops for one in softmax], axis=0)
    time_ms = scale * rest / device.flops_per_ms
    for one in softmax:
        line = times.line(of, one.elements, causal=one.causal)
        time_ms = time_ms + scale * one.tiled_flops * line.each_ms + _fixed(line.fixed_ms, rest)
    return time_ms


def _times_ms(device: Device, one: _Counted, counts: Counts) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward of a unit with these counts, both [features]."""
    kernels_ms = _fixed(counts.kernels * device.kernel_ms, counts.moved_bytes)
    matmul_ms, back_matmul_ms = _matmul_ms(device, one, counts)
    attention_ms = _attention_ms(device, counts, "forward")
    moved_ms = counts.moved_bytes / device.bytes_per_ms
    collective_ms = _collective_ms(device, counts)
    forward_ms = matmul_ms + attention_ms + moved_ms + collective_ms + kernels_ms
    if not one.trained and not one.before_trained:
        return forward_ms, 0 * forward_ms
    accumulated_bytes = one.trained * counts.parameters * 2 * GRADIENT_BYTES
    backward_ms = (
        back_matmul_ms
        + _attention_ms(device, counts, "backward")
        + counts.back_moved_bytes / device.bytes_per_ms
        + 2 * kernels_ms
        + _back_collective_ms(device, one)
        + _fixed(accumulated_bytes / device.streamed_bytes_per_ms, forward_ms)
    )
    return forward_ms, backward_ms
