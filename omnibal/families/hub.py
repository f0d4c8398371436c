"""The way in: a hub's `config.json` as a ModelConfig."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from omnibal.config import ModelConfig
from omnibal.errors import UserError
from omnibal.families import deepseek, gemma, glm, kimi, llava_onevision, qwen, text_only
from omnibal.families.folder import CONFIG_FILE, model_name
from omnibal.families.internvl import read_internvl, unread_keys
from omnibal.files import complaint, read_text

_QUANTIZED = "quantization_config"
_REMEDY = "pass a config.json of a model hub, or the folder of one"
Reader = Callable[[dict[str, Any], str, Path], ModelConfig]


def _internvl(given: dict[str, Any], name: str, path: Path) -> ModelConfig:
    return read_internvl(path)


_READERS: dict[str, Reader] = {
    "llama": text_only.read_llama,
    "qwen2": text_only.read_qwen2,
    "qwen3": text_only.read_qwen3,
    "qwen3_moe": text_only.read_qwen3_moe,
    "internvl_chat": _internvl,
    "internvl": _internvl,
    "qwen2_vl": qwen.read_qwen2_vl,
    "qwen2_5_vl": qwen.read_qwen2_5_vl,
    "qwen3_vl": qwen.read_qwen3_vl,
    "qwen3_vl_moe": qwen.read_qwen3_vl_moe,
    "qwen3_5": qwen.read_qwen3_5,
    "qwen3_5_moe": qwen.read_qwen3_5_moe,
    "qwen3_5_text": qwen.read_qwen3_5_text,
    "qwen3_5_moe_text": qwen.read_qwen3_5_text,
    "llavaonevision1_5": llava_onevision.read_llava_onevision_1_5,
    "glm4v_moe": glm.read_glm4v_moe,
    "kimi_vl": kimi.read_kimi_vl,
    "kimi_k25": kimi.read_kimi_k2_5,
    "gemma3": gemma.read_gemma3,
    "gemma3_text": gemma.read_gemma3_text,
    "deepseek_v2": deepseek.read_deepseek_v2,
    "deepseek_v3": deepseek.read_deepseek_v3,
    "kimi_k2": deepseek.read_deepseek_v3,
}
"""Readers of whole files, by model_type."""
_REFUSED = {
    "gpt_oss": "its attention has learned sinks and its experts have biases",
}
"""Why a well-known kind of model is not planned, by model_type."""


def read_hub_config(path: Path) -> ModelConfig:
    """Read the `config.json` of a model hub, or the one in a folder.

    Limits of an image's pixels are those of the image processor's file beside it, or of the
    family's released models.

    Raises:
        UserError: the file is broken, of a family that is not planned, or has a key that is not
            understood, which the message names.
    """
    path = path / CONFIG_FILE if path.is_dir() else path
    given = _read_json(path)
    kind = given.get("model_type")
    if not isinstance(kind, str):
        raise UserError(f"{path}: has no model_type, which must name the family; {_REMEDY}")
    if kind in _REFUSED:
        raise UserError(f"{path}: model_type {kind} is not planned: {_REFUSED[kind]}")
    reader = _READERS.get(kind)
    if reader is None:
        raise UserError(
            f"{path}: model_type {kind!r} is not known; it must be one of "
            f"{', '.join(sorted(_READERS))}; describe another model in a file of its own, as "
            "docs/models.md says"
        )
    try:
        return reader(given, model_name(path.parent), path)
    except UserError:
        raise
    except ValidationError as error:
        raise UserError(f"{path}: {complaint(error.errors()[0])}") from error
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def has_quantized_weights(path: Path) -> bool:
    """Whether a hub's `config.json`, or a table in it, says that weights are stored quantised.

    Raises:
        UserError: the file cannot be read.
    """
    return _is_quantized(_read_json(path))


def keys_not_understood(path: Path) -> list[str]:
    """Keys of a hub's `config.json` that a model is made without, which only InternVL's may have.

    Raises:
        UserError: the file cannot be read.
    """
    given = _read_json(path)
    return unread_keys(given) if _READERS.get(str(given.get("model_type"))) is _internvl else []


def _is_quantized(table: dict[str, Any]) -> bool:
    within = (value for value in table.values() if isinstance(value, dict))
    return table.get(_QUANTIZED) is not None or any(map(_is_quantized, within))


def _read_json(path: Path) -> dict[str, Any]:
    text = read_text(path, _REMEDY)
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON: {error}; {_REMEDY}") from error
    if not isinstance(given, dict):
        raise UserError(f"{path}: must be a table of keys and values; {_REMEDY}")
    return given
