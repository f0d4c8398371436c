"""Gemma 3 (arXiv 2503.19786): SigLIP, and sliding windows in five of six layers."""

from pathlib import Path
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from omnibal.families.hub_table import NoDropout
from omnibal.families.processor import read_processor
from omnibal.families.text import LayeredText
from omnibal.families.vision import LayersTable, Side, WholeTable
from omnibal.model.encoders import ImagesEncoder
from omnibal.model.layer_kinds import LayerKind


class GemmaTable(WholeTable):
    """Outer table of vision-language models; the text-only 1B model has none."""

    mm_tokens_per_image: PositiveInt = 256


class GemmaText(LayeredText):
    default_theta = 1_000_000.0
    tied_by_default = True
    states_head_size = True

    intermediate_size: PositiveInt = 9216
    num_key_value_heads: PositiveInt = 4
    head_dim: PositiveInt = 256
    sliding_window: PositiveInt = 4096
    sliding_window_pattern: PositiveInt = 6
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] | None = None
    final_logit_softcapping: None = None
    attn_logit_softcapping: None = None

    @property
    def kinds(self) -> list[LayerKind]:
        full = self.full_layers(self.sliding_window_pattern)
        return [LayerKind(window=None if is_full else self.sliding_window) for is_full in full]


class SiglipVision(LayersTable):
    image_size: Side = 224
    patch_size: Side = 16
    layer_norm_eps: PositiveFloat = 1e-6
    attention_dropout: NoDropout = 0.0
    vision_use_head: bool = True  # Transformers' default; releases set false

    def encoder(self, whole: GemmaTable, path: Path) -> ImagesEncoder:
        if self.vision_use_head:
            raise ValueError("vision_config has a pooling head; vision_use_head must be false")
        image = self.image_size
        side = image // self.patch_size  # in patches
        tokens_per_side = round(whole.mm_tokens_per_image**0.5)
        if tokens_per_side**2 != whole.mm_tokens_per_image or side % tokens_per_side:
            raise ValueError(f"mm_tokens_per_image must be a square of a divisor of {side}")
        fields = {**self.parts, "merge_size": side // tokens_per_side}
        given_side = read_processor(path, fields).side
        if given_side not in (None, image):
            raise ValueError(f"images become squares of side {given_side}; it must be {image}")
        return ImagesEncoder(
            **fields, learned_positions=side**2, min_pixels=image**2, max_pixels=image**2
        )
