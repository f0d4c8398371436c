"""DeepSeek-V2 and V3: latent attention, and a mixture of experts behind some dense layers.

DeepSeek-V2: arXiv 2405.04434; DeepSeek-V3: arXiv 2412.19437. Kimi's language models are of V3.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from omnibal.config import LanguageConfig, ModelConfig
from omnibal.families.hub_table import as_table
from omnibal.families.text import TextTable, runs_of
from omnibal.families.whole import family_model
from omnibal.layers import ExpertsConfig, LatentAttention, LayerKind


class DeepseekText(TextTable):
    """Keys of both, with the defaults that both have."""

    older_names: ClassVar[Mapping[str, str]] = {
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    }
    without_effect: ClassVar[frozenset[str]] = TextTable.without_effect | {
        # Groups restrict which experts may be chosen, not how many.
        "n_group",
        "topk_group",
        # The part of a head that is rotated, which is given by qk_rope_head_dim too.
        "head_dim",
        "qk_head_dim",
        # Layout of the authors' own inference code.
        "ep_size",
    }

    hidden_act: Literal["silu"] = "silu"
    num_key_value_heads: PositiveInt | None = None
    intermediate_size: PositiveInt
    moe_intermediate_size: PositiveInt
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    q_lora_rank: PositiveInt | None = 1536
    kv_lora_rank: PositiveInt = 512
    qk_nope_head_dim: PositiveInt = 128
    qk_rope_head_dim: PositiveInt = 64
    v_head_dim: PositiveInt = 128
    n_routed_experts: PositiveInt
    n_shared_experts: PositiveInt | None
    num_experts_per_tok: PositiveInt | None
    routed_scaling_factor: PositiveFloat
    norm_topk_prob: bool
    scoring_func: Literal["softmax", "sigmoid"]
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"]
    first_k_dense_replace: int = Field(ge=0)
    moe_layer_freq: Literal[1] = 1
    num_nextn_predict_layers: int = Field(default=0, ge=0)
    """Weights of a prediction layer are there only where a file says so."""
    aux_loss_alpha: float = 0.0
    seq_aux: bool = True
    output_router_logits: bool = False

    @property
    def experts(self) -> ExpertsConfig:
        """Experts of the layers behind the dense ones; shared ones are one wide feed-forward."""
        shared = (self.n_shared_experts or 0) * self.moe_intermediate_size
        return ExpertsConfig(
            experts=self.n_routed_experts,
            experts_per_token=self.num_experts_per_tok or 1,
            ffn_hidden_size=self.moe_intermediate_size,
            shared_ffn_hidden_size=shared or None,
            selection_bias=self.topk_method == "noaux_tc",
            score=self.scoring_func,
            normalized=self.norm_topk_prob,
            weight_factor=self.routed_scaling_factor,
        )

    def language(self, *, tied_head: bool) -> LanguageConfig:
        """The language model that the table describes."""
        latent = LatentAttention(
            query_rank=self.q_lora_rank,
            key_value_rank=self.kv_lora_rank,
            head_size=self.qk_nope_head_dim,
            rotary_head_size=self.qk_rope_head_dim,
            value_head_size=self.v_head_dim,
        )
        dense = min(self.first_k_dense_replace, self.num_hidden_layers)
        sparse = self.num_hidden_layers - dense
        kinds = [LayerKind(latent=latent)] * dense
        kinds += [LayerKind(latent=latent, experts=self.experts)] * sparse
        return LanguageConfig(
            **self.common_fields,
            kv_heads=self.num_attention_heads,
            head_size=self.qk_nope_head_dim,
            ffn_hidden_size=self.intermediate_size,
            tied_head=tied_head,
            prediction_layers=self.num_nextn_predict_layers,
            runs=runs_of(kinds),
        )


class DeepseekV2Text(DeepseekText):
    """Table of DeepSeek-V2 and V2-Lite, whose router is a softmax."""

    vocab_size: PositiveInt = 102_400
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 11_008
    moe_intermediate_size: PositiveInt = 1407
    num_hidden_layers: PositiveInt = 32
    num_attention_heads: PositiveInt = 32
    max_position_embeddings: PositiveInt = 2048
    n_routed_experts: PositiveInt = 64
    n_shared_experts: PositiveInt | None = 2
    num_experts_per_tok: PositiveInt | None = None
    routed_scaling_factor: PositiveFloat = 1.0
    norm_topk_prob: bool = False
    scoring_func: Literal["softmax"] = "softmax"
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"
    first_k_dense_replace: int = Field(default=0, ge=0)


class DeepseekV3Text(DeepseekText):
    """Table of DeepSeek-V3, whose experts are chosen with a bias that balances them."""

    vocab_size: PositiveInt = 129_280
    hidden_size: PositiveInt = 7168
    intermediate_size: PositiveInt = 18_432
    moe_intermediate_size: PositiveInt = 2048
    num_hidden_layers: PositiveInt = 61
    num_attention_heads: PositiveInt = 128
    num_key_value_heads: PositiveInt | None = 128
    max_position_embeddings: PositiveInt = 4096
    n_routed_experts: PositiveInt = 256
    n_shared_experts: PositiveInt | None = 1
    num_experts_per_tok: PositiveInt | None = 8
    routed_scaling_factor: PositiveFloat = 2.5
    norm_topk_prob: bool = True
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    first_k_dense_replace: int = Field(default=3, ge=0)


def read_deepseek_v2(given: dict[str, Any], name: str, path: Path) -> ModelConfig:
    """DeepSeek-V2 and V2-Lite."""
    return _text_only(as_table(DeepseekV2Text, given, str(path)), name)


def read_deepseek_v3(given: dict[str, Any], name: str, path: Path) -> ModelConfig:
    """DeepSeek-V3, and Kimi-K2, which is of its structure."""
    return _text_only(as_table(DeepseekV3Text, given, str(path)), name)


def _text_only(table: DeepseekText, name: str) -> ModelConfig:
    return family_model(name, table.language(tied_head=table.is_tied()))
