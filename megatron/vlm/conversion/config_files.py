"""Configuration files of an exported model, for Transformers 4 and 5; tests read them with 5.23.

config.json of text-only models, of InternVL in its own and in Transformers' format, and of
Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5, with their processors' settings.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.vlm.conversion.tensor_map import TensorLayout
from megatron.vlm.inputs.reader import PIXEL_MEAN, PIXEL_STD
from omnibal.base.files import read_json_model
from omnibal.data.chat import answer_end, chatml_texts
from omnibal.data.tokenizer import CONFIG_FILE as TOKENIZER_CONFIG_FILE
from omnibal.data.tokenizer import FAST_FILE, TEMPLATE_FILE, Tokenizer
from omnibal.families import qwen
from omnibal.families.folder import CONFIG_FILE
from omnibal.families.internvl import NORMS, OriginalVision, TransformersVision
from omnibal.families.text import (
    LANGUAGES,
    SCALES_LATER,
    SCALES_WAVES,
    LanguageType,
    TextTable,
    released_coefficient,
)
from omnibal.families.vision import DepthTable
from omnibal.model.config import LanguageConfig, ModelConfig
from omnibal.model.encoders import ImagesEncoder

GENERATION_FILE = "generation_config.json"
PREPROCESSOR_FILE = "preprocessor_config.json"
VIDEO_FILE = "video_preprocessor_config.json"
PROCESSOR_FILE = "processor_config.json"  # replaces the two above in Transformers 5
# Settings of every image processor.
_PROCESSOR: dict[str, Any] = dict.fromkeys(
    ("do_convert_rgb", "do_normalize", "do_rescale", "do_resize"), True
)
_PILLOW_BICUBIC = 3
_NORM_TYPES = {norm: name for name, norm in NORMS.items()}
# max_position_embeddings of most released InternVL2, 2.5 and 3 models, for a ModelConfig without a
# limit. Serving tools use it as context length; unscaled RoPE does not depend on it.
_DEFAULT_POSITIONS = 32_768
_STATED_DTYPE = re.compile(r'("(?:torch_)?dtype"\s*:\s*")(?:torch\.)?(?:bfloat16|float16|float32)"')
# Class names of model, processor and video processor by family, without common suffixes, and the
# table of its encoder.
_QWENS: dict[str, tuple[str, str, str, type[DepthTable]]] = {
    "qwen2_vl": ("Qwen2VL", "Qwen2VL", "Qwen2VL", qwen.Qwen2VLVision),
    "qwen2_5_vl": ("Qwen2_5_VL", "Qwen2_5_VL", "Qwen2VL", qwen.Qwen25VLVision),
    "qwen3_vl": ("Qwen3VL", "Qwen3VL", "Qwen3VL", qwen.Qwen3VLVision),
    "qwen3_vl_moe": ("Qwen3VLMoe", "Qwen3VL", "Qwen3VL", qwen.Qwen3VLVision),
    "qwen3_5": ("Qwen3_5", "Qwen3VL", "Qwen3VL", qwen.Qwen35Vision),
    "qwen3_5_moe": ("Qwen3_5Moe", "Qwen3VL", "Qwen3VL", qwen.Qwen35Vision),
}
_INTERNVL_PIECES = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
# Renders messages as in training. The processor replaces <IMG_CONTEXT> by an image's tokens.
_INTERNVL_TEMPLATE = "internvl_processor.jinja"


def json_text(content: Mapping[str, Any], *, ascii_only: bool = True) -> str:
    """Return JSON as Transformers writes it."""
    return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=ascii_only) + "\n"


def replace_dtype(config: str, dtype: str) -> str:
    """Return a config.json with every tensor type replaced by `dtype`."""
    return _STATED_DTYPE.sub(rf'\g<1>{dtype}"', config)


def configurations(
    model: ModelConfig, layout: TensorLayout, dtype: str, tokenizer: Tokenizer | None
) -> dict[str, str]:
    """Return the contents of an exported model's configuration files, by file name.

    Token ids, and files of a processor with the tokenizer, need the tokenizer.
    Tiles equal training's, but Transformers' InternVL preprocessor always adds a thumbnail to
    several tiles, and may choose another of two grids equally near to the aspect ratio.
    """
    files: dict[str, dict[str, Any]] = {}
    item_ids = {} if tokenizer is None else _list_item_ids(model, tokenizer)
    if layout.is_text_only:
        assert layout.language is not None
        language = files[CONFIG_FILE] = {
            "architectures": [LANGUAGES[layout.language].architecture],
            **_dtype_entries(dtype),
            **_language_entries(model.language, layout.language),
            **_rope_entries(model.language),
        }
        if layout.is_hybrid:
            name = "Qwen3_5ForCausalLM" if "moe" not in layout else "Qwen3_5MoeForCausalLM"
            language |= {"architectures": [name], "model_type": layout.family}
    elif layout.is_original:
        files[CONFIG_FILE] = _make_internvl_config(model, layout, dtype)
        language = files[CONFIG_FILE]["llm_config"]
    elif model.images is not None:
        files |= qwen_files(model, model.images, layout, dtype, item_ids)
        language = files[CONFIG_FILE]["text_config"]
    else:
        files[CONFIG_FILE] = _make_transformers_config(model, dtype, item_ids)
        size, tiling = model.vision.image_size, model.vision.tiling
        files[PREPROCESSOR_FILE] = _PROCESSOR | {
            "image_processor_type": "GotOcr2ImageProcessor",
            "crop_to_patches": tiling.max_dynamic_patch > 1,
            "image_mean": list(PIXEL_MEAN),
            "image_std": list(PIXEL_STD),
            "max_patches": tiling.max_dynamic_patch,
            "min_patches": tiling.min_dynamic_patch,
            "processor_class": "InternVLProcessor",
            "resample": _PILLOW_BICUBIC,
            "rescale_factor": 1 / 255,
            "size": {"height": size, "width": size},
        }
        language = files[CONFIG_FILE]["text_config"]
    if tokenizer is not None:
        end = answer_end(model, tokenizer)
        if layout.is_text_only or layout.is_qwen_vl:
            language["bos_token_id"] = tokenizer.id_of(tokenizer.bos_piece)
        language["eos_token_id"] = end
        files[GENERATION_FILE] = {"eos_token_id": end, "pad_token_id": end}
    texts = {name: json_text(content) for name, content in files.items()}
    if tokenizer is not None and model.takes_images and not layout.is_original:
        texts |= internvl_processor_files(model, tokenizer)
    return texts


def _list_item_ids(model: ModelConfig, tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of image and video tokens, by key of config.json."""
    if model.takes_images:
        return {"image_token_id": tokenizer.image_context}
    if model.images is None:
        return {}
    shown, video = model.images.image_text, model.images.video
    pieces = {
        "image_token_id": shown.each,
        "vision_start_token_id": shown.before,
        "vision_end_token_id": shown.after,
        **({} if video is None else {"video_token_id": video.text.each}),
    }
    return {key: tokenizer.require_id(piece) for key, piece in pieces.items()}


