"""Costs by counting operations and bytes against a cluster's data-sheet figures.

Time of a unit's forward pass is the sum of four counts, none of which overlaps another:

* matrix products, at a share `matmul_efficiency` of the device's peak. A layer of hidden size h
  does 24 s h^2 + 4 s^2 h operations per sequence of s (Narayanan et al. 2021, Megatron-LM, arXiv
  2104.04473, appendix); generalised here to grouped-query attention, SwiGLU and any feed-forward
  size. Causal attention does half of the squared term. Backward is twice forward, and half of that
  where only the input's gradient is wanted; attention's is 2.5 times forward, as it recomputes its
  scores (Dao 2023, FlashAttention-2, arXiv 2307.08691, section 3.3).
* element-wise passes (norms, biases, residuals, activation functions, rotary embedding), in bytes
  read and written, at a share `memory_efficiency` of the memory's rate. They make a vision layer
  slower than its operations say: tensor parallelism divides its products but not its norms and
  residuals, as a sequence of 1,025 positions cannot be divided. Backward moves half as much again:
  a norm, a scale or an activation function reads its input besides the gradient.
* tensor-parallel collectives: two all-reduces of the layer's output in each direction, or with
  sequence parallelism an all-gather and a reduce-scatter in place of each, and in backward two
  gathers more (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).
* kernels, each at `kernel_us` besides its work; backward also adds to fp32 gradients, once per
  parameter and micro-batch.

Activations: Korthikanti et al., section 4: 34 s h bytes per layer in 16 bit besides attention's
squared term; here without dropout masks (32 s h), with flash attention (nothing quadratic, one fp32
log-sum-exp per head), plus what layer scale and q/k norms keep. Tensors between the parallel blocks
are whole on every tensor-parallel rank, or divided under sequence parallelism; those inside are
divided. A frozen layer keeps only what its input's gradient needs: no inputs of linear layers.

Not counted: rows of padding in the vocabulary; the exchange of sums that q/k norms over all heads
need under tensor parallelism. A job that spans nodes pays the network's price at every cut, also
where two stages share a node. The numbers of kernels are those of this project's layers, counted in
their code, norms and biases unfused.

Letters: h hidden, f feed-forward, P positions per tile, T language tokens per tile, t tensor size.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from omnibal.config import ClusterConfig, ModelConfig, Part, Precision
from omnibal.cost.model import FEATURES, CostModel, Unit, UnitCost
from omnibal.parallel import Parallel
from omnibal.units import feature_names, unit_kinds

ELEMENT_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2}
GRADIENT_BYTES = 4
"""Megatron accumulates gradients in fp32 in either precision."""
OPTIMIZER_BYTES: dict[Precision, int] = {"fp32": 8, "bf16": 12}
"""Adam's two moments, and in bf16 the fp32 weights (ZeRO, arXiv 1910.02054, section 3.1)."""

_FIXED, _TILES, _TOKENS, _SQUARED, _LOSS_TOKENS = np.eye(5)
_TOKEN_ID_BYTES = 8
_FP32_BYTES = 4
_BACKWARD_OF_ATTENTION = 2.5
_BACKWARD_OF_PASSES = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class _Device:
    """Rates of one device, and how its tensor-parallel group divides a unit."""

    flops_per_ms: float
    bytes_per_ms: float
    """Bytes that element-wise kernels read and write per millisecond."""
    streamed_bytes_per_ms: float
    """Bytes per millisecond of contiguous reads and writes of weights and gradients."""
    collective_bytes_per_ms: float
    kernel_ms: float
    tensor: int
    sequence_parallel: bool
    """Whether the language model runs under Megatron's sequence parallelism."""
    element_bytes: int

    @property
    def whole(self) -> float:
        """Share of the language model's tensors between parallel blocks that a rank holds."""
        return 1 / self.tensor if self.sequence_parallel else 1.0

    @property
    def sent(self) -> float:
        """Share of a tensor that a rank sends in an all-gather or a reduce-scatter (a ring)."""
        return (self.tensor - 1) / self.tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counts:
    """Operations and bytes of one unit's forward pass on one device; vectors are [5]."""

    matmul_flops: np.ndarray
    attention_flops: np.ndarray
    moved_bytes: np.ndarray
    collective_bytes: np.ndarray
    """Bytes that the rank sends in collectives of forward; the next two are of backward."""
    back_collective_bytes: np.ndarray
    gathered_again_bytes: np.ndarray
    """Bytes sent in backward on top, where the weights are trained."""
    kernels: int
    kept_bytes: np.ndarray
    kept_frozen_bytes: np.ndarray | None = None
    """Bytes kept where only the input's gradient is needed; None if nothing before is trainable."""
    boundary_bytes: np.ndarray
    output_bytes: np.ndarray
    transient_bytes: np.ndarray
    parameters: int
    begins_with_weights: bool = False
    """Whether the unit needs no input gradient unless an earlier unit is trained."""


