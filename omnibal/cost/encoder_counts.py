"""Counts of encoders: their embeddings by kind of input, and the layers and projector of all.

Letters: h hidden, f feed-forward, t tensor size, a width of the heads with padding.
"""

import numpy as np

from omnibal.config import ModelConfig
from omnibal.cost.counts import FP32_BYTES, Counts, Device, Features, Product
from omnibal.encoders import ClipsEncoder, Encoder, EncoderLayers, TilesEncoder


def encoder_embed(tower: Encoder, device: Device, features: Features) -> Counts:
    """Count the input embedding of an encoder."""
    items = features.one(tower.feature)
    match tower:
        case TilesEncoder():
            return _tiles_embed(tower, device, items)
        case ClipsEncoder():
            return _clips_embed(tower, device, items)


def _tiles_embed(tower: TilesEncoder, device: Device, items: np.ndarray) -> Counts:
    size = device.element_bytes
    patches, patch_values = tower.patches_per_side**2, 3 * tower.patch_size**2
    pixel_bytes = items * patches * patch_values * size
    output_bytes = items * tower.positions_per_item * tower.hidden_size * size
    return Counts(
        products=(Product(rows=items * patches, inner=patch_values, outer=tower.hidden_size),),
        attention_flops=0 * items,
        # Pixels in, patches out, then read and written again with the positions added.
        moved_bytes=pixel_bytes + 3 * output_bytes,
        collective_bytes=0 * items,
        back_collective_bytes=0 * items,
        gathered_again_bytes=0 * items,
        kernels=5,
        kept_bytes=pixel_bytes,
        boundary_bytes=pixel_bytes,
        output_bytes=output_bytes,
        transient_bytes=output_bytes,
        # Convolution with bias, class token, position embedding; whole on every tensor rank.
        parameters=tower.hidden_size * (patch_values + 2 + tower.positions_per_item),
        begins_with_weights=True,
    )


def _clips_embed(tower: ClipsEncoder, device: Device, items: np.ndarray) -> Counts:
    """Two convolutions of width 3, the second of stride 2, each with GELU; fixed positions."""
    h, size, taps = tower.hidden_size, device.element_bytes, 3
    input_bytes = items * tower.frames * tower.mel_bins * size
    middle_bytes = items * tower.frames * h * size
    output_bytes = items * tower.positions_per_item * h * size
    return Counts(
        products=(
            Product(rows=items * tower.frames, inner=taps * tower.mel_bins, outer=h),
            Product(rows=items * tower.positions_per_item, inner=taps * h, outer=h),
        ),
        attention_flops=0 * items,
        # In and out of both convolutions and both activations, then positions are added.
        moved_bytes=input_bytes + 4 * middle_bytes + 5 * output_bytes,
        collective_bytes=0 * items,
        back_collective_bytes=0 * items,
        gathered_again_bytes=0 * items,
        kernels=9,
        # The frames, and what goes into each activation and comes out of the first.
        kept_bytes=input_bytes + 2 * middle_bytes + output_bytes,
        boundary_bytes=input_bytes,
        output_bytes=output_bytes,
        transient_bytes=middle_bytes,
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
    # Whole: input, both norms' outputs, the middle residual, both outputs that layer scale scales.
    # Divided: q, k, v, attention's output, and the feed-forward before and after GELU.
    normed = 2 * a if tower.qk_norm else 0
    scaled = 0 if tower.layer_scale_init is None else 2 * h
    kept = 4 * h + scaled + (4 * a + 2 * f + normed) / t
    norm = h if tower.normalization == "RMSNorm" else 2 * h
    whole = 2 * norm + scaled + 2 * h  # norms, layer scales, biases of both row-parallel linears
    divided = 4 * h * a + 2 * h * f + f
    divided += (3 * a if tower.qkv_bias else 0) + normed
    # Read and written, whole: 2 norms, and after each branch a bias, a scale and a residual.
    # Divided: q, k, v into their own places, attention's reads and write, q and k norms, GELU.
    whole_passes = 2 * 2 * h + 2 * (2 + 3) * h + 2 * scaled
    moved = whole_passes + (6 * a + 4 * a + 2 * normed + 2 * f) / t
    log_sum_exp_bytes = FP32_BYTES * (a * tower.heads / h) / t
    output_bytes = rows * h * size
    return Counts(
        products=(
            Product(rows=rows, inner=h, outer=3 * a / t),
            Product(rows=rows, inner=a / t, outer=h),
            Product(rows=rows, inner=h, outer=f / t),
            Product(rows=rows, inner=f / t, outer=h),
        ),
        attention_flops=rows * 4 * positions * a / t,
        moved_bytes=rows * moved * size,
        # An all-reduce is a reduce-scatter and an all-gather.
        collective_bytes=2 * 2 * device.sent * output_bytes,
        back_collective_bytes=2 * 2 * device.sent * output_bytes,
        gathered_again_bytes=0 * rows,
        passes=2 * 2,
        back_passes=2 * 2,
        kernels=24,
        kept_bytes=rows * (kept * size + log_sum_exp_bytes),
        boundary_bytes=output_bytes,
        output_bytes=output_bytes,
        transient_bytes=rows * (2 * h + 2 * f / t) * size,
        parameters=whole + -(-divided // t),
    )


def encoder_projector(
    tower: Encoder, model: ModelConfig, device: Device, features: Features
) -> Counts:
    """Count neighbouring positions folded into one token, a norm, and an MLP of two products."""
    t, size, items = device.tensor, device.element_bytes, features.one(tower.feature)
    wide, h = tower.projector_input_size, model.language.hidden_size
    rows = items * tower.tokens_per_item
    input_bytes = items * tower.positions_per_item * tower.hidden_size * size
    output_bytes = rows * h * size
    return Counts(
        products=(
            Product(rows=rows, inner=wide, outer=h / t),
            Product(rows=rows, inner=h / t, outer=h),
        ),
        attention_flops=0 * rows,
        # Shuffle and norm of the input, then GELU, then the bias.
        moved_bytes=2 * 2 * input_bytes + rows * (2 * h / t + 2 * h) * size,
        collective_bytes=2 * device.sent * output_bytes,
        # Gradient of the first product's input, which the norm needs.
        back_collective_bytes=2 * device.sent * rows * wide * size,
        gathered_again_bytes=0 * rows,
        passes=2,
        back_passes=2,
        kernels=8,
        # Shuffled input and norm's output are whole; before and after GELU are divided.
        kept_bytes=rows * (2 * wide + 2 * h / t) * size,
        kept_frozen_bytes=rows * (wide + h / t) * size,
        boundary_bytes=input_bytes,
        output_bytes=output_bytes,
        transient_bytes=rows * (wide + 2 * h / t) * size,
        parameters=2 * wide + h + -(-(wide * h + h + h * h) // t),
    )