def kind_of(language: LanguageConfig) -> LanguageType:
    """Return Transformers' type of a language model, by its norms, biases and experts."""
    if language.qk_norm:
        return "qwen3" if language.kinds[0].experts is None else "qwen3_moe"
    return "qwen2" if language.qkv_bias else "llama"


def _language_entries(language: LanguageConfig, kind: LanguageType) -> dict[str, Any]:
    """Return the entries of a language model, except RoPE's."""
    linear = next((kind.linear for kind in language.kinds if kind.linear is not None), None)
    experts = language.kinds[0].experts
    table: type[TextTable] = LANGUAGES[kind]
    if linear is not None:
        table = qwen.HybridText if experts is None else qwen.HybridMoeText
    entries = table.entries_of(language) | {
        "model_type": kind,
        "hidden_act": "silu",
        "max_position_embeddings": language.max_positions or _DEFAULT_POSITIONS,
        "num_key_value_heads": language.kv_heads,
        "tie_word_embeddings": language.tied_head,
    }
    if language.head_size is not None or kind in ("qwen3", "qwen3_moe"):
        entries["head_dim"] = language.head_width
    if experts is not None:
        coefficient = released_coefficient(
            experts.auxiliary_loss, experts.experts_per_token, language.layers
        )
        entries |= table.entries_of(experts, "experts") | {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "output_router_logits": experts.auxiliary_loss > 0,
            "router_aux_loss_coef": coefficient,
        }
    if linear is not None:
        names = ("full_attention", "linear_attention")
        entries |= table.entries_of(linear, "linear") | {
            "attn_output_gate": language.output_gate,
            "layer_types": [names[kind.linear is not None] for kind in language.kinds],
        }
    return entries