def analytic_cost(
    model: ModelConfig,
    cluster: ClusterConfig,
    parallel: Parallel,
    precision: Precision,
    frozen: Collection[Part] = (),
    *,
    distributed_optimizer: bool = True,
) -> CostModel:
    """Cost of every unit on one device of `cluster` under the given parallel sizes.

    Args:
        frozen: parts that are not trained.
        distributed_optimizer: shard the optimizer's state over data-parallel ranks, as this
            project's trainer always does; other systems do not.
    """
    element_bytes = ELEMENT_BYTES[precision]
    shards = parallel.data if distributed_optimizer else 1
    state_bytes = element_bytes + GRADIENT_BYTES + OPTIMIZER_BYTES[precision]
    device = _device(cluster, parallel, precision)
    streamed_bytes_per_ms = device.streamed_bytes_per_ms
    units = _unit_costs(model, device, frozen)
    tied = model.language.tied_head
    return CostModel(
        features=feature_names(model),
        kinds=unit_kinds(model),
        units={str(unit): costs for unit, costs in units.items()},
        tied_parameters=units[Unit.LANGUAGE_EMBED].parameters if tied else 0,
        weight_bytes_per_parameter=element_bytes,
        gradient_bytes_per_parameter=GRADIENT_BYTES,
        optimizer_bytes_per_parameter=OPTIMIZER_BYTES[precision] / shards,
        optimizer_ms_fixed=0.0,
        # Weight, gradient and state are read and written once, each rank its own share.
        optimizer_ms_per_parameter=2 * state_bytes / streamed_bytes_per_ms / shards,
        link_latency_ms=cluster.link_latency_us / 1e3,
        link_ms_per_byte=_link_ms_per_byte(cluster, parallel.world_size),
        gradient_reduction_ms_per_parameter=_gradient_reduction_ms(
            cluster, parallel, ELEMENT_BYTES[precision] if distributed_optimizer else GRADIENT_BYTES
        ),
        source=f"analytic:{cluster.name}",
    )


def model_flops(model: ModelConfig, cluster: ClusterConfig, frozen: Collection[Part]) -> np.ndarray:
    """Operations of forward and backward that training needs per feature of a micro-batch, [5].

    The numerator of model FLOPs utilization (Chowdhery et al. 2022, PaLM, arXiv 2204.02311,
    appendix B): neither recomputation nor padding counts, and backward is two more products for
    each of forward's, or one where only the input's or only the weights' gradient is wanted.
    """
    device = _device(cluster, Parallel(pipeline=1), "bf16")
    layers = {Unit.VISION_LAYER: model.vision.layers, Unit.LANGUAGE_LAYER: model.language.layers}
    flops = np.zeros(len(FEATURES))
    before_trained = False
    for unit, part, counts in _unit_counts(model, device):
        trained = part not in frozen
        products = 1 + _backward_products(counts, trained=trained, before_trained=before_trained)
        attention = 3 if trained or before_trained else 1
        once = products * counts.matmul_flops + attention * counts.attention_flops
        flops += layers.get(unit, 1) * once
        before_trained = before_trained or trained
    return flops


