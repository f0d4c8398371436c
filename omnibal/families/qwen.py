"""Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL (arXiv 2502.13923), Qwen3-VL (arXiv 2511.21631), and
Qwen3.5 (3.6 and 3.8 share its structure), dense and sparse. LLaVA-OneVision-1.5 (arXiv 2509.23661)
has a tower like Qwen2-VL's, and Qwen3.
"""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from omnibal.families import text
from omnibal.families.hub_table import HubTable
from omnibal.families.vision import DepthTable, VisionTable, read_vision_language
from omnibal.model.config import ModelConfig, RopeSections
from omnibal.model.encoders import VideoConfig
from omnibal.model.layer_kinds import ExpertsConfig, LayerKind, LinearAttention

_UNSCALED: dict[str, tuple[str, ...]] = {"default": (), "mrope": ()}  # "mrope" is Qwen2-VL's
_SortedLayers = Annotated[tuple[int, ...], AfterValidator(lambda layers: tuple(sorted(layers)))]
_ROTATED_SHARE = 0.25  # of a head, Transformers' default of Qwen3.5


class SectionedText(text.TextTable):
    """Language model with multimodal RoPE over time, row and column."""

    default_sections: ClassVar[tuple[int, int, int]] = (24, 20, 20)
    interleaves: ClassVar[bool] = True

    @property
    def rope_fields(self) -> dict[str, Any]:
        time, rows, columns = self.rope.mrope_section or self.default_sections
        sections = RopeSections(time=time, rows=rows, columns=columns, interleaved=self.interleaves)
        return super().rope_fields | {"rope_sections": sections}


# Pydantic takes the first base's fields: Qwen2Text's defaults, not TextTable's.
class Qwen25VLText(text.Qwen2Text, SectionedText):
    """Language model of Qwen2-VL and Qwen2.5-VL."""

    rope_numbers = _UNSCALED
    default_theta = 1_000_000.0
    default_sections = (16, 24, 24)
    interleaves = False
    inner_ties_too = True


class Qwen2VLVision(DepthTable):
    """Tower of Qwen2-VL: full attention in all layers, ungated feed-forwards."""

    output_key = "hidden_size"

    embed_dim: PositiveInt = 1280  # width of the layers; `hidden_size` is the projector's output
    mlp_ratio: PositiveFloat = 4

    @property
    def parts(self) -> dict[str, Any]:
        return super().parts | {"ffn_hidden_size": int(self.embed_dim * self.mlp_ratio)}


class Qwen25VLVision(VisionTable):
    """Tower of Qwen2.5-VL: mostly windowed attention (paper, section 2.1.1)."""

    output_key = "out_hidden_size"

    window_size: PositiveInt = 112
    tokens_per_second: PositiveFloat = 4
    out_hidden_size: PositiveInt = 3584
    fullatt_block_indexes: _SortedLayers = (7, 15, 23, 31)

    @property
    def video(self) -> VideoConfig:
        return VideoConfig(positions_per_second=self.tokens_per_second)


class LlavaText(text.Qwen3Text):
    rope_numbers = None


class RiceVit(VisionTable):  # of LLaVA-OneVision-1.5
    output_key = "text_hidden_size"

    layer_norm_eps: PositiveFloat = 1e-5
    text_hidden_size: PositiveInt = 2560


class Qwen3VLText(text.Qwen3Text, SectionedText):
    rope_numbers = _UNSCALED
    default_theta = 500_000.0


class Qwen3VLMoeText(text.Qwen3MoeText, SectionedText):
    rope_numbers = _UNSCALED
    default_theta = 500_000.0


class Qwen3VLVision(VisionTable):
    """Tower of Qwen3-VL: learned positions and deepstack."""

    output_key = "out_hidden_size"

    out_hidden_size: PositiveInt = 3584
    num_position_embeddings: PositiveInt = 2304
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)


