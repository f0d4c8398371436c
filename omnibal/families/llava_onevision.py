"""LLaVA-OneVision-1.5 (arXiv 2509.23661): RICE-ViT and Qwen3, as in the authors' code."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt

from omnibal.families.text import Qwen3Text
from omnibal.families.vision import CLIP_MEAN, CLIP_STD, Pixels, VisionTable, pixels
from omnibal.families.whole import WholeTable, read_whole, vision_language
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import ImagesEncoder

_PIXELS = Pixels(56 * 56, 3_240_000, CLIP_MEAN, CLIP_STD)
"""Pixel limits of the released models."""


class RiceVit(VisionTable):
    """RICE-ViT; embed_dim equals hidden_size."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"embed_dim"})
    older_names: ClassVar[Mapping[str, str]] = {"in_chans": "in_channels"}

    hidden_act: Literal["gelu"] = "gelu"
    layer_norm_eps: PositiveFloat = 1e-5
    text_hidden_size: PositiveInt = 2560


def read_llava_onevision_1_5(given: dict[str, Any], name: str, path: Path) -> ModelConfig:
    """LLaVA-OneVision-1.5."""
    whole, table, text = read_whole(WholeTable, RiceVit, Qwen3Text, given, path)
    sizes = table.sizes
    encoder = ImagesEncoder(
        **sizes,
        normalization="LayerNorm",
        norm_eps=table.layer_norm_eps,
        qkv_bias=True,
        patch_bias=False,
        class_token=True,
        embed_norm=True,
        **pixels(path, sizes, _PIXELS),
    )
    return vision_language(name, whole, text, encoder, table.text_hidden_size)
