"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): latent attention and experts."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from omnibal.families.text import TextTable, runs_of
from omnibal.model.config import LanguageConfig
from omnibal.model.layers import ExpertsConfig, LatentAttention, LayerKind


class SharedExpertsText(TextTable):
    """Language model with dense layers, then layers of routed and shared experts."""

    older_names: ClassVar[Mapping[str, str]] = {"num_local_experts": "n_routed_experts"}
    without_effect: ClassVar[frozenset[str]] = TextTable.without_effect | {
        # Groups restrict the choice of experts, not their number.
        "n_group",
        "topk_group",
    }

    hidden_act: Literal["silu"] = "silu"
    intermediate_size: PositiveInt
    moe_intermediate_size: PositiveInt
    n_routed_experts: PositiveInt
    n_shared_experts: PositiveInt | None
    num_experts_per_tok: PositiveInt | None = None
    routed_scaling_factor: PositiveFloat
    norm_topk_prob: bool = True
    first_k_dense_replace: int = Field(default=1, ge=0)
    num_nextn_predict_layers: int = Field(default=0, ge=0)
    """Prediction layers, present only if the file says so."""

    @property
    def router(self) -> dict[str, Any]:
        """Router fields of an ExpertsConfig."""
        return {"selection_bias": True, "score": "sigmoid"}

    @property
    def experts(self) -> ExpertsConfig:
        """Experts of sparse layers; shared experts are one wide feed-forward."""
        shared = (self.n_shared_experts or 0) * self.moe_intermediate_size
        return ExpertsConfig(
            experts=self.n_routed_experts,
            experts_per_token=self.num_experts_per_tok or 1,
            ffn_hidden_size=self.moe_intermediate_size,
            shared_ffn_hidden_size=shared or None,
            **self.router,
            normalized=self.norm_topk_prob,
            weight_factor=self.routed_scaling_factor,
        )

    def behind_dense(self, dense: LayerKind) -> dict[str, Any]:
        """Fields of a LanguageConfig: some `dense` layers, then expert layers."""
        first = min(self.first_k_dense_replace, self.num_hidden_layers)
        sparse = dense.model_copy(update={"experts": self.experts})
        return {
            **self.common_fields,
            "ffn_hidden_size": self.intermediate_size,
            "prediction_layers": self.num_nextn_predict_layers,
            "runs": runs_of([dense] * first + [sparse] * (self.num_hidden_layers - first)),
        }


class DeepseekText(SharedExpertsText):
    """Keys of V2 and V3, with common defaults."""

    older_names: ClassVar[Mapping[str, str]] = {
        **SharedExpertsText.older_names,
        "num_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    }
    without_effect: ClassVar[frozenset[str]] = SharedExpertsText.without_effect | {
        # Rotated part of a head, also given by qk_rope_head_dim.
        "head_dim",
        "qk_head_dim",
        # Layout of the authors' inference code.
        "ep_size",
    }

    num_key_value_heads: PositiveInt | None = None
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    q_lora_rank: PositiveInt | None = 1536
    kv_lora_rank: PositiveInt = 512
    qk_nope_head_dim: PositiveInt = 128
    qk_rope_head_dim: PositiveInt = 64
    v_head_dim: PositiveInt = 128
    scoring_func: Literal["softmax", "sigmoid"]
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"]
    moe_layer_freq: Literal[1] = 1
    aux_loss_alpha: float = 0.0
    seq_aux: bool = True
    output_router_logits: bool = False

    @property
    def router(self) -> dict[str, Any]:
        """Router fields of an ExpertsConfig."""
        return {"selection_bias": self.topk_method == "noaux_tc", "score": self.scoring_func}

    def language(self, *, tied_head: bool) -> LanguageConfig:
        """Return the language model of the table."""
        latent = LatentAttention(
            query_rank=self.q_lora_rank,
            key_value_rank=self.kv_lora_rank,
            head_size=self.qk_nope_head_dim,
            rotary_head_size=self.qk_rope_head_dim,
            value_head_size=self.v_head_dim,
        )
        return LanguageConfig(
            **self.behind_dense(LayerKind(latent=latent)),
            kv_heads=self.num_attention_heads,
            head_size=self.qk_nope_head_dim,
            tied_head=tied_head,
        )


class DeepseekV2Text(DeepseekText):
    """Table of DeepSeek-V2 and V2-Lite, with a softmax router."""

    scoring_func: Literal["softmax"] = "softmax"
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"


class DeepseekV3Text(DeepseekText):
    """Table of DeepSeek-V3, with a load-balancing bias."""

    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
