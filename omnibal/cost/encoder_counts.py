"""Counts of tile and clip encoders (h hidden, f feed-forward, t tensor size, a head width)."""

from dataclasses import dataclass

import numpy as np

from omnibal.cost.counts import (
    FIRST_OUTPUT,
    FP32_BYTES,
    SECOND_OUTPUT,
    Attended,
    Counts,
    Device,
    Features,
    Kept,
    Product,
    Working,
    all_reduced,
)
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import ClipsEncoder, EncoderLayers, TilesEncoder
from omnibal.model.units import UnitKind

_SECOND_GELU = "into the second GELU"
LAST_OUTPUT = "last layer's output"
"""Input of a projector that begins with a norm; output of the tower's last layer."""
_SCALED_FEED_FORWARD = "feed-forward's, for its layer scale"
_INTO, _OUT_OF = "into the activation", "out of the activation"


def tiles_embed(tower: TilesEncoder, device: Device, features: Features) -> Counts:
    """Count the embedding of image tiles: convolution to patches, and positions."""
    items, size = features.one(tower.feature), device.element_bytes
    patches, patch_values = tower.patches_per_side**2, 3 * tower.patch_size**2
    pixel_bytes = items * patches * patch_values * size
    output_bytes = items * tower.positions_per_item * tower.hidden_size * size
    return Counts(
        products=(Product(items * patches, patch_values, tower.hidden_size),),
        # Pixels in, patches out, then positions added; in backward, gradients of positions and
        # class token.
        moved_bytes=pixel_bytes + 3 * output_bytes,
        back_moved_bytes=2 * output_bytes,
        kernels=5,
        kept=(Kept("pixels by patch", "", pixel_bytes, for_weights=True),),
        boundary_bytes=pixel_bytes,
        output_bytes=output_bytes,
        working=(
            # Gradients of the positions, then of the patch weight.
            Working(output_bytes, weight=tower.positions_per_item * tower.hidden_size),
            Working(output_bytes, weight=patch_values * tower.hidden_size),
        ),
        # Pixels in the weights' dtype, by patch; product output, with class token, sum.
        forward_working=(Working(2 * pixel_bytes + 3 * output_bytes),),
        # Pixels as read.
        passing_bytes=items * patches * patch_values * FP32_BYTES,
        # Convolution with bias, class token, position embedding; replicated on tensor-parallel
        # ranks.
        parameters=tower.hidden_size * (patch_values + 2 + tower.positions_per_item),
        begins_with_weights=True,
    )


