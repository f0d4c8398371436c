"""Gemma 3 (arXiv 2503.19786): SigLIP, and windowed attention in five of six layers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt

from omnibal.families.hub_table import NoDropout
from omnibal.families.processor import read_processor
from omnibal.families.text import LayeredText, TextTable, runs_of
from omnibal.families.vision import LayersTable, Square, square
from omnibal.families.whole import WholeTable, read_whole, vision_language
from omnibal.model.config import LanguageConfig, ModelConfig
from omnibal.model.encoders import ImagesEncoder, ImageText
from omnibal.model.layers import LayerKind

_IMAGE = ImageText(
    before="\n\n<start_of_image>", each="<image_soft_token>", after="<end_of_image>\n\n"
)


class _Whole(WholeTable):
    mm_tokens_per_image: PositiveInt = 256


class GemmaText(LayeredText):
    older_names: ClassVar[Mapping[str, str]] = {
        "hidden_activation": "hidden_act",
        "_sliding_window_pattern": "sliding_window_pattern",
    }
    without_effect: ClassVar[frozenset[str]] = TextTable.without_effect | {
        "rope_local_base_freq",
        # Scale of attention scores.
        "query_pre_attn_scalar",
    }
    default_theta: ClassVar[float] = 1_000_000.0
    tied_by_default: ClassVar[bool] = True

    intermediate_size: PositiveInt = 9216
    num_key_value_heads: PositiveInt = 4
    head_dim: PositiveInt = 256
    hidden_act: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    attention_bias: Literal[False] = False
    sliding_window: PositiveInt = 4096
    sliding_window_pattern: PositiveInt = 6
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] | None = None
    final_logit_softcapping: None = None
    attn_logit_softcapping: None = None
    use_bidirectional_attention: Literal[False] = False

    def language(self, *, tied_head: bool) -> LanguageConfig:
        """Return the language model of the table."""
        kinds = [
            LayerKind(window=None if is_full else self.sliding_window)
            for is_full in self.full_layers(self.sliding_window_pattern)
        ]
        return LanguageConfig(
            **self.common_fields,
            kv_heads=self.num_key_value_heads,
            head_size=self.head_dim,
            ffn_hidden_size=self.intermediate_size,
            qk_norm=True,
            post_norms=True,
            tied_head=tied_head,
            runs=runs_of(kinds),
        )


class SiglipVision(LayersTable):
    """SigLIP, with its pooling head by default."""

    num_channels: Literal[3] = 3
    image_size: Square = 224
    patch_size: Square = 16
    hidden_act: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    layer_norm_eps: PositiveFloat = 1e-6
    attention_dropout: NoDropout = 0.0
    vision_use_head: bool = True


def read_gemma3(given: dict[str, Any], name: str, path: Path) -> ModelConfig:
    """Gemma 3 of 4B and more."""
    whole, table, text = read_whole(_Whole, SiglipVision, GemmaText, given, path)
    if table.vision_use_head:
        raise ValueError(
            "vision_config has a pooling head, which runs and whose output nothing takes; "
            "vision_use_head must be false, as in releases"
        )
    image = square(table.image_size, "image_size")
    patch = square(table.patch_size, "patch_size")
    side = image // patch
    tokens_per_side = round(whole.mm_tokens_per_image**0.5)
    if tokens_per_side**2 != whole.mm_tokens_per_image or side % tokens_per_side:
        raise ValueError(
            f"mm_tokens_per_image {whole.mm_tokens_per_image} must be a square, of a side that "
            f"divides the {side} patches of an image's"
        )
    sizes = {**table.layer_sizes, "patch_size": patch, "merge_size": side // tokens_per_side}
    given_side = read_processor(path, sizes).side
    if given_side not in (None, image):
        raise ValueError(f"images become squares of side {given_side}; it must be {image}")
    encoder = ImagesEncoder(
        **sizes,
        normalization="LayerNorm",
        norm_eps=table.layer_norm_eps,
        qkv_bias=True,
        qk_norm=False,
        learned_positions=side**2,
        final_norm=True,
        projector="pooled",
        resize="fixed",
        image_text=_IMAGE,
        min_pixels=image**2,
        max_pixels=image**2,
    )
    return vision_language(name, whole, text, encoder, text.hidden_size)
