"""Native-resolution image encoders (Qwen2-VL and later).

A micro-batch's images and frames are packed in one sequence with variable-length attention. Fused
operations are assumed for all.

Letters: h hidden size, t tensor-parallel size. A cell is the patches of one token. Costs are linear
in a micro-batch's features.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from omnibal.cost.device_rates import Device
from omnibal.cost.kernels import FP32_BYTES, element_wise, product
from omnibal.cost.towers import LAST_OUTPUT, encoder_layer, encoder_projector
from omnibal.cost.work import CountedUnit, Kept, Working, chain_units
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import ImagesEncoder
from omnibal.model.units import UnitKind

_INDEX_BYTES = 8  # bytes of a row index
# Kept per patch by torch's interpolation of learned positions (four neighbours).
_NEIGHBOUR_BYTES = 4 * (2 * _INDEX_BYTES + FP32_BYTES) + 2 * _INDEX_BYTES


def images_embed(tower: ImagesEncoder, device: Device) -> CountedUnit:
    """Return the costs of patch embedding, interpolated positions and an optional norm."""
    h, size = tower.hidden_size, device.element_bytes
    rows = device.features[tower.feature] * tower.positions_per_item
    values = tower.values_per_patch
    pixel_bytes, output_bytes = rows * values * size, rows * h * size
    # Bilinear: four weighted neighbours, summed in fp32 (Qwen3-VL's fast_pos_embed).
    wide_bytes = rows * h * FP32_BYTES * (tower.learned_positions > 0)
    # Gradient of positions in fp32, then of the learned positions.
    learned, working = FP32_BYTES / size * tower.learned_positions * h, list[Working]()
    kept = [Kept("pixels by patch", "", pixel_bytes, for_weights=True)]
    if tower.learned_positions:
        kept.append(Kept("neighbours", "embedding_bag", rows * _NEIGHBOUR_BYTES))
        working.append(Working(output_bytes + wide_bytes, weight=learned))
    if tower.embed_norm:
        kept += [
            Kept("norm's input", "", output_bytes),
            Kept("norm's moments", "norm", rows * FP32_BYTES * tower.norm_vectors),
        ]
    return CountedUnit(
        kernels=(
            *product(rows, values, h),
            # Pixels to patches; neighbours to positions, cast to the weights' dtype and added; a
            # norm.
            *element_wise(
                pixel_bytes
                + 6 * wide_bytes
                + (1 + 4 * (tower.learned_positions > 0) + 2 * tower.embed_norm) * output_bytes,
                6 * wide_bytes + (3 + tower.embed_norm) * output_bytes,
                launches=4,
            ),
        ),
        kept=tuple(kept),
        boundary_bytes=pixel_bytes,
        output_bytes=output_bytes,
        working=(*working, Working(output_bytes, weight=values * h)),
        # Pixels in the weights' dtype; product output, positions (also in fp32), sum.
        forward_working=(
            Working(pixel_bytes + 3 * output_bytes),
            Working(pixel_bytes + 2 * output_bytes + wide_bytes),
        ),
        # Pixels as read, in fp32.
        passing_bytes=rows * values * FP32_BYTES,
        # The class token adds half a head of angles.
        other_parameters=h * (tower.patch_bias + tower.learned_positions)
        + h * tower.norm_vectors * tower.embed_norm
        + (h + tower.head_width // 2) * tower.class_token,
    )


def images_layer(
    model: ModelConfig, tower: ImagesEncoder, kind: UnitKind, device: Device
) -> CountedUnit:
    """Return the costs of a layer, with its deepstack projector if any."""
    layer = encoder_layer(model, tower, kind, device)
    if not kind.has_deepstack:
        return layer
    projector = encoder_projector(tower, model, device, is_deepstack=True)
    gradient_bytes = layer.output_bytes
    projector = replace(  # runs backward first, with the gradient of the layer's output in memory
        projector,
        kept=tuple(
            replace(line, made_by=f"deepstack.{line.made_by}")
            for line in projector.kept
            if line.made_by
        ),
        working=tuple(
            replace(moment, bytes=moment.bytes + gradient_bytes) for moment in projector.working
        ),
    )
    both = chain_units([("", layer), ("deepstack: ", projector)])
    return replace(
        both,
        # Both gradients of the layer's output are added.
        kernels=(*both.kernels, *element_wise(0 * gradient_bytes, 3 * gradient_bytes)),
        output_bytes=layer.output_bytes,
        late_working=layer.late_working,
        forward_working=layer.forward_working,
    )


def images_projector(tower: ImagesEncoder, model: ModelConfig, device: Device) -> CountedUnit:
    """Return the costs of the tower's optional last norm and its projector."""
    unit = _PROJECTORS[tower.projector](tower, model, device)
    if tower.projector == "mlp" and tower.window_pixels is not None:
        # Cells are in window order: permute them back.
        moved_bytes = 2 * unit.output_bytes
        order = Kept(
            "order of cells", "aten._to_copy", device.features[tower.feature] * _INDEX_BYTES
        )
        unit = replace(
            unit,
            kernels=(*unit.kernels, *element_wise(moved_bytes, moved_bytes)),
            kept=(*unit.kept, order),
            working=(Working(moved_bytes), *unit.working),
        )
    if not tower.final_norm:
        return unit
    rows = device.features[tower.feature] * tower.positions_per_item
    input_bytes = rows * tower.hidden_size * device.element_bytes
    return replace(
        unit,
        kernels=(*unit.kernels, *element_wise(2 * input_bytes, 3 * input_bytes)),
        kept=(
            Kept("input", "", input_bytes),
            Kept("last norm's moments", "norm", rows * FP32_BYTES * tower.norm_vectors),
            *unit.kept,
        ),
        other_parameters=unit.other_parameters + tower.hidden_size * tower.norm_vectors,
    )


