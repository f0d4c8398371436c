"""Llama, Qwen2 and Qwen3 as text-only models, which are trained too."""

from pathlib import Path
from typing import Any

from omnibal.config import ChatTemplate, ModelConfig
from omnibal.families.hub_table import as_table
from omnibal.families.text import GroupedText, LlamaText, Qwen2Text, Qwen3MoeText, Qwen3Text

_TRAINED_ROPES = ("default", "dynamic", "llama3")


def read_llama(given: dict[str, Any], name: str, path: Path) -> ModelConfig:
    """Llama."""
    return _read(LlamaText, given, name, path, "llama3")


def read_qwen2(given: dict[str, Any], name: str, path: Path) -> ModelConfig:
    """Qwen2 and Qwen2.5."""
    return _read(Qwen2Text, given, name, path, "qwen2.5")


def read_qwen3(given: dict[str, Any], name: str, path: Path) -> ModelConfig:
    """Qwen3, dense."""
    return _read(Qwen3Text, given, name, path, "tokenizer")


def read_qwen3_moe(given: dict[str, Any], name: str, path: Path) -> ModelConfig:
    """Qwen3 with experts."""
    return _read(Qwen3MoeText, given, name, path, "tokenizer")


def _read(
    kind: type[GroupedText], given: dict[str, Any], name: str, path: Path, template: ChatTemplate
) -> ModelConfig:
    table = as_table(kind, given, str(path))
    if table.rope_kind not in _TRAINED_ROPES:
        # These families are trained, where another scaling would be another model.
        raise ValueError(
            f"RoPE of type {table.rope_kind!r} is not trained; it must be one of "
            f"{', '.join(_TRAINED_ROPES)}: without the scaling, times and memory are the same"
        )
    language = table.language(tied_head=table.is_tied())
    return ModelConfig(name=name, language=language, chat_template=template)
