"""Costs by counting operations and bytes against a cluster's data-sheet figures.

Operations: Narayanan et al. 2021 (Megatron-LM, arXiv 2104.04473, appendix): a layer of hidden size
h does 24 s h^2 + 4 s^2 h per sequence of s; generalised here to grouped-query attention, SwiGLU and
any feed-forward size. Causal attention does half of the squared term. Backward is twice forward.

Activations: Korthikanti et al. 2022 (arXiv 2205.05198, section 4): 34 s h bytes per layer in 16 bit
besides attention's squared term; here without dropout masks (32 s h), with flash attention (nothing
quadratic, one fp32 log-sum-exp per head), plus what layer scale and q/k norms keep. Tensors between
the parallel blocks are whole on every tensor-parallel rank, those inside are divided.

Not counted: tensor-parallel collectives and element-wise kernels of layers, both of which
`matmul_efficiency` has to cover, and rows of padding in the vocabulary.

Letters: h hidden, f feed-forward, P positions per tile, T language tokens per tile.
"""

from dataclasses import dataclass

import numpy as np

from omnibal.config import ClusterConfig, ModelConfig, Precision
from omnibal.cost.model import CostModel, Unit, UnitCost
from omnibal.plan import Parallel

ELEMENT_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2}
GRADIENT_BYTES = 4
"""Megatron accumulates gradients in fp32 in either precision."""
OPTIMIZER_BYTES: dict[Precision, int] = {"fp32": 8, "bf16": 12}
"""Adam's two moments, and in bf16 the fp32 weights (ZeRO, arXiv 1910.02054, section 3.1)."""

_FIXED, _TILES, _TOKENS, _SQUARED = np.eye(4)
_TOKEN_ID_BYTES = 8
_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class _Device:
    flops_per_ms: float
    bytes_per_ms: float
    tensor: int
    element_bytes: int


def analytic_cost(
    model: ModelConfig, cluster: ClusterConfig, parallel: Parallel, precision: Precision
) -> CostModel:
    """Cost of every unit on one device of `cluster` under the given parallel sizes."""
    element_bytes = ELEMENT_BYTES[precision]
    state_bytes = element_bytes + GRADIENT_BYTES + OPTIMIZER_BYTES[precision]
    bytes_per_ms = cluster.memory_gb_per_s * 1e6
    device = _Device(
        flops_per_ms=cluster.peak_tflops[precision] * 1e9 * cluster.matmul_efficiency,
        bytes_per_ms=bytes_per_ms,
        tensor=parallel.tensor,
        element_bytes=element_bytes,
    )
    return CostModel(
        units={
            Unit.VISION_EMBED: _vision_embed(model, device),
            Unit.VISION_LAYER: _vision_layer(model, device),
            Unit.PROJECTOR: _projector(model, device),
            Unit.LANGUAGE_EMBED: _language_embed(model, device),
            Unit.LANGUAGE_LAYER: _language_layer(model, device),
            Unit.HEAD: _head(model, device),
        },
        weight_bytes_per_parameter=element_bytes,
        gradient_bytes_per_parameter=GRADIENT_BYTES,
        optimizer_bytes_per_parameter=OPTIMIZER_BYTES[precision] / parallel.data,
        optimizer_ms_fixed=0.0,
        # Weight, gradient and state are read and written once, each rank its own share.
        optimizer_ms_per_parameter=2 * state_bytes / bytes_per_ms / parallel.data,
        link_latency_ms=cluster.link_latency_us / 1e3,
        link_ms_per_byte=_link_ms_per_byte(cluster, parallel.world_size),
        gradient_reduction_ms_per_parameter=_gradient_reduction_ms(cluster, parallel, precision),
        source=f"analytic:{cluster.name}",
    )


def _link_ms_per_byte(cluster: ClusterConfig, consecutive_ranks: int) -> float:
    """Of a group that spans so many consecutive ranks: one node's links, or the network's."""
    within_node = consecutive_ranks <= cluster.gpus_per_node
    rate = cluster.intra_node_gb_per_s if within_node else cluster.inter_node_gb_per_s
    return 1 / (rate * 1e6)


def _gradient_reduction_ms(
    cluster: ClusterConfig, parallel: Parallel, precision: Precision
) -> float:
    """Ring reduce-scatter of the gradients and all-gather of the weights, per parameter.

    A ring sends (d - 1) / d of the buffer. Megatron numbers ranks tensor first, then data.
    """
    share = (parallel.data - 1) / parallel.data
    sent_bytes = share * (GRADIENT_BYTES + ELEMENT_BYTES[precision])
    return sent_bytes * _link_ms_per_byte(cluster, parallel.tensor * parallel.data)


def _unit_cost(
    device: _Device,
    *,
    flops: np.ndarray,
    moved_bytes: np.ndarray,
    activation_bytes: np.ndarray,
    boundary_bytes: np.ndarray,
    output_bytes: np.ndarray,
    transient_bytes: np.ndarray,
    parameters: int,
) -> UnitCost:
    """`flops` and `moved_bytes` are of one forward pass on this device."""
    forward_ms = flops / device.flops_per_ms + moved_bytes / device.bytes_per_ms
    return UnitCost(
        forward_ms=forward_ms,
        backward_ms=2 * forward_ms,
        activation_bytes=activation_bytes,
        boundary_bytes=boundary_bytes,
        output_bytes=output_bytes,
        transient_bytes=transient_bytes,
        parameters=parameters,
    )