def _rope_entries(language: LanguageConfig) -> dict[str, Any]:
    # rope_theta and rope_scaling are names of Transformers 4, rope_parameters of 5.
    base, scaling = {"rope_theta": float(language.rope_base)}, _rope_scaling(language)
    if not scaling:
        return base | {"rope_parameters": base | {"rope_type": "default"}}
    return base | {"rope_parameters": base | scaling, "rope_scaling": scaling}


def _rope_scaling(language: LanguageConfig) -> dict[str, Any]:
    """Return RoPE's scaling or sections, empty without either."""
    scaling, sections = language.rope_scaling, language.rope_sections
    if sections is not None:
        interleaved = {"mrope_interleaved": True} if sections.interleaved else {}
        share = 2 * (sections.time + sections.rows + sections.columns) / language.head_width
        partial = {"partial_rotary_factor": share} if share < 1 else {}
        return (
            interleaved
            | partial
            | {
                "rope_type": "default",
                "mrope_section": [sections.time, sections.rows, sections.columns],
            }
        )
    if scaling is not None:
        return {
            "rope_type": SCALES_WAVES,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }
    if language.rope_factor is not None:
        return {"rope_type": SCALES_LATER, "factor": language.rope_factor}
    return {}


def _dtype_entries(dtype: str) -> dict[str, Any]:
    return {"dtype": dtype, "torch_dtype": dtype}  # names of Transformers 5 and 4


def _make_internvl_config(model: ModelConfig, layout: TensorLayout, dtype: str) -> dict[str, Any]:
    vision, tiling, kind = model.vision, model.vision.tiling, layout.language
    assert kind is not None
    scaling = _rope_scaling(model.language)
    # InternVL's code reads the kind of scaling only as `type`.
    scaling = {"type" if name == "rope_type" else name: value for name, value in scaling.items()}
    message = model.chat_system_message
    message = model.system_message if message is None else message
    system = {} if message is None else {"system_message": message}
    return system | {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "downsample_ratio": vision.downsample_ratio,
        "dynamic_image_size": tiling.max_dynamic_patch > 1,
        "force_image_size": vision.image_size,
        "llm_config": {"architectures": [LANGUAGES[kind].architecture], "bias": False}
        | _language_entries(model.language, kind)
        | {"rope_theta": float(model.language.rope_base)}
        | ({"rope_scaling": scaling} if scaling else {}),
        "max_dynamic_patch": tiling.max_dynamic_patch,
        "min_dynamic_patch": tiling.min_dynamic_patch,
        "ps_version": "v2",  # of the pixel shuffle
        "select_layer": -1,  # features of the last layer
        "template": model.chat_template,
        "tie_word_embeddings": model.language.tied_head,
        "torch_dtype": dtype,
        "use_thumbnail": tiling.use_thumbnail,
        "vision_config": OriginalVision.entries_of(vision)
        | {
            "architectures": ["InternVisionModel"],
            "model_type": "intern_vit_6b",
            "hidden_act": "gelu",
            "norm_type": _NORM_TYPES[vision.normalization],
        },
    }


def _make_transformers_config(
    model: ModelConfig, dtype: str, item_ids: Mapping[str, int]
) -> dict[str, Any]:
    vision, language = model.vision, model.language
    return {
        **item_ids,
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "downsample_ratio": vision.downsample_ratio,
        **_dtype_entries(dtype),
        "image_seq_length": vision.tokens_per_item,
        "text_config": _language_entries(language, kind_of(language)) | _rope_entries(language),
        "tie_word_embeddings": language.tied_head,
        "vision_config": TransformersVision.entries_of(vision)
        | {
            "model_type": "internvl_vision",
            "image_size": [vision.image_size, vision.image_size],
            "norm_type": _NORM_TYPES[vision.normalization],
            "patch_size": [vision.patch_size, vision.patch_size],
        },
    }


