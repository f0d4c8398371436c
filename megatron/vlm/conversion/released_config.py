"""Conversion of a released checkpoint's config.json to a ModelConfig and back.

Reads the original InternVLChatConfig, Transformers' InternVLConfig, Qwen2VLConfig,
Qwen2_5_VLConfig, Qwen3VLConfig and Qwen3VLMoeConfig (`omnibal.families`), and the text-only
LlamaConfig, Qwen2Config, Qwen3Config and Qwen3MoeConfig. Unsupported settings raise an error.
Output was tested with Transformers 4.57.3 and 5.23.
"""

import json
import re
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.vlm.checkpoint.identity import architecture_differences
from megatron.vlm.conversion.language_entries import (
    dtype_entries,
    kind_of,
    rope_entries,
    rope_scaling,
    text_entries,
)
from megatron.vlm.conversion.qwen_files import (
    MODEL_TYPES,
    PREPROCESSOR_FILE,
    language_kind,
    qwen_files,
    qwen_layout,
)
from megatron.vlm.conversion.tensor_map import Layout, has_stacked_experts, head_name
from megatron.vlm.inputs.reader import PIXEL_MEAN, PIXEL_STD
from omnibal.base.errors import UserError
from omnibal.families.folder import CONFIG_FILE, model_name, naming, read_config_file
from omnibal.families.hub import TRAINED_TYPES, is_quantized, read_config_table
from omnibal.families.hub_table import as_table
from omnibal.families.internvl import (
    NORMS,
    TRANSFORMERS_QK_NORM_EPS,
    internvl_language,
    internvl_model,
    is_internvl,
    is_original,
    is_tied,
)
from omnibal.families.text import LANGUAGES, LanguageType, language_type
from omnibal.model.config import LanguageConfig, ModelConfig
from omnibal.model.encoders import TilesEncoder
from omnibal.model.layers import ExpertsConfig, LayerKind
from omnibal.model.limits import words

GENERATION_FILE = "generation_config.json"
_BICUBIC = 3
"""Pillow's number of bicubic resampling."""
_STATED_DTYPE = re.compile(r'("(?:torch_)?dtype"\s*:\s*")(?:torch\.)?(?:bfloat16|float16|float32)"')
_PREFIXED = "model.vision_tower."
_ORIGINAL_LAYOUTS: dict[LanguageType, Layout] = {
    "internlm2": Layout.INTERNVL_INTERNLM2,
    "llama": Layout.INTERNVL_LLAMA,
    "qwen2": Layout.INTERNVL_QWEN2,
    "qwen3": Layout.INTERNVL_QWEN3,
    "qwen3_moe": Layout.INTERNVL_QWEN3_MOE,
}
_TEXT_ONLY: dict[LanguageType, Layout] = {
    "llama": Layout.LLAMA,
    "qwen2": Layout.QWEN2,
    "qwen3": Layout.QWEN3,
    "qwen3_moe": Layout.QWEN3_MOE,
}
_LANGUAGES = {
    layout: kind for kinds in (_ORIGINAL_LAYOUTS, _TEXT_ONLY) for kind, layout in kinds.items()
} | {Layout.QWEN3_MOE_STACKED: "qwen3_moe"}
"""Language model of a layout; Transformers' InternVL takes any but InternLM2."""


def read_config(directory: Path, names: Collection[str]) -> tuple[ModelConfig, Layout]:
    """Read a released model and its layout; `names` show prefix, stacked experts and tied head."""
    path = directory / CONFIG_FILE
    given = read_config_file(path)
    if is_quantized(given):
        raise UserError(
            f"{path}: has a quantization_config; weights must be unquantized: convert a release in "
            "floating point"
        )
    name = model_name(directory)
    with naming(path):
        if given.get("model_type") in MODEL_TYPES:
            model = read_config_table(given, name, path)
            if len(set(model.language.kinds)) > 1:
                raise ValueError(
                    "has a decoder_sparse_step or mlp_only_layers that leave layers without "
                    "experts; they must be 1 and []: experts in every layer"
                )
            return model, qwen_layout(given["model_type"], names)
        if is_internvl(given):
            layout = _internvl_layout(given, names)
            return internvl_model(given, name, path, has_head=head_name(layout) in names), layout
        stated = given.get("model_type")
        known = [kind for kind in _TEXT_ONLY if kind == stated]
        if not known:
            raise ValueError(
                f"is of a model of type {stated!r}, which is not converted; it must be one of "
                f"{words(list(TRAINED_TYPES), 'or')}"
            )
        kind = language_type(given, known)
        table = as_table(LANGUAGES[kind], given, str(path), lenient=True)
        table.check_trained()
        layout = Layout.QWEN3_MOE_STACKED if has_stacked_experts(names) else _TEXT_ONLY[kind]
        has_head = head_name(layout) in names
        tied = is_tied(table.tie_word_embeddings, None, original=False, has_head=has_head)
        return table.as_model(name, tied_head=tied), layout