def _device(cluster: ClusterConfig, parallel: Parallel, precision: Precision) -> _Device:
    streamed_bytes_per_ms = cluster.memory_gb_per_s * 1e6
    return _Device(
        flops_per_ms=cluster.tflops(precision) * 1e9 * cluster.matmul_efficiency,
        bytes_per_ms=streamed_bytes_per_ms * cluster.memory_efficiency,
        streamed_bytes_per_ms=streamed_bytes_per_ms,
        collective_bytes_per_ms=1 / _link_ms_per_byte(cluster, parallel.tensor),
        kernel_ms=cluster.kernel_us / 1e3,
        tensor=parallel.tensor,
        sequence_parallel=parallel.sequence_parallel,
        element_bytes=ELEMENT_BYTES[precision],
    )


def _link_ms_per_byte(cluster: ClusterConfig, consecutive_ranks: int) -> float:
    """Milliseconds per byte for a group of `consecutive_ranks`, within a node or between nodes."""
    within_node = consecutive_ranks <= cluster.gpus_per_node
    rate = cluster.intra_node_gb_per_s if within_node else cluster.inter_node_gb_per_s
    return 1 / (rate * 1e6 * cluster.link_efficiency)


def _gradient_reduction_ms(
    cluster: ClusterConfig, parallel: Parallel, gathered_bytes: int
) -> float:
    """Ring reduce-scatter of the gradients and all-gather of weights or gradients, per parameter.

    A ring sends (d - 1) / d of the buffer. Megatron numbers ranks tensor first, then data.
    """
    share = (parallel.data - 1) / parallel.data
    sent_bytes = share * (GRADIENT_BYTES + gathered_bytes)
    return sent_bytes * _link_ms_per_byte(cluster, parallel.tensor * parallel.data)


def _unit_costs(
    model: ModelConfig, device: _Device, frozen: Collection[Part]
) -> dict[Unit, UnitCost]:
    """Costs of all units in model order; a unit has a backward if it or one before is trained."""
    costs = {}
    before_trained = False
    for unit, part, counts in _unit_counts(model, device):
        trained = part not in frozen
        cost = _unit_cost(device, counts, trained=trained, before_trained=before_trained)
        if unit is Unit.VISION_LAYER:
            bare = _vision_layer(model, device, padded=False)
            unpadded = _unit_cost(device, bare, trained=trained, before_trained=before_trained)
            padding_ms = [
                cost.forward_ms - unpadded.forward_ms,
                cost.backward_ms - unpadded.backward_ms,
            ]
            cost = replace(cost, padding_ms=np.stack(padding_ms))
        costs[unit] = cost
        before_trained = before_trained or trained
    return costs


def _unit_counts(model: ModelConfig, device: _Device) -> tuple[tuple[Unit, Part, _Counts], ...]:
    """Counts of every unit, in model order."""
    return (
        (Unit.VISION_EMBED, Part.VISION, _vision_embed(model, device)),
        (Unit.VISION_LAYER, Part.VISION, _vision_layer(model, device)),
        (Unit.PROJECTOR, Part.PROJECTOR, _projector(model, device)),
        (Unit.LANGUAGE_EMBED, Part.LANGUAGE, _language_embed(model, device)),
        (Unit.LANGUAGE_LAYER, Part.LANGUAGE, _language_layer(model, device)),
        (Unit.HEAD, Part.LANGUAGE, _head(model, device)),
    )


def _backward_products(counts: _Counts, *, trained: bool, before_trained: bool) -> int:
    """Gradients of the input and of the weights are a product each; norms before a product are
    trained too."""
    wants_input = before_trained or (trained and not counts.begins_with_weights)
    return int(trained) + int(wants_input)


