"""Text configs of DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437)."""

from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt

from omnibal.families.text import TextTable
from omnibal.model.layer_kinds import ExpertsConfig, LatentAttention, LayerKind


class SharedExpertsText(TextTable):
    """Keys of a text model: dense layers, then layers with routed and shared experts."""

    intermediate_size: PositiveInt
    moe_intermediate_size: PositiveInt
    n_routed_experts: PositiveInt
    n_shared_experts: PositiveInt | None
    num_experts_per_tok: PositiveInt | None = None
    routed_scaling_factor: PositiveFloat
    norm_topk_prob: bool = True
    first_k_dense_replace: int = Field(default=1, ge=0)
    num_nextn_predict_layers: int = Field(default=0, ge=0)

    @property
    def router(self) -> dict[str, Any]:
        """Router fields of an ExpertsConfig: GLM's, unless overridden."""
        return {"selection_bias": True, "score": "sigmoid"}

    @property
    def dense(self) -> LayerKind:
        """Kind of the dense layers; layers with experts have the same attention."""
        return LayerKind()

    @property
    def kinds(self) -> list[LayerKind]:
        # n shared experts see every token: one SwiGLU of n times the width.
        shared = (self.n_shared_experts or 0) * self.moe_intermediate_size
        experts = ExpertsConfig(
            **self.fields_of("experts"),
            **self.router,
            experts_per_token=self.num_experts_per_tok or 1,
            shared_ffn_hidden_size=shared or None,
        )
        first = min(self.first_k_dense_replace, self.num_hidden_layers)
        sparse = self.dense.model_copy(update={"experts": experts})
        return [self.dense] * first + [sparse] * (self.num_hidden_layers - first)


class DeepseekText(SharedExpertsText):
    """Keys shared by V2 and V3: multi-head latent attention (MLA) and the router."""

    q_lora_rank: PositiveInt | None = 1536
    kv_lora_rank: PositiveInt = 512
    qk_nope_head_dim: PositiveInt = 128
    qk_rope_head_dim: PositiveInt = 64
    v_head_dim: PositiveInt = 128
    scoring_func: str
    topk_method: str

    @property
    def router(self) -> dict[str, Any]:
        # "noaux_tc": auxiliary-loss-free balancing by a bias per expert.
        return {"selection_bias": self.topk_method == "noaux_tc", "score": self.scoring_func}

    @property
    def dense(self) -> LayerKind:
        return LayerKind(latent=LatentAttention(**self.fields_of("latent")))


class DeepseekV2Text(DeepseekText):
    """DeepSeek-V2 and V2-Lite: softmax router."""


class DeepseekV3Text(DeepseekText):
    """DeepSeek-V3: sigmoid router with a load-balancing bias."""
