"""Random native-resolution images of given token counts, for measurements.

Shapes: Y patches of X values, S tokens, M image tokens.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from omnibal.data.lengths import Lengths
from omnibal.data.native_resolution import Grid
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import ImagesEncoder, squares_of
from omnibal.model.units import LANGUAGE, deepstack_of
from omnibal.pipeline.stage import Stage

_FEATURE = ImagesEncoder.feature
_LEAST_TOKENS = 16
"""Minimum tokens of an image among several of a pack: smaller images are rare."""


def image_sizes(lengths: Lengths, samples: np.ndarray) -> list[int]:
    """Tokens of possible images: per sample, equal images that match its sum of squared tokens."""
    names = (_FEATURE, squares_of(_FEATURE))
    tokens, squares = (lengths.column(name)[samples] for name in names)
    sizes = []
    for all_tokens, square in zip(tokens.tolist(), squares.tolist(), strict=True):
        if all_tokens:
            bounds = np.linspace(0, all_tokens, max(round(all_tokens**2 / square), 1) + 1)
            sizes += np.diff(bounds.round().astype(int)).tolist()
    return sizes


def grid_of(tokens: int, merge: int) -> Grid:
    """Grid of an image of `tokens` tokens, as near to a square as possible."""
    rows = max(each for each in range(1, math.isqrt(tokens) + 1) if tokens % each == 0)
    return Grid(1, rows * merge, tokens // rows * merge)


def equal_images(tokens: int, most: int) -> list[int]:
    """Tokens of up to `most` equal, nearly square images, slightly less than `tokens` in total."""
    images = max(min(most, tokens // _LEAST_TOKENS), 1)
    rows = math.isqrt(tokens // images)
    return [rows * (tokens // images // rows)] * images


def squared_tokens(grids: Sequence[Grid], tower: ImagesEncoder) -> int:
    """Sum of squared tokens over images and video frames."""
    each = ((grid.times, grid.rows * grid.columns // tower.positions_per_item) for grid in grids)
    return sum(times * tokens**2 for times, tokens in each)


def with_every_kind(model: ModelConfig, layers: int) -> ModelConfig:
    """Give the first `layers` encoder layers every kind: deepstack projector, full attention."""
    for name, tower in model.encoders.items():
        if isinstance(tower, ImagesEncoder):
            deepstack = (0,) if tower.deepstack_layers else ()
            full = (layers - 1,) if tower.full_layers else ()
            model = model.with_tower(name, deepstack_layers=deepstack, full_layers=full)
    return model


def image_fields(
    model: ModelConfig,
    sizes: Sequence[int],
    segment_tokens: Sequence[int],
    stage: Stage | None,
    generator: torch.Generator,
) -> dict[str, Any]:
    """Micro-batch fields of these images, at the first tokens. Empty without an image encoder."""
    tower, fields = model.images, dict[str, Any]()
    if tower is not None:
        fields["image_tokens"] = sum(sizes)
        fields["image_grids"] = tuple(grid_of(size, tower.merge_size) for size in sizes)
        if stage is None or stage.holds("vision embed"):
            shape = (sum(sizes) * tower.positions_per_item, tower.values_per_patch)
            fields["patches_YX"] = torch.randn(shape, generator=generator)
        # Only on stages that insert image features or add deepstack features.
        deep = range(len(deepstack_of(model)))
        if (
            stage is None
            or stage.holds("language embed")
            or any(layer in deep for layer in stage.layers(LANGUAGE))
        ):
            fields["image_positions_M"] = torch.arange(sum(sizes))
    if model.language.rope_sections is not None and (stage is None or stage.layers(LANGUAGE)):
        each = [torch.arange(tokens) for tokens in segment_tokens]
        fields["rope_positions_3S"] = torch.cat(each).expand(3, -1).contiguous()
    return fields
