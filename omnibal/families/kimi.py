"""Kimi-VL (arXiv 2504.07491) and Kimi-K2.5: MoonViT and a DeepSeek-V3 language model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt

from omnibal.families.deepseek import DeepseekV3Text
from omnibal.families.processor import read_processor
from omnibal.families.vision import LayersTable
from omnibal.families.whole import WholeTable, read_whole, vision_language
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import ImagesEncoder, ImageText


class _Whole(WholeTable):
    without_effect: ClassVar[frozenset[str]] = WholeTable.without_effect | {
        # Processor keys.
        "video_placeholder",
        "use_unified_vision_chunk",
    }

    projection_hidden_size: PositiveInt | None = None
    projection_layer_norm_eps: PositiveFloat = 1e-5


class MoonVit(LayersTable):
    older_names: ClassVar[Mapping[str, str]] = {
        "init_pos_emb_height": "pos_emb_height",
        "init_pos_emb_width": "pos_emb_width",
        "init_pos_emb_time": "pos_emb_time",
        "vt_hidden_size": "hidden_size",
        "vt_intermediate_size": "intermediate_size",
        "vt_num_attention_heads": "num_attention_heads",
        "vt_num_hidden_layers": "num_hidden_layers",
        "projector_ln_eps": "projection_layer_norm_eps",
    }

    hidden_act: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    patch_size: PositiveInt = 14
    merge_kernel_size: tuple[PositiveInt, PositiveInt] = (2, 2)
    pos_emb_height: PositiveInt = 64
    pos_emb_width: PositiveInt = 64
    pos_emb_time: PositiveInt = 4
    pos_emb_type: Literal["divided_fixed"] = "divided_fixed"
    merge_type: Literal["sd2_tpool"] = "sd2_tpool"
    video_attn_type: Literal["spatial_temporal"] = "spatial_temporal"
    mm_projector_type: Literal["patchmerger"] = "patchmerger"
    mm_hidden_size: PositiveInt | None = None
    text_hidden_size: PositiveInt | None = None
    projector_hidden_act: Literal["gelu"] = "gelu"
    projection_layer_norm_eps: PositiveFloat = 1e-5
    rope_parameters: dict[str, Any] | None = None


def read_kimi(
    given: dict[str, Any], name: str, path: Path, *, patches: int, side: int | None, start: str
) -> ModelConfig:
    """Read Kimi-VL or Kimi-K2.5; video frames (four share tokens) are planned as images.

    Args:
        patches: of an image at most, by the release's processor.
        side: patches per side at most, or None if unlimited.
        start: name of the token before an image.
    """
    whole, table, language = read_whole(_Whole, MoonVit, DeepseekV3Text, given, path)
    if table.merge_kernel_size[0] != table.merge_kernel_size[1]:
        raise ValueError(f"merge_kernel_size {table.merge_kernel_size} must be a square")
    for width in (whole.projection_hidden_size, table.mm_hidden_size):
        if width not in (None, table.hidden_size):
            raise ValueError(
                f"the projector takes width {width}; it must be the tower's {table.hidden_size}"
            )
    sizes = {
        **table.layer_sizes,
        "patch_size": table.patch_size,
        "merge_size": table.merge_kernel_size[0],
    }
    patches = read_processor(path, sizes).most_patches or patches
    encoder = ImagesEncoder(
        **sizes,
        normalization="LayerNorm",
        norm_eps=1e-5,
        qkv_bias=True,
        qk_norm=False,
        learned_positions=table.pos_emb_height * table.pos_emb_width,
        final_norm=True,
        resize="padded",
        min_pixels=1,
        max_pixels=patches * table.patch_size**2,
        max_side_pixels=None if side is None else side * table.patch_size,
        image_text=ImageText(
            before=f"<|{start}|>image<|media_content|>", each="<|media_pad|>", after="<|media_end|>"
        ),
    )
    width = table.text_hidden_size or language.hidden_size
    return vision_language(name, whole, language, encoder, width)
