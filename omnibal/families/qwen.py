"""Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL (arXiv 2502.13923), Qwen3-VL (arXiv 2511.21631), and
Qwen3.5 (3.6 and 3.8 share its structure), dense and sparse."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from omnibal.families.text import (
    LayeredText,
    Qwen2Text,
    Qwen3MoeText,
    Qwen3Text,
    RoutedKeys,
    TextTable,
    runs_of,
)
from omnibal.families.vision import (
    CLIP_MEAN,
    CLIP_STD,
    DepthTable,
    Pixels,
    VisionTable,
    pixels,
    video_of,
)
from omnibal.families.whole import WholeTable, read_whole, vision_language
from omnibal.model.config import LanguageConfig, ModelConfig, RopeSections
from omnibal.model.encoders import ImagesEncoder, VideoConfig
from omnibal.model.layers import ExpertsConfig, LayerKind, LinearAttention

_OLDER_PIXELS = Pixels(56 * 56, 128 * 28 * 28 * 128, CLIP_MEAN, CLIP_STD)
"""Pixel limits of Qwen2-VL and Qwen2.5-VL: 3,136 and 12,845,056."""
_NEWER_PIXELS = Pixels(256 * 256, 4096 * 4096)
"""Pixel limits of Qwen3-VL and Qwen3.5."""
_NEWER_VIDEO = VideoConfig(
    min_pixels=4096,
    max_pixels=24_576 * 32 * 32,
    counts_frames=True,
    times="before",
    sampling="ends",
    # Transformers 5 keeps the chat template's; 4.57 removed them.
    around=("<|vision_start|>", "<|vision_end|>"),
)
"""Video of Qwen3-VL and Qwen3.5: pixels of 24,576 tokens over all frames."""


_UNSCALED: dict[str, tuple[str, ...]] = {"default": (), "mrope": ()}
"""Names of unscaled RoPE, including Qwen2-VL's."""


class Sectioned(TextTable):
    """Language model with multimodal RoPE over time, row and column."""

    default_sections: ClassVar[tuple[int, int, int]] = (24, 20, 20)
    interleaves: ClassVar[bool] = True

    @property
    def rope_fields(self) -> dict[str, Any]:
        """RoPE fields of a LanguageConfig."""
        time, rows, columns = self.rope.mrope_section or self.default_sections
        sections = RopeSections(time=time, rows=rows, columns=columns, interleaved=self.interleaves)
        return super().rope_fields | {"rope_sections": sections}


# Bases are ordered so that fields keep their own defaults, not TextTable's.
class Qwen25VLText(Qwen2Text, Sectioned):
    """Language model of Qwen2-VL and Qwen2.5-VL."""

    rope_numbers: ClassVar[Mapping[str, tuple[str, ...]]] = _UNSCALED
    default_theta: ClassVar[float] = 1_000_000.0
    default_sections: ClassVar[tuple[int, int, int]] = (16, 24, 24)
    interleaves: ClassVar[bool] = False
    inner_ties_too: ClassVar[bool] = True


class Qwen2VLVision(DepthTable):
    """Tower of Qwen2-VL: full attention in all layers, ungated feed-forwards."""

    older_names: ClassVar[Mapping[str, str]] = {"in_chans": "in_channels"}
    without_effect: ClassVar[frozenset[str]] = frozenset({"spatial_patch_size"})

    embed_dim: PositiveInt = 1280
    """Width of the layers; `hidden_size` is the projector's output."""
    hidden_act: Literal["quick_gelu"] = "quick_gelu"
    mlp_ratio: PositiveFloat = 4


class Qwen25VLVision(VisionTable):
    """Tower of Qwen2.5-VL: mostly windowed attention (paper, section 2.1.1)."""

    older_names: ClassVar[Mapping[str, str]] = {
        "in_chans": "in_channels",
        "spatial_patch_size": "patch_size",
    }

    hidden_act: Literal["silu"] = "silu"
    window_size: PositiveInt = 112
    tokens_per_second: PositiveFloat = 4
    out_hidden_size: PositiveInt = 3584
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)


