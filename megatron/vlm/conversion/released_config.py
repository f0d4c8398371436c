"""Conversion of a released config.json to a ModelConfig, and checks of the inverse.

Reads the original InternVLChatConfig, Transformers' InternVLConfig, Qwen2VLConfig,
Qwen2_5_VLConfig, Qwen3VLConfig and Qwen3VLMoeConfig (`omnibal.families`), and the text-only
LlamaConfig, Qwen2Config, Qwen3Config and Qwen3MoeConfig, and Qwen3.5's with and without images.
Unsupported settings raise an error.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron.vlm.checkpoint.identity import architecture_differences, differences
from megatron.vlm.conversion.config_files import configurations
from megatron.vlm.conversion.tensor_map import TensorLayout, has_stacked_experts, head_name
from omnibal.base.errors import UserError
from omnibal.families.folder import CONFIG_FILE, config_errors, model_name, read_config_file
from omnibal.families.hub import TRAINED_TYPES, is_quantized, read_config_table
from omnibal.families.hub_table import as_table
from omnibal.families.internvl import (
    internvl_language,
    internvl_model,
    is_internvl,
    is_original,
    is_tied,
)
from omnibal.families.text import LANGUAGES, LanguageType, language_type, runs_of
from omnibal.model.config import ModelConfig
from omnibal.model.limits import words
from omnibal.model.units import LANGUAGE

_PREFIXED_TOWERS = ("model.vision_tower.", "model.visual.")


def read_config(directory: Path, names: Collection[str]) -> tuple[ModelConfig, TensorLayout]:
    """Return a released model and its layout, given its folder and its tensors' names."""
    path = directory / CONFIG_FILE
    return _read_table(read_config_file(path), path, names)


def _read_table(
    given: dict[str, Any], path: Path, names: Collection[str]
) -> tuple[ModelConfig, TensorLayout]:
    if is_quantized(given):
        raise UserError(
            f"{path}: has a quantization_config; weights must be unquantized: give a release in "
            "floating point"
        )
    name, stated = model_name(path.parent), str(given.get("model_type"))
    with config_errors(path):
        if is_internvl(given):
            kind = internvl_language(given) if is_original(given) else None
            layout = _find_layout("transformers" if kind is None else "internvl", kind, names)
            return internvl_model(given, name, path, has_head=head_name(layout) in names), layout
        text = next((kind for kind in LANGUAGES if kind == stated), None)
        layout = _find_layout(stated if text is None else "text", text, names)
        if text is not None:
            table = as_table(
                LANGUAGES[language_type(given, [text])], given, str(path), lenient=True
            )
            table.check_trained()
            has_head = head_name(layout) in names
            tied = is_tied(table.tie_word_embeddings, None, original=False, has_head=has_head)
            return table.as_model(name, tied_head=tied), layout
        model = read_config_table(given, name, path)
        if len({kind.experts for kind in model.language.kinds}) > 1:
            raise ValueError(
                "has a decoder_sparse_step or mlp_only_layers that leave layers without experts; "
                "they must be 1 and []: experts in every layer"
            )
        return model, layout


def _find_layout(family: str, kind: LanguageType | None, names: Collection[str]) -> TensorLayout:
    """Return the layout of a family and kind of language model that has these tensor names."""
    forms = [
        layout
        for layout in TensorLayout
        if layout.family == family and kind in (None, layout.language)
    ]
    if not forms:
        language = "" if kind is None else f" with {LANGUAGES[kind].architecture}"
        raise ValueError(
            f"is of a model of type {family!r}{language}, which is not converted; it must be one "
            f"of {words(list(TRAINED_TYPES), 'or')}"
        )
    is_stacked = has_stacked_experts(names)
    # Of stacked layouts the first, transposed: names do not show it (`open_released` does).
    forms = [layout for layout in forms if (layout.experts != "apart") == is_stacked] or forms
    is_prefixed = any(name.startswith(_PREFIXED_TOWERS) for name in names)
    alike = [layout for layout in forms if (layout.root == "model.language_model") == is_prefixed]
    return (alike or forms)[0]


def check_exportable(model: ModelConfig, layout: TensorLayout) -> None:
    """Raise UserError unless configurations of the layout, read again, describe the model."""
    kinds = [tower.kind for tower in model.encoders.values()]
    held = [] if layout.is_text_only else ["images" if layout.is_qwen_vl else "tiles"]
    language, experts = model.language, model.language.kinds[0].experts
    flaws = []
    if kinds != held:
        own, other = (" and ".join(parts) or "none" for parts in (kinds, held))
        flaws = [f"its encoder is of {own}, and the layout's of {other}"]
    elif layout.experts == "transposed" and experts is not None:
        inner = experts.ffn_hidden_size
        if language.hidden_size in (inner, 2 * inner):
            flaws = ["Transformers 5 cannot infer how square matrices of experts are transposed"]
    flaws = flaws or _differences_when_read(model, layout)
    if flaws:
        raise UserError(
            f"{model.name} is no model of layout {layout}: {'; '.join(flaws)}; choose another"
        )


def _differences_when_read(model: ModelConfig, layout: TensorLayout) -> list[str]:
    """Return how a model differs that is read from the configurations that an export writes."""
    has_head = layout.is_original or not model.language.tied_head
    given = json.loads(configurations(model, layout, "float32", None)[CONFIG_FILE])
    path = Path(f"layout {layout}", CONFIG_FILE)  # no such folder, so no processor's file is read
    try:
        again, _ = _read_table(given, path, [head_name(layout)] if has_head else [])
    except UserError as error:
        return [str(error)]
    own = model.with_tower(LANGUAGE, runs=runs_of(model.language.kinds))
    place = f"in layout {layout}"
    there, here = ({"positions_per_second": _position_rate(each)} for each in (model, again))
    return architecture_differences(own, again, place) + differences(there, here, place)


def _position_rate(model: ModelConfig) -> float | None:
    """Return positions per second of video, None if each frame group is one position."""
    video = None if model.images is None else model.images.video
    return None if video is None else video.positions_per_second