def _pooled_projector(tower: ImagesEncoder, model: ModelConfig, device: Device) -> CountedUnit:
    """Return the costs of average pooling, an RMSNorm and one replicated product (Gemma 3)."""
    size, width, h = device.element_bytes, tower.hidden_size, model.language.hidden_size
    cells = device.features[tower.feature]
    input_bytes = cells * tower.projector_input_size * size
    pooled_bytes, output_bytes = cells * width * size, cells * h * size
    return CountedUnit(
        kernels=(
            *product(cells, width, h),
            *element_wise(
                input_bytes + 3 * pooled_bytes, input_bytes + 4 * pooled_bytes, launches=3
            ),
        ),
        kept=(
            Kept("averaged cells", "pool", pooled_bytes),
            Kept("norm's moments", "norm", cells * FP32_BYTES),
            Kept("norm's output", "norm", pooled_bytes, for_weights=True),
        ),
        boundary_bytes=input_bytes,
        output_bytes=output_bytes,
        working=(Working(output_bytes + pooled_bytes + input_bytes, weight=width * h),),
        forward_working=(Working(input_bytes + 2 * pooled_bytes),),
        other_parameters=width,
    )


def _gated_projector(tower: ImagesEncoder, model: ModelConfig, device: Device) -> CountedUnit:
    """Return the costs of two replicated products, LayerNorm, GELU and a gated MLP (GLM-4.5V)."""
    t, size, cells = device.tensor, device.element_bytes, device.features[tower.feature]
    wide, h = tower.projector_input_size, model.language.hidden_size
    inner = tower.projector_hidden_size or wide
    input_bytes, output_bytes, inner_bytes = (
        cells * width * size for width in (wide, h, inner / t)
    )
    return CountedUnit(
        kernels=(
            *product(cells, wide, h),
            *product(cells, h, h),
            *product(cells, h, 2 * inner / t),
            *product(cells, inner / t, h),
            # Norm and GELU, SwiGLU; backward also reads their inputs.
            *element_wise(
                4 * output_bytes + 3 * inner_bytes, 6 * output_bytes + 5 * inner_bytes, launches=6
            ),
            *device.all_reduces(output_bytes, output_bytes),
        ),
        kept=(
            Kept(LAST_OUTPUT, "", input_bytes, for_weights=True),
            Kept("folded cells", "downsample", output_bytes, for_weights=True),
            Kept("norm's input", "proj", output_bytes),
            Kept("norm's moments", "norm", 2 * cells * FP32_BYTES),
            Kept("into GELU", "norm", output_bytes),
            Kept("out of GELU", "gelu", output_bytes, for_weights=True),
            Kept("gate and value", "mlp.linear_fc1", 2 * inner_bytes),
            Kept("their product", "swiglu", inner_bytes, for_weights=True),
        ),
        boundary_bytes=input_bytes,
        output_bytes=output_bytes,
        working=(
            Working(output_bytes + inner_bytes, weight=inner * h / t),
            Working(output_bytes + 3 * inner_bytes, freed=("their product",), finished=1),
            Working(
                input_bytes + 2 * output_bytes,
                weight=wide * h,
                freed=("their product", "gate and value"),
                finished=3,
            ),
        ),
        forward_working=(Working(input_bytes + 2 * output_bytes + 3 * inner_bytes),),
        other_parameters=3 * h,
    )


_PROJECTORS: dict[str, Callable[[ImagesEncoder, ModelConfig, Device], CountedUnit]] = {
    "mlp": encoder_projector,  # norm, pixel shuffle, two products with GELU between (Qwen2-VL)
    "pooled": _pooled_projector,
    "gated": _gated_projector,
}


def deepstack_bytes(model: ModelConfig, kind: UnitKind, device: Device) -> np.ndarray:
    """Return bytes of replicated deepstack features that a cut after this kind adds. [features]"""
    # Gradients within a stage are not counted: below a hundredth of the encoder's activations.
    # Each feature counts the cells of all towers with deepstack: an upper bound with several.
    towers = [tower for tower in model.encoders.values() if tower.deepstack_features]
    cells = np.sum(
        [0 * device.features["fixed"], *(device.features[tower.feature] for tower in towers)],
        axis=0,
    )
    return kind.carried * cells * model.language.hidden_size * device.element_bytes
