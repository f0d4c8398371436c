"""Read a hub's `config.json` as a ModelConfig."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omnibal.base.errors import UserError
from omnibal.families import deepseek, gemma, glm, gpt, internvl, kimi, qwen, text
from omnibal.families.folder import CONFIG_FILE, model_name, naming, read_config_file
from omnibal.families.vision import read_vision_language
from omnibal.model.config import ModelConfig
from omnibal.model.limits import words

_QUANTIZED = "quantization_config"
Reader = Callable[[dict[str, Any], str, Path], ModelConfig]


@dataclass(frozen=True, slots=True)
class Family:
    """A model family that can be planned (docs/models.md)."""

    name: str
    readers: Mapping[str, Reader]
    """Readers by model_type."""
    is_trained: bool = False
    """Whether the trainer supports it (fully or with adapters) and converts its checkpoints."""


def _vision(*tables: Any, **options: Any) -> Reader:
    return partial(read_vision_language, *tables, **options)


FAMILIES = (
    Family(
        "InternVL 1.5 to 3.5",
        {"internvl_chat": internvl.read_internvl, "internvl": internvl.read_internvl},
        is_trained=True,
    ),
    Family("Qwen2-VL", {"qwen2_vl": partial(qwen.read_flat, qwen.Qwen2VLVision)}, is_trained=True),
    Family(
        "Qwen2.5-VL", {"qwen2_5_vl": partial(qwen.read_flat, qwen.Qwen25VLVision)}, is_trained=True
    ),
    Family(
        "Qwen3-VL",
        {
            "qwen3_vl": _vision(qwen.Qwen3VLVision, qwen.Qwen3VLText, checks_rope=True),
            "qwen3_vl_moe": _vision(qwen.Qwen3VLVision, qwen.Qwen3VLMoeText, checks_rope=True),
        },
        is_trained=True,
    ),
    Family(
        "Qwen3.5, 3.6, 3.8",
        {
            "qwen3_5": _vision(qwen.Qwen35Vision, qwen.HybridText),
            "qwen3_5_moe": _vision(qwen.Qwen35Vision, qwen.HybridMoeText),
            "qwen3_5_text": partial(text.read_text, qwen.HybridText),
            "qwen3_5_moe_text": partial(text.read_text, qwen.HybridMoeText),
        },
    ),
    Family("LLaVA-OneVision-1.5", {"llavaonevision1_5": _vision(qwen.RiceVit, text.Qwen3Text)}),
    Family("GLM-4.5V, 4.6V", {"glm4v_moe": _vision(glm.GlmVision, glm.GlmText)}),
    Family(
        "Kimi-VL, Kimi-K2.5",
        {
            kind: _vision(tower, deepseek.DeepseekV3Text, kind=kimi.KimiTable)
            for kind, tower in (("kimi_vl", kimi.MoonVit), ("kimi_k25", kimi.MoonVit3d))
        },
    ),
    Family(
        "Gemma 3",
        {
            "gemma3": _vision(gemma.SiglipVision, gemma.GemmaText, kind=gemma.GemmaTable),
            "gemma3_text": partial(text.read_text, gemma.GemmaText),
        },
    ),
    Family(
        "DeepSeek-V2, V3, Kimi-K2",
        {
            "deepseek_v2": partial(text.read_text, deepseek.DeepseekV2Text),
            "deepseek_v3": partial(text.read_text, deepseek.DeepseekV3Text),
            "kimi_k2": partial(text.read_text, deepseek.DeepseekV3Text),
        },
    ),
    Family(
        "GPT-2, GPT-OSS, MPT, Nemotron-4",
        {
            "gpt2": partial(text.read_text, gpt.Gpt2Text),
            "gpt_oss": partial(text.read_text, gpt.GptOssText),
            "mpt": gpt.read_mpt,
            "nemotron": partial(text.read_text, gpt.NemotronText),
        },
    ),
    Family(
        "Llama, Qwen2, Qwen3",
        {
            "llama": partial(text.read_text, text.LlamaText),
            "qwen2": partial(text.read_text, text.Qwen2Text),
            "qwen3": partial(text.read_text, text.Qwen3Text),
            "qwen3_moe": partial(text.read_text, text.Qwen3MoeText),
        },
        is_trained=True,
    ),
)
_READERS = {kind: reader for family in FAMILIES for kind, reader in family.readers.items()}
TRAINED_TYPES = tuple(kind for family in FAMILIES if family.is_trained for kind in family.readers)
"""Every model_type that is trained and converted."""


def read_hub_config(path: Path) -> ModelConfig:
    """Read a hub's `config.json`, given its path or folder.

    Pixel limits come from the image processor's file, or the released models' defaults.
    """
    path = path / CONFIG_FILE if path.is_dir() else path
    given = read_config_file(path)
    with naming(path):
        return read_config_table(given, model_name(path.parent), path)


def read_config_table(given: dict[str, Any], name: str, path: Path) -> ModelConfig:
    """Read the content of a `config.json` at `path`, as the model `name`."""
    kind = given.get("model_type")
    if not isinstance(kind, str):
        raise UserError(
            f"{path}: has no model_type, which must name the family; pass a config.json of a model "
            "hub"
        )
    reader = _READERS.get(kind)
    if reader is None:
        raise UserError(
            f"{path}: model_type {kind!r} is not known; it must be one of "
            f"{', '.join(sorted(_READERS))}; describe another model in a file of its own, as "
            "docs/models.md says"
        )
    return reader(given, name, path)


def config_notes(path: Path) -> list[str]:
    """Notes for users on how a `config.json` is planned."""
    given, notes = read_config_file(path), []
    if is_quantized(given):
        stored = f"{path} has a quantization_config"
        notes.append(f"{stored}: weights are planned in --precision, not as they are stored")
    unread = internvl.unread_keys(given) if internvl.is_internvl(given) else []
    if unread:
        notes.append(f"{path} has keys that are not understood, {words(unread)}: planned without")
    return notes


def is_quantized(given: dict[str, Any]) -> bool:
    """Whether weights are stored quantised."""
    within = (value for value in given.values() if isinstance(value, dict))
    return given.get(_QUANTIZED) is not None or any(map(is_quantized, within))
