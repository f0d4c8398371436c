"""Tile and clip encoders, and layers of all encoders.

Letters: h hidden, f feed-forward, t tensor size, a head width.
"""

from omnibal.cost.device_rates import Device
from omnibal.cost.kernels import FP32_BYTES, attention, element_wise, product
from omnibal.cost.work import FIRST_OUTPUT, SECOND_OUTPUT, CountedUnit, Kept, Working
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import ClipsEncoder, Encoder, ImagesEncoder, TilesEncoder
from omnibal.model.units import UnitKind

_SECOND_GELU = "into the second GELU"
LAST_OUTPUT = "last layer's output"  # input of a projector that begins with a norm
_SCALED_FEED_FORWARD = "feed-forward's, for its layer scale"
_INTO, _OUT_OF = "into the activation", "out of the activation"


def tiles_embed(tower: TilesEncoder, device: Device) -> CountedUnit:
    """Return the embedding of image tiles: convolution to patches, and positions."""
    items, size = device.features[tower.feature], device.element_bytes
    patches, patch_values = tower.patches_per_side**2, 3 * tower.patch_size**2
    pixel_bytes = items * patches * patch_values * size
    output_bytes = items * tower.positions_per_item * tower.hidden_size * size
    return CountedUnit(
        kernels=(
            *product(items * patches, patch_values, tower.hidden_size),
            # Pixels in, patches out, then positions added; in backward, gradients of positions and
            # class token.
            *element_wise(pixel_bytes + 3 * output_bytes, 2 * output_bytes, launches=4),
        ),
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
        # The convolution's bias, class token, positions.
        other_parameters=tower.hidden_size * (2 + tower.positions_per_item),
    )


def clips_embed(tower: ClipsEncoder, device: Device) -> CountedUnit:
    """Return the embedding of clips: convolutions (width 3, strides 1 and 2), each with GELU."""
    items = device.features[tower.feature]
    h, size, taps = tower.hidden_size, device.element_bytes, 3
    input_bytes = items * tower.frames * tower.mel_bins * size
    middle_bytes = items * tower.frames * h * size
    output_bytes = items * tower.positions_per_item * h * size
    read_bytes, second_gelu = items * tower.frames * tower.mel_bins * FP32_BYTES, (_SECOND_GELU,)
    return CountedUnit(
        kernels=(
            *product(items * tower.frames, taps * tower.mel_bins, h),
            *product(items * tower.positions_per_item, taps * h, h),
            # Cast of frames, activations, transposition, positions; backward reads inputs again.
            *element_wise(
                read_bytes + input_bytes + 2 * middle_bytes + 6 * output_bytes,
                3 * middle_bytes + 3 * output_bytes,
                launches=5,
            ),
        ),
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
            Working(middle_bytes + output_bytes, weight=taps * h * h, freed=second_gelu),
            Working(2 * middle_bytes, freed=(*second_gelu, "out of GELU")),
        ),
        forward_working=(Working(2 * middle_bytes), Working(input_bytes + middle_bytes)),
        # Frames as read.
        passing_bytes=read_bytes,
        other_parameters=2 * h,  # biases
    )


