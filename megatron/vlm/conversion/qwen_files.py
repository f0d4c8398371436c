"""Configuration files of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, for Transformers 4.57.3 and 5.23."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.vlm.conversion.language_entries import dtype_entries, rope_entries, text_entries
from megatron.vlm.conversion.tensor_map import Layout, has_stacked_experts
from omnibal.families.folder import CONFIG_FILE
from omnibal.families.text import LanguageType
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import ImagesEncoder

PREPROCESSOR_FILE = "preprocessor_config.json"
VIDEO_FILE = "video_preprocessor_config.json"
PROCESSOR_FILE = "processor_config.json"
"""Replaces the two files above in Transformers 5."""


@dataclass(frozen=True, slots=True)
class _Family:
    """Differences between families; class names without their common suffix."""

    architecture: str
    processor: str
    language: LanguageType
    vision: Callable[[ImagesEncoder, int], dict[str, Any]]
    """Vision entries of this family only, given the tower and the language model's width."""
    video_processor: str


def _qwen2_vision(tower: ImagesEncoder, width: int) -> dict[str, Any]:
    return {
        "embed_dim": tower.hidden_size,
        "hidden_act": "quick_gelu",
        "hidden_size": width,
        "mlp_ratio": _whole(tower.ffn_hidden_size / tower.hidden_size),
    }


def _qwen2_5_vision(tower: ImagesEncoder, width: int) -> dict[str, Any]:
    rate = None if tower.video is None else tower.video.positions_per_second
    rates = {} if rate is None else {"tokens_per_second": _whole(rate)}
    return rates | {
        "fullatt_block_indexes": list(tower.full_layers),
        "hidden_act": "silu",
        "hidden_size": tower.hidden_size,
        "intermediate_size": tower.ffn_hidden_size,
        "out_hidden_size": width,
        "window_size": tower.window_pixels,
    }


def _qwen3_vision(tower: ImagesEncoder, width: int) -> dict[str, Any]:
    return {
        "deepstack_visual_indexes": list(tower.deepstack_layers),
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": tower.hidden_size,
        "intermediate_size": tower.ffn_hidden_size,
        "num_position_embeddings": tower.learned_positions,
        "out_hidden_size": width,
    }


_FAMILIES = {
    "qwen2_vl": _Family("Qwen2VL", "Qwen2VL", "qwen2", _qwen2_vision, "Qwen2VL"),
    "qwen2_5_vl": _Family("Qwen2_5_VL", "Qwen2_5_VL", "qwen2", _qwen2_5_vision, "Qwen2VL"),
    "qwen3_vl": _Family("Qwen3VL", "Qwen3VL", "qwen3", _qwen3_vision, "Qwen3VL"),
    "qwen3_vl_moe": _Family("Qwen3VLMoe", "Qwen3VL", "qwen3_moe", _qwen3_vision, "Qwen3VL"),
}
"""By model_type."""
MODEL_TYPES = tuple(_FAMILIES)
_LAYOUTS = {
    Layout.QWEN2_VL: "qwen2_vl",
    Layout.QWEN2_VL_PREFIXED: "qwen2_vl",
    Layout.QWEN2_5_VL: "qwen2_5_vl",
    Layout.QWEN2_5_VL_PREFIXED: "qwen2_5_vl",
    Layout.QWEN3_VL: "qwen3_vl",
    Layout.QWEN3_VL_MOE: "qwen3_vl_moe",
    Layout.QWEN3_VL_MOE_STACKED: "qwen3_vl_moe",
    Layout.QWEN3_VL_MOE_APART: "qwen3_vl_moe",
}
"""model_type of each layout."""


def language_kind(layout: Layout) -> LanguageType:
    """Kind of the language model in a layout of a Qwen-VL."""
    return _FAMILIES[_LAYOUTS[layout]].language


def qwen_layout(kind: str, names: Collection[str]) -> Layout:
    """Layout of a released Qwen-VL's tensors, by model_type and tensor names.

    Stacked experts count as transposed, as released; names do not show it.
    """
    if kind == "qwen3_vl_moe":
        return Layout.QWEN3_VL_MOE if has_stacked_experts(names) else Layout.QWEN3_VL_MOE_APART
    layouts = [layout for layout, of_kind in _LAYOUTS.items() if of_kind == kind]
    return layouts[-1 if any(name.startswith("model.visual.") for name in names) else 0]


def qwen_files(
    model: ModelConfig, tower: ImagesEncoder, layout: Layout, dtype: str, ids: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """Contents of config.json and of the processors' files, by file name."""
    kind, language = _LAYOUTS[layout], model.language
    family = _FAMILIES[kind]
    text = text_entries(language, family.language) | {"model_type": f"{kind}_text"}
    files = {
        CONFIG_FILE: {
            "architectures": [f"{family.architecture}ForConditionalGeneration"],
            "model_type": kind,
            **dtype_entries(dtype),
            **ids,
            "text_config": text | rope_entries(language) | dtype_entries(dtype),
            "tie_word_embeddings": language.tied_head,
            "vision_config": {
                "model_type": kind,
                "depth": tower.layers,
                "in_channels": 3,
                "num_heads": tower.heads,
                "patch_size": tower.patch_size,
                "spatial_merge_size": tower.merge_size,
                "temporal_patch_size": tower.frames_per_patch,
                **family.vision(tower, language.hidden_size),
            },
        },
        PREPROCESSOR_FILE: _processor(tower, tower.min_pixels, tower.max_pixels)
        | {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": f"{family.processor}Processor",
        },
    }
    video = tower.video
    if video is not None:
        files[VIDEO_FILE] = _processor(tower, video.min_pixels, video.max_pixels) | {
            "fps": video.frames_per_second,
            "max_frames": video.max_frames,
            "min_frames": video.min_frames,
            "processor_class": f"{family.processor}Processor",
            "video_processor_type": f"{family.video_processor}VideoProcessor",
        }
    return files


def _processor(tower: ImagesEncoder, least_pixels: int, most_pixels: int) -> dict[str, Any]:
    return {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": list(tower.pixel_mean),
        "image_std": list(tower.pixel_std),
        "merge_size": tower.merge_size,
        "patch_size": tower.patch_size,
        "rescale_factor": tower.pixel_scale,
        "size": {"longest_edge": most_pixels, "shortest_edge": least_pixels},
        "temporal_patch_size": tower.frames_per_patch,
    }


def _whole(number: float) -> float:
    """Convert integral floats to int, as Transformers 5 checks types."""
    return int(number) if number.is_integer() else number
