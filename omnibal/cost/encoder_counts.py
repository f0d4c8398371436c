"""Counts of encoders of tiles and clips: embeddings by kind of input, layers and projectors.

Those of images at their native resolution are in `omnibal.cost.image_counts`.

Letters: h hidden, f feed-forward, t tensor size, a width of the heads with padding.
"""

import numpy as np

from omnibal.cost.counts import (
    FP32_BYTES,
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

_SCALED_FEED_FORWARD = "feed-forward's, for its layer scale"
_SECOND_GELU = "into the second GELU"
LAST_OUTPUT = "last layer's output"
"""What a norm before the projector's stacking keeps; the tower's last layer makes it."""


def tiles_embed(tower: TilesEncoder, device: Device, features: Features) -> Counts:
    """Count the embedding of image tiles: patches by a convolution, and their positions."""
    items, size = features.one(tower.feature), device.element_bytes
    patches, patch_values = tower.patches_per_side**2, 3 * tower.patch_size**2
    pixel_bytes = items * patches * patch_values * size
    output_bytes = items * tower.positions_per_item * tower.hidden_size * size
    return Counts(
        products=(Product(rows=items * patches, inner=patch_values, outer=tower.hidden_size),),
        # Pixels in, patches out, then read and written again with the positions added; backward,
        # gradients of positions and class token.
        moved_bytes=pixel_bytes + 3 * output_bytes,
        back_moved_bytes=2 * output_bytes,
        kernels=5,
        kept=(Kept(what="pixels by patch", made_by="", bytes=pixel_bytes, for_weights=True),),
        boundary_bytes=pixel_bytes,
        output_bytes=output_bytes,
        working=(
            # Gradients of the positions; then of the patches' weight.
            Working(bytes=output_bytes, weight=tower.positions_per_item * tower.hidden_size),
            Working(bytes=output_bytes, weight=patch_values * tower.hidden_size),
        ),
        # Pixels in the type of the weights and by patch; out of the product, with class token, sum.
        forward_working=(Working(bytes=2 * pixel_bytes + 3 * output_bytes),),
        # Pixels as they are read.
        passing_bytes=items * patches * patch_values * FP32_BYTES,
        # Convolution with bias, class token, position embedding; whole on every tensor rank.
        parameters=tower.hidden_size * (patch_values + 2 + tower.positions_per_item),
        begins_with_weights=True,
    )


def clips_embed(tower: ClipsEncoder, device: Device, features: Features) -> Counts:
    """Count the embedding of clips: two convolutions of width 3, each with GELU, and positions.

    The second convolution has a stride of 2, and positions are fixed.
    """
    items = features.one(tower.feature)
    h, size, taps = tower.hidden_size, device.element_bytes, 3
    input_bytes = items * tower.frames * tower.mel_bins * size
    middle_bytes = items * tower.frames * h * size
    output_bytes = items * tower.positions_per_item * h * size
    read_bytes, second_gelu = items * tower.frames * tower.mel_bins * FP32_BYTES, (_SECOND_GELU,)
    return Counts(
        products=(
            Product(rows=items * tower.frames, inner=taps * tower.mel_bins, outer=h),
            Product(rows=items * tower.positions_per_item, inner=taps * h, outer=h),
        ),
        # Frames into the type of the weights, both activations, laid out anew, positions added;
        # backward the activations read their inputs too.
        moved_bytes=read_bytes + input_bytes + 2 * middle_bytes + 6 * output_bytes,
        back_moved_bytes=3 * middle_bytes + 3 * output_bytes,
        kernels=7,
        kept=(
            Kept(what="frames", made_by="aten._to_copy", bytes=input_bytes, for_weights=True),
            Kept(what="into GELU", made_by="conv1", bytes=middle_bytes),
            Kept(what="out of GELU", made_by="aten.gelu", bytes=middle_bytes, for_weights=True),
            Kept(what=_SECOND_GELU, made_by="conv2", bytes=output_bytes),
        ),
        boundary_bytes=input_bytes,
        output_bytes=output_bytes,
        working=(
            # Gradients of the second convolution's weight and input; of both sides of GELU.
            Working(bytes=middle_bytes + output_bytes, weight=taps * h * h, gone=second_gelu),
            Working(bytes=2 * middle_bytes, gone=(*second_gelu, "out of GELU")),
        ),
        forward_working=(
            Working(bytes=2 * middle_bytes),
            Working(bytes=input_bytes + middle_bytes),
        ),
        # Frames as they are read.
        passing_bytes=read_bytes,
        # Both convolutions with bias; whole on every tensor rank.
        parameters=h * (taps * tower.mel_bins + 1 + taps * h + 1),
        begins_with_weights=True,
    )


def encoder_layer(
    tower: EncoderLayers,
    device: Device,
    items: np.ndarray,
    positions: int,
    *,
    padded: bool = True,
) -> Counts:
    """Count a layer over `items` sequences of `positions` each."""
    t, size = device.tensor, device.element_bytes
    h, f = tower.hidden_size, tower.ffn_hidden_size
    # Heads that the ranks cannot share evenly are padded (25 heads become 28 on 4 ranks).
    a = h // tower.heads * (-(-tower.heads // t) * t) if padded else h
    rows = items * positions
    normed = 2 * a if tower.qk_norm else 0
    scaled = 0 if tower.layer_scale_init is None else 2 * h
    norm = h if tower.normalization == "RMSNorm" else 2 * h
    whole = 2 * norm + scaled + 2 * h  # norms, layer scales, biases of both row-parallel linears
    divided = 4 * h * a + 2 * h * f + f
    divided += (3 * a if tower.qkv_bias else 0) + normed
    forward_moved, backward_moved = _layer_moved(tower, t, a)
    output_bytes, inner_bytes, width_bytes = (rows * each * size for each in (h, f / t, a / t))
    head_width = h // tower.heads
    seen = Attended(
        pairs=rows * positions,
        rows=rows,
        heads=a / head_width / t,
        elements=2 * head_width,
        causal=False,
    )
    return Counts(
        products=(
            Product(rows=rows, inner=h, outer=3 * a / t),
            Product(rows=rows, inner=a / t, outer=h),
            Product(rows=rows, inner=h, outer=f / t),
            Product(rows=rows, inner=f / t, outer=h),
        ),
        attended=(seen,),
        moved_bytes=rows * forward_moved * size,
        back_moved_bytes=rows * backward_moved * size,
        collectives=all_reduced(device, output_bytes, output_bytes, times=2),
        kernels=12,
        kept=_layer_kept(tower, device, rows, a),
        boundary_bytes=output_bytes,
        output_bytes=output_bytes,
        working=_layer_working(tower, device, output_bytes, inner_bytes),
        # The tower's input, and this layer's, stay. Besides, its middle: norm, attention's block,
        # the sum and the norm of it; q, k and v before and after their norms; both sides of GELU
        # and the feed-forward's output.
        forward_working=(
            Working(bytes=6 * output_bytes),
            Working(bytes=3 * output_bytes + 6 * width_bytes),
            Working(bytes=5 * output_bytes + 2 * inner_bytes),
        ),
        parameters=whole + -(-divided // t),
    )


def _layer_working(
    tower: EncoderLayers, device: Device, hidden_bytes: np.ndarray, inner_bytes: np.ndarray
) -> tuple[Working, ...]:
    """Moments of a layer's backward; where they are largest it has not come to the attention.

    Args:
        hidden_bytes: of a tensor between the blocks, [features]; `inner_bytes` of one inside the
            feed-forward.
    """
    weight = tower.hidden_size * tower.ffn_hidden_size / device.tensor
    scaled = tower.layer_scale_init is not None
    # The gradient, and where there is a layer scale that of the block besides.
    gradients_bytes = (1 + scaled) * hidden_bytes
    gone: tuple[str, ...] = (_SCALED_FEED_FORWARD,)
    return (
        Working(bytes=gradients_bytes),
        # The second product's gradients; GELU's; the first product's.
        Working(bytes=gradients_bytes + inner_bytes, weight=weight, gone=gone),
        Working(bytes=hidden_bytes + 2 * inner_bytes, gone=(*gone, "out of GELU")),
        Working(
            bytes=2 * hidden_bytes + inner_bytes,
            weight=weight,
            gone=(*gone, "out of GELU", "into GELU"),
        ),
    )


def _layer_moved(tower: EncoderLayers, tensor: int, heads_width: int) -> tuple[float, float]:
    """Elements that fused kernels of a layer read and write per position, forward and backward.

    Between the blocks, whole: the first norm; an add with the norm after it; an add. Backward reads
    each norm's input and the residual's gradient with the norm's. Divided: norms of q and k, for
    whose sums tensor-parallel ranks read them once more, and GELU; without such norms, backward
    puts the gradients of q, k and v together.
    """
    h, f, a = tower.hidden_size, tower.ffn_hidden_size, heads_width
    shared = tensor > 1
    norms, back_norms = (4 + 2 * shared, 8 + 4 * shared) if tower.qk_norm else (0, 6)
    scale = 3 if tower.layer_scale_init is not None else 1
    forward = (2 + 4 + 3) * h + (norms * a + 2 * f) / tensor
    return forward, 2 * (4 + scale) * h + (back_norms * a + 3 * f) / tensor


def _layer_kept(
    tower: EncoderLayers, device: Device, rows: np.ndarray, heads_width: int
) -> tuple[Kept, ...]:
    """List what a layer keeps; what stands between its two blocks is whole on every rank.

    Args:
        rows: positions of all items, [features].
        heads_width: of all attention heads, with padding.
    """
    t, size = device.tensor, device.element_bytes
    h, f, heads = tower.hidden_size, tower.ffn_hidden_size, heads_width * tower.heads
    hidden_bytes, width_bytes = rows * h * size, rows * heads_width / t * size
    moments_bytes = rows * FP32_BYTES * (1 if tower.normalization == "RMSNorm" else 2)
    log_sum_exp_bytes = rows * FP32_BYTES * heads / tower.hidden_size / t
    add_and_norm = "scaled_add_norm"
    lines = [
        Kept(what="input", made_by="", bytes=hidden_bytes),
        Kept(what="first norm's output", made_by="norm", bytes=hidden_bytes, for_weights=True),
        Kept(what="first norm's moments", made_by="norm", bytes=moments_bytes),
        Kept(what="q, k and v", made_by="self_attention.linear_qkv", bytes=3 * width_bytes),
        Kept(
            what="attention's output and log-sum-exp",
            made_by="self_attention.core_attention",
            bytes=width_bytes + log_sum_exp_bytes,
        ),
        Kept(what="middle residual", made_by=add_and_norm, bytes=hidden_bytes),
        Kept(
            what="second norm's output", made_by=add_and_norm, bytes=hidden_bytes, for_weights=True
        ),
        Kept(what="second norm's moments", made_by=add_and_norm, bytes=moments_bytes),
        Kept(what="into GELU", made_by="mlp.linear_fc1", bytes=rows * f / t * size),
        Kept(what="out of GELU", made_by="bias_gelu", bytes=rows * f / t * size, for_weights=True),
    ]
    if tower.qk_norm:
        # Of each position the scales of q and of k.
        norms_bytes = 2 * width_bytes + 2 * rows * FP32_BYTES
        lines.append(
            Kept(what="normed q and k", made_by="self_attention.head_norms", bytes=norms_bytes)
        )
    if tower.layer_scale_init is not None:
        lines += [
            Kept(what=what, made_by=module, bytes=hidden_bytes, for_weights=True)
            for what, module in (
                ("attention's block, for its layer scale", "self_attention.linear_proj"),
                (_SCALED_FEED_FORWARD, "mlp.linear_fc2"),
            )
        ]
    return tuple(lines)


def encoder_projector(
    tower: TilesEncoder | ClipsEncoder, model: ModelConfig, device: Device, features: Features
) -> Counts:
    """Count neighbouring positions folded into one token, a norm, and an MLP of two products.

    The norm is of the folded token for tiles, and of every position, before folding, for clips.
    """
    t, size, items = device.tensor, device.element_bytes, features.one(tower.feature)
    wide, h = tower.projector_input_size, model.language.hidden_size
    rows = items * tower.tokens_per_item
    input_bytes = items * tower.positions_per_item * tower.hidden_size * size
    output_bytes, narrow_bytes, wide_bytes = (rows * each * size for each in (h, h / t, wide))
    in_gelu = ("into GELU", "out of GELU")
    folded, norm_width = _projector_norm(tower, items, size)
    return Counts(
        products=(
            Product(rows=rows, inner=wide, outer=h / t),
            Product(rows=rows, inner=h / t, outer=h),
        ),
        # Shuffle and norm of the input, GELU, then the bias; backward the norm reads its input too.
        moved_bytes=2 * 2 * input_bytes + rows * (2 * h / t + 2 * h) * size,
        back_moved_bytes=(2 + 3) * input_bytes + rows * (3 * h / t + h) * size,
        # Backward, the gradient of the first product's input, which the norm needs.
        collectives=all_reduced(device, output_bytes, wide_bytes),
        kernels=8,
        kept=(
            *folded,
            Kept(what="into GELU", made_by="linear_fc1", bytes=rows * h / t * size),
            Kept(
                what="out of GELU", made_by="bias_gelu", bytes=rows * h / t * size, for_weights=True
            ),
        ),
        boundary_bytes=input_bytes,
        output_bytes=output_bytes,
        working=(
            # The second product's gradients; the first's; the norm's, and that of all positions.
            Working(bytes=output_bytes + narrow_bytes, weight=h * h / t),
            Working(bytes=wide_bytes + narrow_bytes, weight=wide * h / t, gone=in_gelu),
            Working(bytes=wide_bytes + input_bytes, gone=(*in_gelu, folded[1].what)),
        ),
        # The tower's input and output stay.
        forward_working=(Working(bytes=2 * input_bytes + 2 * wide_bytes + narrow_bytes),),
        parameters=norm_width + h + -(-(wide * h + h + h * h) // t),
    )


def _projector_norm(
    tower: TilesEncoder | ClipsEncoder, items: np.ndarray, element_bytes: int
) -> tuple[tuple[Kept, Kept, Kept], int]:
    """What a projector keeps before its first product, and the parameters of its norm."""
    wide = tower.projector_input_size
    input_bytes = items * tower.tokens_per_item * wide * element_bytes
    if isinstance(tower, TilesEncoder):
        moments_bytes = items * tower.tokens_per_item * 2 * FP32_BYTES
        return (
            Kept(what="shuffled input", made_by="", bytes=input_bytes),
            Kept(what="norm's output", made_by="norm", bytes=input_bytes, for_weights=True),
            Kept(what="norm's moments", made_by="norm", bytes=moments_bytes),
        ), 2 * wide
    vectors = 1 if tower.normalization == "RMSNorm" else 2
    moments_bytes = items * tower.positions_per_item * vectors * FP32_BYTES
    return (
        Kept(what=LAST_OUTPUT, made_by="", bytes=input_bytes),
        Kept(what="stacked positions", made_by="", bytes=input_bytes, for_weights=True),
        Kept(what="norm's moments", made_by="norm.norm", bytes=moments_bytes),
    ), vectors * tower.hidden_size
