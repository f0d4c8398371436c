"""GPT-2, GPT-OSS, MPT and Nemotron-4."""

from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from omnibal.families.text import LayeredText, TextTable, read_text
from omnibal.model.config import ModelConfig
from omnibal.model.layer_kinds import ExpertsConfig, LayerKind


class PlainText(TextTable):
    """Dense model, by tables.toml alone."""

    rms_norm_eps: PositiveFloat = 1e-5

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes of a LanguageConfig."""
        width = self.intermediate_size or 4 * self.hidden_size
        return super().sizes | {"ffn_hidden_size": width}


class Gpt2Text(PlainText):
    """Table of GPT-2."""

    tied_by_default = True


class MptText(PlainText):
    """Table of MPT, with its table of attention keys joined."""

    tied_by_default = True


class NemotronText(PlainText):
    """Table of Nemotron-4."""


def read_mpt(given: dict[str, Any], name: str, path: Path) -> ModelConfig:
    """Read a file of MPT."""
    attention = given.get("attn_config")
    given = given | attention if isinstance(attention, dict) else given
    return read_text(MptText, given, name, path)


class GptOssText(PlainText, LayeredText):
    """Table of GPT-OSS: experts in all layers, windows in every other one."""

    intermediate_size: PositiveInt
    num_local_experts: PositiveInt
    num_experts_per_tok: PositiveInt
    sliding_window: PositiveInt = 128
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] | None = None

    @property
    def kinds(self) -> list[LayerKind]:
        """Kind of every layer."""
        experts = ExpertsConfig(
            experts=self.num_local_experts,
            experts_per_token=self.num_experts_per_tok,
            ffn_hidden_size=self.intermediate_size,
        )
        windows = (None if full else self.sliding_window for full in self.full_layers(2))
        return [LayerKind(window=window, experts=experts) for window in windows]