class Qwen3VLText(Qwen3Text, Sectioned):
    """Language model of a dense Qwen3-VL."""

    rope_numbers: ClassVar[Mapping[str, tuple[str, ...]]] = _UNSCALED
    default_theta: ClassVar[float] = 500_000.0


class Qwen3VLMoeText(Qwen3MoeText, Sectioned):
    """Language model of a sparse Qwen3-VL; expert weights are always normalised."""

    rope_numbers: ClassVar[Mapping[str, tuple[str, ...]]] = _UNSCALED
    default_theta: ClassVar[float] = 500_000.0

    norm_topk_prob: Literal[True] = True


class Qwen3VLVision(VisionTable):
    """Tower of Qwen3-VL: learned positions and deepstack."""

    hidden_act: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    out_hidden_size: PositiveInt = 3584
    num_position_embeddings: PositiveInt = 2304
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)


class Qwen35Vision(Qwen3VLVision):
    """Tower of Qwen3.5, without deepstack."""

    deepstack_visual_indexes: tuple[int, ...] = Field(default=(), max_length=0)


class HybridText(LayeredText):
    """Language model of Qwen3.5: three gated-delta-rule layers, then one attention layer."""

    older_names: ClassVar[Mapping[str, str]] = {"mtp_num_layers": "mtp_num_hidden_layers"}
    without_effect: ClassVar[frozenset[str]] = TextTable.without_effect | {"mamba_ssm_dtype"}

    intermediate_size: PositiveInt | None = 12_288
    num_key_value_heads: PositiveInt = 4
    head_dim: PositiveInt = 256
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    attn_output_gate: Literal[True] = True
    output_gate_type: Literal["swish", "silu"] = "swish"
    layer_types: tuple[Literal["linear_attention", "full_attention"], ...] | None = None
    full_attention_interval: PositiveInt = 4
    linear_conv_kernel_dim: PositiveInt = 4
    linear_key_head_dim: PositiveInt = 128
    linear_value_head_dim: PositiveInt = 128
    linear_num_key_heads: PositiveInt = 16
    linear_num_value_heads: PositiveInt = 32
    mtp_num_hidden_layers: int = Field(default=0, ge=0)
    mtp_use_dedicated_embeddings: Literal[False] = False
    mlp_only_layers: tuple[int, ...] = Field(default=(), max_length=0)
    """Present but empty in dense releases."""

    @property
    def experts(self) -> ExpertsConfig | None:
        """Experts of every layer, or None if dense."""
        return None

    @property
    def ffn_hidden_size(self) -> int:
        """Width of a dense feed-forward."""
        return self.intermediate_size or self.hidden_size

    @property
    def kinds(self) -> list[LayerKind]:
        """Kind of every layer."""
        linear = LinearAttention(
            key_heads=self.linear_num_key_heads,
            value_heads=self.linear_num_value_heads,
            key_head_size=self.linear_key_head_dim,
            value_head_size=self.linear_value_head_dim,
            convolution_width=self.linear_conv_kernel_dim,
        )
        return [
            LayerKind(linear=None if is_full else linear, experts=self.experts)
            for is_full in self.full_layers(self.full_attention_interval)
        ]

    def language(self, *, tied_head: bool) -> LanguageConfig:
        """Return the language model of the table."""
        return LanguageConfig(
            **self.common_fields,
            kv_heads=self.num_key_value_heads,
            head_size=self.head_dim,
            ffn_hidden_size=self.ffn_hidden_size,
            qk_norm=True,
            output_gate=True,
            tied_head=tied_head,
            prediction_layers=self.mtp_num_hidden_layers,
            runs=runs_of(self.kinds),
        )