def _unit_cost(
    device: _Device, counts: _Counts, *, trained: bool, before_trained: bool
) -> UnitCost:
    kernels_ms = _FIXED * counts.kernels * device.kernel_ms
    matmul_ms = counts.matmul_flops / device.flops_per_ms
    attention_ms = counts.attention_flops / device.flops_per_ms
    moved_ms = counts.moved_bytes / device.bytes_per_ms
    collective_ms = counts.collective_bytes / device.collective_bytes_per_ms
    forward_ms = matmul_ms + attention_ms + moved_ms + collective_ms + kernels_ms
    has_backward = trained or before_trained
    if not has_backward:
        nothing = 0 * _FIXED
        return UnitCost(
            forward_ms=forward_ms,
            backward_ms=nothing,
            recompute_ms=nothing,
            collective_ms=np.stack([collective_ms, nothing]),
            padding_ms=np.zeros((2, len(FEATURES))),
            activation_bytes=nothing,
            boundary_bytes=nothing,
            output_bytes=counts.output_bytes,
            output_gradient_bytes=nothing,
            transient_bytes=counts.transient_bytes,
            parameters=counts.parameters,
            trained_parameters=0,
        )
    products = _backward_products(counts, trained=trained, before_trained=before_trained)
    back_sent_bytes = counts.back_collective_bytes + trained * counts.gathered_again_bytes
    back_collective_ms = back_sent_bytes / device.collective_bytes_per_ms
    kept_bytes = counts.kept_bytes
    if not trained and counts.kept_frozen_bytes is not None:
        kept_bytes = counts.kept_frozen_bytes
    accumulated_bytes = _FIXED * trained * counts.parameters * 2 * GRADIENT_BYTES
    backward_ms = (
        products * matmul_ms
        + _BACKWARD_OF_ATTENTION * attention_ms
        + _BACKWARD_OF_PASSES * moved_ms
        + 2 * kernels_ms
        + back_collective_ms
        + accumulated_bytes / device.streamed_bytes_per_ms
    )
    return UnitCost(
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        recompute_ms=forward_ms,
        collective_ms=np.stack([collective_ms, back_collective_ms]),
        padding_ms=np.zeros((2, len(FEATURES))),
        activation_bytes=kept_bytes,
        boundary_bytes=counts.boundary_bytes,
        output_bytes=counts.output_bytes,
        output_gradient_bytes=counts.output_bytes,
        transient_bytes=counts.transient_bytes,
        parameters=counts.parameters,
        trained_parameters=counts.parameters if trained else 0,
    )


def _vision_embed(model: ModelConfig, device: _Device) -> _Counts:
    vision, size = model.vision, device.element_bytes
    patches, patch_values = vision.patches_per_side**2, 3 * vision.patch_size**2
    pixel_bytes = _TILES * patches * patch_values * size
    output_bytes = _TILES * vision.positions_per_item * vision.hidden_size * size
    return _Counts(
        matmul_flops=_TILES * 2 * patches * patch_values * vision.hidden_size,
        attention_flops=0 * _TILES,
        # Pixels in, patches out, then read and written again with the positions added.
        moved_bytes=pixel_bytes + 3 * output_bytes,
        collective_bytes=0 * _TILES,
        back_collective_bytes=0 * _TILES,
        gathered_again_bytes=0 * _TILES,
        kernels=5,
        kept_bytes=pixel_bytes,
        boundary_bytes=pixel_bytes,
        output_bytes=output_bytes,
        transient_bytes=output_bytes,
        # Convolution with bias, class token, position embedding; whole on every tensor rank.
        parameters=vision.hidden_size * (patch_values + 2 + vision.positions_per_item),
        begins_with_weights=True,
    )


