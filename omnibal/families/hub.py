"""Models of a hub's `config.json`, by its model_type."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omnibal.base.errors import UserError
from omnibal.families import deepseek, gemma, glm, gpt, internvl, kimi, qwen, text
from omnibal.families.folder import CONFIG_FILE, config_errors, model_name, read_config_file
from omnibal.families.vision import read_vision_language
from omnibal.model.config import ModelConfig
from omnibal.model.limits import words

Reader = Callable[[dict[str, Any], str, Path], ModelConfig]  # of content, model name, path


@dataclass(frozen=True, slots=True)
class HubFamily:
    """Model family that can be planned (docs/models.md)."""

    name: str
    readers: Mapping[str, Reader]  # by model_type
    is_trained: bool = False  # by this project's trainer, which also converts its checkpoints


def _vision(*tables: Any, **options: Any) -> Reader:
    return partial(read_vision_language, *tables, **options)


FAMILIES = (
    HubFamily(
        "InternVL 1.5 to 3.5",
        {"internvl_chat": internvl.read_internvl, "internvl": internvl.read_internvl},
        is_trained=True,
    ),
    HubFamily(
        "Qwen2-VL", {"qwen2_vl": partial(qwen.read_flat, qwen.Qwen2VLVision)}, is_trained=True
    ),
    HubFamily(
        "Qwen2.5-VL", {"qwen2_5_vl": partial(qwen.read_flat, qwen.Qwen25VLVision)}, is_trained=True
    ),
    HubFamily(
        "Qwen3-VL",
        {
            "qwen3_vl": _vision(qwen.Qwen3VLVision, qwen.Qwen3VLText),
            "qwen3_vl_moe": _vision(qwen.Qwen3VLVision, qwen.Qwen3VLMoeText),
        },
        is_trained=True,
    ),
    HubFamily(
        "Qwen3.5, 3.6, 3.8",
        {
            "qwen3_5": _vision(qwen.Qwen35Vision, qwen.HybridText),
            "qwen3_5_moe": _vision(qwen.Qwen35Vision, qwen.HybridMoeText),
            "qwen3_5_text": partial(text.read_language_model, qwen.HybridText),
            "qwen3_5_moe_text": partial(text.read_language_model, qwen.HybridMoeText),
        },
        is_trained=True,
    ),
    HubFamily("LLaVA-OneVision-1.5", {"llavaonevision1_5": _vision(qwen.RiceVit, qwen.LlavaText)}),
    HubFamily("GLM-4.5V, 4.6V", {"glm4v_moe": _vision(glm.GlmVision, glm.GlmText)}),
    HubFamily(
        "Kimi-VL, Kimi-K2.5",
        {
            kind: _vision(tower, deepseek.DeepseekV3Text, kind=kimi.KimiTable)
            for kind, tower in (("kimi_vl", kimi.MoonVit), ("kimi_k25", kimi.MoonVit3d))
        },
    ),
    HubFamily(
        "Gemma 3",
        {
            "gemma3": _vision(gemma.SiglipVision, gemma.GemmaText, kind=gemma.GemmaTable),
            "gemma3_text": partial(text.read_language_model, gemma.GemmaText),
        },
    ),
    HubFamily(
        "DeepSeek-V2, V3, Kimi-K2",
        {
            "deepseek_v2": partial(text.read_language_model, deepseek.DeepseekV2Text),
            "deepseek_v3": partial(text.read_language_model, deepseek.DeepseekV3Text),
            "kimi_k2": partial(text.read_language_model, deepseek.DeepseekV3Text),
        },
    ),
    HubFamily(
        "GPT-2, GPT-OSS, MPT, Nemotron-4",
        {
            "gpt2": partial(text.read_language_model, gpt.Gpt2Text),
            "gpt_oss": partial(text.read_language_model, gpt.GptOssText),
            "mpt": gpt.read_mpt,
            "nemotron": partial(text.read_language_model, gpt.NemotronText),
        },
    ),
    HubFamily(
        "Llama, Qwen2, Qwen3",
        {
            "llama": partial(text.read_language_model, text.LlamaText),
            "qwen2": partial(text.read_language_model, text.Qwen2Text),
            "qwen3": partial(text.read_language_model, text.Qwen3Text),
            "qwen3_moe": partial(text.read_language_model, text.Qwen3MoeText),
        },
        is_trained=True,
    ),
)
_READERS = {kind: reader for family in FAMILIES for kind, reader in family.readers.items()}
TRAINED_TYPES = tuple(kind for family in FAMILIES if family.is_trained for kind in family.readers)


def read_hub_config(path: Path) -> ModelConfig:
    """Return the model of a `config.json` or its folder; raises UserError.

    Pixel limits come from the image processor's file, or from the family's releases.
    """
    path = path / CONFIG_FILE if path.is_dir() else path
    given = read_config_file(path)
    with config_errors(path):
        return read_config_table(given, model_name(path.parent), path)


def read_config_table(given: dict[str, Any], name: str, path: Path) -> ModelConfig:
    """Return model `name` of a `config.json`'s content. Raise if its model_type is unknown."""
    kind = given.get("model_type")
    if not isinstance(kind, str):
        raise UserError(f"{path}: has no model_type; pass a config.json of a model hub")
    reader = _READERS.get(kind)
    if reader is None:
        raise UserError(
            f"{path}: model_type {kind!r} is not known; it must be one of "
            f"{', '.join(sorted(_READERS))}; describe other models in TOML (docs/models.md)"
        )
    return reader(given, name, path)


def config_notes(path: Path) -> list[str]:
    """Return notes on settings of a `config.json` that plans ignore."""
    given, notes = read_config_file(path), []
    if is_quantized(given):
        stored = f"{path} has a quantization_config"
        notes.append(f"{stored}: weights are planned in --precision, not as they are stored")
    unread = internvl.unread_keys(given) if internvl.is_internvl(given) else []
    if unread:
        notes.append(f"{path} has keys that are not understood, {words(unread)}: planned without")
    return notes


def is_quantized(given: dict[str, Any]) -> bool:
    """Return whether weights are stored quantised, by any table of a `config.json`."""
    tables = (value for value in given.values() if isinstance(value, dict))
    return given.get("quantization_config") is not None or any(map(is_quantized, tables))
