"""Conversion of a released config.json to a ModelConfig, and checks of the inverse.

Reads the original InternVLChatConfig, Transformers' InternVLConfig, Qwen2VLConfig,
Qwen2_5_VLConfig, Qwen3VLConfig and Qwen3VLMoeConfig (`omnibal.families`), and the text-only
LlamaConfig, Qwen2Config, Qwen3Config and Qwen3MoeConfig, and Qwen3.5's with and without images.
Unsupported settings raise an error.
"""

import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megatron.vlm.checkpoint.identity import architecture_differences
from megatron.vlm.conversion.config_files import kind_of
from megatron.vlm.conversion.tensor_map import (
    LayoutFamily,
    TensorLayout,
    has_stacked_experts,
    head_name,
)
from omnibal.base.errors import UserError
from omnibal.families.folder import CONFIG_FILE, config_errors, model_name, read_config_file
from omnibal.families.hub import TRAINED_TYPES, is_quantized, read_config_table
from omnibal.families.hub_table import as_table
from omnibal.families.internvl import (
    TRANSFORMERS_QK_NORM_EPS,
    internvl_language,
    internvl_model,
    is_internvl,
    is_original,
    is_tied,
)
from omnibal.families.text import LANGUAGES, LanguageType, language_type
from omnibal.model.config import ModelConfig
from omnibal.model.layer_kinds import ExpertsConfig, LayerKind
from omnibal.model.limits import words

_PREFIXED_TOWERS = ("model.vision_tower.", "model.visual.")


def read_config(directory: Path, names: Collection[str]) -> tuple[ModelConfig, TensorLayout]:
    """Return a released model and its layout, given its folder and its tensors' names."""
    path = directory / CONFIG_FILE
    given = read_config_file(path)
    if is_quantized(given):
        raise UserError(
            f"{path}: has a quantization_config; weights must be unquantized: give a release in "
            "floating point"
        )
    name, stated = model_name(directory), given.get("model_type")
    with config_errors(path):
        named = [layout for layout in TensorLayout if layout.is_qwen_vl or layout.is_hybrid]
        for family in {layout.family for layout in named}:
            if stated == family:
                model = read_config_table(given, name, path)
                if len({kind.experts for kind in model.language.kinds}) > 1:
                    raise ValueError(
                        "has a decoder_sparse_step or mlp_only_layers that leave layers without "
                        "experts; they must be 1 and []: experts in every layer"
                    )
                return model, _find_layout(family, None, names)
        if is_internvl(given):
            layout = _find_internvl_layout(given, names)
            return internvl_model(given, name, path, has_head=head_name(layout) in names), layout
        supported = _languages_of("text")
        if stated not in supported:
            raise ValueError(
                f"is of a model of type {stated!r}, which is not converted; it must be one of "
                f"{words(list(TRAINED_TYPES), 'or')}"
            )
        kind = language_type(given, [language for language in supported if language == stated])
        table = as_table(LANGUAGES[kind], given, str(path), lenient=True)
        table.check_trained()
        layout = _find_layout("text", kind, names)
        has_head = head_name(layout) in names
        tied = is_tied(table.tie_word_embeddings, None, original=False, has_head=has_head)
        return table.as_model(name, tied_head=tied), layout


def _languages_of(family: LayoutFamily) -> list[LanguageType]:
    kinds = [layout.language for layout in TensorLayout if layout.family == family]
    return [kind for kind in dict.fromkeys(kinds) if kind is not None]


def _find_layout(
    family: LayoutFamily, kind: LanguageType | None, names: Collection[str]
) -> TensorLayout:
    """Return the layout of a family and kind of language model that has these tensor names."""
    forms = [
        layout
        for layout in TensorLayout
        if layout.family == family and kind in (None, layout.language)
    ]
    is_stacked = has_stacked_experts(names)
    # Of stacked layouts the first, transposed: names do not show it (`open_released` does).
    forms = [layout for layout in forms if (layout.experts != "apart") == is_stacked] or forms
    is_prefixed = any(name.startswith(_PREFIXED_TOWERS) for name in names)
    alike = [layout for layout in forms if (layout.root == "model.language_model") == is_prefixed]
    return (alike or forms)[0]


