"""GLM-4.5V and 4.6V (arXiv 2507.01006): a gated projector, and GLM-4.5-Air."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt

from omnibal.families.deepseek import SharedExpertsText
from omnibal.families.hub_table import NoDropout
from omnibal.families.vision import CLIP_MEAN, CLIP_STD, Pixels, Square, VisionTable, pixels, square
from omnibal.families.whole import WholeTable, read_whole, vision_language
from omnibal.model.config import LanguageConfig, ModelConfig
from omnibal.model.encoders import ImagesEncoder, ImageText, VideoConfig
from omnibal.model.layers import LayerKind

_PIXELS = Pixels(112 * 112, 14 * 14 * 2 * 2 * 2 * 6144, CLIP_MEAN, CLIP_STD)
"""Pixel limits of the released models, over the two frames an image counts as."""
_IMAGE = ImageText(before="<|begin_of_image|>", each="<|image|>", after="<|end_of_image|>")
_VIDEO = VideoConfig(
    max_frames=600,
    min_pixels=112 * 112,
    max_pixels=28 * 28 * 2 * 30_000,
    counts_frames=True,
    text=_IMAGE,
    times="after",
    around=("<|begin_of_video|>", "<|end_of_video|>"),
)
"""Two frames per second for up to five minutes."""


class GlmVision(VisionTable):
    without_effect: ClassVar[frozenset[str]] = frozenset({"hidden_dropout_prob"})

    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    attention_dropout: NoDropout = 0.0
    image_size: Square = 336
    rms_norm_eps: PositiveFloat = 1e-5
    out_hidden_size: PositiveInt = 4096


class GlmText(SharedExpertsText):
    inner_ties_too: ClassVar[bool] = True
    without_effect: ClassVar[frozenset[str]] = SharedExpertsText.without_effect | {
        "router_aux_loss_coef",
        "output_router_logits",
    }

    num_key_value_heads: PositiveInt = 8
    head_dim: PositiveInt | None = None
    attention_bias: bool = True
    use_qk_norm: Literal[False] = False

    def language(self, *, tied_head: bool) -> LanguageConfig:
        """Return the language model of the table."""
        return LanguageConfig(
            **self.behind_dense(LayerKind()),
            kv_heads=self.num_key_value_heads,
            head_size=self.head_dim,
            qkv_bias=self.attention_bias,
            tied_head=tied_head,
        )


def read_glm4v_moe(given: dict[str, Any], name: str, path: Path) -> ModelConfig:
    """GLM-4.5V and GLM-4.6V."""
    whole, table, text = read_whole(WholeTable, GlmVision, GlmText, given, path)
    sizes = table.sizes
    if table.hidden_size % table.num_heads:
        raise ValueError(f"hidden_size {table.hidden_size} must divide by {table.num_heads} heads")
    side = square(table.image_size, "image_size") // sizes["patch_size"]
    encoder = ImagesEncoder(
        # The layers' feed-forward width is out_hidden_size; intermediate_size is the projector's.
        **sizes | {"ffn_hidden_size": table.out_hidden_size},
        normalization="RMSNorm",
        norm_eps=table.rms_norm_eps,
        qkv_bias=False,
        bias=False,
        gated=True,
        embed_norm=True,
        final_norm=True,
        learned_positions=side**2,
        projector="gated",
        projector_hidden_size=table.intermediate_size,
        **pixels(path, sizes, _PIXELS),
        resize="repeated",
        image_text=_IMAGE,
        video=_VIDEO,
    )
    return vision_language(name, whole, text, encoder, table.out_hidden_size)