def _internvl_layout(given: dict[str, Any], names: Collection[str]) -> Layout:
    kind = internvl_language(given)
    if is_original(given):
        if kind not in _ORIGINAL_LAYOUTS:
            known = words([LANGUAGES[each].architecture for each in _ORIGINAL_LAYOUTS], "or")
            raise ValueError(
                f"its language model is {LANGUAGES[kind].architecture}, which is planned and not "
                f"converted; it must be {known}"
            )
        return _ORIGINAL_LAYOUTS[kind]
    if has_stacked_experts(names):
        return Layout.TRANSFORMERS_STACKED
    prefixed = any(name.startswith(_PREFIXED) for name in names)
    return Layout.TRANSFORMERS_PREFIXED if prefixed else Layout.TRANSFORMERS


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenIds:
    """Token ids in configurations of a model."""

    of_items: Mapping[str, int]
    """Ids of image and video tokens, by their keys in config.json."""
    begin: int | None
    """Id at the beginning of a text, if any."""
    end: int
    """Id at the end of an answer."""


def configurations(
    model: ModelConfig, layout: Layout, dtype: str, ids: TokenIds | None
) -> dict[str, str]:
    """Contents of the configuration files of an exported model, by file name.

    Transformers' preprocessor always adds a thumbnail to several tiles, and may choose a different
    grid if two with equal tile counts are equally near to the aspect ratio. Otherwise tiles are
    equal.
    """
    files: dict[str, dict[str, Any]] = {}
    if layout.is_text_only:
        kind = _LANGUAGES[layout]
        language = files[CONFIG_FILE] = {
            "architectures": [LANGUAGES[kind].architecture],
            **dtype_entries(dtype),
            **text_entries(model.language, kind),
            **rope_entries(model.language),
        }
        if ids is not None:
            language["bos_token_id"] = ids.begin
    elif layout.is_original:
        files[CONFIG_FILE] = _original(model, layout, dtype)
        language = files[CONFIG_FILE]["llm_config"]
    elif model.images is not None:
        of_items = {} if ids is None else ids.of_items
        files |= qwen_files(model, model.images, layout, dtype, of_items)
        language = files[CONFIG_FILE]["text_config"]
        if ids is not None:
            language["bos_token_id"] = ids.begin
    else:
        files[CONFIG_FILE] = _transformers(model, dtype, ids)
        language = files[CONFIG_FILE]["text_config"]
        files[PREPROCESSOR_FILE] = _preprocessor(model)
    if ids is not None:
        language["eos_token_id"] = ids.end
        files[GENERATION_FILE] = {"eos_token_id": ids.end, "pad_token_id": ids.end}
    return {
        name: json.dumps(content, indent=2, sort_keys=True) + "\n"
        for name, content in files.items()
    }


def with_dtype(config: str, dtype: str) -> str:
    """Replace every tensor type in a config.json by `dtype`."""
    return _STATED_DTYPE.sub(rf'\g<1>{dtype}"', config)


def _preprocessor(model: ModelConfig) -> dict[str, Any]:
    """Settings of Transformers' image processor: tiles and pixel values as in training."""
    size, tiling = model.vision.image_size, model.vision.tiling
    return {
        "image_processor_type": "GotOcr2ImageProcessor",
        "crop_to_patches": tiling.max_dynamic_patch > 1,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": list(PIXEL_MEAN),
        "image_std": list(PIXEL_STD),
        "max_patches": tiling.max_dynamic_patch,
        "min_patches": tiling.min_dynamic_patch,
        "processor_class": "InternVLProcessor",
        "resample": _BICUBIC,
        "rescale_factor": 1 / 255,
        "size": {"height": size, "width": size},
    }


def _original(model: ModelConfig, layout: Layout, dtype: str) -> dict[str, Any]:
    vision, tiling = model.vision, model.vision.tiling
    scaling = rope_scaling(model.language) or {}
    # InternVL's code reads only this name of the kind.
    scaling = {"type" if name == "rope_type" else name: value for name, value in scaling.items()}
    message = model.chat_system_message
    message = model.system_message if message is None else message
    system = {} if message is None else {"system_message": message}
    return system | {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "downsample_ratio": model.vision.downsample_ratio,
        "dynamic_image_size": tiling.max_dynamic_patch > 1,
        "force_image_size": vision.image_size,
        "llm_config": {"architectures": [LANGUAGES[_LANGUAGES[layout]].architecture], "bias": False}
        | text_entries(model.language, _LANGUAGES[layout])
        | {"rope_theta": float(model.language.rope_base)}
        | ({"rope_scaling": scaling} if scaling else {}),
        "max_dynamic_patch": tiling.max_dynamic_patch,
        "min_dynamic_patch": tiling.min_dynamic_patch,
        "ps_version": "v2",
        "select_layer": -1,
        "template": model.chat_template,
        "tie_word_embeddings": model.language.tied_head,
        "torch_dtype": dtype,
        "use_thumbnail": tiling.use_thumbnail,
        "vision_config": {
            "architectures": ["InternVisionModel"],
            "model_type": "intern_vit_6b",
            **_vision(vision),
            "hidden_act": "gelu",
            "image_size": vision.image_size,
            "initializer_factor": vision.layer_scale_init,
            "patch_size": vision.patch_size,
            "qk_normalization": vision.qk_norm,
            "qkv_bias": vision.qkv_bias,
        },
    }