def _find_internvl_layout(given: dict[str, Any], names: Collection[str]) -> TensorLayout:
    if not is_original(given):
        return _find_layout("transformers", None, names)
    kind, supported = internvl_language(given), _languages_of("internvl")
    if kind not in supported:
        names_of_supported = [LANGUAGES[language].architecture for language in supported]
        raise ValueError(
            f"its language model is {LANGUAGES[kind].architecture}, which can be planned but not "
            f"converted; it must be {words(names_of_supported, 'or')}"
        )
    return _find_layout("internvl", kind, names)


def check_exportable(model: ModelConfig, layout: TensorLayout) -> None:
    """Raise UserError if the layout cannot describe the model."""
    language, experts = model.language, model.language.kinds[0].experts
    inner = 0 if experts is None else experts.ffn_hidden_size
    is_square = experts is not None and language.hidden_size in (inner, 2 * inner)
    kind = layout.language or kind_of(language)
    is_qwen3 = kind in ("qwen3", "qwen3_moe")
    # Layers with the fields that config.json has, and `imbalance`, which only the cost model uses.
    fields = {"experts", "experts_per_token", "ffn_hidden_size", "normalized", "auxiliary_loss"}
    if layout.is_hybrid:
        fields |= {"shared_ffn_hidden_size", "shared_gate"}
    known = experts and ExpertsConfig(**experts.model_dump(include={*fields, "imbalance"}))
    linears = {kind.linear for kind in language.kinds if layout.is_hybrid}
    released_kinds = {LayerKind(experts=known, linear=linear) for linear in {None, *linears}}
    obstacles = [
        (layout.is_text_only and bool(model.encoders), "an encoder"),
        (not (layout.is_text_only or model.encoders), "no encoder"),
        (model.takes_audio, "an audio encoder"),
        (layout.is_qwen_vl and model.takes_images, "an encoder of tiles"),
        (not layout.is_qwen_vl and model.images is not None, "images at their native resolution"),
        (language.qkv_bias != (kind == "qwen2"), f"qkv_bias {str(language.qkv_bias).lower()}"),
        (language.qk_norm != is_qwen3, f"qk_norm {str(language.qk_norm).lower()}"),
        (
            (experts is not None) != (kind == "qwen3_moe"),
            "dense feed-forwards" if experts is None else "experts",
        ),
        (not set(language.kinds) <= released_kinds, "layers of another kind than Qwen3's"),
        (layout.is_hybrid != language.output_gate, "attention with another gate"),
        (language.prediction_layers > layout.is_hybrid, "a prediction layer"),
        (kind == "internlm2" and language.head_size is not None, "a head_size"),
        (
            not (layout.is_qwen_vl or layout.is_hybrid) and language.rope_sections is not None,
            "RoPE of rows and columns",
        ),
        # Transformers 5 could not infer their transposition.
        (layout.experts == "transposed" and is_square, "experts with square matrices"),
    ]
    if model.takes_images:
        vision = model.vision
        has_other_norm = vision.qk_norm and vision.norm_eps != TRANSFORMERS_QK_NORM_EPS
        obstacles += [
            (vision.layer_scale_init is None, "no layer scale"),
            (
                not layout.is_original and has_other_norm,
                f"q and k norms with norm_eps {vision.norm_eps}",
            ),
        ]
    for is_present, obstacle in obstacles:
        if is_present:
            raise UserError(
                f"{model.name} has {obstacle}, which layout {layout} cannot hold; choose another"
            )


def check_read_back(
    model: ModelConfig, layout: TensorLayout, files: Mapping[str, str], names: Collection[str]
) -> None:
    """Raise UserError unless reading these configurations (text by file) gives this model."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        try:
            again, _ = read_config(Path(folder), names)
        except UserError as error:
            raise UserError(
                f"{model.name} is no model of layout {layout}: {error}; choose another"
            ) from error
    different = architecture_differences(model, again, "there")
    rate, there = _position_rate(model), _position_rate(again)
    if rate != there:
        different.append(f"positions_per_second is {rate} and {there} there")
    if different:
        raise UserError(
            f"{model.name} is no model that Transformers has of layout {layout}: "
            f"{'; '.join(different)}; choose another"
        )


def _position_rate(model: ModelConfig) -> float | None:
    """Return positions per second of video, None if each frame group is one position."""
    video = None if model.images is None else model.images.video
    return None if video is None else video.positions_per_second