def encoder_layer(
    _model: ModelConfig, tower: Encoder, kind: UnitKind, device: Device
) -> CountedUnit:
    """Return an encoder layer with attention within items, or within images or their windows.

    Images' q and k are rotated, after their norms if any; their feed-forward may have a gate. Heads
    are padded to a multiple of the tensor size (25 become 28 on 4).
    """
    rows = device.features[tower.feature] * tower.positions_per_item
    pairs, gated, bias, rotates = rows * tower.positions_per_item, False, True, False
    if isinstance(tower, ImagesEncoder):
        gated, bias, rotates = tower.gated, tower.bias, True
        pairs = device.features[tower.squares] * tower.positions_per_item**2
        if kind.is_windowed:  # windows at an edge count as full
            pairs = rows * tower.window_positions
    t, size = device.tensor, device.element_bytes
    h, f = tower.hidden_size, tower.ffn_hidden_size
    a = (-(-tower.heads // t) * t if device.pads else tower.heads) * tower.head_width
    heads, into, norms = a / tower.head_width / t, 1 + gated, int(tower.qk_norm)
    scaled, norm, by = tower.layer_scale_init is not None, "scaled_add_norm", "self_attention"
    # Norms, layer scales and biases of row-parallel linears are replicated, the rest is divided.
    whole = 2 * h * (tower.norm_vectors + bias + scaled)
    divided = into * f * bias + 3 * a * tower.qkv_bias + 2 * a * norms
    hidden_bytes, inner_bytes, width_bytes = (rows * width * size for width in (h, f / t, a / t))
    row_bytes = rows * FP32_BYTES
    core_bytes, norm_bytes = width_bytes + row_bytes * heads, row_bytes * tower.norm_vectors
    # Replicated between the blocks: the first norm; add and norm; add. Divided: q/k norms and
    # rotation (norms over all heads read them again for tensor-parallel sums) and the activation.
    again = norms * (t > 1)
    of_heads, back_of_heads = 4 * norms + 2 * again, 6 + 2 * norms + 4 * again
    qkv, by_qkv, normed, by_norm = "q, k and v", "linear_qkv", "normed q and k", "head_norms"
    if rotates:
        of_heads, back_of_heads = 4 + 4 * norms, 6 + 4 * norms
        qkv, by_qkv = "rotated q and k, and v", "split_and_rotate"
        normed, by_norm = "q and k before norms", "norms"
    between = 4 + (0 if rotates else 1 + 2 * scaled)
    moved_bytes = 9 * hidden_bytes + of_heads * width_bytes + (1 + into) * inner_bytes
    back_moved_bytes = 2 * between * hidden_bytes + back_of_heads * width_bytes
    back_moved_bytes = back_moved_bytes + (1 + 2 * into) * inner_bytes
    kept = [
        Kept("input", "", hidden_bytes),
        Kept(FIRST_OUTPUT, "norm", hidden_bytes, for_weights=True),
        Kept("first norm's moments", "norm", norm_bytes),
        Kept(qkv, f"{by}.{by_qkv}", 3 * width_bytes),
        Kept("attention's output and log-sum-exp", f"{by}.core_attention", core_bytes),
        Kept("middle residual", norm, hidden_bytes),
        Kept(SECOND_OUTPUT, norm, hidden_bytes, for_weights=True),
        Kept("second norm's moments", norm, norm_bytes),
        Kept(_INTO, "mlp.linear_fc1", into * inner_bytes),
        Kept(_OUT_OF, "swiglu" if gated else "bias_gelu", inner_bytes, for_weights=True),
    ]
    if norms:  # and the scales of q and k per position
        kept.append(Kept(normed, f"{by}.{by_norm}", 2 * width_bytes + 2 * rows * FP32_BYTES))
    if scaled:  # the fused backward computes the scale's gradient even if it is frozen
        what = "attention's block, for its layer scale"
        kept.append(Kept(what, f"{by}.linear_proj", hidden_bytes))
        kept.append(Kept(_SCALED_FEED_FORWARD, "mlp.linear_fc2", hidden_bytes))
    # Gradients: the layer's output, and with a layer scale also its block's.
    gradients_bytes = (1 + scaled) * hidden_bytes
    freed, own = (_SCALED_FEED_FORWARD,), int(scaled)  # otherwise it is the residual's gradient
    return CountedUnit(
        kernels=(
            *product(rows, h, 3 * a / t, name="self_attention.linear_qkv", given=FIRST_OUTPUT),
            *attention(pairs, rows, heads, 2 * tower.head_width),
            *product(rows, a / t, h, name="self_attention.linear_proj"),
            *product(rows, h, into * f / t, name="mlp.linear_fc1", given=SECOND_OUTPUT),
            *product(rows, f / t, h, name="mlp.linear_fc2", given=_OUT_OF),
            *element_wise(moved_bytes, back_moved_bytes, launches=7),
            *device.all_reduces(hidden_bytes, hidden_bytes, times=2),
        ),
        kept=tuple(kept),
        boundary_bytes=hidden_bytes,
        output_bytes=hidden_bytes,
        # Peaks before attention: gradients of the second product, the activation, the first.
        working=(
            *((Working(gradients_bytes),) if scaled else ()),
            Working(gradients_bytes + inner_bytes, weight=h * f / t, freed=freed),
            Working(hidden_bytes + (1 + into) * inner_bytes, freed=(*freed, _OUT_OF), finished=own),
            Working(
                2 * hidden_bytes + into * inner_bytes,
                weight=h * into * f / t,
                freed=(*freed, _OUT_OF, _INTO),
                finished=own,
            ),
        ),
        # Between the blocks: gradients of the norm's output and of the sum; with a layer scale also
        # of the layer's output and of the attention block.
        late_working=(Working((2 + 2 * scaled) * hidden_bytes, 0, (*freed, _OUT_OF, _INTO), 2),),
        # Kept: inputs of the tower and of this layer; norm, attention block, sum and its norm; q, k
        # and v before and after norms and rotation; both sides of the activation; the feed-
        # forward's output.
        forward_working=(
            Working(6 * hidden_bytes),
            Working(3 * hidden_bytes + 6 * width_bytes),
            Working(5 * hidden_bytes + (1 + into) * inner_bytes),
        ),
        other_parameters=whole + divided / t,
    )


def encoder_projector(
    tower: Encoder, model: ModelConfig, device: Device, *, is_deepstack: bool = False
) -> CountedUnit:
    """Return the projector: a norm, and two products of folded positions around a GELU.

    The norm is of positions before folding, or of folded tokens for tiles and deepstack (Qwen3-VL).
    Tiles and clips permute positions for folding.
    """
    t, size, items = device.tensor, device.element_bytes, device.features[tower.feature]
    wide, h, is_reordered = tower.projector_input_size, model.language.hidden_size, True
    rows, positions = items * tower.tokens_per_item, items * tower.positions_per_item
    inner, input_bytes = h, positions * tower.hidden_size * size
    width, normed = (wide, rows) if is_deepstack else (tower.hidden_size, positions)
    norm, norm_bytes = width * tower.norm_vectors, normed * FP32_BYTES * tower.norm_vectors
    first, given, made_by, norm_by = LAST_OUTPUT, "stacked positions", "", "norm.norm"
    if isinstance(tower, TilesEncoder):
        norm, norm_bytes = 2 * wide, rows * 2 * FP32_BYTES
        first, given, made_by, norm_by = "shuffled input", "norm's output", "norm", "norm"
    if isinstance(tower, ImagesEncoder):
        inner, is_reordered = tower.projector_hidden_size or wide, False
        given, made_by = "norm's output", norm_by
    output_bytes, inner_bytes, wide_bytes = (rows * width * size for width in (h, inner / t, wide))
    in_gelu = ("into GELU", "out of GELU")
    return CountedUnit(
        kernels=(
            *product(rows, wide, inner / t, name="linear_fc1", given=given),
            *product(rows, inner / t, h, name="linear_fc2", given="out of GELU"),
            # Permutation and norm of the input, GELU, bias; backward also reads the norm's input.
            *element_wise(
                (4 if is_reordered else 2) * input_bytes + 2 * inner_bytes + 2 * output_bytes,
                (5 if is_reordered else 3) * input_bytes + 3 * inner_bytes + output_bytes,
                launches=6,
            ),
            # In backward, the gradient of the first product's input, which the norm needs.
            *device.all_reduces(output_bytes, wide_bytes),
        ),
        kept=(
            Kept(first, "", wide_bytes),
            Kept(given, made_by, wide_bytes, for_weights=True),
            Kept("norm's moments", norm_by, norm_bytes),
            Kept("into GELU", "linear_fc1", inner_bytes),
            Kept("out of GELU", "bias_gelu", inner_bytes, for_weights=True),
        ),
        boundary_bytes=input_bytes,
        output_bytes=output_bytes,
        working=(
            # Gradients of the second product, the first, the norm, and of all positions.
            Working(output_bytes + inner_bytes, weight=inner * h / t),
            Working(wide_bytes + inner_bytes, weight=wide * inner / t, freed=in_gelu, finished=1),
            Working(wide_bytes + input_bytes, freed=(*in_gelu, given), finished=2),
        ),
        # The tower's input and output are kept.
        forward_working=(
            Working(
                2 * input_bytes
                + (2 * wide_bytes + inner_bytes if is_reordered else 2 * inner_bytes)
            ),
        ),
        # The second product's bias is replicated.
        other_parameters=norm + h + inner / t,
    )