class Qwen35Vision(Qwen3VLVision):
    """Tower of Qwen3.5: without deepstack."""


# Pydantic takes the first base's fields.
class HybridText(text.LayeredText, SectionedText):
    """Language model of Qwen3.5: three gated-delta-rule layers, then one attention layer."""

    states_head_size = True
    rope_numbers = _UNSCALED
    default_sections = (11, 11, 10)  # of the first quarter of a head

    intermediate_size: PositiveInt | None = 12_288
    num_key_value_heads: PositiveInt = 4
    head_dim: PositiveInt = 256
    layer_types: tuple[Literal["linear_attention", "full_attention"], ...] | None = None
    full_attention_interval: PositiveInt = 4
    linear_conv_kernel_dim: PositiveInt = 4
    linear_key_head_dim: PositiveInt = 128
    linear_value_head_dim: PositiveInt = 128
    linear_num_key_heads: PositiveInt = 16
    linear_num_value_heads: PositiveInt = 32
    mtp_num_hidden_layers: int = Field(default=0, ge=0)

    def check_rotated_share(self, share: float | None) -> None:
        """Raise ValueError if sections are of another share of a head."""
        share = share or _ROTATED_SHARE
        sections = self.rope_fields["rope_sections"]
        rotated = 2 * (sections.time + sections.rows + sections.columns)
        if rotated != int(self.head_dim * share):
            raise ValueError(
                f"mrope_section rotates {rotated} of {self.head_dim} values of a head, and "
                f"partial_rotary_factor {share} {int(self.head_dim * share)}; they must be equal"
            )

    @property
    def experts(self) -> ExpertsConfig | None:
        """Experts of every layer, or None if dense."""
        return None

    @property
    def kinds(self) -> list[LayerKind]:
        linear = LinearAttention(**self.fields_of("linear"))
        return [
            LayerKind(linear=None if is_full else linear, experts=self.experts)
            for is_full in self.full_layers(self.full_attention_interval)
        ]

    @property
    def parts(self) -> dict[str, Any]:
        width = self.intermediate_size or self.hidden_size
        return super().parts | {"ffn_hidden_size": width}


class HybridMoeText(text.RoutedKeys, HybridText):
    """Language model of Qwen3.5 with experts and a gated shared expert in every layer."""

    intermediate_size: PositiveInt | None = None
    shared_expert_intermediate_size: PositiveInt = 512

    @property
    def experts(self) -> ExpertsConfig | None:
        return self.experts_of(self.num_hidden_layers, shared_gate=True)

    @property
    def parts(self) -> dict[str, Any]:
        # No layer is dense, but a LanguageConfig needs a width.
        width = self.intermediate_size or self.moe_intermediate_size * self.num_experts_per_tok
        return super().parts | {"ffn_hidden_size": width}


_LANGUAGE_KEYS = {
    *(set(Qwen25VLText.model_fields) - {"tie_word_embeddings"}),
    *Qwen25VLText.section().must,
    *Qwen25VLText.section().ignored - HubTable.section().ignored,
}
_SIZE_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads"),
)


def read_flat(
    vision: type[DepthTable], given: dict[str, Any], name: str, path: Path
) -> ModelConfig:
    """Return a Qwen2(.5)-VL; language keys are in the outer table, in text_config, or in both."""
    outer = {key: value for key, value in given.items() if key not in _LANGUAGE_KEYS}
    flat = {key: value for key, value in given.items() if key in _LANGUAGE_KEYS}
    table = given.get("text_config")
    if not isinstance(table, dict):
        outer |= {"text_config": flat if table is None else table}
    else:
        # Some Transformers 4.5x write both; the inner table is read.
        for key in _SIZE_KEYS:
            if key in flat and key in table and flat[key] != table[key]:
                raise ValueError(f"{key} is {flat[key]}, but {table[key]} in text_config")
    return read_vision_language(vision, Qwen25VLText, outer, name, path)