def clips_embed(tower: ClipsEncoder, device: Device, features: Features) -> Counts:
    """Count the embedding of clips: convolutions (width 3, strides 1 and 2), each with GELU."""
    items = features.one(tower.feature)
    h, size, taps = tower.hidden_size, device.element_bytes, 3
    input_bytes = items * tower.frames * tower.mel_bins * size
    middle_bytes = items * tower.frames * h * size
    output_bytes = items * tower.positions_per_item * h * size
    read_bytes, second_gelu = items * tower.frames * tower.mel_bins * FP32_BYTES, (_SECOND_GELU,)
    return Counts(
        products=(
            Product(items * tower.frames, taps * tower.mel_bins, h),
            Product(items * tower.positions_per_item, taps * h, h),
        ),
        # Frames in the weights' dtype, activations, transposition, positions; backward rereads
        # inputs.
        moved_bytes=read_bytes + input_bytes + 2 * middle_bytes + 6 * output_bytes,
        back_moved_bytes=3 * middle_bytes + 3 * output_bytes,
        kernels=7,
        kept=(
            Kept("frames", "aten._to_copy", input_bytes, for_weights=True),
            Kept("into GELU", "conv1", middle_bytes),
            Kept("out of GELU", "aten.gelu", middle_bytes, for_weights=True),
            Kept(_SECOND_GELU, "conv2", output_bytes),
        ),
        boundary_bytes=input_bytes,
        output_bytes=output_bytes,
        working=(
            # Gradients of the second convolution's weight and input; of both sides of GELU.
            Working(middle_bytes + output_bytes, weight=taps * h * h, gone=second_gelu),
            Working(2 * middle_bytes, gone=(*second_gelu, "out of GELU")),
        ),
        forward_working=(
            Working(2 * middle_bytes),
            Working(input_bytes + middle_bytes),
        ),
        # Frames as read.
        passing_bytes=read_bytes,
        # Both convolutions with bias; replicated on tensor-parallel ranks.
        parameters=h * (taps * tower.mel_bins + 1 + taps * h + 1),
        begins_with_weights=True,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerForm:
    """Variations of layers between encoder kinds."""

    head_width: int
    gated: bool = False
    """Whether the feed-forward has a gate."""
    bias: bool = True
    """Whether linears other than the qkv projection have biases."""
    rotates: bool = False
    """Whether q and k are rotated, after their norms if any."""


def encoder_layer(
    tower: EncoderLayers,
    form: LayerForm,
    device: Device,
    rows: np.ndarray,
    pairs: np.ndarray,
    *,
    padded: bool,
) -> Counts:
    """Count a layer.

    Args:
        rows: positions, [features].
        pairs: attended pairs of positions, [features].
        padded: whether heads are padded to a multiple of the tensor size (25 become 28 on 4).
    """
    t, size = device.tensor, device.element_bytes
    h, f = tower.hidden_size, tower.ffn_hidden_size
    a = (-(-tower.heads // t) * t if padded else tower.heads) * form.head_width
    into = (1 + form.gated) * f
    # Norms, layer scales and biases of row-parallel linears are replicated, the rest is divided.
    whole = 2 * norm_parameters(tower) + (2 * h if form.bias else 0)
    whole += 0 if tower.layer_scale_init is None else 2 * h
    divided = 4 * h * a + (into + f) * h + (into if form.bias else 0)
    divided += (3 * a if tower.qkv_bias else 0) + (2 * a if tower.qk_norm else 0)
    hidden_bytes, inner_bytes, width_bytes = (rows * each * size for each in (h, f / t, a / t))
    forward_moved, back_moved = _layer_moved(tower, form, t, a)
    seen = Attended(
        pairs=pairs,
        rows=rows,
        heads=a / form.head_width / t,
        elements=2 * form.head_width,
        causal=False,
    )
    return Counts(
        products=(
            Product(rows, h, 3 * a / t, name="self_attention.linear_qkv", given=FIRST_OUTPUT),
            Product(rows, a / t, h, name="self_attention.linear_proj"),
            Product(rows, h, into / t, name="mlp.linear_fc1", given=SECOND_OUTPUT),
            Product(rows, f / t, h, name="mlp.linear_fc2", given=_OUT_OF),
        ),
        attended=(seen,),
        moved_bytes=rows * forward_moved * size,
        back_moved_bytes=rows * back_moved * size,
        collectives=all_reduced(device, hidden_bytes, hidden_bytes, times=2),
        kernels=12,
        kept=_layer_kept(tower, form, device, rows, a),
        boundary_bytes=hidden_bytes,
        output_bytes=hidden_bytes,
        working=_layer_working(tower, into, device, hidden_bytes, inner_bytes),
        # Between the blocks: gradients of the norm's output and of the sum; with a layer scale also
        # of the layer's output and of the attention block.
        late_working=(
            Working(
                (2 if tower.layer_scale_init is None else 4) * hidden_bytes,
                gone=(_SCALED_FEED_FORWARD, _OUT_OF, _INTO),
                after=2,
            ),
        ),
        # Kept: inputs of the tower and of this layer; norm, attention block, sum and its norm; q, k
        # and v before and after norms and rotation; both sides of the activation; the feed-
        # forward's output.
        forward_working=(
            Working(6 * hidden_bytes),
            Working(3 * hidden_bytes + 6 * width_bytes),
            Working(5 * hidden_bytes + (1 + into / f) * inner_bytes),
        ),
        parameters=whole + -(-divided // t),
    )


def _layer_working(
    tower: EncoderLayers,
    into: int,
    device: Device,
    hidden_bytes: np.ndarray,
    inner_bytes: np.ndarray,
) -> tuple[Working, ...]:
    """Working memory of a layer's backward, which peaks before attention."""
    h, f, t = tower.hidden_size, tower.ffn_hidden_size, device.tensor
    scaled = tower.layer_scale_init is not None
    # The gradient, and with a layer scale also that of the block.
    gradients_bytes = (1 + scaled) * hidden_bytes
    gone, own = (_SCALED_FEED_FORWARD,), int(scaled)  # otherwise it is the residual's gradient
    return (
        *((Working(gradients_bytes),) if scaled else ()),
        # Gradients of the second product, the activation, the first product.
        Working(gradients_bytes + inner_bytes, weight=h * f / t, gone=gone),
        Working(hidden_bytes + (1 + into / f) * inner_bytes, gone=(*gone, _OUT_OF), after=own),
        Working(
            2 * hidden_bytes + into / f * inner_bytes,
            weight=h * into / t,
            gone=(*gone, _OUT_OF, _INTO),
            after=own,
        ),
    )


def _layer_kept(
    tower: EncoderLayers, form: LayerForm, device: Device, rows: np.ndarray, heads_width: int
) -> tuple[Kept, ...]:
    """List the kept activations; tensors between the blocks are replicated on all ranks."""
    t, size = device.tensor, device.element_bytes
    hidden_bytes, width_bytes = rows * tower.hidden_size * size, rows * heads_width / t * size
    inner_bytes, norm_bytes = rows * tower.ffn_hidden_size / t * size, moments_bytes(tower, rows)
    log_sum_exp_bytes = rows * FP32_BYTES * heads_width / form.head_width / t
    add_and_norm, attention = "scaled_add_norm", "self_attention"
    product, product_by = "q, k and v", f"{attention}.linear_qkv"
    normed, normed_by = "normed q and k", f"{attention}.head_norms"
    activation = "bias_gelu"
    if form.rotates:
        product, product_by = "rotated q and k, and v", f"{attention}.split_and_rotate"
        normed, normed_by = "q and k before norms", f"{attention}.norms"
        activation = "swiglu" if form.gated else "bias_gelu"

    lines = [
        Kept("input", "", hidden_bytes),
        Kept(FIRST_OUTPUT, "norm", hidden_bytes, for_weights=True),
        Kept("first norm's moments", "norm", norm_bytes),
        Kept(product, product_by, 3 * width_bytes),
        Kept(
            "attention's output and log-sum-exp",
            f"{attention}.core_attention",
            width_bytes + log_sum_exp_bytes,
        ),
        Kept("middle residual", add_and_norm, hidden_bytes),
        Kept(SECOND_OUTPUT, add_and_norm, hidden_bytes, for_weights=True),
        Kept("second norm's moments", add_and_norm, norm_bytes),
        Kept(_INTO, "mlp.linear_fc1", (1 + form.gated) * inner_bytes),
        Kept(_OUT_OF, activation, inner_bytes, for_weights=True),
    ]
    if tower.qk_norm:  # and the scales of q and k per position
        lines.append(Kept(normed, normed_by, 2 * width_bytes + 2 * rows * FP32_BYTES))
    if tower.layer_scale_init is not None:
        lines += [
            # The fused backward computes the scale's gradient even if it is frozen.
            Kept(
                "attention's block, for its layer scale",
                f"{attention}.linear_proj",
                hidden_bytes,
            ),
            Kept(_SCALED_FEED_FORWARD, "mlp.linear_fc2", hidden_bytes),
        ]
    return tuple(lines)


def norm_parameters(tower: EncoderLayers) -> int:
    """Number of parameters of a norm in the tower."""
    return tower.hidden_size * (1 if tower.normalization == "RMSNorm" else 2)


def moments_bytes(tower: EncoderLayers, rows: np.ndarray) -> np.ndarray:
    """Bytes of a norm's saved moments, [features]."""
    return rows * FP32_BYTES * (1 if tower.normalization == "RMSNorm" else 2)


def items_layer(
    model: ModelConfig,
    tower: TilesEncoder | ClipsEncoder,
    kind: UnitKind,
    device: Device,
    features: Features,
    *,
    padded: bool,
) -> Counts:
    """Count a layer with attention within items, all of one length."""
    rows = features.one(tower.feature) * tower.positions_per_item
    form = LayerForm(head_width=tower.hidden_size // tower.heads)
    return encoder_layer(tower, form, device, rows, rows * tower.positions_per_item, padded=padded)


def _layer_moved(
    tower: EncoderLayers, form: LayerForm, tensor: int, heads_width: int
) -> tuple[float, float]:
    """Elements that fused kernels of a layer read and write per position, forward and backward.

    Replicated between the blocks: the first norm; add and norm; add. Divided: q/k norms and
    rotation (norms over all heads read them again for tensor-parallel sums) and the activation.
    """
    h, f, a, shared = tower.hidden_size, tower.ffn_hidden_size, heads_width, tensor > 1
    if form.rotates:
        of_heads, between = 4 + 4 * tower.qk_norm, 4
        back_of_heads = of_heads + 2
    else:
        of_heads, back_of_heads = (4 + 2 * shared, 8 + 4 * shared) if tower.qk_norm else (0, 6)
        between = 4 + (3 if tower.layer_scale_init is not None else 1)
    activated, back_activated = (3, 5) if form.gated else (2, 3)
    forward = (2 + 4 + 3) * h + (of_heads * a + activated * f) / tensor
    return forward, 2 * between * h + (back_of_heads * a + back_activated * f) / tensor


def encoder_projector(
    tower: TilesEncoder | ClipsEncoder, model: ModelConfig, device: Device, features: Features
) -> Counts:
    """Count pixel shuffle, a norm, and an MLP of two products.

    The norm is of folded tokens for tiles, and of positions before folding for clips.
    """
    size, items = device.element_bytes, features.one(tower.feature)
    rows = items * tower.tokens_per_item
    input_bytes = items * tower.positions_per_item * tower.hidden_size * size
    folded, norm_width = _projector_norm(tower, items, size)
    sizes = tower.projector_input_size, model.language.hidden_size, model.language.hidden_size
    return two_products(
        device, rows, sizes, input_bytes, folded, norm=norm_width, is_reordered=True
    )


def two_products(
    device: Device,
    rows: np.ndarray,
    sizes: tuple[int, int, int],
    input_bytes: np.ndarray,
    folded: tuple[Kept, Kept, Kept],
    *,
    norm: int,
    is_reordered: bool = False,
) -> Counts:
    """Count a norm and the two products of folded positions, with GELU between them.

    Args:
        rows: output tokens, [features].
        sizes: widths into the first product, between both and out.
        input_bytes: output of the tower, [features].
        folded: activations kept before the first product. The second line is its input.
        norm: parameters of the norm.
        is_reordered: whether positions are permuted for folding.
    """
    t, size, (wide, inner, h) = device.tensor, device.element_bytes, sizes
    output_bytes, inner_bytes, wide_bytes = (rows * each * size for each in (h, inner / t, wide))
    in_gelu, given = ("into GELU", "out of GELU"), folded[1].what
    return Counts(
        products=(
            Product(rows, wide, inner / t, name="linear_fc1", given=given),
            Product(rows, inner / t, h, name="linear_fc2", given="out of GELU"),
        ),
        # Permutation and norm of the input, GELU, bias; backward also reads the norm's input.
        moved_bytes=(4 if is_reordered else 2) * input_bytes + 2 * inner_bytes + 2 * output_bytes,
        back_moved_bytes=(5 if is_reordered else 3) * input_bytes + 3 * inner_bytes + output_bytes,
        # In backward, the gradient of the first product's input, which the norm needs.
        collectives=all_reduced(device, output_bytes, wide_bytes),
        kernels=8,
        kept=(
            *folded,
            Kept("into GELU", "linear_fc1", inner_bytes),
            Kept("out of GELU", "bias_gelu", inner_bytes, for_weights=True),
        ),
        boundary_bytes=input_bytes,
        output_bytes=output_bytes,
        working=(
            # Gradients of the second product, the first, the norm, and of all positions.
            Working(output_bytes + inner_bytes, weight=inner * h / t),
            Working(wide_bytes + inner_bytes, weight=wide * inner / t, gone=in_gelu, after=1),
            Working(wide_bytes + input_bytes, gone=(*in_gelu, given), after=2),
        ),
        # The tower's input and output are kept.
        forward_working=(
            Working(
                2 * input_bytes
                + (2 * wide_bytes + inner_bytes if is_reordered else 2 * inner_bytes)
            ),
        ),
        # The second product's bias is replicated.
        parameters=norm + h + -(-(wide * inner + inner + inner * h) // t),
    )


def _projector_norm(
    tower: TilesEncoder | ClipsEncoder, items: np.ndarray, element_bytes: int
) -> tuple[tuple[Kept, Kept, Kept], int]:
    """Activations a projector keeps before its first product, and parameters of its norm."""
    wide = tower.projector_input_size
    input_bytes = items * tower.tokens_per_item * wide * element_bytes
    if isinstance(tower, TilesEncoder):
        norm_bytes = items * tower.tokens_per_item * 2 * FP32_BYTES
        return (
            Kept("shuffled input", "", input_bytes),
            Kept("norm's output", "norm", input_bytes, for_weights=True),
            Kept("norm's moments", "norm", norm_bytes),
        ), 2 * wide
    norm_bytes = moments_bytes(tower, items * tower.positions_per_item)
    return (
        Kept(LAST_OUTPUT, "", input_bytes),
        Kept("stacked positions", "", input_bytes, for_weights=True),
        Kept("norm's moments", "norm.norm", norm_bytes),
    ), norm_parameters(tower)