def internvl_processor_files(model: ModelConfig, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the settings of Transformers' InternVLProcessor and of its tokenizer, by file name.

    A tokenizer.json without template, as InternVL's own, gets a ChatML template.
    """
    path = tokenizer.path.with_name(TOKENIZER_CONFIG_FILE)
    settings: dict[str, Any] = {}
    if path.is_file():
        settings = read_json_model(dict[str, Any], path, "restore the tokenizer's own")
    pieces = {name: settings.get(name, piece) for name, piece in _INTERNVL_PIECES.items()}
    special = settings.get("extra_special_tokens")
    extra = {**pieces, **(special if isinstance(special, dict) else {})}
    settings |= {**pieces, "extra_special_tokens": extra, "processor_class": "InternVLProcessor"}
    processor = {
        "image_seq_length": model.vision.tokens_per_item,
        "processor_class": "InternVLProcessor",
    }
    files = {
        TOKENIZER_CONFIG_FILE: json_text(settings, ascii_only=False),
        PROCESSOR_FILE: json_text(processor),
    }
    texts = chatml_texts(model)
    if tokenizer.template is None and texts is not None and tokenizer.path.name == FAST_FILE:
        message, line_end = texts
        template = Path(__file__).with_name(_INTERNVL_TEMPLATE).read_text()
        template = template.replace("SYSTEM", json.dumps(message, ensure_ascii=False))
        files[TEMPLATE_FILE] = template.replace("LINE_END", json.dumps(line_end))
    return files


def qwen_files(
    model: ModelConfig,
    tower: ImagesEncoder,
    layout: TensorLayout,
    dtype: str,
    ids: Mapping[str, int],
) -> dict[str, dict[str, Any]]:
    """Return the contents of a Qwen-VL's config.json and processor files, by file name."""
    kind, language, video = layout.family, model.language, tower.video
    assert layout.language is not None
    architecture, processor, video_processor, _ = _QWENS[kind]
    text = _language_entries(language, layout.language) | {"model_type": f"{kind}_text"}
    files: dict[str, dict[str, Any]] = {
        CONFIG_FILE: {
            "architectures": [f"{architecture}ForConditionalGeneration"],
            "model_type": kind,
            **_dtype_entries(dtype),
            **ids,
            "text_config": text | _rope_entries(language) | _dtype_entries(dtype),
            "tie_word_embeddings": language.tied_head,
            "vision_config": _qwen_tower(tower, kind, language.hidden_size),
        },
        PREPROCESSOR_FILE: _qwen_processor(tower, tower.min_pixels, tower.max_pixels)
        | {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": f"{processor}Processor",
        },
    }
    if video is not None:
        files[VIDEO_FILE] = _qwen_processor(tower, video.min_pixels, video.max_pixels) | {
            "fps": video.frames_per_second,
            "max_frames": video.max_frames,
            "min_frames": video.min_frames,
            "processor_class": f"{processor}Processor",
            "video_processor_type": f"{video_processor}VideoProcessor",
        }
    return files


def _qwen_tower(tower: ImagesEncoder, kind: str, width: int) -> dict[str, Any]:
    """Return the entries of a family's image encoder with features of size `width`."""
    table = _QWENS[kind][3]
    assert table.output_key is not None
    constants = {key: values[0] for key, values in table.section().must.items()}
    entries = table.entries_of(tower) | constants | {"model_type": kind, table.output_key: width}
    rate = None if tower.video is None else tower.video.positions_per_second
    if table is qwen.Qwen2VLVision:
        entries["mlp_ratio"] = _as_integer(tower.ffn_hidden_size / tower.hidden_size)
    elif rate is not None:
        entries["tokens_per_second"] = _as_integer(rate)
    return entries


def _qwen_processor(tower: ImagesEncoder, min_pixels: int, max_pixels: int) -> dict[str, Any]:
    return _PROCESSOR | {
        "image_mean": list(tower.pixel_mean),
        "image_std": list(tower.pixel_std),
        "merge_size": tower.merge_size,
        "patch_size": tower.patch_size,
        "rescale_factor": tower.pixel_scale,
        "size": {"longest_edge": max_pixels, "shortest_edge": min_pixels},
        "temporal_patch_size": tower.frames_per_patch,
    }


def _as_integer(number: float) -> float:
    # Transformers 5 checks types: 4.0 is not an int.
    return int(number) if number.is_integer() else number
