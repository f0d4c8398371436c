"""GPT-2, GPT-OSS, MPT and Nemotron-4."""

from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveInt

from omnibal.families.text import LayeredText, TextTable, read_language_model
from omnibal.model.config import ModelConfig
from omnibal.model.layer_kinds import ExpertsConfig, LayerKind


class PlainText(TextTable):
    """Keys shared by GPT families; sections of tables.toml hold their differences."""

    @property
    def parts(self) -> dict[str, Any]:
        width = self.intermediate_size or 4 * self.hidden_size
        return super().parts | {"ffn_hidden_size": width}


class Gpt2Text(PlainText):
    tied_by_default = True


class MptText(PlainText):
    tied_by_default = True


class NemotronText(PlainText):
    """Nemotron-4; tables.toml has a section for the class."""


def read_mpt(given: dict[str, Any], name: str, path: Path) -> ModelConfig:
    """Return an MPT model, with keys of its inner table `attn_config` read as outer keys."""
    attention = given.get("attn_config")
    given = given | attention if isinstance(attention, dict) else given
    return read_language_model(MptText, given, name, path)


class GptOssText(PlainText, LayeredText):
    """GPT-OSS: experts in all layers, sliding windows in every other layer."""

    intermediate_size: PositiveInt
    num_local_experts: PositiveInt
    num_experts_per_tok: PositiveInt
    sliding_window: PositiveInt = 128
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] | None = None

    @property
    def kinds(self) -> list[LayerKind]:
        experts = ExpertsConfig(**self.fields_of("experts"))
        windows = (None if full else self.sliding_window for full in self.full_layers(2))
        return [LayerKind(window=window, experts=experts) for window in windows]