def _transformers(model: ModelConfig, dtype: str, ids: TokenIds | None) -> dict[str, Any]:
    vision, language = model.vision, model.language
    return {
        **({} if ids is None else ids.of_items),
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "downsample_ratio": model.vision.downsample_ratio,
        **dtype_entries(dtype),
        "image_seq_length": model.vision.tokens_per_item,
        "text_config": text_entries(language, kind_of(language)) | rope_entries(language),
        "tie_word_embeddings": language.tied_head,
        "vision_config": {
            "model_type": "internvl_vision",
            **_vision(vision),
            "attention_bias": vision.qkv_bias,
            "image_size": [vision.image_size, vision.image_size],
            "layer_scale_init_value": vision.layer_scale_init,
            "patch_size": [vision.patch_size, vision.patch_size],
            "use_qk_norm": vision.qk_norm,
        },
    }


def _vision(vision: TilesEncoder) -> dict[str, Any]:
    """Entries of the tower in both formats."""
    return {
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.ffn_hidden_size,
        "layer_norm_eps": vision.norm_eps,
        "norm_type": next(name for name, norm in NORMS.items() if norm == vision.normalization),
        "num_attention_heads": vision.heads,
        "num_hidden_layers": vision.layers,
    }


def check_exportable(model: ModelConfig, layout: Layout) -> None:
    """Raise UserError if the layout cannot describe the model."""
    language = model.language
    kind = language_kind(layout) if layout.is_qwen_vl else _LANGUAGES.get(layout, kind_of(language))
    obstacles = [
        (layout.is_text_only and bool(model.encoders), "an encoder"),
        (not (layout.is_text_only or model.encoders), "no encoder"),
        (model.takes_audio, "an audio encoder"),
        (layout.is_qwen_vl and model.takes_images, "an encoder of tiles"),
        (not layout.is_qwen_vl and model.images is not None, "images at their native resolution"),
        *_language_obstacles(language, kind),
        (not layout.is_qwen_vl and language.rope_sections is not None, "RoPE of rows and columns"),
        (layout.has_turned_experts and _is_square(language), "experts with square matrices"),
    ]
    for vision in (model.vision,) if model.takes_images else ():
        eps_differs = vision.norm_eps != TRANSFORMERS_QK_NORM_EPS
        obstacles += [
            (vision.layer_scale_init is None, "no layer scale"),
            (
                not layout.is_original and vision.qk_norm and eps_differs,
                f"q and k norms with norm_eps {vision.norm_eps}",
            ),
        ]
    for holds, what in obstacles:
        if holds:
            raise UserError(
                f"{model.name} has {what}, which layout {layout} cannot hold; choose another one"
            )


def check_read_back(
    model: ModelConfig, layout: Layout, files: Mapping[str, str], names: Collection[str]
) -> None:
    """Check that reading the configurations gives the model back."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        try:
            again, _ = read_config(Path(folder), names)
        except UserError as error:
            raise UserError(
                f"{model.name} is no model of layout {layout}: {error}; choose another one"
            ) from error
    different = architecture_differences(model, again, "there")
    rate, there = _position_rate(model), _position_rate(again)
    if rate != there:
        different.append(f"positions_per_second is {rate} and {there} there")
    if different:
        raise UserError(
            f"{model.name} is another model than Transformers has of layout {layout}: "
            f"{'; '.join(different)}; choose another one"
        )


def _position_rate(model: ModelConfig) -> float | None:
    """Positions per second of a video. None if each temporal patch is one position."""
    video = None if model.images is None else model.images.video
    return None if video is None else video.positions_per_second


def _is_square(language: LanguageConfig) -> bool:
    """Whether experts have square matrices, so that Transformers 5 cannot infer transposition."""
    experts, width = language.kinds[0].experts, language.hidden_size
    return experts is not None and width in (experts.ffn_hidden_size, 2 * experts.ffn_hidden_size)


def _language_obstacles(language: LanguageConfig, kind: LanguageType) -> list[tuple[bool, str]]:
    """Conditions that rule out a kind of language model, and the feature for the message."""
    experts, is_qwen3 = language.kinds[0].experts, kind in ("qwen3", "qwen3_moe")
    # Entries of ExpertsConfig from config.json, and entries used only by the cost model.
    said = {"experts", "experts_per_token", "ffn_hidden_size", "normalized", "auxiliary_loss"}
    plain = LayerKind(
        experts=experts and ExpertsConfig(**experts.model_dump(include={*said, "imbalance"}))
    )
    return [
        (language.qkv_bias != (kind == "qwen2"), f"qkv_bias {str(language.qkv_bias).lower()}"),
        (language.qk_norm != is_qwen3, f"qk_norm {str(language.qk_norm).lower()}"),
        (
            (experts is not None) != (kind == "qwen3_moe"),
            "dense feed-forwards" if experts is None else "experts",
        ),
        (set(language.kinds) != {plain}, "layers of another kind than Qwen3's"),
        (kind == "internlm2" and language.head_size is not None, "a head_size"),
    ]