def _vision_embed(model: ModelConfig, device: _Device) -> UnitCost:
    vision, size = model.vision, device.element_bytes
    patches, patch_values = vision.patches_per_side**2, 3 * vision.patch_size**2
    pixel_bytes = _TILES * patches * patch_values * size
    output_bytes = _TILES * vision.positions_per_tile * vision.hidden_size * size
    return _unit_cost(
        device,
        flops=_TILES * 2 * patches * patch_values * vision.hidden_size,
        # Pixels in, patches out, then read and written again with the positions added.
        moved_bytes=pixel_bytes + 3 * output_bytes,
        activation_bytes=pixel_bytes,
        boundary_bytes=pixel_bytes,
        output_bytes=output_bytes,
        transient_bytes=output_bytes,
        # Convolution with bias, class token, position embedding; whole on every tensor rank.
        parameters=vision.hidden_size * (patch_values + 2 + vision.positions_per_tile),
    )


def _vision_layer(model: ModelConfig, device: _Device) -> UnitCost:
    vision, t, size = model.vision, device.tensor, device.element_bytes
    h, f, positions = vision.hidden_size, vision.ffn_hidden_size, vision.positions_per_tile
    rows = _TILES * positions
    # Whole: input, both norms' outputs, the middle residual, both outputs that layer scale scales.
    # Divided: q, k, v, attention's output, and the feed-forward before and after GELU.
    kept = 6 * h + (4 * h + 2 * f + (2 * h if vision.qk_norm else 0)) / t
    norm = h if vision.normalization == "RMSNorm" else 2 * h
    whole = 2 * norm + 2 * h + 2 * h  # norms, layer scales, biases of the two row-parallel linears
    divided = 4 * h * h + 2 * h * f + f
    divided += (3 * h if vision.qkv_bias else 0) + (2 * h if vision.qk_norm else 0)
    return _unit_cost(
        device,
        flops=rows * (2 * (4 * h * h + 2 * h * f) + 4 * positions * h) / t,
        moved_bytes=0 * rows,
        activation_bytes=rows * (kept * size + _FP32_BYTES * vision.heads / t),
        boundary_bytes=rows * h * size,
        output_bytes=rows * h * size,
        transient_bytes=rows * (2 * h + 2 * f / t) * size,
        parameters=whole + -(-divided // t),
    )


def _projector(model: ModelConfig, device: _Device) -> UnitCost:
    t, size = device.tensor, device.element_bytes
    wide, h = model.projector_input_size, model.language.hidden_size
    rows = _TILES * model.tokens_per_tile
    vision_bytes = _TILES * model.vision.positions_per_tile * model.vision.hidden_size * size
    return _unit_cost(
        device,
        flops=rows * 2 * (wide * h + h * h) / t,
        moved_bytes=2 * vision_bytes,
        # Shuffled input and norm's output are whole; before and after GELU are divided.
        activation_bytes=rows * (2 * wide + 2 * h / t) * size,
        boundary_bytes=vision_bytes,
        output_bytes=rows * h * size,
        transient_bytes=rows * (wide + 2 * h / t) * size,
        parameters=2 * wide + h + -(-(wide * h + h + h * h) // t),
    )


def _language_embed(model: ModelConfig, device: _Device) -> UnitCost:
    h, size = model.language.hidden_size, device.element_bytes
    image_bytes = _TILES * model.tokens_per_tile * h * size
    text_bytes = _TOKENS * h * size
    return _unit_cost(
        device,
        flops=0 * _TOKENS,
        moved_bytes=2 * (image_bytes + text_bytes),
        activation_bytes=_TOKENS * _TOKEN_ID_BYTES + image_bytes,
        boundary_bytes=_TOKENS * _TOKEN_ID_BYTES + image_bytes,
        output_bytes=text_bytes,
        transient_bytes=text_bytes,
        parameters=-(-model.language.vocab_size // device.tensor) * h,
    )


def _language_layer(model: ModelConfig, device: _Device) -> UnitCost:
    language, t, size = model.language, device.tensor, device.element_bytes
    h, f = language.hidden_size, language.ffn_hidden_size
    key_value = 2 * h * language.kv_heads // language.heads
    divided = 2 * h * h + h * key_value + 3 * h * f
    # Whole: input, both norms' outputs, the middle residual. Divided: q, k, v, attention's output,
    # and SwiGLU's gate, value and product.
    kept = 4 * h + (2 * h + key_value + 3 * f) / t
    return _unit_cost(
        device,
        flops=(_TOKENS * 2 * divided + _SQUARED * 2 * h) / t,
        moved_bytes=0 * _TOKENS,
        activation_bytes=_TOKENS * (kept * size + _FP32_BYTES * language.heads / t),
        boundary_bytes=_TOKENS * h * size,
        output_bytes=_TOKENS * h * size,
        transient_bytes=_TOKENS * (2 * h + 3 * f / t) * size,
        parameters=2 * h + -(-divided // t),
    )


def _head(model: ModelConfig, device: _Device) -> UnitCost:
    h, size = model.language.hidden_size, device.element_bytes
    vocabulary = -(-model.language.vocab_size // device.tensor)
    return _unit_cost(
        device,
        flops=_TOKENS * 2 * h * vocabulary,
        # Logits are written and read once, their fp32 softmax is read and written twice.
        moved_bytes=_TOKENS * vocabulary * (2 * size + 4 * _FP32_BYTES),
        # The final norm's input and output, and the softmax that the loss keeps in fp32.
        activation_bytes=_TOKENS * (2 * h * size + vocabulary * _FP32_BYTES),
        boundary_bytes=_TOKENS * h * size,
        output_bytes=0 * _TOKENS,
        transient_bytes=_TOKENS * (h + vocabulary) * size,
        parameters=h + vocabulary * h,
    )