def _vision_layer(model: ModelConfig, device: _Device, *, padded: bool = True) -> _Counts:
    vision, t, size = model.vision, device.tensor, device.element_bytes
    h, f, positions = vision.hidden_size, vision.ffn_hidden_size, vision.positions_per_item
    # Heads that the ranks cannot share evenly are padded (25 heads become 28 on 4 ranks).
    a = h // vision.heads * (-(-vision.heads // t) * t) if padded else h
    rows = _TILES * positions
    # Whole: input, both norms' outputs, the middle residual, both outputs that layer scale scales.
    # Divided: q, k, v, attention's output, and the feed-forward before and after GELU.
    normed = 2 * a if vision.qk_norm else 0
    scaled = 0 if vision.layer_scale_init is None else 2 * h
    kept = 4 * h + scaled + (4 * a + 2 * f + normed) / t
    norm = h if vision.normalization == "RMSNorm" else 2 * h
    whole = 2 * norm + scaled + 2 * h  # norms, layer scales, biases of both row-parallel linears
    divided = 4 * h * a + 2 * h * f + f
    divided += (3 * a if vision.qkv_bias else 0) + normed
    # Read and written, whole: 2 norms, and after each branch a bias, a scale and a residual.
    # Divided: q, k, v into their own places, attention's reads and write, q and k norms, GELU.
    whole_passes = 2 * 2 * h + 2 * (2 + 3) * h + 2 * scaled
    moved = whole_passes + (6 * a + 4 * a + 2 * normed + 2 * f) / t
    log_sum_exp_bytes = _FP32_BYTES * (a * vision.heads / h) / t
    output_bytes = rows * h * size
    return _Counts(
        matmul_flops=rows * 2 * (4 * h * a + 2 * h * f) / t,
        attention_flops=rows * 4 * positions * a / t,
        moved_bytes=rows * moved * size,
        # An all-reduce is a reduce-scatter and an all-gather.
        collective_bytes=2 * 2 * device.sent * output_bytes,
        back_collective_bytes=2 * 2 * device.sent * output_bytes,
        gathered_again_bytes=0 * rows,
        kernels=24,
        kept_bytes=rows * (kept * size + log_sum_exp_bytes),
        boundary_bytes=output_bytes,
        output_bytes=output_bytes,
        transient_bytes=rows * (2 * h + 2 * f / t) * size,
        parameters=whole + -(-divided // t),
    )


def _projector(model: ModelConfig, device: _Device) -> _Counts:
    t, size = device.tensor, device.element_bytes
    wide, h = model.vision.projector_input_size, model.language.hidden_size
    rows = _TILES * model.vision.tokens_per_item
    vision_bytes = _TILES * model.vision.positions_per_item * model.vision.hidden_size * size
    output_bytes = rows * h * size
    return _Counts(
        matmul_flops=rows * 2 * (wide * h + h * h) / t,
        attention_flops=0 * rows,
        # Shuffle and norm of the input, then GELU, then the bias.
        moved_bytes=2 * 2 * vision_bytes + rows * (2 * h / t + 2 * h) * size,
        collective_bytes=2 * device.sent * output_bytes,
        # Gradient of the first product's input, which the norm needs.
        back_collective_bytes=2 * device.sent * rows * wide * size,
        gathered_again_bytes=0 * rows,
        kernels=8,
        # Shuffled input and norm's output are whole; before and after GELU are divided.
        kept_bytes=rows * (2 * wide + 2 * h / t) * size,
        kept_frozen_bytes=rows * (wide + h / t) * size,
        boundary_bytes=vision_bytes,
        output_bytes=output_bytes,
        transient_bytes=rows * (wide + 2 * h / t) * size,
        parameters=2 * wide + h + -(-(wide * h + h + h * h) // t),
    )


def _language_embed(model: ModelConfig, device: _Device) -> _Counts:
    h, size = model.language.hidden_size, device.element_bytes
    image_bytes = _TILES * model.vision.tokens_per_item * h * size
    text_bytes = _TOKENS * h * size
    ids_bytes = _TOKENS * _TOKEN_ID_BYTES
    return _Counts(
        matmul_flops=0 * _TOKENS,
        attention_flops=0 * _TOKENS,
        moved_bytes=2 * (image_bytes + text_bytes),
        # All-reduced, and backward is then free; or scattered, and backward gathers.
        collective_bytes=(1 if device.sequence_parallel else 2) * device.sent * text_bytes,
        back_collective_bytes=(1 if device.sequence_parallel else 0) * device.sent * text_bytes,
        gathered_again_bytes=0 * _TOKENS,
        kernels=6,
        kept_bytes=ids_bytes + image_bytes,
        kept_frozen_bytes=ids_bytes + image_bytes,
        boundary_bytes=ids_bytes + image_bytes,
        output_bytes=text_bytes * device.whole,
        transient_bytes=text_bytes,
        parameters=-(-model.language.vocab_size // device.tensor) * h,
    )


def _language_layer(model: ModelConfig, device: _Device) -> _Counts:
    language, t, size = model.language, device.tensor, device.element_bytes
    h, f, whole = language.hidden_size, language.ffn_hidden_size, device.whole
    key_value = 2 * h * language.kv_heads // language.heads
    divided = 2 * h * h + h * key_value + 3 * h * f
    biases = h + key_value if language.qkv_bias else 0
    # Between blocks: input, both norms' outputs, the middle residual. Divided: q, k, v, attention's
    # output, and SwiGLU's gate, value and product.
    kept = 4 * h * whole + (2 * h + key_value + 3 * f) / t
    kept_frozen = 2 * h * whole + (2 * h + key_value + 2 * f) / t
    # Read and written between blocks: 2 norms, 2 residuals. Divided: q, k, v into their own places,
    # rotary embedding of q and k, attention's reads and write, SwiGLU.
    moved = (2 * 2 + 2 * 3) * h * whole
    moved += (2 * (h + key_value) + 2 * (h + key_value / 2) + 2 * h + key_value + 3 * f) / t
    block_bytes = _TOKENS * h * size
    # Gathered and scattered are both blocks' inputs and outputs either way (section 4.2.2).
    collective_bytes = 2 * 2 * device.sent * block_bytes
    return _Counts(
        matmul_flops=_TOKENS * 2 * divided / t,
        attention_flops=_SQUARED * 2 * h / t,
        moved_bytes=_TOKENS * moved * size,
        collective_bytes=collective_bytes,
        back_collective_bytes=collective_bytes,
        gathered_again_bytes=collective_bytes / 2 if device.sequence_parallel else 0 * _TOKENS,
        kernels=20,
        kept_bytes=_TOKENS * (kept * size + _FP32_BYTES * language.heads / t),
        kept_frozen_bytes=_TOKENS * (kept_frozen * size + _FP32_BYTES * language.heads / t),
        boundary_bytes=block_bytes * whole,
        output_bytes=block_bytes * whole,
        transient_bytes=_TOKENS * (2 * h + 3 * f / t) * size,
        parameters=2 * h + -(-(divided + biases) // t),
    )


def _head(model: ModelConfig, device: _Device) -> _Counts:
    """Final norm over all tokens; logits and loss only where there is one."""
    h, size = model.language.hidden_size, device.element_bytes
    vocabulary = -(-model.language.vocab_size // device.tensor)
    hidden_bytes = _TOKENS * h * size * device.whole
    gathered_bytes = _TOKENS * h * size
    gather_bytes = device.sent * gathered_bytes if device.sequence_parallel else 0 * _TOKENS
    reduced_bytes = 2 * device.sent * _LOSS_TOKENS * h * size
    return _Counts(
        matmul_flops=_LOSS_TOKENS * 2 * h * vocabulary,
        attention_flops=0 * _TOKENS,
        # Logits are written and read once, their fp32 softmax is read and written twice.
        moved_bytes=2 * hidden_bytes + _LOSS_TOKENS * vocabulary * (2 * size + 4 * _FP32_BYTES),
        # Backward all-reduces the gradient of what carries loss; or the input is gathered, its
        # gradient scattered, and the input gathered again.
        collective_bytes=gather_bytes,
        back_collective_bytes=gather_bytes if device.sequence_parallel else reduced_bytes,
        gathered_again_bytes=gather_bytes,
        kernels=15,
        # The final norm's input and output, the part of it that carries loss, and the softmax that
        # the loss keeps in fp32.
        kept_bytes=2 * hidden_bytes + _LOSS_TOKENS * (h * size + vocabulary * _FP32_BYTES),
        kept_frozen_bytes=hidden_bytes + _LOSS_TOKENS * vocabulary * _FP32_BYTES,
        boundary_bytes=hidden_bytes,
        output_bytes=0 * _TOKENS,
        # Two fp32 gradients of the logits exist at a time: the loss's and the softmax's.
        transient_bytes=gathered_bytes + _LOSS_TOKENS * (h * size + vocabulary * 2 * _FP32_BYTES),
        parameters=h + vocabulary * h,
    )
