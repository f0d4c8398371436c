"""GLM-4.5V and 4.6V: a tower with a gated projector, and the language model of GLM-4.5-Air.

arXiv 2507.01006; structures are those of Transformers' modules.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from omnibal.config import LanguageConfig, ModelConfig
from omnibal.encoders import ImagesEncoder, ImageText, VideoConfig
from omnibal.families.hub_table import NoDropout, as_table
from omnibal.families.text import TextTable, runs_of
from omnibal.families.vision import VisionTable, pixels, square
from omnibal.families.whole import WholeTable, inner, vision_language
from omnibal.layers import ExpertsConfig, LayerKind

_PIXELS = {"least": 112 * 112, "most": 14 * 14 * 2 * 2 * 2 * 6144}
"""Of the released models, over the two frames that an image counts as."""
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
"""Two frames a second of five minutes at most."""


class _Whole(WholeTable):
    inner_ties_too: ClassVar[bool] = True


class GlmVision(VisionTable):
    without_effect: ClassVar[frozenset[str]] = frozenset({"hidden_dropout_prob"})

    depth: PositiveInt = 24
    hidden_size: PositiveInt = 1536
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    attention_dropout: NoDropout = 0.0
    num_heads: PositiveInt = 12
    image_size: PositiveInt | list[PositiveInt] = 336
    patch_size: PositiveInt | list[PositiveInt] = 14
    rms_norm_eps: PositiveFloat = 1e-5
    out_hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 13_696


class GlmText(TextTable):
    older_names: ClassVar[Mapping[str, str]] = {"num_local_experts": "n_routed_experts"}
    without_effect: ClassVar[frozenset[str]] = TextTable.without_effect | {
        "n_group",
        "topk_group",
        "router_aux_loss_coef",
        "output_router_logits",
    }

    vocab_size: PositiveInt = 151_424
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 10_944
    num_hidden_layers: PositiveInt = 46
    num_attention_heads: PositiveInt = 96
    num_key_value_heads: PositiveInt = 8
    head_dim: PositiveInt | None = None
    max_position_embeddings: PositiveInt = 65_536
    rms_norm_eps: PositiveFloat = 1e-5
    hidden_act: Literal["silu"] = "silu"
    attention_bias: bool = True
    use_qk_norm: Literal[False] = False
    moe_intermediate_size: PositiveInt = 1408
    num_experts_per_tok: PositiveInt = 8
    n_shared_experts: PositiveInt = 1
    n_routed_experts: PositiveInt = 128
    routed_scaling_factor: PositiveFloat = 1.0
    first_k_dense_replace: int = Field(default=1, ge=0)
    norm_topk_prob: bool = True
    num_nextn_predict_layers: int = Field(default=0, ge=0)

    def language(self, *, tied_head: bool) -> LanguageConfig:
        """The language model that the table describes."""
        experts = ExpertsConfig(
            experts=self.n_routed_experts,
            experts_per_token=self.num_experts_per_tok,
            ffn_hidden_size=self.moe_intermediate_size,
            shared_ffn_hidden_size=self.n_shared_experts * self.moe_intermediate_size,
            selection_bias=True,
            score="sigmoid",
            normalized=self.norm_topk_prob,
            weight_factor=self.routed_scaling_factor,
        )
        dense = min(self.first_k_dense_replace, self.num_hidden_layers)
        kinds = [LayerKind()] * dense
        kinds += [LayerKind(experts=experts)] * (self.num_hidden_layers - dense)
        return LanguageConfig(
            **self.common_fields,
            kv_heads=self.num_key_value_heads,
            head_size=self.head_dim,
            ffn_hidden_size=self.intermediate_size,
            qkv_bias=self.attention_bias,
            qk_norm=False,
            tied_head=tied_head,
            prediction_layers=self.num_nextn_predict_layers,
            runs=runs_of(kinds),
        )


def read_glm4v_moe(given: dict[str, Any], name: str, path: Path) -> ModelConfig:
    """GLM-4.5V and GLM-4.6V."""
    whole = as_table(_Whole, given, str(path))
    table = as_table(GlmVision, whole.vision_config, inner(path, "vision_config"))
    text = as_table(GlmText, whole.text_config, inner(path, "text_config"))
    sizes = table.sizes
    if table.hidden_size % table.num_heads:
        raise ValueError(f"hidden_size {table.hidden_size} must divide by {table.num_heads} heads")
    side = square(table.image_size, "image_size") // sizes["patch_size"]
    encoder = ImagesEncoder(
        # Of its layers' feed-forwards the width is the projector's output; intermediate_size is
        # that of the projector's.
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
        **pixels(path, sizes, **_PIXELS),
        resize="repeated",
        image_text=_IMAGE,
        video=_VIDEO,
    )
    return vision_language(name, whole, text, encoder, table.out_hidden_size)