class HybridMoeText(RoutedKeys, HybridText):
    """Language model of Qwen3.5 with experts and a gated shared expert in every layer."""

    intermediate_size: PositiveInt | None = None
    shared_expert_intermediate_size: PositiveInt = 512
    norm_topk_prob: Literal[True] = True
    decoder_sparse_step: Literal[1] = 1

    @property
    def experts(self) -> ExpertsConfig | None:
        """Experts of every layer."""
        return self.experts_of(
            self.num_hidden_layers,
            shared_ffn_hidden_size=self.shared_expert_intermediate_size,
            shared_gate=True,
        )

    @property
    def ffn_hidden_size(self) -> int:
        """Width of a dense feed-forward (unused): an expert's."""
        return self.intermediate_size or self.moe_intermediate_size * self.num_experts_per_tok


def read_qwen2_vl(given: dict[str, Any], name: str, path: Path) -> ModelConfig:
    """Read Qwen2-VL, in the format of Qwen2.5-VL."""
    given = _with_text_table(given)
    whole, table, text = read_whole(WholeTable, Qwen2VLVision, Qwen25VLText, given, path)
    text.check_rope()
    sizes = table.sizes_of(table.embed_dim, int(table.embed_dim * table.mlp_ratio))
    encoder = ImagesEncoder(
        **sizes,
        normalization="LayerNorm",
        qkv_bias=True,
        activation="quick_gelu",
        patch_bias=False,
        **pixels(path, sizes, _OLDER_PIXELS),
        video=video_of(path, VideoConfig()),
    )
    return vision_language(name, whole, text, encoder, table.hidden_size)


def read_qwen2_5_vl(given: dict[str, Any], name: str, path: Path) -> ModelConfig:
    """Read Qwen2.5-VL; language keys may be at top level, in a table, or both."""
    given = _with_text_table(given)
    whole, table, text = read_whole(WholeTable, Qwen25VLVision, Qwen25VLText, given, path)
    text.check_rope()
    sizes = table.sizes
    encoder = ImagesEncoder(
        **sizes,
        normalization="RMSNorm",
        qkv_bias=True,
        gated=True,
        patch_bias=False,
        window_pixels=table.window_size,
        full_layers=tuple(sorted(table.fullatt_block_indexes)),
        **pixels(path, sizes, _OLDER_PIXELS),
        video=video_of(path, VideoConfig(positions_per_second=table.tokens_per_second)),
    )
    return vision_language(name, whole, text, encoder, table.out_hidden_size)


_FLAT = frozenset(Qwen25VLText.model_fields) - {"tie_word_embeddings"} | Qwen25VLText.without_effect
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads"),
)


def _with_text_table(given: dict[str, Any]) -> dict[str, Any]:
    """Return the content with language keys in a table, which overrides outer keys (some 4.5x)."""
    outside = {key: value for key, value in given.items() if key not in _FLAT}
    flat = {key: value for key, value in given.items() if key in _FLAT}
    table = given.get("text_config")
    if not isinstance(table, dict):
        return outside | {"text_config": flat if table is None else table}
    for key in _SIZES:
        if key in flat and key in table and flat[key] != table[key]:
            raise ValueError(
                f"{key} is {flat[key]} outside and {table[key]} in text_config; both must be alike"
            )
    return outside


def read_newer(
    text: type[TextTable], vision: type[Qwen3VLVision], given: dict[str, Any], name: str, path: Path
) -> ModelConfig:
    """Read Qwen3-VL, Qwen3.5, 3.6 or 3.8 by the tables of language model and tower."""
    whole, table, language = read_whole(WholeTable, vision, text, given, path)
    language.check_rope()
    sizes = table.sizes
    encoder = ImagesEncoder(
        **sizes,
        normalization="LayerNorm",
        qkv_bias=True,
        activation="gelu_tanh",
        learned_positions=table.num_position_embeddings,
        deepstack_layers=table.deepstack_visual_indexes,
        **pixels(path, sizes, _NEWER_PIXELS),
        video=video_of(path, _NEWER_VIDEO),
    )
    return vision_language(name, whole, language, encoder, table.out_hidden_size)
